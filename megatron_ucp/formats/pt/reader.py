"""Opens a torch `.pt` file as what it is: a zip archive of stored records, each a run of bytes at a
known offset.

The directory is parsed here and not by `zipfile`, as every number in it is checked against the
file's size and against the other records before it is used, and only the directory and the pickle
are read. Tensors are read later, by byte offset, without torch.
"""

import hashlib
import os
import re
import stat
import struct
import zlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from functools import cached_property
from types import TracebackType
from typing import NamedTuple, NoReturn, Self

from megatron_ucp.errors import DamagedFileError, NotFoundError, UsageError
from megatron_ucp.formats.base import Record
from megatron_ucp.formats.pt.unpickler import (
    ITEMSIZE,
    MAX_PICKLE_BYTES,
    StorageRef,
    TensorRef,
    loads,
)

MAX_RECORDS = 4_000_000
MAX_DIRECTORY_BYTES = 512 * 2**20
_CHUNK_BYTES = 2**20
_CAP16, _CAP32 = 0xFFFF, 0xFFFFFFFF  # "the value stands in the ZIP64 field"

_END = struct.Struct("<4s4H2LH")  # end of central directory
_END64_LOCATOR = struct.Struct("<4sLQL")
_END64 = struct.Struct("<4sQ2H2L4Q")
_CENTRAL = struct.Struct("<4s6H3L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")
# how a torch file of before 1.6 begins
_LEGACY_TORCH = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
_REFUSED_FLAGS = 0x0001 | 0x0020 | 0x0040 | 0x2000  # encrypted, patched, strongly encrypted, masked


class _Entry(NamedTuple):
    """A record as the central directory knows it: the payload's place needs its local header."""

    header_bytes: int  # offset of the local header
    size_bytes: int
    crc32: int
    limit_bytes: int  # where the next record, or the directory, begins


