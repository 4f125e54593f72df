"""Saving, on 124 million parameters and two ranks: every way to save, against copies of the same
bytes on disk (`cp` and `sync`) and in memory (by torch; a save's own copies take two thirds of
that); the size of a manifest.

    python -m benchmarks.save                         # about ten minutes, 6 GB of disk
    python -m benchmarks.save --tiny --repetitions 2  # to see that it runs

Beside them how even the ranks write at ZeRO-1 on four ranks, torch's own async_save of as many
bytes, megatron-core's save of its stack of as many parameters, steps per second while a save is
under way, and the host memory that one takes and leaves, as another process sees it. The manifest
is of a run that exists on paper only: 16,384 ranks, a mixture of experts with 10^12 parameters.
Results: benchmarks/results/save.json, "Saves" and "Many ranks" in docs/reference/performance.md.
"""

import argparse
import math
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import megatron_ucp as ucp
from benchmarks import frame, paper
from benchmarks.megatron import Large
from benchmarks.model import SIZES, Mesh, make_engine, train_step
from megatron_ucp.core.manifest_json import to_json
from megatron_ucp.engines.background import background_of
from megatron_ucp.engines.deepspeed.save import EngineSave
from megatron_ucp.engines.pt_files import RankFiles
from megatron_ucp.reshard import agree
from megatron_ucp.reshard.execute import copy_run
from tests.engines import megatron_jobs
from tests.engines.megatron_background_jobs import attached

RANKS, EVEN_RANKS, Z1 = 2, 4, Mesh(1)
COPY, FASTEST, TORCH = "copy in memory", "copy in memory fastest", "torch's async_save"
CLAIMS: list[frame.Claim] = [
    ("training waits / stock's whole save", "background blocked", "stock seconds", 0.1),
    ("direct / cp and sync", "direct seconds", "cp and sync seconds", 1.05),
    ("background / cp and sync", "background seconds", "cp and sync seconds", 1.2),
    ("direct / stock, both on disk", "direct seconds", "stock seconds", 1 / 1.8),
]
BLOCKED_LIMITS = {"124M": 1.1, "354M": 1.15}
OWN_LIMIT_MS, EVEN_LIMIT, MANIFEST_LIMIT_BYTES = 15.0, 1.02, 64 * 10**6
# over the bytes that a rank writes; a process doesn't give the last pages back
MEMORY_LIMIT, LEFT_LIMIT = 1.05, 0.01
STACK = {"hidden": 768, "layers": 12, "vocab": 50304}
HOST = "RssAnon", "RssShmem"


def measure(options: argparse.Namespace) -> dict[str, Any]:
    size, stack = ("tiny", {"layers": 2}) if options.tiny else ("124M", STACK)

    def on_ranks(ranks: int, job: Callable[..., Any], size: Any, *args: Any) -> list[Any]:
        folder = f"{options.folder}/{job.__name__}"
        return frame.on_ranks(ranks, job, folder, size, options.repetitions, *args)

    ways = frame.slowest(on_ranks(RANKS, ways_to_save, SIZES[size], True))
    grown = on_ranks(RANKS, memory_and_steps, SIZES[size])
    others = ways | frame.slowest(on_ranks(RANKS, stack_saves, stack))
    written = on_ranks(EVEN_RANKS, bytes_by_rank, SIZES[size])[0]
    most, left = (max(max(rank[key]) for rank in grown) for key in ("most", "left"))
    steps = {key: statistics.median(grown[0][key]) for key in ("beside", "without")}
    even, middle = max(written) / statistics.mean(written), frame.medians(ways)
    own_ms = 1000 * (middle["background own"] - middle[FASTEST])
    result = {
        "manifest": of_manifest(),
        "ways": [
            *claims_of(ways, BLOCKED_LIMITS["124M"]),
            frame.claim(
                "milliseconds of its own code that training waits for", own_ms, OWN_LIMIT_MS
            ),
            frame.claim("most bytes by one rank / mean", even, EVEN_LIMIT),
        ],
        "seconds of ways": ways,
        "memory": [
            frame.claim("host memory of a background save / this rank's bytes", most, MEMORY_LIMIT),
            frame.claim("host memory that a wait leaves / this rank's bytes", left, LEFT_LIMIT),
        ],
        "steps per second": {**steps, "ratio": steps["beside"] / steps["without"]},
        "others": frame.medians(others),
    }
    if not options.tiny:
        # what costs the same for any model weighs less
        larger = frame.slowest(on_ranks(RANKS, ways_to_save, SIZES["354M"], False))
        result["ways of 354M"] = claims_of(larger, BLOCKED_LIMITS["354M"])
    return result


