"""The life of a tag on disk: written aside, made whole by one rename, found again, removed when
newer ones are whole.

A save goes into `.TAG.saving`. Only when every file of it is on disk does that folder get the tag's
name, so that a tag folder is whole from its first moment, and a save into a tag that exists
replaces it in one step or not at all.
"""

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import os
import re
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ucp.core.manifest import FILE_NAME, FileEntry, Manifest
from megatron_ucp.core.manifest_json import from_json
from megatron_ucp.errors import UcpError, UsageError
from megatron_ucp.formats.pt.reader import PtFile
from megatron_ucp.formats.tags import is_unfinished, newest_named

_OURS = re.compile(r".*_states\.pt|ucp_.*|__\d+_\d+\.distcp|\.metadata|metadata\.json|common\.pt")
_MOST_PIECES = os.sysconf("SC_IOV_MAX")  # that one call writes
_EXCHANGE, _HERE = 2, -100  # RENAME_EXCHANGE and AT_FDCWD of renameat2(2)


# ------------------------------------------------ writing


def aside_of(save_dir: Path, tag: str) -> Path:
    """The folder that a save of the tag goes into."""
    return save_dir / f".{tag}.saving"


def begin(save_dir: Path, tag: str) -> Path:
    """Makes the folder that a save of the tag goes into, and removes what saves that were killed
    have left.

    One writer at a time: a folder is one run's. Raises UsageError for a tag that is no plain name,
    OSError.
    """
    if not tag or "/" in tag or tag.startswith("."):
        raise UsageError(
            "a tag is the plain name of a folder",
            file=save_dir,
            expected="global_step100",
            found=tag,
        )
    if (save_dir / tag).exists() and not (save_dir / tag).is_dir():
        raise UsageError(
            "a file has the name of the tag",
            file=save_dir / tag,
            expected="a folder, or nothing",
            found="a file",
        )
    save_dir.mkdir(parents=True, exist_ok=True)
    for left in [
        path for path in save_dir.iterdir() if is_unfinished(path.name) and not _in_use(path)
    ]:
        shutil.rmtree(left) if left.is_dir() else left.unlink()
    aside = aside_of(save_dir, tag)
    aside.mkdir()
    return aside


