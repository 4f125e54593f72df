"""`ucp.save`: megatron-core's stack as its own program loads it, or any attached engine as a folder
that another program loads: FSDP2's. The elements come from the memory of all ranks."""

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_ucp import say
from megatron_ucp.core.mesh import Mesh
from megatron_ucp.engines.hold import HoldOptions, lent_by, require_attached
from megatron_ucp.engines.megatron.save import TORCH_DIST
from megatron_ucp.engines.megatron.save import save as save_stack
from megatron_ucp.engines.record import HANDLE
from megatron_ucp.engines.run_state import STEPS, ResumableLoader
from megatron_ucp.engines.save import SAVE_FAILED, SaveReport, as_save_error, ended, stamp
from megatron_ucp.errors import UsageError
from megatron_ucp.formats.deepspeed.target import Target
from megatron_ucp.formats.output_folder import Syncs
from megatron_ucp.formats.store import Location
from megatron_ucp.reshard import agree
from megatron_ucp.reshard.convert import WRITABLE, Writable
from megatron_ucp.reshard.folder import RanksFolderSink, require_plain
from megatron_ucp.reshard.memories import Memories
from megatron_ucp.reshard.options import absolute_path, check_switch
from megatron_ucp.reshard.target import SourceSettings
from megatron_ucp.reshard.transfer import TransferRun, transfer


@agree.door("the save")
def save(
    engine: Any,
    save_dir: str | Path,
    *,
    format: str | None = None,
    tag: str | None = None,
    arguments: Mapping[str, Any] | Any = None,
    durable: bool = True,
    keep_latest: int | None = None,
    rng: bool = True,
    loader: ResumableLoader | None = None,
    ckpt_format: str = TORCH_DIST,
) -> SaveReport:
    """Saves megatron-core's own stack, as stock Megatron-LM and every engine here load it; with a
    `format` any attached engine, as a folder for FSDP2. Atomic and collective. For itself a
    DeepSpeed engine saves by its own `save_checkpoint`.

    Args:
        engine: What `attach_megatron` returned. Its `iteration` names the tag (`iter_0000100`).
            With a `format` also an engine of DeepSpeed that was attached.
        save_dir: The folder above the tags; its pointer then names the new one.
        format: "dcp" (a folder for FSDP2's own `dcp.load`), "accelerate" (folders for FSDP2 under
            Accelerate or Trainer) or "torchtitan" (a folder for its checkpointer), as `convert`
            writes them of a save; no pointer names them. Default: what the engine's own program
            loads.
        tag: With a `format`: the name of the new folder. Default: `step-100`, of Accelerate's
            `checkpoint-100`.
        arguments: Megatron-LM's flags (a Namespace or a mapping), which its own load asks for.
            Default: those that the model shows.
        durable: Whether files are on disk before they count.
        keep_latest: How many whole tags of this run are left. Default: all.
        rng: Whether random states are kept.
        loader: A `ResumableLoader`, whose position is kept.
        ckpt_format: "torch_dist", the one format of Megatron-LM's that is written.

    Returns:
        What was done: path, mesh, step, bytes, seconds, notes. Of a stack that is saved in the
        background (see `attach_megatron`) that it goes on: `ucp.wait` waits, and `ucp.report` then
        says what was done. With a `format` the folder is there when this returns.

    Raises:
        SaveError: Where a file can't be written, on every rank; older tags are as they were. In
            the background that is raised by what the program next asks for.
        UsageError: Before the first step, for another engine, and for what a format has no place
            for.
        UnsupportedError: For another `ckpt_format`.
        UcpError: Where a `format` can't hold the engine's state exactly.

    Example:
        >>> stack = ucp.attach_megatron(model, optimizer, opt_param_scheduler)
        >>> saved = ucp.save(stack, "megatron")
        >>> saved = ucp.save(stack, "fsdp", format="dcp")
    """
    own: dict[str, Any] = {
        "arguments": arguments,
        "keep_latest": keep_latest,
        "rng": rng,
        "loader": loader,
        "ckpt_format": ckpt_format,
    }
    agree.require_same({"format": agree.plain_option(format), "tag": agree.plain_option(tag)})
    if format is None:
        with agree.together():
            if tag is not None:
                raise _no_place("tag", "a save for the engine's own program", "format")
        return save_stack(engine, save_dir, durable=durable, **own)
    with agree.together():
        row = _row(engine, format, own)
        check_switch("durable", durable)
        parent = absolute_path(save_dir)
    return _save_as(engine, parent, row, tag, durable)


_DEFAULTS = {
    "arguments": None,
    "keep_latest": None,
    "rng": True,
    "loader": None,
    "ckpt_format": TORCH_DIST,
}


def _row(engine: Any, format: str, own: Mapping[str, Any]) -> Writable:
    """The format of a name. Raises UsageError for one that is not written from memory, for what it
    has no place for, and for what is no attached engine."""
    rows = {name: row for name, row in WRITABLE.items() if row.tag_name}
    if format not in rows:
        raise UsageError(
            "there is no such format to save an engine in",
            expected=", ".join(rows),
            found=repr(format),
            fix="give one of these; ucp.convert writes others of a checkpoint",
        )
    require_attached(engine)
    for name, value in own.items():
        if value != _DEFAULTS[name]:
            raise _no_place(name, f"a folder in the format {format}", name)
    return rows[format]


def _no_place(name: str, what: str, left: str) -> UsageError:
    fix = f"leave out {left}" if left == name else f"give {left} too, or leave out {name}"
    return UsageError(f"{what} has no place for {name}", found=name, fix=fix)


def _save_as(
    engine: Any, parent: Location, row: Writable, tag: str | None, durable: bool
) -> SaveReport:
    """Writes the folder, whole or not at all. Collective; every rank sees the same disk."""
    started, handle = time.perf_counter(), getattr(engine, HANDLE)
    checksums = handle.options.get("checksums", True)
    lent = lent_by(engine, HoldOptions(rng=False, checksums=checksums))
    saved_at = agree.of_first(stamp)
    sync = Syncs(durable)
    with agree.together():
        known = lent.known
        original = replace(known.original, run={**known.original.run, "saved_at": saved_at})
        run = replace(known, original=original, manifest=original)
        steps = int(original.run.get(STEPS, 0))
        folder = parent / (tag or row.tag_name.format(steps))
        if agree.world()[0] == 0:
            require_plain(folder)
        origin = SourceSettings(run, False)
        wanted = origin.wanted(Target(Mesh()).with_zero_of(original.mesh), None)
        origin.take_values(None, {"per_rank"})
        output = replace(row.plan(origin, wanted, None, folder), verb="save")
    sink = RanksFolderSink(folder, output, sync)
    sink.what_failed = SAVE_FAILED
    with as_save_error(), say.progress("save") as advance:
        done = transfer(
            Memories(str(folder), lent.holder), sink, run=TransferRun(progress=advance)
        ).done
    sizes = agree.gather(done)
    seconds = time.perf_counter() - started
    report = SaveReport(
        str(folder),
        f"{original.mesh} -> {row.name}",
        steps,
        sum(sizes),
        seconds,
        sync.seconds,
        durable=durable,
        notes=(*run.notes, *origin.notes),
        blocked_seconds=seconds,
        bytes_by_rank=tuple(sizes),
    )
    return ended(engine, report)
