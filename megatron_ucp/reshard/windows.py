"""Reads what a plan says window by window, from several threads, in memory that does not grow with the model."""

import os
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import torch

from megatron_ucp.core.manifest import Manifest
from megatron_ucp.core.plan import Slot, Want, Windows, make_plan, one_state, prove
from megatron_ucp.formats.base import Where
from megatron_ucp.formats.opened import Checkpoint
from megatron_ucp.formats.pickle_values import ITEMSIZE
from megatron_ucp.formats.pt_file import Record
from megatron_ucp.reshard.execute import DTYPES, Run, check_runs, execute

WINDOW_BYTES = 2 * 2**20  # fits a core's cache: every byte is read, summed and looked at there


class WindowReader:
    """One source. What is read was planned and proved as a whole before; what was read can be checked afterwards."""

    def __init__(self, source: Checkpoint, allow: frozenset[str] = frozenset()) -> None:
        self.source, self.allow, self.read_bytes = source, allow, 0
        self._lock = threading.Lock()
        self._places: dict[Slot, Where] = {}
        self._runs: list[Run] = []
        self._records: dict[tuple[str, str], Record] = {}

    def prove(self, target: Manifest, wants: Iterable[Want], allow: frozenset[str] = frozenset()) -> None:
        """Plans what will be read into a target, and looks every place up. Raises a UcpError."""
        plan = make_plan(self.source.manifest, target, list(wants), self.allow | allow)
        prove(one_state(plan), self.source.manifest, target)
        self._places.update((slot, self.source.where(slot)) for slot in plan.sources if slot not in self._places)

    def windows(self, target: Manifest, allow: frozenset[str] = frozenset()) -> Windows:
        """For one thread, which asks `fill` with it."""
        return Windows(self.source.manifest, target, self.allow | allow)

    def fill(self, windows: Windows, slot: Slot, state: str, low: int, memory: torch.Tensor) -> None:
        """Reads elements from `low` of a slot into memory of the slot's dtype, which is filled."""
        plan = windows.plan(slot, state, low, low + memory.numel())
        counts = execute(plan, self._places.__getitem__, lambda _: memory)
        with self._lock:
            self.read_bytes += counts.read_bytes
            self._runs += counts.runs
            self._records.update(counts.records)
            for source in plan.sources:
                where = self._places[source]
                self._records.setdefault((where.file.path, where.record.name), where.record)

    def check(self, thorough: bool) -> None:
        """Compares what was read with the CRC-32 of its records; `thorough`: every record, and what nobody needed is read for
        that. Raises DamagedFileError."""
        summed = {key: record for key, record in self._records.items() if self.source.opened(key[0]).has_checksums}
        self.read_bytes += check_runs(self._runs, summed, self.source.opened, thorough=thorough)[2]


def pool() -> ThreadPoolExecutor:
    """A thread for each core: reading, summing and copying let go of the interpreter. torch's own threads would be too many."""
    return ThreadPoolExecutor(os.cpu_count(), initializer=torch.set_num_threads, initargs=(1,))


class Memory(threading.local):
    """A window of each thread's own."""

    def take(self, elems: int, dtype: str, which: int = 0) -> torch.Tensor:
        """Of that many elements; `which` tells several windows of a thread apart. The next call for it overwrites them."""
        held: dict[int, torch.Tensor] = self.__dict__.setdefault("held", {})
        if which not in held:
            held[which] = torch.empty(WINDOW_BYTES, dtype=torch.uint8)
        return held[which][:elems * ITEMSIZE[dtype]].view(DTYPES[dtype])
