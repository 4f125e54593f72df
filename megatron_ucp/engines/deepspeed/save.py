"""`save_checkpoint` of an attached engine: DeepSpeed's own files, whole and on disk before any name
says so.

Order: DeepSpeed writes into a folder aside; every rank writes its random states and syncs its files
and the folder; all agree; rank 0 writes and syncs the manifest, gives the folder the tag's name,
and replaces `latest` by rename. A failure of any rank before that leaves `latest` and every older
tag as they were; one in the last two steps says what is there.
"""

import dataclasses
import pickle
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_ucp.core.experts import in_own_file
from megatron_ucp.core.manifest import (
    MOVED_LATEST,
    RECORDED,
    RENAMED,
    RUN,
    TAG,
    FileEntry,
    Manifest,
)
from megatron_ucp.core.manifest_json import to_json
from megatron_ucp.engines import random_states
from megatron_ucp.engines.deepspeed.accumulation import in_the_middle, micro_batches
from megatron_ucp.engines.deepspeed.batch import BATCH, batch_of
from megatron_ucp.engines.deepspeed.extra_state import check_states, states_of
from megatron_ucp.engines.deepspeed.kept import of_caller, of_engine
from megatron_ucp.engines.deepspeed.live import LiveEngine, describe
from megatron_ucp.engines.deepspeed.restore import MIDDLE
from megatron_ucp.engines.deepspeed.schedulers import CLASS, class_of
from megatron_ucp.engines.deepspeed.wrappers import wrapper_of
from megatron_ucp.engines.own_values import LiveValues
from megatron_ucp.engines.read_back import names_of, refuse_strange
from megatron_ucp.engines.same_model import recorded_settings
from megatron_ucp.engines.saves import (
    SaveReport,
    Saving,
    as_save_error,
    prune,
    publish,
    require_one_save,
    run_of,
    where_to,
)
from megatron_ucp.engines.values import members_by_value, named_in
from megatron_ucp.errors import RankError, SaveError
from megatron_ucp.families.architecture import recorded
from megatron_ucp.families.base import Model
from megatron_ucp.formats import durable, of_ranks
from megatron_ucp.formats.deepspeed.keys import OWN_KEYS
from megatron_ucp.formats.deepspeed.tag_folder import CLASSES, MEMBERS
from megatron_ucp.formats.of_ranks import PerRank
from megatron_ucp.formats.plain_values import GROUP_MARKS
from megatron_ucp.formats.pointers import LATEST
from megatron_ucp.reshard import agree

# What torch.save raises for a disk that refuses, or for a client state that can't be pickled.
_REFUSALS = (OSError, RuntimeError, pickle.PicklingError, AttributeError, TypeError)


@dataclass(frozen=True)
class Asked:
    """What a caller of `save_checkpoint` gives."""

    save_dir: Any
    tag: str
    client_state: Any
    save_latest: bool
    exclude_frozen: bool

    @property
    def folder(self) -> Path:
        return Path(self.save_dir)

    @property
    def aside(self) -> Path:
        """Where DeepSpeed writes."""
        return durable.aside_of(self.folder, self.tag)


def save(
    engine: Any, model: Model | None, how: Saving, stock_save: Callable[..., Any], asked: Asked
) -> SaveReport:
    """Saves; see the module. Collective. Raises a UcpError on every rank; a rank that died raises
    RankError on the others."""
    try:
        return _save(engine, model, how, stock_save, asked)
    except RuntimeError as error:  # collectives break when a rank dies
        raise RankError(
            "the save did not finish, and nothing of it counts: a rank died, or its collectives "
            "failed",
            file=asked.folder / asked.tag,
            found=str(error).strip().partition("\n")[0],
            fix="look at the other ranks' output; resume from the tag that `latest` names",
        ) from error


