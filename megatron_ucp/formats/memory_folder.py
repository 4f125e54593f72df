"""Steps of a run in the memory of a machine, where they outlive its processes: files of a tmpfs, in
a folder that names the user and the folder of the run's saves.

Each rank has a file for its bytes and a small one beside it, which is there only while the bytes
are those of a whole step. Two such pairs take turns, so that one step is whole while the next one
is written. The pairs of one engine are a life: its processes hold locks, and what is left of a life
whose processes are gone may be read and removed.
"""

import fcntl
import hashlib
import json
import mmap
import os
import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from isal.isal_zlib import crc32

from megatron_ucp.core.plan import Slot
from megatron_ucp.errors import SaveError
from megatron_ucp.formats.claims import is_alive, this_process
from megatron_ucp.formats.durable import Syncs, replace_text

PLACE = Path("/dev/shm")  # a tmpfs on every Linux
NODE = "MEGATRON_UCP_NODE"  # of the environment: names the machine, in place of its host name
TURNS = (0, 1)
_LOCK, _BYTES, _SAID, _RUN = "lock", ".bytes", ".json", "run"
_COUNT_AT = 4096  # in a lock: behind what it says of its process
_CRC_CHARS = 8


def node() -> str:
    """The machine of this process."""
    return os.environ.get(NODE) or socket.gethostname()


@dataclass(frozen=True)
class KeptSlot:
    """A slot among the bytes of a rank."""

    slot: Slot
    offset_bytes: int
    size_bytes: int
    crc32: int


@dataclass(frozen=True)
class KeptShare:
    """What a rank kept of a step. `id` is that of the step on all ranks, which together have
    `parts` parts; `kept_at` are seconds since the epoch; `run` is the run's own id, and `origin`
    the tag without an id that the run went on from (`tags.content_id`; empty: none)."""

    life: str
    turn: int
    rank: int
    id: str
    steps: int
    kept_at: float
    parts: int
    run: str
    slots: tuple[KeptSlot, ...]
    origin: str = ""


