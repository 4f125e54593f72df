"""A save of a live engine, whatever trains in it.

What the engine is made of is taken first: from then on it may train. Then each rank writes its
files and brings them to disk; rank 0 writes the manifest beside them, gives the folder its name,
moves the pointers, and removes older tags. A failure of any rank before that leaves the pointers
and every older tag as they were.
"""

import math
import threading
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, fields, replace
from functools import cache, partial
from operator import add
from typing import Any, Protocol

from megatron_ucp import say
from megatron_ucp.core.manifest import FILE_NAME, MOVED_LATEST, TAG, FileEntry, Manifest
from megatron_ucp.core.manifest_json import to_json
from megatron_ucp.core.mesh import Mesh
from megatron_ucp.core.plan import Slot
from megatron_ucp.engines.background import Background, SaveTurn, background_of
from megatron_ucp.engines.record import SAVED, run_of
from megatron_ucp.engines.run_state import ResumableLoader, RunState
from megatron_ucp.errors import (
    DamagedFileError,
    RankError,
    SaveError,
    StoreError,
    UcpError,
)
from megatron_ucp.formats import locks, output_folder
from megatron_ucp.formats.checkpoint import CallerModel
from megatron_ucp.formats.folder import SharedFolder
from megatron_ucp.formats.locks import PublishRight
from megatron_ucp.formats.output_folder import Syncs, aside_of
from megatron_ucp.formats.store import (
    Location,
    StorePath,
    absolute,
    folder_at,
    is_url,
    location,
    unfinished_shown,
)
from megatron_ucp.formats.tags import (
    LATEST,
    FoundTag,
    names_a_later_save,
    pointers_in,
    pointers_to,
    read_pointer,
    saved_at,
)
from megatron_ucp.reshard import agree
from megatron_ucp.reshard.fingerprint import (
    JoinedSums,
    Sums,
    diverged,
    joined_sums,
    recorded_as,
    table_of,
)
from megatron_ucp.reshard.folder import WrittenRange, save_error_of
from megatron_ucp.reshard.load import open_found
from megatron_ucp.reshard.messages import Ranks
from megatron_ucp.reshard.options import SAVES, STOCK, check_fields, check_given, options_for

# ---- options, and the report


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
        check_fields(self)
        check_given({"save": self.way})

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> "SaveOptions":
        """Of options of `attach`."""
        given = options_for(SAVES, options)
        left = "values" in options.get("allow", ())
        return cls(way=given.pop("save", STOCK), values_left=left, **given)


@dataclass(frozen=True)
class SaveReport:
    """What a save did. `written_bytes` are of all ranks' files; `sync_seconds` are in fsync, and
    `stock_seconds` in DeepSpeed's own call, on this rank; `notes` say which older tags went, and
    what no load gets from the files. `blocked_seconds` are those in which training stood still, and
    `bytes_by_rank` what each rank wrote. `is_under_way`: the save goes on in the background, and
    nothing counts yet. `error`: why nothing was saved, of a save that was to warn.
    """

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
        if is_url(self.path):
            where = "in the object store"
        is_apart = self.blocked_seconds and self.blocked_seconds < self.seconds
        blocked = f"; training waited {say.duration(self.blocked_seconds)}" if is_apart else ""
        return (
            f"saved step {self.global_steps:,} ({self.path}): {self.mesh}; "
            f"{say.amount(self.written_bytes)} in {say.duration(self.seconds)}, {where}{blocked}"
        )


# ---- one save
#
# `save_engine` saves any engine. The engine's own request says what there is to save (`take`);
# a writer knows the files.


@dataclass(frozen=True)
class Written:
    """What one rank wrote of a save: how many bytes, the sums of its elements for the fingerprint,
    and, by the rank that ends them, the ranges of others' files."""

    size_bytes: int
    sums: Sums
    ranges: Mapping[int, Sequence[WrittenRange]] = field(default_factory=dict)


