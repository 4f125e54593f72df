"""What saves of every engine share: how they are made, and their end. Files get their names,
older tags go, and what failed is a SaveError."""

import math
import os
import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, Protocol

import torch

from megatron_ucp import say
from megatron_ucp.core.manifest import FILE_NAME, FileEntry, Manifest
from megatron_ucp.core.manifest_json import to_json
from megatron_ucp.core.plan import Slot
from megatron_ucp.engines.record import SAVED, run_of
from megatron_ucp.engines.resume_state import ResumableLoader
from megatron_ucp.errors import DamagedFileError, RankError, SaveError, UcpError, UsageError
from megatron_ucp.formats import locks, output_folder
from megatron_ucp.formats.locks import PublishRight
from megatron_ucp.formats.output_folder import Syncs, aside_of
from megatron_ucp.formats.tags import (
    LATEST,
    names_a_later_save,
    pointers_in,
    pointers_to,
    read_pointer,
    saved_at,
)
from megatron_ucp.reshard import agree
from megatron_ucp.reshard.execute import TORCH_DTYPES
from megatron_ucp.reshard.fingerprint import Sums
from megatron_ucp.reshard.folder import FolderOutput, PieceRun, RanksFolderSink
from megatron_ucp.reshard.options import check_saves

# ---- snapshot
#
# Host memory that holds what a save writes while training goes on.


class SnapshotMemory:
    """Buffers that are allocated once and used again by the next save, which takes as much in the
    same order; pinned where there is a GPU. `most_bytes` of them at most (None: as many as are
    asked for)."""

    def __init__(self, most_bytes: int | None = None) -> None:
        self._most_bytes = most_bytes
        self._buffers: list[torch.Tensor] = []
        self._taken = 0

    @property
    def size_bytes(self) -> int:
        """What is held now."""
        return sum(len(buffer) for buffer in self._buffers)

    def begin(self) -> None:
        """All of it is free again."""
        self._taken = 0

    def copy(self, memory: torch.Tensor) -> torch.Tensor | None:
        """A copy of flat bytes; None where there is no room for it. What comes from a GPU is there
        once its stream is."""
        buffer = self.room(len(memory))
        if buffer is None:
            return None
        return buffer.copy_(memory, non_blocking=buffer.is_pinned())

    def room(self, size_bytes: int) -> torch.Tensor | None:
        """So many bytes, of whatever value; None where there is no room for them."""
        buffer = self._next(size_bytes)
        return None if buffer is None else buffer[:size_bytes]

    def _next(self, size: int) -> torch.Tensor | None:
        if self._taken == len(self._buffers):
            self._buffers.append(torch.empty(0, dtype=torch.uint8))
        at = self._taken
        if len(self._buffers[at]) < size:
            rest = self.size_bytes - len(self._buffers[at])
            if self._most_bytes is not None and rest + size > self._most_bytes:
                return None
            self._buffers[at] = torch.empty(0, dtype=torch.uint8)  # goes before its successor comes
            self._buffers[at] = _allocated(size)
        self._taken += 1
        return self._buffers[at]

    def release(self) -> None:
        """Gives all memory back."""
        self._buffers.clear()
        self._taken = 0


def _allocated(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, pin_memory=torch.cuda.is_available())


# ---- saves
#
# What saves of every engine share: how they are made, and their end. Files get their names, older
# tags go, and what failed is a SaveError.


STOCK, DIRECT, BACKGROUND = WAYS = ("stock", "direct", "background")


