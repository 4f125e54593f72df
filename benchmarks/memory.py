"""Steps in memory: seconds in which training stands still for one, against a copy in memory of as
many bytes; and a load from memory, against one from disk with a cold cache.

    python -m benchmarks.memory                         # 124M parameters, two ranks: two minutes
    python -m benchmarks.memory --tiny --repetitions 2  # to see that it runs

Two ranks over gloo on one machine, ZeRO-1. In each repetition, one after the other: a step that is
kept, as the end of a training step keeps it; a copy in memory of as many bytes as a rank keeps; a
load from memory; and a load from a tag on disk, of whose files the page cache has nothing. All
buffers were used before. Results: benchmarks/results/memory.json.
"""

import argparse
from pathlib import Path
from typing import Any

import megatron_ucp as ucp
from benchmarks import frame
from benchmarks.model import SIZES, Mesh, make_engine, train_step
from megatron_ucp.engines.memory import steps_of

RANKS = 2
DISK = "load from disk"
CLAIMS: list[frame.Claim] = [
    ("training waits / copy in memory", "blocked", "copy", 1.1),
    ("load from memory / load from disk, cold", "load from memory", DISK, 1.0),
]


def measure(options: argparse.Namespace) -> dict[str, Any]:
    size = SIZES["tiny" if options.tiny else "124M"]
    ranks = frame.on_ranks(RANKS, measure_steps, str(options.folder), size, options.repetitions)
    seconds = frame.slowest([rank["seconds"] for rank in ranks])
    return {
        "bytes": [rank["bytes"] for rank in ranks],
        "seconds": seconds,
        "medians": frame.medians(seconds),
        "claims": frame.claims_of(seconds, CLAIMS),
    }


def measure_steps(folder: str, size: dict[str, int], repetitions: int) -> dict[str, Any]:
    """Seconds of every way on this rank, by repetition."""
    mesh = Mesh(zero=1)
    engine = make_engine(mesh, size)
    ucp.attach(engine, save="direct", keep="memory", every=10**9, folder=folder)
    train_step(engine, mesh)
    engine.save_checkpoint(folder)
    train_step(engine, mesh)
    steps = steps_of(engine)
    assert steps is not None

    def keep() -> dict[str, float]:
        steps.keep(engine.global_steps)
        ucp.wait(engine)
        assert steps.report is not None
        taken = steps.report
        return {"blocked": taken.blocked_seconds, "until it counts": taken.seconds}

    def load_from_disk() -> dict[str, float]:
        assert engine.global_steps == 2, "the load before gave another step"
        frame.forget(Path(folder))
        return {DISK: frame.timed(lambda: ucp.load(engine, folder, tag="global_step1"))}

    keep()
    assert steps.report is not None
    size_bytes = steps.report.size_bytes
    ways = {
        "keep": keep,
        "copy": frame.copying(size_bytes),
        "load from memory": lambda: ucp.load(engine, folder),
        DISK: load_from_disk,
    }
    seconds = frame.in_turns(
        ways, repetitions, after=lambda: train_step(engine, mesh), rotates=False
    )
    path = steps.folder.path.parent
    engine.destroy()
    frame.remove(path)
    return {"bytes": size_bytes, "seconds": seconds}


if __name__ == "__main__":
    raise SystemExit(frame.main("memory", repetitions=7))
