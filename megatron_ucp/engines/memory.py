"""In-memory checkpoints: steps of a run that are kept in the memory of machines, where they
outlive its processes, and the loads that find the newest one."""

import fcntl
import hashlib
import json
import mmap
import os
import re
import socket
import time
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from isal.isal_zlib import crc32

from megatron_ucp import say
from megatron_ucp.core.manifest import ORIGIN, RUN, BufferPart
from megatron_ucp.core.plan import Slot
from megatron_ucp.engines.background import Background, BackgroundOptions, SaveTurn, keep_background
from megatron_ucp.engines.hold import HoldOptions, MemoryRun
from megatron_ucp.engines.record import record_of, run_of
from megatron_ucp.engines.run_state import STEPS, DrawnState, ResumableLoader
from megatron_ucp.engines.save import as_save_error, stamp
from megatron_ucp.errors import SaveError, UcpError, UsageError, some_of
from megatron_ucp.formats import in_memory
from megatron_ucp.formats.in_memory import RunInMemory
from megatron_ucp.formats.locks import is_alive, this_process
from megatron_ucp.formats.output_folder import Syncs, manifest_of, replace_text
from megatron_ucp.formats.registry import open_checkpoint
from megatron_ucp.formats.tags import content_id, find_tag, has_state_files
from megatron_ucp.reshard import agree
from megatron_ucp.reshard.engine import Engine, LoadOptions
from megatron_ucp.reshard.execute import copy_run
from megatron_ucp.reshard.fingerprint import (
    Table,
    diverged,
    joined_sums,
    recorded_as,
    sums_of_rank,
    table_of,
)
from megatron_ucp.reshard.memory_layout import CopiedLayout, HostMemory, copied
from megatron_ucp.reshard.options import IN_MEMORY, check_fields, options_for

# ---- memory folder
#
# Steps of a run in the memory of a machine, where they outlive its processes: files of a tmpfs,
# in a folder that names the user and the folder of the run's saves.
#
# Each rank has a file for its bytes and a small one beside it, which is there only while the
# bytes are those of a whole step. Two such pairs take turns, so that one step is whole while the
# next one is written. The pairs of one engine are a life: its processes hold locks, and what is
# left of a life whose processes are gone may be read and removed.


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


# ---- memory steps
#
# Each `every` steps all elements are copied into a tmpfs while training stands still. Beside
# training each rank then sends what other machines shall have, and sums its bytes. Only when all
# ranks are done does the step count; the one before it is whole until then.


MEMORY = "memory"
_DEADLINE_S = 600.0  # after which a step is given up: no rank waits longer for one that is gone


@dataclass(frozen=True)
class MemoryOptions:
    """What is kept in memory, and how often.

    Args:
        keep: "memory".
        every: Steps from one that is kept to the next one.
        copies: On how many other machines each element is kept too, in the order of ranks.
        folder: The folder of the run's saves, which its memory is known by. Default: that of the
            first `ucp.load`.
        client_state: A function without arguments, which gives what `save_checkpoint` would be
            given as `client_state` now.
    """

    keep: str
    every: int
    copies: int = 1
    folder: str | Path | None = None
    client_state: Callable[[], Mapping[str, Any]] | None = None

    def __post_init__(self) -> None:
        check_fields(self)


def memory_options(options: Mapping[str, Any]) -> MemoryOptions | None:
    """What is kept in memory, of options of `attach`; None where nothing is. Raises UsageError."""
    given = options_for(IN_MEMORY, options)
    if not given:
        return None
    if missing := [name for name in ("keep", "every") if given.get(name) is None]:
        raise UsageError(
            "an option of steps in memory can't be used",
            parameter=missing[0],
            expected=f'keep="{MEMORY}" and every=',
            found=repr(given.get(missing[0])),
            fix=f"correct {missing[0]}, or leave keep and what belongs to it out",
        )
    return MemoryOptions(**given)


class Attached(Protocol):
    """The handle of an attached engine."""

    program: Any
    module: Any

    def lent(self, options: HoldOptions) -> MemoryRun: ...


@dataclass(frozen=True)
class KeptReport:
    """The last step that was kept in memory: seconds in which training stood still, seconds until
    it counted, and the bytes that this rank keeps of it."""

    steps: int
    blocked_seconds: float
    seconds: float
    size_bytes: int


