"""The index of a checkpoint that torch's distributed checkpointing wrote (`.metadata`): every
tensor with its chunks, and every other object, by place.

It is kept as arrays, some 40 bytes a chunk: a run of thousands of ranks writes a million chunks,
of which one rank reads a hundred. A `StoredTensor` and its `Chunk`s are made of the arrays where
somebody asks for them.

Source: `Metadata` of torch.distributed.checkpoint (torch 2.13), as Megatron-core 0.16.1 fills it.
"""

import marshal
import math
import pickle
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from megatron_ucp.core.box import Ints
from megatron_ucp.core.grouping import MadeWhenAsked, kept
from megatron_ucp.core.values import InertObject
from megatron_ucp.errors import DamagedFileError, NotFoundError, UnsupportedError, some_of
from megatron_ucp.formats import expect
from megatron_ucp.formats.folder import Folder, StoredFile
from megatron_ucp.formats.megatron import index_child
from megatron_ucp.formats.megatron.arguments import OF_METADATA
from megatron_ucp.formats.megatron.distcp import (
    INDEX_FILE,
    ArchivePlace,
    Chunk,
    DistcpFile,
    StoredTensor,
)
from megatron_ucp.formats.pt.refs import ITEMSIZE
from megatron_ucp.formats.pt.unpickle import loads

IntArray = NDArray[np.integer[Any]]
MOST = 2**62  # of what arrays hold, with room for a sum

MAX_INDEX_BYTES = 16 * 2**30  # of 100 million chunks
_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.[^.]+\.")
# what else than OF_METADATA an index names
_MORE_NAMES = ("torch.Size", "pathlib.PosixPath", "pathlib._local.PosixPath")
_SECONDS = 5  # of processor time for a small index
_SMALL_BYTES = 2**16  # of an index that is read in this process
_MAX_COMPARED = 10_000  # chunks of which each is compared with each other one

# ---- index


@dataclass(frozen=True, eq=False)
class Index:
    """Tensors and other objects by key. A tensor that the files list under a further key, at the
    same places, is here once, under the first of them.

    Tensor number t has the key `keys[t]`, a dtype and a shape; its chunks are the rows `firsts[t]`
    to `firsts[t + 1]` of the arrays behind them. Row r begins at `starts[r]` of its tensor and has
    the shape `sizes[r]` (of a tensor with fewer dims than others the first ones count); its archive
    is in file number `file_numbers[r]` of `files`, at a byte and of a size. It is pickled as it is,
    for one rank to send it to others.
    """

    keys: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[Ints, ...]
    firsts: IntArray
    starts: IntArray
    sizes: IntArray
    file_numbers: IntArray
    offsets_bytes: IntArray
    sizes_bytes: IntArray
    files: tuple[str, ...]
    objects: Mapping[str, ArchivePlace]

    def __reduce__(self) -> tuple[Any, ...]:
        """Without what was made of the arrays."""
        return Index, tuple(getattr(self, field.name) for field in fields(self))

    @cached_property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """Each tensor, made where it is asked for."""
        return StoredTensors(self)

    @cached_property
    def file_names(self) -> list[str]:
        """Every file that something lies in."""
        used = {self.files[number] for number in np.unique(self.file_numbers).tolist()}
        return sorted(used | {place.file for place in self.objects.values()})

    def chunks_in(self, file: str) -> Sequence[tuple[StoredTensor, Chunk]]:
        """What a file has of tensors, in the order of the index."""
        order, ends = self._rows_by_file
        number = self._number_of_file.get(file)
        if number is None:
            return ()
        rows = order[ends[number] : ends[number + 1]]
        owners = np.searchsorted(self.firsts, rows, side="right") - 1
        out: list[tuple[StoredTensor, Chunk]] = []
        for row, owner in zip(rows.tolist(), owners.tolist(), strict=True):
            tensor = self.tensors[self.keys[owner]]
            out.append((tensor, tensor.chunks[row - int(self.firsts[owner])]))
        return out

    @cached_property
    def _number_of_file(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self.files)}

    @cached_property
    def _rows_by_file(self) -> tuple[IntArray, IntArray]:
        """The rows in the order of their files, and where those of each file begin."""
        counts = np.bincount(self.file_numbers, minlength=len(self.files))
        order = np.argsort(self.file_numbers, kind="stable")
        return order, np.concatenate(([0], np.cumsum(counts)))

    def opened(self, stored: StoredFile, file: str) -> DistcpFile:
        """A file that was opened, with what lies in it."""
        return DistcpFile(stored, self.chunks_in(file), self._objects_by_file.get(file, {}))

    @cached_property
    def _objects_by_file(self) -> Mapping[str, Mapping[str, ArchivePlace]]:
        out: dict[str, dict[str, ArchivePlace]] = {}
        for key, place in self.objects.items():
            out.setdefault(place.file, {})[key] = place
        return out


