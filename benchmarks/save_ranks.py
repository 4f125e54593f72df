"""What the ranks do in `benchmarks.save`."""

import functools
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import megatron_ucp as ucp
from benchmarks.cases import Mesh
from benchmarks.megatron_ranks import Large
from benchmarks.model import make_engine, train_step
from benchmarks.resize_ranks import held_bytes, peak
from megatron_ucp.engines.background import background_of
from megatron_ucp.engines.deepspeed.save import EngineSave
from megatron_ucp.engines.pt_files import RankFiles
from megatron_ucp.engines.save import SaveOptions, save_engine
from megatron_ucp.formats.tags import LATEST
from megatron_ucp.reshard import agree
from megatron_ucp.reshard.execute import copy_run
from tests.engines.stack_background_jobs import attached
from tests.engines.stack_jobs import Engine, arguments, close, make, stock_save, train


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
            how, place = SaveOptions(durable=durable), Path(folder)
            asked = engine, place, "tag", engine.global_steps, how, LATEST
            report: Any = save_engine(EngineSave(*asked, None, stock_save, {}, False))
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


TORCH = "torch's async_save"
BACKGROUND, STOCK_STACK = "stack in the background", "megatron-core's save"
WAYS = ("stock", "direct", "background", "cp and sync", "copy in memory", TORCH)


def measure_ways(
    folder: str, mesh: Mesh, size: dict[str, int], repetitions: int, others: bool
) -> list[dict[str, Any]]:
    """Saves of one engine by every way, in turns, and copies of the same bytes on disk and in
    memory, and with `others` torch's own save of as many; the first round is not counted. Of this
    rank: seconds until the pointer names the tag, seconds in which training stands still, those of
    them that are not in DeepSpeed's own code, bytes written."""
    _watch_stock()
    engine = make_engine(mesh, size)
    train_step(engine, mesh)
    ucp.attach(engine, save="background")
    out: list[dict[str, Any]] = []
    for number in range(repetitions + 1):
        turn = number % 3
        ways = [*WAYS[turn:3], *WAYS[:turn], *WAYS[3:]]
        ways = [way for way in ways if others or way != TORCH]
        out.append({way: _measured(engine, Path(folder), way) for way in ways})
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(folder)
        dist.barrier()
    engine.destroy()
    return out[1:]


_IN_STOCK = [0.0]  # seconds in DeepSpeed's own code, of all saves of this process


def _watch_stock() -> None:
    """From now on those seconds are counted: of its save without the files that it is to write."""
    _counted(EngineSave, "_stock", 1)
    _counted(RankFiles, "save", -1)


