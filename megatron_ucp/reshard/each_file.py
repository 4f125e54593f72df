"""Every file of a checkpoint that can't be opened as a whole, looked at for itself: whoever has to
restore files wants to know all of them."""

import os
from pathlib import Path

from isal.isal_zlib import crc32

from megatron_ucp.core.manifest import FILE_NAME, FileEntry
from megatron_ucp.core.manifest_json import MAX_BYTES, from_json
from megatron_ucp.errors import DamagedFileError, NotFoundError, UcpError
from megatron_ucp.formats.base import Record
from megatron_ucp.formats.hugging_face.safetensors_file import SafetensorsFile
from megatron_ucp.formats.listed_files import open_regular
from megatron_ucp.formats.pt.reader import PtFile
from megatron_ucp.formats.pt.strangers import Strangers
from megatron_ucp.reshard.findings import Finding, finding_of

_BLOCK_BYTES = 2 * 2**20
_ANYTHING = Strangers(lambda key: True, None, {})  # names alone: nothing is made of them


def damaged_files(folder: Path, deep: bool) -> tuple[list[Finding], int, int]:
    """What is wrong with each file, in the order of their names; with `deep` every record of those
    that can be opened is compared with its CRC-32. How many files were looked at, and the bytes of
    the records that were read."""
    listed = _listed(folder)
    there = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    names = sorted({*listed, *(name for name in there if name.endswith((".pt", ".safetensors")))})
    found: list[Finding] = []
    read_bytes = 0
    for name in names:
        try:
            _open(folder / name, listed.get(name))
            if deep and name.endswith(".pt"):
                read_bytes += _compare(folder / name, found)
        except UcpError as error:
            found.append(finding_of(error))
    return found, len(names), read_bytes


def check_size(path: str, entry: FileEntry) -> None:
    """Raises DamagedFileError for a file of another size than the manifest lists."""
    found = os.stat(path).st_size
    if found != entry.size_bytes:
        raise DamagedFileError(
            "a file has another size than the manifest says",
            file=path,
            expected=f"{entry.size_bytes} bytes",
            found=f"{found} bytes",
        )


def _listed(folder: Path) -> dict[str, FileEntry]:
    """What the manifest lists; nothing where there is none that can be read."""
    path = folder / FILE_NAME
    try:
        with open_regular(path) as file:
            text = file.read(MAX_BYTES + 1)
        return {one.name: one for one in from_json(text, str(path)).files}
    except (OSError, UcpError):
        return {}


def _compare(path: Path, found: list[Finding]) -> int:
    """Adds each record with a wrong checksum; returns the bytes of all records."""
    total = 0
    with PtFile(path, strangers=_ANYTHING) as file:
        for record in file.records.values():
            total += record.size_bytes
            if _sum_of(file, record) != record.crc32:
                found.append(Finding("a record has a wrong checksum", str(path), record.name))
    return total


def _sum_of(file: PtFile, record: Record) -> int:
    crc, block = 0, memoryview(bytearray(min(_BLOCK_BYTES, record.size_bytes)))
    for low in range(0, record.size_bytes, _BLOCK_BYTES):
        part = block[: min(_BLOCK_BYTES, record.size_bytes - low)]
        file.read_into(record, low, part)
        crc = crc32(part, crc)
    return crc


def _open(path: Path, entry: FileEntry | None) -> None:
    """Reads the structure of a file. Raises a UcpError for one that is missing or damaged."""
    if not path.is_file():
        raise NotFoundError(
            "a file that the manifest lists is missing",
            file=path,
            fix="restore the file, or load another tag",
        )
    if entry is not None:
        check_size(str(path), entry)
    if path.suffix == ".pt":
        with PtFile(path, strangers=_ANYTHING) as file:
            file.tree  # noqa: B018  reading it is the check
    elif path.suffix == ".safetensors":
        SafetensorsFile(path).close()
