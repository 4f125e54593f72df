"""Saves of a model of a billion parameters on one GPU: how long training stands still, beside a
copy of as many bytes into pinned memory and beside stock's save; steps per second meanwhile.

    torchrun --nproc-per-node 1 -m benchmarks.gpu_saves FOLDER    # two minutes; 45 GB in FOLDER

The engine is DeepSpeed's at ZeRO-1 in bf16 with AdamW. In each repetition: stock's save and a
direct one; a save in the background, with steps while it is written; three copies into memory that
is there already, of which the fastest counts. The first save in the background makes its host
memory, pinned, and is told apart. Prints its figures; without a GPU it says so.
"""

import shutil
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import megatron_ucp as ucp
from benchmarks.cases import Mesh
from benchmarks.model import POSITIONS, VOCABULARY, make_engine

SIZE = {"width": 1792, "layers": 24}
REPETITIONS, STEPS_S = 3, 8.0


def main() -> int:
    if not torch.cuda.is_available():
        print("this benchmark needs a GPU")
        return 1
    import deepspeed

    folder = Path(sys.argv[1])
    deepspeed.init_distributed()
    engine = ucp.attach(make_engine(Mesh(1), SIZE), save="background")
    tokens = torch.randint(VOCABULARY, (1, POSITIONS), device=engine.device)
    steps_per_second(engine, tokens)
    rate = steps_per_second(engine, tokens)
    first, _, _ = saved(engine, folder, "background")
    print(f"{torch.cuda.get_device_name()}: {rate:.2f} steps a second; {own_bytes(engine):,} bytes")
    found: dict[str, list[float]] = {}
    for _ in range(REPETITIONS):
        for way in ("stock", "direct"):
            found.setdefault(way, []).append(saved(engine, folder, way)[1])
        blocked, _, beside = saved(
            engine, folder, "background", lambda: steps_per_second(engine, tokens)
        )
        copied = copy_seconds(own_bytes(engine))
        found.setdefault("training waits / copy", []).append(blocked / copied)
        found.setdefault("training waits / stock", []).append(blocked / found["stock"][-1])
        found.setdefault("steps beside a save / without", []).append(beside / rate)
    print(f"training waits for the first save: {first:.3f} s")
    for name, each in found.items():
        print(f"{name}: {statistics.median(each):.4g}")
    shutil.rmtree(folder)
    engine.destroy()
    return 0


def steps_per_second(engine: Any, tokens: torch.Tensor) -> float:
    """Of so many seconds of training."""
    count, started = 0, time.perf_counter()
    while time.perf_counter() - started < STEPS_S:
        engine.backward(engine(tokens))
        engine.step()
        torch.cuda.synchronize()
        count += 1
    return count / (time.perf_counter() - started)


def saved(
    engine: Any, folder: Path, way: str, meanwhile: Callable[[], float] = lambda: 0.0
) -> tuple[float, float, float]:
    """Seconds until the call returned, seconds until the pointer named it, and what `meanwhile`
    gave, in between."""
    engine.ucp.save_options = replace(engine.ucp.save_options, way=way)
    torch.cuda.synchronize()
    started = time.perf_counter()
    engine.save_checkpoint(str(folder), tag=way)
    blocked = time.perf_counter() - started
    found = meanwhile()
    ucp.wait(engine)
    return blocked, time.perf_counter() - started, found


def own_bytes(engine: Any) -> int:
    """What the last save wrote."""
    report = ucp.report(engine).save
    assert report is not None
    return sum(report.bytes_by_rank)


def copy_seconds(size_bytes: int) -> float:
    """Of so many bytes from the GPU into pinned memory."""
    source = torch.empty(size_bytes, dtype=torch.uint8, device="cuda")
    target = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
    found: list[float] = []
    for _ in range(3):
        torch.cuda.synchronize()
        started = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        found.append(time.perf_counter() - started)
    return min(found)


if __name__ == "__main__":
    raise SystemExit(main())
