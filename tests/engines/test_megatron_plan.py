"""A rank plans what it writes itself, and the first one where all lies: the same files as one plan
of everything has."""

import math
from typing import Any

import pytest

from benchmarks.paper import paper_manifest
from megatron_ucp.core.mesh import Mesh
from megatron_ucp.engines.megatron import save
from megatron_ucp.engines.megatron.save import StackOutput, runs_of, runs_of_rank
from megatron_ucp.errors import PlanError
from megatron_ucp.families import families
from megatron_ucp.formats.deepspeed.target import Target
from megatron_ucp.formats.megatron.arguments import Kind
from megatron_ucp.formats.megatron.writer import declared_keys
from megatron_ucp.reshard.target import Conversion, target_manifest
from tests.reshard import twins

MESHES = [
    ("llama", Mesh(tp=2, dp=4, zero=1)),
    ("llama", Mesh(tp=2, sp=2, dp=2, zero=1)),
    ("llama", Mesh(dp=3, zero=0)),
    ("mixtral", Mesh(tp=2, ep=2, etp=1, dp=4, zero=1)),
]


def states_of(family: str, mesh: Mesh) -> Any:
    sizes = twins.LLAMA if family == "llama" else twins.MIXTRAL
    paper = paper_manifest(families()[family], sizes)
    return target_manifest(Conversion(paper, Target(mesh, dtype="bfloat16").completed({}), "x"))


def said(output: StackOutput, file: str) -> list[Any]:
    """All that a plan says of a file."""
    return [
        (one.key, one.start, one.shape, one.offset_bytes, one.archive.size_bytes)
        for one in output.plan.chunks
        if one.file == file
    ]


@pytest.mark.parametrize(("family", "mesh"), MESHES, ids=str)
def test_each_rank_plans_its_own_file(family: str, mesh: Mesh) -> None:
    states = states_of(family, mesh)
    keys = declared_keys(states.by_name)
    outputs = [StackOutput(states, Kind.DISTRIBUTED, keys, rank) for rank in range(mesh.world)]
    first = outputs[0]
    chunks = 0
    for rank, output in enumerate(outputs):
        name = f"__{rank}_0.distcp"
        assert said(output, name) == said(first, name)
        assert output.plan.sizes.get(name) == first.plan.sizes.get(name)
        chunks += len(said(output, name))
        if rank:
            assert {one.file for one in output.plan.chunks} <= {name}
        pieces = [piece for file in output.files if file.owner == rank for piece in file.pieces]
        assert len(pieces) == len(said(first, name))
        own = [chunk for run in output.own for chunk in run.chunks]
        assert sorted(chunk.data_offset for chunk in own) == sorted(one.place for one in pieces)
        for run in output.own:
            assert sum(math.prod(one.shape) for one in run.chunks) == run.last - run.first
    assert chunks == len(first.plan.chunks) > 50


@pytest.mark.parametrize(("family", "mesh"), MESHES, ids=str)
def test_the_runs_of_all_ranks_are_all_runs(family: str, mesh: Mesh) -> None:
    states = states_of(family, mesh)
    held = [{part[0]: part for part in states.parts_of(rank)} for rank in range(mesh.world)]
    for spec in states.params:
        found = [
            run
            for rank in range(mesh.world)
            for run in runs_of_rank(states, spec.name, held[rank], rank)
        ]
        assert sorted(found, key=repr) == sorted(runs_of(states, spec.name), key=repr)


def test_others_do_not_look_at_all_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    states = states_of("llama", Mesh(tp=2, dp=4, zero=1))
    keys = declared_keys(states.by_name)

    def fail(*_: Any) -> Any:
        raise AssertionError("all runs are looked at")

    monkeypatch.setattr(save, "runs_of", fail)
    assert StackOutput(states, Kind.DISTRIBUTED, keys, 3).plan.chunks
    with pytest.raises(AssertionError, match="all runs"):
        StackOutput(states, Kind.DISTRIBUTED, keys, 0)


def test_ranks_that_hold_a_parameter_in_part_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody plans what goes where: that all of each parameter is written once is counted."""
    states = states_of("llama", Mesh(tp=2, dp=4, zero=1))
    keys, whole = declared_keys(states.by_name), save._contiguous
    part = lambda pieces, low, high: [*whole(pieces, low, high)][1:]  # noqa: E731
    monkeypatch.setattr(save, "_contiguous", part)
    with pytest.raises(PlanError, match="the ranks do not hold a parameter once"):
        StackOutput(states, Kind.DISTRIBUTED, keys, 0)
