"""Writes a torch `.pt` file: a zip archive of stored records that stock `torch.load` reads,
streamed and with its CRC-32s.

Records begin at multiples of 64 bytes, as torch's own do. Sizes and offsets of 4 GiB and more stand
in ZIP64 fields.
"""

import math
import os
import struct
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

from isal.isal_zlib import crc32

from megatron_ucp.errors import PlanError
from megatron_ucp.formats.pt.pickler import dumps
from megatron_ucp.formats.pt.values import ITEMSIZE, StorageRef, TensorRef, storages_of

RECORD_ALIGNMENT = 64
LIMIT = 0xFFFFFFFF  # from here on a number stands in the ZIP64 field
_LOCAL = struct.Struct("<4s5H3L2H")
_CENTRAL = struct.Struct("<4s6H3L5H2L")
_END64 = struct.Struct("<4sQ2H2L4Q")
_END64_LOCATOR = struct.Struct("<4sLQL")
_END = struct.Struct("<4s4H2LH")
_VERSION, _FLAGS, _DATE = 45, 0x0800, 0x21  # ZIP64, names in UTF-8, the first day of 1980
_SIZES_BYTES = 20  # room for two sizes in the header, used or not: the size is known at the end
_ZIP64, _FILL = 0x0001, 0x4246  # ids of extra fields; the second one is torch's own, "FB"

BytesOf = Iterable[bytes | bytearray | memoryview]


@dataclass(frozen=True)
class _Written:
    name: bytes
    offset: int
    size: int
    crc: int


def write_pt(
    path: str | Path, tree: object, payload: Callable[[StorageRef], BytesOf], durable: bool = True
) -> None:
    """Writes a tree with TensorRefs; `payload` gives the bytes of each storage, in as many chunks
    as it likes.

    The file is on disk when this returns, unless `durable` is False. Raises PlanError where a
    payload has another size than its storage, OSError.
    """
    with open(path, "wb") as file:
        archive = _Archive(file, Path(path).stem)
        archive.begin(tree)
        for storage in storages_of(tree):
            size = archive.add(f"data/{storage.key}", payload(storage))
            if size != storage.size_bytes:
                raise PlanError(
                    "a storage was given another number of bytes than it has",
                    file=path,
                    found=size,
                    expected=f"{storage.size_bytes} of data/{storage.key}",
                )
        archive.finish()
        if durable:
            file.flush()
            os.fsync(file.fileno())


class _Sink(Protocol):
    """What an archive is written into."""

    def tell(self) -> int: ...

    def seek(self, offset: int, /) -> object: ...

    def write(self, data: Any, /) -> object: ...


class _Archive:
    def __init__(self, file: _Sink, root: str) -> None:
        self._file, self._root, self._written = file, root, list[_Written]()

    def begin(self, tree: object) -> None:
        """The records before the storages."""
        self.add("data.pkl", [dumps(tree)])
        self.add(".format_version", [b"1"])
        self.add(".storage_alignment", [str(RECORD_ALIGNMENT).encode()])
        self.add("byteorder", [b"little"])

    def add(self, name: str, chunks: BytesOf) -> int:
        """Streams a record; its header, which holds size and CRC-32, is written last. Returns its
        bytes."""
        offset = self._file.tell()
        self._file.seek(offset + self._header_bytes(name, offset))
        size = crc = 0
        for chunk in chunks:
            self._file.write(chunk)
            size += memoryview(chunk).nbytes
            crc = crc32(chunk, crc)
        self._file.seek(offset)
        self.reserve(name, size, crc)
        return size

    def reserve(self, name: str, size: int, crc: int) -> int:
        """Writes the header of a record of `size` bytes, whose bytes another call writes; returns
        where they begin."""
        full = f"{self._root}/{name}".encode()
        offset = self._file.tell()
        fill = self._header_bytes(name, offset) - _LOCAL.size - len(full) - _SIZES_BYTES - 4
        large = size >= LIMIT
        sizes = (LIMIT, LIMIT) if large else (size, size)
        extra = struct.pack(
            "<2H2Q", _ZIP64 if large else _FILL, 16, size if large else 0, size if large else 0
        )
        name_and_extra = len(full), _SIZES_BYTES + 4 + fill
        self._file.write(
            _LOCAL.pack(b"PK\3\4", _VERSION, _FLAGS, 0, 0, _DATE, crc, *sizes, *name_and_extra)
            + full
            + extra
            + struct.pack("<2H", _FILL, fill)
            + bytes(fill)
        )
        start = self._file.tell()
        self._file.seek(start + size)
        self._written.append(_Written(full, offset, size, crc))
        return start

    def _header_bytes(self, name: str, offset: int) -> int:
        """Bytes from a record's header to its first byte, which is aligned."""
        least = offset + _LOCAL.size + len(f"{self._root}/{name}".encode()) + _SIZES_BYTES + 4
        return least + -least % RECORD_ALIGNMENT - offset

    def finish(self) -> None:
        """The last record, the directory, and what ends the archive."""
        self.add("version", [b"3\n"])
        start = self._file.tell()
        for record in self._written:
            self._file.write(_central(record))
        end, count = self._file.tell(), len(self._written)
        if end >= LIMIT or count > 0xFFFF:
            self._file.write(
                _END64.pack(
                    b"PK\6\6",
                    _END64.size - 12,
                    _VERSION,
                    _VERSION,
                    0,
                    0,
                    count,
                    count,
                    end - start,
                    start,
                )
            )
            self._file.write(_END64_LOCATOR.pack(b"PK\6\7", 0, end, 1))
        self._file.write(
            _END.pack(
                b"PK\5\6",
                0,
                0,
                min(count, 0xFFFF),
                min(count, 0xFFFF),
                min(end - start, LIMIT),
                min(start, LIMIT),
                0,
            )
        )


