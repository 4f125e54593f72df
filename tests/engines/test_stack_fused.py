"""Transformer Engine's and Apex' Adam under megatron-core's optimizers, which is what Megatron-LM
has on every GPU: they count their steps in their groups. The stand-ins compute on the CPU."""

from typing import Any

import pytest

from tests.engines.cross_jobs import Zero
from tests.engines.sources import Sources
from tests.engines.stack_jobs import Mcore
from tests.engines.test_stack_loads import check
from tests.engines.test_stack_pairs import BUCKETS, CONSTANT, MOE, SAVE, show

RESUME, STOCK = "tests.engines.stack_jobs:resume", "tests.engines.stack_jobs:stock_load"
FROM_DEEPSPEED = "tests.engines.cross_jobs:save"
TE: dict[str, Any] = {"adam": "te"}
SMALL: dict[str, Any] = {"layers": 2}
SOURCES: dict[str, tuple[int, Any, str, str]] = {
    "ours": (2, Mcore(**TE, **BUCKETS, **CONSTANT), SAVE, "ours"),
    "ours-plain": (2, Mcore(distributed=False, **SMALL, **TE, **CONSTANT), SAVE, "ours"),
    "ours-ep2": (2, Mcore(ep=2, **MOE, **TE), SAVE, "ours"),
    "ours-bf16": (2, Mcore(dtype="bf16", distributed=False, **SMALL, **TE), SAVE, "ours"),
    "full": (2, Mcore(tp=2, **TE, **CONSTANT), SAVE, "fully_reshardable"),
    "buckets": (2, Mcore(pp=2, **TE, **BUCKETS), SAVE, "dp_reshardable"),
    "legacy": (2, Mcore(tp=2, **TE), SAVE, "legacy"),
    # the first stage has no parameter of one of its groups
    "plain": (
        2,
        Mcore(distributed=False, pp=2, tied=True, decoupled_lr=1e-3, **TE),
        SAVE,
        "fully_reshardable",
    ),
    "torch": (2, Mcore(**BUCKETS, **CONSTANT), SAVE, "ours"),
    "torch-plain": (2, Mcore(distributed=False, **SMALL), SAVE, "ours"),
    "deepspeed": (2, Zero(zero=1), FROM_DEEPSPEED, ""),
}


def saved(sources: Sources, name: str) -> str:
    ranks, setup, job, kind = SOURCES[name]
    return sources.get(ranks, setup, job, **({"more": 3, "kind": kind} if kind else {}))


@pytest.mark.parametrize(
    ("source", "world", "target"),
    [
        ("ours", 4, Mcore(tp=2, pp=2, **TE, **CONSTANT)),
        ("ours", 2, Mcore(tp=2, adam="apex", **CONSTANT)),
        ("ours", 1, Mcore(distributed=False, **CONSTANT)),
        ("ours-plain", 2, Mcore(pp=2, **SMALL, **TE, **CONSTANT)),
        ("ours-ep2", 4, Mcore(tp=2, ep=2, **MOE, **TE)),
        ("ours-bf16", 2, Mcore(dtype="bf16", **SMALL, **TE)),
        ("full", 2, Mcore(**TE, **CONSTANT)),
        ("buckets", 2, Mcore(tp=2, **TE)),
        ("legacy", 2, Mcore(pp=2, **TE)),
        ("torch", 2, Mcore(tp=2, **TE, **CONSTANT)),
        ("torch-plain", 2, Mcore(adam="subclass", **SMALL)),
        ("deepspeed", 2, Mcore(pp=2, **TE, **CONSTANT)),
    ],
    ids=show,
)
def test_pair(sources: Sources, source: str, world: int, target: Mcore) -> None:
    more = 3 if target.dtype == "fp32" else 0
    found = sources.ranks.run(world, RESUME, target, saved(sources, source), more=more)
    check(found, 1e-5 if more else None)
