"""Reads the pickle of an index (`.metadata`) with Python's fast unpickler, in a process of its own.

`index.py` runs this file alone (`python -I -S index_child.py BYTES SECONDS NAMES...`) and gives it
the pickle. A pickle may ask for all memory, or for hashes that never end: the process has limits,
and nothing but the standard library. It ends with 0 and writes what the index lists, or it ends
otherwise: then somebody else says what is wrong. Classes that the pickle names are empty ones of
this file, and any name but NAMES ends it.
"""

import gc
import marshal
import os
import pickle
import resource
import sys
from array import array
from collections.abc import Iterable, Sequence
from itertools import accumulate, chain
from operator import attrgetter
from typing import Any

_METADATA = "torch.distributed.checkpoint.metadata"
_TENSOR = f"{_METADATA}.TensorStorageMetadata"
_PROPERTIES = f"{_METADATA}.TensorProperties"
_CHUNK = f"{_METADATA}.ChunkStorageMetadata"
_KEY = f"{_METADATA}.MetadataIndex"
_PLACE = "torch.distributed.checkpoint.filesystem._StorageInfo"
_SIZE = "torch.Size"
_MAX_DIMS, _MAX_DEPTH = 64, 90
_PLAIN = (type(None), bool, int, float, str, bytes)


class EmptyObject:
    """An object of any class; its attributes are those of the pickle. It is no key of anything."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, *args: object) -> None:
        return


class StatedObject(EmptyObject):
    """One whose state is no dictionary of attributes."""

    def __setstate__(self, state: object) -> None:
        self.state = state


class IndexKey(EmptyObject):
    """The key of a place; of an object's the offset may be left out."""

    fqn: str
    offset = None
    __hash__ = object.__hash__


class StoredPlace(EmptyObject):
    """Where bytes lie; files of older torch say nothing of transformations."""

    transform_descriptors = None


class TorchSize(tuple[int, ...]):
    """A torch.Size."""

    def __new__(cls, numbers: object) -> "TorchSize":
        require(type(numbers) is tuple)
        return super().__new__(cls, numbers)  # type: ignore[arg-type]


_BASES: dict[str, Any] = {
    _PROPERTIES: StatedObject,
    _KEY: IndexKey,
    _PLACE: StoredPlace,
    _SIZE: TorchSize,
}


class IndexUnpickler(pickle.Unpickler):
    """Makes nothing but objects of the classes in `classes`, by whole name."""

    def __init__(self, file: Any, names: Iterable[str]) -> None:
        super().__init__(file)
        bases = {name: _BASES.get(name, EmptyObject) for name in names}
        self.classes: dict[str, Any] = {name: type(name, (b,), {}) for name, b in bases.items()}

    def find_class(self, module: str, name: str) -> type:
        return self.classes[f"{module}.{name}"]


def require(is_right: bool) -> None:
    """Raises ValueError: this pickle is read in another way."""
    if not is_right:
        raise ValueError


def are(values: Iterable[object], *kinds: type) -> bool:
    """Whether values are of these types alone."""
    return {*map(type, values)} <= {*kinds}


def attributes(values: Iterable[object]) -> set[int]:
    """How many attributes values have: where these are all known there is no further one."""
    return {*map(len, map(vars, values))}


def check_rest(tree: object, checked: Iterable[object]) -> None:
    """Raises ValueError for what nobody writes where nobody reads it: other types, attributes
    without a name, deep nesting. Not in what was `checked`."""
    seen, level = {*map(id, checked)}, [tree]
    for _ in range(_MAX_DEPTH):
        below: list[object] = []
        for item in level:
            if id(item) in seen:
                continue
            seen.add(id(item))
            if isinstance(item, EmptyObject):
                require(are(vars(item), str))
                if isinstance(item, IndexKey):
                    require(type(item.fqn) is str and are(item.offset or (), int))
                below += vars(item).values()
            elif type(item) is dict:
                below += chain(item, item.values())
            elif isinstance(item, tuple | list | set | frozenset):
                below += item
            else:
                require(type(item) in _PLAIN or isinstance(item, type))
        level = below
    require(not level)