def _central(record: _Written) -> bytes:
    """The entry of a record in the directory at the archive's end."""
    large = [value for value in (record.size, record.size, record.offset) if value >= LIMIT]
    extra = struct.pack(f"<2H{len(large)}Q", _ZIP64, 8 * len(large), *large) if large else b""
    size, offset = min(record.size, LIMIT), min(record.offset, LIMIT)
    made_by = _VERSION, _VERSION, _FLAGS, 0, 0, _DATE
    lengths = len(record.name), len(extra), 0, 0, 0, 0
    fixed = _CENTRAL.pack(b"PK\1\2", *made_by, record.crc, size, size, *lengths, offset)
    return fixed + record.name + extra


@dataclass(frozen=True, slots=True)
class TensorArchive:
    """An archive with one tensor, before its bytes are known: they are `size_bytes` long and begin
    `data_offset` bytes into it; all of it takes `archive_bytes`."""

    dtype: str
    shape: tuple[int, ...]
    data_offset: int
    archive_bytes: int

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * ITEMSIZE[self.dtype]

    def around(self, crc: int) -> tuple[bytes, bytes]:
        """What stands before the bytes of the tensor and behind them, for bytes with this
        CRC-32."""
        return _around(self.dtype, self.shape, self.size_bytes, crc)


@lru_cache(maxsize=4096)  # layers are alike, and masters and moments
def tensor_archive(dtype: str, shape: tuple[int, ...]) -> TensorArchive:
    """The archive that `torch.save` makes of a contiguous tensor. Raises PlanError for a dtype that
    does not exist."""
    size = contiguous("0", dtype, shape).storage.size_bytes
    before, behind = _around(dtype, shape, size, 0)
    return TensorArchive(dtype, shape, len(before), len(before) + size + len(behind))


def _around(dtype: str, shape: tuple[int, ...], size: int, crc: int) -> tuple[bytes, bytes]:
    """The bytes of an archive around those of its one tensor."""
    file = _Holed()
    archive = _Archive(file, "archive")
    archive.begin(contiguous("0", dtype, shape))
    file.begin_hole(archive.reserve("data/0", size, crc), size)
    archive.finish()
    return bytes(file.before), bytes(file.behind)


class _Holed:
    """A file in memory without the bytes of one hole."""

    def __init__(self) -> None:
        self.before, self.behind = bytearray(), bytearray()
        self._at, self._hole_end = 0, sys.maxsize

    def begin_hole(self, start: int, size: int) -> None:
        """The next `size` bytes from `start` on are not kept."""
        self._hole_end = start + size

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int) -> object:
        self._at = offset

    def write(self, data: bytes) -> object:
        is_behind = self._at >= self._hole_end
        part, at = (
            (self.behind, self._at - self._hole_end) if is_behind else (self.before, self._at)
        )
        part.extend(bytes(max(0, at + len(data) - len(part))))
        part[at : at + len(data)] = data
        self._at += len(data)


def contiguous(key: str, dtype: str, shape: tuple[int, ...]) -> TensorRef:
    """A tensor that fills a storage of its own."""
    stride, step = [0] * len(shape), 1
    for dim in reversed(range(len(shape))):
        stride[dim], step = step, step * shape[dim]
    if dtype not in ITEMSIZE:
        raise PlanError("there is no such dtype", found=dtype)
    return TensorRef(StorageRef(key, dtype, step), 0, shape, tuple(stride))
