"""Megatron-LM's older files (`--ckpt-format torch`), one folder for each model-parallel rank, into
megatron-core's stack on another mesh, bit by bit. megatron-core's own optimizer writes the buffers;
it can't where a rank has no piece of them."""

from dataclasses import replace
from typing import Any

import pytest

from tests.engines.sources import Sources
from tests.engines.stack_jobs import Mcore
from tests.engines.test_stack_loads import check
from tests.engines.test_stack_saves import MIXTURE

SAVE, RESUME = "tests.engines.stack_jobs:save", "tests.engines.stack_jobs:resume"
TIED: dict[str, Any] = {"family": "gpt", "tied": True}
MOE: dict[str, Any] = {"family": "mixtral"}
SOURCES = {
    "tied stages": Mcore(pp=2, vpp=2, tp=2, **TIED),
    "a mixture in stages": Mcore(ep=2, pp=2, **MIXTURE),
    "buckets of experts": Mcore(ep=2, overlap=True, bucket=1000, **MOE),
}
MORE = {
    "buckets": Mcore(overlap=True, bucket=2000),
    "buckets of tied stages": Mcore(pp=2, overlap=True, bucket=1500, **TIED),
    "a layout": Mcore(pp=2, vpp=2, layout="Ett|t|t|L"),
    "uneven stages": Mcore(pp=2, first=3),
    "bf16": Mcore(tp=2, dtype="bf16"),
    "fp16": Mcore(tp=2, dtype="fp16"),
    "experts in virtual stages": Mcore(ep=2, pp=2, vpp=2, **MOE),
    "experts cut as attention is": Mcore(ep=2, tp=2, **MOE),
    "experts without expert parallelism": Mcore(tp=2, **MOE),
}


@pytest.mark.parametrize(
    "source", [*SOURCES, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)]
)
def test_into_another_mesh(sources: Sources, source: str) -> None:
    setup = {**SOURCES, **MORE}[source]
    folder = sources.get(4, setup, SAVE, more=3, kind="legacy")
    other: dict[str, Any] = {"pp": 1, "vpp": 1, "layout": None, "first": None, "bucket": None}
    target = replace(setup, tp=1, ep=1, overlap=False, **other)
    check(sources.ranks.run(2, RESUME, target, folder), None)
