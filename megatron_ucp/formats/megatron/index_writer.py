"""Writes the index of a folder for `torch.distributed.checkpoint` (`.metadata`): torch's own types,
pickled as torch does. The same content gives the same bytes, on every machine."""

import pickle
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from megatron_ucp.core.box import Ints

KeyPath = tuple[str | int, ...]  # of a value in the nested dictionaries that a program saves


@dataclass(frozen=True, slots=True)
class IndexedBytes:
    """An archive of a file: so many bytes, from `offset_bytes` on."""

    file: str
    offset_bytes: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class IndexedChunk:
    """The block of the tensor `key` from `start` on, and its archive."""

    key: str
    start: Ints
    shape: Ints
    place: IndexedBytes


def index_bytes(
    tensors: Mapping[str, tuple[str, Ints]],
    chunks: Iterable[IndexedChunk],
    objects: Mapping[str, IndexedBytes],
    copies: Mapping[str, str],
    paths: Mapping[str, KeyPath] | None = None,
) -> bytes:
    """The file. `tensors` have a dtype and a shape; `copies` are further keys of tensors, with the
    keys of these; `paths`, in whose order all keys are listed, say where values lie in a program's
    dictionaries (None: nowhere)."""
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

    def stored(place: IndexedBytes) -> Any:
        return _StorageInfo(one_of(place.file, place.file), place.offset_bytes, place.size_bytes)

    entries: dict[str, Any] = {}
    places: dict[Any, Any] = {}
    for key in paths or (*objects, *tensors):
        name = one_of(key, key)
        if key in tensors:
            dtype, shape = tensors[key]
            properties = TensorProperties(dtype=getattr(torch, dtype))
            entries[name] = TensorStorageMetadata(properties, size_of(shape), [])
        elif key in objects:
            entries[name] = BytesStorageMetadata()
    for key, place in objects.items():
        places[MetadataIndex(one_of(key, key))] = stored(place)
    for chunk in chunks:
        start = size_of(chunk.start)
        entries[chunk.key].chunks.append(ChunkStorageMetadata(start, size_of(chunk.shape)))
        places[MetadataIndex(one_of(chunk.key, chunk.key), start)] = stored(chunk.place)
    for other, key in copies.items():  # behind all others: a reader takes the first
        entries[one_of(other, other)] = entries[key]
        for chunk in entries[key].chunks:
            place = places[MetadataIndex(key, chunk.offsets)]
            places[MetadataIndex(one_of(other, other), chunk.offsets)] = place
    listed = None
    if paths is not None:
        listed = {
            one_of(key, key): tuple(one_of(part, part) for part in path)
            for key, path in paths.items()
        }
    return pickle.dumps(Metadata(entries, listed, places, StorageMeta(), "1.0.0"), protocol=4)
