"""Reads what a plan says window by window, from several threads, in memory that does not grow with
the model."""

import os
import threading
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from megatron_ucp.core.manifest import Manifest
from megatron_ucp.core.plan import Mean, Op, Plan, Slot, Want, Windows, make_plan
from megatron_ucp.core.proof import one_state, prove
from megatron_ucp.formats.base import Record, Source, Where
from megatron_ucp.formats.pt.values import ITEMSIZE
from megatron_ucp.reshard.execute import (
    TORCH_DTYPES,
    Counts,
    Staging,
    SummedRun,
    bytes_of,
    check_runs,
    execute,
    read_run,
)

WINDOW_BYTES = 2 * 2**20  # fits a core's cache: every byte is read, summed and looked at there
# The next window of a transposed tensor reads the bytes between the rows of this one: reading them
# twice costs less than a system call for each row.
MOST_OVER_GAPS = 4
THREADS = min(os.cpu_count() or 1, 8)  # each has windows of its own
# What is stored transposed is written in larger windows: one that is not a whole tensor reads the
# bytes between its columns too. They share this memory, which must not grow with the machine.
WIDE_WINDOW_BYTES = 52 * 2**20 // THREADS


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


def _fits_a_window(target: Manifest, slot: Slot) -> bool:
    buffer = target.buffers[slot.buffer].of(slot.state)
    size = ITEMSIZE[dict(buffer.states)[slot.state]]
    return buffer.elems(slot.part) * size <= WIDE_WINDOW_BYTES


class _ThreadsOwn(threading.local):
    """What each thread has for itself: plans of windows by the id of their target, and staging."""

    def __init__(self) -> None:
        self.windows: dict[int, Windows] = {}
        self.staging, self.memory = Staging(WINDOW_BYTES), Memory()


class WindowReader:
    """One source. What is read was planned and proved as a whole before; what was read can be
    checked afterwards."""

    def __init__(self, source: Source, allow: frozenset[str] = frozenset()) -> None:
        self.source, self.allow, self.read_bytes = source, allow, 0
        self._lock, self._local = threading.Lock(), _ThreadsOwn()
        self._targets: dict[int, tuple[Manifest, frozenset[str]]] = {}
        self._straight: dict[tuple[int, Slot, str], list[_Straight]] = {}
        self._whole: dict[
            tuple[int, Slot, str], Plan
        ] = {}  # of the others, where nothing is padding
        self._places: dict[Slot, Where] = {}
        self._runs: list[SummedRun] = []
        self._records: dict[tuple[str, str], Record] = {}

    def prove(
        self, target: Manifest, wants: Iterable[Want], allow: frozenset[str] = frozenset()
    ) -> None:
        """Plans what will be read into a target, and looks every place up. Raises a UcpError."""
        plan = make_plan(self.source.manifest, target, list(wants), self.allow | allow)
        apart = self.source.manifest.uncut | target.uncut
        prove(one_state(plan, apart), self.source.manifest, target)
        self._targets[id(target)] = target, self.allow | allow
        self._places.update(
            (slot, self.source.where(slot)) for slot in plan.sources if slot not in self._places
        )
        ops: dict[Slot, list[Op]] = {slot: [] for slot, _ in plan.wants}
        for op in plan.ops:
            ops[op.target.slot].append(op)
        padded = {fill.slot for fill in plan.fills}
        for want in plan.wants:
            key, own = (id(target), *want), ops[want[0]]
            runs = _straight_runs(own)
            if runs is not None:
                self._straight[key] = runs
            elif want[0] not in padded and _fits_a_window(target, want[0]):
                self._whole[key] = Plan((want,), tuple(own), ())

    def fill(
        self, target: Manifest, slot: Slot, state: str, low: int, memory: torch.Tensor
    ) -> None:
        """Reads elements from `low` of a slot of a target that was proved into memory of its dtype,
        which is filled."""
        counts, sources = Counts(), set[Slot]()
        runs = self._straight.get((id(target), slot, state))
        if runs is not None:
            self._fill_straight(runs, low, memory, counts, sources)
        else:
            plan = self._plan(target, slot, state, low, low + memory.numel())
            counts, sources = (
                execute(
                    plan,
                    self._places.__getitem__,
                    lambda _: memory,
                    over_gaps=MOST_OVER_GAPS,
                    staging=self._local.staging,
                ),
                {*plan.sources},
            )
        with self._lock:
            self.read_bytes += counts.read_bytes
            self._runs += counts.runs
            self._records.update(counts.records)
            for source in sources:
                where = self._places[source]
                self._records.setdefault((where.file.path, where.record.name), where.record)

    def _fill_straight(
        self,
        runs: list[_Straight],
        low: int,
        memory: torch.Tensor,
        counts: Counts,
        sources: set[Slot],
    ) -> None:
        """Without a plan for the window, which takes longer than reading it. What changes its
        dtype goes through memory of the thread's own."""
        filled, data = 0, bytes_of(memory)
        for run in runs[max(0, bisect_right(runs, low, key=lambda run: run.start) - 1) :]:
            first, last = max(run.start, low), min(run.start + run.elems, low + memory.numel())
            if run.start >= low + memory.numel():
                break
            if first < last:
                where = self._places[run.source]
                size = ITEMSIZE[where.dtype]
                at = where.offset_bytes + (run.offset + first - run.start) * size
                if TORCH_DTYPES[where.dtype] == memory.dtype:
                    part = data[(first - low) * size : (last - low) * size]
                    read_run(where, at, part, counts)
                else:
                    held = self._local.memory.take(last - first, where.dtype)
                    read_run(where, at, bytes_of(held), counts)
                    memory[first - low : last - low].copy_(held)
                sources.add(run.source)
                filled += last - first
        if filled < memory.numel():  # padding, between runs or behind them
            self._zero(runs, low, memory)

    def _zero(self, runs: list[_Straight], low: int, memory: torch.Tensor) -> None:
        at = 0
        for run in runs:
            first, last = (
                min(max(edge - low, 0), memory.numel())
                for edge in (run.start, run.start + run.elems)
            )
            memory[at : max(at, first)].zero_()
            at = max(at, last)
        memory[at:].zero_()

    def _plan(self, target: Manifest, slot: Slot, state: str, low: int, high: int) -> Plan:
        """Of a window of a slot. One that is all of it was planned before."""
        elems = target.buffers[slot.buffer].of(slot.state).elems(slot.part)
        if (low, high) == (0, elems) and (id(target), slot, state) in self._whole:
            return self._whole[id(target), slot, state]
        return self._windows(target).plan(slot, state, low, high)

    def _windows(self, target: Manifest) -> Windows:
        """This thread's."""
        held = self._local.windows
        if id(target) not in held:
            held[id(target)] = Windows(self.source.manifest, *self._targets[id(target)])
        return held[id(target)]

    def check(self, thorough: bool) -> None:
        """Compares what was read with the CRC-32 of its records; `thorough`: every record, and what
        nobody needed is read for that. Raises DamagedFileError."""
        summed = {
            key: record
            for key, record in self._records.items()
            if self.source.opened(key[0]).has_checksums
        }
        self.source.check_read()
        self.read_bytes += check_runs(self._runs, summed, self.source.opened, thorough=thorough)[2]


def pool() -> ThreadPoolExecutor:
    """A thread for each core: reading, summing and copying let go of the interpreter. torch's own
    threads would be too many."""
    return ThreadPoolExecutor(THREADS, initializer=torch.set_num_threads, initargs=(1,))


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
