"""Experts in one stacked tensor and experts one by one are two addresses of the same elements."""

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ucp.core import flat
from megatron_ucp.core.box import flat_index
from megatron_ucp.core.flat import Member, alone
from megatron_ucp.core.layout import Layout, Piece, Replicate, Shard, ShardHy, ShardNC
from megatron_ucp.core.manifest import Manifest, ParamGroup, ParamSpec
from megatron_ucp.core.mesh import Mesh
from megatron_ucp.core.names import Keeper
from megatron_ucp.core.plan import Slot
from megatron_ucp.core.tensor_parts import Interleaved, Slice, TensorPart
from megatron_ucp.errors import LayoutError
from tests.core.strategies import cases, oracle_local
from tests.core.test_plan import carry, same

Address = dict[int, tuple[int, ...]]  # position in the stored tensor -> index in the whole layer


def elements(pieces: tuple[Piece, ...]) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Of each element: position in stored memory, index in the logical tensor."""
    for piece in pieces:
        for point in product(*map(range, piece.full.shape)):
            index = tuple(a + b for a, b in zip(piece.full.start, point, strict=True))
            yield (
                piece.flat_start + sum(a * b for a, b in zip(point, piece.strides, strict=True)),
                index,
            )


def one_by_one(spec: ParamSpec, experts: int, ep: tuple[int, int], etp: tuple[int, int]) -> Address:
    """What a rank holds of a layer, each expert a slice of the stored tensor. `spec` is one of
    them."""
    here = experts // ep[0]
    size = sum(piece.full.numel for piece in spec.pieces({"etp": etp}))
    members = flat.slices([Member(f"expert {number}", 0, size) for number in range(here)])
    out: Address = {}
    for k, member in enumerate(members):
        for at, index in elements(spec.pieces({"etp": etp})):
            out[member.within[0] + at] = (ep[1] * here + k, *index)
    assert len(out) == here * size
    return out


def as_one(
    shape: tuple[int, ...],
    cut: ShardHy,
    order: tuple[int, ...],
    ep: tuple[int, int],
    etp: tuple[int, int],
) -> Address:
    """The same of a stacked parameter of the whole layer."""
    return dict(
        elements(ParamSpec("stack", shape, "", "", cut, None, order).pieces({"ep": ep, "etp": etp}))
    )


sizes = st.integers(1, 3)
places = st.integers(1, 4).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n - 1)))


@cases(300)
@given(sizes, sizes, sizes, places, places, st.booleans())
def test_gate_and_up_of_each_expert(experts, width, hidden, ep, etp, transposed):
    """ShardHy over a stack [E, 2, F, h] puts every element where ShardNC puts it in each expert
    [2F, h]; stored as they are, or as GroupedMLP's [E_loc, h, 2F/etp]."""
    e, f = experts * ep[0], width * etp[0]
    fc1 = ParamSpec(
        "fc1",
        (2 * f, hidden),
        "",
        "",
        ShardNC("etp", 0, (f, f)),
        None,
        (1, 0) if transposed else None,
    )
    order = (0, 3, 1, 2) if transposed else (0, 1, 2, 3)
    cut = ShardHy((("ep", 0), ("etp", 2)))
    stack = as_one((e, 2, f, hidden), cut, order, ep, etp)
    merged = {
        at: (i, flat_index((half, row), (2, f)), column)
        for at, (i, half, row, column) in stack.items()
    }
    assert merged == one_by_one(fc1, e, ep, etp)


@cases(300)
@given(sizes, sizes, sizes, places, places, st.booleans())
def test_the_second_matrix_of_each_expert(experts, width, hidden, ep, etp, transposed):
    """ShardHy over a stack [E, h, F]; GroupedMLP stores [E_loc, F/etp, h]."""
    e, f = experts * ep[0], width * etp[0]
    fc2 = ParamSpec(
        "fc2", (hidden, f), "", "", Shard("etp", 1), None, (1, 0) if transposed else None
    )
    order = (0, 2, 1) if transposed else (0, 1, 2)
    stack = as_one((e, hidden, f), ShardHy((("ep", 0), ("etp", 2))), order, ep, etp)
    assert stack == one_by_one(fc2, e, ep, etp)


