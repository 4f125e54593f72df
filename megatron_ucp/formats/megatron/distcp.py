"""torch's distributed checkpoints: the index (`.metadata`) with every tensor and its chunks, and
the files (`.distcp`), which are rows of `.pt` archives."""

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NoReturn

from megatron_ucp.core.box import Ints
from megatron_ucp.core.grouping import grouped
from megatron_ucp.core.values import InertObject
from megatron_ucp.errors import (
    DamagedFileError,
    NotFoundError,
    UnsupportedError,
    some_of,
)
from megatron_ucp.formats import expect
from megatron_ucp.formats.byte_files import OpenFile, Record, damaged
from megatron_ucp.formats.folder import Folder, StoredFile
from megatron_ucp.formats.megatron.arguments import OF_METADATA, OF_VALUES
from megatron_ucp.formats.pt.file import PtArchive
from megatron_ucp.formats.pt.refs import ITEMSIZE, TensorRef, storages_of
from megatron_ucp.formats.pt.unpickle import MAX_PICKLE_BYTES, loads

# ---- index
#
# The index of a checkpoint that torch's distributed checkpointing wrote (`.metadata`): every
# tensor with its chunks, and every other object, by place.
#
# Source: `Metadata` of torch.distributed.checkpoint (torch 2.13), as Megatron-core 0.16.1 fills
# it.


INDEX_FILE = ".metadata"
_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.[^.]+\.")
_MAX_CELLS = 4_000_000  # of the grid that the borders of a tensor's chunks make


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
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class Index:
    """Tensors and other objects by key. A tensor that the files list under a further key, at the
    same places, is here once, under the first of them."""

    tensors: Mapping[str, StoredTensor]
    objects: Mapping[str, ArchivePlace]

    @property
    def file_names(self) -> list[str]:
        """Every file that something lies in."""
        return sorted({place.file for place in self.places()})

    @cached_property
    def chunks_by_file(self) -> Mapping[str, Sequence[tuple[StoredTensor, Chunk]]]:
        """What each file has of tensors."""
        return grouped(
            (chunk.place.file, (tensor, chunk))
            for tensor in self.tensors.values()
            for chunk in tensor.chunks
        )

    @cached_property
    def objects_by_file(self) -> Mapping[str, Mapping[str, ArchivePlace]]:
        """The objects of each file, by key."""
        out: dict[str, dict[str, ArchivePlace]] = {}
        for key, place in self.objects.items():
            out.setdefault(place.file, {})[key] = place
        return out

    def places(self) -> Iterator[ArchivePlace]:
        for tensor in self.tensors.values():
            yield from (chunk.place for chunk in tensor.chunks)
        yield from self.objects.values()


def read_index(folder: Folder) -> Index:
    """The index of a folder, compared with itself and with the files that lie there.

    Raises NotFoundError that names every file which is missing; DamagedFileError for an index that
    can't be, for chunks that overlap or leave gaps, and for a file that is shorter than the index
    says; UnsafePickleError, UnsupportedError.
    """
    path, data = folder / INDEX_FILE, folder.small(INDEX_FILE, MAX_PICKLE_BYTES)
    index = _Reader(path).index(loads(data, file=path, allow=OF_METADATA))
    _check_files(folder, index)
    return index


