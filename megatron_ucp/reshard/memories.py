"""The memories of all ranks as a source: what one rank takes, others send, by windows."""

import math
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from typing import Any

import torch
import torch.distributed as dist

from megatron_ucp.core.box import Ints, span
from megatron_ucp.core.manifest import BufferPart, Manifest
from megatron_ucp.core.mesh import Coords
from megatron_ucp.core.plan import Mean, Op, Plan, Side, Slot
from megatron_ucp.core.plan import Windows as Planner
from megatron_ucp.errors import PlanError, UnsupportedError
from megatron_ucp.formats.pt.refs import ITEMSIZE
from megatron_ucp.reshard import agree
from megatron_ucp.reshard.engine import Holder
from megatron_ucp.reshard.execute import TORCH_DTYPES
from megatron_ucp.reshard.messages import device_of_messages
from megatron_ucp.reshard.transfer import Proved, param_of

# ---- memories
#
# A rank plans only what it takes itself, and tells the others what they will be asked for: how many
# ranks there are changes nothing for one of them. What it takes it has itself, where it can be:
# then nobody waits for anybody. All else moves in rounds. In each of them every rank takes one
# window, or several small ones, so that all of them work at once; each rank packs what it has of
# them into one message, so that nobody holds more than some windows of what is not its own.


MESSAGE_BYTES = 8 * 2**20  # of a window: fewer, larger messages than of files


@dataclass(frozen=True, slots=True)
class Window:
    """Elements [low, low + elems) of a slot of part number `part`, which a rank takes. `goal` says
    where they go there."""

    part: int
    slot: Slot
    low: int
    elems: int
    goal: Any = None


# so many flat bytes for a window; None: there are none
Room = Callable[[Window, int], torch.Tensor | None]


@dataclass
class Holdings:
    """What holds the values of some parts on this rank, and which ranks hold what of them.
    `machines` are those of all ranks."""

    engine: Holder
    ranks: dict[BufferPart, set[int]]
    machines: Sequence[str]
    _copies: dict[tuple[str, int, Coords, Coords], bool] = field(default_factory=dict[Any, bool])

    @cached_property
    def _own_cuts(self) -> Mapping[tuple[int, int], Sequence[Coords]]:
        """The places that this rank has of each partition of a buffer."""
        found: dict[tuple[int, int], list[Coords]] = {}
        for number, cut, part in self.engine.parts():
            found.setdefault((number, part), []).append(cut)
        return found

    def nearest(self, op: Op, param: str) -> Op:
        """The same operation on a copy that this rank has itself, where the one that was planned is
        another rank's: of a parameter that tensor parallelism does not cut each place has one."""
        slot = _side(op).slot
        own = self._own_cuts.get((slot.buffer, slot.part), ())
        if isinstance(op, Mean) or slot.cut in own:
            return op
        for cut in own:
            if self._is_copy(param, slot.buffer, slot.cut, cut):
                return replace(op, source=replace(op.source, slot=replace(slot, cut=cut)))
        return op

    def _is_copy(self, param: str, buffer: int, one: Coords, other: Coords) -> bool:
        """Whether two places of a buffer have the same share of a parameter. Of a module's buffers
        every rank may have its own values."""
        key = param, buffer, one, other
        if key not in self._copies:
            manifest = self.engine.manifest
            spec = manifest.by_name[param]
            members = [m for b, m in manifest.holders[param] if b == buffer]
            shares = [
                [manifest.pieces(manifest.member(buffer, m), cut) for m in members]
                for cut in (one, other)
            ]
            is_of_all = not spec.layout.mean_over and spec.kind != "buffer"
            self._copies[key] = is_of_all and shares[0] == shares[1]
        return self._copies[key]

    def require(self, plan: Plan) -> None:
        """Looks up who has what a plan reads. Raises UnsupportedError for a mean of copies,
        PlanError."""
        means = [op for op in plan.ops if isinstance(op, Mean)]
        if means:
            raise UnsupportedError(
                "a mean of copies is not made from memory",
                found=f"{len(means)} of them, the first for {means[0].target.slot}",
                fix='save, and use the files with --allow mean (Python: allow={"mean"})',
            )
        for slot in plan.sources:
            if slot.place not in self.ranks:
                raise PlanError("no rank holds what the plan reads", found=slot)

    def dtype(self, slot: Slot) -> str:
        """That of the values of a slot."""
        return self.engine.manifest.buffers[slot.buffer].dtype_of(slot.state)

    def values(self, side: Side, shape: Ints) -> torch.Tensor:
        """Elements of this rank's memory."""
        last = side.offset + span(shape, side.strides)
        flat = self.engine.read(side.slot, side.offset, last)
        return torch.as_strided(flat, shape, side.strides, flat.storage_offset())

    def bytes_of(self, side: Side, shape: Ints) -> int:
        """How many such elements take."""
        return math.prod(shape) * ITEMSIZE[self.dtype(side.slot)]

    def giver(self, op: Op, taker: int, turn: int) -> int:
        """The rank that gives the values of an operation: the taker itself, where it can; else one
        on its machine, if there is any, another one at each turn."""
        have = self.ranks[_side(op).slot.place]
        if taker in have:
            return taker
        near = [rank for rank in have if self.machines[rank] == self.machines[taker]]
        ranks = sorted(near or have)
        return ranks[(taker + turn) % len(ranks)]


