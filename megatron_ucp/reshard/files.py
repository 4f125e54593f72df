"""The files of a checkpoint as a source: what a plan says is read window by window, from several
threads, in memory that does not grow with the model."""

import os
import threading
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch

from megatron_ucp.core.flat import FlatBuffer
from megatron_ucp.core.manifest import Manifest
from megatron_ucp.core.names import MASTER
from megatron_ucp.core.plan import Mean, Op, Plan, Slot, Windows, joined
from megatron_ucp.formats.byte_files import Record, Where
from megatron_ucp.formats.checkpoint import Checkpoint, Readable
from megatron_ucp.formats.pt.refs import ITEMSIZE
from megatron_ucp.reshard import agree
from megatron_ucp.reshard.checksums import SummedRun, check_runs
from megatron_ucp.reshard.engine import Engine
from megatron_ucp.reshard.execute import (
    TORCH_DTYPES,
    Counts,
    OfOp,
    Staging,
    TensorOf,
    bytes_of,
    execute,
    read_run,
)
from megatron_ucp.reshard.transfer import Lost, Proved, SinkPart, TransferRun, lost_in_casts, proved

_AHEAD_BYTES = 16 * 2**20  # of what one thread reads, window by window
WINDOW_BYTES = 2 * 2**20  # fits a core's cache: every byte is read, summed and looked at there
# The next window of a transposed tensor reads the bytes between the rows of this one: reading them
# twice costs less than a system call for each row.
MOST_OVER_GAPS = 4
THREADS = min(os.cpu_count() or 1, 8)  # each has windows of its own
# What is stored transposed is written in larger windows: one that is not a whole tensor reads the
# bytes between its columns too. They share this memory, which must not grow with the machine.
WIDE_WINDOW_BYTES = 52 * 2**20 // THREADS


def pool(processes: int = 1) -> ThreadPoolExecutor:
    """A thread for each core: reading, summing and copying let go of the interpreter. torch's own
    threads would be too many. Of `processes` that share the cores each has as many."""
    threads = max(1, THREADS // processes)
    return ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,))


class Memory:
    """Windows that are used again."""

    def __init__(self) -> None:
        self._held: dict[int, torch.Tensor] = {}

    def take(self, elems: int, dtype: str, which: int = 0) -> torch.Tensor:
        """Of that many elements; `which` tells several windows apart. The next call for it
        overwrites them."""
        held, size = self._held, elems * ITEMSIZE[dtype]
        if which not in held or len(held[which]) < size:
            held[which] = torch.empty(max(size, WINDOW_BYTES), dtype=torch.uint8)
        return held[which][:size].view(TORCH_DTYPES[dtype])


class ThreadMemory(Memory, threading.local):
    """Windows of each thread's own."""


class FileSource:
    """A checkpoint. `checkpoint` gives manifest and places; `read_bytes` counts what was read.
    `masters` are what it is a copy of, rounded: values are compared with those."""

    def __init__(
        self, checkpoint: Readable, file: str = "", masters: Readable | None = None
    ) -> None:
        self.checkpoint, self.file, self.manifest = checkpoint, file, checkpoint.manifest
        self.masters = self if masters is None else FileSource(masters, file)
        self.all_looked_at = masters is not None
        self.places: dict[Slot, Where] = {}
        self.read_bytes = 0
        self._lock = threading.Lock()
        self._runs: list[SummedRun] = []
        self._records: dict[tuple[str, str], Record] = {}

    def manifest_of(self, part: int) -> Manifest:
        return self.manifest

    def locate(self, one: Proved) -> None:
        """Looks up where the sources of a plan lie. Raises a UcpError."""
        self.places.update(self.checkpoint.locate(one.plan.sources - self.places.keys()))

    def windows(self, one: Proved) -> "FileWindows":
        return FileWindows(self, one)

    def took(self, counts: Counts, slots: set[Slot]) -> None:
        """Notes what was read of some slots, for `check`."""
        with self._lock:
            self.read_bytes += counts.read_bytes
            self._runs += counts.runs
            self._records.update(counts.records)
            for where in map(self.places.__getitem__, slots):
                self._records.setdefault((where.file.path, where.record.name), where.record)

    def check(self, thorough: bool) -> None:
        """Compares what was read with the CRC-32 of its records; `thorough`: every record, and what
        nobody needed is read for that. Raises DamagedFileError."""
        opened = self.checkpoint.opened
        summed = {k: record for k, record in self._records.items() if opened(k[0]).has_checksums}
        self.checkpoint.check_read()
        self.read_bytes += check_runs(self._runs, summed, opened, thorough=thorough)[2]


