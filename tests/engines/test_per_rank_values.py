"""Values that differ from rank to rank: each rank gets its own back on the same mesh, and on
another one they are refused, or those of rank 0 are taken where that is allowed."""

from pathlib import Path
from typing import Any

import pytest

import megatron_ucp as ucp
from tests.engines import own_value_jobs
from tests.engines.own_value_jobs import convert
from tests.ranks import RankPool

pytestmark = pytest.mark.ranks
HELD = ("buffers", "seen", "place", "run", "best")


def own(rank: dict[str, Any]) -> dict[str, Any]:
    return {key: rank[key] for key in HELD}


@pytest.mark.parametrize("zero", [1, 3])
def test_each_rank_gets_its_own_back(ranks: RankPool, tmp_path: Path, zero: int) -> None:
    want = ranks.run(2, own_value_jobs.save, zero, str(tmp_path), True, "tag")
    assert want[0]["buffers"] != want[1]["buffers"] and want[0]["place"] != want[1]["place"]
    assert want[0]["best"] != want[1]["best"] and want[0]["seen"] != want[1]["seen"]
    for rank in want:
        (note,) = rank["notes"]
        assert "norm.running_mean" in note and "client_state['place']" in note
        assert "shared" not in note and "'run'" not in note
    for target in (zero, 2 if zero == 1 else 1):
        have = ranks.run(2, own_value_jobs.load, target, str(tmp_path), "tag")
        assert list(map(own, have)) == list(map(own, want))


def test_stock_files_of_zero_3_give_each_rank_its_own(ranks: RankPool, tmp_path: Path) -> None:
    want = ranks.run(2, own_value_jobs.save, 3, str(tmp_path), False, "tag")
    stock = ranks.run(2, own_value_jobs.load, 3, str(tmp_path), "tag", stock=True)
    have = ranks.run(2, own_value_jobs.load, 3, str(tmp_path), "tag")
    assert list(map(own, have)) == list(map(own, want)) == list(map(own, stock))


def test_another_mesh_is_refused_or_has_those_of_rank_0(ranks: RankPool, tmp_path: Path) -> None:
    want = ranks.run(2, own_value_jobs.save, 3, str(tmp_path), True, "tag")
    (refused,) = ranks.run(1, own_value_jobs.load, 3, str(tmp_path), "tag")
    assert refused["unchanged"] and "norm.running_mean" in refused["error"]
    assert 'allow={"per_rank"}' in refused["error"]
    (first,) = ranks.run(1, own_value_jobs.load, 3, str(tmp_path), "tag", allow={"per_rank"})
    assert own(first) == own(want[0])
    assert any("norm.running_mean" in note and "rank 0" in note for note in first["notes"])


def test_conversions_carry_them_to_the_same_ranks(ranks: RankPool, tmp_path: Path) -> None:
    want = [own(rank) for rank in ranks.run(2, own_value_jobs.save, 3, str(tmp_path), False, "tag")]
    assert not convert(str(tmp_path), "tag", "z3", 3) and not convert(str(tmp_path), "z3", "z1", 1)
    assert [
        own(r) for r in ranks.run(2, own_value_jobs.load, 3, str(tmp_path), "z3", stock=True)
    ] == want
    for zero, tag in ((3, "z3"), (1, "z1")):
        assert [own(r) for r in ranks.run(2, own_value_jobs.load, zero, str(tmp_path), tag)] == want
    assert ucp.diff(tmp_path / "tag", tmp_path / "z1") == []
    error = convert(str(tmp_path), "tag", "more", 3, dp=4)
    assert "norm.running_mean" in error and not (tmp_path / "more").exists()
    assert not convert(str(tmp_path), "tag", "more", 3, dp=4, allow={"per_rank"})
    found = ucp.diff(tmp_path / "tag", tmp_path / "more")
    assert [d.what for d in found] == ["values that differ from rank to rank"]


def test_what_all_ranks_share_is_not_kept_for_each(ranks: RankPool, tmp_path: Path) -> None:
    for rank in ranks.run(2, own_value_jobs.save, 1, str(tmp_path), True, "tag", alike=True):
        assert rank["notes"] == []
    assert not list((tmp_path / "tag").glob("ucp_rank_*"))


def test_groups_that_differ_are_refused_before_the_save(ranks: RankPool, tmp_path: Path) -> None:
    for said in ranks.run(2, own_value_jobs.save_unlike, str(tmp_path)):
        assert said.startswith("SaveError") and "param_groups[0]['mine']" in said
    assert list(tmp_path.iterdir()) == []
