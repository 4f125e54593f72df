"""Carries out a plan: reads byte ranges of files into tensors, in place where both sides are
contiguous, else through one staging buffer of bounded size."""

import ctypes
import functools
import itertools
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from mmap import PAGESIZE
from typing import Any, cast

import numpy as np
import torch
from isal import isal_zlib

from megatron_ucp.core.box import Ints, span, strides
from megatron_ucp.core.plan import Cast, Copy, Fill, Mean, Op, Plan, Side, Slot
from megatron_ucp.core.values import InertObject
from megatron_ucp.errors import UnsupportedError
from megatron_ucp.formats.byte_files import Record, Where
from megatron_ucp.formats.pt.refs import ITEMSIZE, TensorRef
from megatron_ucp.formats.store import is_url
from megatron_ucp.reshard.checksums import CRC_CHUNK_BYTES, SummedRun
from megatron_ucp.reshard.findings import Progress

# ---- pages
#
# Pages of this process's memory: what the system is told of them.


POPULATE = 23  # MADV_POPULATE_WRITE of Linux 5.14
_MADVISE = ctypes.CDLL(None).madvise if sys.platform == "linux" else None


def advise(start: int, stop: int, advice: int) -> None:
    """Tells the system about the whole pages of addresses [start, stop). One that does not know the
    advice refuses it without harm."""
    first, last = -(-start // PAGESIZE) * PAGESIZE, stop // PAGESIZE * PAGESIZE
    if _MADVISE is not None and first < last:
        _MADVISE(ctypes.c_void_p(first), ctypes.c_size_t(last - first), advice)


# ---- execute
#
# A run that is contiguous on both sides is read straight into the target's memory. Everything else
# goes through one staging buffer of bounded size, whatever the model: a rank's extra memory is
# STAGING_BYTES, or one row if that is larger. Only the mean of copies takes more: its region once
# in float64.


STAGING_BYTES = 8 * 2**20
ROWS_FROM_BYTES = (
    64 * 2**10
)  # below this one read over the gaps costs less than a system call per row
# What storage is told of before it is read. Of a disk more would be waited for, as it takes only so
# many requests; of a store less would be, whose requests take 30 ms each.
DISK_AHEAD_BYTES, STORE_AHEAD_BYTES = 32 * 2**20, 128 * 2**20
AHEAD_STEP_BYTES, AHEAD_GAP_BYTES = 8 * 2**20, 4 * 2**10  # at once, with what lies between
LONG_RUN_BYTES = 2**20  # of a copy that does not go by way of torch
SHORT_GAP_BYTES = 32 * 2**10  # a disk reads on over it anyway

TORCH_DTYPES = {name: getattr(torch, name) for name in ITEMSIZE if hasattr(torch, name)}
Locate = Callable[[Slot], Where]
TensorOf = Callable[[Slot], torch.Tensor]
Put = Callable[[torch.Tensor, torch.Tensor], object]  # of values into a view of the target
OfOp = Callable[[Op], bool]


@dataclass
class Counts:
    """What an execution read. `runs` cover the bytes with a CRC-32; `unsummed_bytes` are the
    others."""

    read_bytes: int = 0
    unsummed_bytes: int = 0
    runs: list[SummedRun] = field(default_factory=list[SummedRun])
    records: dict[tuple[str, str], Record] = field(default_factory=dict[tuple[str, str], Record])

    def __iadd__(self, other: "Counts") -> "Counts":
        self.read_bytes += other.read_bytes
        self.unsummed_bytes += other.unsummed_bytes
        self.runs += other.runs
        self.records |= other.records
        return self


def fresh(like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A new contiguous tensor like another one, its values not set. On a CPU its memory is there
    already.

    The system gives many pages at once in less time than one by one as they are first written,
    which takes a load longer than copying the bytes from the page cache. (Huge pages were measured
    too: they save more, or cost twice as much where a hypervisor takes free ones back.)
    """
    out = torch.empty_like(like, dtype=dtype, memory_format=torch.contiguous_format)
    if out.is_cpu:
        advise(out.data_ptr(), out.data_ptr() + out.nbytes, POPULATE)
    return out


def execute(
    plan: Plan,
    locate: Locate,
    target: TensorOf,
    *,
    is_summed: OfOp = lambda _: True,
    over_gaps: int = 1,
    staging: "Staging | None" = None,
    progress: Progress | None = None,
) -> Counts:
    """Fills every wanted slot. `target` gives the flat tensor of a slot (any device, any dtype of
    the plan). `staging` is kept from one call to the next where there are many. `progress` is told
    the bytes after each record. The CRC-32 of what is read of a record is noted where one of the
    operations on it `is_summed`.

    Rows with gaps between them are read for themselves, as what lies between is for other ranks;
    over short gaps where that takes at most `over_gaps` times the bytes that are wanted. Raises
    DamagedFileError where a file ends early or can't be read.
    """
    places = {slot: locate(slot) for slot in plan.sources}
    tensor_of, staging = functools.cache(target), staging or Staging()
    reading = _Reading(places, tensor_of, staging, is_summed, over_gaps)
    ordered = sorted(plan.ops, key=reading.file_order)
    advance, ahead = _advancing(plan, places, progress), _Ahead(ordered, places)
    reading.advance = ahead.advance
    for _, ops in itertools.groupby(ordered, key=reading.record_of):
        reading.read_record(ops)
        advance(reading.counts.read_bytes)
    fill_padding(plan.fills, target)
    return reading.counts


class _Ahead:
    """Lets storage begin with what is read next, in the order of the files, while this thread
    sums and copies what came. Regions with gaps are left out."""

    def __init__(self, ordered: Sequence[Op], places: dict[Slot, Where]) -> None:
        self._steps, self._told_bytes = _steps_of(ordered, places), 0
        in_store = any(is_url(one.file.path) for one in itertools.islice(places.values(), 1))
        self._ahead_bytes = STORE_AHEAD_BYTES if in_store else DISK_AHEAD_BYTES

    def advance(self, read_bytes: int) -> None:
        """So many bytes were read."""
        most = read_bytes + self._ahead_bytes
        while self._told_bytes < most and (step := next(self._steps, None)):
            where, start, size = step
            self._told_bytes += size
            if self._told_bytes > read_bytes:
                where.file.prefetch(where.record, start, size)


def _steps_of(ordered: Sequence[Op], places: dict[Slot, Where]) -> Iterator[tuple[Where, int, int]]:
    """The bytes of operations, as much at once as storage is told of: place, first byte, size.
    Operations on neighbours in a file are one step, of up to AHEAD_STEP_BYTES."""
    begun: Where | None = None  # of a step, of bytes [first, end) of the file
    first = end = 0
    for op in ordered:
        where, side = places[op.sources[0].slot], op.sources[0]
        size = math.prod(op.shape)
        if span(op.shape, side.strides) != size:
            continue
        at = where.record.offset_bytes + _byte_offset(where, side)
        stop = at + size * ITEMSIZE[where.dtype]
        while at < stop:
            is_near = begun is not None and begun.file is where.file and at <= end + AHEAD_GAP_BYTES
            if not is_near or at >= first + AHEAD_STEP_BYTES:
                if begun is not None:
                    yield begun, first - begun.record.offset_bytes, end - first
                begun, first, end = where, at, at
            end = max(end, min(stop, first + AHEAD_STEP_BYTES))
            at = end
    if begun is not None:
        yield begun, first - begun.record.offset_bytes, end - first


def _advancing(
    plan: Plan, places: dict[Slot, Where], progress: Progress | None
) -> Callable[[int], None]:
    """What takes the bytes that were read, and tells `progress` of how many that is."""
    if progress is None:
        return lambda _: None
    sides = ((op.box.numel, side) for op in plan.ops for side in op.sources)
    total = sum(elems * ITEMSIZE[places[side.slot].dtype] for elems, side in sides)
    return lambda read_bytes: progress(min(read_bytes, total), total)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU. Raises ValueError for one with gaps: it would
    be that of a copy, in which everything that is read is lost."""
    if not tensor.is_contiguous():
        raise ValueError(f"a tensor with gaps has no memory of its own: strides {tensor.stride()}")
    return memoryview(cast("Any", tensor.detach().reshape(-1).view(torch.uint8).numpy()))


def tensor_at(where: Where, ref: TensorRef) -> torch.Tensor:
    """A tensor of its own with the values of one that is no parameter's. `where` is the place of
    `ref`. Raises DamagedFileError."""
    dtype, size = TORCH_DTYPES[where.dtype], ITEMSIZE[where.dtype]
    memory = torch.empty(span(ref.shape, ref.stride) * size if ref.numel else 0, dtype=torch.uint8)
    if ref.numel:
        where.file.read_into(where.record, where.offset_bytes, bytes_of(memory))
    return torch.as_strided(memory.view(dtype), ref.shape, ref.stride).clone()


def tensor_of(value: InertObject) -> torch.Tensor:
    """The tensor that a plain value is."""
    dtype, shape = TORCH_DTYPES[str(value.get("dtype"))], value.get("shape")
    out = torch.empty(cast("Any", shape), dtype=dtype)
    if out.numel():
        bytes_of(out)[:] = cast("Any", value.get("data"))
    return out


def fill_padding(fills: Sequence[Fill], target: TensorOf) -> None:
    """Writes the zeros of a plan."""
    for fill in fills:
        if fill.is_kept:
            continue
        target(fill.slot)[fill.start : fill.stop].zero_()


def _byte_offset(where: Where, side: Side) -> int:
    return where.offset_bytes + side.offset * ITEMSIZE[where.dtype]


def _view(flat: torch.Tensor, side: Side, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.as_strided(flat, shape, side.strides, flat.storage_offset() + side.offset)


def _in_place(op: Copy, where: Where, out: torch.Tensor, over_gaps: int) -> str:
    """How a copy is read straight into the target's memory: as one run, or row by row; "" where it
    can't be."""
    is_cpu, same_dtype = out.device.type == "cpu", out.dtype == TORCH_DTYPES[where.dtype]
    rows = op.source.strides[-1] == op.target.strides[-1] == 1
    if isinstance(op, Cast) or not (rows and is_cpu and same_dtype):
        return ""
    if len(op.shape) == 1:
        return "run"
    return "rows" if _has_gaps(op.source, op.shape, where, over_gaps) else ""


def _has_gaps(side: Side, shape: Ints, where: Where, over_gaps: int) -> bool:
    """Whether a region is read row by row; see `execute`."""
    elems, itemsize = span(shape, side.strides), ITEMSIZE[where.dtype]
    if side.strides[-1] != 1 or elems == math.prod(shape) or elems * itemsize <= ROWS_FROM_BYTES:
        return False
    gap_bytes = (side.strides[-2] - shape[-1]) * itemsize
    return elems > over_gaps * math.prod(shape) or gap_bytes > SHORT_GAP_BYTES


def _rows(first_byte: int, strides: Ints, shape: Ints, itemsize: int) -> Iterator[range]:
    """The first byte of each row of a region: a range over the second last dim, for each index of
    the dims before it."""
    step = strides[-2] * itemsize
    outer = (range(0, n * s, s) for n, s in zip(shape[:-2], strides[:-2], strict=True))
    for at in itertools.product(*outer):
        start = first_byte + sum(at) * itemsize
        yield range(start, start + shape[-2] * step, step)


@dataclass(frozen=True, slots=True)
class _Rows:
    """Where rows are read to: from `first_byte` of `memory` on, with strides in elements."""

    memory: memoryview
    first_byte: int
    strides: Ints


def _read_rows(where: Where, side: Side, shape: Ints, into: _Rows, counts: Counts) -> None:
    """A region with gaps, row by row. A gap leaves no CRC-32 to compare."""
    itemsize = ITEMSIZE[where.dtype]
    for starts, places in zip(
        _rows(_byte_offset(where, side), side.strides, shape, itemsize),
        _rows(into.first_byte, into.strides, shape, itemsize),
        strict=True,
    ):
        where.file.read_rows_into(where.record, starts, shape[-1] * itemsize, into.memory, places)
    counts.read_bytes += math.prod(shape) * itemsize
    counts.unsummed_bytes += math.prod(shape) * itemsize


def read_run(
    where: Where,
    offset_bytes: int,
    into: memoryview,
    counts: Counts,
    checksums: bool = True,
    advance: Callable[[int], object] = bool,
) -> None:
    """Reads a contiguous run, in the bytes of its record, into memory, and notes its CRC-32.
    `advance` is told how many bytes `counts` has, before each piece that is read."""
    size, before, crc = len(into), counts.read_bytes, 0
    counts.read_bytes += size
    is_compared = checksums and bool(where.record.crc32)
    for at in range(0, size, CRC_CHUNK_BYTES):
        advance(before + at)
        chunk = into[at : at + CRC_CHUNK_BYTES]
        where.file.read_into(where.record, offset_bytes + at, chunk)
        crc = isal_zlib.crc32(chunk, crc) if is_compared else 0
    if not is_compared:
        counts.unsummed_bytes += size
        return
    path = str(where.file.path)
    counts.runs.append(SummedRun(path, where.record.name, offset_bytes, size, crc))
    counts.records[path, where.record.name] = where.record


class Staging:
    """One reused byte buffer, of which a block may take `size_bytes`."""

    def __init__(self, size_bytes: int = STAGING_BYTES) -> None:
        self.size_bytes = size_bytes
        self._tensor = torch.empty(0, dtype=torch.uint8)
        self._memory = bytes_of(self._tensor)

    def take(self, size_bytes: int) -> tuple[torch.Tensor, memoryview]:
        """So many bytes as a tensor, and as memory."""
        if len(self._memory) < size_bytes:
            self._tensor = torch.empty(size_bytes, dtype=torch.uint8)
            self._memory = bytes_of(self._tensor)
        return self._tensor[:size_bytes], self._memory[:size_bytes]


@dataclass(frozen=True, slots=True)
class _Block:
    """A part of a region that fits the staging buffer, and the view of the target that it goes to.
    Bytes [start, stop) of the record hold it; `by_rows`: of them only its rows are read."""

    where: Where
    side: Side
    out: torch.Tensor
    start: int
    stop: int
    by_rows: bool


def _blocks_of(
    side: Side, shape: Ints, where: Where, out: torch.Tensor, most: int, over_gaps: int = 1
) -> Iterator[_Block]:
    """A region of the source in blocks of up to half of `most` bytes. The dims are in the order in
    which the source stores them, so that each block is a run of the file that is as short as can
    be."""
    itemsize = ITEMSIZE[where.dtype]
    by_rows = _has_gaps(side, shape, where, over_gaps)
    order = sorted(range(len(shape)), key=lambda dim: -side.strides[dim])
    shape, steps = tuple(shape[d] for d in order), tuple(side.strides[d] for d in order)
    held = strides(shape) if by_rows else steps
    for index in _blocks(shape, held, most // (2 * itemsize)):
        part = out.permute(order)[index]
        first = side.offset + sum(one.start * s for one, s in zip(index, steps, strict=True))
        start = where.offset_bytes + first * itemsize
        stop = start + span(tuple(part.shape), steps) * itemsize
        yield _Block(where, Side(side.slot, first, steps), part, start, stop, by_rows)


def _blocks(shape: Ints, strides: Ints, most: int) -> Iterator[tuple[slice, ...]]:
    """Sub-blocks of a region that span at most `most` elements of memory. Its dims have `strides`
    there, the largest first."""
    if span(shape, strides) <= most or math.prod(shape) == 1:
        yield tuple(slice(0, n) for n in shape)
        return
    dim = next(d for d, n in enumerate(shape) if n > 1)
    row = span(shape[dim + 1 :], strides[dim + 1 :])
    rows = min(shape[dim] - 1, 1 + max(0, most - row) // strides[dim])
    for start in range(0, shape[dim], rows):
        stop = min(start + rows, shape[dim])
        for index in _blocks((*shape[:dim], stop - start, *shape[dim + 1 :]), strides, most):
            yield (
                *index[:dim],
                slice(start + index[dim].start, start + index[dim].stop),
                *index[dim + 1 :],
            )


def _together(blocks: list[_Block], most: int) -> Iterator[list[_Block]]:
    """Blocks whose bytes interleave, so that one reading of up to `most` bytes serves them all: the
    heads of a fused tensor that is stored transposed take turns in each of its rows."""
    held: list[_Block] = []
    stop = 0
    for block in sorted(blocks, key=lambda block: block.start):
        reach = max(stop, block.stop)
        apart = block.start >= stop or reach - held[0].start > most
        if held and (apart or block.by_rows or held[0].by_rows):
            yield held
            held, reach = [], block.stop
        held, stop = [*held, block], reach
    yield held


def copy_run(out: torch.Tensor, values: torch.Tensor) -> None:
    """`out.copy_(values)`. A long run of memory goes as the C library copies, past the cache: in
    two thirds of the time that torch takes."""
    is_run = out.dtype == values.dtype and out.is_contiguous() and values.is_contiguous()
    if is_run and out.is_cpu and values.is_cpu and out.shape == values.shape:
        if out.nbytes >= LONG_RUN_BYTES:
            np.copyto(np.asarray(bytes_of(out)), np.asarray(bytes_of(values)))
            return
    out.copy_(values)


def _copy(out: torch.Tensor, values: torch.Tensor) -> None:
    """`out.copy_(values)`. What is stored with its dims in another order is packed on both sides:
    torch transposes only such ones in blocks that fit the cache, and not while it casts."""
    order = sorted(range(out.dim()), key=lambda dim: -out.stride(dim))
    if out.device.type != "cpu" or order == [*range(out.dim())]:
        out.copy_(values)
        return
    turned, goal = values.to(out.dtype).contiguous().permute(order), out.permute(order)
    goal.copy_(turned if goal.is_contiguous() else turned.contiguous())


# ------------------------------------------------ a plan, record by record


class _Reading:
    """Carries out operations, and counts what they read. `places` are those of their sources."""

    def __init__(
        self,
        places: dict[Slot, Where],
        target: TensorOf,
        staging: Staging,
        is_summed: OfOp,
        over_gaps: int,
    ) -> None:
        self.counts = Counts()
        self.advance: Callable[[int], object] = bool
        self._places, self._target, self._staging = places, target, staging
        self._is_summed, self._over_gaps = is_summed, over_gaps

    def file_order(self, op: Op) -> tuple[str, int, int]:
        """Where an operation reads first: the record, and the byte."""
        side = op.sources[0]
        return (*self.record_of(op), _byte_offset(self._places[side.slot], side))

    def record_of(self, op: Op) -> tuple[str, int]:
        """The record that an operation reads: its file, and where it begins there."""
        where = self._places[op.sources[0].slot]
        return str(where.file.path), where.record.offset_bytes

    def read_record(self, ops: Iterable[Op]) -> None:
        """All operations on one record."""
        ops = [*ops]
        checksums = any(map(self._is_summed, ops))
        blocks = [block for op in ops for block in self._read(op, checksums)]
        if blocks:
            self._read_blocks(blocks, _copy, checksums)

    def _read(self, op: Op, checksums: bool) -> Iterable[_Block]:
        """Carries out an operation; of one that can't be read straight into the target's memory
        the blocks that are left to be read."""
        tensor = self._target(op.target.slot)
        out = _view(tensor, op.target, op.shape)
        if isinstance(op, Mean):
            self._mean(op, out)
            return ()
        where = self._places[op.source.slot]
        way = _in_place(op, where, out, self._over_gaps)
        if not way:
            most = self._staging.size_bytes
            return _blocks_of(op.source, op.shape, where, out, most, self._over_gaps)
        if way == "run":
            start = _byte_offset(where, op.source)
            read_run(where, start, bytes_of(out), self.counts, checksums, self.advance)
        else:
            first_byte = op.target.offset * tensor.element_size()
            into = _Rows(bytes_of(tensor), first_byte, op.target.strides)
            _read_rows(where, op.source, op.shape, into, self.counts)
        return ()

    def _mean(self, op: Mean, out: torch.Tensor) -> None:
        if not out.dtype.is_floating_point:
            raise UnsupportedError(
                "the mean of copies that are no floating-point numbers",
                found=str(out.dtype),
                fix="keep the size of the axis along which the ranks have copies",
            )
        total = torch.zeros(op.shape, dtype=torch.float64)
        most = self._staging.size_bytes
        for side in op.sources:
            blocks = [*_blocks_of(side, op.shape, self._places[side.slot], total, most)]
            self._read_blocks(blocks, torch.Tensor.add_, False)
        out.copy_(total / len(op.sources))

    def _read_blocks(self, blocks: list[_Block], put: Put, checksums: bool) -> None:
        """Reads blocks of one record, and puts the values of each one into its view of the
        target."""
        for together in _together(blocks, self._staging.size_bytes):
            if together[0].by_rows:
                self._read_by_rows(together[0], put)
            else:
                self._read_together(together, put, checksums)

    def _read_by_rows(self, block: _Block, put: Put) -> None:
        where, shape = block.where, tuple(block.out.shape)
        size = block.out.numel() * ITEMSIZE[where.dtype]
        values, memory = self._staging.take(size)
        _read_rows(where, block.side, shape, _Rows(memory, 0, strides(shape)), self.counts)
        put(block.out, values.view(TORCH_DTYPES[where.dtype]).view(shape))

    def _read_together(self, blocks: list[_Block], put: Put, checksums: bool) -> None:
        """Blocks whose bytes interleave, in one reading. What lies between has no CRC-32 of its
        own."""
        where, start = blocks[0].where, blocks[0].start
        itemsize = ITEMSIZE[where.dtype]
        size = max(block.stop for block in blocks) - start
        wanted = sum(block.out.numel() for block in blocks) * itemsize
        values, memory = self._staging.take(size)
        read_run(where, start, memory, self.counts, checksums and wanted == size)
        values = values.view(TORCH_DTYPES[where.dtype])
        for block in blocks:
            at = (block.start - start) // itemsize
            put(block.out, values.as_strided(block.out.shape, block.side.strides, at))
