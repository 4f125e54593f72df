"""Opens a torch `.pt` file as what it is: a zip archive of stored records, each a run of bytes at a
known offset.

The directory is parsed here and not by `zipfile`, as every number in it is checked against the
file's size and against the other records before it is used, and only the directory and the pickle
are read. Tensors are read later, by byte offset, without torch.
"""

import hashlib
import os
import zlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from functools import cached_property

from megatron_ucp.core.grouping import kept
from megatron_ucp.errors import UsageError
from megatron_ucp.formats.byte_files import OpenFile, Record, damaged
from megatron_ucp.formats.folder import StoredFile
from megatron_ucp.formats.pt.refs import ITEMSIZE, StorageRef, TensorRef, storages_of
from megatron_ucp.formats.pt.unpickle import (
    MAX_PICKLE_BYTES,
    NOTHING_MORE,
    AllowedClasses,
    VouchedClasses,
    loads,
    refuse_outside,
)
from megatron_ucp.formats.pt.zip import (
    LOCAL,
    REFUSED_FLAGS,
    find_directory,
    parse_directory,
    root_of,
)

# Of an archive inside of a file, what is read at once from either end: the directory that torch
# writes for one tensor has about 700 bytes, its pickle 300.
_END_BYTES = 1536
_BEHIND_BYTES = 64  # may follow a record before the next one: torch writes its size once more


class PtFile(OpenFile):
    """An open `.pt` file. Reads the directory at once, local headers and the pickle when asked; a
    context manager.

    Raises NotFoundError when there is no such file, and DamagedFileError when it can't be read or
    is no whole zip archive as torch writes it: stored, not encrypted, plain and different names,
    records that do not overlap.
    """

    def __init__(
        self,
        file: StoredFile | str | os.PathLike[str],
        *,
        allow: AllowedClasses = NOTHING_MORE,
        vouched: VouchedClasses | None = None,
    ) -> None:
        """`file` is as for `OpenFile`; `allow` and `vouched` are further classes that the pickle
        may name, as for `unpickle.loads`."""
        super().__init__(file)
        self._allow = allow
        self.vouched = vouched
        with ExitStack() as on_failure:
            on_failure.callback(self.close)
            self._read_directory()
            on_failure.pop_all()

    def _read_directory(self) -> None:
        start, directory = find_directory(self.size_bytes, self.stored.bytes_at, self.path)
        self.directory_sha256 = hashlib.sha256(directory).hexdigest()
        """Evidence that this is a certain file: it covers all names, places, sizes and CRC-32s."""
        self._entries = parse_directory(directory, start, self.path)
        self.root = root_of(self._entries, self.path)
        """The folder name that all records share."""
        self.records: Mapping[str, Record] = _Records(self)
        """By full name, in the directory's order. A look-up reads that record's local header,
        once."""
        self.has_checksums = any(entry.crc32 for entry in self._entries.values())
        """False when torch was told not to compute any (`set_crc32_options(False)`): all are 0
        then."""

    def __repr__(self) -> str:
        return f"PtFile({self.path!r}, {len(self._entries)} records)"

    @cached_property
    def tree(self) -> object:
        """The pickled value, a TensorRef for each tensor. Its CRC-32 is checked, and none of its
        code runs."""
        return self.value_of(self.pickled())

    def value_of(self, pickled: bytes) -> object:
        """The value of a pickle that lies in this file, or is the same as one that does."""
        tree = loads(pickled, file=self.path, allow=self._allow, vouched=self.vouched)
        if self.vouched is not None and self.vouched.names:
            refuse_outside(tree, self.vouched, self.path)
        return tree

    def pickled(self) -> bytes:
        """The pickle itself, its CRC-32 compared. Raises DamagedFileError."""
        entry = self._entries[f"{self.root}/data.pkl"]
        if entry.size_bytes > MAX_PICKLE_BYTES:
            damaged(
                self.path,
                "the pickle is larger than any that this package reads",
                f"at most {MAX_PICKLE_BYTES} bytes",
                f"{entry.size_bytes} bytes",
            )
        return self._whole("data.pkl")

    def record(self, storage: StorageRef) -> Record:
        """The record of a storage. Raises DamagedFileError when it is absent, of another size, or
        big-endian."""
        if self._byte_order != b"little":
            damaged(
                self.path,
                "the file was written on a machine of another byte order",
                "little",
                self._byte_order,
            )
        name = f"{self.root}/data/{storage.key}"
        if name not in self._entries:
            damaged(
                self.path,
                f"storage {storage.key} is not in the file",
                name,
                f"{len(self._entries)} records",
            )
        record = self.records[name]
        if record.size_bytes != storage.size_bytes:
            damaged(
                self.path,
                f"storage {storage.key} has another size than the pickle says",
                f"{storage.elems} elements of {storage.dtype}, {storage.size_bytes} bytes",
                f"{record.size_bytes} bytes",
            )
        return record

    def all_records(self) -> list[tuple[Record, str]]:
        """Every record, with the dtype of the tensors in it ("" where it holds none)."""
        places = {f"{self.root}/data/{one.key}": one.dtype for one in storages_of(self.tree)}
        return [(self.records[name], places.get(name, "")) for name in self.records]

    def prefetch(self, source: Record | StorageRef, start_byte: int, size_bytes: int) -> None:
        """Of a storage the header of its record comes too, which says where the bytes lie: up to
        some that follow them, at the end of what the record has. A storage that is not as the file
        says is left to who reads it."""
        if isinstance(source, Record):
            super().prefetch(source, start_byte, size_bytes)
            return
        name = f"{self.root}/data/{source.key}"
        entry = self._entries.get(name)
        if entry is None or start_byte + size_bytes > entry.size_bytes:
            return
        self.stored.prefetch(entry.header_bytes, LOCAL.size + len(name.encode()))
        if size_bytes:
            at = max(entry.header_bytes, entry.limit_bytes - entry.size_bytes - _BEHIND_BYTES)
            self.stored.prefetch(at + start_byte, size_bytes + _BEHIND_BYTES)

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
                    fix="read it row by row, or as a tensor",
                )
            first_byte, size_bytes = source.offset_elems * itemsize, source.numel * itemsize
            record = self.record(source.storage)
        else:
            record = self.record(source) if isinstance(source, StorageRef) else source
            size_bytes = record.size_bytes
        first = record.offset_bytes + first_byte
        self._read_run(record.name, first, size_bytes, start_byte, target)

    def _whole(self, name: str) -> bytes:
        """A small record, its checksum compared."""
        record = self.records[f"{self.root}/{name}"]
        data = self.stored.bytes_at(record.offset_bytes, record.size_bytes)
        self._compare_crc(record, zlib.crc32(data))
        return data

    @cached_property
    def _byte_order(self) -> bytes:
        entry = self._entries.get(f"{self.root}/byteorder")
        if entry is None:
            return b"little"  # what torch takes it to be in files of before 2.1
        return self._whole("byteorder") if entry.size_bytes <= 6 else b"malformed"

    def _locate(self, name: str) -> Record:
        """The record, its payload found through its local header, which must be the one that the
        directory means."""
        entry, raw = self._entries[name], name.encode()
        header = self.stored.bytes_at(entry.header_bytes, LOCAL.size + len(raw))
        mark, _, flags, method, _, _, _, _, _, name_bytes, extra_bytes = LOCAL.unpack_from(header)
        offset_bytes = entry.header_bytes + LOCAL.size + name_bytes + extra_bytes
        if (
            mark != b"PK\3\4"
            or flags & REFUSED_FLAGS
            or method
            or header[LOCAL.size :] != raw
            or name_bytes != len(raw)
            or offset_bytes + entry.size_bytes > entry.limit_bytes
        ):
            damaged(
                self.path,
                f"the header of record {name} does not agree with the directory",
                f"{entry.size_bytes} stored bytes before byte {entry.limit_bytes}",
                f"bytes from {offset_bytes}",
            )
        return Record(name, offset_bytes, entry.size_bytes, entry.crc32)


