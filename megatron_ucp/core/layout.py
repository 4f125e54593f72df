"""How one parameter is cut along mesh axes, under the names of the Universal Checkpointing paper
(section 5.3.1).

A layout is a list of cuts, each one along one mesh axis and one dim. What a rank holds is a product
of intervals, one list per dim; every product of single intervals is a `Piece`: the same elements
under a stored and a logical address.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, cast

from megatron_ucp.core.box import Box, Ints, flat_index, strides
from megatron_ucp.core.mesh import Place
from megatron_ucp.errors import LayoutError


@dataclass(frozen=True, slots=True)
class Piece:
    """One block of elements under two addresses.

    `local` lies in the stored memory read under the shape `view`; `full` lies in the logical
    tensor. Dim i of the logical tensor is dim `perm[i]` of the view; view dims that `perm` leaves
    out have extent 1 in `local`.
    """

    local: Box
    full: Box
    view: Ints
    perm: Ints

    def __post_init__(self) -> None:
        shape = self.local.shape
        kept = tuple(shape[v] for v in self.perm)
        left = [n for v, n in enumerate(shape) if v not in self.perm]
        fits = kept == self.full.shape and math.prod(left) == 1
        if not fits or len(set(self.perm)) != len(self.perm):
            raise ValueError(
                f"piece with local {self.local}, full {self.full}, view {self.view}, perm "
                f"{self.perm}"
            )

    def clip_full(self, box: Box) -> "Piece | None":
        """The part of this piece inside a box of the logical tensor."""
        common = self.full.meet(box)
        if common is None or common == self.full:
            return common and self
        start, stop = list(self.local.start), list(self.local.stop)
        for dim, v in enumerate(self.perm):
            start[v] = self.local.start[v] + common.start[dim] - self.full.start[dim]
            stop[v] = start[v] + common.stop[dim] - common.start[dim]
        return Piece(Box(tuple(start), tuple(stop)), common, self.view, self.perm)

    def clip_local(self, box: Box) -> "Piece | None":
        """The part of this piece inside a box of the view."""
        common = self.local.meet(box)
        if common is None or common == self.local:
            return common and self
        start = tuple(
            self.full.start[d] + common.start[v] - self.local.start[v]
            for d, v in enumerate(self.perm)
        )
        stop = tuple(a + common.shape[v] for a, v in zip(start, self.perm, strict=True))
        return Piece(common, Box(start, stop), self.view, self.perm)

    @property
    def strides(self) -> Ints:
        """Strides in stored memory, in elements, for the dims of the logical tensor."""
        by_view = strides(self.view)
        return tuple(by_view[v] for v in self.perm)

    @property
    def flat_start(self) -> int:
        """Position of the first element in stored memory, in elements."""
        return flat_index(self.local.start, self.view)

    @property
    def flat_stop(self) -> int:
        """Position after the last element in stored memory, in elements."""
        return flat_index(tuple(b - 1 for b in self.local.stop), self.view) + 1


HeldRuns = tuple[tuple[tuple[int, int], ...], ...]  # of each index: (start, stop), ...


@dataclass(frozen=True, slots=True)
class Cut:
    """One cut of a dim along a mesh axis. `parts` are the sizes of fused sub-tensors, each cut for
    itself; () is one. `runs` say for each index what it holds (see `ShardRuns`), where no rule
    does."""

    axis: str
    dim: int
    parts: Ints = ()
    unit: int = 1
    runs: HeldRuns = ()


@dataclass(frozen=True)
class Layout:
    """Base of the layouts. Replicated over every axis that no cut names."""

    def cuts(self) -> tuple[Cut, ...]:
        return ()

    @property
    def axes(self) -> frozenset[str]:
        return frozenset(cut.axis for cut in self.cuts())

    def pieces(
        self, name: str, shape: Ints, place: Place, order: Ints | None = None
    ) -> tuple[Piece, ...]:
        """What the rank at `place` holds of a tensor of `shape`, in the order of the stored memory.

        `order` gives the dims of the logical tensor in the order in which the memory stores them (a
        transposed parameter has (1, 0)). Raises LayoutError where a size does not divide.
        """
        held = self._spans(name, shape, place)
        local = tuple(sum(b - a for a, b in spans) for spans in held)
        dims, view, perm = _in_memory(local, order)
        out: list[Piece] = []
        for spans in itertools.product(*[_with_local(held[d]) for d in dims]):
            stored = Box(tuple(s[0] for s in spans), tuple(s[0] + s[2] - s[1] for s in spans))
            full = Box(tuple(spans[v][1] for v in perm), tuple(spans[v][2] for v in perm))
            out.append(Piece(stored, full, view, perm))
        return tuple(out)

    def _fitting_cuts(self, name: str, shape: Ints) -> Iterator[Cut]:
        """The cuts; raises LayoutError for one of a dim that a parameter does not have."""
        for cut in self.cuts():
            if cut.dim >= len(shape):
                raise LayoutError(
                    "the layout cuts a dim that the parameter does not have",
                    parameter=name,
                    expected=f"at least {cut.dim + 1} dims",
                    found=f"shape {shape}",
                )
            yield cut

    def _spans(self, name: str, shape: Ints, place: Place) -> list[list[tuple[int, int]]]:
        """What the rank at `place` holds of each dim."""
        held = [[(0, size)] for size in shape]
        for cut in self._fitting_cuts(name, shape):
            held[cut.dim] = _cut(name, held[cut.dim], cut, *place.get(cut.axis, (1, 0)))
        return held

    def local_shape(self, name: str, shape: Ints, place: Place) -> Ints:
        """Shape of the tensor that the rank at `place` holds, in logical dim order."""
        out = list(shape)
        for cut in self._fitting_cuts(name, shape):
            size, index = place.get(cut.axis, (1, 0))
            spans = _cut(name, [(0, out[cut.dim])], replace(cut, parts=()), size, index)
            out[cut.dim] = sum(stop - start for start, stop in spans)
        return tuple(out)


def _in_memory(local: Ints, order: Ints | None) -> tuple[Ints, Ints, Ints]:
    """The dims of a tensor of shape `local` as memory stores them, its shape there, and where each
    dim is among them."""
    dims = tuple(range(len(local))) if order is None else order
    view = tuple(local[d] for d in dims)
    return dims, view, tuple(dims.index(d) for d in range(len(local)))


def _with_local(spans: list[tuple[int, int]]) -> list[tuple[int, int, int]]:
    out: list[tuple[int, int, int]] = []
    at = 0
    for a, b in spans:
        out.append((at, a, b))
        at += b - a
    return out


def _cut(
    name: str, spans: list[tuple[int, int]], cut: Cut, size: int, index: int
) -> list[tuple[int, int]]:
    """The index-th of `size` equal chunks of the spans, part by part."""
    length = sum(b - a for a, b in spans)
    if cut.runs:
        return _explicit(name, length, cut, size, index)
    parts = cut.parts or (length,)
    if sum(parts) != length:
        raise LayoutError(
            "the fused parts do not add up to the dim",
            parameter=name,
            expected=f"dim {cut.dim} of {sum(parts)} elements",
            found=f"{length}",
        )
    out: list[tuple[int, int]] = []
    base = 0
    for part in parts:
        if part % (size * cut.unit):
            raise LayoutError(
                f"dim {cut.dim} can't be cut along the mesh axis {cut.axis}",
                parameter=name,
                expected=f"a multiple of {size} ({cut.axis}) x {cut.unit} (unit)",
                found=part,
                fix=f"choose a {cut.axis} size that divides {part // cut.unit}",
                id="does-not-divide",
            )
        width = part // size
        out += _span_range(spans, base + index * width, base + (index + 1) * width)
        base += part
    return out


def _explicit(name: str, length: int, cut: Cut, size: int, index: int) -> list[tuple[int, int]]:
    """What a dim's `runs` say of one rank; where the axis has one rank, that it holds all."""
    if size == 1:
        return [(0, length)]
    if size != len(cut.runs):
        raise LayoutError(
            f"dim {cut.dim} is cut into explicit shares of another number of ranks",
            parameter=name,
            expected=f"{cut.axis}={len(cut.runs)}, or 1",
            found=f"{cut.axis}={size}",
            fix="load into an engine, which says itself how its parameters are cut",
        )
    at = 0
    for start, stop in sorted(itertools.chain.from_iterable(cut.runs)):
        if start != at:
            break
        at = stop
    if at != length:
        raise LayoutError(
            f"the explicit shares of dim {cut.dim} don't follow each other to its end",
            parameter=name,
            expected=f"each of {length} elements once",
            found=f"up to element {at} only",
        )
    return list(cut.runs[index])