class PtFile:
    """An open `.pt` file. Reads the directory at once, local headers and the pickle when asked; a
    context manager.

    Raises NotFoundError when there is no such file, and DamagedFileError when it can't be read or
    is no whole zip archive as torch writes it: stored, not encrypted, plain and different names,
    records that do not overlap.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, allow: frozenset[str] = frozenset()
    ) -> None:
        """`allow`: further globals that the pickle may name, see `safe_pickle.loads`."""
        self.path = os.fspath(path)
        self._allow = allow
        self._fd = _open(self.path)
        with ExitStack() as on_failure:
            on_failure.callback(self.close)
            self.size_bytes = _regular_size(self.path, self._fd)
            start, directory = self._directory()
            self.directory_sha256 = hashlib.sha256(directory).hexdigest()
            """Evidence that this is a certain file: it covers all names, places, sizes and
            CRC-32s."""
            self._entries = _parse(directory, start, self.path)
            self.root = _root(self._entries, self.path)
            """The folder name that all records share."""
            on_failure.pop_all()
        self.records: Mapping[str, Record] = _Records(self)
        """By full name, in the directory's order. A look-up reads that record's local header,
        once."""
        self.has_checksums = any(entry.crc32 for entry in self._entries.values())
        """False when torch was told not to compute any (`set_crc32_options(False)`): all are 0
        then."""

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, allow: frozenset[str] = frozenset()) -> Self:
        """Same as the constructor."""
        return cls(path, allow=allow)

    @property
    def fd(self) -> int:
        """The descriptor, open until `close`. Raises UsageError afterwards."""
        if self._fd < 0:
            raise UsageError("the file has been closed", file=self.path)
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

    def __repr__(self) -> str:
        return f"PtFile({self.path!r}, {len(self._entries)} records)"

    @cached_property
    def tree(self) -> object:
        """The pickled value, a TensorRef for each tensor. Its CRC-32 is checked, and none of its
        code runs."""
        entry = self._entries[f"{self.root}/data.pkl"]
        if entry.size_bytes > MAX_PICKLE_BYTES:
            _damaged(
                self.path,
                "the pickle is larger than any that this package reads",
                f"at most {MAX_PICKLE_BYTES} bytes",
                f"{entry.size_bytes} bytes",
            )
        return loads(self._whole("data.pkl"), file=self.path, allow=self._allow, typed=True)

    def record(self, storage: StorageRef) -> Record:
        """The record of a storage. Raises DamagedFileError when it is absent, of another size, or
        big-endian."""
        if self._byte_order != b"little":
            _damaged(
                self.path,
                "the file was written on a machine of another byte order",
                "little",
                self._byte_order,
            )
        name = f"{self.root}/data/{storage.key}"
        if name not in self._entries:
            _damaged(
                self.path,
                f"storage {storage.key} is not in the file",
                name,
                f"{len(self._entries)} records",
            )
        record = self.records[name]
        if record.size_bytes != storage.size_bytes:
            _damaged(
                self.path,
                f"storage {storage.key} has another size than the pickle says",
                f"{storage.elems} elements of {storage.dtype}, {storage.size_bytes} bytes",
                f"{record.size_bytes} bytes",
            )
        return record

    def read_into(
        self, source: Record | StorageRef | TensorRef, start_byte: int, target: memoryview
    ) -> None:
        """Fills `target` with the bytes from `start_byte` of the source on; a tensor must be
        contiguous.

        Raises UsageError for a range outside of the source, DamagedFileError for a short read.
        """
        first_byte = 0
        if isinstance(source, TensorRef):
            itemsize = ITEMSIZE[source.storage.dtype]
            if not source.is_contiguous:
                raise UsageError(
                    "only contiguous tensors can be read as a run of bytes",
                    file=self.path,
                    found=source,
                )
            first_byte, size_bytes = source.offset_elems * itemsize, source.numel * itemsize
            record = self.record(source.storage)
        else:
            record = self.record(source) if isinstance(source, StorageRef) else source
            size_bytes = record.size_bytes
        view = target.cast("B") if target.nbytes else memoryview(b"")  # an empty view can't be cast
        if start_byte < 0 or start_byte + len(view) > size_bytes:
            raise UsageError(
                "the range lies outside of what is read",
                file=self.path,
                parameter=record.name,
                expected=f"at most {size_bytes} bytes",
                found=f"{start_byte} to {start_byte + len(view)}",
            )
        self._read_at(record.offset_bytes + first_byte + start_byte, view)

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
            _damaged(
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
                _damaged(self.path, "the file can't be read", None, error.strerror)
            if count == 0:
                _damaged(
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

    def _whole(self, name: str) -> bytes:
        """A small record, its checksum compared."""
        record = self.records[f"{self.root}/{name}"]
        data = self._bytes_at(record.offset_bytes, record.size_bytes)
        self._compare_crc(record, zlib.crc32(data))
        return data

    @cached_property
    def _byte_order(self) -> bytes:
        entry = self._entries.get(f"{self.root}/byteorder")
        if entry is None:
            return b"little"  # what torch takes it to be in files of before 2.1
        return self._whole("byteorder") if entry.size_bytes <= 6 else b"malformed"

    def _directory(self) -> tuple[int, bytes]:
        """Offset and bytes of the central directory, whose place is checked against the file's
        size."""
        size_bytes = self.size_bytes
        head = self._bytes_at(0, min(size_bytes, len(_LEGACY_TORCH)))
        if head == _LEGACY_TORCH:
            _damaged(
                self.path,
                "the file is a legacy torch file of before version 1.6",
                "a zip archive",
                None,
                "load and save it again with torch",
            )
        if not head.startswith(b"PK\3\4"):
            _damaged(
                self.path,
                "the file is no torch .pt file",
                "a zip archive",
                f"it begins with {head[:8]!r}",
            )
        tail = self._bytes_at(size_bytes - min(size_bytes, 98), min(size_bytes, 98))
        if len(tail) < _END.size or not tail[-_END.size :].startswith(b"PK\5\6"):
            _damaged(
                self.path,
                "the file is truncated",
                "a zip directory at its end",
                f"{size_bytes} bytes",
            )
        _, disk, first_disk, here, count, length, start, comment = _END.unpack(tail[-_END.size :])
        end = size_bytes - _END.size
        if start + length != end:  # torch always writes ZIP64 records, between directory and end
            end = size_bytes - 98
            here, count, length, start = self._zip64_end(tail, (here, count, length, start))
        if disk or first_disk or comment or here != count or start + length != end:
            _damaged(
                self.path,
                "the zip directory is malformed",
                f"it ends at byte {end}",
                f"{length} bytes from byte {start}",
            )
        if count > MAX_RECORDS or length > MAX_DIRECTORY_BYTES or count * _CENTRAL.size > length:
            _damaged(
                self.path,
                "the zip directory is of an impossible size",
                f"at most {MAX_RECORDS} records",
                f"{count} records in {length} bytes",
            )
        return start, self._bytes_at(start, length)

    def _zip64_end(self, tail: bytes, short: tuple[int, ...]) -> tuple[int, ...]:
        """(records here, records, directory bytes, its offset) of the ZIP64 end, which agrees with
        the `short` one."""
        if len(tail) == 98 and tail.startswith(b"PK\6\6") and tail.startswith(b"PK\6\7", 56):
            _, disk, end, disks = _END64_LOCATOR.unpack_from(tail, 56)
            _, size_bytes, _, _, here_disk, first_disk, *found = _END64.unpack_from(tail)
            agree = all(
                few in (many, cap)
                for few, many, cap in zip(
                    short, found, (_CAP16, _CAP16, _CAP32, _CAP32), strict=True
                )
            )
            if (
                agree
                and end == self.size_bytes - 98
                and size_bytes == _END64.size - 12
                and disks == 1
                and not (disk or here_disk or first_disk)
            ):
                return tuple(found)
        _damaged(
            self.path,
            "the zip directory is malformed",
            "an end record that agrees with the file's size",
            None,
        )

    def _locate(self, name: str) -> Record:
        """The record, its payload found through its local header, which must be the one that the
        directory means."""
        entry, raw = self._entries[name], name.encode()
        header = self._bytes_at(entry.header_bytes, _LOCAL.size + len(raw))
        mark, _, flags, method, _, _, _, _, _, name_bytes, extra_bytes = _LOCAL.unpack_from(header)
        offset_bytes = entry.header_bytes + _LOCAL.size + name_bytes + extra_bytes
        if (
            mark != b"PK\3\4"
            or flags & _REFUSED_FLAGS
            or method
            or header[_LOCAL.size :] != raw
            or name_bytes != len(raw)
            or offset_bytes + entry.size_bytes > entry.limit_bytes
        ):
            _damaged(
                self.path,
                f"the header of record {name} does not agree with the directory",
                f"{entry.size_bytes} stored bytes before byte {entry.limit_bytes}",
                f"bytes from {offset_bytes}",
            )
        return Record(name, offset_bytes, entry.size_bytes, entry.crc32)


class _Records(Mapping[str, Record]):
    def __init__(self, file: PtFile) -> None:
        self._file = file
        self._found: dict[str, Record] = {}

    def __getitem__(self, name: str) -> Record:
        if name not in self._found:
            self._found[name] = self._file._locate(name)
        return self._found[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._file._entries)

    def __len__(self) -> int:
        return len(self._file._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._file._entries


def _damaged(
    path: str, problem: str, expected: object, found: object, fix: str | None = None
) -> NoReturn:
    raise DamagedFileError(problem, file=path, expected=expected, found=found, fix=fix)


def _open(path: str) -> int:
    try:  # not blocking, or a named pipe would wait for its writer
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise NotFoundError(
            "the file does not exist", file=path, fix="restore it, or load another tag"
        ) from error
    except ValueError as error:
        raise UsageError("the path is malformed", found=repr(path)) from error
    except OSError as error:
        raise DamagedFileError(
            "the file can't be opened", file=path, found=error.strerror
        ) from error


def _regular_size(path: str, fd: int) -> int:
    try:
        status = os.fstat(fd)
    except OSError as error:
        _damaged(path, "the file can't be read", None, error.strerror)
    if not stat.S_ISREG(status.st_mode):
        _damaged(
            path,
            "this is no regular file",
            None,
            "a folder" if stat.S_ISDIR(status.st_mode) else "a device",
        )
    return status.st_size


_PLAIN_NAME = re.compile(r"((?!\.\.?/)[^/\\\x00-\x1f\x7f]+/)+(?!\.\.?\Z)[^/\\\x00-\x1f\x7f]+")


def _parse(directory: bytes, start: int, path: str) -> dict[str, _Entry]:
    """All records of the central directory, which starts at byte `start`, none reaching into
    another."""
    found: list[tuple[int, int, int, str]] = []  # header offset, size, CRC-32, name
    at = 0
    while at < len(directory):
        if at + _CENTRAL.size > len(directory):
            _damaged(
                path,
                "the zip directory is malformed",
                "whole entries",
                f"{len(directory) - at} bytes left over",
            )
        (
            mark,
            _,
            _,
            flags,
            method,
            _,
            _,
            crc32,
            stored,
            size_bytes,
            name_bytes,
            extra_bytes,
            comment_bytes,
            disk,
            _,
            _,
            header,
        ) = _CENTRAL.unpack_from(directory, at)
        name_at = at + _CENTRAL.size
        extra_at = name_at + name_bytes
        at = extra_at + extra_bytes + comment_bytes
        if mark != b"PK\1\2" or disk or at > len(directory):
            _damaged(path, "the zip directory is malformed", "an entry", f"entry {len(found)}")
        if _CAP32 in (stored, size_bytes, header):
            extra = directory[extra_at : extra_at + extra_bytes]
            size_bytes, stored, header = _zip64(extra, (size_bytes, stored, header), path)
        if flags & _REFUSED_FLAGS or method or stored != size_bytes:
            _damaged(
                path,
                "a record is compressed or encrypted",
                "stored records, as torch writes them",
                f"entry {len(found)}, method {method}, flags {flags:#x}",
            )
        found.append((header, size_bytes, crc32, _name(directory[name_at:extra_at], path)))
    return _bound(found, start, path)


def _name(raw: bytes, path: str) -> str:
    try:
        name = raw.decode("utf-8")
    except UnicodeDecodeError:
        name = ""
    if not _PLAIN_NAME.fullmatch(name):
        _damaged(path, "a record's name is not plain", "<archive>/<name>", ascii(raw[:100]))
    return name


def _zip64(extra: bytes, values: tuple[int, int, int], path: str) -> list[int]:
    """The values (size, stored size, header offset) with those at their cap replaced from the ZIP64
    extra field."""
    at, full = 0, list(values)
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, at)
        if kind == 1 and at + 4 + length <= len(extra):
            capped = [index for index, value in enumerate(values) if value == _CAP32]
            if length < 8 * len(capped):
                break
            for index, value in zip(
                capped, struct.unpack_from(f"<{len(capped)}Q", extra, at + 4), strict=True
            ):
                full[index] = value
            return full
        at += 4 + length
    _damaged(path, "the zip directory is malformed", "a ZIP64 field for each large value", None)


def _bound(found: list[tuple[int, int, int, str]], start: int, path: str) -> dict[str, _Entry]:
    """Gives each record the place where the next one begins as its limit, and checks that it ends
    before that."""
    limits: dict[str, int] = {}
    limit = start
    for header, size_bytes, _, name in sorted(found, reverse=True):
        if header + _LOCAL.size + len(name) + size_bytes > limit:
            _damaged(
                path,
                f"record {name} reaches into another or past the end",
                f"an end before byte {limit}",
                f"{size_bytes} bytes from byte {header}",
            )
        if name in limits:
            _damaged(path, "a record's name is there twice", None, name)
        limits[name], limit = limit, header
    return {
        name: _Entry(header, size_bytes, crc32, limits[name])
        for header, size_bytes, crc32, name in found
    }


def _root(entries: dict[str, _Entry], path: str) -> str:
    roots = {name.partition("/")[0] for name in entries}
    if len(roots) != 1 or f"{next(iter(roots))}/data.pkl" not in entries:
        _damaged(
            path,
            "the archive was not written by torch",
            "one folder with a data.pkl",
            f"{len(entries)} records in {len(roots)} folders",
        )
    return roots.pop()
