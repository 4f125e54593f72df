"""Ranks that are threads of one process: agreement among any number of them, in milliseconds."""

import queue
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_ucp.reshard.messages import Ranks

GONE = b"gone"  # what a rank that died leaves in its mailboxes


@dataclass
class Network:
    """The mailboxes of all ranks, by (from, to); and what each rank received."""

    world: int
    boxes: dict[tuple[int, int], "queue.Queue[bytes]"] = field(default_factory=dict)
    received: dict[int, list[int]] = field(default_factory=dict)
    lock: Any = field(default_factory=threading.Lock)

    def box(self, source: int, target: int) -> "queue.Queue[bytes]":
        with self.lock:
            return self.boxes.setdefault((source, target), queue.Queue())

    def dies(self, rank: int) -> None:
        """Its connections close."""
        for other in range(self.world):
            self.box(rank, other).put(GONE)


class ThreadRanks(Ranks):
    """One of them."""

    def __init__(self, network: Network, rank: int) -> None:
        self.network, self.rank, self.world = network, rank, network.world
        network.received[rank] = []

    def move(self, sent: Mapping[int, bytes], sizes: Mapping[int, int]) -> dict[int, bytes]:
        for target, data in sent.items():
            self.network.box(self.rank, target).put(data)
        out: dict[int, bytes] = {}
        for source, size in sizes.items():
            data = self.network.box(source, self.rank).get(timeout=20)
            if data is GONE:
                self.network.box(source, self.rank).put(GONE)
                raise RuntimeError(f"connection closed by rank {source}")
            assert len(data) == size, "two ranks are at different messages"
            self.network.received[self.rank].append(size)
            out[source] = data
        return out


def run(world: int, work: Callable[[ThreadRanks], Any]) -> tuple[list[Any], Network]:
    """What `work` returns on each rank, or the error that it raised there; and the network. Nobody
    waits for longer than twenty seconds."""
    network, found = Network(world), [None] * world
    ranks = [ThreadRanks(network, rank) for rank in range(world)]

    def one(own: ThreadRanks) -> None:
        try:
            found[own.rank] = work(own)
        except BaseException as error:
            found[own.rank] = error

    threads = [threading.Thread(target=one, args=(own,), daemon=True) for own in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive(), "a rank hangs"
    return found, network
