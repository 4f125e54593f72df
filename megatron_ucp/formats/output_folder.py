"""The life of a tag on disk: written aside, made whole by one rename, found again, removed when
newer ones are whole.

A save goes into `.TAG.saving`. Only when every file of it is on disk does that folder get the tag's
name, so that a tag folder is whole from its first moment, and a save into a tag that exists
replaces it in one step or not at all.
"""

import ctypes
import errno
import fcntl
import hashlib
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Self

from megatron_ucp.core.manifest import FILE_NAME, MOVED_LATEST, RUN, TAG, FileEntry, Manifest
from megatron_ucp.core.manifest_json import from_json, to_json
from megatron_ucp.errors import SaveError, UcpError, UsageError, some_of
from megatron_ucp.formats import store_saves
from megatron_ucp.formats.locks import PublishRight, claims_in, lock_of, removing, writing
from megatron_ucp.formats.pt.file import PtFile
from megatron_ucp.formats.store import AGAIN, STORED_IN, Location, StorePath
from megatron_ucp.formats.tags import (
    OF_A_SAVE,
    SAVING,
    is_unfinished,
    newest_named,
    pointers_in,
    require_no_pointer,
)

_EXCHANGE, _HERE = 2, -100  # RENAME_EXCHANGE and AT_FDCWD of renameat2(2)


# ------------------------------------------------ writing


# Python's own, also where `engines/trainers` puts another one in its place for trainers: what this
# package removes is what it may.
_rmtree = shutil.rmtree


def aside_of(save_dir: Location, tag: str) -> Location:
    """The folder that a save of the tag goes into. In a store, where nothing is renamed, it is the
    tag's own, unless `begin` gives another one."""
    if isinstance(save_dir, StorePath):
        return save_dir / tag
    return save_dir / f".{tag}{SAVING}"


def tag_of(aside: Location) -> str:
    """The tag whose save goes into a folder."""
    if isinstance(aside, StorePath):
        return aside.parent.name if aside.name.startswith(AGAIN) else aside.name
    return aside.name.removeprefix(".").removesuffix(SAVING)


@contextmanager
def begin(save_dir: Location, tag: str, right: PublishRight | None = None) -> Iterator[Location]:
    """The folder that a save of the tag goes into, that save's alone as long as it has its `right`.
    Behind the block it is gone, unless `commit` gave it the tag's name; what killed saves left went
    before.

    Raises UsageError for a tag that is no plain name, SaveError where another process saves it,
    OSError.
    """
    _require_free_for_a_tag(save_dir, tag)
    if isinstance(save_dir, StorePath):
        with store_saves.attempt(save_dir / tag) as attempt:
            yield attempt.aside
        return
    save_dir.mkdir(parents=True, exist_ok=True)
    with held(aside_of(save_dir, tag), right) as aside:
        _sweep(claims_in(save_dir) - {aside})
        yield aside


def _sweep(unfinished: set[Location]) -> None:
    """Removes what nobody writes any more; what another user left is in nobody's way."""
    for left in unfinished:
        with suppress(OSError), removing(left) as nobody_writes:
            if nobody_writes:
                clear(left)


def _require_free_for_a_tag(save_dir: Location, tag: str) -> None:
    require_no_pointer(save_dir / tag)
    if not tag or "/" in tag or tag.startswith("."):
        raise UsageError(
            "a tag is the plain name of a folder",
            file=save_dir,
            expected="global_step100",
            found=tag,
            fix="give such a name, without / and with no dot at its beginning",
            id="no-such-tag",
        )
    if (save_dir / tag).is_file():
        raise UsageError(
            "a file has the name of the tag",
            file=save_dir / tag,
            expected="a folder, or nothing",
            found="a file",
            fix="remove the file, or give another tag",
        )


@contextmanager
def held(
    aside: Location, right: PublishRight | None = None, replaces: bool = False
) -> Iterator[Location]:
    """A new folder under the name of an unfinished one, this save's alone as long as it has its
    `right`; gone behind the block. In a store that is the output itself, which counts once it is
    committed; only what `replaces` another one may find that there. Raises SaveError where another
    one writes it, OSError."""
    if isinstance(aside, StorePath):
        with store_saves.output(aside, replaces):
            yield aside
        return
    right = right or PublishRight()
    with writing(aside, right):
        clear(aside)  # of a process that was killed
        # claims of those that were killed when all had its name; the folders of others are a run's
        _sweep({left for left in claims_in(aside.parent) - {aside} if not os.path.lexists(left)})
        aside.mkdir()
        try:
            yield aside
        finally:
            with suppress(OSError, SaveError), right.changing(f"clears {aside}", is_late=True):
                clear(aside)


