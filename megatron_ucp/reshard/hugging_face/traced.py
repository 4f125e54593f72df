"""What other programs' functions do to a tensor, found without one: where each element of the
results comes from.

A `Traced` stands for a tensor in calls of `torch.cat`, `torch.stack`, `torch.chunk`, `torch.split`
and `torch.transpose`, and in the methods of tensors that move elements. It has parts: each a block
of its own shape, and the strided run of some named tensor that lies there. So cutting a tensor of 8
experts into 8 matrices makes 8 `Traced` of one part each, which begin at element 0, 1 x the size of
a matrix, ... of that tensor.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from megatron_ucp.core.box import Ints


class UntracedError(Exception):
    """A function did something that no parts can say."""


@dataclass(frozen=True)
class TracedPart:
    """The block of `extent` elements that begins at `start`: its element (i, j, ...) is element
    `offset` + i * strides[0] + j * strides[1] + ... of the tensor `name`."""

    start: Ints
    extent: Ints
    name: str
    offset: int
    strides: Ints


def contiguous_strides(shape: Sequence[int]) -> Ints:
    """Of memory without gaps, in elements."""
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


class Traced:
    """A tensor of which the places of its elements are known, and no values."""

    def __init__(self, shape: Sequence[int], parts: Sequence[TracedPart]) -> None:
        self.shape, self.parts = torch.Size(shape), tuple(parts)

    @classmethod
    def whole(cls, name: str, shape: Sequence[int]) -> "Traced":
        """All of the tensor `name`."""
        strides = contiguous_strides(shape)
        return cls(shape, [TracedPart((0,) * len(shape), tuple(shape), name, 0, strides)])

    # ---- what functions ask of a tensor

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def dim(self) -> int:
        return len(self.shape)

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> int:
        return math.prod(self.shape)

    def contiguous(self) -> "Traced":
        return self

    def __getitem__(self, index: object) -> "Traced":
        if isinstance(index, int) and 0 <= index < self.shape[0]:
            return self._between(0, index, index + 1).squeeze(0)
        raise UntracedError(f"index {index!r}")

    def squeeze(self, dim: int) -> "Traced":
        at = self._dim(dim)
        if self.shape[at] != 1:
            return self
        return self._each(lambda ints: (*ints[:at], *ints[at + 1 :]))

    def unsqueeze(self, dim: int) -> "Traced":
        at = dim % (len(self.shape) + 1)
        parts = [
            replace(
                part,
                start=(*part.start[:at], 0, *part.start[at:]),
                extent=(*part.extent[:at], 1, *part.extent[at:]),
                strides=(*part.strides[:at], 0, *part.strides[at:]),
            )
            for part in self.parts
        ]
        return Traced((*self.shape[:at], 1, *self.shape[at:]), parts)

    def transpose(self, dim0: int, dim1: int) -> "Traced":
        order = list(range(len(self.shape)))
        one, two = self._dim(dim0), self._dim(dim1)
        order[one], order[two] = two, one
        return self._each(lambda ints: tuple(ints[dim] for dim in order))

    def chunk(self, chunks: int, dim: int = 0) -> "list[Traced]":
        length = -(-self.shape[self._dim(dim)] // chunks)
        return self.split(length, dim)

    def split(self, split_size: int | Sequence[int], dim: int = 0) -> "list[Traced]":
        at = self._dim(dim)
        whole = self.shape[at]
        sizes = (
            [min(split_size, whole - low) for low in range(0, whole, max(split_size, 1))]
            if isinstance(split_size, int)
            else [*split_size]
        )
        if sum(sizes) != whole:
            raise UntracedError(f"parts of {sizes} of {whole}")
        ends = [sum(sizes[: number + 1]) for number in range(len(sizes))]
        return [self._between(at, end - size, end) for end, size in zip(ends, sizes, strict=True)]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        call = _FUNCTIONS.get(func)
        if call is None:
            raise UntracedError(getattr(func, "__name__", repr(func)))
        return call(*args, **(kwargs or {}))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise UntracedError(name)

    # ---- parts

    def _dim(self, dim: int) -> int:
        if not -len(self.shape) <= dim < len(self.shape):
            raise UntracedError(f"dim {dim} of {len(self.shape)}")
        return dim % len(self.shape)

    def _each(self, change: Callable[[Ints], Ints]) -> "Traced":
        """With other dims, the same ones of everything."""
        parts = [
            replace(
                part,
                start=change(part.start),
                extent=change(part.extent),
                strides=change(part.strides),
            )
            for part in self.parts
        ]
        return Traced(change(tuple(self.shape)), parts)

    def _between(self, dim: int, low: int, high: int) -> "Traced":
        """What lies in [low, high) of a dim."""
        parts = [*self._cut(dim, low, high)]
        shape = list(self.shape)
        shape[dim] = high - low
        return Traced(shape, parts)

    def _cut(self, dim: int, low: int, high: int) -> Iterator[TracedPart]:
        for part in self.parts:
            first = max(part.start[dim], low)
            last = min(part.start[dim] + part.extent[dim], high)
            if first >= last:
                continue
            start, extent = list(part.start), list(part.extent)
            start[dim], extent[dim] = first - low, last - first
            offset = part.offset + (first - part.start[dim]) * part.strides[dim]
            yield replace(part, start=tuple(start), extent=tuple(extent), offset=offset)


def _cat(tensors: Sequence[Traced], dim: int = 0) -> Traced:
    first, at = tensors[0], tensors[0]._dim(dim)  # pyright: ignore[reportPrivateUsage]
    parts: list[TracedPart] = []
    length = 0
    for one in tensors:
        others = [n for d, n in enumerate(one.shape) if d != at]
        if others != [n for d, n in enumerate(first.shape) if d != at]:
            raise UntracedError(f"shapes {tuple(first.shape)} and {tuple(one.shape)}")
        for part in one.parts:
            start = list(part.start)
            start[at] += length
            parts.append(replace(part, start=tuple(start)))
        length += one.shape[at]
    shape = list(first.shape)
    shape[at] = length
    return Traced(shape, parts)


def _stack(tensors: Sequence[Traced], dim: int = 0) -> Traced:
    return _cat([one.unsqueeze(dim) for one in tensors], dim)


_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    torch.cat: _cat,
    torch.stack: _stack,
    torch.chunk: lambda tensor, chunks, dim=0: tensor.chunk(chunks, dim),
    torch.split: lambda tensor, sizes, dim=0: tensor.split(sizes, dim),
    torch.transpose: lambda tensor, dim0, dim1: tensor.transpose(dim0, dim1),
}
