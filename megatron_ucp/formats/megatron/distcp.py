"""The files of torch's distributed checkpoints (`.distcp`): a row of `.pt` archives, one for each
chunk of a tensor and for each other object."""

import os
from collections.abc import Iterator
from functools import cached_property
from typing import Any

from megatron_ucp.errors import DamagedFileError
from megatron_ucp.formats.base import Record
from megatron_ucp.formats.megatron.closed_list import OF_VALUES
from megatron_ucp.formats.megatron.index import ArchivePlace, Chunk, Index, StoredTensor
from megatron_ucp.formats.open_file import OpenFile, damaged
from megatron_ucp.formats.pt.reader import PtArchive
from megatron_ucp.formats.pt.unpickler import TensorRef
from megatron_ucp.formats.pt.values import storages_of

SUFFIX = ".distcp"


class DistcpFile(OpenFile):
    """One open file, and what the index says of it. An archive's directory and pickle are read
    when it is asked for."""

    def __init__(self, path: str | os.PathLike[str], index: Index) -> None:
        super().__init__(path)
        name = os.path.basename(self.path)
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