def claims_of(ways: frame.Seconds, blocked: float) -> list[dict[str, Any]]:
    """`blocked` is the limit of the seconds in which training waits for a background save, by those
    of a copy."""
    waits = ("training waits / copy in memory", "background blocked", f"{COPY} blocked", blocked)
    return frame.claims_of(ways, [waits, *CLAIMS])


def of_manifest() -> dict[str, Any]:
    manifest = paper.mixture()
    size_bytes = len(to_json(manifest).encode())
    return {
        "mesh": str(paper.MIXTURE_MESH),
        "ranks": paper.MIXTURE_MESH.world,
        "parameters": sum(math.prod(spec.shape) for spec in manifest.params),
        "bytes": size_bytes,
        "limit": MANIFEST_LIMIT_BYTES,
        "met": size_bytes <= MANIFEST_LIMIT_BYTES,
    }


# ---- on the ranks


def trained(size: dict[str, int], **options: Any) -> Any:
    """An attached engine that has taken a step."""
    engine = make_engine(Z1, size)
    train_step(engine, Z1)
    return ucp.attach(engine, **options)


def ways_to_save(
    folder: str, size: dict[str, int], repetitions: int, has_torch: bool
) -> frame.Seconds:
    """Saves of one engine by every way, and copies of the same bytes on disk and in memory, and
    with `has_torch` torch's own save of as many. Of this rank: seconds until the pointer names the
    tag, seconds in which training stands still, those of them that are not in DeepSpeed's own
    code."""
    in_stock = [0.0]  # seconds in DeepSpeed's own save, without the files that it is to write
    frame.count_seconds(in_stock, EngineSave, "_stock", 1)
    frame.count_seconds(in_stock, RankFiles, "save", -1)
    engine = trained(size, save="background")
    source, tags = Path(folder, "source"), Path(folder, "tags")
    save_by(engine, source, "direct", in_stock)
    files = [path for path in frame.files_of(source) if path.suffix == ".pt"]
    own_bytes = sum(path.stat().st_size for path in files) // dist.get_world_size()
    seconds_of_copy = partial(frame.timed, frame.copying(own_bytes))
    fastest = partial(frame.timed, frame.copying(own_bytes, copy_run))
    ways: dict[str, Callable[[], Any]] = {
        way: partial(save_by, engine, tags, way, in_stock)
        for way in ("stock", "direct", "background")
    }
    ways["cp and sync seconds"] = lambda: frame.copy_and_sync(source, tags / "copy")
    ways[COPY] = lambda: {f"{COPY} blocked": seconds_of_copy(), FASTEST: fastest()}
    if has_torch:
        ways[TORCH] = lambda: save_by_torch(tags / "torch", own_bytes)
    return frame.in_turns(ways, repetitions, before=os.sync, after=lambda: frame.remove(tags))


def save_by(engine: Any, folder: Path, way: str, in_stock: list[float]) -> dict[str, float]:
    handle, before, started = engine.ucp, in_stock[0], time.perf_counter()
    handle.save_options = replace(handle.save_options, way=way)
    engine.save_checkpoint(str(folder), tag=way)
    blocked = time.perf_counter() - started
    own = blocked - (in_stock[0] - before)
    ucp.wait(engine)
    dist.barrier()
    seconds = time.perf_counter() - started
    return {f"{way} blocked": blocked, f"{way} own": own, f"{way} seconds": seconds}


