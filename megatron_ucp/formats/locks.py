"""Who writes a folder: a file beside it, which one process holds as long as it lives.

The file is locked (`flock`), which the kernel ends with the process, on a network file system too.
Where a file system has no locks, nobody is kept out (`PublishRight.is_unlocked`).

Inside of a process each save has a `PublishRight`. A save that was given up loses it, and with it
what it holds here.
"""

import contextlib
import errno
import fcntl
import json
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron_ucp.errors import SaveError
from megatron_ucp.formats.store import Location
from megatron_ucp.formats.tags import is_unfinished

_LOCK = ".lock"
_WRITES, _REMOVES = "writes", "removes"
# One that clears away is waited for; so is a claim that does not say yet whose it is.
_PATIENCE_S, _PAUSE_S = 60.0, 0.02
_ENDED = ("Z", "X")  # states of a process that nobody has asked for yet


class PublishRight:
    """The right of one save to change what others see: to name its folder, to move pointers, to
    remove older tags, and to release its locks.

    Each such change is made inside of `changing`, one at a time. Whoever gives the save up calls
    `take`: from then on no change begins. One that is inside of the operating system at that
    moment can't be called back; `hangs` says which it is, and `done` what the save has changed.
    """

    def __init__(self, aside: Location | None = None) -> None:
        self.aside = aside  # the folder that the save writes into
        self.until: float | None = None  # time.monotonic() after which nothing is published
        self.says: Callable[[str], None] = lambda what: None  # is told what happens now
        self.done: list[str] = []  # what counts by now
        self.is_lost = False
        self.is_unlocked = False  # the file system knows no locks
        self.hangs = ""  # the change that is being made
        self._changes = threading.Lock()

    @contextmanager
    def changing(self, what: str, done: str = "", is_late: bool = False) -> Iterator[None]:
        """One change; `done` is true once it is made. Behind `until` only what `is_late` is still
        done: clearing up. Raises SaveError where the right is lost."""
        self.says(what)
        with self._changes:
            in_time = is_late or self.until is None or time.monotonic() < self.until
            if self.is_lost or not in_time:
                raise SaveError(
                    "the save was given up at its deadline, and changes nothing more",
                    file=self.aside,
                    found=what,
                    fix="look at the disk",
                    id="",
                )
            self.hangs = what
            try:
                yield
            finally:
                self.hangs = ""
            if done:
                self.done.append(done)

    def take(self) -> None:
        """Takes the right away. A change that is being made gets a moment to end."""
        self.is_lost = True
        _GIVEN_UP.add(self)
        if self._changes.acquire(timeout=_ONE_CHANGE_S):
            self._changes.release()

    @property
    def outcome(self) -> str:
        """What the save has changed, and what it may still change."""
        what = "; ".join(self.done) or "nothing of it counts, and older tags are as they were"
        return f"{what}; it hangs, and this may still come: {self.hangs}" if self.hangs else what


_ONE_CHANGE_S = 0.2
_GIVEN_UP: "weakref.WeakSet[PublishRight]" = weakref.WeakSet()
_OWN: "dict[Location, Claim]" = {}  # those of this process, by the path of their file


def require_left(aside: Location) -> None:
    """Raises SaveError where a save of this process that was given up may still change a folder
    that it writes into: it hangs in the operating system, and can't be stopped."""
    for right in [*_GIVEN_UP]:
        if right.aside == aside and right.hangs:
            raise SaveError(
                "a save into this folder was given up, and may still write into it",
                file=aside,
                expected="one at a time",
                found=f"it hangs: {right.hangs}",
                fix="give another tag until the disk answers again",
                id="folder-in-use",
            )


class Claim:
    """A name that is this process's alone, until it lets go. `is_small`: of a file that each one
    makes anew, so that a save that hangs stands in nobody's way."""

    def __init__(
        self, path: Location, handle: int, doing: str, right: PublishRight, is_small: bool
    ) -> None:
        self._path, self._handle = path, handle
        self._right, self._is_small = right, is_small
        os.ftruncate(handle, 0)
        os.write(handle, json.dumps({"doing": doing, **this_process()}).encode())
        _OWN[path] = self

    def release(self) -> None:
        """Lets go; the file goes first, so that nobody takes one that is on its way out. Of a save
        that was given up the file stays: the name may be another save's by now."""
        what = f"releases {self._path}"
        with (
            contextlib.suppress(SaveError, OSError),
            self._right.changing(what, is_late=True),
        ):
            if _is_at(self._handle, self._path):
                self._path.unlink()
        self._drop()

    @property
    def hangs(self) -> str:
        """What its save may still change."""
        return self._right.hangs if self._right.is_lost else ""

    def taken_over(self) -> bool:
        """Whether the next one may have the name: the save was given up. Then it has let go."""
        is_free = self._right.is_lost and (self._is_small or not self._right.hangs)
        if is_free:
            self._drop()
        return is_free

    def _drop(self) -> None:
        handle, self._handle = self._handle, -1
        if _OWN.get(self._path) is self:
            del _OWN[self._path]
        if handle >= 0:
            os.close(handle)


