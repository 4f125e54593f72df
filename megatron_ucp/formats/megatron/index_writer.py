"""Plans and writes a folder for `torch.distributed.checkpoint`: which file has which archive at
which byte, and the index (`.metadata`), torch's own types, pickled as torch does. The same content
gives the same bytes, on every machine.

The plan needs no tensor. Several writers may fill one file by it: each writes its bytes to their
place, and one of them, who knows the CRC-32 of a chunk, what stands around them.
"""

import math
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from io import BytesIO
from typing import Any, Generic, TypeVar

from megatron_ucp.core.box import Ints
from megatron_ucp.core.plan import Slot
from megatron_ucp.formats.file_layout import Blob, Crcs, FileLayout, FilePiece
from megatron_ucp.formats.megatron.distcp import INDEX_FILE, SUFFIX
from megatron_ucp.formats.pt.archive import ArchiveLayout

KeyPath = tuple[str | int, ...]  # of a value in the nested dictionaries that a program saves


@dataclass(frozen=True, slots=True)
class PlacedChunk:
    """The block of the tensor `key` from `start` on, as the archive at `offset_bytes` of a file."""

    key: str
    dtype: str
    start: Ints
    shape: Ints
    file: str
    offset_bytes: int
    archive: ArchiveLayout

    @property
    def data_offset(self) -> int:
        """The first byte of its elements in the file; they are row-major."""
        return self.offset_bytes + self.archive.places["0"]

    def around(self, crcs: Crcs) -> Iterator[Blob]:
        """What stands around its elements in the file."""
        for at, data in self.archive.around({"0": crcs[self.data_offset]}):
            yield self.offset_bytes + at, data


AnyChunk = TypeVar("AnyChunk", bound=PlacedChunk)


class PlannedFolder(Generic[AnyChunk]):
    """Every chunk of every tensor, and every other object, by place: what is added goes into the
    smallest of so many files. `name` is the folder's with a slash, "" for the checkpoint itself.

    `shapes`: the dtype and the shape of each tensor. `objects` are small: key -> (file, first byte,
    bytes of the archive); those with a shape are tensors. `copies`: a further key of a tensor ->
    its key; the index lists both, for the same bytes. `paths`, in whose order all keys are listed,
    say where values lie in a program's dictionaries (empty: nowhere).
    """

    def __init__(self, files: int, name: str = "") -> None:
        self.name = name
        self.chunks: list[AnyChunk] = []
        self.shapes: dict[str, tuple[str, Ints]] = {}
        self.objects: dict[str, tuple[str, int, bytes]] = {}
        self.copies: dict[str, str] = {}
        self.paths: dict[str, KeyPath] = {}
        self._ends = {file_of(number): 0 for number in range(max(1, files))}

    def take(self, size_bytes: int, owner: int | None = None) -> tuple[str, int]:
        """A file, the smallest or its owner's, and the first byte of a free place in it."""
        smallest = min(self._ends, key=self._ends.__getitem__)
        file = smallest if owner is None else file_of(owner)
        offset = self._ends.get(file, 0)
        self._ends[file] = offset + size_bytes
        return file, offset

    def add_object(self, key: str, data: bytes) -> None:
        """Adds what `torch.save` made of an object."""
        self.objects[key] = (*self.take(len(data)), data)

    @property
    def index_file(self) -> str:
        return self.name + INDEX_FILE

    @property
    def sizes(self) -> Mapping[str, int]:
        """The bytes of each file that holds anything."""
        return {name: size for name, size in self._ends.items() if size}

    def layouts(
        self, slot_of: Callable[[AnyChunk], tuple[int, Slot]], rank: int | None = None
    ) -> Iterator[FileLayout]:
        """The files; `slot_of` gives the part of an output, and the slot of it, that a chunk is
        read into. Of other files than that of a `rank` no chunks are given."""
        held: dict[str, list[AnyChunk]] = {name: [] for name in self.sizes}
        for chunk in self.chunks:
            if rank is None or chunk.file == file_of(rank):
                held[chunk.file].append(chunk)
        for name, size in self.sizes.items():
            objects = self.objects.values()
            blobs = [(at, partial(bytes, data)) for file, at, data in objects if file == name]
            pieces = [
                FilePiece(*slot_of(one), math.prod(one.shape), one.dtype, one.data_offset)
                for one in held[name]
            ]
            around, owner = partial(_around, held[name]), int(name.split("_")[2])
            yield FileLayout(self.name + name, size, pieces, blobs, around, owner)

    def index_bytes(self) -> bytes:
        """The file `.metadata`."""
        import torch
        from torch.distributed.checkpoint.filesystem import _StorageInfo
        from torch.distributed.checkpoint.metadata import (
            BytesStorageMetadata,
            ChunkStorageMetadata,
            Metadata,
            MetadataIndex,
            StorageMeta,
            TensorProperties,
            TensorStorageMetadata,
        )

        one_of = {}.setdefault  # equal texts are one object, which is pickled once
        size_of = cache(torch.Size)
        entries: dict[str, Any] = {}
        places: dict[Any, Any] = {}
        for key in self.paths or (*self.objects, *self.shapes):
            name = one_of(key, key)
            if key in self.shapes:
                dtype, shape = self.shapes[key]
                properties = TensorProperties(dtype=getattr(torch, dtype))
                entries[name] = TensorStorageMetadata(properties, size_of(shape), [])
            elif key in self.objects:
                entries[name] = BytesStorageMetadata()
        chunks: list[tuple[str, Ints, Ints, tuple[str, int, int]]] = []
        for key, (file, at, data) in self.objects.items():
            if key in self.shapes:
                shape = self.shapes[key][1]
                chunks.append((key, (0,) * len(shape), shape, (file, at, len(data))))
            else:
                info = _StorageInfo(one_of(file, file), at, len(data))
                places[MetadataIndex(one_of(key, key))] = info
        for one in self.chunks:
            place = one.file, one.offset_bytes, one.archive.size_bytes
            chunks.append((one.key, one.start, one.shape, place))
        for key, start, shape, (file, at, size) in chunks:
            entries[key].chunks.append(ChunkStorageMetadata(size_of(start), size_of(shape)))
            info = _StorageInfo(one_of(file, file), at, size)
            places[MetadataIndex(one_of(key, key), size_of(start))] = info
        for other, key in self.copies.items():  # behind all others: a reader takes the first
            entries[one_of(other, other)] = entries[key]
            for chunk in entries[key].chunks:
                place = places[MetadataIndex(key, chunk.offsets)]
                places[MetadataIndex(one_of(other, other), chunk.offsets)] = place
        listed = {
            one_of(key, key): tuple(one_of(part, part) for part in path)
            for key, path in self.paths.items()
        }
        index = Metadata(entries, listed or None, places, StorageMeta(), "1.0.0")
        return pickle.dumps(index, protocol=4)


def _around(chunks: Sequence[PlacedChunk], crcs: Crcs) -> Iterator[Blob]:
    for chunk in chunks:
        yield from chunk.around(crcs)


def file_of(number: int) -> str:
    """The file that a rank writes."""
    return f"__{number}_0{SUFFIX}"


def saved(value: Any) -> bytes:
    """What `torch.save` makes of a value."""
    import torch

    out = BytesIO()
    torch.save(value, out)
    return out.getvalue()
