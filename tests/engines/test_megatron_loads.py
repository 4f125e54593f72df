"""DeepSpeed's files into megatron-core's own stack: every master, moment, step and
hyper-parameter, bit by bit.

Groups that overrides of a run make (`config_overrides`) differ in what the schedule moves between,
and stock's files do not say which parameter is in which. The engine's own groups do."""

from importlib.metadata import version
from typing import Any

import pytest
from packaging.version import Version

from tests.engines import megatron_jobs
from tests.engines.cross_jobs import Zero
from tests.engines.megatron_jobs import Mcore
from tests.engines.sources import Sources, check
from tests.ranks import RanksFailed
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


FC2 = "decoder.layers.1.mlp.linear_fc2.weight"
KINDS = ("fully_reshardable", "dp_reshardable", "legacy", "ours")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("overrides", ["rates", "decay"])
def test_each_parameter_finds_its_group(sources: Sources, overrides: str, kind: str) -> None:
    folder = sources.get(4, Mcore(tp=2, overrides=overrides), more=3, kind=kind)
    check(sources.resume(4, Mcore(pp=2, overrides=overrides), folder, more=3), 1e-5)


def test_a_group_with_other_rates_takes_the_files(sources: Sources) -> None:
    """Which parameter is in which group is known by the manifest there."""
    folder = sources.get(4, Mcore(tp=2, overrides="rates"), more=3, kind="ours")
    found = sources.resume(2, Mcore(overrides="other"), folder, tags=("trained",))
    notes = [note for rank in found for note in rank["notes"]["trained"]]
    assert not any(one["differences"]["trained"] for one in found), notes


@pytest.mark.parametrize("kind", ["fully_reshardable", "legacy"])
def test_an_engine_without_the_groups_is_refused(sources: Sources, kind: str) -> None:
    """Stock itself (until 0.18) takes one of the two for all, and says nothing."""
    folder = sources.get(4, Mcore(tp=2, overrides="decay"), more=3, kind=kind)
    with pytest.raises(RanksFailed, match="which parameter group steps a parameter"):
        sources.resume(2, Mcore(), folder)


def test_stock_takes_the_groups_of_our_files(sources: Sources) -> None:
    """Until 0.18 megatron-core knows a group by four keys, and gives all matrices one of the two
    groups, whoever wrote the files; since 0.19 by all."""
    folder = sources.get(4, Mcore(tp=2, overrides="decay"), more=3, kind="ours")
    job = megatron_jobs.stock_load
    knows_all = Version(version("megatron-core")) >= Version("0.19")
    for one in sources.ranks.run(4, job, Mcore(tp=2, overrides="decay"), folder, tags=("trained",)):
        differences = [said.partition(":")[0] for said in one["differences"]["trained"]]
        assert differences == ([] if knows_all else ["hyper"])
        assert one["before"]["trained"] != one["differences"]["trained"]
