"""What the ranks do in `benchmarks.megatron`."""

import os
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import megatron_ucp as ucp
from megatron_ucp.engines.deepspeed.optimizer import broadcast_each
from pretrain.mcore import models
from tests.engines.stack_jobs import (
    CONTENT,
    Engine,
    Mcore,
    arguments,
    close,
    make,
    sharded,
    stock_save,
    train,
)

FULL = {"hidden": 640, "layers": 12, "vocab": 32000}
_POSITIONS, _HEAD = 64, 64


@dataclass(frozen=True)
class Large(Mcore):
    """megatron-core's GPT with the distributed optimizer, in bf16."""

    hidden: int = 64
    vocab: int = 512

    @property
    def model(self) -> models.ModelConfig:
        return models.ModelConfig(
            "gpt",
            layers=self.layers,
            hidden=self.hidden,
            head_dim=_HEAD,
            ffn=4 * self.hidden,
            heads=self.hidden // _HEAD,
            groups=self.hidden // _HEAD,
            vocab=self.vocab,
            true_vocab=self.vocab,
            positions=_POSITIONS,
            tied=True,
            dtype=self.dtype,
            seed=self.seed,
        )


def measure(folder: str, size: dict[str, Any], repetitions: int) -> dict[str, Any]:
    """Seconds of every way to save and to load, interleaved; the first round is not counted."""
    engine = make(Large("gpt", dtype="bf16", tied=True, **size))
    train(engine, 1)
    work, rank = Path(folder), dist.get_rank()
    seconds: dict[str, list[float]] = {}
    for number in range(repetitions + 1):
        ways: dict[str, Callable[[], Any]] = {
            "ours save": lambda: ucp.save(
                engine.handle, work / "ours", arguments=arguments(engine)
            ),
            "stock save": lambda: stock_save(engine, work / "stock"),
            "copy": lambda: _copy(work, rank),
            "": lambda: _touch(engine, work / "stock"),
            "ours load": lambda: ucp.load(engine.handle, work / "ours"),
            "ours load of stock's": lambda: ucp.load(engine.handle, work / "stock"),
            "stock load": lambda: _stock_load(engine, work / "stock"),
            "floor": lambda: _floor(engine, work),
            "floor and exchange": lambda: (_floor(engine, work), _exchange(engine)),
        }
        for name, call in ways.items():
            taken = _timed(call)
            if number and name:
                seconds.setdefault(name, []).append(taken)
        if rank == 0:
            for one in work.iterdir():
                shutil.rmtree(one)
        dist.barrier()
    count = sum(param.numel() for param in engine.stack.bare[0].parameters())
    close(engine)
    return {"seconds": seconds, "parameters": count}


def _timed(call: Callable[[], Any]) -> float:
    """Until all ranks are through; nothing that was written before waits for the disk."""
    if dist.get_rank() == 0:
        os.sync()
    dist.barrier()
    started = time.perf_counter()
    call()
    dist.barrier()
    return time.perf_counter() - started


def _copy(work: Path, rank: int) -> None:
    """As many bytes as a save writes, and synced as a save syncs."""
    if rank == 0:
        subprocess.run(["sh", "-c", f"cp -r {work}/ours {work}/copy && sync"], check=True)


def _stock_load(engine: Engine, folder: Path) -> None:
    from megatron.core import dist_checkpointing

    state = sharded(engine, dict(CONTENT), loading=True)
    loaded: Any = dist_checkpointing.load(state, str(folder))
    engine.stack.bare[0].load_state_dict(loaded["model"])
    engine.optimizer.load_state_dict(loaded["optimizer"])


def _touch(engine: Engine, folder: Path) -> None:
    """Stock's save forks, and whoever then writes a page for the first time pays for it; that is
    counted as nobody's time."""
    _stock_load(engine, folder)
    ucp.load(engine.handle, folder)  # which writes gradients too


def _floor(engine: Engine, work: Path) -> None:
    """As many bytes as this rank's masters and moments, read once into fresh memory."""
    params = engine.stack.bare[0].parameters()
    left = 12 * sum(param.numel() for param in params) // dist.get_world_size()
    memory = torch.empty(left, dtype=torch.uint8)
    view, at = memory.numpy().data, 0
    for path in sorted((work / "ours").rglob("*.distcp")):
        with path.open("rb", buffering=0) as file:
            while at < left and (count := file.readinto(view[at : min(at + 2**28, left)])):
                at += count
    if at < left:
        raise RuntimeError(f"the files hold {at} bytes, {left} are needed")


def _exchange(engine: Engine) -> None:
    """Every rank gets the weights that others step."""
    for chunk in engine.stack.chunks:
        for group in chunk.bucket_groups:
            ranks = group.intra_distributed_optimizer_instance_group
            for bucket in group.buckets:
                broadcast_each(bucket.param_data.tensor_split(ranks.size()), ranks)
