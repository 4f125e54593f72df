"""The flat buffers of Megatron-core's DistributedDataParallel as arithmetic: where each parameter
lies in them, and how the DistributedOptimizer cuts them into buckets. Counted in elements.

Source: `_ParamAndGradBuffer` of megatron-core 0.16.1 (`distributed/param_and_grad_buffer.py`); the
rule is the same from 0.10 on.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

PARAM_ALIGNMENT = 64  # each parameter begins at a multiple
BUCKET_ALIGNMENT = 128  # each bucket ends at a multiple, of the number of ranks too
WIDE_ALIGNMENT = 2**16  # the same with `pad_buckets_for_high_nccl_busbw`
_LEAST_CAP, _CAP_PER_RANK = 40_000_000, 1_000_000


@dataclass(frozen=True, slots=True)
class Registered:
    """A parameter as a model registered it: the elements that a rank has. `alone`: it gets a bucket
    of its own, as embedding and head do that several pipeline stages share."""

    name: str
    elems: int
    alone: bool = False


@dataclass(frozen=True, slots=True)
class Bucket:
    """Elements [start, stop) of the buffer, of which the first `used` are not end padding."""

    start: int
    stop: int
    used: int


@dataclass(frozen=True, slots=True)
class InBuffer:
    """Where a parameter begins in the buffer, its elements, and the number of its bucket."""

    name: str
    start: int
    elems: int
    bucket: int


@dataclass(frozen=True)
class GradBuffer:
    """One buffer: its parameters in the order of their places, and its buckets."""

    params: tuple[InBuffer, ...]
    buckets: tuple[Bucket, ...]

    def unpadded_start(self, param: InBuffer) -> int:
        """Where a parameter begins in a file that holds the buckets one after the other, each
        without its end padding."""
        before = sum(bucket.used for bucket in self.buckets[: param.bucket])
        return before + param.start - self.buckets[param.bucket].start

    def starts(self, bucket: int) -> dict[InBuffer, int]:
        """The parameters of a bucket, and where each begins in it."""
        first = self.buckets[bucket].start
        return {param: param.start - first for param in self.params if param.bucket == bucket}


def bucket_cap(ranks: int, overlaps: bool, said: int | None, stage: int, chunk: int) -> int | None:
    """The elements from which on a bucket is closed; None: all is one bucket. Only the first chunk
    of the first pipeline stage has several."""
    if not overlaps or stage or chunk:
        return None
    return said or max(_LEAST_CAP, _CAP_PER_RANK * ranks)


def grad_buffer(
    params: Sequence[Registered],
    ranks: int,
    cap: int | None = None,
    *,
    distributed: bool = True,
    wide: bool = False,
) -> GradBuffer:
    """The buffer for parameters in the order in which the model registered them: they lie in it in
    the reverse order, as gradients become ready. `ranks` share it; without the DistributedOptimizer
    nothing is padded and nothing has a bucket of its own."""
    builder = _Builder(math.lcm(ranks, BUCKET_ALIGNMENT, WIDE_ALIGNMENT if wide else 1))
    for param in reversed(params):
        builder.add(param, cap, distributed)
    builder.close(builder.at, distributed)
    return GradBuffer(tuple(builder.params), tuple(builder.buckets))


class _Builder:
    """A buffer on its way: `at` is where the next parameter may begin, `first` where the open
    bucket does."""

    def __init__(self, alignment: int) -> None:
        self.alignment = alignment
        self.params: list[InBuffer] = []
        self.buckets: list[Bucket] = []
        self.at = self.first = 0
        self.is_empty = True

    def add(self, param: Registered, cap: int | None, distributed: bool) -> None:
        alone = param.alone and distributed
        if distributed:
            self.at = _rounded(self.at, PARAM_ALIGNMENT)
        if alone:
            self.close(self.at, distributed)
        start, stop = self.at, self.at + param.elems
        self.params.append(InBuffer(param.name, start, param.elems, len(self.buckets)))
        self.at, self.is_empty = stop, False
        if alone or (cap is not None and stop - self.first >= cap):
            self.close(stop, distributed)

    def close(self, stop: int, distributed: bool) -> None:
        """Ends the open bucket, where anything is in it."""
        if self.is_empty:
            return
        end = _rounded(stop, self.alignment) if distributed else stop
        self.buckets.append(Bucket(self.first, end, stop - self.first))
        self.at = self.first = end
        self.is_empty = True


def _rounded(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