def clear(path: Location) -> None:
    """Removes a folder with all that lies in it, a file, or a link alone; also one that is being
    removed already. Raises OSError."""
    with suppress(FileNotFoundError):
        if path.is_symlink() or not path.is_dir():
            path.unlink()
        else:
            _rmtree(path)


def entry_of(path: Location, name: str | None = None) -> FileEntry:
    """The manifest's line about a file, under its `name` in the tag folder. The SHA-256 is of the
    zip directory of a .pt file, which holds the CRC-32 of every record; of all bytes of any other
    file."""
    name = name or path.name
    if path.suffix == ".pt":
        with PtFile(path) as file:
            return FileEntry(name, file.size_bytes, file.directory_sha256)
    data = path.read_bytes()
    return FileEntry(name, len(data), hashlib.sha256(data).hexdigest())


def entries_of(folder: Location, names: Iterable[str]) -> list[FileEntry]:
    """As `entry_of`, of files in a folder. Objects of a store are looked at several at a time."""
    files = [(folder / name, name) for name in names]
    if not isinstance(folder, StorePath):
        return [entry_of(*file) for file in files]
    with ThreadPoolExecutor(_LOOKED_AT_ONCE) as threads:
        return [*threads.map(lambda file: entry_of(*file), files)]


_LOOKED_AT_ONCE = 16


@dataclass
class Syncs:
    """Brings files and folders of one save to disk (`fsync`), or does nothing where it need not be
    durable; adds the time up. `right` is the save's, without which it publishes nothing."""

    durable: bool = True
    seconds: float = 0.0
    right: PublishRight = field(default_factory=PublishRight, repr=False, compare=False)

    def __call__(self, path: Location) -> None:
        """Returns when a file or a folder is on disk; what a store has taken is. Raises OSError."""
        if not self.durable or isinstance(path, StorePath):
            return
        self.right.says(f"syncs {path}")
        started = time.perf_counter()
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        except OSError as error:
            error.filename = error.filename or str(path)
            raise
        finally:
            os.close(handle)
            self.seconds += time.perf_counter() - started


def begin_sync(path: Location, start: int, size: int) -> None:
    """Lets the disk begin with `size` bytes of a file from `start` on while others are made. Only a
    hint: `sync_all` waits for all of them."""
    call = getattr(ctypes.CDLL(None), "sync_file_range", None)  # Linux
    if call is not None:
        handle = os.open(path, os.O_RDONLY)
        call(handle, ctypes.c_int64(start), ctypes.c_int64(size), 2)  # SYNC_FILE_RANGE_WRITE
        os.close(handle)


def sync_all(folder: Location) -> None:
    """Brings a folder with all that lies in it to disk: by one call for the whole file system,
    where there is one. What a store has taken is there."""
    if isinstance(folder, StorePath):
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).syncfs(handle):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(folder))
    except AttributeError:  # no such call on this system
        sync = Syncs()
        for path in sorted(folder.rglob("*")):
            sync(path)
        sync(folder)
    finally:
        os.close(handle)


def make_file(path: Location, size_bytes: int) -> None:
    """A file of that size, which is written by places; in the place of another one. Raises
    OSError."""
    with open(path, "wb") as file:
        file.truncate(size_bytes)


class OutFile:
    """A file that is written by places; several processes may write one. Made where it is not
    there. A context manager. Errors of the operating system name it."""

    def __init__(self, path: Location) -> None:
        self.path = path
        self._handle = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        os.close(self._handle)

    def write(self, data: bytes | memoryview, place: int) -> None:
        """All of the bytes from byte `place` on. Raises OSError."""
        with self._named():
            done = 0
            while done < len(data):  # one call moves at most 2 GiB
                done += os.pwrite(self._handle, data[done:], place + done)

    @contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            error.filename = error.filename or str(self.path)
            raise