def holdings_of(engine: Holder) -> Holdings:
    """Which ranks hold what of an engine, of which this one holds a share. Collective."""
    ranks: dict[BufferPart, set[int]] = {}
    machines: list[str] = []
    for number, (machine, parts) in enumerate(agree.gather((socket.gethostname(), engine.parts()))):
        machines.append(machine)
        for part in parts:
            ranks.setdefault(part, set()).add(number)
    return Holdings(engine, ranks, machines)


@dataclass(frozen=True, slots=True)
class _Read:
    """Elements of part number `part` of a sink that a rank asks another one for."""

    part: int
    side: Side
    shape: Ints


@dataclass(frozen=True)
class _Taken:
    """A window that this rank takes: its operations by the rank that gives their values."""

    window: Window
    by_giver: Mapping[int, list[Op]]


@dataclass(frozen=True)
class _Agreed:
    """What was agreed on for a queue: the windows that this rank has all of; round by round those
    of which others send it something, and what it sends to each rank that asked. All ranks have as
    many `rounds`."""

    own: Sequence[_Taken]
    moving: Sequence[Sequence[_Taken]]
    asked: Mapping[int, Sequence[Sequence[_Read]]]
    rounds: int


@dataclass
class _Message:
    """What another rank sends in one round: values that follow each other."""

    memory: torch.Tensor
    at: int = 0

    def next(self, dtype: str, shape: Ints) -> torch.Tensor:
        """The values that come next."""
        size = math.prod(shape) * ITEMSIZE[dtype]
        run = self.memory[self.at : self.at + size]
        is_aligned = self.at % ITEMSIZE[dtype] == 0
        self.at += size
        return (run if is_aligned else run.clone()).view(TORCH_DTYPES[dtype]).view(shape)


class MemoryWindows:
    """The windows of one part: what each is made of."""

    def __init__(self, held: Holdings, one: Proved, world: int) -> None:
        self.held = held
        self._states, self._target = dict(one.plan.wants), one.part.target
        self._planner = Planner(held.engine.manifest, one.part.target, one.allow)
        self.holders: dict[Slot, set[int]] = {}  # the ranks that have all of a slot
        for op in one.plan.ops:
            have = self.holders.setdefault(op.target.slot, {*range(world)})
            have &= held.ranks[_side(op).slot.place]

    def taken(self, window: Window, taker: int) -> _Taken:
        """A window, by the ranks that give what it is made of: the taker itself, where it can."""
        state, high = self._states[window.slot], window.low + window.elems
        turn = window.low // window.elems
        by_giver: dict[int, list[Op]] = {}
        for planned in self._planner.plan(window.slot, state, window.low, high).ops:
            op = self.held.nearest(planned, param_of(planned, self._target))
            by_giver.setdefault(self.held.giver(op, taker, turn), []).append(op)
        return _Taken(window, by_giver)

    def empty(self, taken: _Taken, room: Room) -> torch.Tensor:
        """Memory of a window in a dtype that holds what all operations give; zeros where none gives
        any."""
        ops, window = [op for own in taken.by_giver.values() for op in own], taken.window
        dtypes = {TORCH_DTYPES[self.held.dtype(_side(op).slot)] for op in ops} or {torch.float32}
        dtype = reduce(torch.promote_types, dtypes)
        memory = room(window, window.elems * dtype.itemsize)
        if memory is None:
            return torch.zeros(window.elems, dtype=dtype)
        exact = memory.view(dtype)
        is_filled = sum(op.box.numel for op in ops) == window.elems
        return exact if is_filled else exact.zero_()