def _span_range(spans: list[tuple[int, int]], low: int, high: int) -> list[tuple[int, int]]:
    """Elements [low, high) of the concatenated spans; neighbours that touch are joined."""
    out: list[tuple[int, int]] = []
    at = 0
    for a, b in spans:
        first, last = max(low, at), min(high, at + b - a)
        if first < last:
            span = (a + first - at, a + last - at)
            if out and out[-1][1] == span[0]:
                out[-1] = (out[-1][0], span[1])
            else:
                out.append(span)
        at += b - a
    return out


@dataclass(frozen=True)
class Replicate(Layout):
    """Every rank holds the whole parameter, identical bits expected."""


@dataclass(frozen=True)
class Partial(Layout):
    """Every rank of `axis` holds a whole copy of its own; the logical value is the mean of the
    copies."""

    axis: str


@dataclass(frozen=True)
class Shard(Layout):
    """Equal chunks of `dim` along `axis` (the paper's Shard-V is dim 0, Shard-H dim 1)."""

    axis: str
    dim: int

    def cuts(self) -> tuple[Cut, ...]:
        return (Cut(self.axis, self.dim),)


@dataclass(frozen=True)
class ShardHy(Layout):
    """Equal chunks along several axes, cut one after the other in the given order."""

    along: tuple[tuple[str, int], ...]

    def cuts(self) -> tuple[Cut, ...]:
        return tuple(Cut(axis, dim) for axis, dim in self.along)