def _counted(owner: Any, name: str, sign: int) -> None:
    stock = getattr(owner, name)

    @functools.wraps(stock)
    def timed(*args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        try:
            return stock(*args, **kwargs)
        finally:
            _IN_STOCK[0] += sign * (time.perf_counter() - started)

    setattr(owner, name, timed)


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
        blocked, fastest = _copied(own_bytes, torch.Tensor.copy_), _copied(own_bytes, copy_run)
        return {"blocked": blocked, "fastest": fastest, "bytes": own_bytes}
    if way == TORCH:
        return _torch_saved(folder / "torch", own_bytes)
    started = time.perf_counter()
    if way == "cp and sync":
        if dist.get_rank() == 0:
            subprocess.run(["sh", "-c", f"cp -r {folder}/direct {folder}/copy && sync"], check=True)
        dist.barrier()
        return {"seconds": time.perf_counter() - started}
    handle, in_stock = engine.ucp, _IN_STOCK[0]
    handle.save_options = replace(handle.save_options, way=way)
    engine.save_checkpoint(str(folder), tag=way)
    blocked = time.perf_counter() - started
    own = blocked - (_IN_STOCK[0] - in_stock)
    ucp.wait(engine)
    dist.barrier()
    seconds = time.perf_counter() - started
    report = ucp.report(engine).save
    assert report is not None
    return {"blocked": blocked, "own": own, "seconds": seconds, "bytes": report.bytes_by_rank}


def _own_bytes(folder: Path) -> int:
    """What this rank writes of a save."""
    files = [path for path in (folder / "direct").iterdir() if path.suffix == ".pt"]
    return sum(path.stat().st_size for path in files) // dist.get_world_size()


def _copied(size: int, copy: Callable[..., Any]) -> float:
    """Seconds to copy so many bytes into memory that was used before; both ranks at once."""
    source = torch.ones(size, dtype=torch.uint8)
    target = torch.zeros(size, dtype=torch.uint8)
    dist.barrier()
    started = time.perf_counter()
    copy(target, source)
    return time.perf_counter() - started


def _torch_saved(folder: Path, own_bytes: int) -> dict[str, Any]:
    """As many bytes of tensors that no other rank has, by torch's defaults, which sync."""
    from torch.distributed.checkpoint.state_dict_saver import async_save

    size = min(own_bytes, 2**23)
    state = {
        f"{dist.get_rank()}.{number}": torch.ones(size // 4) for number in range(own_bytes // size)
    }
    group: Any = dist.new_group(backend="gloo")
    dist.barrier()
    started = time.perf_counter()
    saved: Any = async_save(state, checkpoint_id=folder, process_group=group)
    blocked = time.perf_counter() - started
    saved.result()
    dist.barrier()
    seconds = time.perf_counter() - started
    dist.destroy_process_group(group)
    return {"blocked": blocked, "seconds": seconds}


def measure_stack(folder: str, size: dict[str, Any], repetitions: int) -> dict[str, list[float]]:
    """megatron-core's stack: saves in the background, then its own, which waits, with a sync behind
    it; seconds of this rank as `measure_ways` has them. Not in turns: megatron-core's forks, and
    whoever then writes a page for the first time pays for it. The first of each is not counted."""
    engine = attached(make(Large("gpt", dtype="bf16", tied=True, **size)), save="background")
    train(engine, 1)
    out: dict[str, list[float]] = {}
    for way in (BACKGROUND, STOCK_STACK):
        for number in range(repetitions + 1):
            blocked, seconds = _stack_saved(engine, Path(folder), way)
            if number:
                out.setdefault(f"{way} blocked", []).append(blocked)
                out.setdefault(f"{way} seconds", []).append(seconds)
            dist.barrier()
            if dist.get_rank() == 0:
                shutil.rmtree(folder)
            train(engine, 1)
    close(engine)
    return out


def _stack_saved(engine: Engine, work: Path, way: str) -> tuple[float, float]:
    """Seconds in which training stands still, and until all is on disk."""
    os.sync()
    dist.barrier()
    started = time.perf_counter()
    if way == STOCK_STACK:
        stock_save(engine, work)
        blocked = time.perf_counter() - started
        os.sync()
    else:
        ucp.save(engine.handle, work, arguments=arguments(engine))
        blocked = time.perf_counter() - started
        ucp.wait(engine.handle)
    dist.barrier()
    return blocked, time.perf_counter() - started


HOST = ("RssAnon", "RssShmem")


def beside_training(
    folder: str, mesh: Mesh, size: dict[str, int], repetitions: int
) -> dict[str, list[float]]:
    """Of background saves whose snapshot is given back: host memory that they take, and leave
    after a wait, over what there was before the first one and by the bytes that this rank writes;
    then steps per second beside one, and without."""
    engine = make_engine(mesh, size)
    train_step(engine, mesh)
    ucp.attach(engine, save="background", keep_snapshot=False)
    out: dict[str, list[float]] = {"most": [], "left": [], "beside": [], "without": []}
    base = held_bytes(*HOST)
    for _ in range(repetitions):
        before, extra = held_bytes(*HOST), list[int]()
        with peak(extra, *HOST):
            engine.save_checkpoint(folder, tag="still")
            ucp.wait(engine)
        report = ucp.report(engine).save
        assert report is not None
        written = report.bytes_by_rank[dist.get_rank()]
        out["most"].append((before + extra[0] - base) / written)
        out["left"].append((held_bytes(*HOST) - base) / written)
    for _ in range(repetitions):
        engine.save_checkpoint(folder, tag="training")
        out["beside"].append(_steps_per_second(engine, mesh))
        ucp.wait(engine)
        out["without"].append(_steps_per_second(engine, mesh, 5))
    engine.destroy()
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)
    return out


def _steps_per_second(engine: Any, mesh: Mesh, steps: int | None = None) -> float:
    """Of so many steps, or of those until no rank saves any more."""
    background = background_of(engine)
    assert background is not None
    dist.barrier()
    started, done = time.perf_counter(), 0
    while done < steps if steps else any(agree.gather(background.is_busy)) or not done:
        train_step(engine, mesh)
        done += 1
    return done / (time.perf_counter() - started)
