"""Conversions by processes as torchrun starts them, one of which dies or has no room.

    python -m tests.reshard.launched SOURCE FOLDER full kill --trials 10 --seed 1

Prints a line of JSON for each trial. The package is imported once: every process is a fork of this
one.
"""

import argparse
import json
import os
import random
import resource
import signal
import socket
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # as the command sets it, before torch comes

import torch.distributed

from megatron_ucp.cli import main
from megatron_ucp.reshard import folder as module
from megatron_ucp.reshard.convert import convert  # before the fork, as are torch and the rest
from tests.reshard.killed import WROTE

LOADED = (convert, torch.distributed)
WAYS = (["--to", "universal"], ["--mesh", "dp=4,zero=3"], ["--mesh", "dp=2,zero=1"])
WHAT = ("whole", "flag", "full", "kill")
Words = Sequence[str]


class Trial:
    """Processes that share one command. `before` is what one of them does first, by its rank."""

    def __init__(
        self, folder: Path, words: Words, world: int, before: dict[int, Callable[[], Any]]
    ) -> None:
        self.folder, self.world = folder, world
        folder.mkdir(parents=True)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.started = time.monotonic()
        self.pids = [self._start(words, rank, port, before.get(rank)) for rank in range(world)]

    def _start(self, words: Words, rank: int, port: int, before: Any) -> int:
        pid = os.fork()
        if pid:
            return pid
        code = 99
        try:
            for number, name in ((1, "out"), (2, "err")):
                file = os.open(self.folder / f"{name}{rank}", os.O_WRONLY | os.O_CREAT)
                os.dup2(file, number)
            places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": self.world}
            places |= {"LOCAL_WORLD_SIZE": self.world, "MASTER_ADDR": "127.0.0.1"}
            places |= {"MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "none"}
            os.environ.update({name: str(value) for name, value in places.items()})
            if before is not None:
                before()
            code = main([*words])
        except BaseException:  # a defect: its traceback is what the test shows
            traceback.print_exc()
        finally:
            os._exit(code)

    def end(self, within_s: float = 60.0) -> dict[str, Any]:
        """What all processes did: exit codes, texts, and how long after the start they ended. When
        one was killed all others are ended, as torchrun does it. Those that hang are killed, and
        have the code None."""
        codes: dict[int, int | None] = {}
        while len(codes) < self.world and time.monotonic() < self.started + within_s:
            for rank, pid in enumerate(self.pids):
                if rank not in codes:
                    done, status = os.waitpid(pid, os.WNOHANG)
                    if done:
                        codes[rank] = os.waitstatus_to_exitcode(status)
                        if codes[rank] == -signal.SIGKILL:
                            time.sleep(1)
                            for other in {*range(self.world)} - {*codes}:
                                os.kill(self.pids[other], signal.SIGTERM)
            time.sleep(0.01)
        seconds = time.monotonic() - self.started
        for rank, pid in enumerate(self.pids):
            if rank not in codes:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        texts = {
            name: [(self.folder / f"{name}{rank}").read_text() for rank in range(self.world)]
            for name in ("out", "err")
        }
        return {"codes": [codes.get(rank) for rank in range(self.world)], **texts, "s": seconds}


def slowly(*args: Any, **kwargs: Any) -> None:
    """A disk that takes its time: kills are to fall into conversions."""
    time.sleep(0.02)
    WROTE(*args, **kwargs)
    time.sleep(0.02)


def small_disk() -> None:
    """Of this process alone."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (300, limit))


def main_() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("source")
    parser.add_argument("folder", type=Path)
    parser.add_argument("what", choices=WHAT, nargs="+")
    parser.add_argument("--trials", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    dice = random.Random(args.seed)
    for what in args.what:
        if what == "kill":
            module.FileOnItsWay.wrote = slowly
        for number in range(args.trials if what == "kill" else 1):
            print(json.dumps(trial(args, what, number, dice)), flush=True)


LASTS: dict[int, float] = {}  # how long each way lasts whom nobody disturbs


def trial(args: Any, what: str, number: int, dice: random.Random) -> dict[str, Any]:
    """One command that three processes share; `what` happens to one of them."""
    name, way = f"{what}{number}", number % len(WAYS)
    output, log = args.folder / "out" / name, args.folder / "log"
    words, world, victim = ["convert", args.source, str(output), *WAYS[way]], 3, dice.randrange(3)
    before = dict[int, Callable[[], Any]]()
    if what == "flag":
        words += ["--latestt"]
    if what == "full":
        before[2] = small_disk
    if what == "kill" and way not in LASTS:
        whole = [*words[:2], str(args.folder / f"calm{way}"), *words[3:]]
        LASTS[way] = Trial(log / f"calm{way}", whole, world, {}).end()["s"]
    started = Trial(log / name, words, world, before)
    if what == "kill":
        time.sleep(LASTS[way] * dice.uniform(0.1, 1.0))
        os.kill(started.pids[victim], signal.SIGKILL)
    found = started.end()
    there, left = output.exists(), output.with_name(f".{output.name}.saving").exists()
    return {**found, "what": what, "victim": victim, "there": there, "left": left}


if __name__ == "__main__":
    main_()