class MemorySteps:
    """What is kept of the engine that `attached` is the handle of: with random states or without,
    and with the position of a `loader`. Raises UsageError where another engine of this program
    keeps steps for the same folder."""

    def __init__(
        self,
        attached: Attached,
        options: MemoryOptions,
        rng: bool = True,
        loader: ResumableLoader | None = None,
    ) -> None:
        self._attached, self.options, self._rng, self._loader = attached, options, rng, loader
        self._world = torch.distributed.group.WORLD
        self._is_named = False  # whether the folder of saves names this run
        self._place: DrawnState | None = None
        self.background = Background(
            BackgroundOptions(busy="skip", on_error="warn", deadline=_DEADLINE_S)
        )
        self.path: Path | None = None
        self.life: Life | None = None
        self.report: KeptReport | None = None
        self._seen, self._said = 0, set[str]()
        if options.folder is not None:
            self.adopt(options.folder)

    def adopt(self, folder: str | Path) -> None:
        """The run is that of a folder of saves, if it is of none yet. What an engine kept for that
        folder which this one stands for (of the same model, or of a world that was taken down) is
        what is left of it from now on. Raises UsageError where another engine keeps steps for
        it."""
        if self.path is not None:
            return
        path = Path(folder).resolve()
        before = _OF_FOLDER.get(path)
        if before is not None and before._lives_beside(self):
            raise UsageError(
                "another engine of this program keeps steps in memory for this folder",
                file=path,
                expected="one engine for each folder of saves",
                found="two engines that live",
                fix="give each engine a folder of its own (folder=); of one that is not needed any "
                "more call engine.ucp.close() before (engine.destroy() does it too)",
            )
        if before is not None:
            before.close()
        self.path = path
        _OF_FOLDER[path] = self

    def adopt_folder_of(self, path: Path) -> None:
        """As `adopt`, of the folder at a path, or around it where that is a tag. Collective. Raises
        UsageError on every rank where another engine keeps steps for it."""
        is_tag = agree.of_first(lambda: path.is_dir() and has_state_files(path))
        with agree.together():
            self.adopt(path.absolute().parent if is_tag else path)

    def look(
        self, engine: Engine, path: Path, tag: str | None, options: LoadOptions
    ) -> "NewerStep":
        """Looks for an in-memory checkpoint that is newer than the tag on disk; where a tag is
        named, only if that is allowed. Collective. Raises a UcpError on every rank."""
        return _look(self, engine, path, tag, options)

    def _lives_beside(self, other: "MemorySteps") -> bool:
        """Whether its engine trains on beside another one: both are of this world, and have no
        module in common."""
        is_same = self._attached.module is other._attached.module
        return self.path is not None and self._world is other._world and not is_same

    def is_of(self, folder: Any) -> bool:
        """Whether steps in memory are those of the run in a folder."""
        return self.path is not None and self.path == Path(folder).resolve()

    @property
    def folder(self) -> MemoryFolder:
        if self.path is None:
            raise UsageError("steps in memory are of no folder", fix="give folder=")
        return MemoryFolder(self.path)

    def close(self) -> None:
        """Keeps no more; what is kept is there."""
        self.background.wait()
        if self.life is not None:
            self.life.release()
        self.path = self.life = None
        self._said.add(_NO_FOLDER)

    def _name_run(self) -> None:
        """The folder of saves names this run as the one whose steps are in memory: what other runs
        of the folder left there is none of its steps. Collective."""
        if self.path is None or self._is_named:
            return
        with _as_save_error(), agree.together():
            if agree.world()[0] == 0:
                name_memory_run(self.path, run_of(self._attached.program).id)
        self._is_named = True

    def goes_on(self, steps: int, loaded: KeptShare | None, is_own: bool) -> None:
        """The engine was filled at a step: from what was in memory, of which `loaded` is a share,
        or from elsewhere. Where that is the run's own folder (`is_own`), what else is left in
        memory goes; else when the next step counts. Collective."""
        self._seen, self._place, self._is_named = steps, None, False
        if loaded is not None:
            stamp(loaded.kept_at)  # what is kept from now on is newer, whatever the clock says
        if self.path is None:
            return
        with _as_save_error(), agree.together():
            if self.life is not None:
                self.life.go_on(loaded)
        nodes = agree.gather(node())
        with _as_save_error(), agree.together():
            if is_own and nodes.index(node()) == agree.world()[0]:
                self.folder.forget_dead(loaded)

    def _note_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            say.note(text)

    # ------------------------------------------------ at the end of a step

    def stepped(self, steps: int) -> None:
        """The optimizer was stepped, for this step: the program may draw data of the next one
        before `ended_step`, and what that moves is kept as it is now."""
        if steps != self._seen and steps % self.options.every == 0:
            self._place = DrawnState.now(self._loader, self._rng)

    @agree.door("a step in memory")
    def ended_step(self, steps: int) -> None:
        """The engine came to a step; between two of them. Collective. Raises a UcpError on every
        rank."""
        if steps == self._seen:
            return
        self._seen = steps
        self._name_run()
        if self.life is not None:
            self.life.came_to(steps)
        if steps % self.options.every == 0:
            with torch.inference_mode(False):  # an evaluation may be what comes next
                self.keep(steps)
        self._place = None

    def keep(self, steps: int) -> None:
        """Keeps the state as it is now, which is that of a step. Collective. Raises a UcpError on
        every rank."""
        if self.path is None:
            self._note_once(_NO_FOLDER)
            return
        started = time.perf_counter()
        with agree.gathering() as block:
            client = self.options.client_state
            state = {} if client is None else dict(client())
            own = run_of(self._attached.program)
            if not (is_busy := self.background.is_busy):
                self.background.wait()
            is_connected = self.background.is_connected
            block.value = is_busy, is_connected, uuid.uuid4().hex, own.id, own.origin
        if any(is_busy for is_busy, *_ in block.values):
            self._note_once(
                "a step is not kept in memory where the one before it is still under way; more "
                "steps between them (every=) let it end. Said once"
            )
            return
        options = HoldOptions(state, self._loader, self._rng, checksums=False, place=self._place)
        lent = self._attached.lent(options)
        life = self._arranged(lent)
        with _as_save_error(), agree.together():
            turn, memory = life.begin_turn()
            copy_of(lent, life.own, memory)
        _, _, *ids = block.values[0]
        step = _Step(life, lent.known, turn, memory, steps, *ids)
        self.background.ready(all(is_connected for _, is_connected, *_ in block.values))
        blocked = time.perf_counter() - started
        rest = partial(self._settle, step, started, blocked)
        self.background.start(f"step {steps} in memory", rest)

    def _arranged(self, lent: MemoryRun) -> "Life":
        """Where it lies; anew where parts or sizes are others than before. Collective."""
        held = HostMemory(lent.holder.manifest, lent.holder.parts())
        digest = hashlib.sha256(repr(held.places()).encode()).digest()
        is_known = self.life is not None and self.life.digest == digest
        if not agree.all_of(is_known) or self.life is None:
            self.life = self._begun(lent, digest)
        return self.life

    def _begun(self, lent: MemoryRun, digest: bytes) -> "Life":
        """Room for steps of these parts and sizes. Collective."""
        with _as_save_error(), agree.gathering() as block:
            self.folder.make()
            block.value = node(), lent.holder.parts(), uuid.uuid4().hex[:12]
        nodes, here, names = zip(*block.values, strict=True)
        if self.life is not None:
            self.life.release()
            self.life = None
        with _as_save_error(), agree.gathering() as block:
            layout = copied(lent.holder.manifest, here, nodes, self.options.copies)
            life = Life(self.folder, names[0], layout, lent, nodes, digest)
            block.value = life.size_bytes
        life.sizes = tuple(block.values)
        with _as_save_error(), agree.together():
            life.refuse_room()
        self._say_taken(life)
        with _as_save_error(), agree.together():
            life.begin()
        return life

    def _say_taken(self, life: "Life") -> None:
        """What is taken, before it is. On rank 0."""
        nodes, copies = len({*life.nodes}), self.options.copies
        most = max(life.on_machine(name) for name in {*life.nodes})
        say.line(
            f"each {self.options.every} steps the state is kept in memory ({life.folder.path}): "
            f"{say.amount(most)} for two of them on a machine"
        )
        if nodes <= copies:
            self._note_once(
                f"{copies} copies on other machines were asked for, and there are {nodes} "
                "machines: a step in memory is lost with any that has a part of it"
                if nodes > 1
                else "there is one machine: steps in memory outlive processes, and not the machine"
            )

    # ------------------------------------------------ beside training

    def _settle(self, step: "_Step", started: float, blocked: float, turn: SaveTurn) -> None:
        """Brings a step to where it counts. Collective, among the ranks of the turn."""
        life = step.life
        with _as_save_error(), agree.together(turn):
            turn.ranks.exchange(*life.messages(step.memory))
            own = sums_of_rank(life.view(step.memory))
        joined = joined_sums(own, turn)
        sums = agree.of_first(lambda: table_of(step.run.original, joined), turn)
        share, run = step.share(), step.text(*sums)
        with _as_save_error(), agree.together(turn), turn.right.changing("says what is kept"):
            life.folder.write_aside(share, run)
        with _as_save_error(), agree.together(turn), turn.right.changing("counts in memory"):
            life.folder.count(share, run)
        life.last = step.turn
        seconds = time.perf_counter() - started
        self.report = KeptReport(step.steps, blocked, seconds, life.size_bytes)
        with _as_save_error(), agree.together(turn):
            if life.is_first_here:
                with turn.right.changing("forgets what dead processes kept"):
                    life.folder.forget_dead()


