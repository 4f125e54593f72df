"""`save_checkpoint` of an attached engine: DeepSpeed's own files, whole and on disk before any
name says so.

Order: DeepSpeed writes into a folder aside; every rank writes its random states and syncs its
files and the folder; all agree; rank 0 writes and syncs the manifest, renames the folder, and
moves the pointers."""

import copy
import dataclasses
import pickle
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron_ucp.core.box import flat_index, strides
from megatron_ucp.core.experts import in_own_file
from megatron_ucp.core.grouping import grouped
from megatron_ucp.core.layers import TIED
from megatron_ucp.core.layout import Layout, Replicate, Shard, ShardNC
from megatron_ucp.core.manifest import (
    MOVED_LATEST,
    RECORDED,
    RENAMED,
    RUN,
    TAG,
    Manifest,
)
from megatron_ucp.core.mesh import DENSE_CUT, Mesh
from megatron_ucp.engines import resume_state
from megatron_ucp.engines.background import Background, background_of, begun_or_warned
from megatron_ucp.engines.deepspeed.live import LiveEngine, describe, held_by
from megatron_ucp.engines.deepspeed.optimizer import (
    Wrapper,
    in_the_middle,
    micro_batches,
    wrapper_of,
)
from megatron_ucp.engines.deepspeed.state import (
    BATCH,
    CLASS,
    MIDDLE,
    batch_of,
    check_states,
    class_of,
    saved_by_caller,
    saved_by_engine,
    states_of,
)
from megatron_ucp.engines.hold import HoldOptions, LentRun, RankValues, lent
from megatron_ucp.engines.live import recorded_settings, require_usable
from megatron_ucp.engines.pt_files import RankFiles, replicas_of
from megatron_ucp.engines.record import run_of
from megatron_ucp.engines.resume_state import STEPS
from megatron_ucp.engines.save import (
    BACKGROUND,
    STOCK,
    SaveOptions,
    SaveReport,
    as_save_error,
    position_of,
    require_left,
    require_one_save,
    require_unstepped,
    where_to,
)
from megatron_ucp.engines.save_frame import (
    PendingSave,
    files_of_rank,
    flat,
    saved_as_taken,
    write_beside,
)
from megatron_ucp.engines.values import (
    LiveValues,
    inert,
    members_by_value,
    named_in,
    names_of,
    refuse_strange,
)
from megatron_ucp.errors import SaveError
from megatron_ucp.families.family import Declared, Model
from megatron_ucp.families.settings import recorded
from megatron_ucp.formats import output_folder, per_rank
from megatron_ucp.formats.checkpoint import Extras
from megatron_ucp.formats.deepspeed.files import CLASSES, COUNTERS, MEMBERS, at_tp
from megatron_ucp.formats.deepspeed.tp_patterns import (
    SUB_PARAMS,
    VOCABULARY,
    fused,
    kind_of,
    sub_shape,
)
from megatron_ucp.formats.loss_scale import LossScale
from megatron_ucp.formats.param_groups import GROUP_MARKS
from megatron_ucp.formats.per_rank import PerRank
from megatron_ucp.formats.schedules import of_all_stages
from megatron_ucp.formats.tags import LATEST
from megatron_ucp.reshard import agree

# ---- stock info
#
# `universal_checkpoint_info` for a family's model, so that stock DeepSpeed's own tools keep
# working on our saves.


# Where an affine map matches, stock's converter leaves out how a parameter is cut, and its load
# then cuts it on dim 0: wrong without an error for row-parallel and gated weights. Their patterns
# alone serve both directions.
_ON_SEVERAL_STAGES = "pipeline_replicated_parameter_patterns"
_CUT_BY_DEFAULT = (Replicate(), Shard(*DENSE_CUT, 0))


