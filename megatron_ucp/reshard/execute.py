"""Carries out a plan: reads byte ranges of files into tensors.

A run that is contiguous on both sides is read straight into the target's memory. Everything else
goes through one staging buffer of bounded size, whatever the model: a rank's extra memory is
STAGING_BYTES, or one row if that is larger. Only the mean of copies takes more: its region once in
float64.
"""

import ctypes
import functools
import itertools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from mmap import PAGESIZE
from typing import Any, cast

import torch
from isal import isal_zlib

from megatron_ucp.core.box import Ints, span, strides
from megatron_ucp.core.plan import Cast, Copy, Fill, Mean, Op, Plan, Side, Slot
from megatron_ucp.core.values import Stand
from megatron_ucp.errors import DamagedFileError, UnsupportedError
from megatron_ucp.formats.base import ByteFile, Record, Where
from megatron_ucp.formats.pt.unpickler import ITEMSIZE, TensorRef
from megatron_ucp.reshard.findings import Progress

STAGING_BYTES = 8 * 2**20
ROWS_FROM_BYTES = (
    64 * 2**10
)  # below this one read over the gaps costs less than a system call per row
SHORT_GAP_BYTES = 32 * 2**10  # a disk reads on over it anyway
GAP_BYTES = (
    4096  # padding that nobody needs is read for a checksum up to this size, or 1/256 of the record
)
CRC_CHUNK_BYTES = 2**20  # small enough that the bytes are still in the cache when they are summed
POPULATE = 23  # MADV_POPULATE_WRITE of Linux 5.14
_MADVISE = ctypes.CDLL(None).madvise if sys.platform == "linux" else None

TORCH_DTYPES = {name: getattr(torch, name) for name in ITEMSIZE if hasattr(torch, name)}
Locate = Callable[[Slot], Where]
TensorOf = Callable[[Slot], torch.Tensor]


@dataclass(frozen=True, slots=True)
class SummedRun:
    """Bytes [start, start + size) of a record that were read, and their CRC-32."""

    file: str
    record: str
    start: int
    size: int
    crc: int


@dataclass
class Counts:
    """What an execution read. `runs` cover the bytes with a CRC-32; `unsummed_bytes` are the
    others."""

    read_bytes: int = 0
    unsummed_bytes: int = 0
    runs: list[SummedRun] = field(default_factory=list[SummedRun])
    records: dict[tuple[str, str], Record] = field(default_factory=dict[tuple[str, str], Record])


