"""What the ranks do in `benchmarks.save`."""

import os
import shutil
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import megatron_ucp as ucp
from benchmarks.cases import Mesh
from benchmarks.model import make_engine, train_step
from megatron_ucp.engines.deepspeed.save import Asked, save
from megatron_ucp.engines.saves import Saving


def measure(
    folder: str, size: dict[str, int], repetitions: int
) -> list[dict[str, dict[str, float]]]:
    """Saves of one engine, durable and not, one after the other; seconds of each on this rank."""
    mesh = Mesh(zero=1)
    engine = make_engine(mesh, size)
    train_step(engine, mesh)
    stock_save = engine.save_checkpoint
    ucp.attach(engine)
    out: list[dict[str, dict[str, float]]] = []
    for number in range(repetitions + 1):  # the first one warms up
        each: dict[str, dict[str, float]] = {}
        for durable in (False, True) if number % 2 else (True, False):
            dist.barrier()
            how, place = Saving(durable=durable), Path(folder)
            report: Any = save(Asked(engine, None, how, stock_save, place, "tag", {}, True, False))
            own = report.seconds - report.stock_seconds - report.sync_seconds
            each["durable" if durable else "not durable"] = {
                "own": own,
                "stock": report.stock_seconds,
                "sync": report.sync_seconds,
                "seconds": report.seconds,
            }
            dist.barrier()
            if dist.get_rank() == 0:
                shutil.rmtree(Path(folder) / "tag")  # a new tag each time, as in a run
        out.append(each)
    engine.destroy()
    return out[1:]


WAYS = ("stock", "direct", "background", "cp and sync", "copy in memory")


def measure_ways(
    folder: str, mesh: Mesh, size: dict[str, int], repetitions: int
) -> list[dict[str, Any]]:
    """Saves of one engine by every way, in turns, and copies of the same bytes on disk and in
    memory; the first round is not counted. Of this rank: seconds until the pointer names the tag,
    seconds in which training stands still, bytes written."""
    engine = make_engine(mesh, size)
    train_step(engine, mesh)
    ucp.attach(engine, save="background")
    out: list[dict[str, Any]] = []
    for number in range(repetitions + 1):
        turn = number % 3
        ways = [*WAYS[turn:3], *WAYS[:turn], *WAYS[3:]]
        out.append({way: _measured(engine, Path(folder), way) for way in ways})
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(folder)
        dist.barrier()
    engine.destroy()
    return out[1:]


def bytes_by_rank(folder: str, mesh: Mesh, size: dict[str, int]) -> tuple[int, ...]:
    """What each rank writes of a save."""
    engine = make_engine(mesh, size)
    train_step(engine, mesh)
    ucp.attach(engine, save="direct")
    engine.save_checkpoint(folder)
    report = ucp.report(engine).save
    engine.destroy()
    assert report is not None
    return report.bytes_by_rank


def _measured(engine: Any, folder: Path, way: str) -> dict[str, Any]:
    own_bytes = _own_bytes(folder) if way not in WAYS[:3] else 0
    os.sync()
    dist.barrier()
    if way == "copy in memory":
        return {"blocked": _copied(own_bytes), "bytes": own_bytes}
    started = time.perf_counter()
    if way == "cp and sync":
        if dist.get_rank() == 0:
            subprocess.run(["sh", "-c", f"cp -r {folder}/direct {folder}/copy && sync"], check=True)
        dist.barrier()
        return {"seconds": time.perf_counter() - started}
    handle = engine.ucp
    handle.how = replace(handle.how, way=way)
    engine.save_checkpoint(str(folder), tag=way)
    blocked = time.perf_counter() - started
    ucp.wait(engine)
    dist.barrier()
    seconds = time.perf_counter() - started
    report = ucp.report(engine).save
    assert report is not None
    return {"blocked": blocked, "seconds": seconds, "bytes": report.bytes_by_rank}


def _own_bytes(folder: Path) -> int:
    """What this rank writes of a save."""
    files = [path for path in (folder / "direct").iterdir() if path.suffix == ".pt"]
    return sum(path.stat().st_size for path in files) // dist.get_world_size()


def _copied(size: int) -> float:
    """Seconds to copy so many bytes into memory that was used before; both ranks at once."""
    source = torch.ones(size, dtype=torch.uint8)
    target = torch.zeros(size, dtype=torch.uint8)
    dist.barrier()
    started = time.perf_counter()
    target.copy_(source)
    return time.perf_counter() - started
