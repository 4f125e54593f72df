"""`save_checkpoint` of an attached engine: DeepSpeed's own files, whole and on disk before any
name says so.

Order: DeepSpeed writes into a folder aside; every rank writes its random states and syncs its
files and the folder; all agree; rank 0 writes and syncs the manifest, renames the folder, and
moves the pointers."""

import dataclasses
import pickle
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import torch

from megatron_ucp.core.box import flat_index, strides
from megatron_ucp.core.experts import in_own_file
from megatron_ucp.core.grouping import grouped
from megatron_ucp.core.layers import TIED
from megatron_ucp.core.layout import Layout, Replicate, Shard
from megatron_ucp.core.manifest import Manifest
from megatron_ucp.core.mesh import DENSE_CUT, Mesh
from megatron_ucp.engines.background import Background
from megatron_ucp.engines.deepspeed.live import LiveEngine, describe, held_by
from megatron_ucp.engines.deepspeed.optimizer import wrapper_of
from megatron_ucp.engines.deepspeed.state import (
    check_states,
    read_state,
    saved_by_caller,
    saved_by_engine,
)
from megatron_ucp.engines.live import require_unstepped, require_usable
from megatron_ucp.engines.pt_files import RankFiles, StockFiles, StoreRankFiles, replicas_of
from megatron_ucp.engines.run_state import STEPS, DrawnState
from megatron_ucp.engines.save import SAVE_FAILED, PendingSave, SaveRequest, as_save_error, flat
from megatron_ucp.engines.values import refuse_strange
from megatron_ucp.errors import SaveError, StoreError
from megatron_ucp.families.family import Declared, Model
from megatron_ucp.formats import output_folder
from megatron_ucp.formats.deepspeed.files import PATTERNS, at_tp
from megatron_ucp.formats.deepspeed.tp_patterns import (
    SUB_PARAMS,
    VOCABULARY,
    fused,
    kind_of,
    sub_shape,
)
from megatron_ucp.formats.output_folder import Syncs
from megatron_ucp.formats.store import Location, StorePath, location
from megatron_ucp.reshard import agree
from megatron_ucp.reshard.fingerprint import HeldPart, parts_of_memory
from megatron_ucp.reshard.folder import save_error_of
from megatron_ucp.reshard.options import BACKGROUND, STOCK

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
    # sub-parameters are no patterns alone
    by_kind = grouped((kind, name) for name, kind in kinds.items() if kind and kind != SUB_PARAMS)
    lists = {_ON_SEVERAL_STAGES: tied, VOCABULARY: vocabulary, **by_kind}
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


def _sub_params(table: Mapping[str, Declared]) -> dict[str, Any]:
    """The list of fused parameters that are no two halves, those with the same parts together."""
    alike = grouped(
        (sub_shape(cut, declared.shape), name)
        for name, declared in table.items()
        if (cut := declared.layout.fused) is not None
    )
    entries = [fused(_patterns(names), cut) for cut, names in alike.items()]
    return {SUB_PARAMS: entries} if entries else {}


def empty_extra_state(_module: Any, state: dict[str, Any], *_: Any) -> None:
    """A state-dict hook: megatron-core's `_extra_state` is None, on which stock's converter fails;
    it takes an empty tensor, and megatron-core ignores what it is given back."""

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
    everyone = range(tp) if layout.is_whole else None
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


# ---- save
#
# Order: DeepSpeed writes into a folder aside; every rank writes its random states and syncs its
# files and the folder; all agree; rank 0 writes and syncs the manifest, gives the folder the tag's
# name, and replaces `latest` by rename. A failure of any rank before that leaves `latest` and every
# older tag as they were; one in the last two steps says what is there.


# What a write raises for a disk that refuses, a value that can't be pickled, no memory.
_OF_VALUES = (pickle.PicklingError, AttributeError, TypeError, ValueError, LookupError)
_REFUSALS = (OSError, RuntimeError, MemoryError, *_OF_VALUES)


