"""CRC-32s of tensors: of a whole one from parts that different ranks hold, and of the records
that ranks read together."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from itertools import pairwise, repeat
from typing import Any

import numpy as np
from isal import isal_zlib
from isal.isal_zlib import crc32, crc32_combine

from megatron_ucp.errors import DamagedFileError
from megatron_ucp.formats.byte_files import ByteFile, Record

# ---- linear crc
#
# The CRC-32 of a whole tensor from parts of it that different ranks hold, in any order.
#
# A CRC whose register starts at zero is linear: that of the whole is the XOR of each part's,
# shifted by the bytes that lie behind the part (see `crc32_combine` of zlib, which shifts by a
# product of polynomials modulo that of CRC-32). So ranks sum what they have, and nobody needs the
# whole.


_ONES = 0xFFFFFFFF
_FEW = 48  # sums
_Rows = Any  # numpy: uint8 of runs, bytes of a run
_Sums = Any  # numpy: uint32


def linear(data: Any) -> int:
    """The CRC-32 of bytes with a register that starts at zero and is not inverted at the end."""
    return int(crc32(data, _ONES)) ^ _ONES


def standard(total: int, size_bytes: int) -> int:
    """The usual CRC-32 of `size_bytes` bytes, of which all parts' sums make up `total`."""
    return total ^ int(crc32_combine(_ONES, 0, size_bytes)) ^ _ONES


def shifted(sum_: int, size_bytes: int) -> int:
    """The sum of a part behind which so many bytes of the whole lie."""
    return int(crc32_combine(sum_, 0, size_bytes))


def of_runs(rows: _Rows, shape: Sequence[int], strides_bytes: Sequence[int]) -> int:
    """The sum of runs of equal length, row by row in `rows`, up to the end of the last one. Run
    number i, as an index of `shape`, begins `strides_bytes` times that index behind the first."""
    if len(rows) == 1:
        return linear(rows[0])
    found = np.fromiter(map(crc32, rows, repeat(_ONES)), dtype=np.uint32, count=len(rows))
    sums = (found ^ np.uint32(_ONES)).reshape(tuple(shape))
    for stride in reversed(strides_bytes):
        sums = _folded(sums, stride)
    return int(sums)


def _folded(sums: _Sums, stride_bytes: int) -> _Sums:
    """Adds up the last dim, whose parts begin `stride_bytes` behind each other: two at a time, and
    the last few one by one, for which a call of numpy takes longer."""
    while sums.shape[-1] > 1 and sums.size > _FEW:
        if sums.shape[-1] % 2:  # zeros in front of the whole change nothing
            sums = np.concatenate([np.zeros_like(sums[..., :1]), sums], axis=-1)
        sums = _shifted_each(sums[..., 0::2], stride_bytes) ^ sums[..., 1::2]
        stride_bytes *= 2
    rows = sums.reshape(-1, sums.shape[-1]).tolist()
    total = [reduce(lambda one, next_: shifted(one, stride_bytes) ^ next_, row) for row in rows]
    return np.array(total, dtype=np.uint32).reshape(sums.shape[:-1])


def _shifted_each(sums: _Sums, size_bytes: int) -> _Sums:
    tables = _tables(size_bytes)
    places = np.ascontiguousarray(sums, dtype="<u4").view(np.uint8).reshape(*sums.shape, 4)
    out = tables[0].take(places[..., 0])
    for number in (1, 2, 3):
        out ^= tables[number].take(places[..., number])
    return out


@lru_cache(maxsize=256)
def _tables(size_bytes: int) -> Any:
    """What a shift makes of each byte of a sum, at each of its four places."""
    bits = [shifted(1 << bit, size_bytes) for bit in range(32)]
    tables = np.zeros((4, 256), dtype=np.uint32)
    for number in range(4):
        for bit in range(8):
            with_bit = np.arange(256) >> bit & 1 == 1
            tables[number, with_bit] ^= np.uint32(bits[8 * number + bit])
    return tables


# ---- known sums
#
# Memory that was summed as it was written.


