"""Files that are read by byte offset, whatever container they are."""

import os
import zlib
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

from isal.isal_zlib import crc32_combine

from megatron_ucp.errors import DamagedFileError, UsageError
from megatron_ucp.formats.folder import Closing, StoredFile
from megatron_ucp.formats.pt.refs import ITEMSIZE
from megatron_ucp.formats.store import open_file

_CHUNK_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class Record:
    """One stored run of bytes: `size_bytes` from byte `offset_bytes` of the file on, with the
    CRC-32 that the file says (0 where it says none)."""

    name: str
    offset_bytes: int
    size_bytes: int
    crc32: int


class ByteFile(ABC):
    """An open file whose records can be read."""

    path: str
    has_checksums: bool = False

    @abstractmethod
    def read_into(self, source: Record, start_byte: int, target: memoryview) -> None:
        """Fills `target` with the bytes from `start_byte` of the record on. Raises UsageError for a
        range outside of the record, DamagedFileError for a short read."""

    def read_rows_into(
        self, record: Record, starts: range, size_bytes: int, target: memoryview, places: range
    ) -> None:
        """For each of `starts`, bytes of the record, fills `size_bytes` of `target` from the same
        one of `places` on. Raises as `read_into`."""
        for start, place in zip(starts, places, strict=True):
            self.read_into(record, start, target[place : place + size_bytes])

    @abstractmethod
    def prefetch(self, source: Record, start_byte: int, size_bytes: int) -> None:
        """Lets storage begin with bytes that are read soon, from `start_byte` of the record on: in
        a file with several records those that follow the record, too."""

    def check(self, record: Record) -> None:
        """Compares the record's bytes with its CRC-32, 1 MiB at a time; nothing is read without
        checksums. Raises DamagedFileError when they differ."""
        if not self.has_checksums:
            return
        crc, buffer = 0, memoryview(bytearray(min(_CHUNK_BYTES, record.size_bytes)))
        for start in range(0, record.size_bytes, _CHUNK_BYTES):
            chunk = buffer[: min(_CHUNK_BYTES, record.size_bytes - start)]
            self.read_into(record, start, chunk)
            crc = zlib.crc32(chunk, crc)
        self._compare_crc(record, crc)

    def _compare_crc(self, record: Record, crc: int) -> None:
        if self.has_checksums and crc != record.crc32:
            damaged(
                self.path,
                f"record {record.name} has a wrong checksum",
                f"CRC-32 {record.crc32:08x}",
                f"{crc:08x}",
            )


@dataclass(frozen=True, slots=True)
class Where:
    """Where a slot lies: `elems` elements of `dtype` from byte `offset_bytes` of a record on."""

    file: ByteFile
    record: Record
    offset_bytes: int
    elems: int
    dtype: str

    def run(self, first: int, elems: int) -> "Where":
        """So many of the elements from `first` on."""
        offset = self.offset_bytes + first * ITEMSIZE[self.dtype]
        return replace(self, offset_bytes=offset, elems=elems)

    def read_into(self, target: memoryview) -> None:
        """Fills `target` with the first bytes. Raises as `ByteFile.read_into`."""
        self.file.read_into(self.record, self.offset_bytes, target)


def damaged(
    path: str, problem: str, expected: object, found: object, fix: str | None = None
) -> NoReturn:
    """Raises DamagedFileError."""
    raise DamagedFileError(problem, file=path, expected=expected, found=found, fix=fix)


def same_bytes(one: Where, other: Where) -> bool:
    """Whether two places hold the same elements. Raises DamagedFileError."""
    if (one.elems, one.dtype) != (other.elems, other.dtype):
        return False
    most = _CHUNK_BYTES // ITEMSIZE[one.dtype]
    for first in range(0, one.elems, most):
        count = min(most, one.elems - first)
        chunks = [bytearray(count * ITEMSIZE[one.dtype]) for _ in (one, other)]
        for where, chunk in zip((one, other), chunks, strict=True):
            where.run(first, count).read_into(memoryview(chunk))
        if chunks[0] != chunks[1]:
            return False
    return True


