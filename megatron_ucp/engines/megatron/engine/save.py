"""`save` of megatron-core's stack: a distributed checkpoint that stock Megatron-LM and every engine
here load on any mesh.

All ranks make the same plan of the files from the manifest, and each takes the elements that it
has: nothing is gathered. Files are written aside, at once, or from a snapshot while training goes
on; the folder gets its name when all of them are on disk.
"""

import copy
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from megatron_ucp import say
from megatron_ucp.core.manifest import (
    MOVED_LATEST,
    RUN,
    TAG,
    FileEntry,
)
from megatron_ucp.engines import random_states
from megatron_ucp.engines.background import (
    SaveTurn,
    begun_or_warned,
    skipped,
)
from megatron_ucp.engines.loader import ResumableLoader
from megatron_ucp.engines.megatron.engine.asked import (
    TORCH_DIST,
    AskedOfStack,
    described_to_save,
    require_written,
)
from megatron_ucp.engines.megatron.engine.besides import extras_of, values_of
from megatron_ucp.engines.megatron.engine.flags import flags_of_model, plain_flags
from megatron_ucp.engines.megatron.engine.inner import kind_of
from megatron_ucp.engines.megatron.engine.output import StackOutput
from megatron_ucp.engines.megatron.engine.planned import knows, planned, structure_of
from megatron_ucp.engines.megatron.engine.present import PresentStates
from megatron_ucp.engines.megatron.engine.retained import newest, retired
from megatron_ucp.engines.megatron.engine.stack import MegatronStack
from megatron_ucp.engines.megatron.engine.summed import WrittenSums
from megatron_ucp.engines.saves import (
    SaveReport,
    SaveSink,
    Saving,
    as_rank_error,
    completed,
    ended,
    position_of,
    prune,
    publish,
    require_left,
    require_one_save,
    under_way,
    where_to,
)
from megatron_ucp.errors import UsageError
from megatron_ucp.formats import of_ranks
from megatron_ucp.formats.megatron.common_file import CommonFile
from megatron_ucp.formats.megatron.extras import ARGUMENTS_KEY, OPERATIONS
from megatron_ucp.formats.megatron.writer import (
    entries_of,
    finish_files,
)
from megatron_ucp.formats.of_ranks import PER_RANK, PerRank
from megatron_ucp.formats.pointers import MEGATRON_LATEST
from megatron_ucp.reshard import agree
from megatron_ucp.reshard.arguments import absolute_path
from megatron_ucp.reshard.fingerprint import diverged, recorded_as
from megatron_ucp.reshard.folder_sink import FolderOutput
from megatron_ucp.reshard.transfer import Moved, TransferRun


@agree.door("the save")
def save(
    stack: MegatronStack,
    save_dir: str | Path,
    *,
    arguments: Mapping[str, Any] | Any = None,
    durable: bool = True,
    keep_latest: int | None = None,
    rng: bool = True,
    loader: ResumableLoader | None = None,
    ckpt_format: str = TORCH_DIST,
) -> SaveReport:
    """Saves megatron-core's own stack, as stock Megatron-LM and every engine here load it. Atomic
    and collective. A DeepSpeed engine saves by its own `save_checkpoint`.

    Args:
        stack: What `attach_megatron` returned. Its `iteration` names the tag (`iter_0000100`).
        save_dir: The folder above the tags; its pointer then names the new one.
        arguments: Megatron-LM's flags (a Namespace or a mapping), which its own load asks for.
            Default: those that the model shows.
        durable: Whether files are on disk before they count.
        keep_latest: How many whole tags of this run are left. Default: all.
        rng: Whether random states are kept.
        loader: A `ResumableLoader`, whose position is kept.
        ckpt_format: "torch_dist", the one format of Megatron-LM's that is written.

    Returns:
        What was done: path, mesh, step, bytes, seconds, notes. Of a stack that is saved in the
        background (see `attach_megatron`) that it goes on: `ucp.wait` waits, and `ucp.report` then
        says what was done.

    Raises:
        SaveError: Where a file can't be written, on every rank; older tags are as they were. In
            the background that is raised by what the program next asks for.
        UsageError: Before the first step, and for another engine.
        UnsupportedError: For another `ckpt_format`.

    Example:
        >>> stack = ucp.attach_megatron(model, optimizer, opt_param_scheduler)
        >>> saved = ucp.save(stack, "megatron")
    """
    with agree.together():
        _refuse_other(stack)
        require_written(ckpt_format)
        folder = absolute_path(save_dir)
        how = Saving(durable, keep_latest, rng, loader)
        asked = AskedOfStack(stack, folder, arguments, how)
    return save_as(asked)


