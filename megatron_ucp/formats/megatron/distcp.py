"""torch's distributed checkpoints: a tensor and its chunks, as the index (`.metadata`) lists them,
and the files (`.distcp`), which are rows of `.pt` archives."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from megatron_ucp.core.box import Ints
from megatron_ucp.core.grouping import kept
from megatron_ucp.errors import DamagedFileError
from megatron_ucp.formats.byte_files import OpenFile, Record, damaged
from megatron_ucp.formats.folder import StoredFile
from megatron_ucp.formats.megatron.arguments import OF_VALUES
from megatron_ucp.formats.pt.file import PtArchive
from megatron_ucp.formats.pt.refs import TensorRef, storages_of

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