class StoredTensors(Mapping[str, StoredTensor]):
    """The tensors of an index by key."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._numbers = {key: number for number, key in enumerate(index.keys)}

    @kept
    def __getitem__(self, key: str) -> StoredTensor:
        index, number = self._index, self._numbers[key]
        first, last = index.firsts[number : number + 2].tolist()
        shape = index.shapes[number]
        chunks = StoredChunks(index, range(first, last), len(shape))
        return StoredTensor(key, index.dtypes[number], shape, chunks)

    def __iter__(self) -> Iterator[str]:
        return iter(self._index.keys)

    def __len__(self) -> int:
        return len(self._index.keys)

    def __contains__(self, key: object) -> bool:
        return key in self._numbers


class StoredChunks(MadeWhenAsked[Chunk]):
    """The chunks of one tensor: rows of an index."""

    def __init__(self, index: Index, rows: range, dims: int) -> None:
        self._index, self._rows, self._dims = index, rows, dims

    @property
    def starts(self) -> IntArray:
        """Where each begins."""
        return self._index.starts[self._rows.start : self._rows.stop, : self._dims]

    @property
    def sizes(self) -> IntArray:
        """The shape of each."""
        return self._index.sizes[self._rows.start : self._rows.stop, : self._dims]

    def __len__(self) -> int:
        return len(self._rows)

    def made(self, number: int) -> Chunk:
        index, row = self._index, self._rows[number]
        place = ArchivePlace(
            index.files[index.file_numbers[row]],
            int(index.offsets_bytes[row]),
            int(index.sizes_bytes[row]),
        )
        start, shape = (each[row, : self._dims].tolist() for each in (index.starts, index.sizes))
        return Chunk(tuple(start), tuple(shape), place)


# ---- reading


def index_in(folder: Folder, below: str = "") -> Index:
    """As `read_index`, read once where one rank looks into a folder for all."""
    return folder.made(f"{below}{INDEX_FILE}", lambda: read_index(folder, below))


def read_index(folder: Folder, below: str = "") -> Index:
    """The index of a folder, or of the one `below` ("optimizer_0/"), compared with itself and with
    the files that lie there.

    Raises NotFoundError that names every file which is missing; DamagedFileError for an index that
    can't be, for chunks that overlap or leave gaps, and for a file that is shorter than the index
    says; UnsafePickleError, UnsupportedError.
    """
    file = f"{below}{INDEX_FILE}"
    index = parsed_index(folder.small(file, MAX_INDEX_BYTES), folder / file)
    check_files(folder, index, below)
    return index


def parsed_index(data: bytes, path: str) -> Index:
    """What the bytes of an index say, compared with itself. Raises as `read_index`.

    C's unpickler reads what torch writes, in a process of its own with limits (see `index_child`).
    Whatever else may stand in a pickle is read by ours, which takes fifty times as long, and says
    what is wrong; and so is a small index, for which a process would take longer.
    """
    index = None if len(data) < _SMALL_BYTES else _of_child(data)
    if index is not None:
        return index
    return _one_by_one(loads(data, file=path, allow=OF_METADATA, max_bytes=len(data)), path)


def _of_child(data: bytes) -> Index | None:
    """The index that another process reads; None where it can't, or anything is wrong."""
    memory_bytes, seconds = 2**28 + 16 * len(data), _SECONDS + len(data) // 10**7
    names = [*OF_METADATA.names, *(f"torch.{dtype}" for dtype in ITEMSIZE), *_MORE_NAMES]
    words = [sys.executable, "-I", "-S", index_child.__file__, memory_bytes, seconds, *names]
    try:
        done = subprocess.run([*map(str, words)], input=data, capture_output=True, check=False)
    except OSError:  # a rank may be forbidden to start processes
        return None
    if done.returncode or data[:1] != pickle.PROTO or data[1] < 2:
        return None
    start = 8 + int.from_bytes(done.stdout[:8], "little")
    (objects, tensors, files, width), ends = marshal.loads(done.stdout[8:start])
    arrays = np.split(np.frombuffer(done.stdout, np.int64, offset=start), ends)
    starts, sizes, file_numbers, offsets, lengths = arrays
    keys, dtypes, shapes, counts = zip(*tensors, strict=True) if tensors else ((),) * 4
    dtypes = [dtype.removeprefix("torch.") for dtype in dtypes]
    firsts = np.cumsum([0, *counts])
    if (
        not all(map(is_file_name, files))
        or not all(dtype in ITEMSIZE for dtype in dtypes)
        or any(min(shape, default=0) < 0 for shape in shapes)
        or any(len(one) and (one.min() < 0 or one.max() > MOST) for one in arrays)
        or (lengths < 1).any()
        or (offsets + lengths > MOST).any()
    ):
        return None
    chunks = firsts[-1]
    places = zip(*(one[chunks:].tolist() for one in arrays[2:]), strict=True)
    index = Index(
        keys,
        tuple(dtypes),
        shapes,
        firsts,
        starts.reshape(chunks, width),
        sizes.reshape(chunks, width),
        file_numbers[:chunks],
        offsets[:chunks],
        lengths[:chunks],
        tuple(files),
        {
            key: ArchivePlace(files[number], at, size)
            for key, (number, at, size) in zip(objects, places, strict=True)
        },
    )
    return None if tiling_fault(index) else _without_copies(index)


