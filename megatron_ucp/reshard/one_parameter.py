"""One parameter for itself, whole and once, whatever the mesh that holds it: what checkpoints are
compared in."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from megatron_ucp.core.flat import alone
from megatron_ucp.core.keepers import Keeper
from megatron_ucp.core.layout import Partial, Replicate
from megatron_ucp.core.manifest import Manifest
from megatron_ucp.core.mesh import Coords, Mesh
from megatron_ucp.core.plan import Slot, make_plan
from megatron_ucp.core.proof import prove
from megatron_ucp.formats.base import Checkpoint
from megatron_ucp.formats.pt.values import ITEMSIZE
from megatron_ucp.reshard.execute import TORCH_DTYPES, execute
from megatron_ucp.reshard.summed_runs import check_runs


def one_parameter(
    source: Manifest, name: str, states: Mapping[str, str], averaged: bool = False
) -> Manifest:
    """A target that holds some states (name -> dtype) of one whole parameter of a source. Of one of
    which every rank has a copy of its own it holds all copies, or their mean if they are to be
    `averaged`."""
    spec = source.by_name[name]
    mesh, axes, layout = Mesh(), (), Replicate()
    if isinstance(spec.layout, Partial) and not averaged:
        axis, layout = spec.layout.axis, spec.layout
        mesh, axes = replace(mesh, **{axis: source.mesh.size(axis)}), (axis,)
    buffer = alone(name, spec.elems, tuple(states.items()), axes=axes)
    return Manifest(Keeper.PAPER, mesh, (replace(spec, layout=layout, order=None),), (buffer,))


def slots_of(target: Manifest, state: str) -> list[Slot]:
    """The places of a state of `one_parameter`: one, or one for each copy."""
    return [Slot(0, cut, 0, state) for cut in target.cuts_of(target.buffers[0])]


def read_state(checkpoint: Checkpoint, name: str, state: str) -> torch.Tensor:
    """One state of one logical parameter, flat, checked against the CRC-32 of the records that it
    fills. Of a parameter with several copies the first one."""
    source = checkpoint.manifest
    dtype = source.states_of(name)[state]
    target = one_parameter(source, name, {state: dtype})
    plan = make_plan(source, target, [(slots_of(target, state)[0], state)])
    prove(plan, source, target)
    out = torch.empty(target.buffers[0].length, dtype=TORCH_DTYPES[dtype])
    counts = execute(plan, checkpoint.where, lambda _: out)
    check_runs(counts.runs, counts.records, checkpoint.opened)
    return out


@dataclass(frozen=True, slots=True)
class HeldAt:
    """A place that holds a parameter: number of the buffer, of the member, and the place along the
    axes that cut it."""

    buffer: int
    member: int
    cut: Coords


def first_slot(manifest: Manifest, place: HeldAt, state: str) -> Slot:
    """The slot with the first element of what a place holds."""
    buffer = manifest.buffers[place.buffer].of(state)
    member = buffer.members[place.member]
    return Slot(place.buffer, place.cut, buffer.owners(member, 0, 1)[0], state)


def read_copy(
    checkpoint: Checkpoint, place: HeldAt, state: str, dtype: str, low: int, high: int
) -> bytes:
    """Elements [low, high) of what a place holds of a parameter."""
    buffer = checkpoint.manifest.buffers[place.buffer].of(state)
    member = buffer.members[place.member]
    size, out = ITEMSIZE[dtype], bytearray()
    for part in buffer.owners(member, low, high) if low < high else ():
        first, last = buffer.owned(member, part)
        first, last = max(first, low), min(last, high)
        where = checkpoint.where(Slot(place.buffer, place.cut, part, state))
        block = memoryview(bytearray((last - first) * size))
        at = where.offset_bytes + buffer.offset(member, part, first) * size
        where.file.read_into(where.record, at, block)
        out += block
    return bytes(out)
