"""Ranks that agree beside training: on connections of their own, which no collective of training
meets, and which outlive the process groups of the program."""

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, PrefixStore, TCPStore

from megatron_ucp.errors import RankError
from megatron_ucp.reshard import agree

_START_S = 120.0  # until all ranks are connected
_DONE = "done"
_MESSAGE_BYTES = 64 * 2**20  # that go to another rank at once


def _messages(
    runs: Sequence[tuple[int, torch.Tensor]],
) -> Iterator[tuple[torch.Tensor, int, int]]:
    """Memory of ranks as messages: bytes, the rank, and the number of the message there."""
    counts: dict[int, int] = {}
    for rank, memory in runs:
        for low in range(0, len(memory), _MESSAGE_BYTES):
            number = counts.get(rank, 0)
            counts[rank] = number + 1
            yield memory[low : low + _MESSAGE_BYTES], rank, number


class BesideRanks:
    """All ranks of the default process group. Making one is collective. `gather` may be called by
    another thread than training's, by one at a time."""

    def __init__(self) -> None:
        self.rank, self.world = agree.world()
        self._group: Any = None
        self._store: TCPStore | None = None
        self._turn = 0
        self.doing = "has not begun"
        self._said = ("", "")
        if self.world > 1:
            self._connect()

    def _connect(self) -> None:
        patience, alone = timedelta(seconds=_START_S), False
        if self.rank == 0:
            host = os.environ.get("MASTER_ADDR") or socket.gethostname()
            self._store = TCPStore(host, 0, self.world, True, patience, alone)
        place: Any = None if self._store is None else (self._store.host, self._store.port)
        host, port = agree.gather(place)[0]
        if self.rank:
            self._store = TCPStore(host, port, self.world, False, patience, alone)
        store: Any = self._store
        mine = PrefixStore("agree", store)
        self._group = dist.ProcessGroupGloo(mine, self.rank, self.world, patience)

    def gather(self, value: Any, seconds: float | None = None) -> list[Any]:
        """The value of every rank, by rank. Collective, and waits for `seconds` at most. Raises
        RankError, which names the ranks that are not there and what they do."""
        if self.world == 1:
            return [value]
        patience = timedelta(seconds=max(seconds, 0.001) if seconds is not None else 86400.0)
        self.says(_DONE)
        self._turn += 1
        try:
            return agree.gathered(value, partial(self._exchange, patience))
        except RuntimeError as error:
            raise RankError(
                "the ranks could not agree beside training: one is gone, or takes too long",
                found="; ".join(self._missing()) or str(error).strip().partition("\n")[0],
                fix="look at the output of that rank",
            ) from error

    def _exchange(self, patience: timedelta, data: bytes, size_bytes: int) -> list[bytes]:
        options = AllgatherOptions()
        options.timeout = patience
        mine = agree.filled(data, size_bytes)
        out = [torch.empty_like(mine) for _ in range(self.world)]
        self._group.allgather([out], [mine], options).wait(patience)
        return [part.numpy().tobytes() for part in out]

    def exchange(
        self, sent: Sequence[tuple[int, torch.Tensor]], taken: Sequence[tuple[int, torch.Tensor]]
    ) -> None:
        """Sends flat bytes to ranks, and fills others with what ranks send, in the order in which
        these send it. All that send to each other call it at once. Raises RankError."""
        try:
            # all of them wait for what comes before they send: nobody waits for another's turn
            coming = [self._group.recv([memory], *where) for memory, *where in _messages(taken)]
            for memory, *where in _messages(sent):
                self._group.send([memory], *where).wait()
            for work in coming:
                work.wait()
        except RuntimeError as error:
            raise RankError(
                "what ranks keep for each other did not arrive: one is gone",
                found=str(error).strip().partition("\n")[0],
                fix="look at the output of the other ranks",
            ) from error

    def says(self, what: str) -> None:
        """Keeps what this rank does now for those that wait for it."""
        key = f"{self._turn} of {self.rank}"
        if (key, what) == self._said:
            return
        self.doing, self._said = what, (key, what)
        if self._store is not None:
            with suppress(RuntimeError):  # it goes with rank 0, which `gather` then says
                self._store.set(key, what)

    def _missing(self) -> list[str]:
        """What the ranks do that did not come to this turn."""
        out: list[str] = []
        store: Any = self._store
        with suppress(RuntimeError):
            for rank in range(self.world):
                key = f"{self._turn - 1} of {rank}"
                said = store.get(key).decode() if store.check([key]) else "nothing yet"
                if said != _DONE:
                    out.append(f"rank {rank}: {said}")
        return out
