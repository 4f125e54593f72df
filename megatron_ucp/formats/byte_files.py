"""Files that are read by byte offset. Every read is checked against the run of bytes that it
belongs to."""

import os
import stat
import zlib
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import NoReturn, Self

from isal.isal_zlib import crc32_combine

from megatron_ucp.errors import DamagedFileError, NotFoundError, UsageError
from megatron_ucp.formats.checkpoint import ByteFile, Record, Where
from megatron_ucp.formats.pt.values import ITEMSIZE

# ---- open file
#
# A file that is open to be read by byte offset, whatever container it is. Every read is checked
# against the run of bytes that it is of.


_CHUNK_BYTES = 2**20


def damaged(
    path: str, problem: str, expected: object, found: object, fix: str | None = None
) -> NoReturn:
    """Raises DamagedFileError."""
    raise DamagedFileError(problem, file=path, expected=expected, found=found, fix=fix)


class OpenFile:
    """A regular file, open as long as this is; a context manager. Raises NotFoundError when there
    is no such file, DamagedFileError when it can't be read or is no regular one."""

    has_checksums = False

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self._fd = _open(self.path)
        try:
            self.size_bytes = _regular_size(self.path, self._fd)
        except DamagedFileError:
            self.close()
            raise

    @property
    def fd(self) -> int:
        """The descriptor, open until `close`. Raises UsageError afterwards."""
        if self._fd < 0:
            raise UsageError("the file has been closed", file=self.path, fix="open it again")
        return self._fd

    def close(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def read_into(self, source: Record, start_byte: int, target: memoryview) -> None:
        """Fills `target` with the bytes from `start_byte` of the record on. Raises UsageError for a
        range outside of the record, DamagedFileError for a short read."""
        self._read_run(source.name, source.offset_bytes, source.size_bytes, start_byte, target)

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
        self._read_at(offset_bytes + start_byte, view)

    def read_rows_into(
        self, record: Record, starts: range, size_bytes: int, target: memoryview, places: range
    ) -> None:
        """For each of `starts`, bytes of the record, fills `size_bytes` of `target` from the same
        one of `places` on.

        As `read_into` for each row, but many short rows cost little more than their system calls.
        Raises as `read_into` does.
        """
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
        fd, base, preadv = self.fd, record.offset_bytes, os.preadv
        for start, place in zip(starts, places, strict=True):
            row = target[place : place + size_bytes]
            try:
                count = preadv(fd, (row,), base + start)
            except OSError:
                count = 0
            if count != size_bytes:  # says what is wrong, or reads the rest
                self._read_at(base + start + count, row[count:])

    def check(self, record: Record) -> None:
        """Compares the record's bytes with its CRC-32, 1 MiB at a time; nothing is read without
        checksums.

        Raises DamagedFileError when they differ.
        """
        if not self.has_checksums:
            return
        found, buffer = 0, memoryview(bytearray(min(_CHUNK_BYTES, record.size_bytes)))
        for start in range(0, record.size_bytes, _CHUNK_BYTES):
            chunk = buffer[: min(_CHUNK_BYTES, record.size_bytes - start)]
            self._read_at(record.offset_bytes + start, chunk)
            found = zlib.crc32(chunk, found)
        self._compare_crc(record, found)

    def _compare_crc(self, record: Record, found: int) -> None:
        if self.has_checksums and found != record.crc32:
            damaged(
                self.path,
                f"record {record.name} has a wrong checksum",
                f"CRC-32 {record.crc32:08x}",
                f"{found:08x}",
            )

    def _read_at(self, offset_bytes: int, view: memoryview) -> None:
        done = 0
        while done < len(view):  # one call moves at most 2 GiB
            try:
                count = os.preadv(self.fd, [view[done:]], offset_bytes + done)
            except OSError as error:
                damaged(self.path, "the file can't be read", None, error.strerror)
            if count == 0:
                damaged(
                    self.path,
                    "the file is truncated",
                    f"{len(view)} bytes from byte {offset_bytes}",
                    f"{done} bytes",
                )
            done += count

    def _bytes_at(self, offset_bytes: int, size_bytes: int) -> bytes:
        buffer = bytearray(size_bytes)
        self._read_at(offset_bytes, memoryview(buffer))
        return bytes(buffer)


def same_bytes(one: Where, other: Where) -> bool:
    """Whether two places hold the same elements. Raises DamagedFileError."""
    if (one.elems, one.dtype) != (other.elems, other.dtype):
        return False
    size = one.elems * ITEMSIZE[one.dtype]
    for at in range(0, size, _CHUNK_BYTES):
        read = [bytearray(min(_CHUNK_BYTES, size - at)) for _ in (one, other)]
        for where, chunk in zip((one, other), read, strict=True):
            where.file.read_into(where.record, where.offset_bytes + at, memoryview(chunk))
        if read[0] != read[1]:
            return False
    return True


def _open(path: str) -> int:
    try:  # not blocking, or a named pipe would wait for its writer
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise NotFoundError(
            "the file does not exist", file=path, fix="restore it, or load another tag"
        ) from error
    except ValueError as error:
        raise UsageError(
            "the path is malformed",
            found=repr(path),
            fix="give a path without control characters, and not longer than the system takes",
        ) from error
    except PermissionError as error:  # no damage: who may read it finds it whole
        raise NotFoundError(
            "the file may not be read",
            file=path,
            found=f"{error.strerror}: {_rights(path)}",
            fix="give its reader the right to read it, or read it as its owner",
            id="",
        ) from error
    except OSError as error:
        raise DamagedFileError(
            "the file can't be opened", file=path, found=error.strerror
        ) from error


def _rights(path: str) -> str:
    """Owner and mode of a file, as `ls -l` shows them."""
    with suppress(OSError):
        found = os.stat(path)
        return f"{stat.filemode(found.st_mode)} of user {found.st_uid}, and this is {os.getuid()}"
    return "its folder may not be entered"


def _regular_size(path: str, fd: int) -> int:
    try:
        status = os.fstat(fd)
    except OSError as error:
        damaged(path, "the file can't be read", None, error.strerror)
    if not stat.S_ISREG(status.st_mode):
        damaged(
            path,
            "this is no regular file",
            None,
            "a folder" if stat.S_ISDIR(status.st_mode) else "a device",
        )
    return status.st_size


# ---- assembled
#
# A one-dimensional tensor whose chunks lie in several files, as one run of bytes.


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
