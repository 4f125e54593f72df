"""Steps that machines keep in memory: what is left of a run goes on in another world, bit for bit,
against a gather that knows nothing of the package's layouts."""

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.engines import memory_jobs
from tests.engines.megatron_jobs import Mcore
from tests.engines.memory_jobs import World, flip, unsay
from tests.engines.model import Setup
from tests.engines.moe_jobs import Moe
from tests.engines.tensor_jobs import Mega, Staged
from tests.ranks import RankPool, RanksFailed

pytestmark = pytest.mark.ranks
ONE = ("a",) * 4
TWO = ("a", "a", "b", "b")
FOUR = ("a", "b", "c", "d")


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[str]:
    """The folder of a run's saves, whose memory goes with the test."""
    yield str(tmp_path / "run")
    memory_jobs.clear(str(tmp_path / "run"))


def go(ranks: RankPool, folder: str, first: World, second: World, **how: Any) -> list[Any]:
    """What the ranks of the second world found, which loads what is left of the first one."""
    job, store = memory_jobs.recalled, f"{folder}-store"
    return ranks.run(4, job, first, second, folder, store, timeout_s=200, **how)[: second.ranks]


def check(found: list[Any], step: int, *said: str) -> None:
    """Every rank has the bits of that step, had others before, and sees a planted one; notes say
    which it is."""
    for rank in found:
        assert rank["step"] == step, rank["notes"]
        assert rank["differences"] == [] and rank["planted"]
        assert rank["before"] is None or len(rank["before"]) > 10, "the engine was equal before"
    notes = "\n".join(found[0]["notes"])
    for text in said:
        assert text in notes, notes


