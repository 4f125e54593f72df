"""Weights of one live model into another one on another tensor-parallel mesh, in memory:
`ucp.refit` and `ucp.resize` beside megatron-core's own `megatron.core.resharding`, for the same
tensors.

    python -m benchmarks.weights                        # 124M and 354M parameters: three minutes
    python -m benchmarks.weights --sizes tiny --repetitions 2    # to see that it runs

Four ranks over gloo on one machine, both models in bf16 and without an optimizer. In each
repetition the ways follow each other, in turns; the slowest rank counts, and medians are compared.
After each of them the weights are compared with what the other ones gave, having been zero before.
The first call of a refit, and of megatron-core's, plans; later ones keep the plan. `ucp.resize`
asks both models each time, proves its plan, and compares a fingerprint. megatron-core's gloo
service makes a CUDA stream, which a machine without a GPU has not: nothing stands for it here.
Writes benchmarks/results/weights.json.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import megatron_ucp as ucp
from benchmarks.cases import Mesh
from benchmarks.machine import description
from benchmarks.model import TINY, megatron
from pretrain.mcore import models
from tests.ranks import RankPool

RANKS, RESULTS = 4, Path(__file__).parent / "results" / "weights.json"
# heads divide the width of the small one too
SIZES: dict[str, dict[str, int]] = {
    "tiny": TINY | {"width": 96, "vocabulary": 512},
    "124M": {},
    "354M": {"width": 1056, "layers": 24},
}
PAIRS = ((1, 2), (2, 4))  # tensor-parallel sizes of the source and of the target
# of megatron-core's time
FIRST, LATER = 1.5, 0.7


def main() -> int:
    args = parse()
    found = {
        f"tp{source} to tp{target}, {size}": measured(source, target, size, args.repetitions)
        for size in args.sizes
        for source, target in PAIRS
    }
    met = True
    for name, row in found.items():
        times = ", ".join(f"{way} {seconds:.3f} s" for way, seconds in row["medians"].items())
        print(f"{name}: {times}; resize / megatron-core {row['resize']}")
        for what, limit in (("first", FIRST), ("later", LATER), ("sent / needed", 1.0)):
            is_met = row[what] <= limit
            print(f"  refit, {what}: {row[what]}, at most {limit}{'' if is_met else '  MISSED'}")
            met &= is_met
    if "tiny" in args.sizes:
        return 0
    result = {"machine": description(), "repetitions": args.repetitions, "found": found}
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if met else 1


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["124M", "354M"])
    parser.add_argument("--repetitions", type=int, default=5)
    return parser.parse_args()


def measured(source: int, target: int, size: str, repetitions: int) -> dict[str, Any]:
    """One pair of meshes, in processes of its own."""
    pool = RankPool(RANKS, gloo=True)
    job = measure
    try:
        ranks = pool.run(RANKS, job, source, target, SIZES[size], repetitions, timeout_s=600)
    finally:
        pool.close()
    seconds = {
        way: [max(rank["seconds"][way][n] for rank in ranks) for n in range(repetitions + 1)]
        for way in ranks[0]["seconds"]
    }
    medians = {way: statistics.median(found[1:]) for way, found in seconds.items()}
    core = medians["megatron-core"]
    sent, needed = (sum(rank[what] for rank in ranks) for what in ("sent", "needed"))
    return {
        "seconds": seconds,
        "medians": medians,
        "resize": round(medians["resize"] / core, 3),
        "first": round(seconds["refit"][0] / seconds["megatron-core"][0], 3),
        "later": round(medians["refit"] / core, 3),
        "sent / needed": round(sent / needed, 4) if needed else 1.0,
    }


def measure(source: int, target: int, size: dict[str, int], repetitions: int) -> Any:
    """Seconds of each way on this rank, by repetition, the first call apart; bytes that a refit
    sends from here, and those that this rank has not and needs."""
    from megatron.core import parallel_state
    from megatron.core.resharding.refit import swap_model_weights

    torch.manual_seed(dist.get_rank())
    old = _engine(source, size)
    parallel_state.destroy_model_parallel()  # the model keeps its groups
    new = _engine(target, size)
    refit = Refitted(old, new)
    ways: dict[str, Callable[[], Any]] = {
        "refit": refit,
        "resize": lambda: ucp.resize(old, new),
        "megatron-core": lambda: swap_model_weights(old.module, new.module, "gloo"),
    }
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    given: list[torch.Tensor] = []
    with mock.patch.object(torch.cuda, "Stream", lambda: None):
        for number in range(repetitions + 1):
            for way in [*ways][number % 2 :] + [*ways][: number % 2]:
                _clear(new.module)
                dist.barrier()
                started = time.perf_counter()
                ways[way]()
                dist.barrier()
                seconds[way].append(time.perf_counter() - started)
                have = [param.detach().clone() for param in new.module.parameters()]
                assert any(bool(one.any()) for one in have), f"{way} gave no weights"
                assert all(map(torch.equal, have, given or have)), f"{way} gave other weights"
                given = have
    return {"seconds": seconds, "sent": refit.sent_bytes, "needed": _needed(source, target, new)}


def _needed(source: int, target: int, new: Any) -> int:
    """Bytes of this rank's new weights that its old ones lack: rank r has the shares r mod tp, and
    what is not cut is everywhere."""
    rank = dist.get_rank()
    have, want = rank % source, rank % target
    inside = want * source // target == have
    cut = (p for p in new.module.parameters() if getattr(p, "tensor_model_parallel", False))
    return 0 if inside else sum(param.numel() * param.element_size() for param in cut)


class Refitted:
    """`ucp.refit`: the first call plans."""

    def __init__(self, old: Any, new: Any) -> None:
        self._engines, self._refit = (old, new), None

    def __call__(self) -> None:
        if self._refit is None:
            self._refit = ucp.refit(*self._engines)
        self._refit()

    @property
    def sent_bytes(self) -> int:
        return self._refit.sent_bytes if self._refit is not None else 0


def _engine(tp: int, size: dict[str, int]) -> Any:
    """A model without an optimizer."""
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "steps_per_print": 10**9,
    }
    engine, *_ = deepspeed.initialize(
        model=megatron(Mesh(0, tp), **size),
        config=config,
        dist_init_required=False,
        mpu=models.mpu(),
    )
    return ucp.attach(engine, family="gpt")


def _clear(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()


if __name__ == "__main__":
    raise SystemExit(main())
