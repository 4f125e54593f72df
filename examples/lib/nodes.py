"""Nodes of an elastic run, all on this machine: torchrun's agents with their ranks. They meet in a
store that this process holds, so that any of them may die."""

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from . import launcher

POLL_S = 0.02
# A node whose heart has not been heard of for three seconds is gone; a rendezvous waits one second
# for further nodes. torchrun's own values, 15 and 30 seconds, are for networks.
CONFIG = (
    "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3,join_timeout=120,is_host=0"
)


@dataclass
class Rank:
    """A process that was a rank of a node: when it began, and when it was found gone; seconds since
    the epoch."""

    process: psutil.Process
    began: float
    ended: float | None = None


@dataclass
class Node:
    """An agent, and all ranks that it has had."""

    agent: "subprocess.Popen[bytes]"
    log: Path
    ranks: dict[int, Rank] = field(default_factory=dict[int, Rank])

    def living(self) -> list[Rank]:
        return [rank for rank in self.ranks.values() if rank.ended is None]

    def look(self) -> None:
        """Finds ranks that came and went."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in psutil.Process(self.agent.pid).children():
                self.ranks.setdefault(process.pid, Rank(process, process.create_time()))
        for rank in self.living():
            gone = not rank.process.is_running()
            if gone or rank.process.status() == psutil.STATUS_ZOMBIE:
                rank.ended = time.time()


class Nodes:
    """At most `most` nodes at a time. `restarts`: how often an agent starts failed ranks again."""

    def __init__(self, folder: Path, most: int = 2, restarts: int = 3) -> None:
        from torch._C._distributed_c10d import TCPStore

        self.folder, self.most, self.restarts = folder, most, restarts
        self.port = launcher.free_port()
        self._store = TCPStore("127.0.0.1", self.port, is_master=True, wait_for_workers=False)
        self.all: list[Node] = []
        self._done = threading.Event()
        self._watch = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> "Nodes":
        self._watch.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._watch.join()
        for node in self.all:
            kill(node)

    def start(self, ranks: int, script: Sequence[str]) -> Node:
        """A node with so many ranks joins."""
        log = self.folder / f"node{len(self.all)}.log"
        program = [sys.executable, "-m", "torch.distributed.run", "--nnodes", f"1:{self.most}"]
        program += ["--nproc-per-node", str(ranks), "--max-restarts", str(self.restarts)]
        program += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{self.port}"]
        program += ["--rdzv-id", "elastic", "--rdzv-conf", CONFIG, *script]
        # Without the second one a restart would look for ranks that are gone (pytorch 135712).
        extra = {"GLOO_SOCKET_IFNAME": "lo", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        environment = {k: v for k, v in os.environ.items() if k != "LOCAL_SIZE"} | extra
        with log.open("wb") as output:
            agent = subprocess.Popen(
                program,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=launcher.end_with_parent,
                env=environment,
            )
        self.all.append(Node(agent, log))
        return self.all[-1]

    def wait(self, node: Node, timeout_s: float) -> int:
        """The exit code of an agent. Raises subprocess.TimeoutExpired."""
        return node.agent.wait(timeout=timeout_s)

    def _look(self) -> None:
        while not self._done.wait(POLL_S):
            for node in list(self.all):
                node.look()


def kill(node: Node) -> None:
    """As a power cut. Does nothing to one that is gone."""
    launcher.kill(node.agent)
