"""The files of one tag folder, each opened once."""

import resource
import struct
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from megatron_ucp.errors import DamagedFileError
from megatron_ucp.formats.deepspeed.paths import TagFiles, scan
from megatron_ucp.formats.pt.reader import PtFile, Record
from megatron_ucp.formats.pt.unpickler import TensorRef
from megatron_ucp.formats.recorded import Recorded

# What Python raises where a foreign tree holds other types than its keys promise.
STRUCTURE = (
    KeyError,
    TypeError,
    AttributeError,
    IndexError,
    ValueError,
    ArithmeticError,
    RecursionError,
)
_SCALARS = {"float32": "<f", "float64": "<d", "int64": "<q", "int32": "<i", "bool": "<?"}


class TagFolder:
    """Usable as a context manager; closes its files. `recorded` is the manifest beside them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.names: TagFiles = scan(folder)
        self._closing = ExitStack()
        self._open: dict[str, PtFile] = {}
        self._trees: dict[str, Any] = {}
        self._beside: dict[tuple[str, str], Record] = {}
        self.recorded = Recorded(folder, self.names.names)
        self._closing.callback(self.recorded.close)

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
            file = self._closing.enter_context(PtFile(self.folder / name))
            self._open[name] = file
            self.recorded.compare(name, file.size_bytes, file.directory_sha256)
        return self._open[name]

    def opened(self, path: str) -> PtFile:
        """The open file for a full path."""
        return self.file(str(Path(path).relative_to(self.folder)))

    @property
    def file_names(self) -> list[str]:
        """Every file with state in it, relative to the folder."""
        return self.names.names

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
        `check_used`."""
        record = self.opened(file).record(ref.storage)
        self._beside[file, record.name] = record
        return record

    def check_used(self) -> None:
        """Compares these records with their CRC-32, which the executor does for all that a plan
        reads. Raises DamagedFileError."""
        for (file, _), record in self._beside.items():
            self.opened(file).check(record)

    def scalar(self, file: str, ref: TensorRef) -> float:
        """The value of a one-element tensor."""
        layout = _SCALARS.get(ref.storage.dtype)
        if ref.numel != 1 or layout is None:
            raise DamagedFileError(
                "a scalar state is no number", file=file, found=f"{ref.storage.dtype} {ref.shape}"
            )
        data = bytearray(struct.calcsize(layout))
        opened = self.opened(file)
        opened.read_into(self.use(file, ref), ref.offset_elems * len(data), memoryview(data))
        return float(struct.unpack(layout, data)[0])


def _allow_descriptors(held: int) -> None:
    """Lets this process hold as many files as it may: a folder of thousands is read with all of
    them open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard and 2 * held + 128 > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