class Memories:
    """The source. Each part of a sink has a holder of its own, or the last one. Making one is
    collective. `keeps`: for several transfers of the same parts, each from holders of its own
    (`use`)."""

    all_looked_at = False

    def __init__(self, file: str, *holders: Holder, keeps: bool = False) -> None:
        self.file, self._keeps = file, keeps
        self.read_bytes = 0  # that came from other ranks
        self.rank, self.world = agree.world()
        self._holdings = [holdings_of(engine) for engine in holders]
        self._device = device_of_values()
        self._windows: dict[int, MemoryWindows] = {}  # by the number of the part
        self._known: tuple[list[Window], _Agreed] | None = None  # of the last queue

    def use(self, file: str, *holders: Holder) -> None:
        """From now on the values of these, who hold the same as those before."""
        self.file = file
        for held, engine in zip(self._holdings, holders, strict=True):
            held.engine = engine

    def manifest_of(self, part: int) -> Manifest:
        """The holder's."""
        return self._of(part).engine.manifest

    def _of(self, part: int) -> Holdings:
        return self._holdings[min(part, len(self._holdings) - 1)]

    def locate(self, one: Proved) -> None:
        """As `Holdings.require`."""
        self._of(one.number).require(one.plan)
        self._windows[one.number] = MemoryWindows(self._of(one.number), one, self.world)

    def check(self, thorough: bool) -> None:
        """Memory has no checksums."""

    def holders_of(self, part: int, slot: Slot) -> set[int]:
        """The ranks that have all of a slot of a part."""
        return self._windows[part].holders.get(slot, set())

    def move(
        self,
        queue: Sequence[Window],
        put: Callable[[Window, torch.Tensor], None],
        room: Room = lambda window, size_bytes: None,
    ) -> None:
        """Gives this rank the windows of its queue as they are held: first those that it has
        itself, then the others, both in their order. Collective. A rank that can't go on still
        sends what others wait for; its first error is raised then. `room` is asked for the memory
        of each window before it is put."""
        kept = agree.KeptBack()
        agreed = self._agreed(queue, kept)
        for taken in agreed.own:
            with kept:
                if kept.error is None:
                    put(taken.window, self._put_together(taken, {}, room))
        for number in range(agreed.rounds):
            self._round(agreed, number, kept, put, room)
        kept.raise_kept()

    def _agreed(self, queue: Sequence[Window], kept: agree.KeptBack) -> _Agreed:
        """Tells all ranks what this one will ask them for. Collective."""
        known = self._known
        is_known = known is not None and known[0] == queue
        if self._keeps and agree.all_of(is_known) and known is not None:
            return known[1]
        windows: list[_Taken] = []
        with kept:
            windows = [self._windows[one.part].taken(one, self.rank) for one in queue]
        own = [one for one in windows if one.by_giver.keys() <= {self.rank}]
        moving = self._rounds([one for one in windows if not one.by_giver.keys() <= {self.rank}])
        asked = agree.delivered(self._wished(moving))
        agreed = _Agreed(own, moving, asked, agree.most(len(moving)))
        if self._keeps:  # nothing of a plan that failed: it lacks what was not planned
            self._known = (list(queue), agreed) if kept.error is None else None
        return agreed

    def _wished(self, moving: Sequence[Sequence[_Taken]]) -> dict[int, list[list[_Read]]]:
        """What this rank asks each other one for, round by round."""
        wished: dict[int, list[list[_Read]]] = {}
        for number, taken in enumerate(moving):
            for one in taken:
                for giver, ops in one.by_giver.items():
                    if giver != self.rank:
                        rounds = wished.setdefault(giver, [[] for _ in moving])
                        rounds[number] += [_read_of(one.window, op) for op in ops]
        return wished

    def _rounds(self, windows: Sequence[_Taken]) -> list[list[_Taken]]:
        """Windows by the round in which they are taken: small ones together, as many as the largest
        one has bytes."""
        sizes = [self._bytes_of(one) for one in windows]
        out: list[list[_Taken]] = []
        left = 0
        for window, size in zip(windows, sizes, strict=True):
            if not out or size > left:
                out.append([])
                left = max(sizes)
            out[-1].append(window)
            left -= size
        return out

    def _bytes_of(self, taken: _Taken) -> int:
        held = self._of(taken.window.part)
        every = (op for ops in taken.by_giver.values() for op in ops)
        return sum(held.bytes_of(_side(op), op.shape) for op in every)

    def _round(
        self,
        agreed: _Agreed,
        number: int,
        kept: agree.KeptBack,
        put: Callable[[Window, torch.Tensor], None],
        room: Room,
    ) -> None:
        """Each rank takes some windows of those that move, and sends what it has of the others'."""
        mine = agreed.moving[number] if number < len(agreed.moving) else ()
        came = self._to_come(mine)
        messages = [dist.P2POp(dist.irecv, one.memory, giver) for giver, one in came.items()]
        for taker, rounds in agreed.asked.items():
            if number < len(rounds) and rounds[number]:
                packed = self._packed(rounds[number], kept).to(self._device)
                messages.append(dist.P2POp(dist.isend, packed, taker))
        for one in started(messages, self._device, kept):
            with kept:
                one.wait()
        for message in came.values():
            message.memory = message.memory.cpu()  # once: a window asks for many runs of it
        for taken in mine:
            with kept:
                if kept.error is None:
                    put(taken.window, self._put_together(taken, came, room))

    def _to_come(self, mine: Sequence[_Taken]) -> dict[int, _Message]:
        """Memory for what others send of some windows, by the rank that does."""
        sizes: dict[int, int] = {}
        for taken in mine:
            held = self._of(taken.window.part)
            for giver, ops in taken.by_giver.items():
                if giver != self.rank:
                    size = sum(held.bytes_of(_side(op), op.shape) for op in ops)
                    sizes[giver] = sizes.get(giver, 0) + size
        self.read_bytes += sum(sizes.values())
        return {
            giver: _Message(torch.empty(size, dtype=torch.uint8, device=self._device))
            for giver, size in sizes.items()
        }

    def _packed(self, reads: Sequence[_Read], kept: agree.KeptBack) -> torch.Tensor:
        """The bytes that a rank asked for; zeros where this one can't read them."""
        with kept:
            values = [self._of(one.part).values(one.side, one.shape) for one in reads]
            # of a column alone `reshape` makes a view whose elements do not follow each other
            flat = [one.reshape(-1).contiguous().view(torch.uint8) for one in values]
            return flat[0] if len(flat) == 1 else torch.cat(flat)  # memory itself, if it is one run
        sizes = [self._of(one.part).bytes_of(one.side, one.shape) for one in reads]
        return torch.zeros(sum(sizes), dtype=torch.uint8)

    def _put_together(
        self, taken: _Taken, came: Mapping[int, _Message], room: Room
    ) -> torch.Tensor:
        """A window, of what this rank has and of what came from others."""
        part = self._windows[taken.window.part]
        exact = part.empty(taken, room)
        for giver, ops in taken.by_giver.items():
            for op in ops:
                side = _side(op)
                if giver == self.rank:
                    values = part.held.values(side, op.shape)
                else:
                    values = came[giver].next(part.held.dtype(side.slot), op.shape)
                _put(op, values, exact)
        return exact


