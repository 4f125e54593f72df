"""Every file of a checkpoint that can't be opened as a whole, looked at for itself: whoever has to
restore files wants to know all of them."""

import os
from collections.abc import Iterator
from pathlib import Path

from megatron_ucp.core.manifest import FILE_NAME, FileEntry
from megatron_ucp.core.manifest_json import MAX_BYTES, from_json
from megatron_ucp.errors import DamagedFileError, NotFoundError, UcpError
from megatron_ucp.formats.hugging_face.safetensors_file import SafetensorsFile
from megatron_ucp.formats.pt.reader import PtFile
from megatron_ucp.formats.pt.strangers import Strangers
from megatron_ucp.formats.recorded import open_regular
from megatron_ucp.reshard.findings import Finding, finding_of


def damaged_files(folder: Path) -> tuple[list[Finding], int]:
    """What is wrong with each file, in the order of their names; how many were looked at."""
    listed = _listed(folder)
    there = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    names = sorted({*listed, *(name for name in there if name.endswith((".pt", ".safetensors")))})
    return [finding for name in names for finding in _of_file(folder, name, listed)], len(names)


def _listed(folder: Path) -> dict[str, FileEntry]:
    """What the manifest lists; nothing where there is none that can be read."""
    path = folder / FILE_NAME
    try:
        with open_regular(path) as file:
            text = file.read(MAX_BYTES + 1)
        return {one.name: one for one in from_json(text, str(path)).files}
    except (OSError, UcpError):
        return {}


def _of_file(folder: Path, name: str, listed: dict[str, FileEntry]) -> Iterator[Finding]:
    try:
        _open(folder / name, listed.get(name))
    except UcpError as error:
        yield finding_of(error)


def _open(path: Path, entry: FileEntry | None) -> None:
    """Reads the structure of a file. Raises a UcpError for one that is missing or damaged."""
    if not path.is_file():
        raise NotFoundError(
            "a file that the manifest lists is missing",
            file=path,
            fix="restore the file, or load another tag",
        )
    if entry is not None and (found := os.stat(path).st_size) != entry.size_bytes:
        raise DamagedFileError(
            "a file has another size than the manifest says",
            file=path,
            expected=f"{entry.size_bytes} bytes",
            found=f"{found} bytes",
        )
    if path.suffix == ".pt":
        anything = Strangers(lambda key: True, None, {})  # names alone: nothing is made of them
        with PtFile(path, strangers=anything) as file:
            file.tree  # noqa: B018  reading it is the check
    elif path.suffix == ".safetensors":
        SafetensorsFile(path).close()