# ---- entries, one by one


class EntryReader:
    """Reads what stands in the unpickled index of one file. Raises DamagedFileError,
    UnsupportedError."""

    def __init__(self, path: str) -> None:
        self.path = path

    def is_tensor(self, key: Any, entry: Any) -> bool:
        """Whether an entry is a tensor's, and no object's."""
        if not isinstance(key, str):
            self.fail("a key is no text", None, type(key).__name__)
        name = expect.kind(entry, InertObject, key, self.path).qualname
        return name.endswith(".TensorStorageMetadata")

    def kind_of(self, key: str, entry: InertObject) -> tuple[str, Ints]:
        """The dtype and the shape of a tensor."""
        said = entry.state
        properties = expect.key(said, "properties", InertObject, self.path).state
        dtype, *_ = expect.key(properties, "__state__", tuple, self.path) or ("",)
        dtype = str(dtype).removeprefix("torch.")
        shape = self.ints(key, said.get("size"))
        if dtype not in ITEMSIZE:
            self.fail("a tensor has a dtype that is not known", key, dtype)
        return dtype, shape

    def box(self, key: str, chunk: InertObject) -> tuple[Ints, Ints]:
        """Where a chunk begins, and its shape."""
        start, size = (self.ints(key, chunk.get(name)) for name in ("offsets", "sizes"))
        return start, size

    def places(self, listed: Mapping[Any, Any]) -> dict[Any, ArchivePlace]:
        """Where things lie, by key and first element; of what is no tensor by its key and None."""
        out: dict[Any, ArchivePlace] = {}
        for index, info in listed.items():
            key, *start = expect.kind(index, InertObject, "a place", self.path).args or (None,)
            at = tuple(None if one is None else self.ints(str(key), one) for one in start[:1])
            out[(key, *at)] = self.place(expect.kind(info, InertObject, "a place", self.path))
        return out

    def place(self, info: Any) -> ArchivePlace:
        """The place that torch says of an entry."""
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
        if not is_file_name(name):
            self.fail("the index names a file outside of its folder", None, repr(name)[:80])
        is_place = type(offset) is int and type(size) is int and offset >= 0 and size >= 1
        if not is_place or offset + size > MOST:
            self.fail("the index says an impossible place", None, f"{offset}, {size}"[:80])
        return ArchivePlace(name, offset, size)

    def taken(self, places: dict[Any, ArchivePlace], key: str, start: Ints | None) -> ArchivePlace:
        """The place of an entry, which nothing else may take then."""
        found = places.pop((key, start), None)
        if found is None:
            self.fail("an entry of the index lies nowhere", key, start)
        return found

    def ints(self, key: str, value: Any) -> Ints:
        """A shape, or where a chunk begins."""
        is_shape = isinstance(value, tuple) and all(type(n) is int and n >= 0 for n in value)
        if not is_shape or any(n > MOST for n in value):
            self.fail("a shape is none", key, repr(value)[:80])
        return tuple(value)

    def fail(self, problem: str, key: str | None, found: object) -> NoReturn:
        """Raises DamagedFileError."""
        raise DamagedFileError(problem, file=self.path, parameter=key, found=found)