def move_pointer(
    path: Location, text: str, sync: Syncs, unless: Callable[[], bool] = lambda: False
) -> bool:
    """Lets a pointer name another tag; returns whether it does: not where `unless`, asked while
    nobody else moves it, says so. Raises OSError, SaveError."""
    if isinstance(path, StorePath):
        with sync.right.changing(f"replaces {path}", f"`{path.name}` names {text}"):
            return store_saves.move_pointer(path, text, unless)
    with writing(aside_of(path.parent, path.name), sync.right, in_turn=True):
        if unless():
            return False
        _replace_text(path, text, sync, f"`{path.name}` names {text}")
        return True


def replace_text(path: Location, text: str, sync: Syncs) -> None:
    """Writes a small file whole or not at all; several processes that do so take turns. Raises
    OSError, SaveError, StoreError."""
    if isinstance(path, StorePath):
        store_saves.move_pointer(path, text, lambda: False)
        return
    with writing(aside_of(path.parent, path.name), sync.right, in_turn=True):
        _replace_text(path, text, sync)


def _replace_text(path: Location, text: str, sync: Syncs, done: str = "") -> None:
    turn = aside_of(path.parent, path.name)
    # Of one save alone: its rename fails where a later save removed it, however long it hung.
    temporary = turn.with_name(f"{turn.name}.{uuid.uuid4().hex[:8]}")
    try:
        with sync.right.changing(f"clears what others left of {path}", is_late=True):
            _clear_others(turn)
        temporary.write_text(text, encoding="utf-8")
        sync(temporary)
        with sync.right.changing(f"replaces {path}", done):
            os.replace(temporary, path)
        sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def _clear_others(turn: Location) -> None:
    """Removes what saves left that were killed or given up while they replaced a small file."""
    for name in os.listdir(turn.parent):
        if name.startswith(f"{turn.name}.") and name != lock_of(turn).name:
            (turn.parent / name).unlink(missing_ok=True)


def commit(aside: Location, manifest: str, sync: Syncs) -> Location:
    """Adds the manifest and gives the folder its tag's name; returns it. All other files are whole
    and on disk by now.

    Files in an older folder of that name that belong to no save are kept. Where the name is a link
    to a folder elsewhere, the link alone goes.
    """
    if isinstance(aside, StorePath):
        attempt = store_saves.attempt_at(aside)
        read = from_json(manifest, str(aside / FILE_NAME))
        if aside != attempt.tag:
            read = replace(read, run={**read.run, STORED_IN: f"{aside.name}/"})
        with sync.right.changing(f"names {attempt.tag}", f"{attempt.tag.name} is there and whole"):
            attempt.commit(to_json(read).encode(), [entry.name for entry in read.files])
        return attempt.tag
    replace_text(aside / FILE_NAME, manifest, sync)
    folder = aside.with_name(tag_of(aside))
    if folder.is_dir():
        with sync.right.changing(f"links what users put into {folder}"):
            _keep_others(folder, aside)
    return give_name(aside, sync)


def give_name(aside: Path, sync: Syncs) -> Path:
    """Gives a folder that is whole and on disk its name, in one step also where another folder or
    a link has it, which goes; returns it. Raises OSError."""
    folder = aside.with_name(tag_of(aside))
    with sync.right.changing(f"names {folder}", f"{folder.name} is there and whole"):
        if os.path.lexists(folder):
            _exchange(aside, folder)
        else:
            os.rename(aside, folder)
    sync(folder.parent)
    with sync.right.changing(f"removes what {folder} replaced", is_late=True):
        clear(aside)
    return folder


def _keep_others(old: Path, new: Path) -> None:
    """What a user put into the tag's folder stays there: as links, so that neither folder lacks it
    at any moment."""
    for path in old.iterdir():
        if OF_A_SAVE.fullmatch(path.name) or (new / path.name).exists():
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
    clear(replaced)
    os.rename(old, replaced)
    os.rename(new, old)
    os.rename(replaced, new)


# ------------------------------------------------ removing