class SaveWriter(Protocol):
    """The files of one save on one rank."""

    def write(self) -> Written:
        """Writes what this rank has; on disk when it returns. Raises OSError, SaveError."""
        ...

    def close(self, others: Sequence[WrittenRange]) -> list[FileEntry]:
        """Ends the files that this rank owns, of which `others` were written by other ranks;
        returns the manifest's lines about them. Raises OSError, SaveError."""
        ...


@dataclass(frozen=True)
class PendingSave:
    """All that a save takes of an engine, which may train from here on.

    `manifest` gives what describes the files, once training goes on; `elements` what the ranks sum
    for the fingerprint, which may be more: frozen parameters that the files leave out.
    `stock_seconds` were spent in DeepSpeed's own save. `retire`
    removes what goes beside older tags, once this save counts, and returns notes. `told` is what
    the engine knows of its files (None: no load of ours can take them, and notes say it).
    """

    mesh: Mesh
    manifest: Callable[[], Manifest]
    elements: Callable[[], Manifest]
    state: RunState
    writer: SaveWriter
    stock_seconds: float = 0.0
    retire: Callable[[], list[str]] = list
    told: CallerModel | None = field(default_factory=CallerModel)


@dataclass(frozen=True)
class SaveRequest(ABC):
    """What is saved, and how: the engine at `steps` into the folder `tag` of `folder`. `pointer` is
    the one that the program itself reads (None: no pointer moves)."""

    engine: Any
    folder: Location
    tag: str
    steps: int
    options: SaveOptions
    pointer: str | None
    claimed: Location | None = field(default=None, kw_only=True)  # where a store takes the files

    @abstractmethod
    def take(self, sync: Syncs, left: ExitStack) -> PendingSave:
        """Takes everything, and writes what can't wait. What is given to `left` ends with the save.
        Collective. Raises a UcpError on every rank."""

    @property
    def path(self) -> Location:
        return self.folder / self.tag

    @property
    def aside(self) -> Location:
        """Where the files are written."""
        return self.claimed or aside_of(self.folder, self.tag)

    @property
    def background(self) -> Background | None:
        """What goes on with the save while the engine trains; None where that waits."""
        return background_of(self.engine)

    def asked(self) -> dict[str, Any]:
        """What all ranks must have been asked for alike: where to save, and how."""
        own = {one.name: getattr(self.options, one.name) for one in fields(self.options)}
        options = {name: agree.plain_option(value) for name, value in own.items()}
        return {"save_dir": str(absolute(self.folder)), "tag": self.tag, **options}

    def begin(self, sync: Syncs, left: ExitStack) -> None:
        """Everything that can refuse the save on this rank before a file is written. Raises a
        UcpError: SaveError where an earlier save into the folder was given up on this rank, and may
        still write."""
        locks.require_left(self.aside)


_WARNED = ("disk-full", "folder-in-use")  # ids of errors that a later save may not meet


def save_engine(request: SaveRequest) -> SaveReport:
    """Saves an engine; in the background the rest goes on while it trains. Collective. Raises a
    UcpError on every rank; a rank that died raises RankError on the others. Where the disk refuses
    a save that was to warn, a note and the report say why."""
    engine, background = request.engine, background_of(request.engine)
    may_skip = background is not None and background.options.busy == "skip"
    if background is not None and may_skip and agree.any_of(background.is_busy):
        say.note(f"a save was skipped: that of {background.what} is still under way")
        return _unfinished(location(background.what), request.steps)
    try:
        report = _begun(request)
    except SaveError as error:
        is_raised = background is None or background.options.on_error == "raise"
        if is_raised or error.id not in _WARNED:
            raise
        say.note(f"a save failed, and training goes on: {error}")
        begun = _unfinished(request.path, request.steps)
        report = replace(begun, is_under_way=False, error=str(error))
        engine.__dict__[SAVED] = report
        return report
    return report if report.is_under_way else ended(engine, report)


