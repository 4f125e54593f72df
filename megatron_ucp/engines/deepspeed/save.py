"""`save_checkpoint` of an attached engine: DeepSpeed's own files, whole and on disk before any name
says so.

Order: DeepSpeed writes into a folder aside; every rank writes its random states and syncs its files
and the folder; all agree; rank 0 writes and syncs the manifest, gives the folder the tag's name,
and replaces `latest` by rename. A failure of any rank before that leaves `latest` and every older
tag as they were; one in the last two steps says what is there.
"""

import copy
import dataclasses
import pickle
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from megatron_ucp.core.experts import in_own_file
from megatron_ucp.core.manifest import (
    MOVED_LATEST,
    TAG,
    Manifest,
)
from megatron_ucp.engines.background import Background, background_of, begun_or_warned
from megatron_ucp.engines.deepspeed.besides import Besides, besides, said_of
from megatron_ucp.engines.deepspeed.extra_state import check_states
from megatron_ucp.engines.deepspeed.kept import of_caller, of_engine
from megatron_ucp.engines.deepspeed.live import LiveEngine, describe
from megatron_ucp.engines.deepspeed.live_fingerprint import held_by
from megatron_ucp.engines.deepspeed.replicas import replicas_of
from megatron_ucp.engines.deepspeed.wrappers import wrapper_of
from megatron_ucp.engines.random_states import STEPS
from megatron_ucp.engines.rank_files import RankFiles
from megatron_ucp.engines.read_back import refuse_strange
from megatron_ucp.engines.saves import (
    BACKGROUND,
    STOCK,
    SaveReport,
    Saving,
    as_save_error,
    position_of,
    require_left,
    require_one_save,
    require_unstepped,
    where_to,
)
from megatron_ucp.engines.taken_files import (
    TakenFiles,
    files_of_rank,
    flat,
    saved_as_taken,
    write_beside,
)
from megatron_ucp.errors import SaveError
from megatron_ucp.families.base import Model
from megatron_ucp.formats import durable
from megatron_ucp.formats.pointers import LATEST
from megatron_ucp.reshard import agree

# What torch.save raises for a disk that refuses, or for a client state that can't be pickled.
_REFUSALS = (OSError, RuntimeError, pickle.PicklingError, AttributeError, TypeError)


@dataclass(frozen=True)
class Asked:
    """What is saved, and how: an attached engine whose model may be of a family, DeepSpeed's own
    `stock_save` of it, and what a caller of `save_checkpoint` gives."""

    engine: Any
    model: Model | None
    how: Saving
    stock_save: Callable[..., Any]
    folder: Path
    tag: str
    client_state: Any
    save_latest: bool
    exclude_frozen: bool

    @property
    def aside(self) -> Path:
        """Where DeepSpeed writes."""
        return durable.aside_of(self.folder, self.tag)

    @property
    def background(self) -> Background | None:
        """What goes on with the save while the engine trains; None where that waits."""
        return background_of(self.engine) if self.how.way == BACKGROUND else None


def save(asked: Asked) -> SaveReport:
    """Saves; see the module. Collective. Raises a UcpError on every rank; a rank that died raises
    RankError on the others."""
    where, engine = asked.folder / asked.tag, asked.engine
    begin = partial(saved_as_taken, where, asked.background, partial(_taken, asked))
    return begun_or_warned(engine, where, engine.global_steps, begin)


def _taken(asked: Asked, left: ExitStack) -> TakenFiles:
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
    return TakenFiles(
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


def _said(asked: Asked, live: LiveEngine, found: Besides) -> dict[str, Any]:
    """What the manifest says of the run, as it is now."""
    tag = {MOVED_LATEST: asked.save_latest, TAG: asked.tag}
    return copy.deepcopy(said_of(live, found) | tag | position_of(asked.how.loader))


def _rank_files(asked: Asked, sync: durable.Syncs) -> RankFiles | None:
    if asked.how.way == STOCK:
        return None
    return files_of_rank(replicas_of(asked.engine), sync, asked.background)


def _stock(asked: Asked, files: RankFiles | None) -> "tuple[list[Path | SaveError], float]":
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


def _begin(asked: Asked, sync: durable.Syncs, left: ExitStack) -> None:
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
        refuse_strange(of_caller(asked.client_state, engine, file), SaveError, file)
        refuse_strange(of_engine(engine), SaveError, file, left=how.values_left)
        if agree.world()[0] == 0:
            left.enter_context(durable.begin(asked.folder, asked.tag, sync.right))
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
