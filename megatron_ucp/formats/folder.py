"""A folder whose files are read, on the local disk or wherever else files lie.

Readers of every format are given a `Folder`, and touch no file system themselves: another kind of
storage is another subclass of `Folder` and of `StoredFile`.
"""

import fcntl
import json
import os
import resource
import stat
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self, TypeVar

from megatron_ucp.core.manifest import FileEntry
from megatron_ucp.errors import DamagedFileError, NotFoundError, UsageError

MAX_JSON_BYTES = 256 * 2**20
_FEW_BYTES = 4 * 2**10  # of which some are known: so are those that are wanted
_T = TypeVar("_T")


class Closing(ABC):
    """What is closed at the end of a `with` block."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @abstractmethod
    def close(self) -> None: ...


class StoredFile(Closing):
    """A file that is open to be read at any byte; a context manager. `path` names it in messages.

    Example: `file.read(8, memoryview(bytearray(4)))` takes the bytes 8 to 11.
    """

    path: str
    size_bytes: int

    @abstractmethod
    def read(self, start_byte: int, target: memoryview) -> None:
        """Fills `target` with the bytes from `start_byte` on. Raises DamagedFileError where the
        file ends before."""

    def read_rows(self, starts: range, size_bytes: int, target: memoryview, places: range) -> None:
        """For each of `starts` fills `size_bytes` of `target` from the same one of `places` on."""
        for start, place in zip(starts, places, strict=True):
            self.read(start, target[place : place + size_bytes])

    @abstractmethod
    def prefetch(self, start_byte: int, size_bytes: int) -> None:
        """Lets storage begin with bytes that are read soon, and returns at once."""

    def bytes_at(self, start_byte: int, size_bytes: int) -> bytes:
        """Bytes of the file. Raises as `read`."""
        data = bytearray(size_bytes)
        self.read(start_byte, memoryview(data))
        return bytes(data)

    def whole(self, max_bytes: int) -> bytes:
        """All bytes. Raises DamagedFileError where they are more than `max_bytes`."""
        if self.size_bytes > max_bytes:
            raise DamagedFileError(
                "the file is larger than any of its kind",
                file=self.path,
                expected=f"at most {max_bytes} bytes",
                found=f"{self.size_bytes} bytes",
            )
        return self.bytes_at(0, self.size_bytes)

    def keeps_folder(self) -> bool:
        """Asks that nobody removes the folder while this file is open. False where somebody is
        removing it already."""
        return True


class Folder(ABC):
    """A folder whose files are read. What lies in it has a name relative to it, also in a folder
    below ("zero/weight/fp32.pt"); `folder / name` is the full path, as messages say it."""

    @abstractmethod
    def __str__(self) -> str: ...

    @abstractmethod
    def __truediv__(self, name: str) -> str:
        """The full path of a name."""

    @abstractmethod
    def name_of(self, path: str) -> str:
        """The name that has a full path."""

    @abstractmethod
    def names(self, below: str = "") -> list[str]:
        """Sorted names of files and folders, without what lies below these: of the folder itself,
        or of the one `below`, where they are relative to that one."""

    @abstractmethod
    def __contains__(self, name: str) -> bool:
        """Whether anything has this name: a file, a folder, a link that leads nowhere."""

    @abstractmethod
    def is_file(self, name: str) -> bool: ...

    @abstractmethod
    def is_folder(self, name: str) -> bool: ...

    @abstractmethod
    def size_bytes(self, name: str) -> int: ...

    @abstractmethod
    def modified(self, name: str) -> float:
        """When a file was written last, in seconds since the epoch."""

    @abstractmethod
    def open(self, name: str) -> StoredFile:
        """Opens a regular file. Raises NotFoundError, DamagedFileError."""

    @abstractmethod
    def prefetch(self, names: Iterable[str], ends_bytes: int = 0) -> None:
        """Lets storage begin with files that are opened soon, of which so many bytes of both ends
        are read (0: as many as usual)."""

    def listing(self) -> Any:
        """What was seen of the names, where another rank needs it to open the files without looking
        for them (`take_listing`)."""
        return None

    def take_listing(self, listing: Any) -> None:  # noqa: B027  as `listing`
        """Takes what another rank saw of the names."""

    def small(self, name: str, max_bytes: int) -> bytes:
        """A small file whole. Raises as `open`, and DamagedFileError for a larger one."""
        with self.open(name) as file:
            return file.whole(max_bytes)

    def json(self, name: str) -> Mapping[str, Any]:
        """An object in a JSON file. Raises as `small`, and DamagedFileError for anything else."""
        data = self.small(name, MAX_JSON_BYTES)
        try:
            tree = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise DamagedFileError(
                "the file is no JSON",
                file=self / name,
                found=f"{type(error).__name__}: {str(error)[:200]}",
            ) from None
        if not isinstance(tree, dict):
            raise DamagedFileError(
                "the file holds no JSON object", file=self / name, found=type(tree).__name__
            )
        return tree

    def made(self, key: str, make: Callable[[], _T]) -> _T:
        """What `make` makes of files of the folder, under a name of its own. It is made once, where
        one rank looks into a folder for all of them."""
        return make()

    def check_size(self, entry: FileEntry) -> None:
        """Raises DamagedFileError for a file of another size than a manifest lists."""
        size = self.size_bytes(entry.name)
        if size != entry.size_bytes:
            raise DamagedFileError(
                "a file has another size than the manifest says",
                file=self / entry.name,
                expected=f"{entry.size_bytes} bytes",
                found=f"{size} bytes",
            )


# ---- the local disk


class LocalFile(StoredFile):
    """A regular file of the local disk. Raises NotFoundError where there is none that may be read,
    DamagedFileError for a pipe, a device, a folder, or one that can't be read."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self._fd = _open(self.path)
        try:
            self.size_bytes = _regular_size(self.path, self._fd)
        except DamagedFileError:
            self.close()
            raise

    @property
    def fd(self) -> int:
        """The descriptor, open until `close`. Raises UsageError afterwards."""
        if self._fd < 0:
            raise UsageError("the file has been closed", file=self.path, fix="open it again")
        return self._fd

    def close(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)

    def read(self, start_byte: int, target: memoryview) -> None:
        done = 0
        while done < len(target):  # one call moves at most 2 GiB
            try:
                count = os.preadv(self.fd, [target[done:]], start_byte + done)
            except OSError as error:
                _damaged(self.path, "the file can't be read", None, error.strerror)
            if count == 0:
                expected = f"{len(target)} bytes from byte {start_byte}"
                _damaged(self.path, "the file is truncated", expected, f"{done} bytes")
            done += count

    def prefetch(self, start_byte: int, size_bytes: int) -> None:
        with suppress(OSError):  # a hint, which a file system need not take
            os.posix_fadvise(self.fd, start_byte, size_bytes, os.POSIX_FADV_WILLNEED)

    def read_rows(self, starts: range, size_bytes: int, target: memoryview, places: range) -> None:
        """Many short rows cost little more than their system calls."""
        fd, preadv = self.fd, os.preadv
        for start, place in zip(starts, places, strict=True):
            row = target[place : place + size_bytes]
            try:
                count = preadv(fd, (row,), start)
            except OSError:
                count = 0
            if count != size_bytes:  # says what is wrong, or reads the rest
                self.read(start + count, row[count:])

    def keeps_folder(self) -> bool:
        try:
            fcntl.flock(self.fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:  # a file system without locks
            pass
        return True


class LocalFolder(Folder):
    """A folder of the local disk, which holds what it held when it was first asked."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = str(Path(path))
        self._before_names = {".": "", "/": "/"}.get(self._path, f"{self._path}/")
        self._entries: dict[str, dict[str, os.DirEntry[str]]] = {}
        self._opened = 0

    def __str__(self) -> str:
        return self._path

    def __truediv__(self, name: str) -> str:
        return f"{self._before_names}{name}"

    def name_of(self, path: str) -> str:
        return path.removeprefix(self._before_names)

    def names(self, below: str = "") -> list[str]:
        return sorted(self._entries_of(below))

    def __contains__(self, name: str) -> bool:
        below, _, last = name.rpartition("/")
        if below not in self._entries:  # one name is looked up faster than all are listed
            return os.path.lexists(self / name)
        return last in self._entries[below]

    def is_file(self, name: str) -> bool:
        below, _, last = name.rpartition("/")
        if below not in self._entries:
            return os.path.isfile(self / name)
        entry = self._entries[below].get(last)
        with suppress(OSError):  # a link to itself
            return entry is not None and entry.is_file()
        return False

    def is_folder(self, name: str) -> bool:
        return os.path.isdir(self / name)

    def size_bytes(self, name: str) -> int:
        return os.stat(self / name).st_size

    def modified(self, name: str) -> float:
        return os.stat(self / name).st_mtime

    def open(self, name: str) -> StoredFile:
        self._opened += 1
        _allow_descriptors(self._opened)
        return LocalFile(self / name)

    def prefetch(self, names: Iterable[str], ends_bytes: int = 0) -> None:
        """A disk answers one request as soon as many."""

    def _entries_of(self, below: str) -> dict[str, os.DirEntry[str]]:
        """What lies in the folder, or in one below it; nothing where there is none."""
        if below not in self._entries:
            entries: dict[str, os.DirEntry[str]] = {}
            with (
                suppress(FileNotFoundError, NotADirectoryError, ValueError),
                os.scandir(self / below if below else self._path) as found,
            ):
                entries = {entry.name: entry for entry in found}
            self._entries[below] = entries
        return self._entries[below]


# ---- one look for all ranks


@dataclass
class Look:
    """What one rank saw of a folder, for ranks that open the same folder as it did.

    Example: `reads["mp_rank_00_model_states.pt"][(0, 4)]` are the first four bytes of that file.
    """

    # by folder its sorted names, as lines; and of each a byte that says whether it is a file
    names: dict[str, tuple[str, bytes]] = field(default_factory=dict)
    answers: dict[tuple[str, str], Any] = field(default_factory=dict)  # by question and name
    sizes: dict[str, int] = field(default_factory=dict)  # of files that were opened
    listing: Any = None  # what `Folder.listing` says
    reads: dict[str, dict[tuple[int, int], bytes]] = field(default_factory=dict)
    made: dict[str, Any] = field(default_factory=dict)


class SharedFolder(Folder):
    """A folder into which one rank looks for all. What another rank saw (`seen`) is answered by
    that; the rest is asked of `base`, and kept in `look` for other ranks as long as that is there.
    Files `to_come` (name -> bytes) are not in `base` yet, and are read as if they were.
    """

    def __init__(
        self, base: Folder, seen: Look | None = None, to_come: Mapping[str, bytes] | None = None
    ) -> None:
        self._base, self._seen, self._to_come = base, seen or Look(), to_come or {}
        self.look = Look() if seen is None else None
        if self._seen.listing is not None:
            base.take_listing(self._seen.listing)
        self._names = {
            below: names.split("\n") if names else []
            for below, (names, _) in self._seen.names.items()
        }
        self._is_file = {
            f"{below}/{name}" if below else name: bool(is_file)
            for below, (_, files) in self._seen.names.items()
            for name, is_file in zip(self._names[below], files, strict=True)
        }

    def __str__(self) -> str:
        return str(self._base)

    def __truediv__(self, name: str) -> str:
        return self._base / name

    def name_of(self, path: str) -> str:
        return self._base.name_of(path)

    def modified(self, name: str) -> float:
        return self._base.modified(name)

    def names(self, below: str = "") -> list[str]:
        if below in self._names:
            return [*self._names[below]]
        there = self._base.names(below)
        if not below:
            there = sorted({*there, *self._to_come})
        if self.look is not None and below not in self.look.names:
            prefix = f"{below}/" if below else ""
            are_files = bytes(
                name in self._to_come or self._base.is_file(f"{prefix}{name}") for name in there
            )
            self.look.names[below] = "\n".join(there), are_files
        return there

    def __contains__(self, name: str) -> bool:
        is_known = name in self._is_file or name in self._to_come
        return is_known or self._answer("in", name, self._base.__contains__)

    def is_file(self, name: str) -> bool:
        is_known = self._is_file.get(name) or name in self._to_come
        return is_known or self._answer("is file", name, self._base.is_file)

    def is_folder(self, name: str) -> bool:
        return self._answer("is folder", name, self._base.is_folder)

    def size_bytes(self, name: str) -> int:
        return self._answer("size", name, self._base.size_bytes)

    def _answer(self, question: str, name: str, ask: Callable[[str], _T]) -> _T:
        key = question, name
        answer = self._seen.answers[key] if key in self._seen.answers else ask(name)
        if self.look is not None:
            self.look.answers[key] = answer
        return answer

    def open(self, name: str) -> StoredFile:
        open_here = partial(self._base.open, name)
        if name in self._seen.sizes:
            return _SharedFile(self, name, self._seen.sizes[name], open_here)
        file = None if name in self._to_come else open_here()
        if self.look is None and file is not None:
            return file
        size = len(self._to_come[name]) if file is None else file.size_bytes
        if self.look is not None:
            self.look.sizes[name] = size
            self.look.listing = self._base.listing()
        return _SharedFile(self, name, size, open_here, file)

    def reads(self, name: str) -> Mapping[tuple[int, int], bytes]:
        """Bytes of a file that another rank read, or that is to come, by their place and number."""
        if name in self._to_come:
            return {(0, len(self._to_come[name])): self._to_come[name]}
        return self._seen.reads.get(name, {})

    def prefetch(self, names: Iterable[str], ends_bytes: int = 0) -> None:
        known = {*self._seen.sizes, *self._to_come}
        self._base.prefetch((one for one in names if one not in known), ends_bytes)

    def made(self, key: str, make: Callable[[], _T]) -> _T:
        if key in self._seen.made:
            return self._seen.made[key]
        look, self.look = self.look, None
        try:
            found = make()
        finally:
            self.look = look
        if look is not None:
            look.made[key] = found
        return found


class _SharedFile(StoredFile):
    """A file of a shared folder. Of one that another rank saw it is opened when bytes are asked
    for that nobody read."""

    def __init__(
        self,
        folder: SharedFolder,
        name: str,
        size_bytes: int,
        open_here: Callable[[], StoredFile],
        file: StoredFile | None = None,
    ) -> None:
        self.path, self.size_bytes = folder / name, size_bytes
        self._folder, self._name, self._reads = folder, name, folder.reads(name)
        self._open_here, self._file = open_here, file
        self._is_closed = False

    @property
    def _opened(self) -> StoredFile:
        if self._is_closed:
            raise UsageError("the file has been closed", file=self.path, fix="open it again")
        if self._file is None:
            self._file = self._open_here()
            if self._file.size_bytes != self.size_bytes:
                _damaged(
                    self.path,
                    "the file has another size here than another rank saw",
                    f"{self.size_bytes} bytes",
                    f"{self._file.size_bytes} bytes",
                )
        return self._file

    def read(self, start_byte: int, target: memoryview) -> None:
        if not len(target):  # memory of nothing may be read-only
            return
        known = self._reads.get((start_byte, len(target)))
        if known is not None:
            target[:] = known
            return
        self._opened.read(start_byte, target)
        if (look := self._folder.look) is not None:
            look.reads.setdefault(self._name, {})[start_byte, len(target)] = bytes(target)

    def prefetch(self, start_byte: int, size_bytes: int) -> None:
        end = start_byte + size_bytes
        is_known = any(start_byte <= at and at + size <= end for at, size in self._reads)
        if size_bytes > _FEW_BYTES or not is_known:
            self._opened.prefetch(start_byte, size_bytes)

    def read_rows(self, starts: range, size_bytes: int, target: memoryview, places: range) -> None:
        self._opened.read_rows(starts, size_bytes, target, places)

    def keeps_folder(self) -> bool:
        return self._file is None or self._file.keeps_folder()

    def close(self) -> None:
        self._is_closed = True
        if self._file is not None:
            self._file.close()


def _damaged(path: str, problem: str, expected: object, found: object) -> NoReturn:
    raise DamagedFileError(problem, file=path, expected=expected, found=found)


def _open(path: str) -> int:
    try:  # not blocking, or a named pipe would wait for its writer
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise NotFoundError(
            "the file does not exist", file=path, fix="restore it, or load another tag"
        ) from error
    except ValueError as error:
        raise UsageError(
            "the path is malformed",
            found=repr(path),
            fix="give a path without control characters, and not longer than the system takes",
        ) from error
    except PermissionError as error:  # no damage: who may read it finds it whole
        raise NotFoundError(
            "the file may not be read",
            file=path,
            found=f"{error.strerror}: {_rights(path)}",
            fix="give its reader the right to read it, or read it as its owner",
            id="",
        ) from error
    except OSError as error:
        raise DamagedFileError(
            "the file can't be opened", file=path, found=error.strerror
        ) from error


def _rights(path: str) -> str:
    """Owner and mode of a file, as `ls -l` shows them."""
    with suppress(OSError):
        status = os.stat(path)
        return f"{stat.filemode(status.st_mode)} of user {status.st_uid}, and this is {os.getuid()}"
    return "its folder may not be entered"


def _regular_size(path: str, fd: int) -> int:
    try:
        status = os.fstat(fd)
    except OSError as error:
        _damaged(path, "the file can't be read", None, error.strerror)
    if not stat.S_ISREG(status.st_mode):
        kind = "a folder" if stat.S_ISDIR(status.st_mode) else "a device"
        _damaged(path, "this is no regular file", None, kind)
    return status.st_size


def _allow_descriptors(count: int) -> None:
    """Lets this process have as many files open as it may: a folder of thousands is read with all
    of them open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard and 2 * count + 128 > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