def _unfinished(path: Location, steps: int, mesh: str = "", seconds: float = 0.0) -> SaveReport:
    """The report of a save that goes on in the background, `seconds` after it began."""
    return SaveReport(
        str(path), mesh, steps, 0, seconds, 0.0, blocked_seconds=seconds, is_under_way=True
    )


def ended(engine: Any, report: SaveReport) -> SaveReport:
    """Shows the line of a save, and keeps its report for `report_of`."""
    engine.__dict__[SAVED] = report
    say.ended(str(report), report.notes)
    return report


def _begun(request: SaveRequest) -> SaveReport:
    """Takes the save, and writes it; in the background a thread does, and this returns."""
    sync = Syncs(request.options.durable, right=PublishRight(request.aside))
    with as_rank_error(request.folder, request.tag), ExitStack() as left:
        started = _agreed(request, sync, left)
        request = _claimed(request, sync, left)
        taken = request.take(sync, left)
        settle = partial(_settled, request, taken, sync, started)
        if request.background is None:
            return settle()
        seconds = time.perf_counter() - started
        mesh = str(taken.mesh)
        rest = partial(_in_background, request, settle, left.pop_all(), seconds)
        request.background.start(str(request.path), rest, sync.right)
        return _unfinished(request.path, request.steps, mesh, seconds)


def _agreed(request: SaveRequest, sync: Syncs, left: ExitStack) -> float:
    """Nothing of an earlier save is under way, each rank can save, and all save into one tag in one
    way; what goes on beside training is ready for it. Returns the clock when this rank had waited
    for the earlier save, and this one began. Collective. Raises a UcpError on every rank."""
    background = background_of(request.engine)
    block = agree.alike("the ranks don't save into one tag in one way", numbers=(0,))
    with as_save_error(), block:
        if background is not None:
            background.wait()
            block.numbers = [int(background.is_connected)]
        started = time.perf_counter()
        block.options = request.asked()
        request.begin(sync, left)
    if request.background is not None:
        request.background.ready(bool(block.lowest[0]))
    return started


def _claimed(request: SaveRequest, sync: Syncs, left: ExitStack) -> SaveRequest:
    """A save into a store claims its tag: where the files go is told to all ranks. Until `left`
    ends the claim is this save's. Collective. Raises SaveError on every rank."""
    if not isinstance(request.folder, StorePath):
        return request

    def claim() -> Location:
        return left.enter_context(output_folder.begin(request.folder, request.tag, sync.right))

    with as_save_error():
        return replace(request, claimed=agree.of_first(claim))


def _in_background(
    request: SaveRequest,
    settle: Callable[..., SaveReport],
    left: ExitStack,
    blocked_seconds: float,
    turn: SaveTurn,
) -> None:
    with left, as_rank_error(request.folder, request.tag):
        ended(request.engine, settle(turn, blocked_seconds))


def _settled(
    request: SaveRequest,
    taken: PendingSave,
    sync: Syncs,
    started: float,
    turn: SaveTurn | None = None,
    blocked_seconds: float | None = None,
) -> SaveReport:
    """Writes what was taken, and brings it to disk; then rank 0 gives the files their names.
    Collective, in the background among the ranks of the `turn`."""
    with as_save_error(), agree.together(turn):
        own = taken.writer.write()
        size_bytes = own.size_bytes + _write_beside(request.aside, taken.state.files, sync)
    sums = joined_sums(own.sums, turn)
    sizes = agree.gather(size_bytes, turn)
    others = agree.delivered(own.ranges, turn)
    entries = agree.merging(add, ranks=turn, to_all=False)
    with as_save_error(), entries:
        lines = taken.writer.close([one for ranges in others.values() for one in ranges])
        beside = output_folder.entries_of(request.aside, taken.state.files)
        sync(request.aside)
        entries.value = [*lines, *beside]

    @cache
    def described() -> tuple[Manifest, list[str]]:
        return _described(request, taken, entries.merged, sums)

    with as_save_error():
        if taken.told is not None:
            _require_readable(request.aside, lambda: described()[0], taken.told, turn)
        size_bytes, notes = agree.of_first(
            lambda: _published(request, taken, *described(), sync), turn
        )
    seconds = time.perf_counter() - started
    return SaveReport(
        str(request.path),
        str(taken.mesh),
        request.steps,
        size_bytes,
        seconds,
        sync.seconds,
        taken.stock_seconds,
        request.options.durable,
        (*taken.state.notes, *notes),
        seconds if blocked_seconds is None else blocked_seconds,
        tuple(sizes),
    )


