"""Shares of different sizes: each rank has buffers of its own, and the laws hold for them too,
against an oracle that cuts with numpy."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ucp.core.flat import FlatBuffer, Member
from megatron_ucp.core.join_ranks import Stage, join
from megatron_ucp.core.layout import HeldRuns, Layout, Replicate, Shard, ShardRuns
from megatron_ucp.core.manifest import Manifest, ParamGroup, ParamSpec
from megatron_ucp.core.manifest_json import from_json, to_json
from megatron_ucp.core.mesh import Mesh
from megatron_ucp.core.names import Keeper
from megatron_ucp.core.plan import make_plan
from megatron_ucp.errors import LayoutError, ModelMismatchError, PlanError
from megatron_ucp.formats.deepspeed import buffers
from tests.core.strategies import all_wants, cases, oracle_slots
from tests.core.test_plan import carry, same

STATES = (("fp32", "float32"), ("exp_avg", "float32"))


@st.composite
def runs(draw: st.DrawFn, size: int, ranks: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Any runs of any lengths in any order; a rank may have none."""
    cuts = sorted(draw(st.sets(st.integers(1, size - 1), max_size=5))) if size > 1 else []
    every = draw(st.permutations(list(pairwise([0, *cuts, size]))))
    held: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
    for run in every:
        held[draw(st.integers(0, ranks - 1))].append(run)
    return tuple(map(tuple, held))


@st.composite
def layouts(draw: st.DrawFn, shape: tuple[int, ...], tp: int) -> Layout:
    if not shape or draw(st.booleans()):
        return Replicate()
    dim = draw(st.integers(0, len(shape) - 1))
    if shape[dim] % tp == 0 and draw(st.booleans()):
        return Shard("tp", dim)
    return ShardRuns("tp", dim, draw(runs(shape[dim], tp)))


@st.composite
def uneven(draw: st.DrawFn, shapes: list[tuple[int, ...]]) -> Manifest:
    """Parameters that each mesh cuts in its own way; a rank holds no empty share."""
    tp, dp = draw(st.sampled_from([2, 3, 4])), draw(st.sampled_from([1, 2, 3]))
    rule = draw(st.sampled_from(["whole", "each"]))
    specs = tuple(
        ParamSpec(f"w{number}", shape, "float32", "trainable", draw(layouts(shape, tp)))
        for number, shape in enumerate(shapes)
    )
    mesh = Mesh(tp=tp, dp=dp, zero=1 if rule == "whole" else 3)
    stages: list[Stage] = []
    for at in mesh.holding(uneven=True):
        place, members, end = mesh.place(at), list[Member](), 0
        for spec in draw(st.permutations(specs)):
            size = int(np.prod(spec.layout.local_shape(spec.name, spec.shape, place)))
            if size:
                members.append(Member(spec.name, end, size, 0, {"step": 3.0}))
                end += size if rule == "whole" else -(-size // dp)
        length = buffers.whole_length(end, dp) if rule == "whole" else end
        buffer = FlatBuffer(tuple(members), length, dp, rule, STATES)
        stages.append(Stage(specs, (buffer,), (ParamGroup({"lr": 0.1}),), at=at))
    joined = join(stages)
    return Manifest(Keeper.PAPER, mesh, joined.params, joined.buffers, joined.groups)


@st.composite
def journeys(draw: st.DrawFn) -> tuple[Manifest, Manifest]:
    sizes = st.lists(st.integers(1, 9), max_size=3).map(tuple)
    shapes = draw(st.lists(sizes, min_size=1, max_size=4))
    return draw(uneven(shapes)), draw(uneven(shapes))


@given(journeys())
@cases(300)
def test_every_element_arrives_and_comes_back(journey: tuple[Manifest, Manifest]) -> None:
    source, target = journey
    assert len(source.groups) == 1, "ranks that cut a parameter have its group together"
    held = oracle_slots(source, "fp32")
    there = carry(source, target, held)
    same(there, oracle_slots(target, "fp32"))
    same(carry(target, source, there), held)


@given(journeys())
@cases(50)
def test_an_element_that_nobody_holds_is_found(journey: tuple[Manifest, Manifest]) -> None:
    """Negative control: without one rank's buffer the plan is no plan."""
    source, target = journey
    cut = [spec for spec in source.params if any(one.runs for one in spec.layout.cuts())]
    lost = [
        b for b in source.buffers if any(m.param == spec.name for m in b.members for spec in cut)
    ]
    if not lost:
        return
    rest = tuple(buffer for buffer in source.buffers if buffer is not lost[0])
    broken = Manifest(Keeper.PAPER, source.mesh, source.params, rest, source.groups)
    with pytest.raises(PlanError):
        carry(broken, target, oracle_slots(source, "fp32"))


@given(journeys())
@cases(50)
def test_a_manifest_survives_json(journey: tuple[Manifest, Manifest]) -> None:
    assert from_json(to_json(journey[0]), "file") == journey[0]


@pytest.mark.parametrize(
    ("held", "size", "words"),
    [
        ((((0, 31),), ((30, 61),)), 2, "don't follow each other"),
        ((((0, 31),), ((32, 61),)), 2, "don't follow each other"),
        ((((0, 31),), ((31, 60),)), 2, "don't follow each other"),
        ((((0, 31),), ((31, 61),)), 4, "another number of ranks"),
    ],
)
def test_runs_that_are_no_cut_are_refused(held: HeldRuns, size: int, words: str) -> None:
    layout = ShardRuns("tp", 0, held)
    with pytest.raises(LayoutError, match=words):
        layout.pieces("w", (61, 2), {"tp": (size, 0)})


def test_one_rank_has_all_of_it() -> None:
    layout = ShardRuns("tp", 0, (((3, 5),), ((0, 3),)))
    (piece,) = layout.pieces("w", (5, 2), {"tp": (1, 0)})
    assert piece.full.shape == (5, 2)


def test_ranks_with_other_steps_of_one_parameter_are_an_error() -> None:
    spec = ParamSpec("w", (5,), "float32", "trainable", ShardRuns("tp", 0, (((0, 3),), ((3, 5),))))
    stages = [
        Stage(
            (spec,),
            (FlatBuffer((Member("w", 0, size, 0, {"step": step}),), size, 1, "whole", STATES),),
            (ParamGroup({"lr": 0.1}),),
            at=(("tp", rank),),
        )
        for rank, (size, step) in enumerate([(3, 7.0), (2, 8.0)])
    ]
    with pytest.raises(ModelMismatchError, match="keep something of a parameter"):
        join(stages)


def test_a_rank_reads_its_own_copy_first() -> None:
    spec = ParamSpec("w", (4,), "float32")
    stages = [
        Stage(
            (spec,),
            (FlatBuffer((Member("w", 0, 4, 0),), 4, 1, "whole", STATES),),
            (ParamGroup({}),),
            at=(("tp", rank),),
        )
        for rank in range(2)
    ]
    joined = join(stages)
    both = Manifest(Keeper.PAPER, Mesh(tp=2), joined.params, joined.buffers, joined.groups)
    ops = make_plan(both, both, all_wants(both, "fp32")).ops
    assert [op.source.slot.buffer for op in ops] == [op.target.slot.buffer for op in ops] == [0, 1]