_as_save_error = partial(
    as_save_error,
    "the step was not kept in memory; the one before it, and all tags, are as they were",
)
_NO_FOLDER = (
    "no step is kept in memory yet: it is not known which run this is. Give attach the folder of "
    "its saves (folder=), or load from it"
)
_OF_FOLDER: "weakref.WeakValueDictionary[Path, MemorySteps]" = weakref.WeakValueDictionary()


class Life:
    """Where steps of one engine lie: the parts that this rank keeps, those of its own first, and
    what is sent between ranks. `sizes` are the bytes that each rank keeps of a step."""

    def __init__(
        self,
        folder: MemoryFolder,
        id: str,
        layout: CopiedLayout,
        lent: MemoryRun,
        nodes: Sequence[str],
        digest: bytes,
    ) -> None:
        self.folder, self.id, self.layout, self.nodes = folder, id, layout, nodes
        self.digest, self.rank = digest, agree.world()[0]
        self.manifest = lent.holder.manifest
        self.own = layout.own[self.rank]
        self.kept = layout.kept_by(self.rank)
        self.places = HostMemory(self.manifest, self.kept).places()
        self.sizes: tuple[int, ...] = ()
        self.last: int | None = None
        self._lock: LifeLock | None = None
        self._memory: dict[int, torch.Tensor] = {}

    def begin(self) -> None:
        """From now on it is known to live. Raises OSError."""
        self._lock = LifeLock(self.folder, self.id, self.rank)

    def came_to(self, steps: int) -> None:
        """Says which step the run came to."""
        if self._lock is not None:
            self._lock.steps(steps)

    def release(self) -> None:
        """What is kept is what is left of it."""
        if self._lock is not None:
            self._lock.release()

    @property
    def size_bytes(self) -> int:
        """What this rank keeps of a step."""
        return max((at + size for _, at, size in self.places), default=0)

    @property
    def is_first_here(self) -> bool:
        """Whether this rank is the first one of its machine."""
        return self.nodes.index(self.nodes[self.rank]) == self.rank

    @property
    def parts_in_all(self) -> int:
        """How many parts all ranks have together."""
        return len({part for own in self.layout.own for part in own})

    def on_machine(self, name: str) -> int:
        """What two steps take on a machine."""
        return 2 * sum(
            size for size, own in zip(self.sizes, self.nodes, strict=True) if own == name
        )

    def refuse_room(self) -> None:
        """Raises SaveError where this machine has no room for two steps, of which the second one
        comes when what dead processes left is gone."""
        two, free = self.on_machine(self.nodes[self.rank]), self.folder.free_bytes()
        left = self.folder.left_bytes()
        needed, room = (two, free + left) if two - left > free else (two // 2, free)
        words = say.amount(two), say.amount(room)
        refuse_room(needed, room, self.folder.path, words)

    def begin_turn(self) -> tuple[int, torch.Tensor]:
        """Number and memory of the next step, in the place of the older one. Raises OSError."""
        turn = 0 if self.last is None else 1 - self.last
        self.folder.forget(self.id, turn, self.rank)
        if turn not in self._memory:
            self._memory[turn] = self.folder.bytes_of(self.id, turn, self.rank, self.size_bytes)
        return turn, self._memory[turn]

    def go_on(self, loaded: KeptShare | None) -> None:
        """Its own step was loaded, and the other one is written next; or another one, and its own
        are none any more. Raises OSError."""
        if loaded is not None and loaded.life == self.id:
            self.last = loaded.turn
            return
        self.last = None
        for turn in TURNS:
            self.folder.forget(self.id, turn, self.rank)

    def view(self, memory: torch.Tensor) -> HostMemory:
        """What this rank itself had, in flat memory."""
        return lying(self.manifest, self.own, memory)

    def messages(
        self, memory: torch.Tensor
    ) -> tuple[list[tuple[int, torch.Tensor]], list[tuple[int, torch.Tensor]]]:
        """Flat memory to be sent, each with its taker; and to be filled, each with its giver."""
        runs: dict[BufferPart, list[torch.Tensor]] = {}
        for slot, at, size in self.places:
            runs.setdefault(slot.place, []).append(memory[at : at + size])
        sent = [
            (taker, one)
            for part, giver, taker in self.layout.sent
            if giver == self.rank
            for one in runs[part]
        ]
        taken = [
            (giver, one)
            for part, giver, taker in self.layout.sent
            if taker == self.rank
            for one in runs[part]
        ]
        return sent, taken


@dataclass(frozen=True)
class _Step:
    """A step on its way. `run_id` and `origin` are those of the first rank's run."""

    life: Life
    run: RunInMemory
    turn: int
    memory: torch.Tensor
    steps: int
    id: str
    run_id: str
    origin: str

    def share(self) -> KeptShare:
        """What this rank keeps of it, with the sums of its bytes."""
        life = self.life
        slots = tuple(
            KeptSlot(slot, at, size, crc32(self.memory[at : at + size].numpy().data))
            for slot, at, size in life.places
        )
        where = life.id, self.turn, life.rank, self.id, self.steps
        return KeptShare(*where, stamp(), life.parts_in_all, self.run_id, slots, self.origin)

    def text(self, table: Table, apart: Sequence[str]) -> str | None:
        """What is said of the run, where this rank says it for its machine."""
        if not self.life.is_first_here:
            return None
        manifest = self.run.original
        ids = {RUN: self.run_id, ORIGIN: self.origin}
        manifest = replace(manifest, run={**manifest.run, **recorded_as(table, apart), **ids})
        notes = [*self.run.notes, *diverged(apart)]
        return in_memory.to_json(replace(self.run, original=manifest, left_behind=notes))


def lying(manifest: Any, parts: Sequence[BufferPart], memory: torch.Tensor) -> HostMemory:
    """Parts that lie in flat memory, one after the other."""
    held = HostMemory(manifest, parts)
    held.lie_in(memory, held.places())
    return held


def copy_of(lent: MemoryRun, parts: Sequence[BufferPart], memory: torch.Tensor) -> None:
    """Copies what a run's holder has of some parts into flat memory."""
    manifest = lent.holder.manifest
    held = lying(manifest, parts, memory)
    for slot, _, _ in held.places():
        into, buffer = held.tensor(slot), manifest.buffers[slot.buffer].of(slot.state)
        for one in buffer.fragments(slot.part):  # megatron-core has a tensor for each of them
            last = one.offset + one.high - one.low
            copy_run(into[one.offset : last], lent.holder.read(slot, one.offset, last))


def steps_of(engine: Any) -> MemorySteps | None:
    """What keeps steps of an engine in memory, if anything does."""
    return record_of(engine).memory


def keep_steps(engine: Any, kept: MemorySteps) -> None:
    record_of(engine).memory = kept
    keep_background(engine, kept.background, MEMORY)


# ---- recall
#
# Loads from steps that machines keep in memory: the newest one that is there as a whole, where no
# tag on disk is as new.


@dataclass(frozen=True)
class KeptStep:
    """A step as machines keep it: `shares` are those of each machine."""

    id: str
    shares: Mapping[str, Sequence[KeptShare]]

    @property
    def first(self) -> KeptShare:
        """A share, which says what all of them say."""
        return next(iter(self.shares.values()))[0]

    @property
    def held_by(self) -> dict[BufferPart, int]:
        """The parts that are kept, each with a rank that kept it."""
        every = (share for own in self.shares.values() for share in own)
        return {one.slot.place: share.rank for share in every for one in share.slots}


@dataclass
class NewerStep:
    """What was found in memory: the `step` to go on from and what this rank holds of it (None: the
    disk has a newer one, or nothing is whole); `came_to` is the last step that the run is known to
    have come to. `notes` say what was chosen, and why."""

    step: KeptStep | None = None
    held: MemoryRun | None = None
    came_to: int = 0
    notes: list[str] = field(default_factory=list[str])

    @property
    def share(self) -> KeptShare | None:
        return None if self.step is None else self.step.first


def _look(
    kept: MemorySteps, engine: Engine, path: Path, tag: str | None, options: LoadOptions
) -> NewerStep:
    found = NewerStep()
    if not kept.is_of(path) or (tag is not None and "memory" not in options.allow):
        return found
    nodes = agree.gather(node())
    steps = _listed(kept, nodes, found)
    disk = agree.of_first(lambda: _on_disk(engine, path, tag))
    for step in steps:
        if disk.steps is not None and disk.steps >= step.first.steps:
            break
        if other := disk.names_another_run(step.first):
            what = f"step {step.first.steps:,} in memory is of another run than {other}"
            found.notes.append(f"{what}, and is not taken")
            continue
        found.held = _held(kept.folder, step, nodes, options.checksums, found)
        if found.held is not None:
            found.step = step
            break
    if steps or found.came_to:
        _say_chosen(found, disk.steps, "the newest tag" if tag is None else tag)
    return found


@dataclass(frozen=True)
class _Disk:
    """What a folder of saves says: the step of a tag (None: there is none that can be read) and the
    `run` that saved it; of a tag without an id what else it is known by (`tags.content_id`); and
    the run that it names as the one whose steps are in memory."""

    steps: int | None = None
    run: str = ""
    content: str = ""
    in_memory: str = ""

    def names_another_run(self, share: KeptShare) -> str:
        """What says another run than a step in memory, or none at all; empty where all agree."""
        if self.in_memory != share.run:
            return "its folder names"
        if self.steps is None:
            return ""
        own = share.run if self.run else share.origin
        return "" if own == (self.run or self.content) else "the tag on disk"


def _listed(kept: MemorySteps, nodes: Sequence[str], found: NewerStep) -> list[KeptStep]:
    """All steps in memory, the newest one first. Collective."""
    with agree.gathering() as block:
        if nodes.index(node()) == agree.world()[0]:
            block.value = node(), *_on_machine(kept)
    steps: dict[str, dict[str, list[KeptShare]]] = {}
    for name, shares, came_to, others in filter(None, block.values):
        found.came_to = max(found.came_to, came_to)
        if others:
            found.notes.append(
                f"{name}: a process that lives keeps steps in memory for this folder, which are "
                "left alone"
            )
        for share in shares:
            steps.setdefault(share.id, {}).setdefault(name, []).append(share)
    return _newest_first([KeptStep(name, shares) for name, shares in steps.items()])


def _newest_first(steps: Sequence[KeptStep]) -> list[KeptStep]:
    """Steps in the order in which they were kept. Those of one life by their numbers, which only
    grow in it: a load of an older one forgets the others. Lives by the newest stamp of each."""
    newest: dict[str, float] = {}
    for one in steps:
        newest[one.first.life] = max(newest.get(one.first.life, 0.0), one.first.kept_at)

    def order(one: KeptStep) -> tuple[float, str, int, float, str]:
        first = one.first
        return newest[first.life], first.life, first.steps, first.kept_at, one.id

    return sorted(steps, key=order, reverse=True)


def _on_machine(kept: MemorySteps) -> tuple[list[KeptShare], int, bool]:
    """What is left on this machine; the last step that a run came to here; and whether others that
    live keep something here."""
    folder, own = kept.folder, set() if kept.life is None else {kept.life.id}
    dead, alive = folder.lives()
    lives = [*dead, *own]
    came_to = max((folder.steps_seen(life) for life in lives), default=0)
    return folder.shares(lives), came_to, bool({*alive} - own)


def _on_disk(engine: Engine, path: Path, tag: str | None) -> _Disk:
    """What a folder says of a tag, or of the newest one. Raises NotFoundError, UsageError where one
    is asked for that is none: what would stand for it may be of another run."""
    named = None if tag is None else find_tag(path, tag)
    in_memory = memory_run(path)
    with suppress(UcpError, OSError):
        folder = (named or find_tag(path)).folder
        with suppress(UcpError, OSError, KeyError):
            said = manifest_of(folder).run
            if run := str(said.get(RUN, "")):
                return _Disk(int(said[STEPS]), run, "", in_memory)
        with open_checkpoint(folder, told=engine.told()) as checkpoint:
            steps = checkpoint.extras.counters.get(STEPS, 0)
            return _Disk(steps, "", content_id(folder), in_memory)
    return _Disk(in_memory=in_memory)


def _say_chosen(found: NewerStep, disk: int | None, tag: str) -> None:
    on_disk = "no tag on disk" if disk is None else f"{tag} on disk is of step {disk:,}"
    steps = disk or 0
    if found.step is not None:
        steps = found.step.first.steps
        later = "" if disk is None else f", {steps - disk:,} before it"
        found.notes.append(f"from memory: step {steps:,}; {on_disk}{later}")
    else:
        found.notes.append(f"from disk: no whole step in memory is newer; {on_disk}")
    if found.came_to > steps:
        lost = found.came_to - steps
        found.notes.append(f"the run had come to step {found.came_to:,}: {lost:,} are done again")


# ------------------------------------------------ one step


def _held(
    folder: MemoryFolder, step: KeptStep, nodes: Sequence[str], checksums: bool, found: NewerStep
) -> MemoryRun | None:
    """A step as this rank holds it; None where it is not whole. Collective."""
    what, parts = f"step {step.first.steps:,} in memory", step.first.parts
    if len(step.held_by) < parts:
        found.notes.append(_not_whole(what, len(step.held_by), parts, step.shares))
        return None
    own = _Own(folder, checksums)
    with agree.gathering() as block:
        rank = agree.world()[0]
        here = [number for number, name in enumerate(nodes) if name == nodes[rank]]
        for share in step.shares.get(nodes[rank], ())[here.index(rank) :: len(here)]:
            own.take(share)
        block.value = [*own.parts], own.faults
    whole = {part for kept, _ in block.values for part in kept}
    found.notes += [fault for _, faults in block.values for fault in faults]
    if len(whole) < parts:
        found.notes.append(_not_whole(what, len(whole), parts, step.shares))
        return None
    return own.held(step)


def _not_whole(what: str, there: int, parts: int, machines: Mapping[str, object]) -> str:
    where = some_of(sorted(machines))
    return f"{what} is not whole: {there} of its {parts} parts are left, on {where}"


class _Own:
    """What this rank reads of a step, as far as it is as it was."""

    def __init__(self, folder: MemoryFolder, checksums: bool) -> None:
        self._folder, self._checksums = folder, checksums
        self._slots: dict[BufferPart, list[tuple[Slot, torch.Tensor]]] = {}
        self.run: RunInMemory | None = None
        self.faults: list[str] = []

    @property
    def parts(self) -> list[BufferPart]:
        """Those that are whole."""
        return [*self._slots]

    def take(self, share: KeptShare) -> None:
        """Takes the parts of a share; what is wrong with it is in `faults`."""
        what = f"step {share.steps:,} in memory, of rank {share.rank}"
        try:
            self.run = self.run or self._run(share)
            memory = self._folder.bytes_of(share.life, share.turn, share.rank)
            wrong = damaged(share, memory, self._checksums)
        except (UcpError, OSError, ValueError) as error:
            said = error.strerror if isinstance(error, OSError) else error.args[0]
            self.faults.append(f"{what}: {said or error}")
            return
        if wrong:
            self.faults.append(f"{what}: {self._names(wrong[0].slot)} is not as it was written")
        bad = {one.slot.place for one in wrong}
        for one in share.slots:
            if one.slot.place not in bad:
                own = memory[one.offset_bytes : one.offset_bytes + one.size_bytes]
                self._slots.setdefault(one.slot.place, []).append((one.slot, own))

    def _run(self, share: KeptShare) -> RunInMemory:
        text = self._folder.run_of(share)
        if text is None:
            raise ValueError("what is said of the run can't be read")
        return in_memory.of_json(text, str(self._folder.path))

    def _names(self, slot: Slot) -> str:
        """A slot as users know it."""
        if self.run is None:
            return str(slot)
        params = [member.param for member in self.run.manifest.buffers[slot.buffer].members]
        return f"{slot.state} of {some_of(params, 2)}"

    def held(self, step: KeptStep) -> MemoryRun:
        """All of it, without a copy; of a rank that reads nothing, nothing."""
        if self.run is None:
            return MemoryRun()
        memory = HostMemory(self.run.manifest, self.parts)
        for slots in self._slots.values():
            for slot, own in slots:
                memory.lie_in(own, [(slot, 0, len(own))])
        return MemoryRun(self.run, memory, step.held_by, step.id)