class SharedFiles(FileSource):
    """The files of a checkpoint that all ranks read, each what it needs. `sums` are bytes: read by
    this rank, checked and not checked by all of them; `read_by_all` those of all ranks."""

    def __init__(self, checkpoint: Checkpoint, file: str, checksums: bool) -> None:
        super().__init__(checkpoint, file)
        world = agree.world()[1]
        paths = map(checkpoint.full_path, checkpoint.file_names)
        self._checkers = {path: number % world for number, path in enumerate(paths)}
        self.sums, self.read_by_all = (0, 0, 0), 0
        self._checksums, self._counts = checksums, Counts()
        self._staging = Staging(WINDOW_BYTES)  # of windows

    def fill(
        self, parts: Sequence[Proved], into: TensorOf, run: TransferRun, is_summed: OfOp
    ) -> None:
        """Fills every slot of some parts in place, in the order of the files. Checksums are taken
        of records of which an operation `is_summed`."""
        plan, where = joined([one.plan for one in parts]), self.places.__getitem__
        summed: OfOp = is_summed if self._checksums else lambda _: False
        self._counts += execute(plan, where, into, is_summed=summed, progress=run.progress)

    def fill_window(self, plan: Plan, memory: torch.Tensor, is_summed: OfOp) -> None:
        """Fills a window of a slot by the plan of that window."""
        self._counts += execute(
            plan,
            self.places.__getitem__,
            lambda _: memory,
            is_summed=is_summed if self._checksums else lambda _: False,
            over_gaps=MOST_OVER_GAPS,
            staging=self._staging,
        )

    def check_records(self, slots: Iterable[Slot]) -> None:
        """Compares every record that holds some slots with its CRC-32, reading it again. Raises
        DamagedFileError."""
        places = [self.places[slot] for slot in slots]
        found = {(where.file.path, where.record.name): where for where in places}
        for _, where in sorted(found.items()):
            if where.file.has_checksums:
                where.file.check(where.record)

    def lost(self, engine: Engine, plan: Plan) -> Lost:
        """What of a plan's values was lost as they were rounded."""
        return lost_in_casts(engine, self.checkpoint, plan)

    def check(self, thorough: bool) -> None:
        """Compares the sums of all ranks' runs, each rank a share of the records. Collective."""
        counts, own = self._counts, self._counts.read_bytes
        found = agree.total(own, counts.unsummed_bytes, len(counts.runs))
        self.read_by_all, unsummed, run_count = found
        self.sums = own, 0, unsummed
        if not run_count:
            return
        given: dict[int, tuple[list[SummedRun], dict[tuple[str, str], Record]]] = {}
        for run in counts.runs:
            # the rank that looked into a file before compares what all of them read of it
            checker = self._checkers.get(run.file, 0)
            runs, records = given.setdefault(checker, ([], {}))
            runs.append(run)
            records[run.file, run.record] = counts.records[run.file, run.record]
        came = agree.delivered(given)
        with agree.merging(lambda one, other: tuple(map(int.__add__, one, other))) as block:
            runs = [run for own_runs, _ in came.values() for run in own_runs]
            every = {key: one for _, records in came.values() for key, one in records.items()}
            block.value = sums = check_runs(runs, every, self.checkpoint.opened)
        checked, unchecked, more = block.result
        self.sums = own + sums[2], checked, unsummed + unchecked
        self.read_by_all += more


@dataclass(frozen=True, slots=True)
class _Straight:
    """A run of a slot that lies in one piece in the source too: `elems` elements from `start`,
    there from `offset`."""

    start: int
    elems: int
    source: Slot
    offset: int


def _straight_runs(ops: Sequence[Op]) -> list[_Straight] | None:
    """The operations of a slot as runs, in order; None where one of them is not straight."""
    runs: list[_Straight] = []
    for op in ops:
        if (
            isinstance(op, Mean)
            or op.shape != (op.box.numel,)
            or op.source.strides != (1,)
            or op.target.strides != (1,)
        ):
            return None
        runs.append(_Straight(op.target.offset, op.shape[0], op.source.slot, op.source.offset))
    return sorted(runs, key=lambda run: run.start)


class _ThreadsOwn(threading.local):
    """What each thread has for itself."""

    def __init__(self) -> None:
        self.planner: Windows | None = None
        self.staging, self.memory = Staging(WINDOW_BYTES), Memory()