def save_as(asked: AskedOfStack) -> SaveReport:
    """As `save`."""
    stack, background = asked.stack, asked.background
    if (other := skipped(stack, stack.iteration)) is not None:
        return other
    begin = partial(_begun, asked)
    where = asked.folder / asked.tag
    report = begun_or_warned(stack, where, stack.iteration, begin)
    return report if background is not None else ended(stack, report)


def _begun(asked: AskedOfStack) -> SaveReport:
    """Saves, or begins to."""
    stack, background = asked.stack, asked.background
    tag, values = _taken(asked)
    if background is None:
        return _settled(tag, values, None)
    begun = under_way(tag.path, str(stack.mesh), tag.steps, tag.seconds)
    rest = partial(_in_background, tag, values, begun.blocked_seconds)
    background.start(begun.path, rest, tag.sync.right)
    return begun


def _in_background(tag: "_Tag", values: Moved, blocked_seconds: float, turn: SaveTurn) -> None:
    """The rest of a save, in a thread of its own."""
    tag.turn = turn
    with as_rank_error(tag.asked.folder, tag.name):
        ended(tag.asked.stack, _settled(tag, values, blocked_seconds))


def _taken(asked: AskedOfStack) -> "tuple[_Tag, Moved]":
    """Takes everything: from here on the stack may train. Collective. Raises as `save`."""
    tag = _Tag(asked)
    present = described_to_save(asked.stack)
    with agree.together() as block:
        require_left(tag.sync)
        structure = structure_of(asked.stack, present)
        block.value = (
            (where_to(asked.folder, tag.name), asked.how.asked()),
            knows(asked.stack, structure),
        )
    require_one_save([said for said, _ in block.values])
    known = all(is_known for _, is_known in block.values)
    plan = planned(asked.stack, structure, present, str(tag.path), known)
    job = _Job(asked.stack, present, plan.output)
    tag.take(job, job.own.differing(agree.collect(job.own.digest)))
    background, later = asked.background, ()
    if background is not None:
        background.ready()
        later = (background.snapshot,)
    with agree.together():
        output = tag.output(job)
        sink = SaveSink(tag.path, output, tag.sync, tag.sums, *later)
    with say.progress("save") as advance:
        return tag, plan.moved(present, sink, TransferRun(progress=advance))


def _settled(tag: "_Tag", values: Moved, blocked_seconds: float | None) -> SaveReport:
    """Writes what was taken; then the files get their names. Collective, in the background among
    its ranks."""
    together = agree.together if tag.turn is None else partial(agree.together, tag.turn)
    values.finish(together)
    with together() as block:
        block.value = tag.notes, tag.bytes_by_rank
    notes, bytes_by_rank = block.values[0]
    seconds = tag.seconds
    return SaveReport(
        str(tag.path),
        str(tag.manifest.mesh),
        tag.steps,
        sum(bytes_by_rank),
        seconds,
        tag.sync.seconds,
        durable=tag.asked.how.durable,
        notes=tuple(notes),
        blocked_seconds=seconds if blocked_seconds is None else blocked_seconds,
        bytes_by_rank=bytes_by_rank,
    )


