"""The proof that a plan produces every target element exactly once."""

from collections.abc import Iterable
from functools import lru_cache

from megatron_ucp.core.box import Box, Ints, flat_boxes, flat_index, strides
from megatron_ucp.core.flat import Fragment
from megatron_ucp.core.grouping import grouped
from megatron_ucp.core.manifest import Manifest
from megatron_ucp.core.plan import Fill, Mean, Op, Plan, Slot
from megatron_ucp.errors import PlanError


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
        if isinstance(op, Mean):
            _prove_mean(op, source, target)
        for side in op.sources:
            last = side.offset + sum(
                (n - 1) * s for n, s in zip(op.shape, side.strides, strict=True)
            )
            held = source.buffers[side.slot.buffer].of(side.slot.state)
            if side.offset < 0 or last >= held.elems(side.slot.part):
                raise PlanError("the plan reads past a source slot", found=side)
    fills = grouped((fill.slot, fill) for fill in plan.fills)
    for slot, members in by_slot.items():
        _prove_slot(slot, members, fills.get(slot, []), target)


def _prove_mean(op: Mean, source: Manifest, target: Manifest) -> None:
    """A mean is over every copy that the source's ranks have, each of them once."""
    name = target.member(op.target.slot.buffer, op.member).param
    layout = source.by_name[name].layout
    copies = source.mesh.size(layout.mean_over) if layout.mean_over else 0
    slots = {side.slot for side in op.sources}
    if not len(slots) == len(op.sources) == copies:
        raise PlanError(
            "a mean does not name every copy",
            parameter=name,
            expected=copies,
            found=f"{len(slots)} of them, {len(op.sources)} summands",
        )


def _prove_slot(
    slot: Slot, members: dict[int, list[Op]], fills: Iterable[Fill], target: Manifest
) -> None:
    buffer = target.buffers[slot.buffer].of(slot.state)
    runs = [(fill.start, fill.stop) for fill in fills]
    for fragment in buffer.fragments(slot.part):
        stop = fragment.offset + fragment.high - fragment.low
        inside = [run for run in runs if fragment.offset <= run[0] < stop]
        runs = [run for run in runs if run not in inside]
        _prove_fragment(slot, fragment, members.pop(fragment.member, []), inside, target)
        runs.append((fragment.offset, stop))
    if members:
        raise PlanError("the plan writes into a parameter that the slot does not own", found=slot)
    _prove_tiled(runs, buffer.elems(slot.part))


def _prove_fragment(
    slot: Slot, fragment: Fragment, ops: list[Op], fills: list[tuple[int, int]], target: Manifest
) -> None:
    """Every element that a slot owns of one parameter is copied or filled, once, and at the address
    that its box says."""
    member = target.member(slot.buffer, fragment.member)
    view = target.pieces(member, slot.cut)[0].view
    at, first = fragment.offset, fragment.low
    zeros = tuple((start - at + first, stop - at + first) for start, stop in fills)
    moves = tuple(
        (op.box, op.shape, op.target.strides, op.target.offset - at + first)
        for op in sorted(ops, key=lambda op: op.box.start)
    )
    if fault := _fault(view, fragment.low, fragment.high, zeros, moves):
        what, box = fault
        raise PlanError(what, parameter=member.param, found=f"{box} of {slot}")


_Moves = tuple[tuple[Box, Ints, Ints, int], ...]  # box, shape, strides, first element


@lru_cache(maxsize=64)
def _fault(
    view: Ints, low: int, high: int, zeros: tuple[tuple[int, int], ...], moves: _Moves
) -> tuple[str, Box] | None:
    """What is wrong with the sorted copies and zeros that make elements [low, high) of a tensor of
    shape `view`, and where. All numbers count from its first element: the layers of a model are
    alike, and are proved once."""
    left = flat_boxes(view, low, high)
    filled = [box for bounds in zeros for box in flat_boxes(view, *bounds)]
    for box in (*filled, *(move[0] for move in moves)):
        if len(box.start) != len(view):
            return "a box of the plan has other dims than the parameter", box
        rest = _subtract(left, box)
        if rest is None:
            return "an element of the target is produced twice, or is not wanted", box
        left = rest
    for box, shape, found, offset in moves:
        if not _is_addressed(box, view, shape, found, offset):
            return "an address of the plan disagrees with its box", box
    return ("an element of the target has no source", left[0]) if left else None


def _is_addressed(box: Box, view: Ints, shape: Ints, found: Ints, offset: int) -> bool:
    """Whether an offset, and the strides `found` for `shape`, are those of a box of a tensor."""
    extents = [(n, s) for n, s in zip(box.shape, strides(view), strict=True) if n != 1]
    pairs = list(zip(shape, found, strict=True))
    return offset == flat_index(box.start, view) and sorted(_runs(extents)) == sorted(_runs(pairs))


def _prove_tiled(runs: list[tuple[int, int]], elems: int) -> None:
    """Parameters and padding follow each other without a gap."""
    at = 0
    for start, stop in sorted(runs):
        if start != at:
            raise PlanError("padding and parameters do not tile a slot", expected=at, found=start)
        at = stop
    if at != elems:
        raise PlanError("padding and parameters do not tile a slot", expected=elems, found=at)


def _subtract(left: list[Box], box: Box) -> list[Box] | None:
    """`left` without `box`; None where that does not lie inside. Boxes come sorted, so what begins
    behind `box` is not touched."""
    out: list[Box] = []
    taken = 0
    for at, have in enumerate(left):
        if box.start and have.start[0] >= box.stop[0]:
            out += left[at:]
            break
        common = have.meet(box)
        taken += common.numel if common else 0
        out += have.minus(box) if common else [have]
    return sorted(out, key=lambda b: b.start) if taken == box.numel else None


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