class FileWindows:
    """Reads the windows of one part. Several threads use one."""

    def __init__(self, source: FileSource, one: Proved) -> None:
        self._source, self._target, self._allow = source, one.part.target, one.allow
        self._states = dict(one.plan.wants)
        self._straight: dict[Slot, list[_Straight]] = {}
        self._whole: dict[Slot, Plan] = {}  # of the others, where nothing is padding
        self._exact: dict[Slot, FileWindows] = {}
        self._local, self._lock = _ThreadsOwn(), threading.Lock()
        ops: dict[Slot, list[Op]] = {slot: [] for slot in self._states}
        for op in one.plan.ops:
            ops[op.target.slot].append(op)
        padded = {fill.slot for fill in one.plan.fills}
        for slot, own in ops.items():
            runs = _straight_runs(own)
            if runs is not None:
                self._straight[slot] = runs
            elif slot not in padded and self._fits_a_window(slot):
                self._whole[slot] = Plan(((slot, self._states[slot]),), tuple(own), ())

    def fill(self, slot: Slot, low: int, memory: torch.Tensor) -> None:
        """Reads elements from `low` of a slot into memory of its dtype, which is filled."""
        runs = self._straight.get(slot)
        if runs is not None:
            self._source.took(*self._fill_straight(runs, low, memory))
            return
        plan = self._plan(slot, low, low + memory.numel())
        counts = execute(
            plan,
            self._source.places.__getitem__,
            lambda _: memory,
            over_gaps=MOST_OVER_GAPS,
            staging=self._local.staging,
        )
        self._source.took(counts, {*plan.sources})

    def exact(self, slot: Slot, low: int, elems: int) -> torch.Tensor:
        """The elements as they are saved."""
        with self._lock:
            if slot not in self._exact:
                self._exact[slot] = self._as_saved(slot)
            windows = self._exact[slot]
        dtype = windows._buffer(slot).dtype_of(slot.state)
        out = torch.empty(elems, dtype=TORCH_DTYPES[dtype])
        windows.fill(slot, low, out)
        return out

    def window_bytes(self, slot: Slot) -> int:
        """Larger where a tensor is stored with its dims in another order: a window reads what lies
        between, too."""
        members = self._buffer(slot).members
        turned = any(self._target.by_name[one.param].order is not None for one in members)
        return WIDE_WINDOW_BYTES if turned else WINDOW_BYTES

    def _fill_straight(
        self, runs: list[_Straight], low: int, memory: torch.Tensor
    ) -> tuple[Counts, set[Slot]]:
        """Without a plan for the window, which takes longer than reading it. What changes its
        dtype goes through memory of the thread's own."""
        counts, sources = Counts(), set[Slot]()
        filled, high = 0, low + memory.numel()
        for run in runs[max(0, bisect_right(runs, low, key=lambda run: run.start) - 1) :]:
            first, last = max(run.start, low), min(run.start + run.elems, high)
            if run.start >= high:
                break
            if first < last:
                self._read(run, first, memory[first - low : last - low], counts)
                sources.add(run.source)
                filled += last - first
        if filled < memory.numel():  # padding, between runs or behind them
            _zero_between(runs, low, memory)
        return counts, sources

    def _read(self, run: _Straight, first: int, into: torch.Tensor, counts: Counts) -> None:
        """Elements of a run from the slot's element `first` on."""
        where = self._source.places[run.source]
        at = where.offset_bytes + (run.offset + first - run.start) * ITEMSIZE[where.dtype]
        left = (run.start + run.elems - first) * ITEMSIZE[where.dtype]
        where.file.prefetch(where.record, at, min(left, _AHEAD_BYTES))
        if TORCH_DTYPES[where.dtype] == into.dtype:
            read_run(where, at, bytes_of(into), counts)
            return
        held = self._local.memory.take(len(into), where.dtype)
        read_run(where, at, bytes_of(held), counts)
        into.copy_(held)

    def _plan(self, slot: Slot, low: int, high: int) -> Plan:
        """Of a window of a slot. One that is all of it was planned before."""
        buffer = self._buffer(slot)
        if slot in self._whole and (low, high) == (0, buffer.elems(slot.part)):
            return self._whole[slot]
        planner = self._local.planner
        if planner is None:
            planner = Windows(self._source.manifest, self._target, self._allow)
            self._local.planner = planner
        return planner.plan(slot, self._states[slot], low, high)

    def _as_saved(self, slot: Slot) -> "FileWindows":
        """A target that holds the slot in a dtype which keeps every value."""
        source, state = self._source.masters, self._states[slot]
        buffer = self._target.buffers[slot.buffer]
        names = [member.param for member in buffer.members]
        if source is not self._source:
            state = MASTER
        dtype = _widest({source.manifest.states_of(name)[state] for name in names})
        states = tuple((key, dtype if key == slot.state else d) for key, d in buffer.states)
        buffers = list(self._target.buffers)
        buffers[slot.buffer] = replace(buffer, states=states)
        target = replace(self._target, buffers=tuple(buffers))
        return FileWindows(source, proved(source, SinkPart(target, ((slot, state),)), self._allow))

    def _buffer(self, slot: Slot) -> FlatBuffer:
        return self._target.buffers[slot.buffer].of(slot.state)

    def _fits_a_window(self, slot: Slot) -> bool:
        buffer = self._buffer(slot)
        size = ITEMSIZE[buffer.dtype_of(slot.state)]
        return buffer.elems(slot.part) * size <= WIDE_WINDOW_BYTES


def _zero_between(runs: list[_Straight], low: int, memory: torch.Tensor) -> None:
    at = 0
    for run in runs:
        first, last = (
            min(max(edge - low, 0), memory.numel()) for edge in (run.start, run.start + run.elems)
        )
        memory[at : max(at, first)].zero_()
        at = max(at, last)
    memory[at:].zero_()


def _widest(dtypes: set[str]) -> str:
    """A dtype that holds what all of them do."""
    if len(dtypes) == 1:
        return min(dtypes)
    return "float64" if "float64" in dtypes else "float32"
