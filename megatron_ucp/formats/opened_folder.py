"""What every opened folder has, whatever its format: open files, the manifest beside them, tensors
that are read outside of a plan. Where a format has nothing of a kind, the answer stands here."""

from collections.abc import Collection, Sequence
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from megatron_ucp.core.layers import Layers
from megatron_ucp.core.manifest import Manifest
from megatron_ucp.core.mesh import Mesh
from megatron_ucp.core.values import Stand
from megatron_ucp.formats import of_ranks
from megatron_ucp.formats.base import (
    NO_RANDOM_STATES,
    ByteFile,
    Extras,
    Generators,
    Readable,
    Record,
    Where,
)
from megatron_ucp.formats.listed_files import Recorded
from megatron_ucp.formats.loss_scale import LossScale
from megatron_ucp.formats.of_ranks import OwnValues, PerRank
from megatron_ucp.formats.pt.unpickler import ITEMSIZE, TensorRef
from megatron_ucp.formats.pt.values import MAX_ELEMS, number_in, storages_of, tensor_value


class OpenedFolder:
    """A context manager; closes its files. A subclass sets `manifest` and gives `file`, `where`,
    `main_file`, `file_names` and what else it has of a `Checkpoint`."""

    manifest: Manifest
    main_file: str  # that says most of the extras: a full path
    led_here: Sequence[str] = ()  # of the notes those about the way from the path that was given

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._closing = ExitStack()
        self._open: dict[str, Any] = {}
        self._read_apart: dict[tuple[str, str], Record] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._closing.close()
        self._open.clear()

    # ------------------------------------------------ files

    def full_path(self, name: str) -> str:
        return str(self.folder / name)

    def file(self, name: str) -> Any:
        """A file of the folder, open. Raises as `Checkpoint.file`."""
        raise NotImplementedError

    def opened(self, path: str) -> Any:
        """The open file for a full path."""
        return self.file(Path(path).relative_to(self.folder).as_posix())

    def check(self, name: str, allow: Collection[str] = (), optimizer: bool = True) -> None:
        """Opens one file: what it says was compared with the others when the folder was opened."""
        self.file(name)

    def records(self, name: str) -> list[tuple[Record, str]]:
        """Every record of a `.pt` file, with the dtype of the tensors in it ("" where it holds
        none)."""
        file = self.file(name)
        places = {f"{file.root}/data/{one.key}": one.dtype for one in storages_of(file.tree)}
        return [(file.records[record], places.get(record, "")) for record in file.records]

    # ------------------------------------------------ the manifest, and what it lists

    @cached_property
    def evidence(self) -> Recorded | None:
        """The manifest beside the files, with what it lists; None for a format without one."""
        return None

    @property
    def recorded(self) -> Manifest | None:
        """The manifest that lies beside the files."""
        return self.evidence.manifest if self.evidence is not None else None

    def beside(self, name: str) -> bytes | None:
        """The bytes of a small file that the manifest lists; None where it lists none of that
        name."""
        return self.evidence.read(name) if self.evidence is not None else None

    def check_beside(self) -> None:
        """No manifest says anything of files beside the states."""

    def differs(self, name: str) -> PerRank:
        """See `Checkpoint`: what the manifest says."""
        return of_ranks.listed(self.recorded)

    def of_rank(self, rank: int) -> OwnValues:
        """See `Checkpoint`."""
        found = of_ranks.listed(self.recorded)
        return of_ranks.recorded_of(self.folder, rank, self.beside) if found else OwnValues()

    # ------------------------------------------------ what few formats have

    def random_states(self, here: Mesh, rank: int) -> Generators | str:
        return NO_RANDOM_STATES

    def layers(self) -> Layers | None:
        return None

    def copies(self) -> Readable | None:
        return None

    @property
    def extras(self) -> Extras:
        """What was saved besides element-wise states. Raises DamagedFileError."""
        return self._extras

    @cached_property
    def _extras(self) -> Extras:
        return self.read_extras()

    def read_extras(self) -> Extras:
        """What `extras` gives."""
        return Extras({}, None, LossScale(), None, {})

    # ------------------------------------------------ tensors outside of a plan

    def place(self, name: str, ref: TensorRef) -> Where:
        """Place of a tensor of a `.pt` file."""
        file, dtype = self.file(name), ref.storage.dtype
        start = ref.offset_elems * ITEMSIZE[dtype]
        return Where(file, file.record(ref.storage), start, ref.numel, dtype)

    def place_apart(self, path: str, ref: TensorRef) -> Where:
        """Place of a tensor that is read outside of a plan: a scalar state, client state. See
        `check_read`."""
        where = self.place(Path(path).relative_to(self.folder).as_posix(), ref)
        self.note_read(where.file, where.record)
        return where

    def note_read(self, file: ByteFile, record: Record) -> None:
        """Remembers a record for `check_read`."""
        self._read_apart[file.path, record.name] = record

    def place_of(self, ref: TensorRef) -> Where:
        """Place of a tensor that the extras refer to."""
        return self.place_apart(self.main_file, ref)

    def check_read(self) -> None:
        """Compares these records with their CRC-32, which the executor does for all that a plan
        reads. Raises DamagedFileError."""
        for (path, _), record in self._read_apart.items():
            self.opened(path).check(record)

    def tensor(self, path: str, ref: TensorRef, max_elems: int = MAX_ELEMS) -> Stand:
        """A small tensor, as a plain value. Raises UnsupportedError for a larger one."""
        return tensor_at(self.place_apart(path, ref), ref, max_elems)

    def scalar(self, path: str, ref: TensorRef) -> float:
        """The value of a one-element tensor. Raises DamagedFileError."""
        return number_in(self.tensor(path, ref), path)


def tensor_at(where: Where, ref: TensorRef, max_elems: int = MAX_ELEMS) -> Stand:
    """A small tensor at a place, as a plain value. Raises UnsupportedError."""
    data = bytearray(ref.span_bytes if ref.numel <= max_elems else 0)
    where.file.read_into(where.record, where.offset_bytes, memoryview(data))
    return tensor_value(ref, data, where.file.path, max_elems)