def is_file_name(name: object) -> bool:
    """Whether a name is one of a file in the folder itself."""
    if not isinstance(name, str) or name in ("", ".."):
        return False
    return "/" not in name and "\0" not in name and not name.startswith(".")


def _one_by_one(tree: Any, path: str) -> Index:
    """The index that was unpickled without runs."""
    read = EntryReader(path)
    said = expect.kind(tree, InertObject, "the index", path).state
    entries = expect.key(said, "state_dict_metadata", dict, path)
    places = read.places(expect.key(said, "storage_data", dict, path))
    tensors: list[StoredTensor] = []
    objects: dict[str, ArchivePlace] = {}
    for key, entry in entries.items():
        if not read.is_tensor(key, entry):
            objects[key] = read.taken(places, key, None)
            continue
        dtype, shape = read.kind_of(key, entry)
        chunks: list[Chunk] = []
        for one in expect.each(entry.state.get("chunks"), InertObject, key, path):
            start, size = read.box(key, one)
            if not len(start) == len(size) == len(shape):
                read.fail("a chunk has other dims than its tensor", key, start)
            chunks.append(Chunk(start, size, read.taken(places, key, start)))
        tensors.append(StoredTensor(key, dtype, shape, chunks))
    index = _of_tensors(tensors, objects)
    if fault := tiling_fault(index):
        key, what = fault
        problem = f"the chunks of a tensor are not the whole of it: {what}"
        read.fail(problem, key, index.tensors[key].shape)
    if places:
        (key, start), *_ = places
        read.fail("bytes are listed that belong to no entry", key, f"{len(places)}: {start}")
    return _without_copies(index)


def _of_tensors(tensors: Sequence[StoredTensor], objects: Mapping[str, ArchivePlace]) -> Index:
    """The arrays of tensors that were read one by one."""
    chunks = [chunk for tensor in tensors for chunk in tensor.chunks]
    dims = max((len(tensor.shape) for tensor in tensors), default=0)
    files = {
        name: number for number, name in enumerate(dict.fromkeys(c.place.file for c in chunks))
    }
    return Index(
        tuple(tensor.key for tensor in tensors),
        tuple(tensor.dtype for tensor in tensors),
        tuple(tensor.shape for tensor in tensors),
        np.cumsum([0, *(len(tensor.chunks) for tensor in tensors)]),
        _rows([chunk.start for chunk in chunks], dims, 0),
        _rows([chunk.shape for chunk in chunks], dims, 1),
        np.array([files[chunk.place.file] for chunk in chunks], np.int32),
        np.array([chunk.place.offset_bytes for chunk in chunks], np.int64),
        np.array([chunk.place.size_bytes for chunk in chunks], np.int64),
        tuple(files),
        objects,
    )


def _rows(values: Sequence[Ints], dims: int, filling: int) -> IntArray:
    """Numbers of chunks as an array of as many dims."""
    filled = [(*value, *(filling,) * (dims - len(value))) for value in values]
    return np.array(filled, np.int64).reshape(len(values), dims)


