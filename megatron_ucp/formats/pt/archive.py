"""A torch `.pt` file that is written: a zip archive of stored records that stock `torch.load`
reads, with its CRC-32s. Where everything lies is known before the bytes of any tensor are.

Records begin at multiples of 64 bytes, as torch's own do. Sizes and offsets of 4 GiB and more stand
in ZIP64 fields.
"""

import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import PurePath
from typing import Any

from isal.isal_zlib import crc32

from megatron_ucp.core.box import Ints
from megatron_ucp.core.mesh import Coords
from megatron_ucp.core.plan import Slot
from megatron_ucp.core.values import InertObject
from megatron_ucp.errors import PlanError
from megatron_ucp.formats.pt.pickle import dumps
from megatron_ucp.formats.pt.refs import ITEMSIZE, StorageRef, TensorRef, storages_of
from megatron_ucp.formats.pt.unpickle import with_tensors
from megatron_ucp.formats.pt.zip import END, END64, END64_LOCATOR, LOCAL
from megatron_ucp.formats.store import bring_to_disk, written_by_places

RECORD_ALIGNMENT = 64
LIMIT = 0xFFFFFFFF  # from here on a number stands in the ZIP64 field
_CENTRAL = struct.Struct("<4s6H3L5H2L")
_VERSION, _FLAGS, _DATE = 45, 0x0800, 0x21  # ZIP64, names in UTF-8, the first day of 1980
_SIZES_BYTES = 20  # room for two sizes in the header, used or not: the size is known at the end
_ZIP64, _FILL = 0x0001, 0x4246  # ids of extra fields; the second one is torch's own, "FB"

BytesOf = Iterable[bytes | bytearray | memoryview]


def write_pt(
    path: str | os.PathLike[str], tree: object, payload: Callable[[StorageRef], BytesOf]
) -> None:
    """Writes a tree with TensorRefs; `payload` gives the bytes of each storage, in as many chunks
    as it likes. The file is on disk when this returns. Raises PlanError where a payload has another
    size than its storage, OSError."""
    layout = archive_layout(PurePath(path).stem, tree)
    crcs: dict[str, int] = {}
    with written_by_places(path) as file:
        for storage in storages_of(tree):
            file.seek(layout.places[storage.key])
            size = crc = 0
            for chunk in payload(storage):
                file.write(chunk)
                size += memoryview(chunk).nbytes
                crc = crc32(chunk, crc)
            if size != storage.size_bytes:
                raise PlanError(
                    "a storage was given another number of bytes than it has",
                    file=path,
                    found=size,
                    expected=f"{storage.size_bytes} of data/{storage.key}",
                )
            crcs[storage.key] = crc
        for at, data in layout.around(crcs):
            file.seek(at)
            file.write(data)
        bring_to_disk(file)


@dataclass(frozen=True, slots=True)
class _Record:
    """A record: its full name, the byte of the file at which its header begins, the bytes of the
    header, its size."""

    name: bytes
    offset: int
    header_bytes: int
    size: int

    @property
    def start(self) -> int:
        """Its first byte."""
        return self.offset + self.header_bytes

    @property
    def _sizes(self) -> tuple[int, int]:
        return (LIMIT, LIMIT) if self.size >= LIMIT else (self.size, self.size)

    def header(self, crc: int) -> bytes:
        """What stands before it: the padding makes its first byte an aligned one."""
        fill = self.header_bytes - LOCAL.size - len(self.name) - _SIZES_BYTES - 4
        is_large = self.size >= LIMIT
        size = self.size if is_large else 0
        extra = struct.pack("<2H2Q", _ZIP64 if is_large else _FILL, 16, size, size)
        lengths = len(self.name), _SIZES_BYTES + 4 + fill
        fixed = LOCAL.pack(b"PK\3\4", _VERSION, _FLAGS, 0, 0, _DATE, crc, *self._sizes, *lengths)
        return fixed + self.name + extra + struct.pack("<2H", _FILL, fill) + bytes(fill)

    def entry(self, crc: int) -> bytes:
        """Its entry in the directory at the archive's end."""
        large = [value for value in (self.size, self.size, self.offset) if value >= LIMIT]
        extra = struct.pack(f"<2H{len(large)}Q", _ZIP64, 8 * len(large), *large) if large else b""
        made_by = _VERSION, _VERSION, _FLAGS, 0, 0, _DATE
        lengths = len(self.name), len(extra), 0, 0, 0, 0
        offset = min(self.offset, LIMIT)
        fixed = _CENTRAL.pack(b"PK\1\2", *made_by, crc, *self._sizes, *lengths, offset)
        return fixed + self.name + extra


