"""The memories of all ranks as a source: what one rank takes, others send.

What a rank takes it has itself, where it can be: then nobody waits for anybody. All else moves in
rounds. In each of them every rank takes one window, so that all of them work at once; each rank
packs what it has of a window into one message, so that nobody holds more than some windows of what
is not its own.
"""

import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist

from megatron_ucp.core.box import span
from megatron_ucp.core.manifest import BufferPart, Manifest
from megatron_ucp.core.plan import Mean, Op, Side, Slot
from megatron_ucp.core.plan import Windows as Planner
from megatron_ucp.errors import PlanError, UnsupportedError
from megatron_ucp.formats.pt.values import ITEMSIZE
from megatron_ucp.reshard import agree
from megatron_ucp.reshard.engine import Holder
from megatron_ucp.reshard.execute import TORCH_DTYPES
from megatron_ucp.reshard.transfer import Proved

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

    def dtype(self, op: Op) -> str:
        """That of the values of an operation."""
        slot = _side(op).slot
        return self.engine.manifest.buffers[slot.buffer].dtype_of(slot.state)

    def values(self, op: Op) -> torch.Tensor:
        """The elements of an operation, from this rank's memory."""
        side = _side(op)
        last = side.offset + span(op.shape, side.strides)
        flat = self.engine.read(side.slot, side.offset, last)
        return torch.as_strided(flat, op.shape, side.strides, flat.storage_offset())

    def bytes_of(self, ops: Sequence[Op]) -> int:
        """How many they move."""
        return sum(op.box.numel * ITEMSIZE[self.dtype(op)] for op in ops)

    def giver(self, op: Op, taker: int, turn: int) -> int:
        """The rank that gives the values of an operation: the taker itself, where it can; else one
        on its machine, if there is any, another one at each turn."""
        have = self.ranks[_held(_side(op).slot)]
        if taker in have:
            return taker
        near = [rank for rank in have if self.machines[rank] == self.machines[taker]]
        ranks = sorted(near or have)
        return ranks[(taker + turn) % len(ranks)]


def _holdings(engine: Holder) -> Holdings:
    """Collective."""
    ranks: dict[BufferPart, set[int]] = {}
    machines: list[str] = []
    for number, (machine, parts) in enumerate(agree.gather((socket.gethostname(), engine.parts()))):
        machines.append(machine)
        for part in parts:
            ranks.setdefault(part, set()).add(number)
    return Holdings(engine, ranks, machines)


class MemoryWindows:
    """The windows of one part: which rank has what of each. `keeps`: what each is made of is
    planned once."""

    def __init__(self, held: Holdings, one: Proved, world: int, keeps: bool) -> None:
        self.held = held
        self._states = dict(one.plan.wants)
        self._planner = Planner(held.engine.manifest, one.part.target, one.allow)
        self._known: dict[tuple[Slot, int, int], Sequence[Op]] | None = {} if keeps else None
        self.holders: dict[Slot, set[int]] = {}  # the ranks that have all of a slot
        for op in one.plan.ops:
            have = self.holders.setdefault(op.target.slot, {*range(world)})
            have &= held.ranks[_held(_side(op).slot)]

    def ops(self, window: Window) -> Sequence[Op]:
        """What makes up a window."""
        state, high = self._states[window.slot], window.low + window.elems
        key, known = (window.slot, window.low, high), self._known
        if known is not None and key in known:
            return known[key]
        ops = self._planner.plan(window.slot, state, window.low, high).ops
        if known is not None:
            known[key] = ops
        return ops

    def own(self, window: Window, room: Room) -> torch.Tensor:
        """A window that this rank has itself."""
        ops = self.ops(window)
        exact = self.empty(window, ops, room)
        for op in ops:
            _put(op, self.held.values(op), exact)
        return exact

    def empty(self, window: Window, ops: Sequence[Op], room: Room) -> torch.Tensor:
        """A window in a dtype that holds what all operations give; zeros where none gives any."""
        dtypes = {TORCH_DTYPES[self.held.dtype(op)] for op in ops} or {torch.float32}
        dtype = reduce(torch.promote_types, dtypes)
        memory = room(window, window.elems * dtype.itemsize)
        if memory is None:
            return torch.zeros(window.elems, dtype=dtype)
        exact = memory.view(dtype)
        is_filled = sum(op.box.numel for op in ops) == window.elems
        return exact if is_filled else exact.zero_()

    def by_giver(self, window: Window, taker: int) -> Iterator[tuple[int, list[Op]]]:
        """The operations by the rank that gives their values: the taker itself, where it can."""

        turn = window.low // window.elems

        def giver(op: Op) -> int:
            return self.held.giver(op, taker, turn)

        ordered = sorted(self.ops(window), key=lambda op: (giver(op), op.target.offset))
        for number, own in groupby(ordered, key=giver):
            yield number, list(own)


