"""Runs of bytes that were read, with their CRC-32s, and the records that they are compared with."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from isal import isal_zlib

from megatron_ucp.errors import DamagedFileError
from megatron_ucp.formats.base import ByteFile, Record

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
    by_record = _by_record(runs)
    checked = unchecked = extra = 0
    for key in sorted(records if thorough else by_record)[rank::world]:
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