def _save(
    engine: Any, model: Model | None, how: Saving, stock_save: Callable[..., Any], asked: Asked
) -> SaveReport:
    started = time.perf_counter()
    sync = durable.Syncs(how.durable)
    with ExitStack() as left:
        _begin(engine, how, asked, left)
        live = describe(engine, model, present=True)
        waiting = micro_batches(engine)
        middle = in_the_middle(engine, live.wrapper)
        own, apart = _own_values(live, asked.client_state)
        written, stock_seconds = _stock(engine, stock_save, asked)
        with as_save_error(), agree.together() as block:
            more = [own.write(asked.aside, agree.world()[0], apart)] if apart else []
            files = _settle(asked.aside, written, more, how, sync)
            block.value = files, live.own.not_carried()
        said = _said(live, asked, waiting if middle else None, apart)
        whole = _complete(live, _flat(each for each, _ in block.values), how, asked, said)
        notes = _named(engine, asked, whole, how, sync)
    lost = _lost(_flat(keys for _, keys in block.values), middle, waiting, apart)
    return SaveReport(
        str(asked.folder / asked.tag),
        str(whole.mesh),
        engine.global_steps,
        whole.size_bytes,
        time.perf_counter() - started,
        sync.seconds,
        stock_seconds,
        how.durable,
        (*lost, *notes),
    )


def _named(
    engine: Any, asked: Asked, whole: Manifest, how: Saving, sync: durable.Syncs
) -> list[str]:
    """Rank 0 gives the files their names, and takes older tags away; returns notes, on rank 0.
    Collective."""
    with as_save_error(), agree.together() as block:
        if agree.world()[0] == 0:
            pointer = LATEST if asked.save_latest else None
            block.value = publish(asked.aside, asked.folder, to_json(whole), pointer, sync)
            block.value += prune(asked.folder, pointer and how.keep_latest, engine)
    return block.value or []


def _said(live: LiveEngine, asked: Asked, waiting: int | None, apart: PerRank) -> dict[str, Any]:
    """What a manifest says of the save and of the engine besides what it holds. `waiting` are
    micro-batches since the last step, where there are any."""
    model, module = live.own.model, live.engine.module
    kept = [one.value for one in of_engine(live.engine)]
    model_said = recorded(model, module) if model is not None else recorded_settings(module)
    said = {
        RECORDED: model_said,
        RENAMED: live.own.renamed,
        CLASSES: sorted({*named_in(kept), *names_of(kept)}),
        MEMBERS: list(dict.fromkeys(members_by_value(kept))),
    }
    counted: dict[str, Any] = {} if waiting is None else {MIDDLE: waiting}
    ranks = {of_ranks.PER_RANK: apart.as_value() if apart else {}}
    named = {TAG: asked.tag, RUN: run_of(live.engine).id}
    return {**named, **counted, **ranks, **{key: value for key, value in said.items() if value}}


def _flat(lists: Iterable[Iterable[Any]]) -> list[Any]:
    """What all ranks said, one after the other."""
    return [one for each in lists for one in each]


def _stock(
    engine: Any, stock_save: Callable[..., Any], asked: Asked
) -> "tuple[list[Path | SaveError], float]":
    """DeepSpeed's own save into the folder aside: what this rank wrote, or why it could not, and
    the seconds that it took. Collective."""
    before = time.perf_counter()
    with _catching_writes(engine) as written:
        stock_save(
            str(asked.folder),
            tag=asked.aside.name,
            client_state=asked.client_state,
            save_latest=False,
            exclude_frozen_parameters=asked.exclude_frozen,
        )
    return written, time.perf_counter() - before


def _begin(engine: Any, how: Saving, asked: Asked, left: ExitStack) -> None:
    """Everything that can refuse a save before a file is written; then the folder aside, which is
    this job's until `left` removes it. Collective. Raises SaveError, UsageError."""
    options = how.asked(
        save_latest=asked.save_latest, exclude_frozen_parameters=asked.exclude_frozen
    )
    with as_save_error(), agree.together() as block:
        block.value = where_to(asked.folder, asked.tag), options
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
        refuse_strange(of_caller(asked.client_state, OWN_KEYS, file), SaveError, file)
        refuse_strange(of_engine(engine), SaveError, file, left=how.values_left)
        if agree.world()[0] == 0:
            left.enter_context(durable.begin(asked.folder, asked.tag))
    require_one_save(block.values)