class Memories:
    """The source. Each part of a sink has a holder of its own, or the last one. Making one is
    collective. `keeps`: for several transfers of the same parts, each from holders of its own
    (`use`)."""

    all_looked_at = False

    def __init__(self, file: str, *holders: Holder, keeps: bool = False) -> None:
        self.file, self._keeps = file, keeps
        self.read_bytes = 0  # that came from other ranks
        self.rank, self.world = agree.world()
        self._holdings = [_holdings(engine) for engine in holders]
        self._device = _device()
        self._windows: dict[int, MemoryWindows] = {}  # by the number of the part

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
        """Looks up who has what a plan reads. Raises UnsupportedError for a mean of copies."""
        means = [op for op in one.plan.ops if isinstance(op, Mean)]
        if means:
            raise UnsupportedError(
                "a mean of copies is not made from memory",
                found=f"{len(means)} of them, the first for {means[0].target.slot}",
                fix='save, and use the files with --allow mean (Python: allow={"mean"})',
            )
        for slot in one.plan.sources:
            if _held(slot) not in self._of(one.number).ranks:
                raise PlanError("no rank holds what the plan reads", found=slot)
        windows = MemoryWindows(self._of(one.number), one, self.world, self._keeps)
        self._windows[one.number] = windows

    def check(self, thorough: bool) -> None:
        """Memory has no checksums."""

    def holders_of(self, part: int, slot: Slot) -> set[int]:
        """The ranks that have all of a slot of a part."""
        return self._windows[part].holders.get(slot, set())

    def move(
        self,
        queues: Sequence[Sequence[Window]],
        put: Callable[[Window, torch.Tensor], None],
        room: Room = lambda window, size_bytes: None,
    ) -> None:
        """Gives each rank the windows of its queue, in their order, as they are held. Collective. A
        rank that can't go on still sends what others wait for; its first error is raised then.
        `room` is asked for the memory of each window before it is put."""
        kept = agree.KeptBack()
        moving = [
            [one for one in queue if rank not in self.holders_of(one.part, one.slot)]
            for rank, queue in enumerate(queues)
        ]
        for window in queues[self.rank]:
            if self.rank in self.holders_of(window.part, window.slot):
                with kept:
                    if kept.error is None:
                        put(window, self._windows[window.part].own(window, room))
        for round_ in range(max(map(len, moving))):
            asked = [queue[round_] if round_ < len(queue) else None for queue in moving]
            mine, exact = asked[self.rank], self._exchange(asked, kept, room)
            with kept:
                if mine is not None and exact is not None and kept.error is None:
                    put(mine, exact)
        kept.raise_kept()

    def _exchange(
        self, asked: Sequence[Window | None], kept: agree.KeptBack, room: Room
    ) -> torch.Tensor | None:
        """One round; this rank's window."""
        messages: list[Any] = []
        taken: list[tuple[list[Op], torch.Tensor]] = []
        wanted = [(taker, window) for taker, window in enumerate(asked) if window is not None]
        for taker, window in wanted:
            part = self._windows[window.part]
            for giver, ops in part.by_giver(window, taker):
                if self.rank not in (giver, taker):
                    continue
                memory = self._message(part.held, ops, giver == self.rank, kept)
                if taker == self.rank:
                    taken.append((ops, memory))
                if giver != taker:
                    send, peer = (dist.irecv, giver) if taker == self.rank else (dist.isend, taker)
                    messages.append(dist.P2POp(send, memory, peer))
                    self.read_bytes += memory.nbytes if taker == self.rank else 0
        for one in dist.batch_isend_irecv(messages) if messages else ():
            one.wait()
        mine = asked[self.rank]
        return None if mine is None else self._put_together(mine, taken, kept, room)

    def _message(
        self, held: Holdings, ops: Sequence[Op], gives: bool, kept: agree.KeptBack
    ) -> torch.Tensor:
        """What this rank gives of a window, or the room for what it takes."""
        if gives:
            return _packed(held, ops, kept).to(self._device)
        return torch.empty(held.bytes_of(ops), dtype=torch.uint8, device=self._device)

    def _put_together(
        self,
        window: Window,
        taken: list[tuple[list[Op], torch.Tensor]],
        kept: agree.KeptBack,
        room: Room,
    ) -> torch.Tensor | None:
        part = self._windows[window.part]
        with kept:
            exact = part.empty(window, [op for ops, _ in taken for op in ops], room)
            for ops, packed in taken:
                _unpack(part.held, ops, packed.cpu(), exact)
            return exact
        return None


def _packed(held: Holdings, ops: Sequence[Op], kept: agree.KeptBack) -> torch.Tensor:
    """The bytes of operations; zeros where this rank can't read them."""
    with kept:
        flat = [held.values(op).reshape(-1).view(torch.uint8) for op in ops]
        return flat[0] if len(flat) == 1 else torch.cat(flat)  # memory itself, where it is one run
    return torch.zeros(held.bytes_of(ops), dtype=torch.uint8)


def _unpack(held: Holdings, ops: Sequence[Op], packed: torch.Tensor, window: torch.Tensor) -> None:
    at = 0
    for op in ops:
        dtype = held.dtype(op)
        size = op.box.numel * ITEMSIZE[dtype]
        run = packed[at : at + size]
        is_aligned = at % ITEMSIZE[dtype] == 0
        values = (run if is_aligned else run.clone()).view(TORCH_DTYPES[dtype])
        _put(op, values.view(op.shape), window)
        at += size


def _put(op: Op, values: torch.Tensor, window: torch.Tensor) -> None:
    first = window.storage_offset() + op.target.offset
    torch.as_strided(window, op.shape, op.target.strides, first).copy_(values)


def _held(slot: Slot) -> BufferPart:
    return slot.buffer, slot.cut, slot.part


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


def _device() -> torch.device:
    """Where messages of the default group lie."""
    if not dist.is_initialized():
        return torch.device("cpu")
    from torch.distributed.distributed_c10d import _get_object_coll_device

    return torch.device(_get_object_coll_device(dist.group.WORLD))
