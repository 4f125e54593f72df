"""DeepSpeed's files into megatron-core's own stack: every master, moment, step and
hyper-parameter, bit by bit."""

from typing import Any

import pytest

from tests.engines.cross_jobs import Zero
from tests.engines.megatron_jobs import Mcore
from tests.engines.sources import Sources, check
from tests.share import LOSS_STEPS

CONSTANT: dict[str, Any] = {"style": "constant"}
BUCKETS: dict[str, Any] = {"overlap": True, "gather": True, "bucket": 2000}
# (ranks, source), (ranks, target)
PAIRS = {
    "z0-dp2": ((2, Zero(zero=0)), (4, Mcore(pp=2, vpp=2, **CONSTANT))),
    "z1-tp2dp2": ((4, Zero(zero=1, tp=2)), (4, Mcore(**BUCKETS, **CONSTANT))),
    "z2-dp2": ((2, Zero(zero=2)), (4, Mcore(tp=2, pp=2, **CONSTANT))),
    "z3-dp4": ((4, Zero(zero=3)), (2, Mcore(**CONSTANT))),
    "z1-pp2": ((2, Zero(zero=1, pp=2)), (1, Mcore(distributed=False, **CONSTANT))),
    "z3-dp2-bf16": (
        (2, Zero(zero=3, dtype="bf16")),
        (4, Mcore(dtype="bf16", tp=2, **BUCKETS, **CONSTANT)),
    ),
    "z1-ep2": (
        (4, Zero("mixtral", layers=2, ep=2)),
        (4, Mcore("mixtral", layers=2, ep=4, **CONSTANT)),
    ),
    "z2-moe": (
        (2, Zero("mixtral", layers=2, zero=2)),
        (4, Mcore("mixtral", layers=2, tp=2, ep=2, **CONSTANT)),
    ),
    "z1-gpt-tied": (
        (2, Zero("gpt", tied=True)),
        (4, Mcore("gpt", tied=True, pp=2, vpp=2, tp=2, **CONSTANT)),
    ),
}


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.cases(6)
def test_pair(sources: Sources, pair: str) -> None:
    (dp, source), (world, target) = PAIRS[pair]
    folder = sources.get(dp, source)
    more = LOSS_STEPS if source.dtype == "fp32" else 0
    check(sources.resume(world, target, folder, more=more), 1e-5 if more else None)


@pytest.mark.parametrize(
    "fault",
    ["one bit", "two elements swapped", "one step", "one group's weight decay", "one weight"],
)
def test_the_comparison_sees_a_planted_fault(sources: Sources, fault: str) -> None:
    folder = sources.get(2, Zero(zero=0))
    (found,) = sources.resume(1, Mcore(**CONSTANT), folder, tags=("filled",), plant=fault)
    assert found["differences"]["filled"] != []