def fresh(like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A new contiguous tensor like another one, its values not set. On a CPU its memory is there
    already.

    The system gives many pages at once in less time than one by one as they are first written,
    which takes a load longer than copying the bytes from the page cache. (Huge pages were measured
    too: they save more, or cost twice as much where a hypervisor takes free ones back.)
    """
    out = torch.empty_like(like, dtype=dtype, memory_format=torch.contiguous_format)
    if _MADVISE is not None and out.device.type == "cpu":
        start = -(-out.data_ptr() // PAGESIZE) * PAGESIZE
        stop = (out.data_ptr() + out.nbytes) // PAGESIZE * PAGESIZE
        # whole pages of its own; a system that does not know the advice refuses it without harm
        if start < stop:
            _MADVISE(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), POPULATE)
    return out


def execute(
    plan: Plan,
    locate: Locate,
    target: TensorOf,
    *,
    checksums: bool = True,
    over_gaps: int = 1,
    staging: "Staging | None" = None,
    progress: Progress | None = None,
) -> Counts:
    """Fills every wanted slot. `target` gives the flat tensor of a slot (any device, any dtype of
    the plan). `staging` is kept from one call to the next where there are many. `progress` is told
    the bytes after each record.

    Rows with gaps between them are read for themselves, as what lies between is for other ranks;
    over short gaps where that takes at most `over_gaps` times the bytes that are wanted. Raises
    DamagedFileError where a file ends early or can't be read.
    """
    counts, staging = Counts(), staging or Staging()
    places = {slot: locate(slot) for slot in plan.sources}
    tensor_of = functools.cache(target)
    ordered = sorted(plan.ops, key=lambda op: _file_order(op, places))
    advance = _advancing(plan, places, progress)
    for _, ops in itertools.groupby(ordered, key=lambda op: _record_of(op, places)):
        blocks: list[_Block] = []
        for op in ops:
            tensor = tensor_of(op.target.slot)
            out = _view(tensor, op.target, op.shape)
            if isinstance(op, Mean):
                _mean(op, places, out, staging, counts)
                continue
            where = places[op.source.slot]
            way = _in_place(op, where, out, over_gaps)
            if way == "run":
                read_run(where, _byte_offset(where, op.source), bytes_of(out), counts, checksums)
            elif way == "rows":
                _read_rows(where, op.source, op.shape, _rows_of(op, tensor), counts)
            else:
                most = staging.size_bytes
                blocks += _blocks_of(op.source, op.shape, where, out, most, over_gaps)
        if blocks:
            _read_blocks(blocks, _copy, staging, checksums, counts)
        advance(counts.read_bytes)
    fill_padding(plan.fills, target)
    return counts


def _advancing(
    plan: Plan, places: dict[Slot, Where], progress: Progress | None
) -> Callable[[int], None]:
    """What takes the bytes that were read, and tells `progress` of how many that is."""
    if progress is None:
        return lambda _: None
    sides = [(op, op.sources if isinstance(op, Mean) else (op.source,)) for op in plan.ops]
    sizes = ((op.box.numel, ITEMSIZE[places[side.slot].dtype]) for op, of in sides for side in of)
    total = sum(elems * itemsize for elems, itemsize in sizes)
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


def tensor_of(value: Stand) -> torch.Tensor:
    """The tensor that a plain value is."""
    dtype, shape = TORCH_DTYPES[str(value.get("dtype"))], value.get("shape")
    out = torch.empty(cast("Any", shape), dtype=dtype)
    if out.numel():
        bytes_of(out)[:] = cast("Any", value.get("data"))
    return out


def fill_padding(fills: Sequence[Fill], target: TensorOf) -> None:
    """Writes the zeros of a plan."""
    for fill in fills:
        target(fill.slot)[fill.start : fill.stop].zero_()


def _file_order(op: Op, places: dict[Slot, Where]) -> tuple[str, int, int]:
    side = op.sources[0] if isinstance(op, Mean) else op.source
    where = places[side.slot]
    return (*_record_of(op, places), _byte_offset(where, side))


def _record_of(op: Op, places: dict[Slot, Where]) -> tuple[str, int]:
    """The record that an operation reads: its file, and where it begins there."""
    where = places[(op.sources[0] if isinstance(op, Mean) else op.source).slot]
    return str(where.file.path), where.record.offset_bytes


def _byte_offset(where: Where, side: Side) -> int:
    return where.offset_bytes + side.offset * ITEMSIZE[where.dtype]


def _view(flat: torch.Tensor, side: Side, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.as_strided(flat, shape, side.strides, flat.storage_offset() + side.offset)


def _same_rows(op: Copy, where: Where, out: torch.Tensor) -> bool:
    """Rows, contiguous on both sides, may be read straight into the target's memory."""
    return (
        not isinstance(op, Cast)
        and op.source.strides[-1] == 1
        and op.target.strides[-1] == 1
        and out.device.type == "cpu"
        and out.dtype == TORCH_DTYPES[where.dtype]
    )


def _in_place(op: Copy, where: Where, out: torch.Tensor, over_gaps: int) -> str:
    """How a copy is read straight into the target's memory: as one run, or row by row; "" where it
    can't be."""
    if not _same_rows(op, where, out):
        return ""
    if len(op.shape) == 1:
        return "run"
    return "rows" if _has_gaps(op.source, op.shape, where, over_gaps) else ""


def _rows_of(op: Copy, tensor: torch.Tensor) -> "_Rows":
    """Where the rows of a copy go in the target."""
    return _Rows(bytes_of(tensor), op.target.offset * tensor.element_size(), op.target.strides)


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
    where: Where, offset_bytes: int, into: memoryview, counts: Counts, checksums: bool = True
) -> None:
    """Reads a contiguous run, in the bytes of its record, into memory, and notes its CRC-32."""
    size = len(into)
    counts.read_bytes += size
    if not checksums or not where.record.crc32:
        where.file.read_into(where.record, offset_bytes, into)
        counts.unsummed_bytes += size
        return
    crc = 0
    for at in range(0, size, CRC_CHUNK_BYTES):
        chunk = into[at : at + CRC_CHUNK_BYTES]
        where.file.read_into(where.record, offset_bytes + at, chunk)
        crc = isal_zlib.crc32(chunk, crc)
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


def _read_blocks(
    blocks: list[_Block],
    put: Callable[[torch.Tensor, torch.Tensor], object],
    staging: Staging,
    checksums: bool,
    counts: Counts,
) -> None:
    """Reads blocks of one record, and puts the values of each one into its view of the target."""
    for together in _together(blocks, staging.size_bytes):
        where, start = together[0].where, together[0].start
        dtype, itemsize = TORCH_DTYPES[where.dtype], ITEMSIZE[where.dtype]
        if together[0].by_rows:
            (block,) = together
            shape = tuple(block.out.shape)
            values, memory = staging.take(math.prod(shape) * itemsize)
            into = _Rows(memory, 0, strides(shape))
            _read_rows(where, block.side, shape, into, counts)
            put(block.out, values.view(dtype).view(shape))
            continue
        size = max(block.stop for block in together) - start
        values, memory = staging.take(size)
        wanted = sum(block.out.numel() for block in together) * itemsize
        read_run(where, start, memory, counts, checksums and wanted == size)
        values = values.view(dtype)
        for block in together:
            at = (block.start - start) // itemsize
            put(block.out, values.as_strided(block.out.shape, block.side.strides, at))


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


