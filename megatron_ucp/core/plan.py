"""Intersecting two manifests into strided copies, and the proof that every target element is
produced exactly once."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from megatron_ucp.core.box import Box, Ints, flat_boxes, flat_index, strides
from megatron_ucp.core.flat import FlatBuffer, Member
from megatron_ucp.core.layout import Partial, Piece
from megatron_ucp.core.manifest import Manifest
from megatron_ucp.errors import InexactError, PlanError

Cut = tuple[tuple[str, int], ...]

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
class Slot:
    """One stored run of elements: a state of one partition of a buffer, at a place along the axes
    that cut it."""

    buffer: int
    cut: Cut
    part: int
    state: str


@dataclass(frozen=True, slots=True)
class Side:
    """Where one side of a copy lies in its slot: first element and strides, in elements."""

    slot: Slot
    offset: int
    strides: Ints


@dataclass(frozen=True, slots=True)
class Copy:
    """A strided copy of the same dtype. `box` is the target region in member number `member`'s
    stored tensor."""

    source: Side
    target: Side
    shape: Ints
    member: int
    box: Box


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
    have."""

    slot: Slot
    start: int
    stop: int


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
        return frozenset(
            side.slot
            for op in self.ops
            for side in (op.sources if isinstance(op, Mean) else (op.source,))
        )

    @property
    def elems(self) -> int:
        """Elements that the target needs from the source."""
        return sum(op.box.numel for op in self.ops)


def cuts_of(manifest: Manifest, buffer: FlatBuffer) -> list[Cut]:
    """Every place along the axes that cut a buffer."""
    return [
        tuple(zip(buffer.axes, at, strict=True))
        for at in product(*(range(manifest.mesh.size(axis)) for axis in buffer.axes))
    ]


def _place(manifest: Manifest, cut: Cut) -> Mapping[str, tuple[int, int]]:
    return {axis: (manifest.mesh.size(axis), index) for axis, index in cut}


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
    places: dict[tuple[int, Cut, int], list[_Move | Fill]] = {}
    for slot, state in wants:
        place = slot.buffer, slot.cut, slot.part
        if place not in places:  # masters and moments of a buffer are cut alike
            places[place] = list(planner.moves(slot))
        for move in places[place]:
            if isinstance(move, Fill):
                fills.append(Fill(slot, move.start, move.stop))
            else:
                ops.append(planner.op(slot, state, move))
        fills += padding(target.buffers[slot.buffer], slot)
    return Plan(tuple(wants), tuple(ops), tuple(fills))


class Windows:
    """Plans for runs of slots, for a target that is written piece by piece. Offsets count from the
    start of the run."""

    def __init__(
        self, source: Manifest, target: Manifest, allow: frozenset[str] = frozenset()
    ) -> None:
        self._planner, self._target = _Planner(source, target, allow), target

    def plan(self, slot: Slot, state: str, low: int, high: int) -> Plan:
        """The copies that fill elements [low, high) of a slot. Raises as `make_plan`."""
        ops: list[Op] = []
        fills: list[Fill] = []
        for move in self._planner.moves(slot, low, high):
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


def padding(buffer: FlatBuffer, slot: Slot) -> Iterator[Fill]:
    """The runs of a slot that no member owns."""
    at = 0
    for fragment in buffer.fragments(slot.part):
        if at < fragment.offset:
            yield Fill(slot, at, fragment.offset)
        at = fragment.offset + fragment.high - fragment.low
    if at < buffer.partition_elems:
        yield Fill(slot, at, buffer.partition_elems)


@dataclass(frozen=True, slots=True)
class _Move:
    """A strided copy before it is said which state: (buffer, cut, partition) and address of the
    source, of the target."""

    source: tuple[int, Cut, int]
    offset: int
    strides: Ints
    target_offset: int
    target_strides: Ints
    shape: Ints
    member: int
    param: str
    box: Box
    mean: bool


