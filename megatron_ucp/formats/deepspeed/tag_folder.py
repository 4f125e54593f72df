"""The files of one tag folder, each opened once."""

import os
import resource
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from megatron_ucp.core.manifest import Manifest
from megatron_ucp.core.mesh import Mesh
from megatron_ucp.core.values import Stand
from megatron_ucp.errors import DamagedFileError
from megatron_ucp.formats import of_ranks
from megatron_ucp.formats.base import NO_RANDOM_STATES, Extras, Record, Source, Where
from megatron_ucp.formats.deepspeed.keys import HELPERS, OWN_KEYS
from megatron_ucp.formats.deepspeed.paths import TagFiles, scan
from megatron_ucp.formats.listed_files import Recorded
from megatron_ucp.formats.of_ranks import OwnValues, PerRank
from megatron_ucp.formats.pt.reader import PtFile
from megatron_ucp.formats.pt.strangers import Strangers
from megatron_ucp.formats.pt.unpickler import ITEMSIZE, TensorRef
from megatron_ucp.formats.pt.values import MAX_ELEMS, number_in, storages_of, tensor_value

CLASSES = "classes"  # of a manifest's run: that plain values of the program have
MEMBERS = "members"  # of a manifest's run: of enums that pickles name by value
# keys of a model file under which a program's own values stand, beside its client state
_OF_PROGRAMS = frozenset({"lr_scheduler", *HELPERS})