@dataclass(frozen=True)
class ShardNC(Layout):
    """Fused sub-tensors of the sizes `parts` along `dim`, each one chunked along `axis` in
    multiples of `unit`.

    A rank's elements are not contiguous in the logical tensor: gate and up of a gated MLP are parts
    (F, F).
    """

    axis: str
    dim: int
    parts: Ints
    unit: int = 1

    def cuts(self) -> tuple[Cut, ...]:
        return (Cut(self.axis, self.dim, self.parts, self.unit),)


@dataclass(frozen=True)
class ShardRuns(Layout):
    """Explicit runs of `dim`: rank i of `axis` holds the runs `held[i]`, each one (start, stop), in
    the order of its memory. For shares of different sizes, and for blocks in an order that is no
    cut of fused sub-tensors; a rank may hold none. Together they are the whole dim, each element
    once. On a mesh where the axis has one rank the parameter is whole.
    """

    axis: str
    dim: int
    held: HeldRuns

    def cuts(self) -> tuple[Cut, ...]:
        return (Cut(self.axis, self.dim, runs=self.held),)


@dataclass(frozen=True)
class Chunks(Layout):
    """Blocks as another program cut them. Chunk number i holds the blocks `held[i]`, each one as
    (start, stop), joined along `dim`; together the chunks are the whole parameter.

    No mesh axis says who holds which chunk: the member of a buffer does (`Member.chunk`), and
    `place` names it under CHUNK.
    """

    held: tuple[tuple[tuple[Ints, Ints], ...], ...]
    dim: int = 0

    def pieces(
        self, name: str, shape: Ints, place: Place, order: Ints | None = None
    ) -> tuple[Piece, ...]:
        boxes = self._boxes(name, shape, place)
        local = self._joined(name, boxes)
        dims, view, perm = _in_memory(local, order)
        out: list[Piece] = []
        at = 0
        for box in boxes:
            first = [at if d == self.dim else 0 for d in dims]
            last = [a + box.shape[d] for a, d in zip(first, dims, strict=True)]
            out.append(Piece(Box(tuple(first), tuple(last)), box, view, perm))
            at += box.shape[self.dim] if box.shape else 0
        return tuple(out)

    def local_shape(self, name: str, shape: Ints, place: Place) -> Ints:
        return self._joined(name, self._boxes(name, shape, place))

    def _boxes(self, name: str, shape: Ints, place: Place) -> list[Box]:
        """The blocks of one chunk. Raises LayoutError for one outside of the parameter."""
        _, number = place.get(CHUNK, (1, 0))
        if not 0 <= number < len(self.held):
            raise LayoutError(
                "the parameter has no such chunk",
                parameter=name,
                expected=f"0 to {len(self.held) - 1}",
                found=number,
            )
        boxes = [Box(start, stop) for start, stop in self.held[number]]
        for box in boxes:
            if len(box.stop) != len(shape) or any(
                a > b for a, b in zip(box.stop, shape, strict=True)
            ):
                raise LayoutError(
                    "a chunk lies outside of its parameter",
                    parameter=name,
                    expected=f"inside of {shape}",
                    found=f"{box.start} to {box.stop}",
                )
        return boxes

    def _joined(self, name: str, boxes: list[Box]) -> Ints:
        """The shape of the blocks joined along `dim`. Raises LayoutError where they don't fit."""
        rest = {tuple(n for d, n in enumerate(box.shape) if d != self.dim) for box in boxes}
        if len(rest) != 1 or (boxes[0].shape and self.dim >= len(boxes[0].shape)):
            raise LayoutError(
                "the blocks of a chunk can't be joined",
                parameter=name,
                expected=f"blocks of one size in all dims but {self.dim}",
                found=", ".join(str(box.shape) for box in boxes) or "no block",
            )
        length = sum(box.shape[self.dim] for box in boxes if box.shape)
        return tuple(length if d == self.dim else n for d, n in enumerate(boxes[0].shape))