@dataclass(frozen=True)
class SaveOptions:
    """How saves are made. `durable`: files are on disk before they count. `keep_latest`: whole tags
    that are left after a save (None: all). `rng`: random states are kept. `loader`: its position is
    kept. `values_left`: a scheduler or a group may hold values that no load can build, which
    the next engine's take the place of. `way`: who writes the files, and when: DeepSpeed ("stock"),
    this package ("direct"), or this package while training goes on ("background")."""

    durable: bool = True
    keep_latest: int | None = None
    rng: bool = True
    loader: ResumableLoader | None = None
    values_left: bool = False
    way: str = STOCK

    def __post_init__(self) -> None:
        check_saves(self)
        if self.way not in WAYS:
            refuse_way(self.way, WAYS)

    def syncs(self, folder: Path, tag: str) -> Syncs:
        """What brings one save to disk, with its right to publish."""
        return Syncs(self.durable, right=PublishRight(aside_of(folder, tag)))

    def asked(self, **more: Any) -> dict[str, Any]:
        """What all ranks must have been asked for alike."""
        own = {one.name: getattr(self, one.name) for one in fields(self)}
        return {name: agree.plain_option(value) for name, value in {**own, **more}.items()}


def refuse_way(found: object, ways: Sequence[str]) -> NoReturn:
    """Raises UsageError for what is none of the ways to save."""
    raise UsageError(
        "save is none of the ways to save",
        expected=", ".join(ways),
        found=repr(found),
        fix="give one of these, or leave save out",
    )


def require_left(sync: output_folder.Syncs) -> None:
    """Raises SaveError where an earlier save into the folder of this one was given up on this rank,
    and may still write there."""
    if sync.right.aside is not None:
        locks.require_left(sync.right.aside)


def require_unstepped(before: Mapping[str, float], now: Mapping[str, float]) -> None:
    """Raises SaveError where an optimizer counts other steps than when the save began."""
    if now != before:
        other = [key for key in {**before, **now} if before.get(key) != now.get(key)]
        was, is_ = ({key: said.get(key) for key in other[:3]} for said in (before, now))
        raise SaveError(
            "the optimizer stepped while its state was taken for a save",
            expected=f"{was}, as when the save began",
            found=f"{is_}: elements of two steps",
            fix="save from the thread that trains, between two steps",
            id="",
        )


@dataclass(frozen=True)
class SaveReport:
    """What a save did. `written_bytes` are of all ranks' files; `sync_seconds` are in fsync, and
    `stock_seconds` in DeepSpeed's own call, on this rank; `notes` say which older tags went, and
    what no load gets from the files. `blocked_seconds` are those in which training stood still, and
    `bytes_by_rank` what each rank wrote. `is_under_way`: the save goes on in the background, and
    nothing counts yet. `error`: why nothing was saved, of a save that was to warn."""

    path: str
    mesh: str
    global_steps: int
    written_bytes: int
    seconds: float
    sync_seconds: float
    stock_seconds: float = 0.0
    durable: bool = True
    notes: tuple[str, ...] = ()
    blocked_seconds: float = 0.0
    bytes_by_rank: tuple[int, ...] = ()
    is_under_way: bool = False
    error: str = ""

    def __str__(self) -> str:
        if self.error:
            return f"step {self.global_steps:,} ({self.path}) was not saved: {self.error}"
        if self.is_under_way:
            return f"saving step {self.global_steps:,} ({self.path}) in the background"
        where = "on disk on every rank" if self.durable else "not synced to disk, as asked"
        is_apart = self.blocked_seconds and self.blocked_seconds < self.seconds
        blocked = f"; training waited {say.duration(self.blocked_seconds)}" if is_apart else ""
        return (
            f"saved step {self.global_steps:,} ({self.path}): {self.mesh}; "
            f"{say.amount(self.written_bytes)} in {say.duration(self.seconds)}, {where}{blocked}"
        )


def under_way(path: Path, mesh: str, steps: int, seconds: float) -> SaveReport:
    """Of a save that goes on in the background, `seconds` after it began."""
    return SaveReport(
        str(path), mesh, steps, 0, seconds, 0.0, blocked_seconds=seconds, is_under_way=True
    )


def ended(engine: Any, report: SaveReport) -> SaveReport:
    """Shows the line of a save, and keeps its report for `report_of`."""
    engine.__dict__[SAVED] = report
    say.ended(str(report), report.notes)
    return report