@dataclass(frozen=True)
class ArchiveLayout:
    """Where everything of an archive lies: `places` are the first bytes of its storages, by key."""

    records: tuple[_Record, ...]
    known: dict[int, bytes]  # the bytes of records that are no storages, by number
    places: dict[str, int]
    keys: dict[int, str]  # of storages, by number

    @property
    def directory(self) -> int:
        """The byte at which the directory begins."""
        last = self.records[-1]
        return last.start + last.size

    @cached_property
    def size_bytes(self) -> int:
        """How long the archive is."""
        return self.directory + len(self._closing([0] * len(self.records)))

    def around(self, crcs: Mapping[str, int]) -> Iterator[tuple[int, bytes]]:
        """What is no storage, in runs, each with its first byte: with the CRC-32 of each storage,
        by key."""
        sums: list[int] = []
        start, run = 0, bytearray()
        for number, record in enumerate(self.records):
            data, key = self.known.get(number, b""), self.keys.get(number)
            sums.append(crc32(data) if key is None else crcs[key])
            run += record.header(sums[-1]) + data
            if key is not None:
                yield start, bytes(run)
                start, run = record.start + record.size, bytearray()
        yield start, bytes(run) + self._closing(sums)

    def _closing(self, sums: Sequence[int]) -> bytes:
        """The directory, and what ends the archive."""
        pairs = zip(self.records, sums, strict=True)
        entries = b"".join(record.entry(crc) for record, crc in pairs)
        start, size, count = self.directory, len(entries), len(self.records)
        end, far = start + size, b""
        if end >= LIMIT or count > 0xFFFF:
            versions = _VERSION, _VERSION, 0, 0
            far = END64.pack(b"PK\6\6", END64.size - 12, *versions, count, count, size, start)
            far += END64_LOCATOR.pack(b"PK\6\7", 0, end, 1)
        few = min(count, 0xFFFF)
        last = END.pack(b"PK\5\6", 0, 0, few, few, min(size, LIMIT), min(start, LIMIT), 0)
        return entries + far + last


def archive_layout(root: str, tree: object) -> ArchiveLayout:
    """The archive of a tree, whose records lie in a folder `root`; the bytes of its storages need
    not be known."""
    sizes = {one.key: one.size_bytes for one in storages_of(tree)}
    return archive_of(root, dumps(tree), sizes)


def archive_of(root: str, pickled: bytes, storages: Mapping[str, int]) -> ArchiveLayout:
    """As `archive_layout`, of a tree that is pickled already, and the bytes of each storage by its
    key."""
    before = {
        "data.pkl": pickled,
        ".format_version": b"1",
        ".storage_alignment": str(RECORD_ALIGNMENT).encode(),
        "byteorder": b"little",
    }
    records: list[_Record] = []
    known: dict[int, bytes] = {}
    places: dict[str, int] = {}
    keys: dict[int, str] = {}
    at = 0
    named: list[tuple[str, int, str | None]] = [
        *((name, len(data), None) for name, data in before.items()),
        *((f"data/{key}", size, key) for key, size in storages.items()),
        ("version", 2, None),
    ]
    for number, (name, size, key) in enumerate(named):
        full = f"{root}/{name}".encode()
        least = at + LOCAL.size + len(full) + _SIZES_BYTES + 4
        record = _Record(full, at, least + -least % RECORD_ALIGNMENT - at, size)
        records.append(record)
        at = record.start + size
        if key is None:
            known[number] = before.get(name, b"3\n")
        else:
            keys[number], places[key] = key, record.start
    return ArchiveLayout(tuple(records), known, places, keys)


@lru_cache(maxsize=4096)  # layers are alike, and masters and moments
def tensor_archive(dtype: str, shape: tuple[int, ...]) -> ArchiveLayout:
    """The archive that `torch.save` makes of a contiguous tensor, which is its storage "0". Raises
    PlanError for a dtype that does not exist."""
    return archive_layout("archive", contiguous("0", dtype, shape))


def contiguous(key: str, dtype: str, shape: tuple[int, ...]) -> TensorRef:
    """A tensor that fills a storage of its own."""
    stride, step = [0] * len(shape), 1
    for dim in reversed(range(len(shape))):
        stride[dim], step = step, step * shape[dim]
    if dtype not in ITEMSIZE:
        raise PlanError("there is no such dtype", found=dtype)
    return TensorRef(StorageRef(key, dtype, step), 0, shape, tuple(stride))


# ---- files that are written: trees, and where the bytes of each storage come from


@dataclass(frozen=True, slots=True)
class Weight:
    """The training copy of a parameter that a tensor-parallel rank has: its master in the training
    dtype."""

    param: str
    cut: Coords


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor of the source's model file that belongs to no parameter (client state, scheduler):
    copied as it is."""

    ref: TensorRef


Payload = Slot | Weight | Stored | bytes


@dataclass
class Output:
    """One .pt file: its name in the tag folder, its tree, and what fills each storage, by key."""

    name: str
    tree: Any = None
    payloads: dict[str, Payload] = field(default_factory=dict)

    def tensor(
        self, payload: Payload, dtype: str, shape: Ints, used: Ints | None = None
    ) -> TensorRef:
        """A tensor that fills a storage of its own, or of which only the first `used` elements are
        one."""
        key = str(len(self.payloads))
        self.payloads[key] = payload
        ref = contiguous(key, dtype, shape)
        return ref if used is None else TensorRef(ref.storage, 0, used, (1,) * len(used))

    def adopt(self, value: Any) -> Any:
        """A value of the source's model file, with the tensors in it, for this file."""
        return with_tensors(value, self._adopted)

    def _adopted(self, found: TensorRef | InertObject) -> TensorRef:
        if isinstance(found, TensorRef):
            return self.tensor(Stored(found), found.storage.dtype, found.shape)
        data: Any = found.get("data")
        shape: Any = found.get("shape")
        return self.tensor(data, str(found.get("dtype")), shape)
