"""Work that other threads do meanwhile, if need be when nobody else works."""

import ctypes
import os
import platform
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from megatron_ucp.reshard.agree import KeptBack, world

_T = TypeVar("_T")
_R = TypeVar("_R")
LARGE_BYTES = 2**25  # for which threads are begun


class Alongside(threading.Thread):
    """Work that another thread does meanwhile; `is_lowest`: when nobody else works. It needs no
    pool of `concurrent.futures`: these take no work from the moment when the main thread ends."""

    def __init__(self, work: Callable[[], Any], is_lowest: bool = False) -> None:
        super().__init__(name="ucp-alongside", daemon=True)
        self._work, self._is_lowest, self._kept = work, is_lowest, KeptBack()
        self._value: Any = None
        self.start()

    def run(self) -> None:
        if self._is_lowest:
            at_lowest_priority()
        with self._kept:
            self._value = self._work()

    def result(self) -> Any:
        """What the work returned, once it has. Raises what it raised."""
        self.join()
        self._kept.raise_kept()
        return self._value


def in_threads(work: Callable[[_T], _R], items: Sequence[_T], threads: int) -> list[_R]:
    """What `work` returns of each item, in their order: each thread does every so many-th. Raises
    what one of them raised once all have ended: until then they use the memory of the items."""
    parts = [items[number::threads] for number in range(threads)]
    others = [Alongside(partial(_each, work, part)) for part in parts[1:] if part]
    try:
        own = _each(work, parts[0])
    finally:
        for other in others:
            other.join()
    found = [own, *(other.result() for other in others)]
    return [found[number % threads][number // threads] for number in range(len(items))]


def in_own_threads(work: Callable[[_T], _R], items: Sequence[_T], size_bytes: int) -> list[_R]:
    """As `in_threads`, in as many as this rank has where so many bytes are worth it."""
    return in_threads(work, items, threads_of_rank() if size_bytes >= LARGE_BYTES else 1)


def _each(work: Callable[[_T], _R], items: Sequence[_T]) -> list[_R]:
    return [work(item) for item in items]


def threads_of_rank() -> int:
    """How many of the machine's processors this rank has for itself."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "0")) or world()[1]
    return max(1, min(8, (os.cpu_count() or 1) // local))


def at_lowest_priority() -> None:
    """This thread works when nobody else does: of processors, and of disks."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
    _idle_disk()


def _idle_disk() -> None:
    number = {"x86_64": 251, "aarch64": 30}.get(platform.machine())  # ioprio_set(2)
    if number is not None:
        lowest = 2 << 13 | 7  # best effort, level 7: an idle class may never be served
        ctypes.CDLL(None).syscall(number, 1, threading.get_native_id(), lowest)