def info_of(model: Model, tp: int, pipe: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The dict that DeepSpeed merges into the model files: patterns for its old converters, the
    affine map for the new. `pipe` maps a pipeline's names to canonical ones: stock's tools know
    only the former.

    Empty where no pattern can say how a parameter is cut: without the dict stock's converter stops,
    and with it would cut that one on dim 0."""
    from deepspeed.checkpoint.affine import AFFINE_MAP_FORMAT_VERSION

    table = (
        {name: model.table[canonical] for name, canonical in pipe.items()} if pipe else model.table
    )
    kinds = {name: kind_of(declared.layout) for name, declared in table.items()}
    if None in kinds.values():
        return {}
    rows = model.sizes.vocab  # stock has one size for all of them, and cuts what it merged to it
    vocabulary = [
        name
        for name, declared in table.items()
        if declared.extent is not None and declared.extent.stored == rows and kinds[name] == ""
    ]
    tied = [name for name in table if name.startswith(f"{TIED}.")] if pipe else []
    lists = {_ON_SEVERAL_STAGES: tied, VOCABULARY: vocabulary, **_by_kind(kinds)}
    return {
        "universal_checkpoint_version": 0.4,
        "original_vocab_size": rows,  # padding rows are data here
        **{kind: _patterns(names) for kind, names in lists.items() if names},
        **_sub_params({n: d for n, d in table.items() if kinds[n] == SUB_PARAMS}),
        "affine_map": {
            "version": AFFINE_MAP_FORMAT_VERSION,
            "params": {
                re.escape(n) + "$": _affine(n, d.shape, d.layout, tp)
                for n, d in table.items()
                if n not in vocabulary and d.layout in _CUT_BY_DEFAULT
            },
        },
    }


def _by_kind(kinds: Mapping[str, str | None]) -> dict[str, list[str]]:
    """The names in each of stock's lists of patterns; sub-parameters are no patterns alone."""
    return grouped((kind, name) for name, kind in kinds.items() if kind and kind != SUB_PARAMS)


def _sub_params(table: Mapping[str, Declared]) -> dict[str, Any]:
    """The list of fused parameters that are no two halves, those with the same parts together."""
    alike = grouped(
        (sub_shape(declared.layout, declared.shape), name)
        for name, declared in table.items()
        if isinstance(declared.layout, ShardNC)
    )
    entries = [fused(_patterns(names), cut) for cut, names in alike.items()]
    return {SUB_PARAMS: entries} if entries else {}


def empty_extra_state(_module: Any, state: dict[str, Any], *_: Any) -> None:
    """A state-dict hook: megatron-core's `_extra_state` is None, on which stock's converter fails;
    it takes an empty tensor, and megatron-core ignores what it is given back."""
    import torch

    for name in [
        name for name, value in state.items() if value is None and name.endswith("_extra_state")
    ]:
        state[name] = torch.empty(0)


def _patterns(names: Iterable[str]) -> list[str]:
    """Anchored patterns in which layer numbers are free: stock matches at the start of a name
    only."""
    return sorted({re.sub(r"\\\.\d+\\\.", r"\\.\\d+\\.", re.escape(name)) + "$" for name in names})


def _affine(name: str, shape: tuple[int, ...], layout: Layout, tp: int) -> dict[str, Any]:
    from deepspeed.checkpoint.affine import AffinePiece, ParamAffineMap

    pieces: dict[int, list[Any]] = {}
    shards: dict[int, list[int]] = {}
    everyone = range(tp) if isinstance(layout, Replicate) else None
    for rank in range(tp):
        held = layout.pieces(name, shape, Mesh(tp=tp).place(at_tp(rank)))
        shards[rank] = list(held[0].view)
        pieces[rank] = [
            AffinePiece(
                p.full.shape,
                flat_index(p.full.start, shape),
                strides(shape),
                p.flat_start,
                p.strides,
                everyone or [rank],
            )
            for p in held
        ]
    return ParamAffineMap(logical_shape=shape, shard_shapes=shards, pieces_by_rank=pieces).to_dict()


# ---- the run, apart from elements
#
# What a DeepSpeed engine is besides tensors, found on all ranks: what a save writes beside them,
# and what a resize takes along.


@dataclass(frozen=True)
class Besides:
    """This rank's values, what of them differs from rank to rank, and how many micro-batches came
    since the last step (None: no gradient waits for one)."""

    own: LiveValues
    apart: PerRank
    waiting: int | None

    @property
    def notes(self) -> list[str]:
        """About what no load on another mesh gets."""
        notes: list[str] = []
        if self.waiting is not None:
            notes.append(
                "the save came in the middle of an accumulation: the gradients of "
                f"{self.waiting or 'some'} micro-batches since the last step are not in it"
            )
        if self.apart:
            notes.append(f"differs from rank to rank, and is kept for each: {self.apart}")
        return notes


def besides(live: LiveEngine, client_state: Any) -> Besides:
    """Collective. Raises SaveError."""
    engine = live.engine
    waiting = micro_batches(engine) if in_the_middle(engine, live.wrapper) else None
    with agree.together() as told:
        own = _live_values(live, client_state)
        told.value = own.digest()
    return Besides(own, own.differing(told.values), waiting)


def _live_values(live: LiveEngine, client_state: Any) -> LiveValues:
    engine = live.engine
    buffers = {n: v.tensor for n, v in live.own.values.items() if v.kind == "buffer"}
    scheduler = None if engine.lr_scheduler is None else engine.lr_scheduler.state_dict()
    compared = bool(client_state) or live.wrapper.zero == 3
    own = live.own
    groups = [
        (f"param_groups[{number}][{key!r}] of stage {own.number}", value)
        for number, group in enumerate(own.param_groups)
        for key, value in group.items()
        if key not in GROUP_MARKS
    ]
    held = {**buffers, **states_of(engine.module)}
    return LiveValues(held, client_state, scheduler, compared, dict(groups), own.number)


def said_of(live: LiveEngine, found: Besides) -> dict[str, Any]:
    """What a manifest says of the engine besides what it holds; what says nothing is left out."""
    import deepspeed

    engine, model = live.engine, live.own.model
    kept = [one.value for one in saved_by_engine(engine)]
    module = engine.module
    optional = {
        RECORDED: recorded_settings(module) if model is None else recorded(model.sizes, module),
        RENAMED: live.own.renamed,
        CLASSES: sorted({*named_in(kept), *names_of(kept)}),
        MEMBERS: list(dict.fromkeys(members_by_value(kept))),
        CLASS: class_of(engine.lr_scheduler),
    }
    middle = {} if found.waiting is None else {MIDDLE: found.waiting}
    return {
        resume_state.STEPS: engine.global_steps,
        "skipped_steps": engine.skipped_steps,
        BATCH: batch_of(engine),
        resume_state.SEED: torch.initial_seed(),
        "ds_version": deepspeed.__version__,
        RUN: run_of(engine).id,
        per_rank.PER_RANK: found.apart.as_value() if found.apart else {},
        **middle,
        **{key: value for key, value in optional.items() if value},
    }


# ---- the run that a resize moves from
#
# A DeepSpeed engine as a run that a resize moves from.


def taken(engine: Any, model: Model | None, how: HoldOptions, values_left: bool) -> LentRun:
    """Takes an engine as it is; nothing in it is changed. `values_left` as of `SaveOptions`.
    Collective. Raises a UcpError on every rank."""
    with agree.together():
        require_usable(engine)
        check_states(engine)
        refuse_strange(saved_by_caller(how.client_state, engine, None))
        refuse_strange(saved_by_engine(engine), left=values_left)
    live = describe(engine, model, present=True)
    found = besides(live, how.client_state)
    stages = agree.collect(lambda: _schedule(live))
    with agree.together() as block:
        extras = _extras(live, how)
        block.value = live.own.not_carried()
    unknown = sorted({name for names in block.values for name in names})
    notes = [f"states of the optimizer that are not known stay behind: {', '.join(unknown)}"]
    values = RankValues(found.own, found.apart, (*found.notes, *(notes if unknown else ())))
    scheduler = of_all_stages(stages[0][1], _by_stage(stages))
    return lent(live, said_of(live, found), replace(extras, scheduler=scheduler), values, how)


def _schedule(live: LiveEngine) -> tuple[int, Any, int]:
    """The stage of this rank, the scheduler's state, and how many groups the stage has."""
    scheduler = live.engine.lr_scheduler
    state = None if scheduler is None else inert(scheduler.state_dict())
    return live.own.number, state, len(live.own.param_groups)


def _by_stage(ranks: list[tuple[int, Any, int]]) -> list[tuple[Any, int]]:
    """The state and the number of groups of each stage, in their order."""
    first: dict[int, tuple[Any, int]] = {}
    for stage, state, groups in ranks:
        first.setdefault(stage, (state, groups))
    return [first[stage] for stage in sorted(first)]


def _extras(live: LiveEngine, how: HoldOptions) -> Extras:
    """All but the scheduler, as the files of a save have it."""
    engine = live.engine
    kept = {name: inert(value) for name, value in states_of(engine.module).items()}
    return Extras(
        {key: int(getattr(engine, key)) for key in COUNTERS},
        None,
        _scaler(live.wrapper),
        inert(dict(engine.config)),
        {inert(key): inert(value) for key, value in how.client_state.items()},
        _helpers(engine),
        modules=kept,
    )


def _helpers(engine: Any) -> dict[str, Any]:
    """States of DeepSpeed's layer dropping and curriculum learning, where they are used."""
    found: dict[str, Any] = {}
    if engine.random_ltd_enabled():
        found["random_ltd"] = inert(engine.random_ltd_scheduler.state_dict())
    if engine.training_dataloader is not None and engine.curriculum_learning_enabled():
        found["data_sampler"] = inert(engine.training_dataloader.data_sampler.state_dict())
    return found


def _scaler(wrapper: Wrapper) -> LossScale:
    """The loss scale; of an engine that has none, none."""
    if not wrapper.engine.fp16_enabled():
        return LossScale()
    scaler, names = wrapper.scaler()
    fields = {name: getattr(scaler, names.get(name, name), None) for name in vars(LossScale())}
    return LossScale.of_deepspeed({name: one for name, one in fields.items() if one is not None})


# ---- save
#
# `save_checkpoint` of an attached engine: DeepSpeed's own files, whole and on disk before any
# name says so.
#
# Order: DeepSpeed writes into a folder aside; every rank writes its random states and syncs its
# files and the folder; all agree; rank 0 writes and syncs the manifest, gives the folder the
# tag's name, and replaces `latest` by rename. A failure of any rank before that leaves `latest`
# and every older tag as they were; one in the last two steps says what is there.


# What torch.save raises for a disk that refuses, or for a client state that can't be pickled.
_REFUSALS = (OSError, RuntimeError, pickle.PicklingError, AttributeError, TypeError)


@dataclass(frozen=True)
class SaveRequest:
    """What is saved, and how: an attached engine whose model may be of a family, DeepSpeed's own
    `stock_save` of it, and what a caller of `save_checkpoint` gives."""

    engine: Any
    model: Model | None
    how: SaveOptions
    stock_save: Callable[..., Any]
    folder: Path
    tag: str
    client_state: Any
    save_latest: bool
    exclude_frozen: bool

    @property
    def aside(self) -> Path:
        """Where DeepSpeed writes."""
        return output_folder.aside_of(self.folder, self.tag)

    @property
    def background(self) -> Background | None:
        """What goes on with the save while the engine trains; None where that waits."""
        return background_of(self.engine) if self.how.way == BACKGROUND else None


def save(asked: SaveRequest) -> SaveReport:
    """Saves; see the module. Collective. Raises a UcpError on every rank; a rank that died raises
    RankError on the others."""
    where, engine = asked.folder / asked.tag, asked.engine
    begin = partial(saved_as_taken, where, asked.background, partial(_taken, asked))
    return begun_or_warned(engine, where, engine.global_steps, begin)


def _taken(asked: SaveRequest, left: ExitStack) -> PendingSave:
    """Takes everything, and writes what can't wait. Collective."""
    started = time.perf_counter()
    sync = asked.how.syncs(asked.folder, asked.tag)
    _begin(asked, sync, left)
    live = describe(asked.engine, asked.model, present=True)
    steps = _steps_of(live)
    found = besides(live, asked.client_state)
    files = _rank_files(asked, sync)
    written, stock_seconds = _stock(asked, files)
    with as_save_error(), agree.together() as block:
        stock = _whole(written)
        beside = write_beside(asked.aside, found.own, found.apart, asked.how)
        paths = [*(stock if files is None else []), *beside]
        block.value = live.own.not_carried()
    with as_save_error(), agree.together():
        if files is not None:
            files.share()
        require_unstepped(steps, _steps_of(live))
    notes = _note_of_states(flat(block.values)) + found.notes
    return PendingSave(
        asked.engine,
        asked.folder,
        asked.tag,
        LATEST if asked.save_latest else None,
        asked.how,
        _without_frozen(live.manifest) if asked.exclude_frozen else live.manifest,
        _said(asked, live, found),
        files,
        paths,
        notes,
        started,
        stock_seconds,
        sync,
        held_by(live, files),
        live.manifest,
    )


def _steps_of(live: LiveEngine) -> dict[str, float]:
    """The counts of steps that this rank's optimizer and its engine have now."""
    counts = [live.own.scalars(one) for one in live.own.buffers]
    own = {f"{key} of group {n}": v for n, one in enumerate(counts) for key, v in one.items()}
    return {STEPS: float(live.engine.global_steps), **own}


def _said(asked: SaveRequest, live: LiveEngine, found: Besides) -> dict[str, Any]:
    """What the manifest says of the run, as it is now."""
    tag = {MOVED_LATEST: asked.save_latest, TAG: asked.tag}
    return copy.deepcopy(said_of(live, found) | tag | position_of(asked.how.loader))


def _rank_files(asked: SaveRequest, sync: output_folder.Syncs) -> RankFiles | None:
    if asked.how.way == STOCK:
        return None
    return files_of_rank(replicas_of(asked.engine), sync, asked.background)


def _stock(asked: SaveRequest, files: RankFiles | None) -> "tuple[list[Path | SaveError], float]":
    """DeepSpeed's own save into the folder aside: what it wrote on this rank, or why it could not,
    and the seconds that it took. With `files` it says what there is to write, and they write it.
    Collective."""
    before = time.perf_counter()
    with _catching_writes(asked.engine, files) as written:
        asked.stock_save(
            str(asked.folder),
            tag=asked.aside.name,
            client_state=asked.client_state,
            save_latest=False,
            exclude_frozen_parameters=asked.exclude_frozen,
        )
    return written, time.perf_counter() - before


def _begin(asked: SaveRequest, sync: output_folder.Syncs, left: ExitStack) -> None:
    """Everything that can refuse a save before a file is written; then the folder aside, which is
    this job's until `left` removes it. Collective. Raises SaveError, UsageError."""
    engine, how = asked.engine, asked.how
    options = how.asked(
        save_latest=asked.save_latest, exclude_frozen_parameters=asked.exclude_frozen
    )
    with as_save_error(), agree.together() as block:
        block.value = where_to(asked.folder, asked.tag), options
        require_left(sync)
        if not wrapper_of(engine).is_saved:
            raise SaveError(
                "this engine has no optimizer, and DeepSpeed's own save fails for such an engine "
                "at ZeRO-3, and in bf16 and fp16 at stage 0",
                fix="save the weights with engine.save_16bit_model, or torch.save of "
                "engine.module.state_dict() at stage 0",
                id="unsupported",
            )
        check_states(engine)
        file = Path(engine._get_ckpt_name(str(asked.folder), asked.tag))
        refuse_strange(saved_by_caller(asked.client_state, engine, file), SaveError, file)
        refuse_strange(saved_by_engine(engine), SaveError, file, left=how.values_left)
        if agree.world()[0] == 0:
            left.enter_context(output_folder.begin(asked.folder, asked.tag, sync.right))
    require_one_save(block.values)


def _note_of_states(states: Iterable[str]) -> list[str]:
    """A note about states of the optimizer that are not known, if there are any."""
    names = sorted(set(states))
    if not names:
        return []
    return [
        f"states of the optimizer that are not known: {', '.join(names)}; they are in the files, "
        "but only load_checkpoint(native=True) on this mesh takes them. Say what the optimizer "
        "keeps with ucp.register_optimizer"
    ]


@contextmanager
def _catching_writes(engine: Any, files: RankFiles | None) -> Iterator[list[Path | SaveError]]:
    """What this rank writes during DeepSpeed's save, or why it could not: a rank that raised there
    would leave the others in a barrier for ever."""
    done: list[Path | SaveError] = []

    def catching(
        write: Callable[..., Any], path_of: Callable[..., Path | None]
    ) -> Callable[..., None]:
        def wrapped(*args: Any, **kwargs: Any) -> None:
            path = path_of(*args, **kwargs)
            try:
                write(*args, **kwargs)
                if path is not None:
                    done.append(path)
            except _REFUSALS as error:
                found = f"{type(error).__name__}: {error}"
                done.append(SaveError("a file could not be written", file=path, found=found))

        return wrapped

    writer = engine.checkpoint_engine
    write = writer.save if files is None else files.save
    save_file = catching(write, lambda state_dict, path: Path(path))
    copy_script = catching(engine._copy_recovery_script, lambda save_path: None)
    with (
        _instead(writer, "save", save_file),
        _instead(engine, "_copy_recovery_script", copy_script),
    ):
        yield done


@contextmanager
def _instead(owner: Any, name: str, method: Callable[..., None]) -> Iterator[None]:
    """Inside, an object has another method of that name."""
    before = owner.__dict__.get(name)
    setattr(owner, name, method)
    try:
        yield
    finally:
        if before is None:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


def _whole(written: list[Path | SaveError]) -> list[Path]:
    """What this rank wrote. Raises SaveError where a file of it could not be."""
    for failure in written:
        if isinstance(failure, SaveError):
            raise failure
    return [path for path in written if isinstance(path, Path)]


def _without_frozen(manifest: Manifest) -> Manifest:
    """What DeepSpeed's files hold where frozen parameters are left out: those of experts have files
    of their own, which hold the frozen ones too."""
    apart = manifest.mesh.experts_apart
    frozen = {
        spec.name
        for spec in manifest.params
        if spec.kind == "frozen" and not in_own_file(spec.name, apart)
    }
    params = tuple(spec for spec in manifest.params if spec.name not in frozen)
    buffers = tuple(b for b in manifest.buffers if not {m.param for m in b.members} & frozen)
    return dataclasses.replace(manifest, params=params, buffers=buffers)
