"""Weights of one live model into another one on another tensor-parallel mesh, in memory:
`ucp.refit` and `ucp.resize` beside megatron-core's own `megatron.core.resharding`, for the same
tensors.

    python -m benchmarks.weights                        # 124M and 354M parameters: three minutes
    python -m benchmarks.weights --sizes tiny --repetitions 2    # to see that it runs

Four ranks over gloo on one machine, both models in bf16 and without an optimizer. After each way
the weights are compared with what the other ones gave, having been zero before. The first call of a
refit, and of megatron-core's, plans; later ones keep the plan. The aims are 1.5 and 0.7 of
megatron-core's time. `ucp.resize` asks both models each
time, proves its plan, and compares a fingerprint. megatron-core's gloo service makes a CUDA stream,
which a machine without a GPU has not: nothing stands for it here. Results:
benchmarks/results/weights.json, "Resizes" in docs/reference/performance.md. Two commits are
compared with it, too.
"""

import argparse
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import megatron_ucp as ucp
from benchmarks import frame
from benchmarks.model import SIZES, Mesh, megatron
from pretrain.mcore import models

RANKS = 4
CORE = "megatron-core"
FIRST: list[frame.Claim] = [("refit, first call / megatron-core", "refit", CORE, 1.5)]
LATER: list[frame.Claim] = [
    ("refit, later calls / megatron-core", "refit", CORE, 0.7),
    ("`ucp.resize` each time / megatron-core", "resize", CORE, None),
]
PAIRS = {"tp1 to tp2": (1, 2), "tp2 to tp4": (2, 4)}  # sizes of the source and of the target


def measure(options: argparse.Namespace) -> dict[str, Any]:
    return frame.of_pairs(options, RANKS, PAIRS, measure_pair, result)


def result(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """What all ranks say together."""
    seconds = frame.slowest([rank["seconds"] for rank in ranks])
    first = {way: each[:1] for way, each in seconds.items()}
    later = {way: each[1:] for way, each in seconds.items()}
    sent, needed = (sum(rank[what] for rank in ranks) for what in ("sent", "needed"))
    return {
        "seconds": seconds,
        "medians": frame.medians(later),
        "claims": [
            *frame.claims_of(first, FIRST),
            *frame.claims_of(later, LATER),
            frame.claim(
                "bytes sent / bytes that had to move", sent / needed if needed else 1.0, 1.0
            ),
        ],
    }


# ---- on the ranks


def measure_pair(name: str, size: str, repetitions: int) -> dict[str, Any]:
    """Seconds of each way on this rank, by repetition, the first call too; bytes that a refit sends
    from here, and those that this rank has not and needs."""
    from megatron.core import parallel_state
    from megatron.core.resharding.refit import swap_model_weights

    source, target = PAIRS[name]
    torch.manual_seed(dist.get_rank())
    old = engine_of(source, SIZES[size])
    parallel_state.destroy_model_parallel()  # the model keeps its groups
    new = engine_of(target, SIZES[size])
    weights, refits = Weights(new.module), list[Any]()

    def refit() -> None:
        if not refits:  # the first call plans
            refits.append(ucp.refit(old, new))
        refits[0]()

    ways: dict[str, Callable[[], Any]] = {
        "refit": refit,
        "resize": lambda: ucp.resize(old, new),
        CORE: lambda: swap_model_weights(old.module, new.module, "gloo"),
    }
    with mock.patch.object(torch.cuda, "Stream", lambda: None):
        seconds = frame.in_turns(ways, repetitions, before=weights.clear, keeps_first=True)
    weights.clear()
    needed = needed_bytes(source, target, new)
    return {"seconds": seconds, "sent": refits[0].sent_bytes, "needed": needed}


class Weights:
    """What a model gets by each way: the same each time, and not nothing."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._params, self._given = [*model.parameters()], list[torch.Tensor]()
        self._is_filled = False

    def clear(self) -> None:
        """Compares what the way before gave; then all weights are zero."""
        have = [param.detach().clone() for param in self._params]
        if self._is_filled:
            self._given = self._given or have
            assert any(bool(one.any()) for one in have), "a way gave no weights"
            assert all(map(torch.equal, have, self._given)), "two ways gave different weights"
        self._is_filled = True
        with torch.no_grad():
            for param in self._params:
                param.zero_()


def needed_bytes(source: int, target: int, new: Any) -> int:
    """Bytes of this rank's new weights that its old ones lack: rank r has the shares r mod tp, and
    what is not cut is everywhere."""
    rank = dist.get_rank()
    have, want = rank % source, rank % target
    inside = want * source // target == have
    cut = (p for p in new.module.parameters() if getattr(p, "tensor_model_parallel", False))
    return 0 if inside else sum(param.numel() * param.element_size() for param in cut)


def engine_of(tp: int, size: dict[str, int]) -> Any:
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


if __name__ == "__main__":
    raise SystemExit(frame.main("weights", sizes=("124M", "354M")))
