"""Intersecting two manifests into strided copies. `proof` checks what comes out."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from megatron_ucp.core.box import Box, Ints, flat_boxes
from megatron_ucp.core.flat import FlatBuffer, Member
from megatron_ucp.core.grouping import kept
from megatron_ucp.core.layout import Piece
from megatron_ucp.core.manifest import BufferPart, Manifest, Slot, differs_in_padding
from megatron_ucp.core.mesh import Coords, index_on
from megatron_ucp.core.names import MASTER, VALUE
from megatron_ucp.errors import InexactError, PlanError

# (from, to) of casts that keep every value
LOSSLESS = frozenset(
    {
        ("bfloat16", "float32"),
        ("float16", "float32"),
        ("bfloat16", "float64"),
        ("float16", "float64"),
        ("float32", "float64"),
    }
)


@dataclass(frozen=True, slots=True)
class Side:
    """Where one side of a copy lies in its slot: first element and strides, in elements."""

    slot: Slot
    offset: int
    strides: Ints

    def __reduce__(self) -> tuple[Any, ...]:
        """As that of Slot."""
        return Side, (self.slot, self.offset, self.strides)


@dataclass(frozen=True, slots=True)
class Copy:
    """A strided copy of the same dtype. `box` is the target region in member number `member`'s
    stored tensor."""

    source: Side
    target: Side
    shape: Ints
    member: int
    box: Box

    @property
    def sources(self) -> tuple[Side, ...]:
        """As those of a mean, so that nobody who looks them up has to tell the two apart."""
        return (self.source,)


@dataclass(frozen=True, slots=True)
class Cast(Copy):
    """A strided copy that changes the dtype; `lossless` casts keep every value."""

    lossless: bool = True


@dataclass(frozen=True, slots=True)
class Mean:
    """The mean over all copies of a Partial parameter."""

    sources: tuple[Side, ...]
    target: Side
    shape: Ints
    member: int
    box: Box


@dataclass(frozen=True, slots=True)
class Fill:
    """Zeros in [start, stop) of a slot: its padding, or vocabulary rows that the source does not
    have. `is_kept`: the rows of new tokens, whose weights stay as the target has them."""

    slot: Slot
    start: int
    stop: int
    is_kept: bool = False


Op = Copy | Cast | Mean
Want = tuple[Slot, str]  # a slot to fill, and the name of the source state that fills it


@dataclass(frozen=True)
class Plan:
    """Everything to do to fill `wants`, as data."""

    wants: tuple[Want, ...]
    ops: tuple[Op, ...]
    fills: tuple[Fill, ...]

    @property
    def sources(self) -> frozenset[Slot]:
        """Every slot that the plan reads."""
        return frozenset(side.slot for op in self.ops for side in op.sources)

    @property
    def elems(self) -> int:
        """Elements that the target needs from the source."""
        return sum(op.box.numel for op in self.ops)


def joined(plans: Sequence[Plan]) -> Plan:
    """Plans for slots that are not the same, as one."""
    return Plan(
        tuple(want for plan in plans for want in plan.wants),
        tuple(op for plan in plans for op in plan.ops),
        tuple(fill for plan in plans for fill in plan.fills),
    )


def make_plan(
    source: Manifest, target: Manifest, wants: Sequence[Want], allow: frozenset[str] = frozenset()
) -> Plan:
    """The copies that fill every wanted slot of the target.

    Raises PlanError where the source does not hold an element, InexactError for a narrowing cast or
    a mean that `allow` ("narrow", "mean") does not name.
    """
    planner = _Planner(source, target, allow)
    ops: list[Op] = []
    fills: list[Fill] = []
    places: dict[object, list[_Move | Fill]] = {}
    for slot, state in wants:
        place = slot.place, planner.apart(slot, state)
        if place not in places:
            places[place] = list(planner.moves(slot, state))
        for move in places[place]:
            if isinstance(move, Fill):
                kept = move.is_kept and slot.state in (MASTER, VALUE)
                fills.append(Fill(slot, move.start, move.stop, kept))
            else:
                ops.append(planner.op(slot, state, move))
        fills += padding(target.buffers[slot.buffer], slot)
    return Plan(tuple(wants), tuple(ops), tuple(fills))


class Windows:
    """Plans for runs of slots, for a target that is written piece by piece. Offsets count from the
    start of the run. The same run of states that are cut alike is planned once, where one follows
    the other."""

    _MOST = 256  # places whose last run is kept

    def __init__(
        self, source: Manifest, target: Manifest, allow: frozenset[str] = frozenset()
    ) -> None:
        self._planner, self._target = _Planner(source, target, allow), target
        self._last: dict[BufferPart, tuple[Any, list[_Move | Fill]]] = {}

    def plan(self, slot: Slot, state: str, low: int, high: int) -> Plan:
        """The copies that fill elements [low, high) of a slot. Raises as `make_plan`."""
        ops: list[Op] = []
        fills: list[Fill] = []
        for move in self._moves(slot, state, low, high):
            if isinstance(move, Fill):
                fills.append(Fill(slot, move.start - low, move.stop - low))
            else:
                ops.append(
                    self._planner.op(
                        slot, state, replace(move, target_offset=move.target_offset - low)
                    )
                )
        for fill in padding(self._target.buffers[slot.buffer], slot):
            if max(fill.start, low) < min(fill.stop, high):
                fills.append(Fill(slot, max(fill.start, low) - low, min(fill.stop, high) - low))
        return Plan(((slot, state),), tuple(ops), tuple(fills))

    def _moves(self, slot: Slot, state: str, low: int, high: int) -> "list[_Move | Fill]":
        place = slot.place
        run = low, high, self._planner.apart(slot, state)
        known = self._last.get(place)
        if known is not None and known[0] == run:
            return known[1]
        if len(self._last) > self._MOST:
            self._last.clear()
        moves = list(self._planner.moves(slot, state, low, high))
        self._last[place] = run, moves
        return moves


def padding(buffer: FlatBuffer, slot: Slot) -> Iterator[Fill]:
    """The runs of a slot that no member owns."""
    buffer, at = buffer.of(slot.state), 0
    for fragment in buffer.fragments(slot.part):
        if at < fragment.offset:
            yield Fill(slot, at, fragment.offset)
        at = fragment.offset + fragment.high - fragment.low
    if at < buffer.elems(slot.part):
        yield Fill(slot, at, buffer.elems(slot.part))


@dataclass(frozen=True, slots=True)
class _Move:
    """A strided copy before it is said which state, of those that are cut alike: (buffer, cut,
    partition) and address of the source, of the target."""

    source: tuple[int, Coords, int]
    offset: int
    strides: Ints
    target_offset: int
    target_strides: Ints
    shape: Ints
    member: int
    param: str
    box: Box
    mean: bool


_Places = list[tuple[Coords, tuple[Piece, ...]]]  # what each place holds of a parameter


class _Planner:
    def __init__(self, source: Manifest, target: Manifest, allow: frozenset[str]) -> None:
        self.source, self.target, self.allow = source, target, allow

    def apart(self, slot: Slot, state: str) -> tuple[str, str] | None:
        """Of which states a plan is: None for all that are cut alike, as masters and moments of a
        buffer are, but for uncut ones."""
        is_apart = slot.state in self.target.uncut or state in self.source.uncut
        return (slot.state, state) if is_apart else None

    def moves(
        self, slot: Slot, state: str, low: int = 0, high: int | None = None
    ) -> Iterator[_Move | Fill]:
        """What fills a place of the target from a state of the source, and from all that are cut
        like it; of its memory the elements [low, high)."""
        buffer = self.target.buffers[slot.buffer].of(slot.state)
        for fragment in buffer.fragments(slot.part):
            first = max(fragment.low, fragment.low + low - fragment.offset)
            last = (
                fragment.high
                if high is None
                else min(fragment.high, fragment.low + high - fragment.offset)
            )
            if first >= last:
                continue
            member = buffer.members[fragment.member]
            pieces = self.target.pieces(member, slot.cut)
            for box in flat_boxes(pieces[0].view, first, last):
                for piece in pieces:
                    part = piece.clip_local(box)
                    if part is not None:
                        yield from self._new_rows(slot, member, part)
                        yield from self._supply(slot, state, fragment.member, member, part)

    def _new_rows(self, slot: Slot, member: Member, want: Piece) -> Iterator[Fill]:
        """What stands in rows of a vocabulary that is larger than the source's; `match_params` let
        that pass by name."""
        source = self.source.by_name.get(member.param)
        target = self.target.by_name[member.param]
        if source is None or not target.shape or source.shape[0] >= target.shape[0]:
            return
        new = want.clip_full(Box((source.shape[0], *(0,) * (len(target.shape) - 1)), target.shape))
        if new is not None:
            buffer = self.target.buffers[slot.buffer].of(slot.state)
            start = buffer.offset(member, slot.part, new.flat_start)
            stop = start + new.flat_stop - new.flat_start
            yield Fill(slot, start, stop, is_kept=not differs_in_padding(source, target))

    def _supply(
        self, slot: Slot, state: str, index: int, member: Member, want: Piece
    ) -> Iterator[_Move]:
        """The moves that produce one box of the target, from the first holder that the source
        has."""
        param = member.param
        holders = self.source.read_from(param)
        if not holders:
            raise PlanError("the checkpoint does not hold a parameter", parameter=param)
        seen: set[Box] = set()
        for b, m in self._nearest_first(holders, slot.cut):
            for cut, pieces in self._places_of(b, m, slot.cut):
                for have in pieces:
                    common = have.clip_full(want.full) if have.full not in seen else None
                    seen.add(have.full)  # another rank's own buffer may hold a copy
                    if common is not None:
                        yield from self._from(b, m, state, cut, common, slot, index, want)

    def _nearest_first(
        self, holders: Sequence[tuple[int, int]], place: Coords
    ) -> Sequence[tuple[int, int]]:
        """Of ranks with buffers of their own, the one at the target's own place comes first."""
        if len(holders) == 1:
            return holders
        shares = {bm: {*self.source.buffers[bm[0]].cut_at} for bm in holders}
        return sorted(holders, key=lambda bm: not shares[bm] <= {*place})

    def _from(
        self,
        b: int,
        m: int,
        state: str,
        cut: Coords,
        common: Piece,
        slot: Slot,
        index: int,
        want: Piece,
    ) -> Iterator[_Move]:
        """The moves from one place of the source: what it has in common with a box of the target,
        partition by partition."""
        held_by = self.source.buffers[b].of(state)
        buffer = self.target.buffers[slot.buffer].of(slot.state)
        held, member = held_by.members[m], buffer.members[index]
        mean = self._is_averaged(member.param)
        for part, piece in _by_partition(held_by, held, common):
            goal = want.clip_full(piece.full)
            if goal is None:
                raise PlanError(
                    "a box lies outside of the box that it was cut from", parameter=member.param
                )
            shape, ours, theirs = _merged(goal.full.shape, piece.strides, goal.strides)
            offset = held_by.offset(held, part, piece.flat_start)
            start = buffer.offset(member, slot.part, goal.flat_start)
            yield _Move(
                (b, cut, part),
                offset,
                ours,
                start,
                theirs,
                shape,
                index,
                member.param,
                goal.local,
                mean,
            )

    def _is_averaged(self, param: str) -> bool:
        """Whether the target can't have the source's copies of a parameter one by one. Raises
        InexactError where that was not allowed."""
        layout = self.source.by_name[param].layout
        if not layout.mean_over:
            return False
        copies = self.source.mesh.size(layout.mean_over)
        if copies in (1, self.target.mesh.size(layout.mean_over)):
            return False
        if "mean" not in self.allow:
            raise InexactError(
                "a parameter of which each rank has its own copy can only be averaged",
                parameter=param,
                expected="that the mean is allowed",
                found=f"{copies} copies along {layout.mean_over}",
                fix='average the copies with --allow mean (Python: allow={"mean"}), or keep '
                "the size of this axis",
            )
        return True

    def op(self, slot: Slot, state: str, move: _Move) -> Op:
        """A move of the source's state into a slot. Raises PlanError or InexactError."""
        b, cut, part = move.source
        source = Side(Slot(b, cut, part, state), move.offset, move.strides)
        target = Side(slot, move.target_offset, move.target_strides)
        shape, index, param = move.shape, move.member, move.param
        if move.mean:
            copies = tuple(
                Side(Slot(b, at, part, state), move.offset, move.strides)
                for at in self._copies(param, b, cut)
            )
            return Mean(copies, target, shape, index, move.box)
        have = dict(self.source.buffers[b].states).get(state)
        want = self.target.buffers[slot.buffer].dtype_of(slot.state)
        if have is None:
            raise PlanError(f"the checkpoint does not hold the state {state}", parameter=param)
        if have == want:
            return Copy(source, target, shape, index, move.box)
        lossless = (have, want) in LOSSLESS
        if not lossless and "narrow" not in self.allow:
            raise _rounded(state, param, have, want)
        return Cast(source, target, shape, index, move.box, lossless)

    def _copies(self, param: str, b: int, cut: Coords) -> list[Coords]:
        """The places of all copies of a Partial parameter: those along its own axis."""
        axis = self.source.by_name[param].layout.mean_over
        others = [at for at in cut if at[0] != axis]
        places = self.source.cuts_of(self.source.buffers[b])
        return [place for place in places if [at for at in place if at[0] != axis] == others]

    @kept
    def _shares_of(self, b: int, m: int) -> _Places:
        """What each place of a buffer has of a parameter."""
        member, cuts = self.source.member(b, m), self.source.cuts_of(self.source.buffers[b])
        return [(cut, self.source.pieces(member, cut)) for cut in cuts]

    @kept
    def _places_of(self, b: int, m: int, prefer: Coords) -> _Places:
        """One place for each distinct share of a parameter; of copies the one at the target's own
        place, of a Partial parameter's the one with its index on the axis of the copies."""
        axis = self.source.by_name[self.source.member(b, m).param].layout.mean_over
        shares: dict[tuple[Box, ...], tuple[Coords, tuple[Piece, ...]]] = {}
        for cut, pieces in self._shares_of(b, m):
            key = tuple(piece.full for piece in pieces)
            own = bool(axis) and index_on(cut, axis) == index_on(prefer, axis)
            if key not in shares or cut == prefer or (own and shares[key][0] != prefer):
                shares[key] = (cut, pieces)
        return list(shares.values())