class _Tag:
    """A save on its way to its name: everything of it that is no element of a tensor, as it was
    when the save was asked for. `bytes_by_rank` are what each rank wrote, on rank 0 and once the
    files have their names."""

    def __init__(self, asked: AskedOfStack) -> None:
        self.asked, self.steps = asked, asked.stack.iteration
        self.name = asked.tag
        self.path = asked.folder / self.name
        self.sync = asked.how.syncs(asked.folder, self.name)
        self.notes: list[str] = []
        self.bytes_by_rank: tuple[int, ...] = ()
        self.turn: SaveTurn | None = None  # in the background
        self._started = time.perf_counter()
        # in the background the program's process groups may be gone
        self._rank, self._world = agree.world()

    @property
    def seconds(self) -> float:
        """Since the save began."""
        return time.perf_counter() - self._started

    def take(self, job: "_Job", apart: PerRank) -> None:
        """What changes with a step. `apart` is what differs from rank to rank. Collective."""
        how, rank = self.asked.how, self._rank
        self.manifest = job.manifest
        with agree.together():
            self.sums = WrittenSums(job.states, job.output)
            common = job.common(self.asked.arguments, str(self.path))
            # a live scheduler, and a program's own flags, may be in it
            self._common = copy.deepcopy(common.output())
            said = {TAG: self.name, MOVED_LATEST: True}
            said |= {PER_RANK: apart.as_value()} if apart else {}
            self._said = copy.deepcopy(said | position_of(how.loader))
            self._beside: dict[str, bytes] = {}
            if how.rng:
                self._beside[random_states.file_name(rank)] = random_states.file_bytes()
            if apart:
                own = of_ranks.file_name(rank)
                self._beside[own] = job.own.text(self.path / own, apart).encode()
        self.notes += [*job.notes, *common.notes]

    def output(self, job: "_Job") -> FolderOutput:
        """The folder on paper."""
        plan, files = job.output.plan, job.output.files
        self._owners = {file.name: file.owner or 0 for file in files}
        finish = partial(finish_files, plan=plan, common=self._common)

        def close(aside: Path) -> None:
            with self.sync.right.changing(f"writes the index of {aside}"):
                finish(aside)

        return FolderOutput(job.output.parts, files, close, self._publish, "save", self._each)

    def _each(self, aside: Path, rank: int) -> list[Path]:
        """Writes what a rank has for itself."""
        for name, data in self._beside.items():
            (aside / name).write_bytes(data)
        return [aside / name for name in self._beside]

    def _publish(self, aside: Path) -> None:
        """The manifest, the name, the pointers; then older tags go."""
        asked = self.asked
        folder, interval = asked.folder, asked.retain_interval
        before = newest(folder) if interval else None
        entries = entries_of(aside)
        table, apart = self.sums.table()
        whole = completed(self.manifest, entries, self._said | recorded_as(table, apart), folder)
        self.notes += diverged(apart)
        self.notes += publish(aside, folder, whole, MEGATRON_LATEST, self.sync)
        self.notes += prune(folder, asked.how.keep_latest, asked.stack, self.sync)
        run = self.manifest.run[RUN]
        self.notes += retired(folder, before, self.steps, run, interval, self.sync)
        self.bytes_by_rank = self._sizes(entries)

    def _sizes(self, entries: list[FileEntry]) -> tuple[int, ...]:
        """What each rank wrote: the files that all ranks have one of, and those of the plan; the
        first one all else."""
        owners = dict(self._owners)
        for rank in range(self._world):
            owners |= {random_states.file_name(rank): rank, of_ranks.file_name(rank): rank}
        sizes = [0] * self._world
        for entry in entries:
            sizes[owners.get(entry.name, 0)] += entry.size_bytes
        return tuple(sizes)


def _refuse_other(stack: Any) -> None:
    if not isinstance(stack, MegatronStack):
        raise UsageError(
            "ucp.save is for megatron-core's own stack",
            expected="what ucp.attach_megatron returned",
            found=type(stack).__name__,
            fix="an engine of DeepSpeed saves by its own engine.save_checkpoint",
        )


class _Job:
    """One save on its way: what is written, the same on every rank, and what this rank has."""

    def __init__(self, stack: MegatronStack, states: PresentStates, output: StackOutput) -> None:
        self.stack, self.states, self.output = stack, states, output
        self.live, self.manifest = states.live, states.manifest
        self.own = values_of(self.live)
        self.notes = list(self.live.own.taken_as)
        self.kind = kind_of(stack.optimizer)

    def common(self, arguments: Any, file: str) -> CommonFile:
        """What stands in `common.pt`."""
        stack = self.stack
        client = {
            ARGUMENTS_KEY: {**flags_of_model(stack), **plain_flags(arguments)},
            OPERATIONS: stack.floating_point_operations,
        }
        extras = extras_of(self.live, client)
        mesh, apart = stack.mesh, stack.mesh.experts_apart
        return CommonFile(self.manifest, extras, mesh, file, self.kind, apart)
