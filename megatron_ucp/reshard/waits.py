"""A rank that waits long for others says for whom: which ranks have not come to which step."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from megatron_ucp import say

LONG_S = 30.0  # that others may be late before anybody asks for whom one waits
MOST_NAMED = 8  # ranks that a message names


class StepsOfRanks:
    """At which step each rank is, in a store of torch's that all of them reach: one entry for each
    rank, the number of its step and what it does there."""

    def __init__(self, store: Any, rank: int, world: int, name: str = "") -> None:
        self._store, self._name = store, name
        self._rank, self._world = rank, world

    def says(self, number: int, what: str) -> None:
        with suppress(RuntimeError):  # the store goes with rank 0, which the next agreement says
            self._store.set(f"{self._name}rank {self._rank}", f"{number} {what}")

    def late(self, number: int) -> Iterator[tuple[int, str]]:
        """The ranks that have not come to a step, with what each one did last."""
        with suppress(RuntimeError):
            for rank in range(self._world):
                key = f"{self._name}rank {rank}"
                said = (
                    self._store.get(key).decode() if self._store.check([key]) else "0 nothing yet"
                )
                step, _, what = said.partition(" ")
                if int(step) < number:
                    yield rank, what


@dataclass(frozen=True)
class _Step:
    """One agreement, which all ranks come to as their `number`-th one."""

    number: int
    what: str
    since: float


class _Watch:
    """Looks from a thread of its own, once in a while, whether this rank still waits for the same
    step. Ranks that wait leave word in the store of the default process group."""

    def __init__(self) -> None:
        self.step: _Step | None = None
        self._group: Any = None
        self._number = 0
        self._wakes = threading.Event()
        self._thread: threading.Thread | None = None

    def begins(self, what: str) -> None:
        import torch.distributed as dist

        if self._group is not dist.group.WORLD:
            self._group, self._number = dist.group.WORLD, 0
        self._number += 1
        self.step = _Step(self._number, what, time.monotonic())
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._look, name="ucp-waits", daemon=True)
            self._thread.start()

    def ends(self) -> None:
        self.step = None

    def _look(self) -> None:
        said = None
        while True:
            self._wakes.wait(min(5.0, LONG_S / 4))
            step = self.step
            if step is not None and step is not said and time.monotonic() - step.since > LONG_S:
                said = step
                with suppress(Exception):  # no store that can tell, or a group that is gone
                    self._say(step)

    def _say(self, step: _Step) -> None:
        """The first rank that waits looks who else came, a moment later, and says who did not."""
        import torch.distributed as dist
        from torch.distributed.distributed_c10d import _get_default_store

        store, rank, world = _get_default_store(), dist.get_rank(), dist.get_world_size()
        steps = StepsOfRanks(store, rank, world, "megatron_ucp waits, ")
        steps.says(step.number, step.what)
        if store.add(f"megatron_ucp waits for step {step.number}", 1) > 1:
            return
        time.sleep(min(2.0, LONG_S / 4))
        late = [other for other, _ in steps.late(step.number)]
        if late and self.step is step:
            named = ", ".join(map(str, late[:MOST_NAMED])) + " ..." * (len(late) > MOST_NAMED)
            say.note_of_rank(
                f"rank {rank} has waited for {time.monotonic() - step.since:.0f} s in {step.what}: "
                f"{len(late)} of {world} ranks have not come to it: rank {named}"
            )


_WATCH = _Watch()


@contextmanager
def waiting(what: str, ranks: Any = None) -> Iterator[None]:
    """What is done inside waits for the other ranks of the default process group."""
    import torch.distributed as dist

    if ranks is not None and (ranks.world == 1 or not ranks.is_default):
        yield
        return
    if not dist.is_initialized() or dist.get_world_size() == 1:
        yield
        return
    _WATCH.begins(what)
    try:
        yield
    finally:
        _WATCH.ends()
