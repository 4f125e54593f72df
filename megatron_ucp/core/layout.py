"""How one parameter is cut along mesh axes, under the names of the Universal Checkpointing paper
(section 5.3.1).

A layout is a list of cuts, each one along one mesh axis and one dim. What a rank holds is a product
of intervals, one list per dim; every product of single intervals is a `Piece`: the same elements
under a stored and a logical address.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
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
    itself in multiples of `unit`; () is one. `runs` say for each index what it holds (see
    `ShardRuns`), where no rule does."""

    axis: str
    dim: int
    parts: Ints = ()
    unit: int = 1
    runs: HeldRuns = ()

    @property
    def is_fused(self) -> bool:
        return bool(self.parts) or self.unit != 1


class Layout:
    """How a parameter is held. Replicated over every axis that no cut names. `mean_over` names an
    axis whose ranks have a whole copy each, of which the logical value is the mean."""

    mean_over: str = ""

    def cuts(self) -> tuple[Cut, ...]:
        return ()

    @property
    def is_whole(self) -> bool:
        """Whether every rank has all of it, identical bits expected."""
        return False

    @property
    def only_cut(self) -> Cut | None:
        """The cut, where there is one alone."""
        cuts = self.cuts()
        return cuts[0] if len(cuts) == 1 else None

    @property
    def fused(self) -> Cut | None:
        """The only cut, where it is of fused sub-tensors."""
        cut = self.only_cut
        return cut if cut is not None and cut.is_fused else None

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


@dataclass(frozen=True, repr=False)
class Cuts(Layout):
    """Cuts along mesh axes, one after the other; none where every rank has all of it. The paper's
    names are functions that make one, and the names by which a manifest's file calls it.

    Example: gate and up of a gated MLP, of 8 rows each, are `ShardNC("tp", 0, (8, 8))`. The first
    of two tensor-parallel ranks has the rows 0 to 3 and 8 to 11, the other one the rest.
    """

    along: tuple[Cut, ...] = ()
    mean_over: str = ""

    def cuts(self) -> tuple[Cut, ...]:
        return self.along

    @property
    def is_whole(self) -> bool:
        return not self.along and not self.mean_over

    @property
    def named(self) -> tuple[str, dict[str, Any]]:
        """The paper's name for it, and the arguments that make it."""
        if self.mean_over:
            return "Partial", {"axis": self.mean_over}
        if not self.along:
            return "Replicate", {}
        cut = self.only_cut
        if cut is None:
            return "ShardHy", {"along": tuple((cut.axis, cut.dim) for cut in self.along)}
        place = {"axis": cut.axis, "dim": cut.dim}
        if cut.runs:
            return "ShardRuns", {**place, "held": cut.runs}
        if cut.is_fused:
            return "ShardNC", {**place, "parts": cut.parts, "unit": cut.unit}
        return "Shard", place

    def __repr__(self) -> str:
        name, arguments = self.named
        return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"


def Replicate() -> Cuts:
    """Every rank holds the whole parameter, identical bits expected."""
    return Cuts()


def Partial(axis: str) -> Cuts:
    """Every rank of `axis` holds a whole copy of its own; the logical value is the mean of the
    copies."""
    return Cuts(mean_over=axis)


def Shard(axis: str, dim: int) -> Cuts:
    """Equal chunks of `dim` along `axis` (the paper's Shard-V is dim 0, Shard-H dim 1)."""
    return Cuts((Cut(axis, dim),))


def ShardHy(along: Sequence[tuple[str, int]]) -> Cuts:
    """Equal chunks along several axes, cut one after the other in the given order."""
    return Cuts(tuple(Cut(axis, dim) for axis, dim in along))


def ShardNC(axis: str, dim: int, parts: Ints, unit: int = 1) -> Cuts:
    """Fused sub-tensors of the sizes `parts` along `dim`, each one chunked along `axis` in
    multiples of `unit`. A rank's elements are not contiguous in the logical tensor."""
    return Cuts((Cut(axis, dim, parts, unit),))


def ShardRuns(axis: str, dim: int, held: HeldRuns) -> Cuts:
    """Explicit runs of `dim`: rank i of `axis` holds the runs `held[i]`, each one (start, stop), in
    the order of its memory. For shares of different sizes, and for blocks in an order that is no
    cut of fused sub-tensors; a rank may hold none. Together they are the whole dim, each element
    once. On a mesh where the axis has one rank the parameter is whole."""
    return Cuts((Cut(axis, dim, runs=held),))


@dataclass(frozen=True)
class Chunks(Layout):
    """Blocks as another program cut them. Chunk number i holds the blocks `held[i]`, each one as
    (start, stop), joined along `dim`; together the chunks are the whole parameter.

    No mesh axis says who holds which chunk: the member of a buffer does (`Member.chunk`), and
    `place` names it under CHUNK.
    """

    held: Sequence[tuple[tuple[Ints, Ints], ...]]
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

LAYOUTS: dict[str, Callable[..., Layout]] = {
    kind.__name__: kind for kind in (Replicate, Partial, Shard, ShardHy, ShardNC, ShardRuns, Chunks)
}


def layout_to_json(layout: Layout) -> list[Any]:
    """`["Shard", "tp", 0]`: the name, then the arguments in order."""
    if isinstance(layout, Cuts):
        name, arguments = layout.named
        return [name, *arguments.values()]
    return [type(layout).__name__, *vars(layout).values()]


def layout_from_json(data: object) -> Layout:
    """The inverse of `layout_to_json`. Raises LayoutError for anything else."""
    items: list[Any] = cast("list[Any]", data) if isinstance(data, list) else []
    kind = LAYOUTS.get(str(items[0])) if items else None
    try:
        if kind is None:
            raise TypeError
        layout = kind(*(_tuples(item) for item in items[1:]))
        if type(layout.mean_over) is not str or not all(map(_is_cut, layout.cuts())):
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
    sizes = [cut.dim, cut.unit - 1, *cut.parts]  # a part may be empty, as the parameter is then
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
