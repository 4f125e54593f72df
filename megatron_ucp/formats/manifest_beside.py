"""What lies beside DeepSpeed's own files: the manifest, locked while it is read, and the files that
it lists."""

import hashlib
import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from megatron_ucp.core.manifest import FILE_NAME, FileEntry, Manifest
from megatron_ucp.core.manifest_json import MAX_BYTES, from_json, to_json
from megatron_ucp.errors import ForeignFileError, NotFoundError
from megatron_ucp.formats import per_rank
from megatron_ucp.formats.folder import Folder, StoredFile


class ManifestBeside:
    """The manifest of a tag folder; `manifest` is None and `files` are empty where there is none.

    `state_files` are the names that were found there; `unneeded` says of a file that it may be
    missing. Raises NotFoundError for another one that is missing, ForeignFileError for one too
    many.
    """

    def __init__(
        self,
        folder: Folder,
        state_files: Iterable[str],
        unneeded: Callable[[str], bool] = lambda name: False,
    ) -> None:
        self.folder, self._unneeded = folder, unneeded
        self.manifest: Manifest | None = None
        self.files: Mapping[str, FileEntry] = {}
        # open as long as this is, so that retention leaves the folder alone
        self._file = folder.open(FILE_NAME) if FILE_NAME in folder else None
        if self._file is None:
            return
        with ExitStack() as undo:
            undo.callback(self.close)
            self._read(self._file, set(state_files))
            undo.pop_all()

    def close(self) -> None:
        """Lets the tag go: from here on retention may remove it."""
        if self._file is not None:
            self._file.close()

    def _read(self, file: StoredFile, state_files: set[str]) -> None:
        read: list[Manifest] = []

        def look() -> "_ToBeTold":
            text = file.whole(MAX_BYTES)
            if not file.keeps_folder():
                raise NotFoundError(
                    "the tag is being removed, as newer ones are whole",
                    file=self.folder,
                    fix="load a newer tag",
                )
            read.append(from_json(text, file.path))
            self._compare_names(read[0], state_files)
            return _ToBeTold(read[0], self.folder.names())

        listed: Any = self.folder.made(FILE_NAME, look)
        if read:
            self.files = {entry.name: entry for entry in read[0].files}
            self.manifest = read[0]
        else:  # another rank looked
            self.files = _Entries(listed, self.folder.names())
            self.manifest = from_json(listed.text, file.path)

    def _compare_names(self, manifest: Manifest, state_files: set[str]) -> None:
        self.folder.names()  # one listing, in the place of a look for each file
        files = {entry.name for entry in manifest.files}
        # what lies in folders below, the format itself looks for
        gone = [
            entry.name
            for entry in manifest.files
            if "/" not in entry.name and not self.folder.is_file(entry.name)
        ]
        missing = [name for name in gone if not self._unneeded(name)]
        if missing:
            raise NotFoundError(
                "a file that the manifest lists is missing",
                file=self.folder / missing[0],
                expected=f"{len(files)} files",
                found=f"{len(missing)} missing",
                fix="restore the file, or load another tag",
            )
        extra = sorted(state_files - files)
        if extra:
            raise ForeignFileError(
                "a state file is not part of the save that the manifest describes",
                file=self.folder / extra[0],
                found=f"{len(extra)} such files",
            )

    def compare(self, name: str, size_bytes: int, sha256: str) -> None:
        """Raises ForeignFileError where a file is not the one that the manifest lists."""
        entry = self.files.get(name)
        if entry is not None and (size_bytes, sha256[: len(entry.sha256) or None]) != (
            entry.size_bytes,
            entry.sha256,
        ):
            raise ForeignFileError(
                "a file is not the one that was saved with the manifest",
                file=self.folder / name,
                expected=f"{entry.size_bytes} bytes, SHA-256 {entry.sha256[:12]}",
                found=f"{size_bytes} bytes, SHA-256 {sha256[:12]}",
            )

    def read(self, name: str) -> bytes | None:
        """The bytes of a small file that is no state file; None where the manifest lists none of
        that name."""
        if name not in self.files:
            return None
        limit = per_rank.MAX_BYTES if name.startswith(per_rank.FILES) else MAX_BYTES
        data = self.folder.small(name, limit)
        self.compare(name, len(data), hashlib.sha256(data).hexdigest())
        return data


_DIGEST_BYTES = 6  # of a SHA-256 that other ranks are told: they compare files, and not attackers


@dataclass(frozen=True)
class _Listed:
    """A manifest as one rank tells it to others: its text without files; of each name in the folder
    its file's size (-1: not listed) and the first bytes of its SHA-256; the files elsewhere."""

    text: str
    sizes: "array[int]"
    digests: bytes
    others: tuple[FileEntry, ...]

    @classmethod
    def of(cls, manifest: Manifest, names: Sequence[str]) -> "_Listed":
        """What is told of a manifest beside files of such names."""
        plain = {entry.name: entry for entry in manifest.files if _is_plain(entry)}
        found = [plain.pop(name, _NOT_LISTED) for name in names]
        sizes = array("q", [one.size_bytes for one in found])
        digests = b"".join(_first_bytes(one) for one in found)
        text = to_json(replace(manifest, files=()))
        odd = [entry for entry in manifest.files if not _is_plain(entry)]
        return cls(text, sizes, digests, (*plain.values(), *odd))


class _ToBeTold:
    """A manifest, and the names beside it: other ranks get `_Listed` of it."""

    def __init__(self, manifest: Manifest, names: Sequence[str]) -> None:
        self._manifest, self._names = manifest, names

    def __reduce__(self) -> tuple[Any, ...]:
        listed = _Listed.of(self._manifest, self._names)
        return _Listed, (listed.text, listed.sizes, listed.digests, listed.others)


def _is_plain(entry: FileEntry) -> bool:
    """Whether a line of the manifest is one that a save wrote, and no damage."""
    is_digest = re.fullmatch("([0-9a-f]{64})?", entry.sha256) is not None
    return is_digest and 0 <= entry.size_bytes < 2**63


_NOT_LISTED = FileEntry("", -1)


def _first_bytes(entry: FileEntry) -> bytes:
    return bytes.fromhex(entry.sha256[: 2 * _DIGEST_BYTES]).ljust(_DIGEST_BYTES, b"\0")


class _Entries(Mapping[str, FileEntry]):
    """The files that a manifest lists, as another rank told them: with the first bytes of a
    SHA-256 alone."""

    def __init__(self, listed: _Listed, names: Sequence[str]) -> None:
        self._listed, self._others = listed, {entry.name: entry for entry in listed.others}
        sizes = zip(names, listed.sizes, strict=True)
        self._places = {name: place for place, (name, size) in enumerate(sizes) if size >= 0}

    def __getitem__(self, name: str) -> FileEntry:
        if name in self._others:
            return self._others[name]
        place = self._places[name]
        digest = self._listed.digests[place * _DIGEST_BYTES : (place + 1) * _DIGEST_BYTES]
        is_known = any(digest)
        return FileEntry(name, self._listed.sizes[place], digest.hex() if is_known else "")

    def __iter__(self) -> Iterator[str]:
        yield from self._places
        yield from self._others

    def __len__(self) -> int:
        return len(self._places) + len(self._others)