def lock(aside: Path) -> int | None:
    """A handle that holds an unfinished folder for one writer, as long as its process lives; None
    where another has it."""
    handle = os.open(aside, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        return None
    except OSError:  # a file system without locks
        pass
    return handle


def _in_use(left: Path) -> bool:
    """Whether a conversion is writing a folder: it holds a lock on it."""
    handle = lock(left)
    if handle is not None:
        os.close(handle)
    return handle is None


def entry_of(path: Path, name: str | None = None) -> FileEntry:
    """The manifest's line about a file, under its `name` in the tag folder. The SHA-256 is of the
    zip directory of a .pt file, which holds the CRC-32 of every record; of all bytes of any other
    file."""
    name = name or path.name
    if path.suffix == ".pt":
        with PtFile(path) as file:
            return FileEntry(name, file.size_bytes, file.directory_sha256)
    data = path.read_bytes()
    return FileEntry(name, len(data), hashlib.sha256(data).hexdigest())


@dataclass
class Syncs:
    """Brings files and folders to disk (`fsync`), or does nothing where a save need not be durable;
    adds the time up."""

    durable: bool = True
    seconds: float = 0.0

    def __call__(self, path: Path) -> None:
        """Returns when a file or a folder is on disk. Raises OSError."""
        if not self.durable:
            return
        started = time.perf_counter()
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
            self.seconds += time.perf_counter() - started


def write_at(handle: int, data: bytes | memoryview, place: int) -> None:
    """All of the bytes from byte `place` of a file on. Raises OSError."""
    done = 0
    while done < len(data):  # one call moves at most 2 GiB
        done += os.pwrite(handle, data[done:], place + done)


def write_joined_at(handle: int, pieces: Sequence[memoryview], place: int) -> None:
    """Pieces one after the other, from byte `place` of a file on. Raises OSError."""
    for first in range(0, len(pieces), _MOST_PIECES):
        joined = pieces[first : first + _MOST_PIECES]
        size, done = sum(map(len, joined)), os.pwritev(handle, joined, place)
        if done < size:
            write_at(handle, b"".join(joined)[done:], place + done)
        place += size


def replace_text(path: Path, text: str, sync: Syncs) -> None:
    """Writes a small file whole or not at all."""
    temporary = path.with_name(f".{path.name}.saving")
    try:
        temporary.write_text(text, encoding="utf-8")
        sync(temporary)
        os.replace(temporary, path)
        sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def commit(aside: Path, manifest: str, sync: Syncs) -> Path:
    """Adds the manifest and gives the folder its tag's name; returns it. All other files are whole
    and on disk by now.

    Files in an older folder of that name that belong to no save are kept.
    """
    replace_text(aside / FILE_NAME, manifest, sync)
    folder = aside.with_name(aside.name[1:].removesuffix(".saving"))
    if folder.is_dir():
        _keep_others(folder, aside)
        _exchange(aside, folder)
    else:
        os.rename(aside, folder)
    sync(folder.parent)
    if aside.is_dir():
        shutil.rmtree(aside)
    return folder


def _keep_others(old: Path, new: Path) -> None:
    """What a user put into the tag's folder stays there: as links, so that neither folder lacks it
    at any moment."""
    for path in old.iterdir():
        if _OURS.fullmatch(path.name) or (new / path.name).exists():
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.copytree(path, new / path.name, symlinks=True, copy_function=_link)
        else:
            _link(path, new / path.name)


def _link(old: str | Path, new: str | Path) -> None:
    try:
        os.link(old, new, follow_symlinks=False)
    except OSError:  # a file system without hard links
        shutil.copy2(old, new, follow_symlinks=False)


def _exchange(new: Path, old: Path) -> None:
    """The two folders swap names at once; where the file system can't, by renames that leave both
    of them findable."""
    library = ctypes.CDLL(None, use_errno=True)
    if (
        hasattr(library, "renameat2")
        and library.renameat2(_HERE, os.fsencode(new), _HERE, os.fsencode(old), _EXCHANGE) == 0
    ):
        return
    if (number := ctypes.get_errno()) not in (errno.EINVAL, errno.ENOSYS, errno.EPERM, 0):
        raise OSError(number, os.strerror(number), str(old))
    replaced = old.with_name(f"{old.name}.replaced")
    if replaced.exists():
        shutil.rmtree(replaced)
    os.rename(old, replaced)
    os.rename(new, old)
    os.rename(replaced, new)


# ------------------------------------------------ removing


def prune(save_dir: Path, keep: int) -> list[str]:
    """Removes all but the `keep` newest whole tags that the pointer to the newest one (`latest`, or
    Megatron's) has named; returns lines that say what went, what stayed.

    Never touched: the tag that it names, one without our manifest or that is not whole, one
    that was saved without moving `latest`, one that somebody reads (see NativeCheckpoint). A tag
    stops looking like one before its first file goes.
    """
    _, named = newest_named(save_dir) or ("", "")
    mine: list[tuple[float, str]] = []
    for folder in save_dir.iterdir():
        if folder.is_dir() and not is_unfinished(folder.name) and folder.name != named:
            run = _run_of_whole(folder)
            if run.get("moved_latest") and "saved_at" in run:
                mine.append((float(run["saved_at"]), folder.name))
    return [_remove(save_dir / tag) for _, tag in sorted(mine, reverse=True)[keep - 1 :]]


def retire(folder: Path) -> str:
    """Removes one tag; returns a line that says so, or that it stayed. As `prune`, it leaves what
    is not whole or not this package's, and what somebody reads."""
    if folder.is_symlink() or not _run_of_whole(folder):
        return f"kept {folder.name}: no whole tag that was saved here"
    return _remove(folder)


def _run_of_whole(folder: Path) -> Mapping[str, Any]:
    """What the manifest of a tag says of its run; nothing where it has none, or is not whole."""
    with contextlib.suppress(UcpError):
        manifest = manifest_of(folder) if (folder / FILE_NAME).is_file() else None
        if manifest is not None and _all_there(folder, manifest.files):
            return manifest.run
    return {}


def _all_there(folder: Path, files: Iterable[FileEntry]) -> bool:
    return all(
        (folder / f.name).is_file() and (folder / f.name).stat().st_size == f.size_bytes
        for f in files
    )


def _remove(folder: Path) -> str:
    aside = folder.with_name(f".{folder.name}.removing.saving")
    with open(folder / FILE_NAME, "rb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return f"kept {folder.name}: it is being read"
        except OSError:  # a file system without locks: nobody can say that it reads
            pass
        os.rename(folder, aside)
    shutil.rmtree(aside)
    return f"removed {folder.name}"


def manifest_of(folder: Path) -> Manifest:
    """The manifest of a tag folder. Raises OSError, DamagedFileError."""
    path = folder / FILE_NAME
    return from_json(path.read_bytes(), str(path))