def _rounded(state: str, param: str, have: str, want: str) -> InexactError:
    return InexactError(
        f"the state {state} would be rounded",
        parameter=param,
        expected=have,
        found=f"{want} in the engine",
        fix="keep the dtype of the checkpoint, or round with --allow narrow (Python: "
        'allow={"narrow"})',
    )


def _by_partition(buffer: FlatBuffer, member: Member, piece: Piece) -> Iterator[tuple[int, Piece]]:
    """A piece of a member's stored tensor, split by the partitions that own it."""
    if not piece.full.numel:
        return
    start, stop = piece.flat_start, piece.flat_stop
    for part in buffer.owners(member, start, stop):
        low, high = buffer.owned(member, part)
        if low <= start and stop <= high:
            yield part, piece
            continue
        for box in flat_boxes(piece.view, max(low, start), min(high, stop)):
            clipped = piece.clip_local(box)
            if clipped is not None:
                yield part, clipped


@lru_cache(maxsize=4096)
def _merged(shape: Ints, ours: Ints, theirs: Ints) -> tuple[Ints, Ints, Ints]:
    """Fewer dims with the same elements: dims of extent 1 go, dims that are adjacent on both sides
    become one."""
    dims = [list(d) for d in zip(shape, ours, theirs, strict=True) if d[0] != 1]
    out: list[list[int]] = []
    for dim in dims:
        if out and out[-1][1] == dim[0] * dim[1] and out[-1][2] == dim[0] * dim[2]:
            out[-1] = [out[-1][0] * dim[0], dim[1], dim[2]]
        else:
            out.append(dim)
    if not out:
        return (1,), (1,), (1,)
    return tuple(d[0] for d in out), tuple(d[1] for d in out), tuple(d[2] for d in out)