@pytest.mark.parametrize(
    ("layout", "order"), [(Shard("etp", 0), (1, 0)), (ShardNC("etp", 0, (4, 4)), None)]
)
def test_the_comparison_sees_another_cut_and_another_order(layout: Layout, order) -> None:
    """Negative control: gate and up cut as one, or a matrix that is not transposed."""
    fc1 = ParamSpec("fc1", (8, 3), "", "", layout, None, order)
    stack = as_one((4, 2, 4, 3), ShardHy((("ep", 0), ("etp", 2))), (0, 3, 1, 2), (2, 1), (2, 0))
    merged = {at: (i, half * 4 + row, column) for at, (i, half, row, column) in stack.items()}
    assert merged != one_by_one(fc1, 4, (2, 1), (2, 0))


STATES = (("fp32", "float32"),)


def in_turns(spec: ParamSpec) -> np.ndarray:
    """The memory, by numpy alone: elements are numbered as the whole tensor has them."""
    assert isinstance(spec.layout, Interleaved) and spec.order is not None
    whole = np.arange(math.prod(spec.shape)).reshape(spec.shape)
    parts = np.split(whole, spec.layout.parts, spec.layout.dim)
    woven = np.stack(parts, spec.layout.dim + 1).reshape(spec.shape)
    return woven.transpose(spec.order).flatten()


@st.composite
def specs(draw: st.DrawFn) -> ParamSpec:
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    dim, parts = draw(st.integers(0, len(shape) - 1)), draw(st.integers(1, 3))
    shape[dim] *= 2 * parts
    order = tuple(draw(st.permutations(range(len(shape)))))
    return ParamSpec("w", tuple(shape), "float32", layout=Interleaved(dim, parts), order=order)


@cases(400)
@given(specs(), st.data())
def test_parts_in_turns_and_even_cuts_hold_the_same_elements(
    spec: ParamSpec, data: st.DataObject
) -> None:
    dims = [dim for dim, size in enumerate(spec.shape) if not size % 2]
    cut = replace(spec, layout=Shard("tp", data.draw(st.sampled_from(dims))), order=None)
    groups, size = (ParamGroup({}),), math.prod(spec.shape)
    turns = Manifest(Keeper.PAPER, Mesh(), (spec,), (alone("w", size, STATES, 0),), groups)
    tp = Manifest(Keeper.ZERO_0, Mesh(tp=2), (cut,), (alone("w", size // 2, STATES, 0),), groups)
    first = {Slot(0, turns.cuts_of(turns.buffers[0])[0], 0, "fp32"): in_turns(spec)}
    halves = {
        Slot(0, place, 0, "fp32"): oracle_local(cut, tp.mesh.place(place)).flatten()
        for place in tp.cuts_of(tp.buffers[0])
    }
    same(carry(turns, tp, first), halves)
    same(carry(tp, turns, halves), first)


def test_a_dim_that_has_no_such_parts_is_refused() -> None:
    for layout in (Interleaved(0, 2), Interleaved(2, 1)):
        with pytest.raises(LayoutError, match="no such parts"):
            layout.pieces("w", (3, 4), {})


def test_it_is_no_other_layout() -> None:
    assert Interleaved(0, 2) == Interleaved(0, 2)
    for other in (Interleaved(1, 2), Interleaved(0, 3), Replicate(), Shard("tp", 0)):
        assert Interleaved(0, 2) != other
        assert other != Interleaved(0, 2)


def test_a_slice_has_the_shape_of_its_parameter_as_it_is_stored() -> None:
    spec = ParamSpec("w", (4, 3), "float32")
    share = TensorPart("w", Interleaved(0, 2), order=(1, 0), slice_of=Slice("stack", 1, 0, 2))
    assert share.stored_shape(spec) == (3, 4) and share.chunk is None