def started(messages: list[Any], device: torch.device, kept: agree.KeptBack) -> list[Any]:
    """Begins messages from a device. On a CPU each by itself: where one can't go, as a rank died,
    those whom the others are for do not wait for ever."""
    if device.type != "cpu":
        return dist.batch_isend_irecv(messages) if messages else []
    works: list[Any] = []
    for one in messages:
        with kept:
            works.append(one.op(one.tensor, one.peer))
    return works


def _read_of(window: Window, op: Op) -> _Read:
    return _Read(window.part, _side(op), op.shape)


def _put(op: Op, values: torch.Tensor, window: torch.Tensor) -> None:
    first = window.storage_offset() + op.target.offset
    torch.as_strided(window, op.shape, op.target.strides, first).copy_(values)


def _side(op: Op) -> Side:
    if isinstance(op, Mean):
        raise PlanError("a mean has no single source", found=op.target.slot)
    return op.source


def evenly(sizes: Sequence[tuple[int, set[int]]], world: int) -> list[int]:
    """For each of some things, of (bytes, the ranks that have all of it), the rank that takes it:
    one that has it, where there is any; each rank as many bytes as the others, if it can be."""
    held = [0] * world
    takers = [0] * len(sizes)
    for number in sorted(range(len(sizes)), key=lambda number: -sizes[number][0]):
        size, have = sizes[number]
        takers[number] = min(have or range(world), key=lambda rank: (held[rank], rank))
        held[takers[number]] += size
    return takers


def device_of_values() -> torch.device:
    """Where messages of the default group lie."""
    if not dist.is_initialized():
        return torch.device("cpu")
    return torch.device(device_of_messages())
