"""Writes folders that `torch.distributed.checkpoint.load` takes: first a plan of which file has
which tensor at which byte, then the index.

The plan needs no tensor and is the same wherever it is made. A tensor is one archive, as
`torch.save` writes it; FSDP2 on any number of ranks reads the rows that it needs of it.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from io import BytesIO
from typing import Any

from megatron_ucp.core.box import Ints
from megatron_ucp.core.plan import Slot
from megatron_ucp.formats.file_layout import Blob, Crcs, FileLayout, FilePiece
from megatron_ucp.formats.megatron.distcp import INDEX_FILE, SUFFIX
from megatron_ucp.formats.megatron.index_writer import (
    IndexedBytes,
    IndexedChunk,
    KeyPath,
    index_bytes,
)
from megatron_ucp.formats.pt.archive import ArchiveLayout, tensor_archive

_FILES = 8  # not as many as there are cores: every machine writes the same folder


@dataclass(frozen=True, slots=True)
class PlacedTensor:
    """A block of the tensor `key` as an archive: `slot` fills it."""

    key: str
    dtype: str
    start: Ints
    shape: Ints
    file: str
    offset_bytes: int
    archive: ArchiveLayout
    slot: Slot

    @property
    def data_offset(self) -> int:
        """The first byte of its elements in the file."""
        return self.offset_bytes + self.archive.places["0"]

    @property
    def indexed(self) -> IndexedChunk:
        """As the index lists it."""
        place = IndexedBytes(self.file, self.offset_bytes, self.archive.size_bytes)
        return IndexedChunk(self.key, self.start, self.shape, place)

    @property
    def piece(self) -> FilePiece:
        return FilePiece(0, self.slot, math.prod(self.shape), self.dtype, self.data_offset)

    def around(self, crcs: Crcs) -> Iterator[Blob]:
        """What stands around its elements."""
        for at, data in self.archive.around({"0": crcs[self.data_offset]}):
            yield self.offset_bytes + at, data


@dataclass
class IndexedFolder:
    """One folder with an index. `name` is its own with a slash, "" for the checkpoint itself;
    `paths` are those of all keys, in the order in which they were added."""

    name: str = ""
    paths: dict[str, KeyPath] = field(default_factory=dict)
    shapes: dict[str, tuple[str, Ints]] = field(default_factory=dict)
    placed: list[PlacedTensor] = field(default_factory=list)
    known: dict[str, tuple[str, int, bytes]] = field(default_factory=dict)
    copies: dict[str, str] = field(default_factory=dict)
    _ends: dict[str, int] = field(
        default_factory=lambda: {f"__{number}_0{SUFFIX}": 0 for number in range(_FILES)}
    )

    def tensor(
        self, path: KeyPath, dtype: str, whole: Ints, start: Ints, shape: Ints, slot: Slot
    ) -> str:
        """Adds a block of a tensor of the shape `whole`; returns its key."""
        key = self._key(path)
        self.shapes[key] = dtype, whole
        archive = tensor_archive(dtype, shape)
        file, at = self._take(archive.size_bytes)
        self.placed.append(PlacedTensor(key, dtype, start, shape, file, at, archive, slot))
        return key

    def small_tensor(self, path: KeyPath, value: Any) -> None:
        """Adds a tensor of torch that is known, whole."""
        key = self._key(path)
        self.shapes[key] = str(value.dtype).removeprefix("torch."), tuple(value.shape)
        self._add(key, value)

    def value(self, path: KeyPath, value: Any) -> None:
        """Adds a plain value. Equal ones lie in archives of their own all the same, as a reader
        takes places that two entries share for damage."""
        self._add(self._key(path), value)

    def copy(self, path: KeyPath, key: str) -> None:
        """Lists a tensor under a further key."""
        self.copies[self._key(path)] = key

    def _key(self, path: KeyPath) -> str:
        key = ".".join(map(str, path))
        self.paths[key] = path
        return key

    def _add(self, key: str, value: Any) -> None:
        import torch

        out = BytesIO()
        torch.save(value, out)
        file, at = self._take(len(out.getvalue()))
        self.known[key] = file, at, out.getvalue()

    def _take(self, size_bytes: int) -> tuple[str, int]:
        """The smallest file, and the first byte of a free place in it."""
        file = min(self._ends, key=self._ends.__getitem__)
        at = self._ends[file]
        self._ends[file] = at + size_bytes
        return file, at

    # ------------------------------------------------ files

    def layouts(self) -> Iterator[FileLayout]:
        """The files that hold anything."""
        for file, size in self._ends.items():
            if size:
                here = [one for one in self.placed if one.file == file]
                blobs = [
                    (at, partial(bytes, data)) for f, at, data in self.known.values() if f == file
                ]
                pieces = [one.piece for one in here]
                yield FileLayout(self.name + file, size, pieces, blobs, partial(_around, here))

    def index_bytes(self) -> bytes:
        """The file `.metadata`."""
        objects: dict[str, IndexedBytes] = {}
        chunks: list[IndexedChunk] = []
        for key, (file, at, data) in self.known.items():
            place = IndexedBytes(file, at, len(data))
            if key in self.shapes:
                shape = self.shapes[key][1]
                chunks.append(IndexedChunk(key, (0,) * len(shape), shape, place))
            else:
                objects[key] = place
        chunks += [one.indexed for one in self.placed]
        return index_bytes(self.shapes, chunks, objects, self.copies, self.paths)

    @property
    def index_file(self) -> str:
        return self.name + INDEX_FILE


def _around(tensors: Sequence[PlacedTensor], crcs: Crcs) -> Iterator[Blob]:
    for one in tensors:
        yield from one.around(crcs)
