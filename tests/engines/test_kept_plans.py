"""What a save of a DeepSpeed engine describes is kept for the next one of the same structure: that
says the same as what is described anew, which happens where a tensor is another one."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import megatron_ucp as ucp
from megatron_ucp.core.manifest import Manifest
from megatron_ucp.engines.save import OTHER_TENSORS
from tests.engines import plan_jobs
from tests.engines.model import Setup
from tests.engines.moe_jobs import Moe
from tests.engines.tensor_jobs import Staged
from tests.ranks import RankPool

pytestmark = pytest.mark.ranks
# agreements of a save whose engine is known; and what comes after a save has all that it needs of
# the engine, where training waits for that too
MOST, SETTLING = 5, 5


def described(folder: Path, tag: str) -> Manifest:
    """What a save says of the engine, but for its name and when it was made."""
    found = ucp.describe(folder / tag)
    of_save = {"saved_at", "tag", "moved_latest"}
    run = {key: value for key, value in found.run.items() if key not in of_save}
    return replace(found, run=run, save_id="", files=())


# ranks, engine, way; and agreements on what places tell each other, and what differs between them
SETUPS: dict[str, tuple[int, Any, str, int]] = {
    "ZeRO-1 in bf16": (2, Setup(1, "bf16"), "stock", 0),
    "ZeRO-2 beside training": (2, Setup(2), "background", 0),
    "ZeRO-3": (2, Setup(3), "direct", 0),
    "stage 0": (2, Setup(0, "bf16"), "background", 0),
    "a pipeline": (2, Staged("llama", 1, 1, layers=2, pp=2), "direct", 2),
    "experts": (2, Moe(2, 1), "direct", 2),
}


@pytest.mark.parametrize("name", SETUPS)
def test_the_next_save_goes_by_what_was_described(
    ranks: RankPool, tmp_path: Path, name: str
) -> None:
    world, setup, way, more = SETUPS[name]
    most = MOST + more + SETTLING * (way != "background")
    for rows in ranks.run(world, plan_jobs.again, setup, str(tmp_path), way, timeout_s=200):
        assert [row["planned"] for row in rows.values()] == [True, False, True]
        assert [row["described"] for row in rows.values()] == [1, 0, 1]
        assert rows["again"]["agreements"] <= most < rows["first"]["agreements"] + more
    assert described(tmp_path, "again") == described(tmp_path, "anew")
    assert ucp.diff(tmp_path / "again", tmp_path / "anew") == []
    assert described(tmp_path, "first") != described(tmp_path, "again"), "the steps are the same"


def test_what_is_another_tensor_is_described_anew(ranks: RankPool, tmp_path: Path) -> None:
    for rows in ranks.run(2, plan_jobs.changed, Setup(1, "bf16"), str(tmp_path), timeout_s=200):
        for name in plan_jobs.CHANGES:
            assert rows[name]["planned"] and OTHER_TENSORS in rows[name]["notes"], name
            assert not rows[f"{name}, again"]["planned"], name
            assert OTHER_TENSORS not in rows[f"{name}, again"]["notes"], name
    for name in plan_jobs.CHANGES:
        assert described(tmp_path, name) == described(tmp_path, f"{name}, anew"), name
        assert ucp.diff(tmp_path / name, tmp_path / f"{name}, anew") == [], name


def test_a_change_that_nobody_looks_for_would_be_wrong(ranks: RankPool, tmp_path: Path) -> None:
    """The comparison sees what the description of an earlier engine would say."""
    jobs = (plan_jobs.changed, Setup(1, "bf16"), str(tmp_path), False)
    (rows, _) = ranks.run(2, *jobs, timeout_s=200)
    name = "the dtype of a buffer"
    assert not rows[name]["planned"]
    with pytest.raises(ucp.ForeignFileError, match="manifest and files disagree in the values"):
        described(tmp_path, name)


def test_hyper_parameters_are_those_of_the_save(ranks: RankPool, tmp_path: Path) -> None:
    (rows, _) = ranks.run(2, plan_jobs.moved, Setup(1, "bf16"), str(tmp_path))
    assert [row["planned"] for row in rows.values()] == [True, False]
    rates = [
        {group.settings["lr"] for group in ucp.describe(tmp_path / tag).groups} for tag in rows
    ]
    assert rates[1] == {0.125} != rates[0]


def test_steps_in_memory_describe_once(ranks: RankPool, tmp_path: Path) -> None:
    (found, _) = ranks.run(2, plan_jobs.in_memory, Setup(1, "bf16"), str(tmp_path / "run"))
    assert found == [(0, None), (1, 1), (1, 2), (1, 3)], "times described, the step that is kept"