def _without_copies(index: Index) -> Index:
    """Without tensors that are others under a further key: the same state, at the same places."""
    counts = np.diff(index.firsts)
    with_rows = np.flatnonzero(counts)
    first = index.firsts[with_rows]
    heads = with_rows, index.file_numbers[first], index.offsets_bytes[first]
    at_place: dict[tuple[int, ...], int] = {}
    is_kept = np.ones(len(index.keys), bool)
    for number, *place in zip(*(each.tolist() for each in heads), strict=True):
        other = at_place.setdefault(tuple(place), number)
        is_kept[number] = other == number or not _are_same(index, number, other)
    kept: list[int] = np.flatnonzero(is_kept).tolist()
    picked = np.repeat(is_kept, counts)
    return replace(
        index,
        keys=tuple(index.keys[number] for number in kept),
        dtypes=tuple(index.dtypes[number] for number in kept),
        shapes=tuple(index.shapes[number] for number in kept),
        firsts=np.concatenate(([0], np.cumsum(counts[is_kept]))),
        **{name: _narrow(getattr(index, name)[picked]) for name in _OF_CHUNKS},
    )


# the arrays of an index that have a row for each chunk
_OF_CHUNKS = ("starts", "sizes", "file_numbers", "offsets_bytes", "sizes_bytes")


def _are_same(index: Index, *numbers: int) -> bool:
    """Whether two tensors are of one state, and lie at the same places."""
    rows = [slice(*index.firsts[number : number + 2].tolist()) for number in numbers]
    kinds = {(index.dtypes[n], index.shapes[n], _state_of(index.keys[n])) for n in numbers}
    arrays = (getattr(index, name) for name in _OF_CHUNKS)
    return len(kinds) == 1 and all(np.array_equal(*(each[r] for r in rows)) for each in arrays)


def _state_of(key: str) -> str | None:
    """What the key of an optimizer's state begins with; None for a weight's."""
    found = _STATE.match(key)
    return found and found[0]


def _narrow(values: IntArray) -> IntArray:
    """The values in four bytes each, where they fit."""
    fits = values.size == 0 or int(values.max()) < 2**31
    return values.astype(np.int32, copy=False) if fits else values


# ---- whether chunks are the whole of their tensors


def tiling_fault(index: Index) -> tuple[str, str] | None:
    """The key of a tensor of which the chunks are not the whole, each element once, and what is
    wrong with them; None where all are.

    Chunks that lie inside, and have as many elements in all as their tensor, are the whole of it
    unless two overlap. Two don't where a plane lies between them that cuts no chunk: all chunks of
    a tensor are divided along one dim at such planes, each part along the next dim, and so on,
    until each part is one chunk. What can't be divided so is compared one by one.

    Example: of [0, 2) x [0, 3), [2, 4) x [0, 3) and [0, 4) x [3, 4) no plane of dim 0 cuts none;
    that at 3 of dim 1 does, and then that at 2 of dim 0.
    """
    counts = np.diff(index.firsts)
    owner = np.repeat(np.arange(len(counts)), counts)
    starts, sizes = index.starts.astype(np.int64), index.sizes.astype(np.int64)
    wholes = _rows(index.shapes, starts.shape[1], 1)
    volumes = [math.prod(shape) for shape in index.shapes]
    for number, volume in enumerate(volumes):
        if volume > MOST or max(index.shapes[number], default=0) > MOST // 2:
            return index.keys[number], "they leave a gap"
    outside = np.flatnonzero(((starts > wholes[owner]) | (sizes > wholes[owner] - starts)).any(1))
    if len(outside):
        row, number = outside[0], owner[outside[0]]
        start = tuple(starts[row, : len(index.shapes[number])].tolist())
        return index.keys[number], f"one lies outside, at {start}"
    volume = sizes.prod(1, dtype=np.int64)
    sums = np.concatenate(([0], np.cumsum(volume)))
    more = np.diff(sums[index.firsts]) - np.array(volumes, np.int64)
    if len(wrong := np.flatnonzero(more)):
        what = "two overlap" if more[wrong[0]] > 0 else "they leave a gap"
        return index.keys[wrong[0]], what
    some = volume > 0
    number = _overlapping(owner[some], starts[some], (starts + sizes)[some])
    return None if number is None else (index.keys[number], "two overlap")


