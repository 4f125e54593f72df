"""Writes a torch `.pt` file: a zip archive of stored records that stock `torch.load` reads,
streamed and with its CRC-32s.

Records begin at multiples of 64 bytes, as torch's own do. Sizes and offsets of 4 GiB and more stand
in ZIP64 fields.
"""

import os
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

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
        archive.add("data.pkl", [dumps(tree)])
        archive.add(".format_version", [b"1"])
        archive.add(".storage_alignment", [str(RECORD_ALIGNMENT).encode()])
        archive.add("byteorder", [b"little"])
        for storage in storages_of(tree):
            size = archive.add(f"data/{storage.key}", payload(storage))
            if size != storage.size_bytes:
                raise PlanError(
                    "a storage was given another number of bytes than it has",
                    file=path,
                    found=size,
                    expected=f"{storage.size_bytes} of data/{storage.key}",
                )
        archive.add("version", [b"3\n"])
        archive.finish()
        if durable:
            file.flush()
            os.fsync(file.fileno())


class _Archive:
    def __init__(self, file: BinaryIO, root: str) -> None:
        self._file, self._root, self._written = file, root, list[_Written]()

    def add(self, name: str, chunks: BytesOf) -> int:
        """Streams a record; its header, which holds size and CRC-32, is written last. Returns its
        bytes."""
        full = f"{self._root}/{name}".encode()
        offset = self._file.tell()
        zip64 = 20  # room for two sizes, used or not: the size is known at the end
        fill = -(offset + _LOCAL.size + len(full) + zip64 + 4) % RECORD_ALIGNMENT
        self._file.seek(offset + _LOCAL.size + len(full) + zip64 + 4 + fill)
        size = crc = 0
        for chunk in chunks:
            self._file.write(chunk)
            size += memoryview(chunk).nbytes
            crc = crc32(chunk, crc)
        end = self._file.tell()
        large = size >= LIMIT
        sizes = (LIMIT, LIMIT) if large else (size, size)
        extra = struct.pack(
            "<2H2Q", _ZIP64 if large else _FILL, 16, size if large else 0, size if large else 0
        )
        self._file.seek(offset)
        self._file.write(
            _LOCAL.pack(
                b"PK\3\4", _VERSION, _FLAGS, 0, 0, _DATE, crc, *sizes, len(full), zip64 + 4 + fill
            )
            + full
            + extra
            + struct.pack("<2H", _FILL, fill)
            + bytes(fill)
        )
        self._file.seek(end)
        self._written.append(_Written(full, offset, size, crc))
        return size

    def finish(self) -> None:
        """The directory, and the records that end the archive."""
        start = self._file.tell()
        for record in self._written:
            large = [value for value in (record.size, record.size, record.offset) if value >= LIMIT]
            extra = (
                struct.pack(f"<2H{len(large)}Q", _ZIP64, 8 * len(large), *large) if large else b""
            )
            size, offset = min(record.size, LIMIT), min(record.offset, LIMIT)
            self._file.write(
                _CENTRAL.pack(
                    b"PK\1\2",
                    _VERSION,
                    _VERSION,
                    _FLAGS,
                    0,
                    0,
                    _DATE,
                    record.crc,
                    size,
                    size,
                    len(record.name),
                    len(extra),
                    0,
                    0,
                    0,
                    0,
                    offset,
                )
                + record.name
                + extra
            )
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


def contiguous(key: str, dtype: str, shape: tuple[int, ...]) -> TensorRef:
    """A tensor that fills a storage of its own."""
    stride, step = [0] * len(shape), 1
    for dim in reversed(range(len(shape))):
        stride[dim], step = step, step * shape[dim]
    if dtype not in ITEMSIZE:
        raise PlanError("there is no such dtype", found=dtype)
    return TensorRef(StorageRef(key, dtype, step), 0, shape, tuple(stride))
