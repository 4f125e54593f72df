"""`load`: any checkpoint into a live engine, of DeepSpeed or megatron-core, on any mesh."""

import gc
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megatron_ucp import say
from megatron_ucp.engines.background import wait_together
from megatron_ucp.engines.record import HANDLE, LOADED, OwnRun, handle_of, record_of
from megatron_ucp.engines.run_state import ResumableLoader
from megatron_ucp.errors import NotFoundError, UsageError
from megatron_ucp.formats.store import Location, absolute, is_url, location
from megatron_ucp.formats.tags import content_id, nothing_there
from megatron_ucp.reshard import agree
from megatron_ucp.reshard.engine import Engine, LoadOptions, Report
from megatron_ucp.reshard.load import resume
from megatron_ucp.reshard.options import (
    KEPT_STEPS,
    LOAD,
    MEMORY,
    OPTIMIZER,
    OPTIONS,
    SCHEDULER,
    WEIGHTS_ALONE,
    check_acting,
    check_given,
    check_words,
)


class MemorySource(ABC):
    """What `load` takes in the place of a path: a run in the memory of ranks."""

    @abstractmethod
    def resume(self, engine: Engine, options: LoadOptions) -> Report:
        """Fills an engine; the memory is let go of. Collective. Raises a UcpError on every rank;
        what is held stays then."""


