"""What lies beside DeepSpeed's own files: the manifest, locked while it is read, and the files that
it lists."""

import fcntl
import hashlib
import os
import stat
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

from megatron_ucp.core.manifest import FILE_NAME, FileEntry, Manifest
from megatron_ucp.core.manifest_json import MAX_BYTES, from_json
from megatron_ucp.errors import DamagedFileError, ForeignFileError, NotFoundError
from megatron_ucp.formats import per_rank


class ManifestBeside:
    """The manifest of a tag folder; `manifest` is None and `files` are empty where there is none.

    `state_files` are the names that were found there; `unneeded` says of a file that it may be
    missing. Raises NotFoundError for another one that is missing, ForeignFileError for one too
    many.
    """

    def __init__(
        self,
        folder: Path,
        state_files: Iterable[str],
        unneeded: Callable[[str], bool] = lambda name: False,
    ) -> None:
        self.folder, self._unneeded = folder, unneeded
        self.manifest: Manifest | None = None
        self.files: Mapping[str, FileEntry] = {}
        path = folder / FILE_NAME
        self._lock = (
            open_regular(path) if os.path.lexists(path) else None
        )  # open as long as this is
        if self._lock is None:
            return
        with ExitStack() as undo:
            undo.callback(self.close)
            self._read(self._lock.read(MAX_BYTES + 1), set(state_files))
            undo.pop_all()

    def close(self) -> None:
        """Lets the tag go: from here on retention may remove it."""
        if self._lock is not None:
            self._lock.close()

    def _read(self, text: bytes, state_files: set[str]) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_SH | fcntl.LOCK_NB)  # type: ignore[arg-type]
        except BlockingIOError:
            raise NotFoundError(
                "the tag is being removed, as newer ones are whole",
                file=self.folder,
                fix="load a newer tag",
            ) from None
        except OSError:  # a file system without locks
            pass
        manifest = from_json(text, str(self.folder / FILE_NAME))
        self.files = {entry.name: entry for entry in manifest.files}
        # os.path, as a Path for each takes longer; what lies in folders the format itself looks for
        plain = [name for name in self.files if "/" not in name]
        gone = [name for name in plain if not os.path.isfile(f"{self.folder}/{name}")]
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
        with open_regular(self.folder / name) as file:
            # not the limit itself, for which Python takes memory at once
            data = file.read(min(limit, os.fstat(file.fileno()).st_size) + 1)
        if len(data) > limit:
            raise DamagedFileError(
                "the file is larger than any of its kind",
                file=self.folder / name,
                expected=f"at most {limit} bytes",
                found="more",
            )
        self.compare(name, len(data), hashlib.sha256(data).hexdigest())
        return data


def open_regular(path: Path) -> BinaryIO:
    """A small file, open to read. Raises DamagedFileError for a pipe, which would wait for ever, a
    device, a loop, a folder."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as error:
        raise DamagedFileError(
            "the file can't be opened", file=path, found=error.strerror
        ) from error
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise DamagedFileError(
            "this is no regular file",
            file=path,
            expected="a file",
            found="a folder, a pipe or a device",
        )
    return open(handle, "rb")


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
