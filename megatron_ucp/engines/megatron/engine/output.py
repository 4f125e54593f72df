"""A save of megatron-core's stack on paper: which chunk of which state lies where, and which rank
writes it. The same on every rank.

Chunks are cut as the ranks hold elements, each file is one rank's: so every rank writes what it has
itself, and nothing is gathered.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property

import torch

from megatron_ucp.core.box import Box
from megatron_ucp.core.flat import FlatBuffer, alone
from megatron_ucp.core.keepers import Keeper
from megatron_ucp.core.layout import Chunks
from megatron_ucp.core.manifest import BufferPart, Manifest, ParamSpec
from megatron_ucp.core.mesh import Coords, Mesh
from megatron_ucp.core.plan import Slot, Want
from megatron_ucp.core.states import MASTER, VALUE
from megatron_ucp.engines.live_tensors import flat_view
from megatron_ucp.engines.megatron.engine.present import PresentStates
from megatron_ucp.engines.megatron.engine.runs import OwnedBox, runs_of
from megatron_ucp.formats.file_layout import FileLayout
from megatron_ucp.formats.megatron.kinds import Kind
from megatron_ucp.formats.megatron.writer import (
    WEIGHT,
    ModelKeys,
    PlannedChunk,
    TorchDistPlan,
    Wish,
    plan_torch_dist,
)
from megatron_ucp.reshard.transfer import SinkPart

_STATES, _WEIGHTS = 0, 1  # the parts of an output


class SavedWeights:
    """What the ranks hold of the weights that the model computes with: each of them whole ones,
    however masters are divided."""

    def __init__(self, present: PresentStates) -> None:
        states = present.manifest
        self.use(present)
        self._held_as: dict[int, list[int]] = {}  # by the buffer that has the masters
        buffers: list[FlatBuffer] = []
        for at, spec in enumerate(states.params):
            number, index = states.holders[spec.name][0]
            held, member = states.buffers[number], states.member(number, index)
            self._held_as.setdefault(number, []).append(at)
            dtypes = ((VALUE, spec.dtype),)
            buffers.append(alone(spec.name, member.size, dtypes, at=held.at, axes=held.axes))
        mesh = replace(states.mesh, zero=0)
        self.manifest = Manifest(Keeper.PAPER, mesh, states.params, tuple(buffers))

    def use(self, present: PresentStates) -> None:
        """From now on these weights, of the same structure."""
        self._live = present.live
        self._tensors = {name: tensor for tensor, name in present.live.own.names.items()}

    def parts(self) -> list[BufferPart]:
        places = {(number, cut) for number, cut, _ in self._live.parts()}
        return [(at, cut, 0) for number, cut in places for at in self._held_as.get(number, ())]

    def read(self, slot: Slot, first: int, last: int) -> torch.Tensor:
        name = self.manifest.params[slot.buffer].name
        return flat_view(self._tensors[name].detach())[first:last]


class StackOutput:
    """The files of a save. `kind` is the optimizer's; `keys` are those of the model."""

    def __init__(self, states: Manifest, kind: Kind, keys: ModelKeys) -> None:
        self.states, self._kind = states, kind
        self._runs = {
            spec.name: [
                part for run in runs_of(states, spec.name) for part in _cut(run, spec, keys)
            ]
            for spec in states.params
        }
        params, wishes = states.by_name, list(self._wishes())
        self.plan: TorchDistPlan = plan_torch_dist(params, wishes, keys, kind=kind)
        self._slots: dict[tuple[int, str], list[int]] = {}  # buffers of (part, parameter)
        self.parts = self._part(_STATES), self._part(_WEIGHTS)

    @cached_property
    def files(self) -> tuple[FileLayout, ...]:
        """All of them."""
        return tuple(self.plan.layouts(self._slot))

    def _wishes(self) -> Iterator[Wish]:
        for spec in self.states.params:
            runs = self._runs[spec.name]
            boxes = tuple((run.start, run.stop) for run in runs)
            owners = tuple(self.first_rank(run.place) for run in runs)
            yield Wish(spec.name, WEIGHT, spec.dtype, boxes, owners)
            for state, dtype in self._stored(spec):
                yield Wish(spec.name, state, dtype, boxes, owners)

    def _stored(self, spec: ParamSpec) -> list[tuple[str, str]]:
        """The states that the files hold beside the weights."""
        is_master = spec.dtype == "float32" and self._kind is not Kind.DISTRIBUTED
        found = self.states.states_of(spec.name).items()
        return [(s, d) for s, d in found if s != VALUE and not (s == MASTER and is_master)]

    def first_rank(self, place: BufferPart) -> int:
        """The first rank that has a part of a buffer: it writes it."""
        number, cut, part = place
        return self.states.mesh.rank_of((*self.states.buffers[number].at, *cut), part)

    @cached_property
    def written(self) -> set[tuple[str, BufferPart]]:
        """What is read of each parameter: of copies one."""
        return {(name, run.place) for name, runs in self._runs.items() for run in runs}

    def stands_for(self, part: int, slot: Slot) -> str | None:
        """The state of which the elements of a slot are the only ones in the files; None for
        weights that are the masters, rounded."""
        if part == _STATES:
            return slot.state
        spec = self.states.by_name[self.parts[part].target.buffers[slot.buffer].first_param]
        left = self.states.states_of(spec.name).keys() - dict(self._stored(spec)).keys()
        return next(iter(left), None)

    def home(self, part: int, buffer: int) -> tuple[Box, tuple[int, Coords], int]:
        """Where the elements of a buffer of a part come from: the share of a parameter that they
        are of, its holder, the partition."""
        member = self.parts[part].target.member(buffer, 0)
        run = self._runs[member.param][member.chunk or 0]
        number, cut, partition = run.place
        own = Box(run.start, run.stop)
        pieces = self.states.pieces(self.states.member(number, run.member), cut)
        share = next(piece.full for piece in pieces if piece.full.meet(own) == own)
        return share, (number, cut), partition

    def _part(self, part: int) -> SinkPart:
        """Each box in a buffer of its own."""
        specs: list[ParamSpec] = []
        buffers: list[FlatBuffer] = []
        wants: list[Want] = []
        for spec in self.states.params:
            held = ((VALUE, spec.dtype),) if part == _WEIGHTS else tuple(self._stored(spec))
            if not held:
                continue
            runs = self._runs[spec.name]
            blocks = Chunks(tuple(((run.start, run.stop),) for run in runs))
            specs.append(replace(spec, layout=blocks, on_mesh=None, order=None))
            numbers = range(len(buffers), len(buffers) + len(runs))
            self._slots[part, spec.name] = [*numbers]
            for chunk, run in enumerate(runs):
                buffers.append(alone(spec.name, run.elems, held, axes=(), chunk=chunk))
            slots = (Slot(number, (), 0, state) for number in numbers for state, _ in held)
            wants += [(slot, slot.state) for slot in slots]
        target = Manifest(Keeper.PAPER, Mesh(), tuple(specs), tuple(buffers))
        return SinkPart(target, tuple(wants))

    def _slot(self, chunk: PlannedChunk) -> tuple[int, Slot]:
        """What a chunk is read into: the part, and its slot."""
        wish = chunk.wish
        part, state = (_WEIGHTS, VALUE) if wish.state == WEIGHT else (_STATES, wish.state)
        return part, Slot(self._slots[part, wish.param][chunk.number], (), 0, state)


def _cut(run: OwnedBox, spec: ParamSpec, keys: ModelKeys) -> Iterator[OwnedBox]:
    """What a rank has of a parameter, in boxes that lie under one key each."""
    local = run.local
    for start, stop in keys.cut(spec.name, (run.start, run.stop)):
        part = replace(run, start=start, stop=stop, local=local)
        local += part.elems
        yield part
