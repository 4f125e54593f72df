"""Moves between the memories of ranks that are planned once and made again and again.

What a rank takes is a list of strided copies. Those from its own memory are made as they are. For
all others it tells each giver once what it will be asked for, in rounds of bounded size; a round
has a few messages for each pair of ranks, in an order that both know. So a later call sends bytes
of tensors, and nothing else. Buffers for messages are made once: two of each kind, so that a round
is packed while the one before it is on its way.

Messages go as their backend does it best: from devices all messages of a round are one all-to-all,
from a CPU each goes by itself.
"""

import math
import socket
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from isal import isal_zlib

from megatron_ucp.core.box import Ints, span
from megatron_ucp.core.manifest import BufferPart, Manifest
from megatron_ucp.core.mesh import Coords
from megatron_ucp.core.plan import Mean, Op, Plan, Side, Slot
from megatron_ucp.errors import PlanError, UnsupportedError
from megatron_ucp.formats.pt.refs import ITEMSIZE
from megatron_ucp.reshard import agree
from megatron_ucp.reshard.engine import Engine, Holder
from megatron_ucp.reshard.execute import OfOp, TensorOf, bytes_of, copy_run
from megatron_ucp.reshard.messages import ELEMENTS_TAG, device_of_messages
from megatron_ucp.reshard.transfer import (
    Lost,
    Proved,
    TransferRun,
    is_looked_at,
    lost_values,
    param_of,
)

# What moving takes beside the memory that is filled, on any rank: what it gives to all others in a
# round, and what it takes, each twice.
EXTRA_BYTES = 256 * 2**20
_MOST_BYTES, _LEAST_BYTES = 32 * 2**20, 2**12  # of a round; the latter for 16,384 ranks
_ALONE_BYTES = 2**18  # of a copy that gets a message of its own: it may need no buffer
_ALIGN_BYTES = 64  # each message begins at so many bytes


