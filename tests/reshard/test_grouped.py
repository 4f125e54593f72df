"""megatron-core's grouped experts, whose kernel needs a GPU, and experts one by one: the same
elements at other addresses, on shards made by hand."""

from pathlib import Path

import pytest

from megatron_ucp.core.mesh import Mesh
from tests.reshard.synthetic import Layout, carried, different

PLACES = [(1, 1), (2, 2), (4, 1), (1, 2), (4, 2), (2, 1)]  # expert-parallel, expert-tensor


def mesh(place: tuple[int, int], zero: int) -> Mesh:
    """Eight ranks."""
    ep, etp = place
    return Mesh(tp=2, dp=4, ep=ep, etp=etp, zero=zero)


@pytest.mark.parametrize("zero", [1, pytest.param(3, marks=pytest.mark.long)])
@pytest.mark.parametrize("to_grouped", [True, False])
@pytest.mark.parametrize("at", range(len(PLACES)))
def test_grouped_and_one_by_one(tmp_path: Path, at: int, to_grouped: bool, zero: int) -> None:
    source = Layout(mesh(PLACES[at], zero), grouped=not to_grouped)
    other = mesh(PLACES[(at + 1) % len(PLACES)], 4 - zero)
    target = Layout(other, grouped=to_grouped)
    assert different(target, carried(source, target, tmp_path)) == []


@pytest.mark.long
@pytest.mark.parametrize("zero", [1, 3])
def test_grouped_on_both_sides(tmp_path: Path, zero: int) -> None:
    for at, place in enumerate(PLACES):
        source = Layout(mesh(place, zero), grouped=True)
        target = Layout(mesh(PLACES[at - 2], zero), grouped=True)
        assert different(target, carried(source, target, tmp_path)) == []


@pytest.mark.parametrize("grouped", [True, False])
@pytest.mark.parametrize("fault", ["two experts swapped", "gate and up swapped"])
def test_a_planted_fault_is_seen(tmp_path: Path, fault: str, grouped: bool) -> None:
    source = Layout(mesh((2, 2), 1), grouped, fault)
    target = Layout(mesh((1, 1), 1), not grouped)
    assert different(target, carried(source, target, tmp_path))


def test_the_label_of_grouped_experts_is_none(tmp_path: Path) -> None:
    """Their attribute partition_dim says 1, as if experts lay side by side."""
    source = Layout(mesh((2, 1), 1), True, "cut as its label says")
    target = Layout(mesh((1, 1), 1))
    assert different(target, carried(source, target, tmp_path))
