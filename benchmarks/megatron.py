"""Megatron-core's own stack: `ucp.save` and `ucp.load` beside megatron-core's own save and load of
`fully_reshardable` files, 80 million parameters in bf16 on two ranks.

    python -m benchmarks.megatron                         # about four minutes
    python -m benchmarks.megatron --tiny --repetitions 2  # to see that it runs

The page cache is warm. `ucp.save` syncs its files before it returns and megatron-core's does not; a
save is also compared with `cp` and `sync` of the same bytes. `floor` reads as many bytes as a
rank's masters and moments, once; shown beside it is that with the exchange of weights between the
ranks, which the distributed optimizer has to do after any load. Results:
benchmarks/results/megatron.json, "megatron-core's own stack" in docs/reference/performance.md.
"""

import argparse
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

import megatron_ucp as ucp
from benchmarks import frame
from megatron_ucp.engines.live import broadcast_each
from pretrain.mcore import models
from tests.engines.megatron_jobs import (
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

RANKS = 2
CLAIMS: list[frame.Claim] = [
    ("load / megatron-core's load", "ours load", "stock load", 0.5),
    ("load of megatron-core's files / its load", "ours load of stock's", "stock load", 0.5),
    ("load / floor", "ours load", "floor", 1.2),
    ("save / megatron-core's save", "ours save", "stock save", 0.2),
    ("save / cp and sync", "ours save", "copy", 1.3),
]
FULL = {"hidden": 640, "layers": 12, "vocab": 32000}
_POSITIONS, _HEAD = 64, 64


@dataclass(frozen=True)
class Large(Mcore):
    """megatron-core's GPT with the distributed optimizer, in bf16."""

    hidden: int = 64
    vocab: int = 512

    @property
    def model(self) -> models.ModelConfig:
        heads = self.hidden // _HEAD
        width = {"hidden": self.hidden, "head_dim": _HEAD, "ffn": 4 * self.hidden}
        vocab = {"vocab": self.vocab, "true_vocab": self.vocab, "positions": _POSITIONS}
        return replace(super().model, **width, **vocab, heads=heads, groups=heads)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    size = {"layers": 2} if options.tiny else FULL
    found = frame.on_ranks(
        RANKS, measure_ways, str(options.folder / "work"), size, options.repetitions
    )[0]
    middle = frame.medians(found["seconds"])
    both = middle["ours load"] / middle["floor and exchange"]
    ratios = frame.claims_of(found["seconds"], CLAIMS)
    return {"ratios": ratios, **found, "over_floor_and_exchange": both, "ranks": RANKS}


# ---- on the ranks


def measure_ways(folder: str, size: dict[str, Any], repetitions: int) -> dict[str, Any]:
    """Seconds of every way to save and to load, one after the other."""
    engine = make(Large("gpt", dtype="bf16", tied=True, **size))
    train(engine, 1)
    work = Path(folder)
    ours, stock = work / "ours", work / "stock"
    ways: dict[str, Callable[[], Any]] = {
        "ours save": lambda: save(engine, ours),
        "stock save": lambda: stock_save(engine, stock),
        "copy": lambda: frame.copy_and_sync(ours, work / "copy"),
        "touch": lambda: touch(engine, stock),
        "ours load": lambda: load(engine, ours),
        "ours load of stock's": lambda: load(engine, stock),
        "stock load": lambda: stock_load(engine, stock),
        "floor": lambda: floor(engine, ours),
        "floor and exchange": lambda: (floor(engine, ours), exchange(engine)),
    }
    seconds = frame.in_turns(ways, repetitions, sync, lambda: frame.remove(work), rotates=False)
    count = sum(param.numel() for param in engine.stack.bare[0].parameters())
    close(engine)
    return {"seconds": seconds, "parameters": count}


def sync() -> None:
    """Nothing that was written before waits for the disk."""
    if frame.is_first():
        os.sync()


def save(engine: Engine, folder: Path) -> None:
    ucp.save(engine.handle, folder, arguments=arguments(engine))


def load(engine: Engine, folder: Path) -> None:
    ucp.load(engine.handle, folder)


def stock_load(engine: Engine, folder: Path) -> None:
    from megatron.core import dist_checkpointing

    state = sharded(engine, dict(CONTENT), loading=True)
    loaded: Any = dist_checkpointing.load(state, str(folder))
    engine.stack.bare[0].load_state_dict(loaded["model"])
    engine.optimizer.load_state_dict(loaded["optimizer"])


def touch(engine: Engine, folder: Path) -> dict[str, float]:
    """Stock's save forks, and whoever then writes a page for the first time pays for it; that is
    counted as nobody's time."""
    stock_load(engine, folder)
    load(engine, folder)  # which writes gradients too
    return {}


def floor(engine: Engine, folder: Path) -> None:
    """As many bytes as this rank's masters and moments, read once into fresh memory."""
    elems = sum(param.numel() for param in engine.stack.bare[0].parameters())
    frame.read_once(sorted(folder.rglob("*.distcp")), 12 * elems // dist.get_world_size())


def exchange(engine: Engine) -> None:
    """Every rank gets the weights that others step."""
    for chunk in engine.stack.chunks:
        for group in chunk.bucket_groups:
            ranks = group.intra_distributed_optimizer_instance_group
            for bucket in group.buckets:
                broadcast_each(bucket.param_data.tensor_split(ranks.size()), ranks)


if __name__ == "__main__":
    raise SystemExit(frame.main("megatron"))
