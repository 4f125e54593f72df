"""torch's distributed checkpoints: a tensor and its chunks, as the index (`.metadata`) lists them,
the blocks of parameters that chunks hold, and the files (`.distcp`), which are rows of `.pt`
archives."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from megatron_ucp.core.box import Bounds, Ints, strides
from megatron_ucp.core.grouping import MadeWhenAsked, kept
from megatron_ucp.errors import DamagedFileError
from megatron_ucp.formats.byte_files import OpenFile, Record, Where, damaged
from megatron_ucp.formats.folder import StoredFile
from megatron_ucp.formats.megatron.arguments import OF_VALUES
from megatron_ucp.formats.pt.file import PtArchive, prefetch_archive
from megatron_ucp.formats.pt.refs import ITEMSIZE, TensorRef, storages_of

# ---- what the index lists

INDEX_FILE, SUFFIX = ".metadata", ".distcp"


@dataclass(frozen=True, slots=True)
class ArchivePlace:
    """Bytes of a file of the folder: one whole archive, as `torch.save` writes it."""

    file: str
    offset_bytes: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """A block of a stored tensor: where it begins in it, its shape, and its archive."""

    start: Ints
    shape: Ints
    place: ArchivePlace

    @property
    def stop(self) -> Ints:
        return tuple(a + n for a, n in zip(self.start, self.shape, strict=True))


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor by its key, whole: its chunks cover it exactly."""

    key: str
    dtype: str
    shape: Ints
    chunks: Sequence[Chunk]


# ---- blocks of parameters


@dataclass(frozen=True, eq=False, slots=True)
class Blocks(MadeWhenAsked[tuple[Bounds, ...]]):
    """What chunks hold of one parameter: block number i is [starts[i], stops[i]) of it, in a row
    from element `offsets[i]` of chunk number `chunks[i]` on. They are rows of arrays, as an index
    may list a million, and states that are cut alike share them; as a sequence they are the boxes
    that the layout `Chunks` asks for."""

    starts: Any
    stops: Any
    chunks: Any
    offsets: Any

    @classmethod
    def of(cls, tensor: StoredTensor) -> "Blocks":
        """Each chunk of a tensor of an index, whole."""
        import numpy as np  # here, as its import is felt by who opens another format

        chunks: Any = tensor.chunks
        starts, sizes = (np.asarray(each, np.int64) for each in (chunks.starts, chunks.sizes))
        count = len(starts)
        return cls(starts, starts + sizes, np.arange(count), np.zeros(count, np.int64))

    def __len__(self) -> int:
        return len(self.starts)

    def made(self, number: int) -> tuple[Bounds, ...]:
        return ((tuple(self.starts[number].tolist()), tuple(self.stops[number].tolist())),)

    def __eq__(self, other: object) -> bool:
        """Whether the boxes are the same ones: of arrays that states of a model share at once."""
        import numpy as np

        if not isinstance(other, Blocks):
            return MadeWhenAsked.__eq__(self, other)
        pairs = (self.starts, other.starts), (self.stops, other.stops)
        return all(one is two or np.array_equal(one, two) for one, two in pairs)

    def __hash__(self) -> int:
        return MadeWhenAsked.__hash__(self)

    def taken(self, which: Any) -> "Blocks":
        """Some of the blocks: a slice, or an array that picks them."""
        boxes = self.starts[which], self.stops[which]
        return Blocks(*boxes, self.chunks[which], self.offsets[which])

    def cut(self, dim: int, borders: Sequence[int]) -> "Blocks":
        """The blocks cut at the `borders` of a dim, which are sorted and enclose all; of each dim
        before it a block has one index. [0, 4) and [4, 6) become [0, 3), [3, 4) and [4, 6) at the
        borders 0, 3 and 6; the second begins three rows later in its chunk than the first."""
        import numpy as np

        at = np.array(borders, np.int64)
        first = np.searchsorted(at, self.starts[:, dim], "right") - 1
        counts = np.searchsorted(at, self.stops[:, dim]) - first
        parts = self.taken(np.repeat(np.arange(len(self)), counts))
        before = np.cumsum(counts) - counts
        span = np.arange(len(parts)) + np.repeat(first - before, counts)
        starts, stops = parts.starts, parts.stops
        rows = np.maximum(at[span] - starts[:, dim], 0)
        offsets = parts.offsets + rows * (stops - starts)[:, dim + 1 :].prod(1)
        starts[:, dim] += rows
        stops[:, dim] = np.minimum(stops[:, dim], at[span + 1])
        return Blocks(starts, stops, parts.chunks, offsets)

    def stacked(self, counts: Ints) -> "list[Blocks]":
        """The blocks of each parameter of those that are stacked along the leading dims, so many
        along each, sorted by where they begin. Of 2 layers with 3 experts, (2, 3), a chunk
        [0:2, 1:2, ...] has a block of parameter 1 and, behind it, one of parameter 4."""
        import numpy as np

        each, dims = self, len(counts)
        for dim, count in enumerate(counts):
            each = each.cut(dim, range(count + 1))
        numbers = each.starts[:, :dims] @ np.array(strides(counts), np.int64)
        starts, stops = each.starts[:, dims:], each.stops[:, dims:]
        order = np.lexsort((*starts.T[::-1], numbers))
        ends = np.searchsorted(numbers[order], np.arange(math.prod(counts) + 1)).tolist()
        rows = Blocks(starts, stops, each.chunks, each.offsets).taken(order)
        return [rows.taken(slice(*ends[n : n + 2])) for n in range(len(ends) - 1)]

    def moved(self, rows: int) -> "Blocks":
        """The blocks so many rows further down in their parameter."""
        starts, stops = self.starts.copy(), self.stops.copy()
        starts[:, 0] += rows
        stops[:, 0] += rows
        return Blocks(starts, stops, self.chunks, self.offsets)

    def chunk(self, number: int, tensors: Sequence[StoredTensor]) -> tuple[StoredTensor, Chunk]:
        """The tensor and the chunk of a block, of which all chunks are those of `tensors`."""
        at, left = int(self.chunks[number]), [*tensors]
        while at >= len(left[0].chunks):
            at -= len(left.pop(0).chunks)
        return left[0], left[0].chunks[at]

    def where(
        self, number: int, tensors: Sequence[StoredTensor], file: "Callable[[str], DistcpFile]"
    ) -> Where:
        """Where a block lies in `tensors`; `file` opens one by its name. Raises
        DamagedFileError."""
        tensor, chunk = self.chunk(number, tensors)
        opened = file(chunk.place.file)
        record = opened.record_of_chunk(tensor, chunk)
        offset = int(self.offsets[number]) * ITEMSIZE[tensor.dtype]
        return Where(opened, record, offset, self.elems(number), tensor.dtype)

    def elems(self, number: int) -> int:
        """How many elements a block has."""
        return math.prod((self.stops[number] - self.starts[number]).tolist())


