"""A one-dimensional tensor whose chunks lie in several files, as one run of bytes."""

from bisect import bisect_right
from collections.abc import Sequence

from isal.isal_zlib import crc32_combine

from megatron_ucp.formats.base import ByteFile, Record
from megatron_ucp.formats.open_file import damaged


class AssembledTensor:
    """Reads as a file with one record. `parts` are the chunks' bytes one after the other, each with
    its file; the record's CRC-32 is that of all of them, where each has one."""

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
        """Fills `target` with the bytes from `start_byte` of the record on. Raises
        DamagedFileError."""
        view, at = target.cast("B") if target.nbytes else memoryview(b""), start_byte
        stop = start_byte + len(view)
        if start_byte < 0 or stop > source.size_bytes:
            damaged(self.path, "a range lies outside of the tensor", source.size_bytes, stop)
        number = bisect_right(self._starts, at) - 1
        while at < stop:
            file, record = self._parts[number]
            low = at - self._starts[number]
            count = min(record.size_bytes - low, stop - at)
            first = at - start_byte
            file.read_into(record, low, view[first : first + count])
            at, number = at + count, number + 1

    def read_rows_into(
        self, record: Record, starts: range, size_bytes: int, target: memoryview, places: range
    ) -> None:
        """As `read_into` for each row."""
        for start, place in zip(starts, places, strict=True):
            self.read_into(record, start, target[place : place + size_bytes])

    def check(self, record: Record) -> None:
        """Compares every chunk with its CRC-32. Raises DamagedFileError."""
        for file, part in self._parts:
            file.check(part)
