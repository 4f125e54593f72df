"""Parts of a dim that take turns in memory: the laws of resharding between them and even cuts."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ucp.core.flat import alone
from megatron_ucp.core.layout import Replicate, Shard
from megatron_ucp.core.manifest import Manifest, ParamGroup, ParamSpec
from megatron_ucp.core.mesh import Mesh
from megatron_ucp.core.names import Keeper
from megatron_ucp.core.plan import Slot
from megatron_ucp.core.tensor_parts import Interleaved, Slice, TensorPart
from megatron_ucp.errors import LayoutError
from tests.core.strategies import cases, oracle_local
from tests.core.test_plan import carry, same

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
