"""What the ranks do in `benchmarks.load`; every function is called on both ranks at once."""

import ctypes
import gc
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import megatron_ucp as ucp
from benchmarks.cases import Mesh, Pair
from benchmarks.model import close, family, make_engine, train_step
from megatron_ucp.engines.deepspeed.optimizer import broadcast_each

WORKERS = 2


def save(folder: str, mesh: Mesh, size: dict[str, int]) -> int:
    """The checkpoint of a mesh under `folder`; returns the number of its parameters, each share of
    a cut one counted."""
    engine = make_engine(mesh, size, attach=True)
    train_step(engine, mesh)
    engine.save_checkpoint(folder, tag=str(mesh))
    count = sum(getattr(p, "ds_numel", p.numel()) for p in engine.module.parameters())
    close(engine, mesh)
    del engine
    gc.collect()
    os.sync()
    return count


class Loads:
    """An engine of one mesh, and every way to fill it, by name."""

    def __init__(self, folder: str, mesh: Mesh, size: dict[str, int]) -> None:
        self.folder, self.mesh = folder, mesh
        self.engine = make_engine(mesh, size)
        self.reports: dict[str, tuple[int, int]] = {}

    def clear(self) -> None:
        """No optimizer states, as in a new engine; their memory goes back to the system."""
        self.engine.optimizer.optimizer.state.clear()
        gc.collect()
        ctypes.CDLL("libc.so.6").malloc_trim(0)

    def ours(self, name: str, source: Mesh, checksums: bool) -> None:
        report = ucp.load(
            self.engine, self.folder, tag=str(source), checksums=checksums, family=family(self.mesh)
        )
        self.reports[name] = (report.checked_bytes, report.unchecked_bytes)

    def stock(self, tag: str, universal: bool = False) -> None:
        self.engine._config.load_universal_checkpoint = universal
        path, _ = self.engine.load_checkpoint(self.folder, tag=tag)
        self.engine._config.load_universal_checkpoint = False
        if path is None:
            raise RuntimeError("stock DeepSpeed did not load")

    def floor(self) -> None:
        """As many bytes as this rank's masters and moments, read once into fresh memory: no load
        can be faster by much."""
        rank, left = dist.get_rank(), self.needed_bytes()
        files = sorted(Path(self.folder, str(self.mesh)).glob("*_optim_states.pt"))
        memory = torch.empty(left, dtype=torch.uint8)
        with files[rank].open("rb", buffering=0) as file:
            view, at = memory.numpy().data, 0
            while count := file.readinto(view[at : at + 2**28]):
                at += count

    def exchange(self) -> None:
        """What ZeRO-1 leaves to do once masters are read: every rank gets the weights that others
        step, broadcast to where they lie."""
        opt = self.engine.optimizer
        partitioned = opt.parallel_partitioned_bit16_groups
        for parts, group in zip(partitioned, opt.real_dp_process_group, strict=True):
            broadcast_each(parts, group)

    def floor_and_exchange(self) -> None:
        self.floor()
        self.exchange()

    def ways(self, pairs: tuple[Pair, ...]) -> dict[str, Callable[[], None]]:
        """Name -> the call."""
        out: dict[str, Callable[[], None]] = {
            f"stock {self.mesh}": partial(self.stock, str(self.mesh)),
            f"floor {self.mesh}": self.floor,
        }
        if any(pair.floor is not None for pair in pairs):
            out[f"floor and exchange {self.mesh}"] = self.floor_and_exchange
        for pair in pairs:
            for name, checksums in ((f"ucp {pair}", False), (f"ucp {pair} checked", True)):
                out[name] = partial(self.ours, name, pair.source, checksums)
            if pair.converts:
                out[f"stock universal {pair}"] = partial(
                    self.stock, f"{pair.source}_universal", universal=True
                )
        return out

    def needed_bytes(self) -> int:
        """Masters and two moments of this rank."""
        return sum(3 * master.numel() * master.element_size() for master in self.masters())

    def masters(self) -> list[torch.Tensor]:
        opt = self.engine.optimizer
        return list(
            opt.fp32_partitioned_groups_flat
            if self.mesh.zero == 3
            else opt.single_partition_of_fp32_groups
        )

    def largest_shard_bytes(self) -> int:
        """Of a parameter's masters in a partition. Experts that are divided among ranks have as
        many fewer partitions."""
        ranks = self.engine.seq_dp_world_size
        return max(
            4
            * -(
                -getattr(p, "ds_numel", p.numel())
                // (ranks if getattr(p, "allreduce", True) else ranks // self.mesh.ep)
            )
            for p in self.engine.module.parameters()
        )

    def check(self) -> None:
        """That what was timed did its work."""
        for master in self.masters():
            state = self.engine.optimizer.optimizer.state[master]
            if (
                float(state["step"]) != 1
                or not state["exp_avg"].any()
                or state["exp_avg_sq"].shape != master.shape
            ):
                raise RuntimeError("a load left an optimizer without states")

    def close(self) -> None:
        close(self.engine, self.mesh)


