"""Whose a step in memory, a tag and an option is. Unknown is not equal: a step in memory belongs to
a run only where the step and the folder of saves both say so."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engines import identity_jobs, memory_jobs
from tests.ranks import RankPool

pytestmark = pytest.mark.ranks


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[str]:
    """The folder of a run's saves, whose memory goes with the test."""
    yield str(tmp_path / "run")
    memory_jobs.clear(str(tmp_path / "run"))


def test_steps_of_a_dead_run_are_not_those_of_a_tag_without_an_id(
    ranks: RankPool, folder: str
) -> None:
    for found in ranks.run(2, identity_jobs.dead_run_and_tags_without_id, folder):
        assert found["B"] and not found["A"]
        said = "step 5 in memory is of another run than the tag on disk, and is not taken"
        assert said in found["said"]


@pytest.mark.parametrize("loads", [False, True])
def test_a_start_from_scratch_retires_what_another_run_left(
    ranks: RankPool, folder: str, loads: bool
) -> None:
    for found in ranks.run(2, identity_jobs.begun_from_scratch, folder, loads):
        assert found["path"] is None and not found["A"]
        assert "is of another run than its folder names" in found["said"]
        assert "the run starts from the beginning" in found["said"]


# what comes to the folder -> whether the step in memory is taken, and what is said
HARMS: dict[str, tuple[bool, str]] = {
    "nothing": (True, "from memory: step"),
    "copied": (True, "from memory: step"),
    "saved anew": (False, "is of another run than the tag on disk"),
    "no folder": (False, "is of another run than its folder names"),
    "no name": (False, "is of another run than its folder names"),
}


@pytest.mark.parametrize("harm", HARMS)
def test_a_run_that_went_on_from_a_tag_without_an_id(
    ranks: RankPool, tmp_path: Path, folder: str, harm: str
) -> None:
    is_taken, said = HARMS[harm]
    base, job = str(tmp_path / "base"), identity_jobs.goes_on_from_a_tag_without_id
    for found in ranks.run(2, job, folder, base, harm):
        assert found["kept"] is is_taken, found["said"]
        assert said in found["said"]


@pytest.mark.parametrize("how", ["native", "a function", "DeepSpeed's class"])
def test_a_load_around_the_package_goes_on_with_the_run(
    ranks: RankPool, folder: str, how: str
) -> None:
    for found in ranks.run(2, identity_jobs.around_the_package, folder, how):
        assert "from memory: step 5; the newest tag on disk is of step 4" in found["said"]
        assert found["tags"] == ["more", "most"], "an older tag of this run goes"


def test_two_engines_that_live_in_one_folder(ranks: RankPool, folder: str) -> None:
    for found in ranks.run(2, identity_jobs.two_engines, folder):
        assert found["second"].startswith("another engine of this program keeps steps in memory")
        assert found["first"] == 4, "the first one keeps on"
        assert found["after the first was destroyed"]


def test_two_stacks_that_live_in_one_folder(ranks: RankPool, folder: str) -> None:
    for said, steps in ranks.run(2, identity_jobs.two_stacks, folder):
        assert said.startswith("another engine of this program keeps steps in memory")
        assert steps == 3, "the first one keeps on"


def test_an_engine_around_the_same_model_takes_over(ranks: RankPool, folder: str) -> None:
    assert ranks.run(1, identity_jobs.around_one_model, folder) == ["taken over"]


def test_descriptions_that_are_damaged_are_said(ranks: RankPool, folder: str) -> None:
    for said in ranks.run(2, identity_jobs.damaged_descriptions, folder):
        assert "from disk: no whole step in memory is newer" in said
        assert "the run had come to step 4: 2 are done again" in said


# ------------------------------------------------ attached twice

# the first options, the second ones, by install -> a part of the error, or what holds then
TWICE: dict[str, tuple[dict[str, Any], dict[str, Any], bool, str | dict[str, Any]]] = {
    "none": ({"keep_latest": 2}, {}, False, {"keep_latest": 2}),
    "the same": ({"keep_latest": 2}, {"keep_latest": 2}, False, {"keep_latest": 2}),
    "other": ({"keep_latest": 2}, {"keep_latest": 1}, False, "keep_latest=1"),
    "more": (
        {"keep_latest": 2},
        {"save": "direct"},
        False,
        {"save": "direct", "keep_latest": 2},
    ),
    "a set": ({"allow": {"extra"}}, {"allow": ["extra"]}, False, {"allow": {"extra"}}),
    "unknown": ({}, {"nonsense": 5}, False, "nonsense"),
    "unknown, behind install": ({}, {"nonsense": 5}, True, "nonsense"),
    "misspelt": ({}, {"keep_lates": 3}, True, "did you mean keep_latest?"),
    "behind install": (
        {},
        {"save": "direct", "keep_latest": 1},
        True,
        {"save": "direct", "keep_latest": 1},
    ),
    "behind install with more": (
        {"hyper": "config"},
        {"save": "direct"},
        True,
        {"save": "direct", "hyper": "config"},
    ),
    "behind install with other": ({"keep_latest": 3}, {"keep_latest": 1}, True, "keep_latest=3"),
}


@pytest.mark.parametrize("name", TWICE)
def test_attached_twice(ranks: RankPool, name: str) -> None:
    first, second, by_install, want = TWICE[name]
    for found in ranks.run(2, identity_jobs.attached_twice, first, second, by_install):
        if isinstance(want, str):
            assert isinstance(found, str) and found.startswith("UsageError") and want in found
        else:
            assert want.items() <= found.items()


def test_a_script_that_attaches_under_the_runner(ranks: RankPool, folder: str) -> None:
    for tags, was_under_way in ranks.run(2, identity_jobs.saves_as_asked_under_install, folder):
        assert tags == ["global_step3"] and was_under_way


def test_what_attach_got_is_the_default_of_every_door(ranks: RankPool, folder: str) -> None:
    for found in ranks.run(2, identity_jobs.doors, folder):
        other, at = found.pop("another loader")
        for door, (position, decays, said) in found.items():
            assert (position, decays, said) == (7, {0.77}, []), door
        assert other[0] == 0 and at == 7 and 0.77 not in other[1], "what the call says comes first"
