"""What the ranks do in `benchmarks.save`."""

import shutil
from pathlib import Path
from typing import Any

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