def joined(parts: Sequence[tuple[StoredTensor, Blocks]]) -> Blocks:
    """The blocks of a parameter that several tensors have parts of, in this order; their chunks are
    counted through all of these."""
    import numpy as np

    before = np.cumsum([0, *(len(tensor.chunks) for tensor, _ in parts)])
    chunks = [blocks.chunks + n for (_, blocks), n in zip(parts, before, strict=False)]
    return Blocks(
        np.concatenate([blocks.starts for _, blocks in parts]),
        np.concatenate([blocks.stops for _, blocks in parts]),
        np.concatenate(chunks),
        np.concatenate([blocks.offsets for _, blocks in parts]),
    )


def aligned(states: Mapping[str, Blocks]) -> Mapping[str, Blocks] | None:
    """The blocks of the states of one parameter in the same boxes: as they are, or cut at the rows
    at which any state is cut. None where they are cut differently along another dim."""
    import numpy as np

    first, *others = states.values()
    if all(each == first for each in others):
        return states
    sides = [side[:, 0] for each in states.values() for side in (each.starts, each.stops)]
    borders, parts = np.unique(np.concatenate(sides)).tolist(), dict[str, Blocks]()
    for state, each in states.items():
        cut = each.cut(0, borders)
        parts[state] = cut.taken(np.lexsort(cut.starts.T[::-1]))
    first, *others = parts.values()
    return parts if all(each == first for each in others) else None


# ---- distcp