def listed(tree: Any, classes: dict[str, Any]) -> tuple[Any, "list[array[int]]"]:
    """What an index lists: objects, tensors and names of files, and five arrays of all chunks:
    where each begins, its shape, and the number of its file, byte and length."""
    tensor, size = classes[_TENSOR], classes[_SIZE]
    entries: dict[str, Any] = tree.state_dict_metadata
    stored: dict[Any, Any] = tree.storage_data
    require(are((entries, stored), dict))
    require(are(entries, str) and are(stored, classes[_KEY]))
    require(are(stored.values(), classes[_PLACE]))
    offsets = [*map(attrgetter("offset"), stored)]
    require(are(offsets, tuple, size, type(None)))
    require(are(chain.from_iterable(at for at in offsets if at), int))
    require(attributes(stored) <= {2, 3} and attributes(stored.values()) <= {3, 4})
    lists = [entry.chunks for entry in entries.values() if are([entry], tensor)]
    require(attributes(chain.from_iterable(lists)) <= {2})
    check_rest(tree, [stored, *lists])
    places = {(key.fqn, key.offset): place for key, place in stored.items()}
    require(len(places) == len(stored))
    files: dict[str, int] = {}
    shapes = [entry.size for entry in entries.values() if are([entry], tensor)]
    width = max(map(len, shapes), default=0)
    require(width <= _MAX_DIMS)
    arrays = [array("q") for _ in range(5)]
    starts, sizes, *where = arrays
    objects: list[Any] = []
    tensors: list[Any] = []

    def put(found: Sequence[Any]) -> None:
        names = [*map(attrgetter("relative_path"), found)]
        require(are(names, str) and not any(map(attrgetter("transform_descriptors"), found)))
        where[0].extend([files.setdefault(name, len(files)) for name in names])
        for numbers, field in zip(where[1:], ("offset", "length"), strict=True):
            values = [*map(attrgetter(field), found)]
            require(are(values, int))
            numbers.extend(values)

    for name, entry in entries.items():
        if not are([entry], tensor):
            require(isinstance(entry, EmptyObject))
            objects.append(name)
            continue
        dtype, *_ = entry.properties.state
        boxes = [[*map(attrgetter(side), entry.chunks)] for side in ("offsets", "sizes")]
        require(type(entry.properties) is classes[_PROPERTIES] and type(entry.chunks) is list)
        require(are(entry.chunks, classes[_CHUNK]) and are(entry.size, int))
        require(are((entry.size, *boxes[0], *boxes[1]), tuple, size))
        dims = len(entry.size)
        for numbers, box, filling in zip((starts, sizes), boxes, (0, 1), strict=True):
            require({*map(len, box)} <= {dims} and are(chain.from_iterable(box), int))
            more = (filling,) * (width - dims)
            numbers.extend(
                chain.from_iterable(one + more for one in box) if more else chain.from_iterable(box)
            )
        put([places.pop((name, start)) for start in boxes[0]])
        tensors.append((name, dtype.__name__, tuple(entry.size), len(boxes[0])))
    put([places.pop((name, None)) for name in objects])
    require(not places)
    return (objects, tensors, [*files], width), arrays


def main(size_bytes: str, seconds: str, *names: str) -> None:
    for limit, most in ((resource.RLIMIT_AS, size_bytes), (resource.RLIMIT_CPU, seconds)):
        resource.setrlimit(limit, (int(most), int(most)))
    gc.disable()
    reader = IndexUnpickler(sys.stdin.buffer, names)
    tree = reader.load()
    require(not sys.stdin.buffer.read(1))
    heads, arrays = listed(tree, reader.classes)
    ends = list(accumulate(map(len, arrays[:-1])))
    head = marshal.dumps((heads, ends))
    sys.stdout.buffer.write(len(head).to_bytes(8, "little") + head)
    for one in arrays:
        one.tofile(sys.stdout.buffer)
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
    os._exit(0)  # without the time that giving back a million objects takes
