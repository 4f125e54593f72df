"""Plans folders that `torch.distributed.checkpoint.load` takes of an FSDP2 program: FSDP2 on any
number of ranks reads the rows of a tensor that it needs."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from megatron_ucp.core.box import Ints
from megatron_ucp.core.plan import Slot
from megatron_ucp.formats.file_layout import FileLayout
from megatron_ucp.formats.megatron.index_writer import KeyPath, PlacedChunk, PlannedFolder, saved
from megatron_ucp.formats.pt.archive import tensor_archive

_FILES = 8  # not as many as there are cores: every machine writes the same folder


@dataclass(frozen=True, slots=True)
class FilledChunk(PlacedChunk):
    """A chunk that a `slot` fills."""

    slot: Slot


class DcpFolder(PlannedFolder[FilledChunk]):
    """The plan of one folder, whose values have paths in a program's dictionaries."""

    def __init__(self, name: str = "") -> None:
        super().__init__(_FILES, name)

    def tensor(
        self, path: KeyPath, dtype: str, whole: Ints, start: Ints, shape: Ints, slot: Slot
    ) -> None:
        """Adds a block of a tensor of the shape `whole`."""
        key, archive = self._key(path), tensor_archive(dtype, shape)
        self.shapes[key] = dtype, whole
        place = self.take(archive.size_bytes)
        self.chunks.append(FilledChunk(key, dtype, start, shape, *place, archive, slot))

    def small_tensor(self, path: KeyPath, value: Any) -> None:
        """Adds a tensor of torch that is known, whole."""
        self.value(path, value)
        shape = str(value.dtype).removeprefix("torch."), tuple(value.shape)
        self.shapes[self._key(path)] = shape

    def value(self, path: KeyPath, value: Any) -> None:
        """Adds a plain value. Equal ones lie in archives of their own all the same, as a reader
        takes places that two entries share for damage."""
        self.add_object(self._key(path), saved(value))

    def copy(self, path: KeyPath, key: str) -> None:
        """Lists a tensor under a further key."""
        self.copies[self._key(path)] = key

    def _key(self, path: KeyPath) -> str:
        key = ".".join(map(str, path))
        self.paths[key] = path
        return key

    def files(self) -> Iterator[FileLayout]:
        """The files, each piece of which whoever can best writes."""
        for layout in self.layouts(lambda chunk: (0, chunk.slot)):
            yield replace(layout, owner=None)
