"""DeepSpeed's sequence parallelism (Ulysses): ZeRO partitions over its ranks as over data-parallel
ones, and yet it is an axis of its own."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_ucp.core.manifest import FILE_NAME
from tests.engines import optimizer_jobs, save_jobs, ulysses_jobs
from tests.engines.model import Setup
from tests.engines.moe_jobs import Moe
from tests.engines.sources import Sources, check, check_fails
from tests.engines.tensor_jobs import Mega

pytestmark = pytest.mark.ranks
DERIVED = "derived from the seed, the step"


def ulysses(zero: int, sp: int, **kwargs: Any) -> Setup:
    return Setup(zero, "fp32", extra={"sp": sp} if sp > 1 else {}, **kwargs)


def test_it_is_an_axis_of_the_manifest(sources: Sources) -> None:
    folder = Path(sources.get(4, ulysses(1, 2), more=0, filled=False))
    mesh = json.loads((folder / "trained" / FILE_NAME).read_text())["mesh"]
    assert (mesh["sp"], mesh["dp"]) == (2, 2)


PAIRS = [
    (4, ulysses(1, 2), 2, ulysses(3, 1)),
    (2, ulysses(3, 1), 4, ulysses(1, 2)),
    (4, ulysses(1, 2), 4, ulysses(2, 4)),
    (4, ulysses(3, 4), 2, ulysses(2, 2)),
    (4, ulysses(3, 4), 4, ulysses(3, 2)),
    (2, ulysses(2, 2), 4, ulysses(3, 2)),
]


@pytest.mark.parametrize(("world", "source", "target_world", "target"), PAIRS)
@pytest.mark.parametrize("named", [True, False])
@pytest.mark.cases(7)
def test_pair(
    sources: Sources, world: int, source: Setup, target_world: int, target: Setup, named: bool
) -> None:
    folder = sources.get(world, source, more=0, filled=False, attach=named)
    check(sources.resume(target_world, replace(target, seed=9), folder, tags=("trained",)))


FAULTS = ["the partition of another rank", "one bit", "one moment", "one step", "a buffer"]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_seen(sources: Sources, fault: str) -> None:
    folder = sources.get(4, ulysses(1, 2), more=0, filled=False, attach=True)
    setup = ulysses(2, 2, seed=9)
    check_fails(sources.resume(2, setup, folder, tags=("trained",), plant=fault))


def test_the_form_without_an_mpu_is_refused(sources: Sources) -> None:
    """Two ranks of a sequence would write one file."""
    by_config = (("sequence_parallel_size", 2), ("data_parallel_size", 1))
    setup = Setup(1, "fp32", config=(("train_micro_batch_size_per_gpu", 4), *by_config))
    for rank in sources.ranks.run(2, optimizer_jobs.attaching, setup):
        assert rank["error"] == "UnsupportedError" and "same files" in rank["message"]
        assert rank["unchanged"] and not rank["attached"]


def beside(zero: int, tp: int) -> Mega:
    return Mega("llama", tp, zero)


BESIDE = [
    ((4, 2, beside(1, 2)), (2, 1, beside(2, 1))),
    ((4, 2, beside(2, 2)), (4, 1, beside(3, 4))),
    ((2, 1, beside(3, 2)), (4, 2, beside(1, 2))),
    ((4, 2, beside(0, 2)), (2, 2, beside(1, 1))),
    ((4, 2, Moe(2, 1)), (4, 1, Moe(4, 2))),
    ((4, 2, Moe(2, 2)), (2, 1, Moe(2, 0))),
    ((4, 1, Moe(4, 1)), (4, 2, Moe(2, 1))),
]


@pytest.mark.parametrize(("source", "target"), BESIDE)
def test_beside_tensor_parallelism_and_experts(sources: Sources, source: Any, target: Any) -> None:
    (ranks, *sharing), (world, sp, setup) = source, target
    folder = sources.get(ranks, tuple(sharing), ulysses_jobs.save)
    setup = replace(setup, seed=9)
    check(sources.ranks.run(world, ulysses_jobs.sharing, sp, "resume", setup, folder))


@pytest.mark.parametrize("tp", [1, 2])
def test_copies_that_drift_apart_are_refused(sources: Sources, tmp_path: Path, tp: int) -> None:
    """DeepSpeed's ZeRO-3 divides over the mpu's data-parallel ranks, and reduces no gradient over
    those of a sequence."""
    said = sources.ranks.run(4, ulysses_jobs.sharing, 2, "save", beside(3, tp), str(tmp_path))
    for message in said:
        assert message.startswith("UnsupportedError") and "drift apart" in message


@pytest.mark.parametrize(("sp", "other"), [(2, 1), (1, 2)])
def test_the_same_number_of_ranks_is_another_mesh(
    sources: Sources, tmp_path: Path, sp: int, other: int
) -> None:
    """Two ranks that share a sequence and two that don't draw other numbers."""
    run = sources.ranks.run
    source = ulysses(1, sp, net="Noisy")
    losses = run(2, save_jobs.noisy, source, str(tmp_path))
    same = run(2, save_jobs.resume_noisy, replace(source, seed=9), str(tmp_path))
    for found, want in zip(same, losses, strict=True):
        assert found["losses"] == want
        assert not [note for note in found["notes"] if "random" in note]
    for found in run(2, save_jobs.resume_noisy, ulysses(1, other, net="Noisy"), str(tmp_path)):
        assert any(DERIVED in note for note in found["notes"])
