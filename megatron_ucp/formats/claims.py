"""Who writes a folder: a file beside it, which one process holds as long as it lives.

The file is locked (`flock`), which the kernel ends with the process, on a network file system too.
Where a file system has no locks, what the file says decides: a process of this machine that is
gone, or one of another machine that touched nothing for an hour, holds nothing.
"""

import contextlib
import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron_ucp.errors import SaveError
from megatron_ucp.formats.tags import is_unfinished

_LOCK = ".lock"
_WRITES, _REMOVES = "writes", "removes"
# One that clears away is waited for; so is a claim that does not say yet whose it is.
_PATIENCE_S, _PAUSE_S = 60.0, 0.02
_ABANDONED_S = 3600.0
_ENDED = ("Z", "X")  # states of a process that nobody has asked for yet


class Claim:
    """A name that is this process's alone, until it lets go."""

    def __init__(self, path: Path, handle: int, doing: str) -> None:
        self._path, self._handle = path, handle
        os.ftruncate(handle, 0)
        os.write(handle, json.dumps({"doing": doing, **this_process()}).encode())

    def release(self) -> None:
        """Lets go; the file goes first, so that nobody takes one that is on its way out."""
        with contextlib.suppress(OSError):
            if _is_at(self._handle, self._path):
                self._path.unlink()
        os.close(self._handle)


def lock_of(aside: Path) -> Path:
    """The file that says who writes an unfinished folder, or file."""
    return aside.with_name(aside.name + _LOCK)


def claims_in(folder: Path) -> set[Path]:
    """What is unfinished in a folder: somebody writes it, or was killed."""
    out: set[Path] = set()
    for name in os.listdir(folder):
        bare = name.removesuffix(_LOCK)
        if is_unfinished(bare):
            out.add(folder / bare)
    return out


@contextmanager
def writing(aside: Path) -> Iterator[None]:
    """Inside, nobody else writes or clears away what lies under the name. Raises SaveError, which
    says who does; OSError."""
    with _released(_claimed_soon(aside, _WRITES)):
        yield


@contextmanager
def in_turn(aside: Path) -> Iterator[None]:
    """As `writing`, of something small: waits for others. Raises SaveError, OSError."""
    with _released(_claimed_soon(aside, _WRITES, patient=True)):
        yield


@contextmanager
def removing(aside: Path) -> Iterator[bool]:
    """As `writing`, of what shall go. False inside where somebody writes it. Raises OSError."""
    claim = _claim(aside, _REMOVES)
    if claim is None:
        yield False
        return
    with _released(claim):
        yield True


@contextmanager
def _released(claim: Claim) -> Iterator[None]:
    try:
        yield
    finally:
        claim.release()


def _claimed_soon(aside: Path, doing: str, patient: bool = False) -> Claim:
    """A claim, behind one that clears away, or behind all of them."""
    until = time.monotonic() + _PATIENCE_S
    while (claim := _claim(aside, doing)) is None:
        holder = _holder(lock_of(aside))
        if time.monotonic() > until or (holder.get("doing") == _WRITES and not patient):
            raise _refusal(aside, holder)
        time.sleep(_PAUSE_S)
    return claim


def _refusal(aside: Path, holder: dict[str, Any]) -> SaveError:
    return SaveError(
        "another process is writing this folder",
        file=aside,
        expected="one at a time",
        found=f"process {holder.get('pid', '?')} on {holder.get('host', 'a machine unknown')}, "
        f"since {holder.get('since', 'a moment ago')}",
        fix=f"give another name, or wait for it; where that process is gone, remove "
        f"{lock_of(aside).name}",
        id="folder-in-use",
    )


def _claim(aside: Path, doing: str) -> Claim | None:
    """A claim; None where another process has it."""
    path = lock_of(aside)
    while True:
        opened = _opened(path)
        if opened is None:
            continue
        handle, is_new = opened
        locked = _lock(handle)
        if locked is None and not is_new:  # no locks here: what the file says decides
            is_dead = _is_dead(aside)
            if is_dead and _is_at(handle, path):
                path.unlink(missing_ok=True)
            os.close(handle)
            if not is_dead:
                return None
        elif locked is False:
            os.close(handle)
            return None
        elif _is_at(handle, path):
            return Claim(path, handle, doing)
        else:  # its holder took it away while it was opened
            os.close(handle)


def _opened(path: Path) -> tuple[int, bool] | None:
    """The file, open, and whether it is new; None where it went meanwhile. Open for writing, which
    locks on NFS ask for."""
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        return os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o666), True
    except FileExistsError:
        with contextlib.suppress(FileNotFoundError):
            return os.open(path, flags), False
    return None


def _lock(handle: int) -> bool | None:
    """Whether the lock was free; None where the file system has none."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return False if error.errno in (errno.EWOULDBLOCK, errno.EACCES) else None
    return True


def _is_at(handle: int, path: Path) -> bool:
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


def _holder(path: Path) -> dict[str, Any]:
    """What a claim says of its process; nothing where it does not say it yet."""
    with contextlib.suppress(OSError, ValueError):
        said = json.loads(path.read_text(encoding="utf-8"))
        return said if isinstance(said, dict) else {}
    return {}


def _is_dead(aside: Path) -> bool:
    """Whether what a claim says, and what lies there, shows that nobody writes any more."""
    if not lock_of(aside).exists():
        return False  # another process takes it away
    holder = _holder(lock_of(aside))
    if (alive := is_alive(holder)) is not None:
        return not alive
    return time.time() - _last_touched(aside) > _ABANDONED_S


def _last_touched(aside: Path) -> float:
    paths = [lock_of(aside), aside, *(aside.iterdir() if aside.is_dir() else ())]
    times = [0.0]
    for path in paths:
        with contextlib.suppress(OSError):
            times.append(path.lstat().st_mtime)
    return max(times)
