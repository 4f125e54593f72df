"""Half-open n-d boxes of tensor indices and flat row-major ranges."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from operator import le, lt, mul, sub

Ints = tuple[int, ...]
Bounds = tuple[Ints, Ints]  # of a box: [start, stop)


@dataclass(frozen=True, slots=True)
class Box:
    """The indices i with `start <= i < stop` in every dim. A 0-d box holds one element."""

    start: Ints
    stop: Ints

    def __post_init__(self) -> None:
        fits = len(self.start) == len(self.stop) and all(map(le, self.start, self.stop))
        if not fits or min(self.start, default=0) < 0:
            raise ValueError(f"no box: start {self.start}, stop {self.stop}")

    @property
    def shape(self) -> Ints:
        return tuple(map(sub, self.stop, self.start))

    @property
    def numel(self) -> int:
        return math.prod(map(sub, self.stop, self.start))

    def meet(self, other: "Box") -> "Box | None":
        """The common box, or None where nothing is common."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        return Box(start, stop) if all(map(lt, start, stop)) else None

    def moved(self, origin: Ints, target: Ints) -> "Box":
        """This box after the shift that takes the point `origin` to the point `target`."""
        delta = [t - o for o, t in zip(origin, target, strict=True)]
        return Box(
            tuple(a + d for a, d in zip(self.start, delta, strict=True)),
            tuple(b + d for b, d in zip(self.stop, delta, strict=True)),
        )

    def minus(self, other: "Box") -> list["Box"]:
        """The disjoint boxes that are left of this one without `other`, in row-major order of their
        starts."""
        common = self.meet(other)
        if common is None:
            return [self]
        before: list[Box] = []
        after: list[Box] = []
        start, stop = list(self.start), list(self.stop)
        for dim in range(len(start)):
            if start[dim] < common.start[dim]:
                before.append(
                    Box(tuple(start), tuple([*stop[:dim], common.start[dim], *stop[dim + 1 :]]))
                )
            if common.stop[dim] < stop[dim]:
                after.append(
                    Box(tuple([*start[:dim], common.stop[dim], *start[dim + 1 :]]), tuple(stop))
                )
            start[dim], stop[dim] = common.start[dim], common.stop[dim]
        return before + after[::-1]


def whole(shape: Iterable[int]) -> Box:
    """The box of a whole tensor."""
    stop = tuple(shape)
    return Box((0,) * len(stop), stop)


@lru_cache(maxsize=4096)  # a model has few shapes, and a plan asks for them at every box
def strides(shape: Ints) -> Ints:
    """Row-major strides in elements."""
    out = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        out[dim] = out[dim + 1] * shape[dim + 1]
    return tuple(out)


def span(shape: Ints, steps: Ints) -> int:
    """Elements of memory from the first to the last one of a region with these strides, gaps
    included."""
    return 1 + sum((n - 1) * step for n, step in zip(shape, steps, strict=True))


def flat_index(point: Ints, shape: Ints) -> int:
    """Row-major position of a point."""
    if len(point) != len(shape):
        raise ValueError(f"{point} is no point of a tensor of shape {shape}")
    return sum(map(mul, point, strides(shape)))


def flat_boxes(shape: Ints, low: int, high: int) -> list[Box]:
    """The flat row-major range [low, high) of a tensor as disjoint boxes in order: at most 2n - 1
    of them for n dims."""
    if not 0 <= low <= high <= math.prod(shape):
        raise ValueError(f"the range [{low}, {high}) does not lie in a tensor of shape {shape}")
    if low == high:
        return []
    if len(shape) <= 1:
        return [Box((low,), (high,))] if shape else [Box((), ())]
    inner = math.prod(shape[1:])
    (row0, rest0), (row1, rest1) = divmod(low, inner), divmod(high, inner)

    def one_row(row: int, a: int, b: int) -> list[Box]:
        return [Box((row, *box.start), (row + 1, *box.stop)) for box in flat_boxes(shape[1:], a, b)]

    if row0 == row1:
        return one_row(row0, rest0, rest1)
    out: list[Box] = []
    if rest0:
        out += one_row(row0, rest0, inner)
        row0 += 1
    if row0 < row1:
        out.append(Box((row0,) + (0,) * (len(shape) - 1), (row1, *shape[1:])))
    if rest1:
        out += one_row(row1, 0, rest1)
    return out


def dims_in_memory(shape: Ints, strides: Ints) -> Ints | None:
    """The dims of a tensor in the order in which its memory stores them; None where the memory has
    gaps, or one element for several places. Dims of size 1 do not count: they stay where a tensor
    in C order has them."""
    natural = tuple(range(len(shape)))
    if 0 in shape:
        return natural
    order = tuple(sorted(natural, key=lambda dim: (-strides[dim], dim)))
    long = [dim for dim in order if shape[dim] > 1]
    expected = 1
    for dim in reversed(long):
        if strides[dim] != expected:
            return None
        expected *= shape[dim]
    if long == sorted(long):
        return natural
    return (*(dim for dim in natural if shape[dim] == 1), *long)
