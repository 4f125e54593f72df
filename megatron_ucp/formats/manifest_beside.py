"""What lies beside DeepSpeed's own files: the manifest, locked while it is read, and the files that
it lists."""

import hashlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack

from megatron_ucp.core.manifest import FILE_NAME, FileEntry, Manifest
from megatron_ucp.core.manifest_json import MAX_BYTES, from_json
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
        text = file.whole(MAX_BYTES)
        if not file.keeps_folder():
            raise NotFoundError(
                "the tag is being removed, as newer ones are whole",
                file=self.folder,
                fix="load a newer tag",
            )
        manifest = from_json(text, file.path)
        self.files = {entry.name: entry for entry in manifest.files}
        self.folder.names()  # one listing, in the place of a look for each file
        # what lies in folders below, the format itself looks for
        gone = [name for name in self.files if "/" not in name and not self.folder.is_file(name)]
        missing = [name for name in gone if not self._unneeded(name)]
        if missing:
            raise NotFoundError(
                "a file that the manifest lists is missing",
                file=self.folder / missing[0],
                expected=f"{len(self.files)} files",
                found=f"{len(missing)} missing",
                fix="restore the file, or load another tag",
            )
        extra = sorted(state_files - set(self.files))
        if extra:
            raise ForeignFileError(
                "a state file is not part of the save that the manifest describes",
                file=self.folder / extra[0],
                found=f"{len(extra)} such files",
            )
        self.manifest = manifest

    def compare(self, name: str, size_bytes: int, sha256: str) -> None:
        """Raises ForeignFileError where a file is not the one that the manifest lists."""
        entry = self.files.get(name)
        if entry is not None and (size_bytes, sha256) != (entry.size_bytes, entry.sha256):
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
