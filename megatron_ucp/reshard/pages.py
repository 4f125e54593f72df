"""Pages of this process's memory: what the system is told of them, and which of them go while the
rest is still read."""

import ctypes
import sys
from bisect import bisect_right
from collections.abc import Iterable
from mmap import PAGESIZE

import torch

POPULATE = 23  # MADV_POPULATE_WRITE of Linux 5.14
_FORGET = 4  # MADV_DONTNEED
NEVER = -1
_MADVISE = ctypes.CDLL(None).madvise if sys.platform == "linux" else None


def advise(start: int, stop: int, advice: int) -> None:
    """Tells the system about the whole pages of addresses [start, stop). One that does not know the
    advice refuses it without harm."""
    first, last = -(-start // PAGESIZE) * PAGESIZE, stop // PAGESIZE * PAGESIZE
    if _MADVISE is not None and first < last:
        _MADVISE(ctypes.c_void_p(first), ctypes.c_size_t(last - first), advice)


class UsedUp:
    """Memory that is read in steps for the last time: each page goes after the step that reads it
    last, and what no step reads goes at once. `held` is all of it, as views; their storages go
    whole, with what else lies in them. Memory of a device stays, and pinned memory: a device would
    go on with the pages that went.

    All reads must be told (`read`) before the first page goes (`let_go`).
    """

    def __init__(self, held: Iterable[torch.Tensor]) -> None:
        pageable = (one for one in held if one.is_cpu and not one.is_pinned())
        storages = {one.data_ptr(): one.untyped_storage() for one in pageable}
        # kept: while they live nothing else gets their addresses
        self._storages = [*storages.values()]
        self._areas = _joined((one.data_ptr(), one.nbytes()) for one in self._storages)
        self._steps = [
            torch.full((_pages(area),), NEVER, dtype=torch.int32) for area in self._areas
        ]
        self._runs: dict[int, list[tuple[int, int]]] | None = None

    def read(self, step: int, memory: torch.Tensor) -> None:
        """A step reads this view of it."""
        if not memory.is_cpu or not memory.numel():
            return
        start = memory.data_ptr()
        number = bisect_right(self._areas, (start, sys.maxsize)) - 1
        if number < 0 or start >= self._areas[number][1]:
            return  # it stays
        begin = self._areas[number][0] // PAGESIZE
        low, high = start // PAGESIZE - begin, -(-(start + memory.nbytes) // PAGESIZE) - begin
        self._steps[number][low:high].clamp_(min=step)

    def let_go(self, step: int) -> None:
        """The pages that a step reads last go; those that none does with step NEVER."""
        if self._runs is None:
            self._runs = self._by_step()
        for start, stop in self._runs.pop(step, ()):
            advise(start, stop, _FORGET)

    def _by_step(self) -> dict[int, list[tuple[int, int]]]:
        """Addresses, by the step after which they go."""
        out: dict[int, list[tuple[int, int]]] = {}
        for (start, stop), steps in zip(self._areas, self._steps, strict=True):
            values, counts = torch.unique_consecutive(steps, return_counts=True)
            at = start // PAGESIZE * PAGESIZE
            for step, count in zip(values.tolist(), counts.tolist(), strict=True):
                end = at + count * PAGESIZE
                # the first and the last page may have other things in them
                out.setdefault(step, []).append((max(at, start), min(end, stop)))
                at = end
        return out


def _pages(area: tuple[int, int]) -> int:
    """How many pages have something of an area."""
    start, stop = area
    return -(-stop // PAGESIZE) - start // PAGESIZE


def _joined(storages: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Addresses [start, stop) of storages, in their order. Those that overlap are one area."""
    out: list[tuple[int, int]] = []
    for start, size in sorted(storages):
        if out and start < out[-1][1]:
            out[-1] = out[-1][0], max(out[-1][1], start + size)
        elif size:
            out.append((start, start + size))
    return out