def timed(call: Callable[[], None]) -> tuple[float, float]:
    """Seconds until both ranks are through, and processor seconds of this one, which other work
    disturbs less."""
    dist.barrier()
    started, busy = time.perf_counter(), time.process_time()
    call()
    busy = time.process_time() - busy
    dist.barrier()
    return time.perf_counter() - started, busy


def convert(folder: str, mesh: Mesh) -> float:
    """Seconds of stock's own conversion, in a process of its own; its output is new each time."""
    seconds = 0.0
    if dist.get_rank() == 0:
        output = f"{folder}/{mesh}_universal"
        shutil.rmtree(output, ignore_errors=True)
        os.makedirs(output)
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "benchmarks.convert",
                f"{folder}/{mesh}",
                output,
                str(WORKERS),
                str(mesh.zero),
            ],
            capture_output=True,
            text=True,
            check=False,
            env=_alone(),
        )
        if done.returncode:
            raise RuntimeError(f"stock conversion failed: {done.stderr[-2000:]}")
        seconds = float(done.stdout.splitlines()[-1])
        os.sync()  # its dirty pages are not written while something else is timed
    dist.barrier()
    return seconds


def _alone() -> dict[str, str]:
    return {
        k: v
        for k, v in os.environ.items()
        if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT")
    }


def try_universal(folder: str, pair: Pair, size: dict[str, int]) -> None:
    """Stock's conversion and universal load, once; raises where stock can't."""
    convert(folder, pair.source)
    loads = Loads(folder, pair.target, size)
    loads.stock(f"{pair.source}_universal", universal=True)
    loads.check()
    loads.close()


def measure(
    folder: str, mesh: Mesh, pairs: tuple[Pair, ...], size: dict[str, int], repetitions: int
) -> dict[str, Any]:
    """Seconds of every way into one mesh, `repetitions` times, interleaved; the first round is not
    counted."""
    loads = Loads(folder, mesh, size)
    seconds: dict[str, list[float]] = {}
    cpu_seconds: dict[str, list[float]] = {}
    ways = list(loads.ways(pairs).items())
    for repetition in range(repetitions + 1):
        for pair in pairs if repetition else ():  # `try_universal` made one
            if pair.converts:
                seconds.setdefault(f"stock convert {pair}", []).append(convert(folder, pair.source))
        turn = repetition % len(ways)
        for name, call in ways[turn:] + ways[:turn]:  # none always follows the same other
            loads.clear()
            wall, busy = timed(call)
            if repetition:
                seconds.setdefault(name, []).append(wall)
                cpu_seconds.setdefault(name, []).append(busy)
    for pair in pairs:
        loads.clear()
        loads.ours("", pair.source, True)
        loads.check()
    loads.close()
    loads.reports.pop("", None)
    return {
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "bytes_checked_unchecked": loads.reports,
    }


def measure_weights(
    folder: str, mesh: Mesh, size: dict[str, int], repetitions: int
) -> dict[str, list[float]]:
    """Seconds of loads from a Hugging Face folder of the mesh's own save, in fp32, and of one
    reading of as many bytes of it; the first round is not counted."""
    weights = Path(folder, f"{mesh}_hf")
    if dist.get_rank() == 0:
        ucp.export_hf(Path(folder, str(mesh)), weights, dtype="float32")
    loads = Loads(folder, mesh, size)
    left = loads.needed_bytes() // 3  # masters alone

    def floor() -> None:
        memory = torch.empty(left, dtype=torch.uint8)
        with (weights / "model.safetensors").open("rb", buffering=0) as file:
            at = 0
            while at < left:
                at += file.readinto(memory.numpy().data[at : min(at + 2**28, left)]) or 0

    def floor_and_exchange() -> None:
        floor()
        loads.exchange()

    ways: dict[str, Callable[[], Any]] = {
        "floor": floor,
        "floor and exchange": floor_and_exchange,
        "load": lambda: ucp.load(loads.engine, weights, family=family(mesh)),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for repetition in range(repetitions + 1):
        for name, call in ways.items():
            loads.clear()
            taken = timed(call)[0]
            if repetition:
                seconds[name].append(taken)
    loads.close()
    return seconds


def observed(
    folder: str, mesh: Mesh, pairs: tuple[Pair, ...], size: dict[str, int], way: str, marker: str
) -> dict[str, int]:
    """One load between two files that a watcher outside of the process sees appear; this rank's
    memory afterwards."""
    loads, rank = Loads(folder, mesh, size), dist.get_rank()
    call = loads.ways(pairs)[way]
    loads.clear()
    call()  # once before, as the first load imports modules and grows buffers that stay
    loads.clear()
    dist.barrier()
    Path("/proc/self/clear_refs").write_text(
        "5"
    )  # VmHWM, the peak that the kernel keeps, starts again
    Path(f"{marker}.begin.{rank}").touch()
    call()
    Path(f"{marker}.end.{rank}").touch()
    peak = status("VmHWM")
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    out = {
        "needed_bytes": loads.needed_bytes(),
        "anonymous_after": status("RssAnon"),
        "peak_resident_over_after": peak - status("VmRSS"),
        "largest_shard_bytes": loads.largest_shard_bytes(),
    }
    loads.close()
    return out


def status(field: str, pid: int | str = "self") -> int:
    """A field of /proc/<pid>/status in bytes."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    return 0
