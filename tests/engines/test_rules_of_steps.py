"""Optimizers are who they are; schedules and groups with numpy's values go on as the run's; what
can't be represented is refused when it is attached."""

from pathlib import Path

import pytest

import megatron_ucp as ucp
from tests.engines import rule_jobs
from tests.engines.rule_jobs import BY_CLASS, FINE, LATE
from tests.ranks import RankPool

pytestmark = pytest.mark.ranks
DECOUPLED = {"AdamW", "FusedAdam"}


@pytest.mark.parametrize("attach", [True, False])
def test_another_rule_is_refused_unless_it_is_allowed(
    ranks: RankPool, tmp_path: Path, attach: bool
) -> None:
    ranks.run(1, rule_jobs.save_all, str(tmp_path), 1, attach, timeout_s=200)
    for kind in ("AdamW", "Adam"):
        (refused,) = ranks.run(1, rule_jobs.load_all, str(tmp_path), 1, kind)
        (allowed,) = ranks.run(1, rule_jobs.load_all, str(tmp_path), 1, kind, allow={"optimizer"})
        for tag, found in refused.items():
            same = tag == kind or {tag, kind} == DECOUPLED
            if tag == "FusedAdam" and not attach:
                continue  # its files don't say which Adam it is
            if tag == "NAdam":  # keeps another state, which no allowance gives
                assert "keeps other states" in found["error"]
                continue
            assert bool(found["error"]) is not same, (tag, kind, found)
            if same:
                continue
            assert found["unchanged"] and 'allow={"optimizer"}' in found["error"]
            assert f"found: {kind}" in found["error"]
            assert allowed[tag]["rules"] and not allowed[tag]["error"]
            assert any("the engine steps by" in note for note in allowed[tag]["notes"])


def test_deepspeeds_own_adams_in_stock_files(ranks: RankPool, tmp_path: Path) -> None:
    (said,) = ranks.run(1, rule_jobs.own_adams, str(tmp_path / "config"), True)
    for (wrote, loads), text in said.items():
        assert ("steps by another rule" in text) is (wrote != loads), text
        assert "don't say" not in text
    (said,) = ranks.run(1, rule_jobs.own_adams, str(tmp_path / "own"), False)
    for text in said.values():  # nothing says it
        assert "the files don't say by which rule of Adam the run stepped" in text


@pytest.mark.parametrize("name", ["milestones", "linspaced", "plain_milestones"])
@pytest.mark.parametrize("attach", [True, False])
def test_the_next_rates_are_those_of_the_run(
    ranks: RankPool, tmp_path: Path, name: str, attach: bool
) -> None:
    (found,) = ranks.run(1, rule_jobs.resumed_rates, str(tmp_path), name, attach, timeout_s=200)
    assert found["run"] == found["stock"] and found["run"][0] != found["run"][4]
    for way in ("same", "another", "converted"):
        assert found[way] == found["run"], way
        if attach:
            assert found[f"{way} notes"] == []


@pytest.mark.parametrize("schedule", ["SequentialLR", "ChainedScheduler"])
def test_schedulers_in_a_scheduler_follow_the_parameters(
    ranks: RankPool, tmp_path: Path, schedule: str
) -> None:
    (found,) = ranks.run(1, rule_jobs.nested_rates, str(tmp_path), schedule)
    assert found["run"][0] != found["run"][3]
    for way in ("same", "swapped", "split"):
        assert found[way] == found["run"], way


def test_a_groups_own_keys(ranks: RankPool, tmp_path: Path) -> None:
    (found,) = ranks.run(1, rule_jobs.own_keys, str(tmp_path))
    assert found["all"][:2] == ("np.int64(3)", None)
    assert any("foreach" in note and "stays" in note for note in found["all"][2])
    for way in ("weights", "masters", "config"):
        assert found[way][:2] == ("None", None), way
    assert ucp.verify(tmp_path, deep=True).findings == ()


def test_what_no_load_could_give_back_is_refused_at_attach(ranks: RankPool) -> None:
    (found,) = ranks.run(1, rule_jobs.refused_at_attach)
    assert len(found) == 16
    for case, said in found.items():
        assert said and ('allow={"values"}' in said) is case.endswith("0"), (case, said)
        assert "mine" in said or case.endswith("1"), (case, said)


@pytest.mark.parametrize("attach", [True, False])
def test_one_value_beyond_us_leaves_the_rest(ranks: RankPool, tmp_path: Path, attach: bool) -> None:
    (found,) = ranks.run(1, rule_jobs.left_to_the_engine, str(tmp_path), attach)
    name, said = found["()"]
    assert name == "UnsafePickleError" and ("mine" if attach else "rule_jobs.Mine") in said
    mine, epoch, (note,) = found["('values',)"]
    assert (mine, epoch) == ("the engine's", found["want"]) and "Mine" in note


@pytest.mark.parametrize("place", ["scheduler", "group", "client state"])
def test_a_save_that_passes_is_one_that_loads(ranks: RankPool, tmp_path: Path, place: str) -> None:
    (found,) = ranks.run(1, rule_jobs.late, str(tmp_path), place, timeout_s=200)
    for name in LATE:
        assert found[name] == "SaveError", (name, found[name])
        if place != "client state":
            allowed = "saved, loaded" if name in BY_CLASS else "SaveError"
            assert found[f"{name}, allowed"] == allowed, name
    for name in FINE:
        assert found[name] == "saved, loaded", (name, found[name])


def test_what_one_rank_alone_can_not_save_is_an_error_on_all(
    ranks: RankPool, tmp_path: Path
) -> None:
    assert ranks.run(2, rule_jobs.on_one_rank, str(tmp_path)) == ["SaveError", "SaveError"]


def test_the_order_of_a_mapping_is_no_difference(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(2, rule_jobs.in_another_order, str(tmp_path)) == [[], []]