def round_bytes(world: int) -> int:
    """How many bytes one of so many ranks takes in a round."""
    return max(_LEAST_BYTES, min(_MOST_BYTES, EXTRA_BYTES // (4 * world)))


def is_one_exchange(device: torch.device) -> bool:
    """Whether the messages of a round are one all-to-all, which is what NCCL is good at; gloo is
    at paired sends."""
    return device.type != "cpu"


@dataclass(frozen=True, slots=True)
class Asked:
    """Elements that a rank asks another one for."""

    side: Side
    shape: Ints

    def __reduce__(self) -> tuple[Any, ...]:
        return Asked, (self.side, self.shape)


# ---- holdings
#
# Who holds what.


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
        return self.engine.manifest.buffers[slot.buffer].dtype_of(slot.state)

    def values(self, side: Side, shape: Ints) -> torch.Tensor:
        """Elements of this rank's memory."""
        last = side.offset + span(shape, side.strides)
        flat = self.engine.read(side.slot, side.offset, last)
        return torch.as_strided(flat, shape, side.strides, flat.storage_offset())

    def bytes_of(self, side: Side, shape: Ints) -> int:
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


def _side(op: Op) -> Side:
    if isinstance(op, Mean):
        raise PlanError("a mean has no single source", found=op.target.slot)
    return op.source


def device_of_values() -> torch.device:
    """Where messages of the default group lie."""
    if not dist.is_initialized():
        return torch.device("cpu")
    return torch.device(device_of_messages())


# ---- kept moves


@dataclass(slots=True)
class _Pair:
    """A view that is filled, and one that has its values, those of the parameter `name`. `lost` are
    name and dtype of what may lose finite values."""

    into: torch.Tensor
    of: torch.Tensor
    lost: tuple[str, str] | None = None
    name: str = ""


@dataclass(slots=True)
class _Message:
    """What goes between this rank and a peer at once: `memory` is sent, or filled, and `pairs` are
    copied before, or after it."""

    peer: int
    memory: torch.Tensor
    pairs: list[_Pair] = field(default_factory=list[_Pair])


@dataclass(slots=True)
class _Taken:
    """What fills a region of this rank's memory with elements of the parameter `name`: those that
    are asked for, where they go, and what may be lost of them."""

    name: str
    asked: Asked
    into: torch.Tensor
    lost: tuple[str, str] | None


class KeptMoves:
    """Fills what some proved parts want, out of the memories of all ranks, as often as it is
    called. `into` gives the memory of a slot of this rank; the views of both sides are kept, so
    that whoever replaces a tensor must make new moves. Making them is collective."""

    def __init__(self, held: Holdings, parts: Sequence[Proved], into: TensorOf) -> None:
        self.rank, self.world = agree.world()
        self._held, self._device = held, device_of_values()
        self._is_one_exchange = is_one_exchange(self._device)
        self._zeros: list[torch.Tensor] = []
        self._own: list[_Pair] = []
        others: dict[int, list[_Taken]] = {}
        with agree.together():
            for one in parts:
                self._plan(one, into, others)
        with agree.gathering() as block:
            self._taken = [*self._rounds(others, round_bytes(self.world))]
            block.value = len(self._taken)
        self.rounds = max(block.values)
        # what each other rank asks this one for
        self._asked = agree.delivered(_by_giver(self._taken)) if self.rounds else {}
        with agree.together():
            coming = [self._to_come(number) for number in range(self.rounds)]
            going = [self._to_go(number) for number in range(self.rounds)]
            (self._coming, came), (self._going, sent) = map(self._buffers, (coming, going))
            splits = [[*map(self._splits, rounds)] for rounds in (coming, going)]
            exchanges = [*zip(came, sent, *splits, strict=True)]
            self._exchanges = exchanges if self._is_one_exchange else []
        self.read_bytes = sum(one.memory.nbytes for row in self._coming for one in row)
        self.sent_bytes = sum(one.memory.nbytes for row in self._going for one in row)
        others_into = [one.into for row in self._taken for rows in row.values() for one in rows]
        filled = [*(pair.into for pair in self._own), *others_into]
        self.filled_bytes = sum(map(_bytes_of, filled))

    # ------------------------------------------------ once

    def _plan(self, one: Proved, into: TensorOf, others: dict[int, list[_Taken]]) -> None:
        """What one part wants, by the rank that gives it."""
        target, source = one.part.target, self._held.engine.manifest
        for fill in one.plan.fills:
            if not fill.is_kept:
                self._zeros.append(into(fill.slot)[fill.start : fill.stop])
        most_elems = max(1, round_bytes(self.world) // 8)
        for number, planned in enumerate(one.plan.ops):
            name, slot = param_of(planned, target), planned.target.slot
            op = self._held.nearest(planned, name)
            side = op.sources[0]
            dtype = target.buffers[slot.buffer].dtype_of(slot.state)
            said = one.part.names[slot.buffer] if one.part.names else name
            is_lossy = is_looked_at(source, name, side.slot.state, dtype, one.part.as_trained)
            lost = (said, dtype) if is_lossy else None
            giver = self._held.giver(op, self.rank, number)
            for asked, goal in _cut(op, sys.maxsize if giver == self.rank else most_elems):
                view = _view(into(slot), goal, asked.shape)
                if giver == self.rank:
                    values = self._held.values(asked.side, asked.shape)
                    self._own.append(_Pair(view, values, lost, name))
                else:
                    others.setdefault(giver, []).append(_Taken(name, asked, view, lost))

    def _rounds(
        self, others: Mapping[int, Sequence[_Taken]], most: int
    ) -> Iterator[dict[int, list[_Taken]]]:
        """What is taken in each round, of up to `most` bytes together: of all givers in turns, so
        that they work at once, the one behind this rank first."""
        order = sorted(others, key=lambda giver: (giver - self.rank) % self.world)
        queues = {giver: list(reversed(rows)) for giver, rows in others.items()}
        while order:
            row: dict[int, list[_Taken]] = {}
            waiting, served = list[int](), list[int]()
            left, share = most, most // len(order)
            for giver in order:
                rows, size = queues[giver], 0
                while rows:
                    piece = self._size(rows[-1].asked)
                    if (size and size + piece > share) or (row and piece > left):
                        break
                    size, left = size + piece, left - piece
                    row.setdefault(giver, []).append(rows.pop())
                if rows:
                    (served if size else waiting).append(giver)
            order = waiting + served
            # in the order of the ranks, as one exchange of all of them wants it
            yield {giver: sorted(row[giver], key=self._order) for giver in sorted(row)}

    def _order(self, taken: _Taken) -> int:
        """Elements of more bytes come first: then each run of a message is aligned."""
        return -ITEMSIZE[self._held.dtype(taken.asked.side.slot)]

    def _size(self, asked: Asked) -> int:
        return self._held.bytes_of(asked.side, asked.shape)

    def _messages(self, rows: Sequence[Any], asked_of: Callable[[Any], Asked]) -> Iterator[Any]:
        """The copies of a round between two ranks, by the message that they are in: both find the
        same ones. All of them are in one, where that is copied anyway."""
        small: list[Any] = []
        for one in rows:
            if not self._is_one_exchange and self._size(asked_of(one)) >= _ALONE_BYTES:
                yield [one]
            else:
                small.append(one)
        if small:
            yield small

    def _to_come(self, number: int) -> list["_Planned"]:
        """The messages that this rank gets in a round."""
        row = self._taken[number] if number < len(self._taken) else {}
        return [
            _Planned(giver, [(one.into, one.asked, one.lost) for one in rows], coming=True)
            for giver, every in row.items()
            for rows in self._messages(every, lambda one: one.asked)
        ]

    def _to_go(self, number: int) -> list["_Planned"]:
        return [
            _Planned(taker, [(self._held.values(one.side, one.shape), one, None) for one in rows])
            for taker, rounds in sorted(self._asked.items())
            if number < len(rounds)
            for rows in self._messages(rounds[number], lambda one: one)
        ]

    def _buffers(
        self, rounds: Sequence[Sequence["_Planned"]]
    ) -> tuple[list[list[_Message]], list[torch.Tensor]]:
        """The messages of all rounds, and the memory of each round, in two buffers that take turns;
        what is one run of memory where it lies needs none."""
        sizes = [sum(map(self._room, row)) for row in rounds]
        memories = [
            torch.empty(max(sizes[turn::2], default=0), dtype=torch.uint8, device=self._device)
            for turn in (0, 1)
        ]
        out: list[list[_Message]] = []
        for number, row in enumerate(rounds):
            at, messages = 0, list[_Message]()
            for one in row:
                size = self._room(one)
                own = memories[number % 2][at : at + size]
                messages.append(self._message(one, own))
                at += size
            out.append(messages)
        return out, [memories[number % 2][:size] for number, size in enumerate(sizes)]

    def _splits(self, row: Sequence["_Planned"]) -> list[int]:
        """How many bytes of a round's memory are of each rank."""
        sizes = [0] * self.world
        for one in row:
            sizes[one.peer] += self._room(one)
        return sizes

    def _is_run(self, planned: "_Planned") -> bool:
        """Whether a message can be sent from where it lies, or come to where it goes."""
        (view, asked, lost), *more = planned.rows
        return (
            not more
            and lost is None
            and not self._is_one_exchange
            and view.is_contiguous()
            and view.device.type == self._device.type
            and view.numel() * view.element_size() == self._size(asked)
            and str(view.dtype) == f"torch.{self._held.dtype(asked.side.slot)}"
        )

    def _room(self, planned: "_Planned") -> int:
        """Bytes of a buffer that a message takes; the next one begins aligned."""
        if self._is_run(planned):
            return 0
        size = sum(self._size(asked) for _, asked, _ in planned.rows)
        return size + -size % _ALIGN_BYTES

    def _message(self, planned: "_Planned", memory: torch.Tensor) -> _Message:
        if self._is_run(planned):
            run = planned.rows[0][0].reshape(-1).view(torch.uint8)
            return _Message(planned.peer, run)
        at, pairs = 0, list[_Pair]()
        for view, asked, lost in planned.rows:
            size = self._size(asked)
            dtype = getattr(torch, self._held.dtype(asked.side.slot))
            run = memory[at : at + size].view(dtype).view(asked.shape)
            pairs.append(_Pair(view, run, lost) if planned.coming else _Pair(run, view))
            at += size
        return _Message(planned.peer, memory[:at], pairs)

    # ------------------------------------------------ each time

    def run(
        self,
        kept: agree.KeptBack,
        advance: Callable[[int], object] = bool,
    ) -> Lost:
        """Fills this rank's memory. Collective: no agreement, only what has to move. Returns how
        many finite values of which parameters became none. A rank that fails still sends what
        others wait for; its first error is `kept`, and what it sent then is undefined. `advance`
        counts bytes that are filled."""
        lost: dict[tuple[str, str], int] = {}
        works = self._post(0, kept)
        with kept:
            for one in self._zeros:
                one.zero_()
        for pair in self._own:
            with kept:
                _copied([pair], lost)
                advance(_bytes_of(pair.into))
        for number in range(self.rounds):
            following = self._post(number + 1, kept)
            for work in works:
                with kept:
                    work.wait()
            for message in self._row(self._coming, number):
                with kept:
                    _copied(message.pairs, lost)
                    advance(message.memory.nbytes)
            works = following
        return lost

    # ------------------------------------------------ checksums

    def sums_given(self) -> dict[int, list[int]]:
        """The CRC-32s of all elements that each other rank asks this one for, in that order."""
        return {
            taker: [_crc32(self._held.values(one.side, one.shape)) for row in rounds for one in row]
            for taker, rounds in self._asked.items()
        }

    def compared(self, given: Mapping[int, Sequence[int]]) -> tuple[int, list[str]]:
        """Compares what was filled with the source: bytes whose sums are the same, and the
        parameters of which one is not. What has another dtype is in neither. `given` are the sums
        of those who gave it."""
        found = [(pair.name, pair.into, pair.of.dtype, _crc32(pair.of)) for pair in self._own]
        sums = {giver: iter(own) for giver, own in given.items()}
        for row in self._taken:
            for giver, rows in row.items():
                for one in rows:
                    dtype = getattr(torch, self._held.dtype(one.asked.side.slot))
                    found.append((one.name, one.into, dtype, next(sums[giver])))
        same, wrong = 0, dict[str, None]()
        for name, into, dtype, sum_ in found:
            if into.dtype == dtype and _crc32(into) == sum_:
                same += _bytes_of(into)
            elif into.dtype == dtype:
                wrong[name] = None
        return same, [*wrong]

    # ------------------------------------------------ messages

    def _row(self, rounds: Sequence[list[_Message]], number: int) -> list[_Message]:
        return rounds[number] if number < len(rounds) else []

    def _post(self, number: int, kept: agree.KeptBack) -> list[Any]:
        """Begins the messages of a round."""
        works: list[Any] = []
        going, coming = self._row(self._going, number), self._row(self._coming, number)
        for message in () if self._is_one_exchange else coming:
            with kept:
                works.append(dist.irecv(message.memory, message.peer, tag=ELEMENTS_TAG))
        for message in going:
            with kept:
                _copied(message.pairs, {})
            with kept:
                if not self._is_one_exchange:
                    works.append(dist.isend(message.memory, message.peer, tag=ELEMENTS_TAG))
        for exchange in self._exchanges[number : number + 1]:
            with kept:
                works.append(dist.all_to_all_single(*exchange, async_op=True))
        return works


@dataclass(slots=True)
class _Planned:
    """A message before it has memory: views of this rank with the elements that are asked for, and
    what may be lost of them."""

    peer: int
    rows: list[tuple[torch.Tensor, Asked, tuple[str, str] | None]]
    coming: bool = False


def _by_giver(
    rounds: Sequence[Mapping[int, Sequence[_Taken]]],
) -> dict[int, list[list[Asked]]]:
    """What each other rank is asked for, round by round."""
    out: dict[int, list[list[Asked]]] = {}
    for number, row in enumerate(rounds):
        for giver, rows in row.items():
            wished = out.setdefault(giver, [[] for _ in rounds])
            wished[number] = [one.asked for one in rows]
    return out


def _copied(pairs: Sequence[_Pair], lost: dict[tuple[str, str], int]) -> None:
    for pair in pairs:
        copy_run(pair.into, pair.of)
        if pair.lost is not None and (count := lost_values(pair.of, pair.into)):
            _add({pair.lost: count}, lost)


def _add(found: Lost, lost: dict[tuple[str, str], int]) -> None:
    for what, count in found.items():
        lost[what] = lost.get(what, 0) + count


# ---- copies


def _view(flat: torch.Tensor, side: Side, shape: Ints) -> torch.Tensor:
    first = flat.storage_offset() + side.offset
    return torch.as_strided(flat, shape, side.strides, first)


def _crc32(values: torch.Tensor) -> int:
    return isal_zlib.crc32(bytes_of(values.contiguous().cpu()))


def _bytes_of(view: torch.Tensor) -> int:
    return view.numel() * view.element_size()


def _cut(op: Op, most_elems: int) -> Iterator[tuple[Asked, Side]]:
    """A copy in pieces of up to so many elements, as far as its dims let it be cut: what is asked
    for, and where it goes."""
    return _pieces(Asked(op.sources[0], op.shape), op.target, most_elems)


def _pieces(asked: Asked, goal: Side, most_elems: int) -> Iterator[tuple[Asked, Side]]:
    side, shape = asked.side, asked.shape
    elems = math.prod(shape)
    dim = next((d for d, length in enumerate(shape) if length > 1), None)
    if elems <= most_elems or dim is None:
        yield asked, goal
        return
    rows = max(1, most_elems * shape[dim] // elems)
    for first in range(0, shape[dim], rows):
        part = (*shape[:dim], min(rows, shape[dim] - first), *shape[dim + 1 :])
        own = replace(side, offset=side.offset + first * side.strides[dim])
        there = replace(goal, offset=goal.offset + first * goal.strides[dim])
        yield from _pieces(Asked(own, part), there, most_elems)


# ---- shared memories
#
# The memories of all ranks as a source of memory that is filled in place: each rank takes what it
# needs, straight to where it belongs.


class SharedMemories:
    """Each rank fills the parts that it has of a sink. Making one is collective."""

    all_looked_at = False

    def __init__(self, file: str, holder: Holder) -> None:
        self.file, self.held = file, holdings_of(holder)
        self.read_bytes, self.read_by_all, self.sums = 0, 0, (0, 0, 0)
        self.lost_values: Lost = {}

    def manifest_of(self, part: int) -> Manifest:
        return self.held.engine.manifest

    def locate(self, one: Proved) -> None:
        self.held.require(one.plan)

    def fill(
        self, parts: Sequence[Proved], into: TensorOf, run: TransferRun, is_summed: OfOp
    ) -> None:
        """Fills what this rank has of some parts. Collective."""
        moves, kept = KeptMoves(self.held, parts, into), agree.KeptBack()
        run.total = moves.filled_bytes
        self.lost_values = moves.run(kept, run.count)
        self.read_bytes += moves.read_bytes
        kept.raise_kept()

    def holders_of(self, one: Proved) -> dict[Slot, set[int]]:
        """For each slot that a part wants the ranks that have all of it."""
        found: dict[Slot, set[int]] = {}
        for op in one.plan.ops:
            have = found.setdefault(op.target.slot, {*range(len(self.held.machines))})
            have &= self.held.ranks[_side(op).slot.place]
        return found

    def check_records(self, slots: Iterable[Slot]) -> None:
        """Memory has none."""

    def lost(self, engine: Engine, plan: Plan) -> Lost:
        return self.lost_values

    def check(self, thorough: bool) -> None:
        """Memory has no checksums. Counts what all ranks took. Collective."""
        self.sums = self.read_bytes, 0, 0
        (self.read_by_all,) = agree.total(self.read_bytes)