def lock_of(aside: Location) -> Location:
    """The file that says who writes an unfinished folder, or file."""
    return aside.with_name(aside.name + _LOCK)


def claims_in(folder: Location) -> set[Location]:
    """What is unfinished in a folder: somebody writes it, or was killed."""
    out: set[Location] = set()
    for name in os.listdir(folder):
        bare = name.removesuffix(_LOCK)
        if is_unfinished(bare):
            out.add(folder / bare)
    return out


@contextmanager
def writing(
    aside: Location, right: PublishRight | None = None, in_turn: bool = False
) -> Iterator[None]:
    """Inside, nobody else writes or clears away what lies under the name, as long as the save has
    its right. Waits for one that clears it away, and `in_turn`, of something small, for all others.
    Raises SaveError, which says who writes it; OSError."""
    until, right = time.monotonic() + _PATIENCE_S, right or PublishRight()
    while (claim := _claim(aside, _WRITES, right, in_turn)) is None:
        holder = _holder(lock_of(aside))
        if time.monotonic() > until or (holder.get("doing") == _WRITES and not in_turn):
            raise _refusal(aside, holder)
        time.sleep(_PAUSE_S)
    try:
        yield
    finally:
        claim.release()


@contextmanager
def removing(aside: Location, right: PublishRight | None = None) -> Iterator[bool]:
    """As `writing`, of what shall go. False inside where somebody writes it. Raises OSError."""
    claim = _claim(aside, _REMOVES, right or PublishRight())
    try:
        yield claim is not None
    finally:
        if claim is not None:
            claim.release()


def _refusal(aside: Location, holder: dict[str, Any]) -> SaveError:
    own = _OWN.get(lock_of(aside))
    since = holder.get("since", "a moment ago")
    found = f"process {holder.get('pid', '?')} on {holder.get('host', 'a machine unknown')}"
    if own is not None:
        found = "a save of this very process" + (f", which hangs: {own.hangs}" * bool(own.hangs))
    return SaveError(
        f"{'another process' if own is None else 'another save'} is writing this folder",
        file=aside,
        expected="one at a time",
        found=f"{found}, since {since}",
        fix=f"give another name, or wait for it; where that process is gone, remove "
        f"{lock_of(aside).name}",
        id="folder-in-use",
    )


def _claim(
    aside: Location, doing: str, right: PublishRight, is_small: bool = False
) -> Claim | None:
    """A claim; None where another process has it, or another save of this one."""
    path = lock_of(aside)
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        locked = _lock(handle)
        right.is_unlocked |= locked is None
        if locked is False:
            os.close(handle)
            own = _OWN.get(path)
            if own is None or not own.taken_over():
                return None
        elif _is_at(handle, path):
            return Claim(path, handle, doing, right, is_small)
        else:  # its holder took it away while it was opened
            os.close(handle)


def _lock(handle: int) -> bool | None:
    """Whether the lock was free; None where the file system has none."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return False if error.errno in (errno.EWOULDBLOCK, errno.EACCES) else None
    return True


def _is_at(handle: int, path: Location) -> bool:
    """Whether an open file still has its name."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(handle), os.lstat(path))
    return False


# ------------------------------------------------ who it is


def this_process() -> dict[str, Any]:
    """What tells this process from all others."""
    pid = os.getpid()
    since = time.strftime("%Y-%m-%d %H:%M:%S %z")
    return {
        "host": socket.gethostname(),
        "machine": _machine(),
        "pid": pid,
        "started": _started(pid),
        "since": since,
    }


def _machine() -> str:
    """What tells this machine, since it was started, and its process numbers from all others."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    return ""


def _started(pid: object) -> str:
    """When a process of this machine started, in the kernel's ticks; empty where there is none of
    that number, or one that has ended."""
    with contextlib.suppress(OSError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if fields[0] in _ENDED else fields[19]
    return ""


def is_alive(said: Mapping[str, Any]) -> bool | None:
    """Whether a process is there of which `this_process` said this; None where nobody here can
    tell, as of one of another machine."""
    if not said.get("machine") or said["machine"] != _machine():
        return None
    return said.get("started") == _started(said.get("pid"))


def _holder(path: Location) -> dict[str, Any]:
    """What a claim says of its process; nothing where it does not say it yet."""
    with contextlib.suppress(OSError, ValueError):
        said = json.loads(path.read_text(encoding="utf-8"))
        return said if isinstance(said, dict) else {}
    return {}