def _ends_of(size_bytes: int) -> Iterator[tuple[int, int]]:
    """The two ends of an archive: first byte and number of bytes."""
    for at in {0, max(0, size_bytes - _END_BYTES)}:
        yield at, min(_END_BYTES, size_bytes)


def prefetch_archive(file: StoredFile, start: int, size_bytes: int) -> None:
    """Lets storage begin with what is read of an archive in a file when that is opened."""
    for at, size in _ends_of(size_bytes):
        file.prefetch(start + at, size)


class _Part(StoredFile):
    """`size_bytes` of a file from byte `start` on, as a file of its own. All that an archive with
    one tensor has besides its elements lies at its two ends, which are read at once."""

    def __init__(self, whole: StoredFile, start: int, size_bytes: int) -> None:
        self.path, self.size_bytes = whole.path, size_bytes
        self._whole, self._start = whole, start
        self._ends = [(at, whole.bytes_at(start + at, size)) for at, size in _ends_of(size_bytes)]

    def close(self) -> None:
        """The file around it stays open."""

    def read(self, start_byte: int, target: memoryview) -> None:
        for at, block in self._ends:
            if at <= start_byte and start_byte + len(target) <= at + len(block):
                target[:] = block[start_byte - at : start_byte - at + len(target)]
                return
        self._whole.read(self._start + start_byte, target)

    def prefetch(self, start_byte: int, size_bytes: int) -> None:
        self._whole.prefetch(self._start + start_byte, size_bytes)


class PtArchive(PtFile):
    """A `.pt` archive that lies inside of a larger open file: `size_bytes` from byte `start` on.
    Places of its records count from there. It is open as long as that file is."""

    def __init__(
        self, file: OpenFile, start: int, size_bytes: int, allow: AllowedClasses = NOTHING_MORE
    ) -> None:
        self._start = start
        super().__init__(_Part(file.stored, start, size_bytes), allow=allow)

    def in_file(self, record: Record, name: str) -> Record:
        """A record by its place in the file around the archive, where it has another name."""
        return Record(name, self._start + record.offset_bytes, record.size_bytes, record.crc32)


class _Records(Mapping[str, Record]):
    def __init__(self, file: PtFile) -> None:
        self._file = file

    @kept
    def __getitem__(self, name: str) -> Record:
        return self._file._locate(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._file._entries)

    def __len__(self) -> int:
        return len(self._file._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._file._entries