def _write_beside(aside: Location, files: Mapping[str, bytes], sync: Syncs) -> int:
    """Writes the small files that this rank has for itself; returns their bytes. Raises OSError,
    SaveError."""
    for name, data in files.items():
        with sync.right.changing(f"writes {aside / name}"):
            (aside / name).write_bytes(data)
        sync(aside / name)
    return sum(map(len, files.values()))


def _described(
    request: SaveRequest, taken: PendingSave, entries: Sequence[FileEntry], sums: JoinedSums
) -> tuple[Manifest, list[str]]:
    """The manifest beside the files, with the fingerprint of what they hold; and notes."""
    table, apart = table_of(taken.elements(), sums)
    described = taken.manifest()
    saved = {name: states for name, states in table.items() if name in described.by_name}
    tag = {TAG: request.tag, MOVED_LATEST: request.pointer is not None}
    facts = {**taken.state.facts, **tag, **recorded_as(saved, apart)}
    return completed(described, entries, facts, request.folder), diverged(apart)


def _require_readable(
    aside: Location, manifest: Callable[[], Manifest], told: CallerModel, turn: Ranks | None
) -> None:
    """The files say of themselves what their manifest, which rank 0 has, says of them: each rank
    looks at some of them as a load does, before they have a name. No tensor is read. Collective.
    Raises SaveError on every rank."""

    def find() -> tuple[FoundTag, SharedFolder]:
        beside = {FILE_NAME: to_json(manifest()).encode()}
        return FoundTag(aside), SharedFolder(folder_at(aside), to_come=beside)

    ranks = turn or agree.default_ranks()
    with ExitStack() as opened, unfinished_shown(aside), _as_contradiction(aside):
        written = open_found(aside, find, told, opened, turn)
        with agree.together(turn):
            written.check_headers(written.file_names[ranks.rank :: ranks.world])
            for slot in _slots_of(written.manifest, ranks.rank):
                written.where(slot)


def _slots_of(manifest: Manifest, rank: int) -> Iterator[Slot]:
    """Every state of every part that a rank has."""
    parts = manifest.parts_of(rank) if rank < manifest.mesh.world else []
    for number, cut, part in parts:
        for state, _ in manifest.buffers[number].states:
            yield Slot(number, cut, part, state)


@contextmanager
def _as_contradiction(aside: Location) -> Iterator[None]:
    """Inside, files that a load would refuse are a save that failed."""
    try:
        yield
    except (SaveError, StoreError, RankError):
        raise
    except UcpError as error:
        raise SaveError(
            f"no load would take what was written, and it counts for nothing: {error.problem}",
            file=error.file or aside,
            parameter=error.parameter,
            expected=error.expected,
            found=error.found,
            fix="let nothing change the model or its optimizer while they are saved, and save "
            "again; older tags are as they were",
            id="",
        ) from error


def _published(
    request: SaveRequest, taken: PendingSave, manifest: Manifest, notes: list[str], sync: Syncs
) -> tuple[int, list[str]]:
    """Gives the files and the folder their names, and moves the pointers; then older tags go.
    Returns the bytes of all files, and notes."""
    replaced = output_folder.other_run_in(request.path, run_of(request.engine).id)
    notes = [*notes, *([replaced] if replaced else [])]
    notes += publish(request.aside, request.folder, manifest, request.pointer, sync)
    if request.pointer is not None:
        notes += prune(request.folder, request.options.keep_latest, request.engine, sync)
    return manifest.size_bytes, notes + taken.retire()