def _overlapping(owner: IntArray, starts: IntArray, stops: IntArray) -> int | None:
    """The number of an owner of which two boxes overlap; None where no two do."""
    part = owner.astype(np.int64)
    count, before = len(np.unique(part)), 0
    while count < len(part) and count != before:
        before = count
        for dim in range(starts.shape[1]):
            low, high = starts[:, dim], stops[:, dim]
            order = np.lexsort((low, part))
            part_of, low, high = part[order], low[order], high[order]
            number = np.cumsum(np.concatenate(([0], part_of[1:] != part_of[:-1])))
            room = int(high.max()) + 1
            if room > MOST // (count + 1):
                return int(owner[0])
            reached = np.maximum.accumulate(high + number * room) - number * room
            begins = (part_of[1:] != part_of[:-1]) | (low[1:] >= reached[:-1])
            part[order] = np.cumsum(np.concatenate(([0], begins)))
            count = int(part[order[-1]]) + 1
    if count == len(part):
        return None
    order = np.argsort(part, kind="stable")
    _, firsts, counts = np.unique(part[order], return_index=True, return_counts=True)
    for first, size in zip(firsts.tolist(), counts.tolist(), strict=True):
        rows = order[first : first + size]
        for row in rows.tolist():
            low, high = np.maximum(starts[row], starts[rows]), np.minimum(stops[row], stops[rows])
            if size > _MAX_COMPARED or (low < high).all(1).sum() > 1:
                return int(owner[row])
    return None


# ---- the files that lie there


def check_files(folder: Folder, index: Index, below: str = "") -> None:
    """Raises NotFoundError for files that are missing, DamagedFileError for one that is too short,
    and where two entries share bytes."""
    names = index.file_names
    missing = [name for name in names if not folder.is_file(below + name)]
    if missing:
        raise NotFoundError(
            "files that the index lists are missing",
            file=folder / f"{below}{missing[0]}",
            expected=f"{len(names)} files",
            found=f"no {some_of(missing)}",
            fix="restore them, or load another tag",
        )
    ends = _ends(folder, index, below)
    for name in names:
        size = folder.size_bytes(below + name)
        if size < ends[name]:
            raise DamagedFileError(
                "a file is shorter than the index says",
                file=folder / f"{below}{name}",
                expected=f"{ends[name]} bytes",
                found=f"{size} bytes",
            )


def _ends(folder: Folder, index: Index, below: str) -> dict[str, int]:
    """The end of the last entry of each file. Raises DamagedFileError for two that share bytes."""
    numbers = {name: number for number, name in enumerate(index.files)}
    objects = [*index.objects.values()]
    for place in objects:
        numbers.setdefault(place.file, len(numbers))
    of_objects = [
        [number(place) for place in objects]
        for number in (
            lambda place: numbers[place.file],
            lambda place: place.offset_bytes,
            lambda place: place.size_bytes,
        )
    ]
    file, at, size = (
        np.concatenate((each.astype(np.int64), np.array(more, np.int64)))
        for each, more in zip(
            (index.file_numbers, index.offsets_bytes, index.sizes_bytes), of_objects, strict=True
        )
    )
    order = np.lexsort((at, file))
    file, at, end = file[order], at[order], (at + size)[order]
    shared = np.flatnonzero((file[1:] == file[:-1]) & (at[1:] < end[:-1]))
    names = [*numbers]
    if len(shared):
        raise DamagedFileError(
            "two entries of the index share bytes",
            file=folder / f"{below}{names[file[shared[0]]]}",
            found=f"at byte {at[shared[0] + 1]}",
        )
    last = np.flatnonzero(np.append(file[1:] != file[:-1], True)) if len(file) else []
    return {names[file[row]]: int(end[row]) for row in last}
