"""Processor seconds: of a command with all that it starts, and of each test.

    python3 tests/processor_time.py REPORT NAME command...

runs a command and adds a line of JSON to the file REPORT: its name, wall seconds and processor
seconds, whose unit does not change with what else the machine does. Whatever the command leaves
behind becomes a child of this program (Linux's PR_SET_CHILD_SUBREAPER), so that fork servers and
killed ranks are counted too. Needs Python alone.
"""

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36
_LEFT_S = 5.0  # that what a command left behind may go on


def of_this_process(others: Iterable[int] = ()) -> float:
    """Processor seconds of this process, of all children that it has waited for, and of other
    processes and the children that these have waited for."""
    return sum(os.times()[:4]) + sum(map(_of, others))


def _of(pid: int) -> float:
    """0 where there is none: its parent has its seconds."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def main(report: str, name: str, *command: str) -> int:
    """The exit code of the command, which gets all signals that its terminal sends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    started = time.monotonic()
    with subprocess.Popen(command) as running:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        code = running.wait()
        wall = time.monotonic() - started
    _reap()
    line = {"name": name, "wall_s": round(wall, 1), "processor_s": round(sum(os.times()[2:4]), 1)}
    with Path(report).open("a") as file:
        file.write(json.dumps(line) + "\n")
    return code if code >= 0 else 128 - code


def _reap() -> None:
    """Waits for what the command left behind."""
    ends = time.monotonic() + _LEFT_S
    while time.monotonic() < ends:
        try:
            if os.waitpid(-1, os.WNOHANG) == (0, 0):
                time.sleep(0.05)
        except ChildProcessError:
            return


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