CHUNK = "chunk"  # what `place` calls the number of a chunk; no mesh has an axis of this name

LAYOUTS: dict[str, type[Layout]] = {
    kind.__name__: kind for kind in (Replicate, Partial, Shard, ShardHy, ShardNC, ShardRuns, Chunks)
}


def same_layout(one: Layout, other: Layout) -> bool:
    """Whether two layouts put the same elements at the same places."""
    if one == other:
        return True
    said_by_cuts = all(type(each).pieces is Layout.pieces for each in (one, other))
    if not said_by_cuts or isinstance(one, Partial) or isinstance(other, Partial):
        return False
    return one.cuts() == other.cuts()


def layout_to_json(layout: Layout) -> list[Any]:
    """`["Shard", "tp", 0]`: the name, then the fields in order."""
    return [type(layout).__name__, *(getattr(layout, name) for name in layout.__dataclass_fields__)]


def layout_from_json(data: object) -> Layout:
    """The inverse of `layout_to_json`. Raises LayoutError for anything else."""
    items: list[Any] = cast("list[Any]", data) if isinstance(data, list) else []
    kind = LAYOUTS.get(str(items[0])) if items else None
    try:
        if kind is None:
            raise TypeError
        layout = kind(*(_tuples(item) for item in items[1:]))
        axis = getattr(layout, "axis", "")
        if not isinstance(axis, str) or not all(map(_is_cut, layout.cuts())):
            raise TypeError
        if isinstance(layout, Chunks):
            _check_chunks(layout)
        return layout
    except (TypeError, ValueError):
        raise LayoutError("no layout", expected=" or ".join(LAYOUTS), found=repr(items)) from None


def _check_chunks(layout: Chunks) -> None:
    """Raises TypeError or ValueError for what a file says that are no boxes."""
    if type(layout.dim) is not int or layout.dim < 0:
        raise TypeError
    for start, stop in itertools.chain.from_iterable(layout.held):
        Box(start, stop)
        if not all(type(bound) is int for bound in (*start, *stop)):
            raise TypeError


def _is_cut(cut: Cut) -> bool:
    """Whether the fields of a cut that came from a file are of their types and sizes."""
    sizes = [cut.dim, cut.unit - 1, *(part - 1 for part in cut.parts)]
    for start, stop in itertools.chain.from_iterable(cut.runs):
        sizes += [start, stop - start - 1]
    return type(cut.axis) is str and all(type(size) is int and size >= 0 for size in sizes)


def _tuples(value: Any) -> Any:
    return (
        tuple(_tuples(item) for item in cast("list[Any]", value))
        if isinstance(value, list)
        else value
    )


@dataclass(frozen=True, slots=True)
class Extent:
    """Padding of dim 0 of a logical parameter (vocabulary): `true` rows are data, `stored` rows
    exist."""

    true: int
    stored: int

    def __post_init__(self) -> None:
        if not 0 < self.true <= self.stored:
            raise ValueError(f"extent with {self.true} true of {self.stored} stored rows")