class KnownSums:
    """CRC-32s of runs of memory that were summed as they were written to a file: whoever sums that
    memory next need not look at it again. Several threads may use one. `edges` are addresses at
    which memory is summed apart, such as where a parameter begins.
    """

    def __init__(self, edges: Iterable[int] = ()) -> None:
        self._edges = sorted({*edges})
        self._runs: dict[int, tuple[int, int]] = {}  # first byte -> bytes, CRC-32

    def crc32(self, data: Any, first_byte: int) -> int:
        """The CRC-32 of bytes that lie at `first_byte`, or are a copy of those that do."""
        end, crc = first_byte + len(data), 0
        inside = self._edges[bisect_right(self._edges, first_byte) : bisect_left(self._edges, end)]
        for low, high in pairwise((first_byte, *inside, end)):
            own = int(crc32(data[low - first_byte : high - first_byte]))
            self._runs[low] = high - low, own
            crc = int(crc32_combine(crc, own, high - low))
        return crc

    def linear(self, first_byte: int, size_bytes: int) -> int | None:
        """As `linear`, of memory that the noted runs make up exactly; None of any other."""
        at, end, crc = first_byte, first_byte + size_bytes, 0
        while at < end:
            size, own = self._runs.get(at, (0, 0))
            if not 0 < size <= end - at:
                return None
            crc, at = int(crc32_combine(crc, own, size)), at + size
        return standard(crc, size_bytes)  # which takes one into the other, both ways


# ---- summed runs
#
# Runs of bytes that were read, with their CRC-32s, and the records that they are compared with.


CRC_CHUNK_BYTES = 2**20  # small enough that the bytes are still in the cache when they are summed
# Padding that nobody needs is read for a checksum up to this size, or 1/256 of the record.
GAP_BYTES = 4096
_Parts = dict[tuple[int, int], int]  # (start, size) of runs of a record -> CRC-32


@dataclass(frozen=True, slots=True)
class SummedRun:
    """Bytes [start, start + size) of a record that were read, and their CRC-32."""

    file: str
    record: str
    start: int
    size: int
    crc: int


def check_runs(
    runs: Sequence[SummedRun],
    records: dict[tuple[str, str], Record],
    opened: Callable[[str], ByteFile],
    *,
    thorough: bool = False,
) -> tuple[int, int, int]:
    """Compares the CRC-32 of records with the stored one.

    `runs` are those of all ranks of these records. What nobody read of a record (padding) is read
    here where it is little enough, and with `thorough` whatever it is. Returns bytes (checked, not
    checked, read here); unchecked are the runs of records of which a large part was not read.
    Raises DamagedFileError.
    """
    by_record = _by_record(runs)
    checked = unchecked = extra = 0
    for key in sorted(records if thorough else by_record):
        parts = by_record.get(key, {})
        more = _check_record(opened(key[0]), records[key], parts, thorough)
        read = sum(size for _, size in parts)
        if more is None:
            unchecked += read
        else:
            checked, extra = checked + read, extra + more
    return checked, unchecked, extra


def _by_record(runs: Sequence[SummedRun]) -> dict[tuple[str, str], _Parts]:
    """The runs of each record. Raises DamagedFileError where two of one place differ."""
    out: dict[tuple[str, str], _Parts] = {}
    for run in runs:
        held = out.setdefault((run.file, run.record), {})
        if held.setdefault((run.start, run.size), run.crc) != run.crc:
            raise DamagedFileError(
                "two ranks read different bytes from one place",
                file=run.file,
                parameter=run.record,
                fix="check the storage; load again",
            )
    return out


def _check_record(file: ByteFile, record: Record, parts: _Parts, thorough: bool) -> int | None:
    """Compares a record with its CRC-32; the bytes that were read here for that, None where it was
    not compared. Raises DamagedFileError."""
    whole = _completed(file, record, parts, thorough)
    if whole is None and thorough:  # runs that overlap
        file.check(record)
        return record.size_bytes
    if whole is None:
        return None
    crc, gap_bytes = whole
    if crc != record.crc32:
        raise DamagedFileError(
            "a tensor record is damaged",
            file=file.path,
            parameter=record.name,
            expected=f"CRC-32 {record.crc32:#010x}",
            found=f"{crc:#010x}",
        )
    return gap_bytes


def _completed(
    file: ByteFile, record: Record, parts: _Parts, thorough: bool
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