class _Reader:
    """Reads the unpickled index of one file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def index(self, tree: Any) -> Index:
        said = expect.kind(tree, InertObject, "the index", self.path).state
        entries = expect.key(said, "state_dict_metadata", dict, self.path)
        places = self._places(expect.key(said, "storage_data", dict, self.path))
        tensors: dict[str, StoredTensor] = {}
        objects: dict[str, ArchivePlace] = {}
        at_place: dict[ArchivePlace, StoredTensor] = {}  # of the first chunk
        for key, entry in entries.items():
            if not isinstance(key, str):
                self._fail("a key is no text", None, type(key).__name__)
            if expect.kind(entry, InertObject, key, self.path).qualname.endswith(
                ".TensorStorageMetadata"
            ):
                tensor = self._tensor(key, entry, places)
                first = tensor.chunks[0].place if tensor.chunks else None
                if first is None or not _is_copy(tensor, at_place.setdefault(first, tensor)):
                    tensors[key] = tensor
            else:
                objects[key] = self._taken(places, key, None)
        if places:
            (key, start), *_ = places
            self._fail("bytes are listed that belong to no entry", key, f"{len(places)}: {start}")
        return Index(tensors, objects)

    def _places(self, listed: Mapping[Any, Any]) -> dict[Any, ArchivePlace]:
        """Where things lie, by key and first element; of what is no tensor by its key and None."""
        out: dict[Any, ArchivePlace] = {}
        for index, info in listed.items():
            key, *start = expect.kind(index, InertObject, "a place", self.path).args or (None,)
            at = tuple(None if one is None else self._ints(str(key), one) for one in start[:1])
            out[(key, *at)] = self._place(expect.kind(info, InertObject, "a place", self.path))
        return out

    def _tensor(
        self, key: str, entry: InertObject, places: dict[Any, ArchivePlace]
    ) -> StoredTensor:
        said = entry.state
        properties = expect.key(said, "properties", InertObject, self.path).state
        dtype, *_ = expect.key(properties, "__state__", tuple, self.path) or ("",)
        dtype = str(dtype).removeprefix("torch.")
        shape = self._ints(key, said.get("size"))
        if dtype not in ITEMSIZE:
            self._fail("a tensor has a dtype that is not known", key, dtype)
        chunks: list[Chunk] = []
        for one in expect.each(said.get("chunks"), InertObject, key, self.path):
            start, size = (self._ints(key, one.get(name)) for name in ("offsets", "sizes"))
            chunks.append(Chunk(start, size, self._taken(places, key, start)))
        if fault := tiling_fault(shape, chunks):
            self._fail(f"the chunks of a tensor are not the whole of it: {fault}", key, shape)
        return StoredTensor(key, dtype, shape, tuple(chunks))

    def _taken(self, places: dict[Any, ArchivePlace], key: str, start: Ints | None) -> ArchivePlace:
        """The place of an entry, which nothing else may take then."""
        found = places.pop((key, start), None)
        if found is None:
            self._fail("an entry of the index lies nowhere", key, start)
        return found

    def _place(self, info: Any) -> ArchivePlace:
        name, offset, size = map(info.state.get, ("relative_path", "offset", "length"))
        if info.get("transform_descriptors"):
            raise UnsupportedError(
                "the checkpoint was written through a stream transformation (compressed or "
                "encrypted)",
                file=self.path,
                found=f"some for {str(name)[:80]}",
                fix="load it with the program that wrote it, and save it again without "
                "compression or encryption",
            )
        good = isinstance(name, str) and "/" not in name and name not in ("", "..")
        if not good or "\0" in name or name.startswith("."):
            self._fail("the index names a file outside of its folder", None, repr(name)[:80])
        if type(offset) is not int or type(size) is not int or offset < 0 or size < 1:
            self._fail("the index says an impossible place", None, f"{offset}, {size}")
        return ArchivePlace(name, offset, size)

    def _ints(self, key: str, value: Any) -> Ints:
        if not isinstance(value, tuple) or not all(type(n) is int and n >= 0 for n in value):
            self._fail("a shape is none", key, repr(value)[:80])
        return tuple(value)

    def _fail(self, problem: str, key: str | None, found: object) -> NoReturn:
        raise DamagedFileError(problem, file=self.path, parameter=key, found=found)


def _is_copy(tensor: StoredTensor, other: StoredTensor) -> bool:
    """Whether a tensor is another one under a further key: the same state, at the same places."""
    if tensor is other or tensor.chunks != other.chunks:
        return False
    states = [(found := _STATE.match(one.key)) and found[0] for one in (tensor, other)]
    return states[0] == states[1] and (tensor.dtype, tensor.shape) == (other.dtype, other.shape)


def tiling_fault(shape: Ints, chunks: Sequence[Chunk]) -> str:
    """What is wrong with chunks that should be the whole of a tensor of `shape`, each element once;
    "" where nothing is.

    The borders of all chunks cut the tensor into cells; each cell must lie in one chunk.
    """
    for chunk in chunks:
        inside = len(chunk.start) == len(chunk.shape) == len(shape)
        if not inside or any(b > n for b, n in zip(chunk.stop, shape, strict=True)):
            return f"one lies outside, at {chunk.start}"
    numbers = [_border_numbers(dim, size, chunks) for dim, size in enumerate(shape)]
    cells = math.prod(len(borders) - 1 for borders in numbers)
    if cells > _MAX_CELLS:
        return f"they have borders at too many places ({cells} cells)"
    seen: set[Ints] = set()
    for chunk in chunks:
        sides = zip(numbers, chunk.start, chunk.stop, strict=True)
        for cell in itertools.product(*(range(known[a], known[b]) for known, a, b in sides)):
            if cell in seen:
                return f"two overlap at {chunk.start}"
            seen.add(cell)
    return "" if len(seen) == cells else f"they leave a gap ({cells - len(seen)} of {cells} cells)"


def _border_numbers(dim: int, size: int, chunks: Sequence[Chunk]) -> dict[int, int]:
    """The borders along a dim, each with its number."""
    borders = {0, size}
    for chunk in chunks:
        borders |= {chunk.start[dim], chunk.stop[dim]}
    return {at: number for number, at in enumerate(sorted(borders))}


def _check_files(folder: Folder, index: Index) -> None:
    """Raises NotFoundError for files that are missing, DamagedFileError for one that is too short,
    and where two entries share bytes."""
    missing = [name for name in index.file_names if not folder.is_file(name)]
    if missing:
        raise NotFoundError(
            "files that the index lists are missing",
            file=folder / missing[0],
            expected=f"{len(index.file_names)} files",
            found=f"no {some_of(missing)}",
            fix="restore them, or load another tag",
        )
    for name, places in grouped((place.file, place) for place in index.places()).items():
        at = 0
        for place in sorted(places, key=lambda place: place.offset_bytes):
            if place.offset_bytes < at:
                raise DamagedFileError(
                    "two entries of the index share bytes",
                    file=folder / name,
                    found=f"at byte {place.offset_bytes}",
                )
            at = place.offset_bytes + place.size_bytes
        size = folder.size_bytes(name)
        if size < at:
            raise DamagedFileError(
                "a file is shorter than the index says",
                file=folder / name,
                expected=f"{at} bytes",
                found=f"{size} bytes",
            )


# ---- distcp
#
# The files of torch's distributed checkpoints (`.distcp`): a row of `.pt` archives, one for each
# chunk of a tensor and for each other object.


SUFFIX = ".distcp"


class DistcpFile(OpenFile):
    """One open file, and what the index says of it. An archive's directory and pickle are read
    when it is asked for."""

    def __init__(self, file: StoredFile, name: str, index: Index) -> None:
        super().__init__(file)
        self.chunks = index.chunks_by_file.get(name, ())
        self.objects = index.objects_by_file.get(name, {})
        self._archives: dict[int, PtArchive] = {}
        self._records: dict[int, Record] = {}
        self._values: dict[bytes, object] = {}  # of chunks: layers are alike, and so their pickles

    @cached_property
    def has_checksums(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """As the first archive: one call wrote them all."""
        places = [chunk.place for _, chunk in self.chunks] or list(self.objects.values())
        return self._archive(places[0]).has_checksums

    def _archive(self, place: ArchivePlace) -> PtArchive:
        if place.offset_bytes not in self._archives:
            self._archives[place.offset_bytes] = PtArchive(
                self, place.offset_bytes, place.size_bytes, OF_VALUES
            )
        return self._archives[place.offset_bytes]

    def value(self, key: str) -> Any:
        """An object that is no tensor, which torch keeps in a list of one; the tensors in it are
        references (see `record_of`). Raises DamagedFileError, UnsafePickleError."""
        tree: Any = self._archive(self.objects[key]).tree
        if not isinstance(tree, list) or len(tree) != 1:
            damaged(self.path, f"the object {key} is not stored as torch does", "a list of one", "")
        return tree[0]

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