def prune(
    save_dir: Location, keep: int, run: str | None = None, right: PublishRight | None = None
) -> list[str]:
    """Removes all but the `keep` newest whole tags that a run's saves wrote and the pointer to the
    newest one (`latest`, or Megatron's) has named; returns lines that say what went, what stayed.
    `run` is the id of that run (None: that of the tag which the pointer names); `right` is that of
    the save that asks for it.

    Never touched: the tag that the pointer names, a copy or a link of a user's, one of another run,
    one that is not whole by its own manifest, one that was saved without moving the pointer, one
    that somebody reads, or saves. A tag stops looking like one before its
    first file goes.
    """
    named = {tag for tag in pointers_in(save_dir).values() if tag}
    manifests = {
        folder: manifest
        for folder in sorted(save_dir.iterdir())
        if not is_unfinished(folder.name) and (manifest := _manifest_or_none(folder)) is not None
    }
    if run is None:
        newest = newest_named(save_dir)
        newest_one = None if newest is None else manifests.get(save_dir / newest.tag)
        run = str(newest_one.run.get(RUN, "")) if newest_one is not None else ""
    mine: list[tuple[bool, float, str]] = []
    kept: dict[str, list[str]] = {}
    for folder, manifest in manifests.items():
        if not manifest.run.get(MOVED_LATEST):
            continue
        if reason := _not_ours(folder, manifest, run):
            kept.setdefault(reason, []).append(folder.name)
        else:
            mine.append((folder.name in named, manifest.saved_at or 0.0, folder.name))
    older = [tag for is_named, _, tag in sorted(mine, reverse=True)[keep:] if not is_named]
    right = right or PublishRight()
    lines = [_remove(save_dir / tag, run, right) for tag in older]
    return lines + [f"kept {some_of(tags)}: {reason}" for reason, tags in kept.items()]


def retire(folder: Location, run: str, right: PublishRight | None = None) -> str:
    """Removes one tag of a run; returns a line that says so, or that it stayed. As `prune`, it
    leaves what is not whole or not that run's, and what somebody reads."""
    return _remove(folder, run, right or PublishRight())


def other_run_in(folder: Location, run: str) -> str:
    """A line where a tag is there that is of another run, and would be replaced; else empty."""
    # in a store another question would cost each save a request
    is_there = isinstance(folder, Path) and folder.exists()
    there = _manifest_or_none(folder) if is_there else None
    if there is None or there.run.get(RUN, run) == run:
        return ""
    step = there.run.get("global_steps", "?")
    return f"replaced {folder.name}, which another run had saved at step {step}"


def _manifest_or_none(folder: Location) -> Manifest | None:
    """The manifest of a tag; None where it has none that can be read."""
    with suppress(UcpError, OSError):
        return manifest_of(folder)
    return None


def _not_ours(folder: Location, manifest: Manifest | None, run: str) -> str:
    """Why a tag is nothing that saves of a run wrote, and that is whole; empty where it is."""
    said = manifest.run if manifest is not None else {}
    if folder.is_symlink():
        return "it is a link"
    if RUN not in said or TAG not in said:
        return "no manifest says which run saved it"
    if said[TAG] != folder.name:
        return f"it is a copy of {said[TAG]}"
    if said[RUN] != run:
        return "another run saved it"
    files = manifest.files if manifest is not None else ()
    below = str(said.get(STORED_IN, "")) if isinstance(folder, StorePath) else ""
    wrong = _first_damaged(folder / below, files)
    return f"it is not whole: {wrong}" if wrong else ""


def _first_damaged(folder: Location, files: Sequence[FileEntry]) -> str:
    """The first file of a tag that is not as its manifest says; empty where all are."""
    for entry in files:
        with suppress(UcpError, OSError):
            path = folder / entry.name
            if path.stat().st_size == entry.size_bytes:
                if not entry.sha256 or entry_of(path, entry.name) == entry:
                    continue
        return entry.name
    return ""


def _remove(folder: Location, run: str, right: PublishRight) -> str:
    """Removes a tag where nobody reads or saves it, and it still is what it was."""
    if isinstance(folder, StorePath):
        still = partial(_not_ours, folder, _manifest_or_none(folder), run)
        with right.changing(f"removes {folder}"):
            return store_saves.remove_tag(folder, still)
    aside = aside_of(folder.parent, folder.name)
    with removing(aside, right) as nobody_writes:
        if not nobody_writes:
            return f"kept {folder.name}: it is being saved"
        if reason := _not_ours(folder, _manifest_or_none(folder), run):
            return f"kept {folder.name}: {reason}"
        with right.changing(f"removes {folder}"):
            clear(aside)
            with open(folder / FILE_NAME, "rb") as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    return f"kept {folder.name}: it is being read"
                except OSError:  # a file system without locks: nobody can say that it reads
                    pass
                os.rename(folder, aside)
            clear(aside)
    return f"removed {folder.name}"


def manifest_of(folder: Location) -> Manifest:
    """The manifest of a tag folder. Raises OSError, DamagedFileError."""
    path = folder / FILE_NAME
    return from_json(path.read_bytes(), str(path))