@dataclass(frozen=True)
class EngineSave(SaveRequest):
    """A save of an attached engine, whose model may be of a family: DeepSpeed's own `stock_save` of
    it, and what a caller of `save_checkpoint` gives."""

    model: Model | None
    stock_save: Callable[..., Any]
    client_state: Any
    exclude_frozen: bool

    @property
    def background(self) -> Background | None:
        return super().background if self.options.way == BACKGROUND else None

    def take(self, sync: Syncs, left: ExitStack) -> PendingSave:
        """Takes everything, and writes what can't wait. Collective."""
        live = describe(self.engine, self.model, present=True)
        steps = _steps_of(live)
        drawn_now = partial(DrawnState.now, self.options.loader, self.options.rng)
        state = read_state(live.shard, self.client_state, drawn_now, self.aside)
        files, summed = self._rank_files(live, sync, left), agree.KeptBack()
        is_kept = files is not None and files.snapshot is not None
        held = {} if is_kept else held_by(live, files)

        def parts() -> Sequence[HeldPart]:
            return parts_of_memory(live.manifest, held)

        with summed:  # before DeepSpeed's collectives, in which nobody may be missing
            if files is not None:
                files.parts = parts
                if not is_kept:
                    files.sum_parts()
        before = time.perf_counter()
        written = self._stock(files)
        stock_seconds = time.perf_counter() - before
        with as_save_error(), agree.gathering() as block:
            summed.raise_kept()
            paths = _whole(written)
            block.value = live.shard.not_carried(), None if files is None else files.shared()
        unknown, shared = zip(*block.values, strict=True)
        with as_save_error(), agree.together():
            if files is not None:
                files.share(shared)
            require_unstepped(steps, _steps_of(live))
        if is_kept:
            held |= held_by(live, files)

        def saved() -> Manifest:
            return _without_frozen(live.manifest) if self.exclude_frozen else live.manifest

        notes = [*_note_of_states(flat(unknown)), *state.notes]
        return PendingSave(
            live.manifest.mesh,
            saved,
            lambda: live.manifest,
            replace(state, notes=tuple(notes)),
            files or StockFiles(self.aside, paths, sync, parts),
            stock_seconds,
            told=None if flat(unknown) else live.told(),
        )

    def asked(self) -> dict[str, Any]:
        own = {"save_latest": self.pointer is not None}
        return {**super().asked(), **own, "exclude_frozen_parameters": self.exclude_frozen}

    def begin(self, sync: Syncs, left: ExitStack) -> None:
        """And makes the folder aside, which is this job's until `left` removes it. Raises
        EngineUnusableError, SaveError, UsageError."""
        engine = self.engine
        require_usable(engine)
        super().begin(sync, left)
        if not wrapper_of(engine).is_saved:
            raise SaveError(
                "this engine has no optimizer, and DeepSpeed's own save fails for such an engine "
                "at ZeRO-3, and in bf16 and fp16 at stage 0",
                fix="save the weights with engine.save_16bit_model, or torch.save of "
                "engine.module.state_dict() at stage 0",
                id="unsupported",
            )
        check_states(engine)
        file = location(engine._get_ckpt_name(str(self.folder), self.tag))
        refuse_strange(saved_by_caller(self.client_state, engine, file), SaveError, file)
        refuse_strange(saved_by_engine(engine), SaveError, file, left=self.options.values_left)
        if agree.world()[0] == 0 and not isinstance(self.folder, StorePath):
            left.enter_context(output_folder.begin(self.folder, self.tag, sync.right))

    def _rank_files(self, live: LiveEngine, sync: Syncs, left: ExitStack) -> RankFiles | None:
        """What writes the files in the place of `torch.save`, if anything does."""
        if self.options.way == STOCK and self.claimed is None:
            return None
        snapshot = None if self.background is None else self.background.snapshot
        kind = RankFiles if self.claimed is None else StoreRankFiles
        files = kind(self.aside, replicas_of(self.engine, live.shard.replicated), sync, snapshot)
        left.callback(files.release)
        return files

    def _stock(self, files: RankFiles | None) -> "list[Location | SaveError]":
        """DeepSpeed's own save into the folder aside: what it wrote on this rank, or why it could
        not. With `files` it says what there is to write, and they write it. Collective."""
        with (
            _folder_to_name(self.folder, self.aside) as (folder, name, place_of),
            _catching_writes(self.engine, files, place_of) as written,
            _info_as_value(self.engine, self.client_state) as client_state,
        ):
            self.stock_save(
                folder,
                tag=name,
                client_state=client_state,
                save_latest=False,
                exclude_frozen_parameters=self.exclude_frozen,
            )
        return written