class _Planner:
    def __init__(self, source: Manifest, target: Manifest, allow: frozenset[str]) -> None:
        self.source, self.target, self.allow = source, target, allow
        self._held: dict[tuple[str, int], list[tuple[Cut, tuple[Piece, ...]]]] = {}

    def moves(self, slot: Slot, low: int = 0, high: int | None = None) -> Iterator[_Move | Fill]:
        """What fills a place of the target, whatever the state; of its memory the elements [low,
        high)."""
        buffer = self.target.buffers[slot.buffer]
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
            spec = self.target.by_name[member.param]
            pieces = spec.pieces(_place(self.target, slot.cut))
            for box in flat_boxes(pieces[0].view, first, last):
                for piece in pieces:
                    part = piece.clip_local(box)
                    if part is not None:
                        yield from self._new_rows(slot, member, part)
                        yield from self._supply(slot, fragment.member, member, part)

    def _new_rows(self, slot: Slot, member: Member, want: Piece) -> Iterator[Fill]:
        """Zeros for rows of a vocabulary that is larger than the source's; `match_params` let that
        pass by name."""
        source = self.source.by_name.get(member.param)
        target = self.target.by_name[member.param]
        if source is None or not target.shape or source.shape[0] >= target.shape[0]:
            return
        new = want.clip_full(Box((source.shape[0], *(0,) * (len(target.shape) - 1)), target.shape))
        if new is not None:
            start = self.target.buffers[slot.buffer].offset(member, slot.part, new.flat_start)
            yield Fill(slot, start, start + new.flat_stop - new.flat_start)

    def _supply(self, slot: Slot, index: int, member: Member, want: Piece) -> Iterator[_Move]:
        """The moves that produce one box of the target, from the first holder that the source
        has."""
        holders = self.source.holders.get(member.param)
        if not holders:
            raise PlanError("the checkpoint does not hold a parameter", parameter=member.param)
        b, m = holders[0]
        held_by = self.source.buffers[b]
        buffer = self.target.buffers[slot.buffer]
        mean = isinstance(
            self.source.by_name[member.param].layout, Partial
        ) and self.source.mesh.size("tp") not in (1, self.target.mesh.size("tp"))
        if mean and "mean" not in self.allow:
            raise InexactError(
                "a parameter of which each rank has its own copy can only be averaged",
                parameter=member.param,
                expected='the argument allow={"mean"}',
            )
        for cut, pieces in self._holders_of(member.param, b, slot.cut):
            for have in pieces:
                common = have.clip_full(want.full)
                if common is None:
                    continue
                for part, piece in _by_partition(held_by, held_by.members[m], common):
                    goal = want.clip_full(piece.full)
                    if goal is None:
                        raise PlanError(
                            "a box lies outside of the box that it was cut from",
                            parameter=member.param,
                        )
                    shape, ours, theirs = _merged(goal.full.shape, piece.strides, goal.strides)
                    yield _Move(
                        (b, cut, part),
                        held_by.offset(held_by.members[m], part, piece.flat_start),
                        ours,
                        buffer.offset(member, slot.part, goal.flat_start),
                        theirs,
                        shape,
                        index,
                        member.param,
                        goal.local,
                        mean,
                    )

    def op(self, slot: Slot, state: str, move: _Move) -> Op:
        """A move of the source's state into a slot. Raises PlanError or InexactError."""
        b, cut, part = move.source
        source = Side(Slot(b, cut, part, state), move.offset, move.strides)
        target = Side(slot, move.target_offset, move.target_strides)
        shape, index, param = move.shape, move.member, move.param
        if move.mean:
            copies = tuple(
                Side(Slot(b, cut, part, state), move.offset, move.strides)
                for cut in cuts_of(self.source, self.source.buffers[b])
            )
            return Mean(copies, target, shape, index, move.box)
        have = dict(self.source.buffers[b].states).get(state)
        want = dict(self.target.buffers[slot.buffer].states)[slot.state]
        if have is None:
            raise PlanError(f"the checkpoint does not hold the state {state}", parameter=param)
        if have == want:
            return Copy(source, target, shape, index, move.box)
        lossless = (have, want) in LOSSLESS
        if not lossless and "narrow" not in self.allow:
            raise InexactError(
                f"the state {state} would be rounded",
                parameter=param,
                expected=have,
                found=f"{want} in the engine",
                fix='keep the dtype of the checkpoint, or allow it with allow={"narrow"}',
            )
        return Cast(source, target, shape, index, move.box, lossless)

    def _holders_of(self, param: str, b: int, prefer: Cut) -> list[tuple[Cut, tuple[Piece, ...]]]:
        """One place for each distinct share of a parameter; of identical copies the one at the
        target's own place."""
        if (param, b) not in self._held:
            spec = self.source.by_name[param]
            self._held[param, b] = [
                (cut, spec.pieces(_place(self.source, cut)))
                for cut in cuts_of(self.source, self.source.buffers[b])
            ]
        shares: dict[tuple[Box, ...], tuple[Cut, tuple[Piece, ...]]] = {}
        for cut, pieces in self._held[param, b]:
            key = tuple(piece.full for piece in pieces)
            if key not in shares or cut == prefer:
                shares[key] = (cut, pieces)
        return list(shares.values())


def _by_partition(buffer: FlatBuffer, member: Member, piece: Piece) -> Iterator[tuple[int, Piece]]:
    """A piece of a member's stored tensor, split by the partitions that own it."""
    if not piece.full.numel:
        return
    for part in buffer.owners(member, piece.flat_start, piece.flat_stop):
        low, high = buffer.owned(member, part)
        for box in flat_boxes(piece.view, max(low, piece.flat_start), min(high, piece.flat_stop)):
            clipped = piece.clip_local(box)
            if clipped is not None:
                yield part, clipped


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


