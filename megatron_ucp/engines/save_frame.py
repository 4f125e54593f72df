"""A save whose files are one value for each, whatever engine has it: everything that was taken is
brought to disk; then the files get their names. At once, or beside training."""

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron_ucp.core.manifest import FileEntry, Manifest
from megatron_ucp.core.plan import Slot
from megatron_ucp.engines import resume_state
from megatron_ucp.engines.background import Alongside, Background, SaveTurn
from megatron_ucp.engines.pt_files import RankFiles, Replicas, WrittenRange
from megatron_ucp.engines.save import (
    SaveOptions,
    SaveReport,
    as_rank_error,
    as_save_error,
    completed,
    ended,
    prune,
    publish,
    under_way,
)
from megatron_ucp.engines.values import LiveValues
from megatron_ucp.formats import output_folder
from megatron_ucp.formats.per_rank import PerRank
from megatron_ucp.reshard import agree
from megatron_ucp.reshard.fingerprint import Sums, diverged, recorded_as, sums_of_memory, table_of


@dataclass(frozen=True)
class PendingSave:
    """All that a save takes of an engine: from here on the engine may train. `files` are written by
    this package (None: the engine's own code wrote them, and `written` has their paths). `held` is
    the memory of what this rank has, of its own or in the snapshot; `whole` has frozen parameters
    too. `pointer` is the program's own (None: none moves); `named` does what is left when the files
    have their names, on rank 0, and returns notes."""

    engine: Any
    folder: Path
    tag: str
    pointer: str | None
    how: SaveOptions
    manifest: Manifest
    said: dict[str, Any]
    files: RankFiles | None
    written: list[Path]
    notes: list[str]
    started: float
    stock_seconds: float
    sync: output_folder.Syncs
    held: dict[Slot, torch.Tensor]
    whole: Manifest
    named: Callable[[], list[str]] = list

    @property
    def aside(self) -> Path:
        """Where the files are written."""
        return output_folder.aside_of(self.folder, self.tag)

    @property
    def seconds(self) -> float:
        """Since the save began."""
        return time.perf_counter() - self.started


def saved_as_taken(
    where: Path, background: Background | None, take: Callable[[ExitStack], PendingSave]
) -> SaveReport:
    """Takes a save of a tag, and writes it; in the background beside training. What `take` gives to
    its stack ends with the save. Collective. Raises a UcpError on every rank; a rank that died
    raises RankError on the others."""
    with as_rank_error(where.parent, where.name), ExitStack() as left:
        taken = take(left)
        # beside the writing: summing and fsync both let go of the interpreter
        sums = Alongside(
            partial(sums_of_memory, taken.whole, taken.held), is_lowest=background is not None
        )
        if background is None:
            return _settled(taken, sums, None, None)
        held, steps = left.pop_all(), taken.said[resume_state.STEPS]
        begun = under_way(where, str(taken.manifest.mesh), steps, taken.seconds)
        rest = partial(_in_background, taken, sums, held, begun)
        background.start(begun.path, rest, taken.sync.right)
        return begun


def _in_background(
    taken: PendingSave, sums: Alongside, held: ExitStack, begun: SaveReport, turn: SaveTurn
) -> None:
    """The rest of a save, in a thread of its own."""
    with held, as_rank_error(taken.folder, taken.tag):
        ended(taken.engine, _settled(taken, sums, turn, begun.blocked_seconds))


def files_of_rank(
    replicas: Replicas, sync: output_folder.Syncs, background: Background | None
) -> RankFiles:
    """The files of a save of this rank. Collective."""
    if background is None:
        return RankFiles(replicas, sync)
    background.ready()
    return RankFiles(replicas, sync, background.snapshot)


def write_beside(aside: Path, own: LiveValues, apart: PerRank, how: SaveOptions) -> list[Path]:
    """Writes what this rank has for itself besides tensors; returns the files. Raises OSError."""
    rank = agree.world()[0]
    found = [own.write(aside, rank, apart)] if apart else []
    return found + ([resume_state.write(aside, rank)] if how.rng else [])


def _settled(
    taken: PendingSave, summing: Alongside, ranks: SaveTurn | None, blocked_seconds: float | None
) -> SaveReport:
    """Writes what waits, and brings it to disk; then files get their names. Collective, among
    `ranks`."""
    sync = taken.sync
    with as_save_error(), agree.together(ranks) as block:
        block.value = (*_written(taken), summing.result())
    ranges, bytes_by_rank, sums = zip(*block.values, strict=True)
    with as_save_error(), agree.together(ranks) as block:
        block.value = _entries(taken, flat(ranges))
    manifest, notes = _recorded(taken, flat(block.values), sums)
    notes += _named(taken, manifest, ranks)
    seconds = taken.seconds
    return SaveReport(
        str(taken.folder / taken.tag),
        str(manifest.mesh),
        taken.said[resume_state.STEPS],
        manifest.size_bytes,
        seconds,
        sync.seconds,
        taken.stock_seconds,
        taken.how.durable,
        (*taken.notes, *notes),
        seconds if blocked_seconds is None else blocked_seconds,
        bytes_by_rank,
    )


def _entries(taken: PendingSave, others: Iterable[WrittenRange]) -> list[FileEntry]:
    """This rank's files, whole and on disk, as lines of the manifest; `others` wrote ranges of
    them. Raises OSError."""
    made = [] if taken.files is None else taken.files.finish(others)
    for folder in sorted({path.parent for path in made} | {taken.aside}):
        taken.sync(folder)
    paths = [*taken.written, *made]
    return [output_folder.entry_of(one, one.relative_to(taken.aside).as_posix()) for one in paths]


def _recorded(
    taken: PendingSave, entries: Sequence[FileEntry], sums: Sequence[Sums]
) -> tuple[Manifest, list[str]]:
    """The manifest beside the files, with the fingerprint of what they hold; and notes."""
    table, apart = table_of(taken.whole, sums)
    kept = {name: states for name, states in table.items() if name in taken.manifest.by_name}
    said = {**taken.said, **recorded_as(kept, apart)}
    return completed(taken.manifest, entries, said, taken.folder), diverged(apart)


def _written(taken: PendingSave) -> tuple[list[WrittenRange], int]:
    """What this rank wrote, all of it on disk: ranges of files that others made, and how many bytes
    in all. Raises OSError."""
    size_bytes = 0
    for path in taken.written:
        taken.sync(path)
        size_bytes += path.stat().st_size
    if taken.files is None:
        return [], size_bytes
    taken.files.write()
    taken.files.to_disk()
    return taken.files.for_others, size_bytes + taken.files.written_bytes


def flat(lists: Iterable[Iterable[Any]]) -> list[Any]:
    """What all ranks said, one after the other."""
    return [one for each in lists for one in each]


def _named(taken: PendingSave, manifest: Manifest, ranks: SaveTurn | None) -> list[str]:
    """Rank 0 gives the files their names, and takes older tags away; returns notes, on rank 0.
    Collective, among `ranks`."""
    rank = agree.world()[0] if ranks is None else ranks.rank
    with as_save_error(), agree.together(ranks) as block:
        if rank == 0:
            pointer, sync = taken.pointer, taken.sync
            block.value = publish(taken.aside, taken.folder, manifest, pointer, sync)
            keep = taken.how.keep_latest if pointer is not None else None
            block.value += prune(taken.folder, keep, taken.engine, sync) + taken.named()
    return block.value or []
