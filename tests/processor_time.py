"""Processor seconds: of a command with all that it starts, and of each test.

    python3 tests/processor_time.py REPORT NAME command...
    python3 tests/processor_time.py REPORT

The first line runs a command and adds a line of JSON to the file REPORT: its name, wall seconds and
processor seconds. Whatever the command leaves behind becomes a child of this program (Linux's
PR_SET_CHILD_SUBREAPER), so that fork servers and killed ranks are counted too. The second line
prints the file. Needs Python alone.
"""

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
import zlib
from pathlib import Path
from typing import Any

_PR_SET_CHILD_SUBREAPER = 36
_LEFT_S = 5.0  # that what a command left behind may go on


def with_descendants(pid: int) -> float:
    """Processor seconds of a process, of what its main thread started, and of those that ended and
    were waited for. 0 where there is no such process: who waited for it has its seconds."""
    process = Path(f"/proc/{pid}")
    try:
        fields = (process / "stat").read_text().rpartition(")")[2].split()
        children = [*map(int, (process / f"task/{pid}/children").read_text().split())]
    except OSError:
        return 0.0
    own = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    return own + sum(map(with_descendants, children))


def unit_s() -> float:
    """Processor seconds of a piece of work that is always the same: how fast this machine is now,
    beside what else it does."""
    before = time.process_time()
    numbers = sorted(str(number * 7919 % 100003) for number in range(200_000))
    zlib.crc32(json.dumps(numbers).encode())
    return time.process_time() - before


def run(report: Path, name: str, *command: str) -> int:
    """The exit code of the command, which gets all signals that its terminal sends."""
    unit = unit_s()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    started = time.monotonic()
    running = subprocess.Popen(command)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    code = _reap(running.pid)
    wall = time.monotonic() - started
    _reap_what_is_left()
    line = {"name": name, "wall_s": wall, "processor_s": sum(os.times()[2:4])}
    with report.open("a") as file:
        file.write(json.dumps({**line, "unit_s": max(unit, unit_s())}) + "\n")
    return code if code >= 0 else 128 - code


def read(report: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in report.read_text().splitlines()]


def show(report: Path) -> None:
    cores = os.cpu_count() or 1
    for one in read(report):
        wall, used = one["wall_s"], one["processor_s"]
        share = used / (wall * cores)
        print(f"run: {one['name']:8} {wall:6.0f} s, processor {used:6.0f} s, ", end="")
        print(f"{share:4.0%} of {cores} cores")


def _reap(command: int) -> int:
    """Waits for the command, and for all that become children of this process in the meantime: who
    looks for them must not find them. The command's exit code."""
    while True:
        pid, status = os.wait()
        if pid == command:
            return os.waitstatus_to_exitcode(status)


def _reap_what_is_left() -> None:
    ends = time.monotonic() + _LEFT_S
    while time.monotonic() < ends:
        try:
            if os.waitpid(-1, os.WNOHANG) == (0, 0):
                time.sleep(0.05)
        except ChildProcessError:
            return


if __name__ == "__main__":
    if sys.argv[2:]:
        sys.exit(run(Path(sys.argv[1]), *sys.argv[2:]))
    show(Path(sys.argv[1]))
