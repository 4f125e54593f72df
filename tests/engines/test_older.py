"""Files that older versions of DeepSpeed wrote are loaded into engines of the present one, on other
meshes, bit for bit."""

import pytest

from tests.engines import older_jobs
from tests.engines.model import Setup
from tests.engines.sources import check, check_fails
from tests.formats.golden.make_older import VERSIONS, cases_of
from tests.formats.test_older import LOST
from tests.ranks import RankPool

JOB = older_jobs.resume
# what a case is loaded into: ranks and stage, neither of which is its own
TARGETS = {
    "zero0_bf16": [(4, 3), (1, 2)],
    "zero1": [(4, 3), (1, 0)],
    "zero2": [(1, 3), (4, 1)],
    "zero3": [(4, 1), (1, 2)],
    "bf16_optimizer": [(4, 3), (1, 2)],
    "ulysses_zero1": [(2, 3)],
    "ulysses_zero3": [(2, 2)],
}
LOADS = [
    (version, case, *target)
    for version in VERSIONS
    for case in cases_of(version)
    if (version, case) not in LOST
    for target in TARGETS.get(case, ())  # stage 0 has no names: tests/engines/test_positions
]
FIRST = {("0.14.5", "zero3"), ("0.15.4", "zero0_bf16"), ("0.16.9", "zero2")}
FIRST |= {("0.17.6", "zero1"), ("0.18.9", "bf16_optimizer"), ("0.18.2", "ulysses_zero3")}
FIRST |= {("0.19.4", "zero3")}


def setup_of(zero: int) -> Setup:
    return Setup(zero, "bf16", seed=9)


def slow(load: tuple[str, str, int, int]) -> bool:
    version, case, *target = load
    return (version, case) not in FIRST or tuple(target) != TARGETS[case][0]


@pytest.mark.parametrize(
    ("version", "case", "world", "zero"),
    [pytest.param(*load, marks=[pytest.mark.slow] if slow(load) else []) for load in LOADS],
)
@pytest.mark.cases(4)
def test_pair(ranks: RankPool, version: str, case: str, world: int, zero: int) -> None:
    found = ranks.run(world, JOB, setup_of(zero), version, case)
    assert [rank.get("message") for rank in found] == [None] * world
    check(found)


@pytest.mark.parametrize("fault", ["one bit", "one moment", "one step", "a buffer"])
def test_a_planted_fault_is_seen(ranks: RankPool, fault: str) -> None:
    found = ranks.run(2, JOB, setup_of(1), "0.14.5", "zero3", plant=fault)
    check_fails(found)


@pytest.mark.parametrize(("version", "case"), sorted(LOST))
def test_states_that_were_never_saved_are_missed(ranks: RankPool, version: str, case: str) -> None:
    for zero in (0, 3):
        for rank in ranks.run(2, JOB, setup_of(zero), version, case):
            assert rank["error"] == "StateMismatchError" and rank["unchanged"]
            assert "0.17 to 0.18.4" in rank["message"]
            assert "load_optimizer_states=False" in rank["message"]
    for rank in ranks.run(2, JOB, setup_of(3), version, case, load_optimizer_states=False):
        assert not rank["error"]
        parts = {difference.partition(" ")[0] for difference in rank["differences"][case]}
        assert not parts & {"weights", "values", "counters:", "scheduler:"}
        assert {"full", "scalars:"} <= parts  # masters are what the weights say, moments begin anew
