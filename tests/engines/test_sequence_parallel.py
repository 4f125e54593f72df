"""DeepSpeed's sequence parallelism (Ulysses): ZeRO partitions over its ranks as over data-parallel
ones, and yet it is an axis of its own."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

import megatron_ucp as ucp
from megatron_ucp.core.manifest import FILE_NAME
from tests.engines import kinds, optimizer_jobs, save_jobs
from tests.engines.model import Setup
from tests.engines.moe_jobs import Moe
from tests.engines.sources import Sources, check, check_fails
from tests.engines.tensor_jobs import Mega


class Mpu:
    """megatron-core's groups, and beside them `sp` ranks that share each sequence: what programs
    around DeepSpeed bring as mpu."""

    def __init__(self, inner: Any, sp: int) -> None:
        self.inner, self.ranks = inner, inner.get_data_parallel_group()
        tp, world = inner.get_tensor_model_parallel_world_size(), dist.get_world_size()
        self.groups: dict[str, Any] = {}
        for share in range(tp):  # ranks that differ in data and sequence
            alike = list(range(share, world, tp))
            rows = [alike[n : n + sp] for n in range(0, len(alike), sp)]
            for axis, parts in (("sequence", rows), ("data", zip(*rows, strict=True))):
                for part in parts:
                    group = dist.new_group(list(part))
                    if dist.get_rank() in part:
                        self.groups[axis] = group

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def get_sequence_parallel_group(self) -> Any:
        return self.groups["sequence"]

    def get_sequence_parallel_world_size(self) -> int:
        return dist.get_world_size(self.groups["sequence"])

    def get_sequence_parallel_rank(self) -> int:
        return dist.get_rank(self.groups["sequence"])

    def get_data_parallel_group(self) -> Any:
        return self.groups["data"]

    def get_data_parallel_world_size(self) -> int:
        return dist.get_world_size(self.groups["data"])

    def get_data_parallel_rank(self) -> int:
        return dist.get_rank(self.groups["data"])

    def get_sequence_data_parallel_group(self) -> Any:
        return self.ranks

    def get_sequence_data_parallel_world_size(self) -> int:
        return dist.get_world_size(self.ranks)

    def get_sequence_data_parallel_rank(self) -> int:
        return dist.get_rank(self.ranks)


def sharing_sequences(sp: int, job: str, setup: Mega | Moe, *arguments: Any, **options: Any) -> Any:
    """A job of `kinds`, where `sp` ranks share each sequence; what it refuses."""
    import deepspeed
    from deepspeed.runtime.sequence_parallel import parallel_state_sp

    stock, experts = deepspeed.initialize, isinstance(setup, Moe)
    if experts and sp > 1:
        parallel_state_sp.initialize_sequence_parallel(sp)

    def initialize(mpu: Any = None, **kwargs: Any) -> Any:
        if sp > 1:
            mpu = parallel_state_sp if experts else Mpu(mpu, sp)
        return stock(mpu=mpu, **kwargs)

    with mock.patch.object(deepspeed, "initialize", initialize):
        try:
            return getattr(kinds, job)(setup, *arguments, **options)
        except ucp.UcpError as error:
            return f"{type(error).__name__}: {error}"


def save(sharing_by: tuple[int, Mega | Moe], folder: str) -> None:
    sp, setup = sharing_by
    said = sharing_sequences(sp, "save", setup, folder, more=0)
    assert said is None, said


# ------------------------------------------------ tests


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
    folder = sources.get(ranks, tuple(sharing), save)
    setup = replace(setup, seed=9)
    check(sources.ranks.run(world, sharing_sequences, sp, "resume", setup, folder))


@pytest.mark.parametrize("tp", [1, 2])
def test_copies_that_drift_apart_are_refused(sources: Sources, tmp_path: Path, tp: int) -> None:
    """DeepSpeed's ZeRO-3 divides over the mpu's data-parallel ranks, and reduces no gradient over
    those of a sequence."""
    said = sources.ranks.run(4, sharing_sequences, 2, "save", beside(3, tp), str(tmp_path))
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