def save_by_torch(folder: Path, own_bytes: int) -> dict[str, float]:
    """As many bytes of tensors that no other rank has, by torch's defaults, which sync."""
    from torch.distributed.checkpoint.state_dict_saver import async_save

    size, rank = min(own_bytes, 2**23), dist.get_rank()
    state = {f"{rank}.{number}": torch.ones(size // 4) for number in range(own_bytes // size)}
    group: Any = dist.new_group(backend="gloo")
    dist.barrier()
    started = time.perf_counter()
    saved: Any = async_save(state, checkpoint_id=folder, process_group=group)
    blocked = time.perf_counter() - started
    saved.result()
    dist.barrier()
    seconds = time.perf_counter() - started
    dist.destroy_process_group(group)
    return {f"{TORCH} blocked": blocked, f"{TORCH} seconds": seconds}


def bytes_by_rank(folder: str, size: dict[str, int], _: int) -> tuple[int, ...]:
    """What each rank writes of a save."""
    engine = trained(size, save="direct")
    engine.save_checkpoint(folder)
    report = ucp.report(engine).save
    assert report is not None
    return report.bytes_by_rank


def stack_saves(folder: str, size: dict[str, Any], repetitions: int) -> frame.Seconds:
    """Seconds of saves of megatron-core's stack in the background, then of its own ones, which
    wait, with a sync behind them. Not in turns: megatron-core's forks, and whoever then writes a
    page for the first time pays for it."""
    model = Large("gpt", dtype="bf16", tied=True, **size)
    engine = attached(megatron_jobs.make(model), save="background")
    megatron_jobs.train(engine, 1)

    def ours() -> None:
        ucp.save(engine.handle, Path(folder), arguments=megatron_jobs.arguments(engine))

    def stock() -> None:
        megatron_jobs.stock_save(engine, Path(folder))

    def save(way: str, call: Callable[[], None], finish: Callable[[], Any]) -> dict[str, float]:
        started = time.perf_counter()
        call()
        blocked = time.perf_counter() - started
        finish()
        dist.barrier()
        return {f"{way} blocked": blocked, f"{way} seconds": time.perf_counter() - started}

    def after() -> None:
        frame.remove(folder)
        megatron_jobs.train(engine, 1)

    seconds: frame.Seconds = {}
    for way, call, finish in (
        ("stack in the background", ours, lambda: ucp.wait(engine.handle)),
        ("megatron-core's save", stock, os.sync),
    ):
        ways = {way: partial(save, way, call, finish)}
        seconds |= frame.in_turns(ways, repetitions, before=os.sync, after=after)
    return seconds


def memory_and_steps(folder: str, size: dict[str, int], repetitions: int) -> frame.Seconds:
    """Of background saves whose snapshot is given back: host memory that they take, and leave
    after a wait, over what there was before the first one and by the bytes that this rank writes;
    then steps per second beside one, and without."""
    engine = trained(size, save="background", keep_snapshot=False)
    out: frame.Seconds = {"most": [], "left": [], "beside": [], "without": []}
    base = frame.memory_bytes(*HOST)
    for _ in range(repetitions):
        before, extra = frame.memory_bytes(*HOST), list[int]()
        with frame.peak(extra, *HOST):
            engine.save_checkpoint(folder, tag="still")
            ucp.wait(engine)
        report = ucp.report(engine).save
        assert report is not None
        written = report.bytes_by_rank[dist.get_rank()]
        out["most"].append((before + extra[0] - base) / written)
        out["left"].append((frame.memory_bytes(*HOST) - base) / written)
    for _ in range(repetitions):
        engine.save_checkpoint(folder, tag="training")
        out["beside"].append(steps_per_second(engine))
        ucp.wait(engine)
        out["without"].append(steps_per_second(engine, 5))
    frame.remove(folder)
    return out


def steps_per_second(engine: Any, steps: int | None = None) -> float:
    """Of so many steps, or of those until no rank saves any more."""
    background = background_of(engine)
    assert background is not None
    dist.barrier()
    started, done = time.perf_counter(), 0
    while done < steps if steps else any(agree.gather(background.is_busy)) or not done:
        train_step(engine, Z1)
        done += 1
    return done / (time.perf_counter() - started)


if __name__ == "__main__":
    raise SystemExit(frame.main("save"))