class MemoryFolder:
    """The folder of a run on this machine."""

    def __init__(self, saves: Path) -> None:
        own = os.path.realpath(saves)
        name = re.sub(r"[^\w.-]", "_", os.path.basename(own))[:40]
        whose = f"{name}-{hashlib.sha256(os.fsencode(own)).hexdigest()[:16]}"
        self._top = PLACE / f"megatron_ucp-{os.getuid()}"
        named = os.environ.get(NODE)  # a host's name may change, its memory is the same
        here = "here" if named is None else "on-" + re.sub(r"[^\w.-]", "_", named)
        self.path = self._top / whose / here

    def make(self) -> None:
        """Raises SaveError for a folder that is another user's, OSError."""
        self._top.mkdir(mode=0o700, exist_ok=True)
        found = self._top.lstat()
        if self._top.is_symlink() or found.st_uid != os.getuid():
            raise SaveError(
                "the folder for steps in memory is another user's",
                file=self._top,
                expected=f"a folder of user {os.getuid()}",
                found=f"{'a link' if self._top.is_symlink() else 'one'} of user {found.st_uid}",
                fix="have it removed, or leave keep out",
                id="",
            )
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)

    @property
    def is_there(self) -> bool:
        """Whether this user keeps, or kept, something here."""
        with suppress(OSError):
            return self._top.lstat().st_uid == os.getuid() and self.path.is_dir()
        return False

    def free_bytes(self) -> int:
        """How many more fit: into the file system, and into the machine's memory."""
        place = os.statvfs(PLACE)
        return min(place.f_bavail * place.f_frsize, _available_bytes())

    def left_bytes(self) -> int:
        """What lives take whose processes are gone."""
        return sum(
            path.stat().st_blocks * 512 for life in self.lives()[0] for path in self._files(life)
        )

    # ------------------------------------------------ lives

    def lives(self) -> tuple[list[str], list[str]]:
        """The lives whose processes are gone, and those of which one is there."""
        found: tuple[list[str], list[str]] = [], []
        for life in sorted({path.name.partition(".")[0] for path in self._files("*")}):
            found[any(map(_is_held, self.path.glob(f"{life}.{_LOCK}*")))].append(life)
        return found

    def _remove(self, files: Sequence[Path]) -> None:
        """A step stops being one before its first byte goes. Raises OSError."""
        for path in sorted(files, key=lambda path: path.suffix != _SAID):
            path.unlink(missing_ok=True)

    def forget_dead(self, but: KeptShare | None = None) -> None:
        """Removes what is left of lives whose processes are gone, all but the step that a share is
        of. Raises OSError."""
        for life in self.lives()[0]:
            if but is None or life != but.life:
                self._remove(self._files(life))
            else:
                self._remove(self._files(f"{life}.{1 - but.turn}"))

    def _files(self, life: str) -> list[Path]:
        return [*self.path.glob(f"{life}.*")] if self.is_there else []

    def steps_seen(self, life: str) -> int:
        """The last step that processes of a life came to, on this machine."""
        found = [0]
        for path in self.path.glob(f"{life}.{_LOCK}*"):
            with suppress(OSError, ValueError):
                found.append(int(path.read_bytes()[_COUNT_AT:] or b"0"))
        return max(found)

    # ------------------------------------------------ what a rank keeps

    def bytes_of(self, life: str, turn: int, rank: int, size: int | None = None) -> torch.Tensor:
        """The bytes of a rank: with a `size` so many new ones to be written, all of them taken by
        now; else those that are there, as they are (what is written into them is not kept). Raises
        OSError."""
        path = self._path(life, turn, rank, _BYTES)
        flags = os.O_RDONLY if size is None else os.O_RDWR | os.O_CREAT | os.O_TRUNC
        handle = os.open(path, flags, 0o600)
        try:
            if size is not None:
                # a page that is missing when it is written would end the process
                os.posix_fallocate(handle, 0, max(size, 1))
            access = mmap.ACCESS_COPY if size is None else mmap.ACCESS_WRITE
            memory = mmap.mmap(handle, 0, access=access)
        except OSError as error:
            error.filename = error.filename or str(path)
            raise
        finally:
            os.close(handle)
        return torch.frombuffer(memory, dtype=torch.uint8)

    def forget(self, life: str, turn: int, rank: int) -> None:
        """From now on the bytes of a rank are no step. Raises OSError."""
        for who in (rank, _RUN):
            self._path(life, turn, who, _SAID).unlink(missing_ok=True)

    def write_aside(self, share: KeptShare, run: str | None) -> None:
        """What says that the bytes of a rank are a step, under names that do not count yet, and
        what says of which run: both count from `count` on. Raises OSError."""
        said = {
            **{name: getattr(share, name) for name in _PLAIN},
            "slots": [
                [
                    *(one.slot.buffer, one.slot.cut, one.slot.part, one.slot.state),
                    *(one.offset_bytes, one.size_bytes, one.crc32),
                ]
                for one in share.slots
            ],
        }
        for who, text in ((share.rank, json.dumps(said)), (_RUN, run)):
            if text is not None:
                data = text.encode()
                path = self._path(share.life, share.turn, who, _SAID)
                _aside(path).write_bytes(f"{crc32(data):0{_CRC_CHARS}x}\n".encode() + data)

    def count(self, share: KeptShare, run: str | None) -> None:
        """Gives what `write_aside` wrote its names. Raises OSError."""
        for who in (share.rank, *(() if run is None else (_RUN,))):
            path = self._path(share.life, share.turn, who, _SAID)
            os.replace(_aside(path), path)

    def shares(self, lives: Sequence[str]) -> list[KeptShare]:
        """What ranks kept in some lives. What can't be read is not there."""
        paths = (path for life in lives for path in self._files(life) if path.suffix == _SAID)
        return [
            share
            for path in sorted(paths)
            if path.suffixes[-2] != f".{_RUN}" and (share := _share(path)) is not None
        ]

    def run_of(self, share: KeptShare) -> str | None:
        """What was said of the run of a share."""
        return _said(self._path(share.life, share.turn, _RUN, _SAID))

    def _path(self, life: str, turn: int, who: object, suffix: str) -> Path:
        return self.path / f"{life}.{turn}.{who}{suffix}"


_OWNER = ".memory_run"  # in the folder of saves: the id of the run whose steps are in memory


def memory_run(saves: Path) -> str:
    """The run whose steps are kept in memory for a folder of saves, as the folder says; empty where
    it says none."""
    with suppress(OSError, ValueError):
        return (saves / _OWNER).read_text(encoding="utf-8").strip()
    return ""