def _lost(states: list[str], middle: bool, waiting: int, apart: PerRank) -> list[str]:
    """Notes about what no load on another mesh gets from this save."""
    notes: list[str] = []
    if states:
        notes.append(
            f"states of the optimizer that are not known: {', '.join(sorted(set(states)))}; they "
            "are in the "
            "files, but only load_checkpoint(native=True) on this mesh takes them. Say what the "
            "optimizer keeps with ucp.register_optimizer"
        )
    if middle:
        notes.append(
            "the save came in the middle of an accumulation: the gradients of "
            f"{waiting or 'some'} micro-batches since the last step are not in it"
        )
    if apart:
        notes.append(f"differs from rank to rank, and is kept for each: {apart}")
    return notes


@contextmanager
def _catching_writes(engine: Any) -> Iterator[list[Path | SaveError]]:
    """What this rank writes during DeepSpeed's save, or why it could not: a rank that raised there
    would leave the others in a barrier for ever."""
    done: list[Path | SaveError] = []

    def catching(
        write: Callable[..., Any], name_of: Callable[..., Path | None]
    ) -> Callable[..., None]:
        def wrapped(*args: Any, **kwargs: Any) -> None:
            path = name_of(*args, **kwargs)
            try:
                write(*args, **kwargs)
                if path is not None:
                    done.append(path)
            except _REFUSALS as error:
                done.append(
                    SaveError(
                        "a file could not be written",
                        file=path,
                        found=f"{type(error).__name__}: {error}",
                    )
                )

        return wrapped

    writer = engine.checkpoint_engine
    replaced = [
        (writer, "save", lambda state_dict, path: Path(path)),
        (engine, "_copy_recovery_script", lambda save_path: None),
    ]
    before = [owner.__dict__.get(name) for owner, name, _ in replaced]
    for owner, name, name_of in replaced:
        setattr(owner, name, catching(getattr(owner, name), name_of))
    try:
        yield done
    finally:
        for (owner, name, _), old in zip(replaced, before, strict=True):
            if old is None:
                delattr(owner, name)
            else:
                setattr(owner, name, old)


def _own_values(live: LiveEngine, client_state: Any) -> tuple[LiveValues, PerRank]:
    """What this rank has that other ranks may have otherwise, and what differs. Collective. Raises
    SaveError."""
    with agree.together() as told:
        own = _live_values(live, client_state)
        told.value = own.digest()
    return own, own.differing(told.values)


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


def _settle(
    aside: Path,
    written: list[Path | SaveError],
    more: list[Path],
    how: Saving,
    sync: durable.Syncs,
) -> list[FileEntry]:
    """This rank's files, on disk, as lines of the manifest. Raises SaveError."""
    for failure in written:
        if isinstance(failure, SaveError):
            raise failure
    paths = [path for path in written if isinstance(path, Path)] + more
    if how.rng:
        paths.append(random_states.write(aside, agree.world()[0]))
    for path in [*paths, aside]:
        sync(path)
    return [durable.entry_of(path) for path in paths]


def _complete(
    live: LiveEngine,
    entries: list[FileEntry],
    how: Saving,
    asked: Asked,
    said: Mapping[str, Any],
) -> Manifest:
    """The engine's manifest with all that identifies the save, and what else is `said` of it."""
    engine, manifest = live.engine, live.manifest
    if asked.exclude_frozen:
        apart = manifest.mesh.experts_apart  # DeepSpeed's files of experts have the frozen ones too
        dropped = (spec.name for spec in manifest.params if spec.kind == "frozen")
        frozen = {name for name in dropped if not in_own_file(name, apart)}
        params = tuple(spec for spec in manifest.params if spec.name not in frozen)
        buffers = tuple(b for b in manifest.buffers if not {m.param for m in b.members} & frozen)
        manifest = dataclasses.replace(manifest, params=params, buffers=buffers)
    import deepspeed

    run = {
        random_states.STEPS: engine.global_steps,
        "skipped_steps": engine.skipped_steps,
        BATCH: batch_of(engine),
        random_states.SEED: torch.initial_seed(),
        "ds_version": deepspeed.__version__,
        "saved_at": time.time(),
        MOVED_LATEST: asked.save_latest,
        **({CLASS: kind} if (kind := class_of(engine.lr_scheduler)) else {}),
        **said,
    }
    if how.loader is not None:
        run["data"] = how.loader.state_dict()
    return dataclasses.replace(
        manifest,
        files=tuple(sorted(entries, key=lambda entry: entry.name)),
        save_id=uuid.uuid4().hex,
        run=run,
    )