class OpenFile(ByteFile, Closing):
    """A regular file, open as long as this is; a context manager. Raises NotFoundError when there
    is no such file, DamagedFileError when it can't be read or is no regular one."""

    def __init__(self, file: StoredFile | str | os.PathLike[str]) -> None:
        """`file` is what a folder opened, or the path of a local one."""
        self.stored = file if isinstance(file, StoredFile) else open_file(file)
        self.path, self.size_bytes = self.stored.path, self.stored.size_bytes

    def close(self) -> None:
        self.stored.close()

    def read_into(self, source: Record, start_byte: int, target: memoryview) -> None:
        self._read_run(source.name, source.offset_bytes, source.size_bytes, start_byte, target)

    def prefetch(self, source: Record, start_byte: int, size_bytes: int) -> None:
        self.stored.prefetch(source.offset_bytes + start_byte, size_bytes)

    def _read_run(
        self, name: str, offset_bytes: int, size_bytes: int, start_byte: int, target: memoryview
    ) -> None:
        """`read_into` for a run of the file."""
        view = target.cast("B") if target.nbytes else memoryview(b"")  # an empty view can't be cast
        if start_byte < 0 or start_byte + len(view) > size_bytes:
            raise UsageError(
                "the range lies outside of what is read",
                file=self.path,
                parameter=name,
                expected=f"at most {size_bytes} bytes",
                found=f"{start_byte} to {start_byte + len(view)}",
                fix="report this with the output of `megatron-ucp inspect` for the checkpoint",
            )
        self.stored.read(offset_bytes + start_byte, view)

    def read_rows_into(
        self, record: Record, starts: range, size_bytes: int, target: memoryview, places: range
    ) -> None:
        """As `read_into` for each row, but many short rows cost little more than their system
        calls."""
        last, end = max(starts[0], starts[-1]) + size_bytes, max(places[0], places[-1]) + size_bytes
        if (
            min(starts[0], starts[-1], places[0], places[-1]) < 0
            or last > record.size_bytes
            or end > len(target)
        ):
            raise UsageError(
                "a row lies outside of what is read or written",
                file=self.path,
                parameter=record.name,
                expected=f"at most {record.size_bytes} and {len(target)} bytes",
                found=f"{last} and {end}",
                fix="report this with the output of `megatron-ucp inspect` for the checkpoint",
            )
        base = record.offset_bytes
        in_file = range(base + starts.start, base + starts.stop, starts.step)
        self.stored.read_rows(in_file, size_bytes, target, places)


class Zeros(ByteFile):
    """Zeros of any number: a state that no file has, as its parameter was never stepped."""

    path = "zeros"

    def read_into(self, source: Record, start_byte: int, target: memoryview) -> None:
        view = target.cast("B") if target.nbytes else memoryview(bytearray())
        view[:] = bytes(len(view))

    def prefetch(self, source: Record, start_byte: int, size_bytes: int) -> None:
        """They are nowhere."""


class AssembledTensor(ByteFile):
    """A one-dimensional tensor whose chunks lie in several files, read as a file with one record.
    `parts` are the chunks' bytes one after the other, each with its file; the record's CRC-32 is
    that of all of them, where each has one."""

    def __init__(self, path: str, parts: Sequence[tuple[ByteFile, Record]]) -> None:
        self.path, self._parts = path, [part for part in parts if part[1].size_bytes]
        self._starts: list[int] = []
        size = crc = 0
        for _, record in self._parts:
            self._starts.append(size)
            size += record.size_bytes
            crc = crc32_combine(crc, record.crc32, record.size_bytes)
        self.has_checksums = all(file.has_checksums for file, _ in self._parts)
        name = path.rpartition("/")[2]
        self.record = Record(name, 0, size, crc if self.has_checksums else 0)

    def read_into(self, source: Record, start_byte: int, target: memoryview) -> None:
        view, at = target.cast("B") if target.nbytes else memoryview(b""), 0
        stop = start_byte + len(view)
        if start_byte < 0 or stop > source.size_bytes:
            damaged(self.path, "a range lies outside of the tensor", source.size_bytes, stop)
        for file, record, low, count in self._pieces(start_byte, stop):
            file.read_into(record, low, view[at : at + count])
            at += count

    def prefetch(self, source: Record, start_byte: int, size_bytes: int) -> None:
        for file, record, low, count in self._pieces(start_byte, start_byte + size_bytes):
            file.prefetch(record, low, count)

    def _pieces(self, at: int, stop: int) -> Iterator[tuple[ByteFile, Record, int, int]]:
        """Where bytes [at, stop) lie: file, record, first byte and number of bytes."""
        number = bisect_right(self._starts, at) - 1
        while at < stop:
            file, record = self._parts[number]
            low = at - self._starts[number]
            count = min(record.size_bytes - low, stop - at)
            yield file, record, low, count
            at, number = at + count, number + 1

    def check(self, record: Record) -> None:
        """Compares every chunk with its CRC-32. Raises DamagedFileError."""
        for file, part in self._parts:
            file.check(part)