class TagFolder:
    """Usable as a context manager; closes its files. `evidence` is what the manifest beside them
    lists."""

    main_file: str  # whose tree the extras come from: a full path
    led_here: Sequence[str] = ()  # of the notes those about the way from the path that was given

    def __init__(self, folder: Path, classes: frozenset[str] | None = frozenset()) -> None:
        self.folder, self._told_classes = folder, classes
        self.names: TagFiles = scan(folder)
        self._closing = ExitStack()
        self._open: dict[str, PtFile] = {}
        self._trees: dict[str, Any] = {}
        self._extras: Extras | None = None
        self._read_apart: dict[tuple[str, str], Record] = {}
        self.evidence = Recorded(folder, self.names.names)
        self._closing.callback(self.evidence.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._closing.close()
        self._open.clear()

    def full_path(self, name: str) -> str:
        return str(self.folder / name)

    def file(self, name: str) -> PtFile:
        """An open file of the tag folder. Raises ForeignFileError where it is not the file that the
        manifest names."""
        if name not in self._open:
            _allow_descriptors(len(self._open))
            is_value = _is_value if name in self.names.model.values() else _is_no_value
            strangers = Strangers(is_value, self._classes, self._members)
            file = self._closing.enter_context(PtFile(self.folder / name, strangers=strangers))
            self._open[name] = file
            self.evidence.compare(name, file.size_bytes, file.directory_sha256)
        return self._open[name]

    @cached_property
    def _classes(self) -> frozenset[str] | None:
        """Classes that values may name: the caller's own, and those that the save's manifest
        says. Nothing of them is imported."""
        said: Any = self.recorded.run.get(CLASSES, ()) if self.recorded is not None else ()
        if self._told_classes is None or not isinstance(said, list | tuple):
            return self._told_classes
        return self._told_classes | {str(name) for name in said}

    @cached_property
    def _members(self) -> Mapping[tuple[str, Any], str]:
        """Members of enums that the save's program pickled by their values, as its manifest says:
        (class, value) -> name."""
        said: Any = self.recorded.run.get(MEMBERS, ()) if self.recorded is not None else ()
        return dict(map(self._member, said if isinstance(said, list | tuple) else [None]))

    def _member(self, said: Any) -> tuple[tuple[str, Any], str]:
        known = isinstance(said, list | tuple) and len(said) == 3
        if not known or not isinstance(said[1], str | int | float | None):
            raise DamagedFileError("the manifest does not say members of enums", file=self.folder)
        return (str(said[0]), said[1]), str(said[2])

    def opened(self, path: str) -> PtFile:
        """The open file for a full path."""
        return self.file(str(Path(path).relative_to(self.folder)))

    def records(self, name: str) -> list[tuple[Record, str]]:
        """Every record of a file, with the dtype of the tensors in it ("" where it holds none)."""
        file = self.file(name)
        places = {f"{file.root}/data/{one.key}": one.dtype for one in storages_of(file.tree)}
        return [(file.records[record], places.get(record, "")) for record in file.records]

    @property
    def recorded(self) -> Manifest | None:
        """The manifest that lies beside the files."""
        return self.evidence.manifest

    @property
    def file_names(self) -> list[str]:
        """Every file with state in it, relative to the folder."""
        return self.names.names

    @property
    def extras(self) -> Extras:
        """What was saved besides element-wise states. Raises DamagedFileError."""
        if self._extras is None:
            self._extras = self.read_extras()
        return self._extras

    def read_extras(self) -> Extras:
        """What `extras` gives."""
        raise NotImplementedError

    def tree(self, name: str) -> Any:
        """The pickled tree of a file, a dict."""
        if name not in self._trees:
            tree = self.file(name).tree
            if not isinstance(tree, dict):
                raise DamagedFileError(
                    "a state file holds no dictionary",
                    file=self.full_path(name),
                    found=type(tree).__name__,
                )
            self._trees[name] = tree
        return self._trees[name]

    def use(self, file: str, ref: TensorRef) -> Record:
        """The record of a tensor that is read outside of a plan: a scalar state, client state. See
        `check_read`."""
        record = self.opened(file).record(ref.storage)
        self._read_apart[file, record.name] = record
        return record

    def place(self, name: str, ref: TensorRef) -> Where:
        """Place of a tensor of a file."""
        file, dtype = self.file(name), ref.storage.dtype
        start = ref.offset_elems * ITEMSIZE[dtype]
        return Where(file, file.record(ref.storage), start, ref.numel, dtype)

    def place_of(self, ref: TensorRef) -> Where:
        """Place of a tensor that the extras refer to."""
        self.use(self.main_file, ref)
        return self.place(os.path.basename(self.main_file), ref)

    def check_read(self) -> None:
        """Compares these records with their CRC-32, which the executor does for all that a plan
        reads. Raises DamagedFileError."""
        for (file, _), record in self._read_apart.items():
            self.opened(file).check(record)

    def check_beside(self) -> None:
        """Compares what the manifest lists besides state files. Raises ForeignFileError."""
        for name in self.evidence.files.keys() - set(self.file_names):
            self.evidence.read(name)

    def beside(self, name: str) -> bytes | None:
        """The bytes of a small file that the manifest lists; None where it lists none of that
        name."""
        return self.evidence.read(name)

    def random_states(self, here: Mesh, rank: int) -> str:
        """DeepSpeed saves none."""
        return NO_RANDOM_STATES

    def differs(self, name: str) -> PerRank:
        """See `Checkpoint`: what the manifest says."""
        return of_ranks.listed(self.recorded)

    def of_rank(self, rank: int) -> OwnValues:
        """See `Checkpoint`."""
        found = of_ranks.listed(self.recorded)
        return of_ranks.recorded_of(self.folder, rank, self.beside) if found else OwnValues()

    def copies(self) -> Source | None:
        """None but in DeepSpeed's own files."""
        return None

    def tensor(self, file: str, ref: TensorRef, max_elems: int = MAX_ELEMS) -> Stand:
        """A small tensor, as a plain value. Raises UnsupportedError for a larger one."""
        record = self.use(file, ref)  # which has the bytes that the pickle says, or is refused
        data = bytearray(ref.span_bytes if ref.numel <= max_elems else 0)
        first_byte = ref.offset_elems * ITEMSIZE[ref.storage.dtype]
        self.opened(file).read_into(record, first_byte, memoryview(data))
        return tensor_value(ref, data, file, max_elems)

    def scalar(self, file: str, ref: TensorRef) -> float:
        """The value of a one-element tensor."""
        return number_in(self.tensor(file, ref), file)


def _is_value(key: str) -> bool:
    """Whether a key of a model file holds values of the program that wrote it."""
    return key in _OF_PROGRAMS or key not in OWN_KEYS


def _is_no_value(key: str) -> bool:
    """Other files have such values in parameter groups alone."""
    return False


def _allow_descriptors(held: int) -> None:
    """Lets this process hold as many files as it may: a folder of thousands is read with all of
    them open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard and 2 * held + 128 > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
