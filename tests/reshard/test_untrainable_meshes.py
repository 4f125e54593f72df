"""Meshes on which DeepSpeed can't train or save experts: planned, proved and carried out on shards
made by hand."""

from pathlib import Path

import pytest

from megatron_ucp.core.mesh import Mesh
from tests.reshard.synthetic import Layout, carried, different

MESHES = {
    "an expert is cut more than attention": Mesh(tp=1, dp=4, ep=2, etp=2, zero=1),
    "cut more, in one run of experts": Mesh(tp=1, dp=4, ep=1, etp=2, zero=2),
    "cut four times": Mesh(tp=2, dp=4, ep=2, etp=4, zero=1),
    "fewer ranks for all experts than cut attention": Mesh(tp=4, dp=2, ep=2, etp=1, zero=1),
    "one of four": Mesh(tp=4, dp=1, ep=1, etp=1, zero=1),
    "ZeRO-3 on two expert-parallel ranks": Mesh(tp=1, dp=4, ep=2, zero=3),
    "ZeRO-3 on four, cut": Mesh(tp=2, dp=4, ep=4, zero=3),
    "ZeRO-3 and cut more": Mesh(tp=1, dp=8, ep=2, etp=2, zero=3),
}
TRAINED = Mesh(tp=2, dp=2, ep=2, zero=1)


@pytest.mark.parametrize("name", MESHES)
@pytest.mark.parametrize("grouped", [False, True])
def test_to_a_mesh_that_trains_and_back(tmp_path: Path, name: str, grouped: bool) -> None:
    here, there = Layout(MESHES[name], grouped), Layout(TRAINED)
    assert different(there, carried(here, there, tmp_path)) == []
    assert different(here, carried(there, here, tmp_path)) == []


def test_between_them(tmp_path: Path) -> None:
    every = [Layout(mesh) for mesh in MESHES.values()]
    for source, target in zip(every, every[1:] + every[:1], strict=True):
        assert different(target, carried(source, target, tmp_path)) == []


@pytest.mark.parametrize("name", MESHES)
def test_a_swapped_expert_is_seen(tmp_path: Path, name: str) -> None:
    here = Layout(MESHES[name], fault="two experts swapped")
    fine = Layout(TRAINED)
    swapped = different(fine, carried(here, fine, tmp_path))
    assert bool(swapped) == (MESHES[name].ep < 4)  # with one expert on a rank nothing is swapped