class DistcpFile(OpenFile):
    """One open file, and what the index says of it: its chunks of tensors, and its objects by key.
    An archive's directory and pickle are read when it is asked for."""

    def __init__(
        self,
        file: StoredFile,
        chunks: Sequence[tuple[StoredTensor, Chunk]],
        objects: Mapping[str, ArchivePlace],
    ) -> None:
        super().__init__(file)
        self.chunks, self.objects = chunks, objects
        self._records: dict[int, Record] = {}
        self._values: dict[bytes, object] = {}  # of chunks: layers are alike, and so their pickles

    @cached_property
    def has_checksums(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """As the first archive: one call wrote them all."""
        places = [chunk.place for _, chunk in self.chunks] or list(self.objects.values())
        return self._archive(places[0]).has_checksums

    def prefetch_chunk(self, chunk: Chunk) -> None:
        """Lets storage begin with what says where the bytes of a chunk lie."""
        if chunk.place.offset_bytes not in self._records:
            prefetch_archive(self.stored, chunk.place.offset_bytes, chunk.place.size_bytes)

    @kept
    def _archive(self, place: ArchivePlace) -> PtArchive:
        return PtArchive(self, place.offset_bytes, place.size_bytes, OF_VALUES)

    def value(self, key: str) -> Any:
        """An object that is no tensor, which torch keeps in a list of one; the tensors in it are
        references (see `record_of`). Raises DamagedFileError, UnsafePickleError."""
        tree: Any = self._archive(self.objects[key]).tree
        if not isinstance(tree, list) or len(tree) != 1:
            damaged(self.path, f"the object {key} is not stored as torch does", "a list of one", "")
        return tree[0]

    def stored_value(self, key: str) -> Any:
        """An object as it lies there: programs without Megatron's list around it keep it so."""
        return self._archive(self.objects[key]).tree

    def record_of(self, key: str, ref: TensorRef) -> Record:
        """The bytes of a storage that an object refers to. Raises DamagedFileError."""
        archive = self._archive(self.objects[key])
        return archive.in_file(archive.record(ref.storage), f"{key}/{ref.storage.key}")

    def record_of_chunk(self, tensor: StoredTensor, chunk: Chunk) -> Record:
        """The bytes of a chunk, row-major and nothing else. Raises DamagedFileError for an archive
        that holds another tensor than the index says."""
        at = chunk.place.offset_bytes
        if at not in self._records:
            archive = self._archive(chunk.place)
            pickled = archive.pickled()
            if pickled not in self._values:
                self._values[pickled] = archive.value_of(pickled)
            ref: Any = self._values[pickled]
            good = (
                isinstance(ref, TensorRef)
                and (ref.shape, ref.storage.dtype) == (chunk.shape, tensor.dtype)
                and ref.is_contiguous
                and ref.offset_elems == 0
                and ref.storage.elems == ref.numel
            )
            if not good:
                raise DamagedFileError(
                    "a chunk of a tensor is not the one that the index says",
                    file=self.path,
                    parameter=tensor.key,
                    expected=f"{tensor.dtype} {chunk.shape} at byte {at}",
                    found=repr(ref)[:200],
                )
            record = archive.record(ref.storage)
            self._records[at] = archive.in_file(record, chunk_name(tensor, chunk))
        return self._records[at]

    def all_records(self) -> list[tuple[Record, str]]:
        """Every record of every archive, with the dtype of the tensors in it ("" where it holds
        none). Raises DamagedFileError."""
        out: list[tuple[Record, str]] = []
        for tensor, chunk in self.chunks:
            out.append((self.record_of_chunk(tensor, chunk), tensor.dtype))
            out += [(record, "") for record in self._others(chunk.place)]
        for key, place in self.objects.items():
            refs = {ref.key: ref.dtype for ref in storages_of(self._archive(place).tree)}
            archive = self._archive(place)
            for name in archive.records:
                found = archive.in_file(archive.records[name], f"{key}/{name}")
                dtype = refs.get(name.rpartition("/")[2], "") if "/data/" in name else ""
                out.append((found, dtype))
        return out

    def _others(self, place: ArchivePlace) -> Iterator[Record]:
        """The records of a chunk's archive that are not its bytes."""
        archive = self._archive(place)
        for name in archive.records:
            if "/data/" not in name:
                record = archive.records[name]
                yield archive.in_file(record, f"{name} at byte {place.offset_bytes}")


def chunk_name(tensor: StoredTensor, chunk: Chunk) -> str:
    """How messages and checks call the bytes of a chunk."""
    return f"{tensor.key} at {chunk.start}"