def flat(lists: Iterable[Iterable[Any]]) -> list[Any]:
    """What all ranks said, one after the other."""
    return [one for each in lists for one in each]


# ---- the end of a save
#
# Files get their names, older tags go, and what failed is a SaveError.


def publish(
    aside: Location,
    folder: Location,
    manifest: Manifest,
    pointer: str | None,
    sync: output_folder.Syncs,
) -> list[str]:
    """Gives the files their names: the folder gets its manifest, then the tag's name; then the
    pointers to the newest tag are replaced: all that the folder has, and the program's own
    `pointer` (None: no pointer moves), unless they name a later save. Returns lines about those
    that can't name the tag, or don't. Raises SaveError, which says what is there, where that
    stopped half-way, or where the save was given up; OSError where nothing has a name yet."""
    tag, name, wanted = output_folder.tag_of(aside), pointer or LATEST, ""
    try:
        output_folder.commit(aside, to_json(manifest), sync)
        moving, notes = pointers_to(folder, tag, pointer) if pointer is not None else ({}, [])
        for name, wanted in moving.items():
            later = partial(names_a_later_save, folder / name, manifest)
            if not output_folder.move_pointer(folder / name, wanted, sync, unless=later):
                notes.append(f"`{name}` names a later save of this run, and stays as it is")
        return notes + ([_NO_LOCKS] if sync.right.is_unlocked else [])
    except (OSError, StoreError) as error:
        if not _counts(folder / tag, manifest):
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
            file=(error.filename if isinstance(error, OSError) else error.file) or folder / name,
            expected=f"`{name}` names {wanted}" if pointer else None,
            found=_reason(error),
            fix=f'mend the folder and save again; until then load this tag by name: tag="{tag}"',
        ) from error


def _counts(tag: Location, manifest: Manifest) -> bool:
    """Whether a tag is there and is the save with this manifest."""
    with suppress(OSError, UcpError):
        return output_folder.manifest_of(tag).save_id == manifest.save_id
    return False


def _reason(error: OSError | StoreError) -> str:
    if isinstance(error, StoreError):
        return f"{error.problem}: {error.found}"
    return f"{type(error).__name__}: {error.strerror or error}"


_NO_LOCKS = (
    "this file system has no locks (flock): nothing keeps another job out that saves into this "
    "folder at the same time"
)
SAVE_FAILED = "the checkpoint was not saved; `latest` and all older tags are as they were"


@contextmanager
def as_save_error(problem: str = SAVE_FAILED) -> Iterator[None]:
    """Inside, what the operating system refuses is a save that failed: the `problem`."""
    try:
        yield
    except DamagedFileError as error:  # what `together` makes of an OSError
        raise SaveError(problem, file=error.file, found=error.found) from error
    except StoreError as error:
        raise save_error_of(error, problem) from error


@contextmanager
def as_rank_error(folder: Location, tag: str) -> Iterator[None]:
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


def _stamp_in(folder: Location) -> float | None:
    """The latest stamp of the tags that a folder names now."""
    with suppress(OSError):  # what is wrong with a pointer is said when it moves
        tags = {tag for tag in pointers_in(folder).values() if tag}  # mostly one, for both
        stamps = [saved_at(folder / tag) for tag in tags]
        return max((stamp for stamp in stamps if stamp is not None), default=None)
    return None


def completed(
    manifest: Manifest, entries: Iterable[FileEntry], facts: Mapping[str, Any], folder: Location
) -> Manifest:
    """The manifest beside the files of a save in a folder: these, and what else is known of the
    save."""
    run = {**manifest.run, **facts, "saved_at": stamp(_stamp_in(folder))}
    files = tuple(sorted(entries, key=lambda entry: entry.name))
    return replace(manifest, files=files, save_id=uuid.uuid4().hex, run=run)


def prune(folder: Location, keep: int | None, engine: Any, sync: output_folder.Syncs) -> list[str]:
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
