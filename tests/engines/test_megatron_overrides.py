"""Groups that overrides of a run make (`config_overrides`): they differ in what the schedule moves
between, and stock's files do not say which parameter is in which. The engine's own groups do."""

from importlib.metadata import version

import pytest
from packaging.version import Version

from tests.engines import megatron_jobs
from tests.engines.megatron_jobs import Mcore
from tests.engines.sources import Sources, check
from tests.ranks import RanksFailed

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
