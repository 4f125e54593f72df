"""What the ranks do in `benchmarks.memory`."""

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import megatron_ucp as ucp
from benchmarks.cases import Mesh
from benchmarks.model import make_engine, train_step
from megatron_ucp.engines.memory import MemorySteps, steps_of


def measure(folder: str, size: dict[str, int], repetitions: int) -> dict[str, Any]:
    """Seconds of every way on this rank, by repetition; the first round is not counted."""
    mesh = Mesh(zero=1)
    engine = make_engine(mesh, size)
    ucp.attach(engine, save="direct", keep="memory", every=10**9, folder=folder)
    train_step(engine, mesh)
    engine.save_checkpoint(folder)
    train_step(engine, mesh)
    kept, seconds = steps_of(engine), list[dict[str, float]]()
    assert kept is not None
    for _ in range(repetitions + 1):
        blocked, counted, size_bytes = _kept(kept, engine)
        seconds.append(
            {"blocked": blocked, "until it counts": counted, "copy": _copied(size_bytes)}
        )
        seconds[-1]["load from memory"] = _timed(lambda: ucp.load(engine, folder))
        assert engine.global_steps == 2
        _forget(Path(folder))
        from_disk = _timed(lambda: ucp.load(engine, folder, tag="global_step1"))
        seconds[-1]["load from disk"] = from_disk
        train_step(engine, mesh)
    path = kept.folder.path.parent
    engine.destroy()
    dist.barrier()
    shutil.rmtree(path, ignore_errors=True)
    ways = {way: [one[way] for one in seconds[1:]] for way in seconds[0]}
    return {"bytes": size_bytes, "seconds": ways}


def _kept(kept: MemorySteps, engine: Any) -> tuple[float, float, int]:
    dist.barrier()
    kept.keep(engine.global_steps)
    ucp.wait(engine)
    assert kept.report is not None
    return kept.report.blocked_seconds, kept.report.seconds, kept.report.size_bytes


def _copied(size_bytes: int) -> float:
    """Copies so many bytes into memory that was used before; on all ranks at once."""
    source = torch.ones(size_bytes, dtype=torch.uint8)
    target = torch.zeros(size_bytes, dtype=torch.uint8)
    return _timed(lambda: target.copy_(source))


def _timed(work: Callable[[], Any]) -> float:
    dist.barrier()
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _forget(folder: Path) -> None:
    """The page cache lets go of all files."""
    for path in folder.rglob("*"):
        if path.is_file():
            handle = os.open(path, os.O_RDONLY)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(handle)
