"""Explicit chunks, as another program cut them: the laws of resharding between random tilings, and
between them and even cuts."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ucp.core.box import Box, whole
from megatron_ucp.core.flat import FlatBuffer, Member, aligned_starts, alone
from megatron_ucp.core.layout import (
    CHUNK,
    Chunks,
    Layout,
    Shard,
    layout_from_json,
    layout_to_json,
)
from megatron_ucp.core.manifest import Manifest, ParamGroup, ParamSpec
from megatron_ucp.core.manifest_json import from_json, to_json
from megatron_ucp.core.mesh import Mesh
from megatron_ucp.core.names import Keeper
from megatron_ucp.core.plan import Slot, make_plan
from megatron_ucp.core.proof import prove
from megatron_ucp.errors import DamagedFileError, LayoutError, PlanError
from tests.core.strategies import all_wants, cases, each, oracle_local, whole_parts
from tests.core.test_plan import carry, same

STATES = (("fp32", "float32"),)


@st.composite
def tilings(draw: st.DrawFn, shape: tuple[int, ...]) -> Chunks:
    """The tensor in random blocks; blocks that fit at a dim are joined at random."""
    boxes = [whole(shape)]
    for _ in range(draw(st.integers(0, 5))):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(box.start[dim], box.stop[dim]))
        low, high = list(box.stop), list(box.start)
        low[dim] = high[dim] = at
        parts = (Box(box.start, tuple(low)), Box(tuple(high), box.stop))
        boxes += [part for part in parts if part.numel]
    chunks, dim = draw(joined(boxes))
    return Chunks(tuple(tuple((b.start, b.stop) for b in chunk) for chunk in chunks), dim)


@st.composite
def joined(draw: st.DrawFn, boxes: list[Box]) -> tuple[list[list[Box]], int]:
    """Blocks in a random order; those that fit at a dim are joined at random."""
    dim = draw(st.integers(0, len(boxes[0].shape) - 1))
    chunks: list[list[Box]] = []
    for box in draw(st.permutations(boxes)):
        fitting = [chunk for chunk in chunks if across(chunk[0], dim) == across(box, dim)]
        if fitting and draw(st.booleans()):
            draw(st.sampled_from(fitting)).append(box)
        else:
            chunks.append([box])
    return chunks, dim


def across(box: Box, dim: int) -> list[int]:
    """The extents of a block in all dims but one."""
    return [n for d, n in enumerate(box.shape) if d != dim]


def numbers(spec: ParamSpec, chunk: int) -> np.ndarray:
    """What a chunk holds, by numpy alone."""
    full = np.arange(int(np.prod(spec.shape))).reshape(spec.shape)
    assert isinstance(spec.layout, Chunks)
    blocks = [
        full[tuple(slice(a, b) for a, b in zip(start, stop, strict=True))]
        for start, stop in spec.layout.held[chunk]
    ]
    found = np.concatenate(blocks, spec.layout.dim)
    return found.transpose(spec.order) if spec.order else found


def in_chunks(spec: ParamSpec, partitions: int, rule: str, apart: bool) -> Manifest:
    """Every chunk in a buffer of its own (`apart`), or all of them in one that is partitioned."""
    assert isinstance(spec.layout, Chunks)
    sizes = [numbers(spec, chunk).size for chunk in range(len(spec.layout.held))]
    if apart:
        buffers = tuple(
            alone(spec.name, size, STATES, 0, axes=(), chunk=i) for i, size in enumerate(sizes)
        )
        return Manifest(Keeper.PAPER, Mesh(), (spec,), buffers, (ParamGroup({}),))
    widths = sizes if rule == "whole" else [-(-size // partitions) for size in sizes]
    starts, used = aligned_starts(widths)
    members = tuple(
        Member(spec.name, start, size, 0, {}, i)
        for i, (start, size) in enumerate(zip(starts, sizes, strict=True))
    )
    length = -(-used // partitions) * partitions if rule == "whole" else used
    buffer = FlatBuffer(members, length, partitions, rule, STATES, axes=())
    return Manifest(Keeper.PAPER, Mesh(dp=partitions), (spec,), (buffer,), (ParamGroup({}),))


def held(manifest: Manifest) -> dict[Slot, np.ndarray]:
    """What every slot must hold; -1 in padding."""
    out = {}
    spec = manifest.params[0]
    for b, buffer in enumerate(manifest.buffers):
        for cut in manifest.cuts_of(buffer):
            if isinstance(spec.layout, Chunks):
                flats = [numbers(spec, m.chunk or 0).reshape(-1) for m in buffer.members]
            else:
                place = {axis: (manifest.mesh.size(axis), index) for axis, index in cut}
                flats = [oracle_local(spec, place).reshape(-1)]
            cut_up = whole_parts if buffer.rule == "whole" else each
            for part, found in enumerate(cut_up(buffer, flats)):
                out[Slot(b, cut, part, "fp32")] = found
    return out


@st.composite
def journeys(draw: st.DrawFn) -> tuple[Manifest, Manifest, Manifest]:
    """One parameter in chunks, evenly cut, and in other chunks."""
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    dim = draw(st.integers(0, len(shape) - 1))
    shape = tuple(2 * n if d == dim else n for d, n in enumerate(shape))
    made = []
    for _ in range(2):
        order = tuple(draw(st.permutations(range(len(shape)))))
        spec = ParamSpec("w", shape, "float32", layout=draw(tilings(shape)), order=order)
        rule, apart = draw(st.sampled_from(["whole", "each"])), draw(st.booleans())
        made.append(in_chunks(spec, draw(st.integers(1, 4)), rule, apart))
    spec = ParamSpec("w", shape, "float32", layout=Shard("tp", dim))
    evenly = alone("w", int(np.prod(shape)) // 2, STATES, 0)
    middle = Manifest(Keeper.ZERO_0, Mesh(tp=2), (spec,), (evenly,), (ParamGroup({}),))
    return made[0], middle, made[1]


@cases(600)
@given(journeys())
def test_chunks_and_even_cuts_hold_the_same_elements(journey) -> None:
    a, b, c = journey
    first = held(a)
    through = carry(a, b, first)
    same(through, held(b))
    same(carry(b, a, through), first)
    same(carry(a, c, first), held(c))
    same(carry(b, c, through), held(c))


@cases(100)
@given(journeys())
def test_a_manifest_with_chunks_survives_json(journey) -> None:
    for manifest in journey:
        assert from_json(to_json(manifest), "f") == manifest


THIRDS = Chunks(((((0, 0), (2, 3)),), (((2, 0), (3, 3)),), (((3, 0), (6, 3)),)))
SPEC = ParamSpec("w", (6, 3), "float32", layout=THIRDS)


def target() -> Manifest:
    spec = replace(SPEC, layout=Shard("tp", 0))
    return Manifest(Keeper.PAPER, Mesh(), (spec,), (alone("w", 18, STATES, 0),), (ParamGroup({}),))


def planned(layout: Layout, chunks: tuple[int, ...]) -> None:
    """A plan from the chunks that are there, and its proof."""
    spec = replace(SPEC, layout=layout)
    buffers = tuple(alone("w", numbers(spec, i).size, STATES, 0, axes=(), chunk=i) for i in chunks)
    source = Manifest(Keeper.PAPER, Mesh(), (spec,), buffers, (ParamGroup({}),))
    plan = make_plan(source, target(), all_wants(target(), "fp32"))
    prove(plan, source, target())


def test_the_proof_sees_a_chunk_that_is_missing_or_overlaps() -> None:
    planned(THIRDS, (0, 1, 2))
    with pytest.raises(PlanError, match="no source"):
        planned(THIRDS, (0, 2))
    overlapping = Chunks((*THIRDS.held, (((1, 0), (3, 3)),)))
    with pytest.raises(PlanError, match="twice"):
        planned(overlapping, (0, 1, 2, 3))


def test_copies_of_a_chunk_are_read_once() -> None:
    """Two places may hold one chunk; the first one is read."""
    buffers = tuple(
        replace(alone("w", numbers(SPEC, i).size, STATES, 0, axes=(), chunk=i), at=(("pp", at),))
        for i, at in ((0, 0), (0, 1), (1, 0), (2, 1))
    )
    source = Manifest(Keeper.PAPER, Mesh(pp=2), (SPEC,), buffers, (ParamGroup({}),))
    plan = make_plan(source, target(), all_wants(target(), "fp32"))
    prove(plan, source, target())
    assert {slot.buffer for slot in plan.sources} == {0, 2, 3}


@pytest.mark.parametrize(
    ("layout", "chunk", "word"),
    [
        (Chunks(((((0, 0), (7, 3)),),)), 0, "outside"),
        (Chunks(((((0,), (6,)),),)), 0, "outside"),
        (THIRDS, 3, "no such chunk"),
        (Chunks(((((0, 0), (2, 3)), ((2, 0), (4, 2))),)), 0, "can't be joined"),
        (Chunks(((),)), 0, "can't be joined"),
    ],
)
def test_chunks_that_can_not_be(layout: Chunks, chunk: int, word: str) -> None:
    with pytest.raises(LayoutError, match=word):
        layout.pieces("w", (6, 3), {CHUNK: (4, chunk)})


def test_members_say_which_chunk() -> None:
    for member in (Member("w", 0, 6, 0), Member("w", 0, 6, 0, {}, 3)):
        buffer = FlatBuffer((member,), 6, 1, "whole", STATES, axes=())
        with pytest.raises(ValueError, match="which chunk"):
            Manifest(Keeper.PAPER, Mesh(), (SPEC,), (buffer,), (ParamGroup({}),))
    assert Chunks(THIRDS.held[::-1]) != THIRDS


@pytest.mark.parametrize("wrong", ["x", [[["a", "b"]]], [[[[1], [0]]]], [[[[0.5], [1]]]], 7])
def test_chunks_from_a_file_are_checked(wrong: object) -> None:
    assert layout_from_json(layout_to_json(THIRDS)) == THIRDS
    with pytest.raises((LayoutError, DamagedFileError)):
        layout_from_json(["Chunks", wrong, 0])