def _copy(out: torch.Tensor, values: torch.Tensor) -> None:
    """`out.copy_(values)`. What is stored with its dims in another order is packed on both sides:
    torch transposes only such ones in blocks that fit the cache, and not while it casts."""
    order = sorted(range(out.dim()), key=lambda dim: -out.stride(dim))
    if out.device.type != "cpu" or order == [*range(out.dim())]:
        out.copy_(values)
        return
    turned, goal = values.to(out.dtype).contiguous().permute(order), out.permute(order)
    goal.copy_(turned if goal.is_contiguous() else turned.contiguous())


def _mean(
    op: Mean, places: dict[Slot, Where], out: torch.Tensor, staging: Staging, counts: Counts
) -> None:
    if not out.dtype.is_floating_point:
        raise UnsupportedError(
            "the mean of copies that are no floating-point numbers",
            found=str(out.dtype),
            fix="keep the size of the axis along which the ranks have copies",
        )
    total = torch.zeros(op.shape, dtype=torch.float64)
    for side in op.sources:
        blocks = [*_blocks_of(side, op.shape, places[side.slot], total, staging.size_bytes)]
        _read_blocks(blocks, torch.Tensor.add_, staging, False, counts)
    out.copy_(total / len(op.sources))


def check_runs(
    runs: Sequence[SummedRun],
    records: dict[tuple[str, str], Record],
    opened: Callable[[str], ByteFile],
    *,
    rank: int = 0,
    world: int = 1,
    thorough: bool = False,
) -> tuple[int, int, int]:
    """Compares the CRC-32 of records with the stored one; this rank takes every `world`-th record.

    `runs` are those of all ranks. What nobody read of a record (padding) is read here where it is
    little enough, and with `thorough` whatever it is. Returns bytes (checked, not checked, read
    here); unchecked are the runs of records of which a large part was not read. Raises
    DamagedFileError.
    """
    by_record: dict[tuple[str, str], dict[tuple[int, int], int]] = {}
    for run in runs:
        held = by_record.setdefault((run.file, run.record), {})
        if held.setdefault((run.start, run.size), run.crc) != run.crc:
            raise DamagedFileError(
                "two ranks read different bytes from one place",
                file=run.file,
                parameter=run.record,
                fix="check the storage; load again",
            )
    checked = unchecked = extra = 0
    for key in sorted(records if thorough else by_record)[rank::world]:
        parts, record = by_record.get(key, {}), records[key]
        whole = _completed(opened(key[0]), record, parts, thorough)
        read = sum(size for _, size in parts)
        if whole is None and thorough:  # runs that overlap
            opened(key[0]).check(record)
            checked, extra = checked + read, extra + record.size_bytes
            continue
        if whole is None:
            unchecked += read
            continue
        crc, gap_bytes = whole
        if crc != record.crc32:
            raise DamagedFileError(
                "a tensor record is damaged",
                file=key[0],
                parameter=key[1],
                expected=f"CRC-32 {record.crc32:#010x}",
                found=f"{crc:#010x}",
            )
        checked += read
        extra += gap_bytes
    return checked, unchecked, extra


def _completed(
    file: ByteFile, record: Record, parts: dict[tuple[int, int], int], thorough: bool
) -> tuple[int, int] | None:
    """CRC-32 of a whole record from its runs and the gaps between them, and the bytes of the gaps;
    None for large gaps, which are read too if it is to be `thorough`, and for runs that overlap.

    Of runs that start together (ranks that need the same bytes) the longest is taken.
    """
    crc = at = gap_bytes = 0
    longest = {start: (size, part) for (start, size), part in sorted(parts.items())}
    for start in (*sorted(longest), record.size_bytes):
        if start < at:
            return None
        gap_bytes += start - at
        if gap_bytes > max(GAP_BYTES, record.size_bytes // 256) and not thorough:
            return None
        memory = bytearray(min(start - at, CRC_CHUNK_BYTES))
        while at < start:
            block = memoryview(memory)[: start - at]
            file.read_into(record, at, block)
            crc, at = isal_zlib.crc32(block, crc), at + len(block)
        if start in longest:
            size, part = longest[start]
            crc, at = isal_zlib.crc32_combine(crc, part, size), at + size
    return crc, gap_bytes