def where_to(folder: Path, tag: str) -> dict[str, str]:
    """Where a rank saves, as ranks compare it."""
    return {"save_dir": os.path.abspath(folder), "tag": tag}


def require_one_save(said: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> None:
    """Raises UsageError on all ranks unless all of them save into one tag (`where_to`), in one way
    (`SaveOptions.asked`)."""
    agree.require_same([where for where, _ in said], "the ranks don't save into one tag")
    agree.require_same([asked for _, asked in said])


def publish(
    aside: Path, folder: Path, manifest: Manifest, pointer: str | None, sync: output_folder.Syncs
) -> list[str]:
    """Gives the files their names: the folder gets its manifest, then the tag's name; then the
    pointers to the newest tag are replaced: all that the folder has, and the program's own
    `pointer` (None: no pointer moves), unless they name a later save. Returns lines about those
    that can't name the tag, or don't. Raises SaveError, which says what is there, where that
    stopped half-way, or where the save was given up; OSError where nothing has a name yet."""
    tag, name, wanted, text = output_folder.tag_of(aside), pointer or LATEST, "", to_json(manifest)
    try:
        output_folder.commit(aside, text, sync)
        moving, notes = pointers_to(folder, tag, pointer) if pointer is not None else ({}, [])
        for name, wanted in moving.items():
            later = partial(names_a_later_save, folder / name, manifest)
            if not output_folder.move_pointer(folder / name, wanted, sync, unless=later):
                notes.append(f"`{name}` names a later save of this run, and stays as it is")
        return notes + ([_NO_LOCKS] if sync.right.is_unlocked else [])
    except OSError as error:
        written = folder / tag / FILE_NAME
        if not written.is_file() or written.read_text(encoding="utf-8") != text:
            raise
        named = read_pointer(folder / name) if (folder / name).is_file() else "nothing"
        if named == wanted or pointer is None:
            what = "the tag is there and whole, but it may not be on disk yet"
        else:
            what = (
                f"the tag is there and whole, but `{name}` could not be replaced: it names {named}"
            )
        raise SaveError(
            what,
            file=error.filename or folder / name,
            expected=f"`{name}` names {wanted}" if pointer else None,
            found=f"{type(error).__name__}: {error.strerror or error}",
            fix=f'mend the folder and save again; until then load this tag by name: tag="{tag}"',
        ) from error


_NO_LOCKS = (
    "this file system has no locks (flock): nothing keeps another job out that saves into this "
    "folder at the same time"
)
_NOT_SAVED = "the checkpoint was not saved; `latest` and all older tags are as they were"


class SumsOfFiles(Protocol):
    """What files hold, as sums of a fingerprint."""

    def wrote(self, part: int, slot: Slot, low: int, memory: torch.Tensor) -> None:
        """This rank wrote elements from `low` on of a slot of a part."""
        ...

    def of_rank(self) -> Sums:
        """All that this rank wrote."""
        ...

    def of_all(self, ranks: Sequence[Sums]) -> None:
        """What all ranks wrote, on the one that gives the files their name."""
        ...


class SaveSink(RanksFolderSink):
    """A tag of a run that all ranks write. An older tag of that name is replaced. `sums` see every
    byte as it is written. `later` is what the sink takes beside: a snapshot, and who is told what
    it does with it."""

    what_failed = _NOT_SAVED

    def __init__(
        self,
        path: Path,
        output: FolderOutput,
        sync: output_folder.Syncs,
        sums: SumsOfFiles,
        *later: Any,
    ) -> None:
        super().__init__(path, output, sync, *later)
        self._tag, self._sums_of_files = path.name, sums

    def _write(self, one: PieceRun) -> None:
        super()._write(one)
        piece = one.place.piece
        memory = one.memory.view(TORCH_DTYPES[piece.dtype])
        low = (one.at - piece.place) // memory.element_size()
        self._sums_of_files.wrote(piece.part, piece.slot, low, memory)

    def finish(self) -> Sums:
        super().finish()
        return self._sums_of_files.of_rank()

    def publish(self, told: Sequence[Sums]) -> None:
        self._sums_of_files.of_all(told)
        super().publish(told)

    @contextmanager
    def _life(self) -> Iterator[None]:
        with output_folder.begin(self.folder.parent, self._tag, self.sync.right):
            yield


@contextmanager
def as_save_error(problem: str = _NOT_SAVED) -> Iterator[None]:
    """Inside, what the operating system refuses is a save that failed: the `problem`."""
    try:
        yield
    except DamagedFileError as error:  # what `together` makes of an OSError
        raise SaveError(problem, file=error.file, found=error.found) from error


@contextmanager
def as_rank_error(folder: Path, tag: str) -> Iterator[None]:
    """Inside, collectives that break (as they do when a rank dies) are a save that did not
    finish."""
    try:
        yield
    except RuntimeError as error:
        found = str(error).strip().partition("\n")[0]
        if not agree.is_of_ranks(error):
            raise SaveError(
                "the save did not finish, and nothing of it counts: this rank failed",
                file=folder / tag,
                found=f"{type(error).__name__}: {found}",
                fix="mend what is named here and save again; older tags are as they were",
                id="",
            ) from error
        raise RankError(
            "the save did not finish, and nothing of it counts: a rank died, or its collectives "
            "failed",
            file=folder / tag,
            found=found,
            fix="look at the other ranks' output; resume from the tag that `latest` names",
        ) from error


_STAMPS = threading.Lock()
_last_stamp = 0.0
_TICK_S = 1e-6  # between two stamps; a number of seconds since the epoch can tell them apart


def stamp(*seen: float | None) -> float:
    """When something is saved, in seconds since the epoch: later than all that this process stamped
    before, and than the stamps that were `seen`. So it orders saves, and steps in memory, whatever
    happens to the clock."""
    global _last_stamp
    with _STAMPS:
        earlier = [one for one in (_last_stamp, *seen) if one is not None and math.isfinite(one)]
        _last_stamp = max(time.time(), max(earlier) + _TICK_S)
        return _last_stamp


def _stamp_in(folder: Path) -> float | None:
    """The latest stamp of the tags that a folder names now."""
    with suppress(OSError):  # what is wrong with a pointer is said when it moves
        tags = {tag for tag in pointers_in(folder).values() if tag}  # mostly one, for both
        stamps = [saved_at(folder / tag) for tag in tags]
        return max((stamp for stamp in stamps if stamp is not None), default=None)
    return None


def completed(
    manifest: Manifest, entries: Iterable[FileEntry], said: Mapping[str, Any], folder: Path
) -> Manifest:
    """The manifest beside the files of a save in a folder: these, and what else is `said` of the
    save."""
    run = {**manifest.run, **said, "saved_at": stamp(_stamp_in(folder))}
    files = tuple(sorted(entries, key=lambda entry: entry.name))
    return replace(manifest, files=files, save_id=uuid.uuid4().hex, run=run)


def position_of(loader: ResumableLoader | None) -> dict[str, Any]:
    """What a manifest says of the position of the data."""
    return {} if loader is None else {"data": loader.state_dict()}


def prune(folder: Path, keep: int | None, engine: Any, sync: output_folder.Syncs) -> list[str]:
    """Lines about older tags of an engine's run, of those that stay each once. The save, of which
    `sync` is, is done by now: what can't be removed is said, and no error."""
    if keep is None:
        return []
    run = run_of(engine)
    try:
        lines = output_folder.prune(folder, keep, run.id, sync.right)
    except (OSError, UcpError) as error:
        return [f"older tags could not be removed: {error}"]
    new = [line for line in lines if line not in run.said]
    run.said.update(lines)
    return new