@contextmanager
def _info_as_value(engine: Any, client_state: Mapping[Any, Any]) -> Iterator[Mapping[Any, Any]]:
    """The client state as DeepSpeed's save takes it. With experts it wants
    `universal_checkpoint_info` as a value of the module (0.19.8, `_save_moe_checkpoint`), where
    Megatron-DeepSpeed's models have a method, and refuses it in the client state."""
    module = engine.module
    if not engine.has_moe_layers or not callable(getattr(module, PATTERNS, None)):
        yield client_state
        return
    rest = {key: value for key, value in client_state.items() if key != PATTERNS}
    setattr(module, PATTERNS, client_state.get(PATTERNS) or getattr(module, PATTERNS)())
    try:
        yield rest
    finally:
        delattr(module, PATTERNS)


def _steps_of(live: LiveEngine) -> dict[str, float]:
    """The counts of steps that this rank's optimizer and its engine have now."""
    counts = [live.shard.scalars(one) for one in live.shard.buffers]
    own = {f"{key} of group {n}": v for n, one in enumerate(counts) for key, v in one.items()}
    return {STEPS: float(live.engine.global_steps), **own}


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
def _folder_to_name(
    folder: Location, aside: Location
) -> Iterator[tuple[str, str, Callable[[str], Location]]]:
    """The folder and the tag that DeepSpeed is told to save into, and what gives the place of a
    file by the path that it names. It makes folders itself, so for a store it is told an empty one
    of the disk."""
    if not isinstance(aside, StorePath):
        yield str(folder), aside.name, Path
        return
    with TemporaryDirectory(prefix="ucp-") as empty:
        own = Path(empty, aside.name)
        yield empty, aside.name, lambda path: aside / Path(path).relative_to(own)
        for path in own.rglob("*"):  # such as the script that DeepSpeed puts beside its files
            if path.is_file():
                with suppress(StoreError):
                    (aside / path.relative_to(own)).write_bytes(path.read_bytes())


@contextmanager
def _catching_writes(
    engine: Any, files: RankFiles | None, place_of: Callable[[str], Location]
) -> Iterator[list[Location | SaveError]]:
    """What this rank writes during DeepSpeed's save, or why it could not: a rank that raised there
    would leave the others in a barrier for ever."""
    done: list[Location | SaveError] = []

    def catching(
        write: Callable[..., Any], path_of: Callable[..., Location | None]
    ) -> Callable[..., None]:
        def wrapped(*args: Any, **kwargs: Any) -> None:
            path = path_of(*args, **kwargs)
            try:
                write(*args, **kwargs)
                if path is not None:
                    done.append(path)
            except StoreError as error:
                done.append(save_error_of(error, SAVE_FAILED))
            except _REFUSALS as error:
                found = f"{type(error).__name__}: {error}"
                done.append(SaveError("a file could not be written", file=path, found=found))

        return wrapped

    writer = engine.checkpoint_engine

    def save_here(state_dict: Any, path: str) -> None:
        cast("RankFiles", files).save(state_dict, place_of(path))

    write = writer.save if files is None else save_here
    save_file = catching(write, lambda state_dict, path: place_of(path))
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


def _whole(written: "list[Location | SaveError]") -> list[Location]:
    """What this rank wrote. Raises SaveError where a file of it could not be."""
    for failure in written:
        if isinstance(failure, SaveError):
            raise failure
    return [path for path in written if not isinstance(path, SaveError)]


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
