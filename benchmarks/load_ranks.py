"""What the ranks do in `benchmarks.load`; every function is called on both ranks at once."""

import ctypes
import gc
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import megatron_ucp as ucp
from benchmarks.model import make_engine, train_step

STAGES = (1, 3)
WORKERS = 2


def save(folder: str, size: dict[str, int]) -> int:
    """One checkpoint per stage under `folder`; returns the number of parameters."""
    count = 0
    for stage in STAGES:
        engine = make_engine(stage, size)
        count = sum(getattr(p, "ds_numel", p.numel()) for p in engine.module.parameters())
        train_step(engine, engine.module.wte.num_embeddings)
        engine.save_checkpoint(folder, tag=f"z{stage}")
        engine.destroy()
        del engine
        gc.collect()
    os.sync()
    return count


class Loads:
    """Two engines of both stages, and every way to fill them, by name."""

    def __init__(self, folder: str, size: dict[str, int]) -> None:
        self.folder = folder
        self.engines = {stage: make_engine(stage, size) for stage in STAGES}
        self.reports: dict[str, tuple[int, int]] = {}

    def clear(self, stage: int) -> None:
        """No optimizer states, as in a new engine; their memory goes back to the system."""
        self.engines[stage].optimizer.optimizer.state.clear()
        gc.collect()
        ctypes.CDLL("libc.so.6").malloc_trim(0)

    def ours(self, into: int, source: int, checksums: bool) -> None:
        report = ucp.load(self.engines[into], self.folder, tag=f"z{source}", checksums=checksums)
        self.reports[f"ucp z{source} to z{into}{' checked' if checksums else ''}"] = (report.checked_bytes,
                                                                                     report.unchecked_bytes)

    def stock(self, stage: int, universal: bool = False) -> None:
        engine = self.engines[stage]
        engine._config.load_universal_checkpoint = universal
        path, _ = engine.load_checkpoint(self.folder, tag=f"z{stage}_universal" if universal else f"z{stage}")
        engine._config.load_universal_checkpoint = False
        if path is None:
            raise RuntimeError("stock DeepSpeed did not load")

    def floor(self, stage: int) -> None:
        """This rank's own optimizer file, read once into fresh memory: no load can be faster by much."""
        path = next(Path(self.folder, f"z{stage}").glob(f"*zero_pp_rank_{dist.get_rank()}_mp_rank_00_optim_states.pt"))
        memory = torch.empty(path.stat().st_size, dtype=torch.uint8)
        with path.open("rb", buffering=0) as file:
            view, at = memory.numpy().data, 0
            while count := file.readinto(view[at:at + 2**28]):
                at += count

    def ways(self) -> dict[str, tuple[int, Callable[[], None]]]:
        """Name -> (stage of the engine that it fills, the call)."""
        out: dict[str, tuple[int, Callable[[], None]]] = {}
        for into, other in ((1, 3), (3, 1)):
            out[f"stock z{into}"] = into, lambda into=into: self.stock(into)
            for source in (other, into):
                out[f"ucp z{source} to z{into}"] = into, lambda i=into, s=source: self.ours(i, s, False)
                out[f"ucp z{source} to z{into} checked"] = into, lambda i=into, s=source: self.ours(i, s, True)
            out[f"stock universal z{into}"] = into, lambda into=into: self.stock(into, universal=True)
            out[f"floor z{into}"] = into, lambda into=into: self.floor(into)
        return out

    def needed_bytes(self, stage: int) -> int:
        """Masters and two moments of this rank."""
        opt = self.engines[stage].optimizer
        masters = opt.single_partition_of_fp32_groups if stage == 1 else opt.fp32_partitioned_groups_flat
        return sum(3 * master.numel() * master.element_size() for master in masters)

    def destroy(self) -> None:
        for engine in self.engines.values():
            engine.destroy()


def timed(call: Callable[[], None]) -> tuple[float, float]:
    """Seconds until both ranks are through, and processor seconds of this one, which other work disturbs less."""
    dist.barrier()
    started, busy = time.perf_counter(), time.process_time()
    call()
    busy = time.process_time() - busy
    dist.barrier()
    return time.perf_counter() - started, busy


def convert(folder: str, stage: int) -> float:
    """Seconds of stock's own conversion, in a process of its own; its output is new each time."""
    seconds = 0.0
    if dist.get_rank() == 0:
        output = f"{folder}/z{stage}_universal"
        shutil.rmtree(output, ignore_errors=True)
        os.makedirs(output)
        done = subprocess.run([sys.executable, "-m", "benchmarks.convert", f"{folder}/z{stage}", output, str(WORKERS),
                               str(stage)], capture_output=True, text=True, check=False, env=_alone())
        if done.returncode:
            raise RuntimeError(f"stock conversion failed: {done.stderr[-2000:]}")
        seconds = float(done.stdout.splitlines()[-1])
        os.sync()  # its dirty pages are not written while something else is timed
    dist.barrier()
    return seconds


def _alone() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT")}


def measure(folder: str, size: dict[str, int], repetitions: int) -> dict[str, Any]:
    """Seconds of every way, `repetitions` times, interleaved; the first round is not counted."""
    loads = Loads(folder, size)
    seconds: dict[str, list[float]] = {}
    cpu_seconds: dict[str, list[float]] = {}
    for repetition in range(repetitions + 1):
        for stage in STAGES:
            found = convert(folder, stage)
            if repetition:
                seconds.setdefault(f"stock convert z{stage}", []).append(found)
        ways = list(loads.ways().items())
        turn = repetition % len(ways)
        for name, (stage, call) in ways[turn:] + ways[:turn]:  # none always follows the same other
            loads.clear(stage)
            wall, busy = timed(call)
            if repetition:
                seconds.setdefault(name, []).append(wall)
                cpu_seconds.setdefault(name, []).append(busy)
    for way in ("ucp z3 to z1", "ucp z1 to z3"):  # what was timed did its work
        loads.clear(int(way[-1]))
        loads.ways()[way][1]()
        _check(loads.engines[int(way[-1])])
    loads.destroy()
    return {"seconds": seconds, "cpu_seconds": cpu_seconds, "bytes_checked_unchecked": loads.reports}


def _check(engine: Any) -> None:
    for group in engine.optimizer.optimizer.param_groups:
        for master in group["params"]:
            state = engine.optimizer.optimizer.state[master]
            if float(state["step"]) != 1 or not state["exp_avg"].any() or state["exp_avg_sq"].shape != master.shape:
                raise RuntimeError("a load left an optimizer without states")


def observed(folder: str, size: dict[str, int], way: str, marker: str) -> dict[str, int]:
    """One load between two files that a watcher outside of the process sees appear; this rank's memory afterwards."""
    loads, rank = Loads(folder, size), dist.get_rank()
    stage, call = loads.ways()[way]
    loads.clear(stage)
    call()  # once before, as the first load imports modules and grows buffers that stay
    loads.clear(stage)
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM, the peak that the kernel keeps, starts again
    Path(f"{marker}.begin.{rank}").touch()
    call()
    Path(f"{marker}.end.{rank}").touch()
    peak = status("VmHWM")
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    out = {"needed_bytes": loads.needed_bytes(stage), "anonymous_after": status("RssAnon"),
           "peak_resident_over_after": peak - status("VmRSS"),
           "largest_shard_bytes": max(4 * -(-getattr(p, "ds_numel", p.numel()) // dist.get_world_size())
                                      for p in loads.engines[stage].module.parameters())}
    loads.destroy()
    return out


def status(field: str, pid: int | str = "self") -> int:
    """A field of /proc/<pid>/status in bytes."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    return 0
