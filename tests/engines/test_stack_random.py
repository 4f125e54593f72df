"""The generators that stock Megatron-LM saved: on the same mesh every rank has them after a load,
bit by bit, and dropout goes on as in the run that saved them."""

from dataclasses import replace
from typing import Any

import pytest

import megatron_ucp as ucp
from megatron_ucp.engines.megatron import models
from tests.engines.sources import Sources
from tests.engines.stack_jobs import Mcore, random_states
from tests.engines.test_stack_golden import expected, go_on, start
from tests.engines.test_stack_loads import check
from tests.formats.megatron_files import GOLDEN
from tests.formats.megatron_random import RUNS, alike, saved_states
from tests.ranks import RankPool

JOB = "tests.engines.test_stack_random:resume"
SAVE, RESUME = "tests.engines.stack_jobs:save", "tests.engines.stack_jobs:resume"
DROPOUT: dict[str, Any] = {"layers": 2, "dropout": 0.1}
SETUPS = {
    "rng_tp2dp2": Mcore(tp=2, **DROPOUT),
    "rng_moe_ep2": Mcore("mixtral", ep=2, **DROPOUT),
    "rng_legacy_tp2dp2": Mcore(tp=2, **DROPOUT),
}


def resume(setup: Mcore, folder: str, **options: Any) -> dict[str, Any]:
    """This rank's generators before and after a load, and the losses of the next iterations."""
    run = start(setup)
    before = random_states()
    notes = ucp.load(run.handle, folder, **options).notes
    after = random_states()
    losses = go_on(run)
    models.stop()
    return {
        "before": before,
        "after": after,
        "losses": losses,
        "notes": [note for note in notes if "random states" in note],
    }


@pytest.mark.parametrize("case", SETUPS)
def test_every_rank_goes_on_with_its_own(ranks: RankPool, case: str) -> None:
    world = RUNS[case].world
    found = ranks.run(world, JOB, SETUPS[case], str(GOLDEN / case))
    for rank, said in enumerate(found):
        want = saved_states(case, rank)
        assert alike(said["after"], want) and not alike(said["before"], want)
        assert said["losses"] == pytest.approx(expected(case), rel=0, abs=1e-5)
        assert said["notes"] == []


def test_without_them_the_losses_differ(ranks: RankPool) -> None:
    case = "rng_tp2dp2"
    for said in ranks.run(4, JOB, SETUPS[case], str(GOLDEN / case), rng=False):
        assert alike(said["after"], said["before"])
        assert said["losses"] != pytest.approx(expected(case), rel=0, abs=1e-3)


def test_another_mesh_keeps_its_own(ranks: RankPool) -> None:
    case = "rng_tp2dp2"
    for said in ranks.run(2, JOB, replace(SETUPS[case], tp=1), str(GOLDEN / case)):
        assert alike(said["after"], said["before"])
        (note,) = said["notes"]
        assert "another mesh (tp=2,pp=1,dp=2" in note and "own go on" in note


# saved by megatron-core's own writer, as Megatron-LM calls it
LIVE = {
    "pp2": (4, Mcore(pp=2, layers=2, dropout=0.2)),
    "ep2": (4, Mcore("mixtral", ep=2, layers=2, dropout=0.2)),
}


@pytest.mark.parametrize("source", ["pp2", pytest.param("ep2", marks=pytest.mark.slow)])
def test_the_next_steps_have_identical_bits(sources: Sources, source: str) -> None:
    world, setup = LIVE[source]
    folder = sources.get(world, setup, SAVE, more=3)
    found = sources.ranks.run(world, RESUME, setup, folder, tags=("trained",), three=True)
    check(found, None)
    assert all(rank["after"] == [] for rank in found)
    if source == "pp2":
        others = sources.ranks.run(
            world, RESUME, setup, folder, tags=("trained",), three=True, rng=False
        )
        assert all(len(rank["after"]) > 10 for rank in others), "dropout does not show"