@contextmanager
def collector_paused() -> Iterator[None]:
    """No garbage collection. A load makes many small objects that live until it ends; Python's
    collector would walk them, and all that the program has, again and again: a twentieth of the
    time of a load of 80 million parameters, more in a large program."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@agree.door("the load")
def load(
    engine: Any,
    path: str | Path | MemorySource,
    tag: str | None = None,
    *,
    load_optimizer_states: bool = True,
    load_lr_scheduler_states: bool = True,
    load_module_only: bool = False,
    hyper: str | None = None,
    family: Any = None,
    checksums: bool | None = None,
    allow: Collection[str] | None = None,
    rng: bool | None = None,
    loader: ResumableLoader | None = None,
    read: str | None = None,
) -> Report:
    """Fills a live engine from a checkpoint that any engine on any number of ranks wrote, or from
    what `hold` keeps in memory. Collective. The default of `hyper`, `family`, `checksums`, `allow`,
    `rng`, `loader` and `read` is what `attach` got; where it got nothing, what is said
    here.

    Args:
        engine: A DeepSpeed engine, attached or not, or what `attach_megatron` returned.
        path: A tag folder, the folder above it, a Megatron folder or a Hugging Face folder; or what
            `hold` returned on this rank, whose memory is let go of.
        tag: The tag in `path`, where it is not the newest.
        load_optimizer_states: Whether the optimizer's states are loaded; else master weights alone.
        load_lr_scheduler_states: Whether the scheduler is.
        load_module_only: The module alone: no optimizer, scheduler, counters, random states, data
            position.
        hyper: "checkpoint" (the default) restores each group's hyper-parameters, "config" keeps the
            engine's.
        family: The model family, which tensor parallelism of megatron-core needs. What AutoTP
            shards says its layouts itself.
        checksums: Whether what is loaded is compared with the fingerprint that the save recorded;
            where it recorded none, the CRC-32 of every record that the ranks read as a whole.
            Default: true.
        allow: Words for what else may happen (docs/reference/python.md lists them); all that does
            is in the report's notes. Default: nothing.
        rng: Whether random states are restored. Default: true.
        loader: A `ResumableLoader`, which goes on where the save was.
        read: Who reads what several ranks hold alike, such as the weights of a run without ZeRO:
            one of them for all ("once"), or each ("each"), where storage is faster than the
            network. Default: once where more than 8 ranks hold it.

    Returns:
        What was done: step, meshes, bytes, seconds, `client_state`, `notes`.

    Raises:
        UcpError: On every rank. Where metadata could show the reason, the engine is unchanged;
            where it could not, the engine refuses to step, to save and to be exported until a
            load succeeds.

    Example:
        >>> report = ucp.load(engine, "checkpoints")
        >>> report.global_steps
        80
    """
    named: dict[str, Any] = {"hyper": hyper, "family": family, "checksums": checksums}
    named |= {"allow": allow, "rng": rng, "loader": loader, "read": read}
    given = options_of_load(
        engine,
        load_optimizer_states=load_optimizer_states,
        load_lr_scheduler_states=load_lr_scheduler_states,
        load_module_only=load_module_only,
        **named,
    )
    where = {"path": str(absolute(path)) if isinstance(path, str) else path, "tag": tag}
    agree.require_same(as_compared({**where, **given}))
    options = load_options(given)
    if allow is not None:  # what `attach` got is for all loads, whatever each has a use for
        check_words(allow, {MEMORY if isinstance(path, MemorySource) else LOAD})
        check_acting(options.allow, _wanted(engine, options))
    handle = handle_of(engine, options.family)
    # not in `load_checkpoint`: trainers keep a step of their own beside each checkpoint's folder
    if (kept := record_of(engine).memory) is not None and not isinstance(path, MemorySource):
        kept.adopt_folder_of(location(path))
    return fill(handle, path, tag, options)


def options_of_load(engine: Any, **named: Any) -> dict[str, Any]:
    """What a load was given, by the names that a caller knows; what was not said (None) is as
    `attach` was told, if it was."""
    attached: Mapping[str, Any] = getattr(getattr(engine, HANDLE, None), "options", {})
    return {**attached, **{name: value for name, value in named.items() if value is not None}}


def as_compared(given: Mapping[str, Any]) -> dict[str, Any]:
    """What all ranks must have been given alike."""
    return {name: agree.plain_option(value) for name, value in given.items()}


def load_options(given: Mapping[str, Any]) -> LoadOptions:
    """What a load is asked for. Raises UsageError."""
    options = {name: value for name, value in given.items() if name in OPTIONS}
    check_given(options)
    options["allow"] = frozenset(options.get("allow", ()))
    module_only = given["load_module_only"]
    states = given["load_optimizer_states"] and not module_only
    return LoadOptions(states, given["load_lr_scheduler_states"], module_only, **options)


def _wanted(engine: Any, options: LoadOptions) -> set[str]:
    """What a load has, as far as allowances need it."""
    has_optimizer = not hasattr(engine, "optimizer") or engine.optimizer is not None
    found = {OPTIMIZER if options.optimizer and has_optimizer else WEIGHTS_ALONE}
    found |= {SCHEDULER} if options.scheduler and not options.module_only else set()
    return found | ({KEPT_STEPS} if record_of(engine).memory is not None else set())


def _resumed(
    engine: Any,
    live: Engine,
    path: str | Path | MemorySource,
    tag: str | None,
    options: LoadOptions,
) -> tuple[Report, Any]:
    """Fills an engine from memory or from files; with a share of the in-memory checkpoint that was
    newer than the files, if there was one."""
    if isinstance(path, MemorySource):
        if tag is not None:
            raise UsageError(
                "what is held has no tags",
                expected="no tag",
                found=repr(tag),
                fix="leave the tag out, or give the folder of a checkpoint",
            )
        return path.resume(live, options), None
    kept = record_of(engine).memory
    if kept is None:
        return resume(live, path, tag, options), None
    newer = kept.look(live, location(path), tag, options)
    if newer.held is None:
        try:
            report, share = resume(live, path, tag, options), None
        except NotFoundError:  # a first start, of which the notes still say what is in memory
            for text in newer.notes:
                say.note(text)
            raise
    else:
        report, share = newer.held.resume(live, options), newer.share
        if not (report.client_state or options.module_only):
            newer.notes.append("it has no client state: attach(client_state=) says what is kept")
    return replace(report, notes=(*newer.notes, *report.notes)), share


def go_on(
    engine: Any,
    run_id: str,
    origin: str,
    steps: int,
    files: Iterable[Location],
    share: Any = None,
) -> None:
    """The engine was filled, has come to `steps`, and goes on with the run of that id, or from the
    `origin` that has none: from one of the folders `files`, or from what a step in memory is a
    `share` of. Collective."""
    record_of(engine).run = OwnRun(run_id, origin) if run_id else OwnRun(origin=origin)
    if (kept := record_of(engine).memory) is not None:
        kept.goes_on(steps, share, is_own=any(map(kept.is_of, files)))


def no_checkpoint(folder: Any) -> bool:
    """Whether a folder has nothing like a checkpoint, as rank 0 sees it; where it sees nothing, the
    others look too. Collective. Raises UsageError where some ranks see one."""
    if not agree.of_first(lambda: nothing_there(folder)):
        return False
    if is_url(folder):  # which is the same store on all ranks
        return True
    seen = agree.total(int(not nothing_there(folder)))[0]
    if seen:
        raise UsageError(
            "the ranks don't see the same files",
            file=folder,
            expected="a folder that all of them share",
            found=f"a checkpoint on {seen} of {agree.world()[1]} ranks, and none on rank 0",
            fix="mount the same folder on all machines, or copy the checkpoint to each of them",
        )
    return True


def origin_of(folder: str | Location) -> str:
    """What a checkpoint without an id is known by; of it the first rank's counts."""
    with suppress(OSError):
        return content_id(location(folder)) if not agree.world()[0] else ""
    return ""


@agree.door("the load")
@collector_paused()
def fill(
    handle: Any, path: str | Path | MemorySource, tag: str | None, options: LoadOptions
) -> Report:
    """`load` of what all ranks were asked for alike, into the engine of a `Handle`. A save that is
    under way is there before."""
    engine = handle.program
    wait_together(engine)
    # a caller may evaluate: tensors that inference mode makes could never be trained again
    with torch.inference_mode(False):
        live: Engine = handle.to_fill(options.family)
        report, life = _resumed(engine, live, path, tag, options)
    if not options.module_only:
        is_file = not (report.run_id or report.run_origin or isinstance(path, MemorySource))
        origin = origin_of(report.path) if is_file else report.run_origin
        files = (
            ()
            if isinstance(path, MemorySource)
            else (location(path), location(path).absolute().parent)
        )
        go_on(engine, report.run_id, origin, report.global_steps, files, life)
    engine.__dict__[LOADED] = report
    say.ended(str(report), report.notes)
    return report
