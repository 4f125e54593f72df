"""Conversions killed at random moments: the output is whole or not there, and the next conversion
succeeds.

    python -m tests.reshard.killed SOURCE FOLDER --trials 10 --seed 1

Prints a line of JSON for each trial. The package is imported once: every conversion is a fork of
this process.
"""

import argparse
import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import megatron_ucp as ucp
from megatron_ucp.reshard import folder as module
from megatron_ucp.reshard.convert import convert  # before the fork, as are torch and the rest

TARGETS = [
    ("native", ucp.Mesh(dp=4, zero=3)),
    ("universal", None),
    ("native", ucp.Mesh(dp=1, zero=1)),
]


WROTE = module.FileOnItsWay.wrote


def slowly(*args: Any, **kwargs: Any) -> None:
    """A disk that takes its time: without it most kills of so small a conversion fall before its
    first file or after its last."""
    time.sleep(0.01)
    WROTE(*args, **kwargs)
    time.sleep(0.01)


def start(source: str, output: Path, number: int) -> int:
    """A child that converts; its pid."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        module.FileOnItsWay.wrote = slowly
        to, mesh = TARGETS[number % len(TARGETS)]
        convert(source, output, to=to, target=mesh)
        code = 0
    finally:
        sys.stderr.flush()
        os._exit(code)


def finish(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("source")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--trials", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    dice = random.Random(args.seed)
    lasts = [whole(args.source, args.folder, number) for number in range(len(TARGETS))]
    for number in range(args.trials):
        after_s = dice.uniform(0.0, 1.1 * lasts[number % len(TARGETS)])
        print(json.dumps(trial(args.source, args.folder, number, after_s)), flush=True)


def whole(source: str, folder: Path, number: int) -> float:
    """How long a conversion lasts that nobody kills."""
    started = time.monotonic()
    if finish(start(source, folder / f"whole{number}", number)):
        sys.exit("a conversion that nobody killed failed")
    return time.monotonic() - started


def trial(source: str, folder: Path, number: int, after_s: float) -> dict[str, bool]:
    """A conversion that is killed: what is there, whether it is whole, whether a second one
    works."""
    output = folder / f"trial{number}"
    pid = start(source, output, number)
    time.sleep(after_s)
    os.kill(pid, signal.SIGKILL)
    killed = finish(pid) == -signal.SIGKILL
    there, left = output.exists(), (folder / f".trial{number}.saving").exists()
    equal = again = True
    if there:
        equal = ucp.diff(source, output) == [] and ucp.verify(output, deep=True).findings == ()
    else:
        code = finish(start(source, output, number))
        again = code == 0 and ucp.diff(source, output) == []
    return {"killed": killed, "there": there, "left": left, "equal": equal, "again": again}


if __name__ == "__main__":
    main()
