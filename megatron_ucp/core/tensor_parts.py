"""Parameters as the tensors of another program's files: each tensor is a share of one parameter,
under a name of its own."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from megatron_ucp.core.box import Bounds, Box, Ints
from megatron_ucp.core.flat import FlatBuffer, alone
from megatron_ucp.core.layout import CHUNK, Chunks, Layout, Piece, Replicate
from megatron_ucp.core.manifest import Manifest, ParamSpec
from megatron_ucp.core.mesh import Mesh, Place
from megatron_ucp.core.names import VALUE, Keeper
from megatron_ucp.errors import LayoutError


@dataclass(frozen=True)
class Interleaved(Layout):
    """All of a parameter, of which dim `dim` is `parts` equal parts one after the other: memory has
    the first index of each part, then the second of each, and so on. No axis of a mesh cuts it."""

    dim: int
    parts: int

    def pieces(
        self, name: str, shape: Ints, place: Place, order: Ints | None = None
    ) -> tuple[Piece, ...]:
        """A piece for each part; see `Layout.pieces`. Raises LayoutError."""
        if self.dim >= len(shape) or shape[self.dim] % self.parts:
            raise LayoutError(
                "a dim has no such parts",
                parameter=name,
                expected=f"{self.parts} equal parts of dim {self.dim}",
                found=f"shape {shape}",
            )
        dims = list(range(len(shape)) if order is None else order)
        return tuple(self._piece(shape, dims, part) for part in range(self.parts))

    def _piece(self, shape: Ints, dims: list[int], part: int) -> Piece:
        """One part; the view of the memory has a dim more, the number of the part, behind the dim
        that is in parts."""
        length, behind = shape[self.dim] // self.parts, dims.index(self.dim) + 1
        view = [length if dim == self.dim else shape[dim] for dim in dims]
        view.insert(behind, self.parts)
        first, last = [0] * len(view), list(view)
        first[behind], last[behind] = part, part + 1
        start, stop = [0] * len(shape), list(shape)
        start[self.dim], stop[self.dim] = part * length, (part + 1) * length
        at = map(dims.index, range(len(shape)))
        perm = tuple(place + (place >= behind) for place in at)
        local, full = Box(tuple(first), tuple(last)), Box(tuple(start), tuple(stop))
        return Piece(local, full, tuple(view), perm)


@dataclass(frozen=True)
class Slice:
    """Rows [first, first + rows) of the tensor `tensor`, which has `of` rows. With `rows` 0 it is
    the row `first` alone, without the dim of rows: a matrix of a stack of matrices."""

    tensor: str
    first: int
    rows: int
    of: int

    def whole_shape(self, shape: Ints) -> Ints:
        """The shape of the tensor, of which this slice has a `shape`."""
        return (self.of, *(shape[1:] if self.rows else shape))

    def sliced_shape(self, shape: Ints) -> Ints | None:
        """The shape of this slice of a tensor; None where the tensor has other rows."""
        if shape[:1] != (self.of,) or self.first + max(self.rows, 1) > self.of:
            return None
        return (self.rows, *shape[1:]) if self.rows else shape[1:]

    def first_elem(self, shape: Ints) -> int:
        """Where a slice of this `shape` begins in the tensor."""
        return self.first * math.prod(shape[1:] if self.rows else shape)


@dataclass(frozen=True)
class TensorPart:
    """What a tensor holds of the parameter `param`: chunk `number` of the layout Chunks, or all of
    it where no layout cuts it. `order` are the parameter's dims as the tensor stores them. The
    tensor of a `stacked` share is one slice of the parameter's first dim, and lacks that dim.
    `slice_of` says the tensor that this one is itself a slice of."""

    param: str
    layout: Layout = field(default_factory=Replicate)
    number: int = 0
    order: Ints | None = None
    stacked: bool = False
    slice_of: Slice | None = None

    @property
    def chunk(self) -> int | None:
        """As a buffer's member says it."""
        return self.number if isinstance(self.layout, Chunks) else None

    def held(self, spec: ParamSpec) -> ParamSpec:
        """The parameter as these tensors hold it."""
        return replace(spec, layout=self.layout, order=self.order)

    def stored_shape(self, spec: ParamSpec) -> Ints:
        """Shape of the tensor. Raises LayoutError where the parameter has no such share."""
        count = len(self.layout.held) if isinstance(self.layout, Chunks) else 1
        place = {CHUNK: (count, self.number)}
        local = self.layout.local_shape(spec.name, spec.shape, place)
        if self.order is not None:
            local = tuple(local[dim] for dim in self.order)
        return local[1:] if self.stacked else local

    def boxes(self, shape: Ints, start: Ints, stop: Ints) -> Iterator[Bounds]:
        """The boxes of the parameter, which has a `shape`, in the box [start, stop) of the tensor:
        one after the other along the dim along which the layout joins them."""
        if self.stacked:
            start, stop = (0, *start), (1, *stop)
        if self.order is not None:
            at = [self.order.index(dim) for dim in range(len(self.order))]
            start, stop = (tuple(each[place] for place in at) for each in (start, stop))
        layout = self.layout
        if isinstance(layout, Interleaved):
            length = shape[layout.dim] // layout.parts
            for row in range(start[layout.dim], stop[layout.dim]):
                place = row % layout.parts * length + row // layout.parts
                yield _with(start, layout.dim, place), _with(stop, layout.dim, place + 1)
        elif isinstance(layout, Chunks):
            yield from _of_joined(layout.held[self.number], layout.dim, start, stop)
        else:
            yield start, stop


def _of_joined(boxes: Sequence[Bounds], dim: int, start: Ints, stop: Ints) -> Iterator[Bounds]:
    """What the box [start, stop) of boxes that are joined along `dim` is of each of them."""
    at = 0
    for first, last in boxes:
        width = last[dim] - first[dim]
        low, high = max(start[dim], at), min(stop[dim], at + width)
        if low < high:
            begin, end = (
                tuple(f + n for f, n in zip(first, each, strict=True)) for each in (start, stop)
            )
            yield (
                _with(begin, dim, first[dim] + low - at),
                _with(end, dim, first[dim] + high - at),
            )
        at += width


def _with(at: Ints, dim: int, value: int) -> Ints:
    return (*at[:dim], value, *at[dim + 1 :])


def weights_manifest(
    params: Mapping[str, ParamSpec], tensors: Iterable[tuple[TensorPart, str]]
) -> Manifest:
    """A manifest with a buffer for each tensor, in their order; each tensor has its own dtype.

    `params` are whole parameters by name. Raises LayoutError where a share does not fit.
    """
    specs: dict[str, ParamSpec] = {}
    buffers: list[FlatBuffer] = []
    for share, dtype in tensors:
        spec = params[share.param]
        specs.setdefault(share.param, replace(share.held(spec), dtype=dtype))
        size = math.prod(share.stored_shape(spec))
        buffers.append(alone(share.param, size, ((VALUE, dtype),), axes=(), chunk=share.chunk))
    return Manifest(Keeper.WEIGHTS, Mesh(), tuple(specs.values()), tuple(buffers))


def state_in(source: Manifest, state: str) -> str:
    """The name of a state in a source, for weights: one that holds nothing else has no masters."""
    return VALUE if source.keeper == Keeper.WEIGHTS else state
