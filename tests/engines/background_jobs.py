"""What the ranks do in the tests of saves that go on beside training, of both engines."""

import os
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

import megatron_ucp as ucp
from megatron_ucp.engines.background import Background, background_of
from megatron_ucp.reshard.folder import RangeWriter
from tests.engines.kinds import attached, kind_of, state_after_load
from tests.engines.save_jobs import listing


def background_for(handle: Any) -> Background:
    """What writes in the background of an engine."""
    found = background_of(handle)
    assert found is not None
    return found


def failing(setup: Any, folder: str, pointer: str, how: str) -> dict[str, Any]:
    """A good save, one that fails in the background on rank 1, a good one. What is said and left
    after the second one, with the text of the pointer."""
    kind = kind_of(setup)
    options = {"warn": {"on_error": "warn"}, "hangs": {"deadline": 1.0}}.get(how, {})
    engine = attached(setup, save="background", **options)
    handle = kind.handle(engine)
    kind.train(engine, 1)
    engine.save_checkpoint(folder)
    ucp.wait(handle)
    kind.train(engine, 1, first=1)
    write = RangeWriter.write
    if dist.get_rank() == 1:
        RangeWriter.write = _hanging if how == "hangs" else _refused  # type: ignore
    out: dict[str, Any] = {"error": "", "message": ""}
    try:
        engine.save_checkpoint(folder)
        kind.train(engine, 1, first=2)  # goes on meanwhile
        ucp.wait(handle)
    except ucp.UcpError as error:
        out |= {"error": type(error).__name__, "message": str(error)}
    RangeWriter.write = write  # type: ignore[method-assign]
    dist.barrier()
    out["tags"] = [name for name in listing(folder) if not name.startswith(".")]
    with open(f"{folder}/{pointer}") as file:
        out["latest"] = file.read()
    dist.barrier()
    engine.save_checkpoint(folder)
    ucp.wait(handle)
    want = kind.settled_state(engine)
    kind.close(engine)
    return out | {"then": state_after_load(setup, folder, want)["differences"]}


def _refused(_: RangeWriter, one: Any) -> Any:
    raise OSError(28, "No space left on device", str(one.path))


def _hanging(_: RangeWriter, one: Any) -> Any:
    time.sleep(4.0)
    raise OSError(5, "Input/output error", str(one.path))


def die(setup: Any, folder: str) -> None:
    """Rank 1 dies while it writes in the background; rank 0 hears of it."""
    kind = kind_of(setup)
    engine = attached(setup, save="background")
    kind.train(engine, 1)
    engine.save_checkpoint(folder)
    ucp.wait(kind.handle(engine))
    kind.train(engine, 1, first=1)
    if dist.get_rank() == 1:
        RangeWriter.write = lambda *_: os._exit(7)  # type: ignore
    engine.save_checkpoint(folder)
    try:
        ucp.wait(kind.handle(engine))
    except ucp.UcpError as error:
        raise AssertionError(f"{type(error).__name__}: {error} {listing(folder)}") from error


def busy(setup: Any, folder: str, exports: bool) -> dict[str, list[str]]:
    """The tags that are there when a second save was asked for while the first one was written: it
    waits, or is skipped. An export, where the engine `exports`, waits too."""
    kind, out = kind_of(setup), dict[str, list[str]]()
    for word in ("wait", "skip"):
        engine = attached(setup, save="background", busy=word)
        write = RangeWriter.write
        RangeWriter.write = slowly(write)  # type: ignore[method-assign]
        for step in range(2):
            kind.train(engine, 1, first=step)
            engine.save_checkpoint(f"{folder}/{word}")
        RangeWriter.write = write  # type: ignore[method-assign]
        if exports:
            ucp.export_hf(kind.handle(engine), f"{folder}/{word}.hf")
        else:
            ucp.wait(kind.handle(engine))
        dist.barrier()
        out[word] = [name for name in listing(f"{folder}/{word}") if not name.startswith(".")]
        kind.close(engine)
        dist.barrier()
    return out


def slowly(write: Callable[..., Any]) -> Callable[..., Any]:
    def slow(*given: Any) -> Any:
        time.sleep(0.1)
        return write(*given)

    return slow


def memory_of(setup: Any, folder: str, **options: Any) -> tuple[int, int, int]:
    """Bytes of the snapshot's memory after a save, after a second one, and bytes that this rank
    wrote."""
    kind = kind_of(setup)
    engine = attached(setup, save="background", **options)
    held = []
    for step in range(2):
        kind.train(engine, 1, first=step)
        engine.save_checkpoint(folder)
        ucp.wait(kind.handle(engine))
        held.append(background_for(kind.handle(engine)).snapshot.size_bytes)
    report = ucp.report(kind.handle(engine)).save
    kind.close(engine)
    return held[0], held[1], report.bytes_by_rank[dist.get_rank()]
