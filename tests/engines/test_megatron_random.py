"""The generators that stock Megatron-LM saved: on the same mesh every rank has them after a load,
bit by bit, and dropout goes on as in the run that saved them."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import megatron_ucp as ucp
from megatron_ucp.errors import UcpError
from pretrain.mcore import models
from tests.engines.megatron_file_jobs import make
from tests.engines.megatron_jobs import Mcore, random_states
from tests.engines.sources import Sources, check
from tests.engines.test_megatron_golden import expected, go_on, start
from tests.formats.megatron_files import GOLDEN, copied
from tests.formats.megatron_random import RUNS, alike, key_of, replaced, saved_states
from tests.ranks import RankPool

DROPOUT: dict[str, Any] = {"layers": 2, "dropout": 0.1}
CASE = "rng_tp2dp2"
SETUPS = {
    CASE: Mcore(tp=2, **DROPOUT),
    "rng_moe_ep2": Mcore("mixtral", ep=2, **DROPOUT),
    "rng_legacy_tp2dp2": Mcore(tp=2, **DROPOUT),
}


def resume(case: str, tp: int, **options: Any) -> dict[str, Any]:
    """What a load of a folder made of this rank's generators (see `seen`), and the losses of the
    next iterations."""
    run = start(replace(SETUPS[case], tp=tp))
    before = random_states()
    notes = ucp.load(run.handle, str(GOLDEN / case), **options).notes
    found = seen(case, before, notes)
    found["losses"] = go_on(run)
    models.stop()
    return found


def resume_under_deepspeed(case: str) -> dict[str, Any]:
    engine = make(tp=2, zero=1, dtype="fp32", layers=2)
    before = random_states()
    notes = ucp.load(engine, str(GOLDEN / case), allow={"scheduler"}).notes
    found = seen(case, before, notes)
    engine.destroy()
    models.stop()
    return found


def seen(case: str, before: Any, notes: Sequence[str]) -> dict[str, Any]:
    """Whether the generators are those that torch reads of this rank's, now, before the load, and
    with one bit of one of them flipped; whether they are as before."""
    want, after = saved_states(case, dist.get_rank()), random_states()
    planted = copy.deepcopy(after)
    planted["rng_tracker_states"]["expert-parallel-rng"][100] ^= 1
    return {
        "restored": alike(after, want),
        "restored before": alike(before, want),
        "restored with a fault": alike(planted, want),
        "left alone": alike(after, before),
        "notes": [note for note in notes if "random states" in note],
    }


def check_restored(found: list[dict[str, Any]]) -> None:
    for said in found:
        assert said["restored"] and said["notes"] == []
        assert not said["restored before"] and not said["restored with a fault"]


@pytest.mark.parametrize("case", SETUPS)
def test_every_rank_goes_on_with_its_own(ranks: RankPool, case: str) -> None:
    found = ranks.run(RUNS[case].world, resume, case, SETUPS[case].tp)
    check_restored(found)
    for said in found:
        assert said["losses"] == pytest.approx(expected(case), rel=0, abs=1e-5)


def test_without_them_the_losses_differ(ranks: RankPool) -> None:
    for said in ranks.run(4, resume, CASE, 2, rng=False):
        assert said["left alone"] and not said["restored"]
        assert said["losses"] != pytest.approx(expected(CASE), rel=0, abs=1e-3)


def test_another_mesh_keeps_its_own(ranks: RankPool) -> None:
    for said in ranks.run(2, resume, CASE, 1):
        (note,) = said["notes"]
        assert said["left alone"] and "another mesh (tp=2,pp=1,dp=2" in note


def test_under_deepspeed_too(ranks: RankPool) -> None:
    check_restored(ranks.run(4, resume_under_deepspeed, CASE))


def refused(folder: str) -> tuple[str, bool]:
    """The error of a load, and whether weights and generators are as before it."""
    run = start(SETUPS[CASE])
    weights = [param for bare in run.stack.bare for param in bare.parameters()]
    before = random_states(), copy.deepcopy(weights)
    with pytest.raises(UcpError) as found:
        ucp.load(run.handle, folder)
    same = alike((random_states(), weights), before)
    models.stop()
    return type(found.value).__name__, same


def test_damage_of_one_ranks_is_refused_on_all(ranks: RankPool, tmp_path: Path) -> None:
    saved = saved_states(CASE, 1)
    del saved["np_rng_state"]
    replaced(copied(CASE, tmp_path / CASE), key_of(CASE, 1), [saved])
    job = refused
    assert ranks.run(4, job, str(tmp_path / CASE)) == [("DamagedFileError", True)] * 4


# saved by megatron-core's own writer, as Megatron-LM calls it
LIVE = {
    "pp2": (4, Mcore(pp=2, layers=2, dropout=0.2)),
    "ep2": (4, Mcore("mixtral", ep=2, layers=2, dropout=0.2)),
}


@pytest.mark.parametrize("source", ["pp2", pytest.param("ep2", marks=pytest.mark.slow)])
def test_the_next_steps_have_identical_bits(sources: Sources, source: str) -> None:
    world, setup = LIVE[source]
    folder = sources.get(world, setup, more=3)
    found = sources.resume(world, setup, folder, tags=("trained",), three=True)
    check(found)
    assert all(rank["after"] == [] for rank in found)
    if source == "pp2":
        others = sources.resume(world, setup, folder, tags=("trained",), three=True, rng=False)
        assert all(len(rank["after"]) > 10 for rank in others), "dropout does not show"