def name_memory_run(saves: Path, run: str) -> None:
    """From now on steps in memory are of this run, and what other runs of the folder left there is
    not loaded any more. Raises OSError, SaveError."""
    if memory_run(saves) != run:
        saves.mkdir(parents=True, exist_ok=True)
        replace_text(saves / _OWNER, f"{run}\n", Syncs())


class LifeLock:
    """Says that this process lives, and which step it came to."""

    def __init__(self, folder: MemoryFolder, life: str, rank: int) -> None:
        self._handle = -1
        path = folder.path / f"{life}.{_LOCK}{rank}"
        self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.write(self._handle, json.dumps(this_process()).encode())
        fcntl.flock(self._handle, fcntl.LOCK_SH | fcntl.LOCK_NB)

    def steps(self, count: int) -> None:
        """The step that it came to."""
        os.pwrite(self._handle, b"%20d" % count, _COUNT_AT)

    def release(self) -> None:
        """From now on what it kept is what is left of it. Twice is once."""
        if self._handle >= 0:
            os.pwrite(self._handle, b"{}".ljust(_COUNT_AT), 0)  # the count stays
            fcntl.flock(self._handle, fcntl.LOCK_UN)  # also of processes that this one started
            os.close(self._handle)
            self._handle = -1

    def __del__(self) -> None:
        self.release()


_PLAIN = ("life", "turn", "rank", "id", "steps", "kept_at", "parts", "run", "origin")


def _aside(path: Path) -> Path:
    return path.with_name(f"{path.name}.new")


def _is_held(lock: Path) -> bool:
    """Whether the process lives that made a lock. What it started may hold it longer, so that it is
    asked for itself where it can be."""
    with suppress(OSError):
        alive = is_alive(_process(lock))
        if alive is not None:
            return alive
        with open(lock, "rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
    return False


def _process(lock: Path) -> Mapping[str, Any]:
    with suppress(ValueError):
        found = json.loads(lock.read_bytes()[:_COUNT_AT].rstrip(b"\0"))
        return found if isinstance(found, dict) else {}
    return {}


def _said(path: Path) -> str | None:
    """The text of a small file that is as it was written; None for another one."""
    with suppress(OSError, ValueError):
        data = path.read_bytes()
        if crc32(data[_CRC_CHARS + 1 :]) == int(data[:_CRC_CHARS], 16):
            return data[_CRC_CHARS + 1 :].decode()
    return None


def _share(path: Path) -> KeptShare | None:
    text = _said(path)
    if text is None:
        return None
    try:
        found = json.loads(text)
        slots = tuple(_slots(found.pop("slots")))
        return KeptShare(**found, slots=slots)
    except (ValueError, TypeError, KeyError):  # of another version of this package
        return None


def _slots(rows: Sequence[Sequence[Any]]) -> Iterator[KeptSlot]:
    for buffer, cut, part, state, *place in rows:
        at = tuple((axis, index) for axis, index in cut)
        yield KeptSlot(Slot(buffer, at, part, state), *place)


def damaged(share: KeptShare, memory: torch.Tensor, checksums: bool = True) -> list[KeptSlot]:
    """The slots whose bytes are not there, or are not what they were."""
    out: list[KeptSlot] = []
    for one in share.slots:
        own = memory[one.offset_bytes : one.offset_bytes + one.size_bytes]
        is_there = len(own) == one.size_bytes
        if not is_there or (checksums and crc32(own.numpy().data) != one.crc32):
            out.append(one)
    return out


def _available_bytes() -> int:
    """What the machine's memory has left, as the kernel says."""
    text = Path("/proc/meminfo").read_text()
    return int(text.partition("MemAvailable:")[2].split()[0]) * 1024


def refuse_room(needed_bytes: int, room: int, path: Path, amounts: tuple[str, str]) -> None:
    """Raises SaveError where steps find no room. `amounts` are the two numbers in words."""
    if needed_bytes > room:
        raise SaveError(
            "there is no room for steps in memory",
            file=path,
            expected=f"{amounts[0]} for two steps of all ranks of this machine",
            found=f"{amounts[1]} free",
            fix="make the tmpfs larger (mount -o remount,size=..., docker --shm-size), give fewer "
            "copies, or leave keep out",
        )