def one_state(plan: Plan) -> Plan:
    """The part of a plan that fills one state of each place. The states of a buffer are cut alike,
    and `make_plan` makes their copies from one address: what is proved of one holds for all."""
    first: dict[tuple[int, Cut, int], Slot] = {}
    for slot, _ in plan.wants:
        first.setdefault((slot.buffer, slot.cut, slot.part), slot)
    kept = frozenset(first.values())
    return Plan(
        tuple(want for want in plan.wants if want[0] in kept),
        tuple(op for op in plan.ops if op.target.slot in kept),
        tuple(fill for fill in plan.fills if fill.slot in kept),
    )


def prove(plan: Plan, source: Manifest, target: Manifest) -> None:
    """Checks that every element of every wanted slot is produced exactly once, and from inside a
    source slot.

    Target regions are subtracted from what the slot's members own, box by box in sorted order;
    padding and members must tile the slot. It does not use the arithmetic that made the plan's
    offsets: they are compared with it. Raises PlanError.
    """
    by_slot: dict[Slot, dict[int, list[Op]]] = {slot: {} for slot, _ in plan.wants}
    for op in plan.ops:
        if op.target.slot not in by_slot:
            raise PlanError(
                "the plan writes into a slot that nobody asked for", found=op.target.slot
            )
        by_slot[op.target.slot].setdefault(op.member, []).append(op)
        for side in op.sources if isinstance(op, Mean) else (op.source,):
            last = side.offset + sum(
                (n - 1) * s for n, s in zip(op.shape, side.strides, strict=True)
            )
            if side.offset < 0 or last >= source.buffers[side.slot.buffer].partition_elems:
                raise PlanError("the plan reads past a source slot", found=side)
    fills: dict[Slot, list[Fill]] = {}
    for fill in plan.fills:
        fills.setdefault(fill.slot, []).append(fill)
    for slot, members in by_slot.items():
        _prove_slot(slot, members, fills.get(slot, []), target)


def _prove_slot(
    slot: Slot, members: dict[int, list[Op]], fills: Iterable[Fill], target: Manifest
) -> None:
    buffer = target.buffers[slot.buffer]
    runs = [(fill.start, fill.stop) for fill in fills]
    for fragment in buffer.fragments(slot.part):
        param = buffer.members[fragment.member].param
        view = target.by_name[param].pieces(_place(target, slot.cut))[0].view
        left = flat_boxes(view, fragment.low, fragment.high)
        for start, stop in [
            run
            for run in runs
            if fragment.offset <= run[0] < fragment.offset + fragment.high - fragment.low
        ]:
            runs.remove((start, stop))
            for box in flat_boxes(
                view, start - fragment.offset + fragment.low, stop - fragment.offset + fragment.low
            ):
                left = _subtract(left, box, param, slot)
        for op in sorted(members.pop(fragment.member, []), key=lambda op: op.box.start):
            if len(op.box.start) != len(view):
                raise PlanError(
                    "a box of the plan has other dims than the parameter",
                    parameter=param,
                    found=op.target,
                )
            left = _subtract(left, op.box, param, slot)
            start = fragment.offset + flat_index(op.box.start, view) - fragment.low
            extents = [(n, s) for n, s in zip(op.box.shape, strides(view), strict=True) if n != 1]
            if start != op.target.offset or sorted(_runs(extents)) != sorted(
                _runs(list(zip(op.shape, op.target.strides, strict=True)))
            ):
                raise PlanError(
                    "an address of the plan disagrees with its box",
                    parameter=param,
                    found=op.target,
                )
        runs.append((fragment.offset, fragment.offset + fragment.high - fragment.low))
        if left:
            raise PlanError(
                "an element of the target has no source",
                parameter=param,
                found=f"{left[0]} of {slot}",
            )
    if members:
        raise PlanError("the plan writes into a parameter that the slot does not own", found=slot)
    at = 0
    for start, stop in sorted(runs):
        if start != at:
            raise PlanError("padding and parameters do not tile a slot", expected=at, found=start)
        at = stop
    if at != buffer.partition_elems:
        raise PlanError(
            "padding and parameters do not tile a slot", expected=buffer.partition_elems, found=at
        )


def _subtract(left: list[Box], box: Box, param: str, slot: Slot) -> list[Box]:
    """`left` without `box`, which must lie inside. Boxes come sorted, so what begins behind `box`
    is not touched."""
    out: list[Box] = []
    taken = 0
    for at, have in enumerate(left):
        if box.start and have.start[0] >= box.stop[0]:
            out += left[at:]
            break
        common = have.meet(box)
        taken += common.numel if common else 0
        out += have.minus(box) if common else [have]
    if taken != box.numel:
        raise PlanError(
            "an element of the target is produced twice, or is not wanted",
            parameter=param,
            found=f"{box} of {slot}",
        )
    return sorted(out, key=lambda b: b.start)


def _runs(extents: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Extents and strides with adjacent dims joined, for a comparison that does not depend on how
    dims were merged."""
    out: list[tuple[int, int]] = []
    for n, s in sorted(extents, key=lambda e: -e[1]):
        if n == 1:
            continue
        if out and out[-1][1] == n * s:
            out[-1] = (out[-1][0] * n, s)
        else:
            out.append((n, s))
    return out