# name -> the world that ends, the one that goes on
PAIRS: dict[str, tuple[World, World]] = {
    "z1 to z3 on three ranks": (World(Setup(1), ONE), World(Setup(3, seed=9), ONE[:3])),
    "z3 in bf16 to z1 on two": (
        World(Setup(3, "bf16"), ONE),
        World(Setup(1, "bf16", seed=9), ONE[:2]),
    ),
    "z0 to z2, more ranks": (World(Setup(0), ONE[:2]), World(Setup(2, seed=9), ONE)),
    "tp2 to tp1": (
        World(Mega("llama", 2, 1), ONE),
        World(Mega("llama", 1, 3, seed=9), ONE[:2]),
    ),
    "a pipeline to none": (
        World(Staged("gpt", 1, 1, pp=2), ONE),
        World(Staged("gpt", 2, 1, seed=9), ONE[:2]),
    ),
    "experts": (World(Moe(2, 1), ONE), World(Moe(4, 2, seed=9), ONE)),
    "Megatron, dp to stages": (World(Mcore(), ONE), World(Mcore(pp=2, seed=9), ONE[:2])),
    "Megatron, tp2 to buckets": (
        World(Mcore(tp=2, gather=True, overlap=True), ONE),
        World(Mcore(overlap=True, gather=True, bucket=2000, seed=9), ONE),
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_a_run_goes_on_from_memory(ranks: RankPool, folder: str, name: str) -> None:
    first, second = PAIRS[name]
    found = go(ranks, folder, first, second)
    check(found, 4, "from memory: step 4; no tag on disk")
    assert "fingerprint of" in found[0]["line"]
    (left,) = found[0]["left"].values()
    assert {name.split(".")[1] for name in left if name.endswith("bytes")} == {"1"}, (
        "the other went"
    )


COPIES: dict[str, Any] = {"copies": 1}
ALONE: dict[str, Any] = {"copies": 0}
FROM_DISK = "from disk: no whole step in memory is newer; the newest tag on disk is of step 2"
# name -> machines, setups, options, machines that are lost, the step, what is said
LOSSES: dict[str, tuple[Any, Any, Any, dict[str, Any], tuple[str, ...], int, str]] = {
    "one of two": (TWO, Setup(1), Setup(3, seed=9), COPIES, ("b",), 4, "2 before it"),
    "the first of two": (TWO, Setup(3), Setup(1, seed=9), COPIES, ("a",), 4, "from memory"),
    "one of two, without copies": (TWO, Setup(1), Setup(3, seed=9), ALONE, ("b",), 2, FROM_DISK),
    "one of two with replicas": (TWO, Setup(0), Setup(1, seed=9), COPIES, ("b",), 4, "from memory"),
    "two neighbours": (FOUR, Setup(1), Setup(2, seed=9), COPIES, ("b", "c"), 2, FROM_DISK),
    "two that are none": (FOUR, Setup(1), Setup(2, seed=9), COPIES, ("a", "c"), 4, "from memory"),
    "two neighbours, two copies": (
        FOUR,
        Setup(3),
        Setup(1, seed=9),
        {"copies": 2},
        ("b", "c"),
        4,
        "from memory",
    ),
    "Megatron": (TWO, Mcore(tp=2), Mcore(pp=2, seed=9), COPIES, ("b",), 4, "from memory"),
    "Megatron, without copies": (TWO, Mcore(), Mcore(pp=2, seed=9), ALONE, ("b",), 2, FROM_DISK),
}


@pytest.mark.parametrize("name", LOSSES)
def test_machines_are_lost(ranks: RankPool, folder: str, name: str) -> None:
    nodes, one, other, options, lost, step, said = LOSSES[name]
    first = World(one, nodes, options)
    left = [node for node in nodes if node not in lost]
    found = go(ranks, folder, first, World(other, tuple(left)[:2]), disk=(2,), lost=lost)
    check(found, step, said)
    if step == 2:
        assert "step 4 in memory is not whole: " in "\n".join(found[0]["notes"])
        assert "the run had come to step" in "\n".join(found[0]["notes"])
        assert found[0]["path"].startswith(folder)


def test_a_newer_tag_on_disk_is_taken(ranks: RankPool, folder: str) -> None:
    worlds = World(Setup(1), ONE), World(Setup(1, seed=9), ONE)
    check(go(ranks, folder, *worlds, disk=(5,)), 5, "from disk", "is of step 5")


def test_what_another_run_kept_is_not_taken(ranks: RankPool, folder: str) -> None:
    """As where a run begins anew in the folder of an old one."""
    worlds, harm = (World(Setup(1), ONE), World(Setup(1, seed=9), ONE)), memory_jobs.of_another_run
    found = go(ranks, folder, *worlds, disk=(2,), harm=harm)
    check(found, 2, "step 4 in memory is of another run than the tag on disk")


# name -> machines, what happens to what is left, the step, what is said
HARMS: dict[str, tuple[Any, Any, int, str]] = {
    "a bit, and the step before": (ONE, partial(flip, node="a"), 2, "is not as it was written"),
    "a bit, and a copy": (TWO, partial(flip, node="a"), 4, "of rank 0: "),
    "what it says, and a copy": (TWO, partial(unsay, node="b"), 4, "from memory: step 4"),
    "what it says": (ONE, partial(unsay, node="a"), 2, "step 4 in memory is not whole"),
}


@pytest.mark.parametrize("name", HARMS)
@pytest.mark.parametrize("kind", [partial(Setup, 1), Mcore])
def test_what_is_damaged_is_not_taken(ranks: RankPool, folder: str, name: str, kind: Any) -> None:
    nodes, harm, step, said = HARMS[name]
    first, second = World(kind(), nodes), World(kind(seed=9), nodes)
    check(go(ranks, folder, first, second, harm=harm), step, said)


DEATHS = [(setup, moment) for setup in (Setup(1), Mcore()) for moment in memory_jobs.MOMENTS]


@pytest.mark.parametrize(("setup", "moment"), DEATHS)
def test_a_rank_dies_while_a_step_is_kept(
    ranks: RankPool, tmp_path: Path, folder: str, setup: Any, moment: str
) -> None:
    """The step before is taken, and never half of one."""
    want, first = str(tmp_path / "want"), World(setup, ONE)
    pool = RankPool(4)
    try:
        with pytest.raises(RanksFailed):
            pool.run(4, memory_jobs.dies, first, folder, 2, moment, want, timeout_s=60)
    finally:
        pool.close()
    second = World(replace(setup, seed=9), ONE[:2])
    found = ranks.run(2, memory_jobs.after_death, first, second, folder, want)
    check(found, 4, "from memory: step 4; no tag on disk", "the run had come to step ")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_a_rank_dies_at_any_moment(ranks: RankPool, tmp_path: Path, folder: str, seed: int) -> None:
    """What is left is one of the steps, bit for bit, and loads again and again."""
    dice, want = random.Random(seed), str(tmp_path / "want")
    setup = dice.choice([Setup(1), Setup(3), Mcore(), Mcore(tp=2)])
    first, pool = World(setup, ONE), RankPool(4)
    try:
        with pytest.raises(RanksFailed):
            after_s = dice.uniform(0, 0.4)
            pool.run(4, memory_jobs.dies_anytime, first, folder, dice.randrange(4), after_s)
    finally:
        pool.close()
    second = World(replace(setup, seed=9), ONE[: dice.choice([2, 4])])
    (step, *others) = ranks.run(second.ranks, memory_jobs.newest_step, second, folder)
    assert step >= 1 and {*others} == {step}
    ranks.run(4, memory_jobs.states_at, first, step, want)
    found = ranks.run(
        second.ranks, memory_jobs.after_death, first, second, folder, want, step, timeout_s=100
    )
    check(found, step, f"from memory: step {step}; no tag on disk")


def test_what_other_runs_left_stays(ranks: RankPool, tmp_path: Path, folder: str) -> None:
    """The next start of a run removes what is left of its own; never another run's, and never what
    a living process keeps."""
    other = str(tmp_path / "other")
    try:
        for found in ranks.run(2, memory_jobs.starts_again, folder, other):
            assert found["another run"] and found["another run"] == found["another run, then"]
            assert found["dead"] and not found["dead"] & found["then"]
            assert found["alive"] and found["alive"] <= found["then"]
            assert found["own"] and found["own"] <= found["then"]
            assert "a process that lives keeps steps in memory" in "\n".join(found["notes"])
            assert found["loaded"] == 1, "nothing of it was read"
    finally:
        memory_jobs.clear(other)


def test_no_room_is_refused_before_anything_is_taken(ranks: RankPool, folder: str) -> None:
    for said, left, steps in ranks.run(2, memory_jobs.without_room, folder):
        assert said.startswith("there is no room for steps in memory")
        assert "for two steps of all ranks of this machine" in said and "--shm-size" in said
        assert left == [] and steps == 3, "nothing is taken, and training can go on"


def test_options(ranks: RankPool, folder: str) -> None:
    for found in ranks.run(2, memory_jobs.all_options, folder):
        for name, said in found["refused"].items():
            assert said.startswith("UsageError: "), (name, said)
            assert name.split()[0] in said
        path, client = found["stock"]
        assert path.endswith("/step 4") and client == {"samples": 16}
        assert found["first start"] == (None, None)
        assert "it is not known which run this is" in found["said"]
        assert "each 2 steps the state is kept in memory" in found["said"]
        assert "there is one machine: steps in memory outlive processes" in found["said"]


def test_a_loop_that_does_not_count(ranks: RankPool, folder: str) -> None:
    for said, kept in ranks.run(2, memory_jobs.uncounted, folder):
        assert "no step is kept in memory: the optimizer was stepped" in said
        assert kept is None


def test_what_is_drawn_for_the_next_step_is_drawn_again(ranks: RankPool, folder: str) -> None:
    """A step is kept when the loop has drawn the data of the next one: that is no step's data."""
    for found in ranks.run(2, memory_jobs.draws_ahead, folder):
        assert found["step"] == 4
        assert found["again"] == found["drawn"][4:], "samples are left out, or noise is other noise"


def test_one_rank_may_evaluate_alone(ranks: RankPool, folder: str) -> None:
    assert ranks.run(2, memory_jobs.evaluates_alone, folder, timeout_s=30) == [2, 2]


def test_a_load_from_elsewhere_leaves_what_the_run_kept(
    ranks: RankPool, tmp_path: Path, folder: str
) -> None:
    """A start may take its first weights from another folder before it asks for its own."""
    base = str(tmp_path / "base")
    for step, notes in ranks.run(2, memory_jobs.loads_elsewhere_first, folder, base):
        assert step == 2 and "from memory: step 2; no tag on disk" in "\n".join(notes)


def test_memory_stands_for_no_tag_that_is_not_there(ranks: RankPool, folder: str) -> None:
    tags = ["global_step7", "../global_step1", "global_step1"]
    for *wrong, right in ranks.run(2, memory_jobs.asks_for_tags, folder, tags):
        for said, tag in zip((said for said, _ in wrong), tags, strict=False):
            assert said.startswith(("NotFoundError", "UsageError")) and tag in said, said
        step, notes = right
        assert step == "2" and "from memory: step 2; global_step1 on disk" in "\n".join(notes)
