"""What the ranks do in `benchmarks.resize`."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextlib import nullcontext as nothing
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import megatron_ucp as ucp
from benchmarks.cases import Mesh
from benchmarks.model import make_engine, train_step

# the engine that is resized, and the one that is filled
PAIRS = {
    "ZeRO-1 to ZeRO-3": (Mesh(1), Mesh(3)),
    "ZeRO-3 to ZeRO-1": (Mesh(3), Mesh(1)),
    "ZeRO-2 to ZeRO-3": (Mesh(2), Mesh(3)),
}
OWN = "RssAnon", "RssShmem"  # kinds of memory that a rank adds: its own, and what ranks share
FOLDER = Path("/dev/shm/ucp_benchmark_of_resizes")
# another process: looks at a process until its input ends, and prints the peak of some kinds of its
# memory, together
_WATCH = """
import select, sys
peak, is_new, file, kinds = 0, True, f"/proc/{sys.argv[1]}/status", tuple(sys.argv[2:])
while not select.select([sys.stdin], [], [], 0.002)[0]:
    with open(file) as status:
        lines = [line for line in status if line.startswith(kinds)]
    peak = max(peak, sum(int(line.split()[1]) * 1024 for line in lines))
    if is_new:
        is_new = False
        print("begun", flush=True)
print(peak)
"""


def measure(name: str, size: dict[str, int], repetitions: int) -> dict[str, Any]:
    """Seconds of every way on this rank, by repetition, and bytes; the first round warms up."""
    source, target = PAIRS[name]
    old: Any = ucp.attach(make_engine(source, size), save="direct", durable=False)
    train_step(old, source)
    new: Any = ucp.attach(make_engine(target, size))
    train_step(new, target)
    ways: dict[str, Callable[[], Any]] = {
        "resize": lambda: ucp.resize(old, new),
        "hold and load": lambda: ucp.load(new, ucp.hold(old)),
        "files": lambda: _through_files(old, new),
    }
    had, wanted = _ranges(old), _ranges(new)
    taken, needed = _size(wanted), _size(wanted) - _common(had, wanted)
    ways["copy"] = _copying(taken)
    seconds, extra = _timed(ways, repetitions)
    moved = ucp.resize(old, new).read_bytes
    held = {way: _held(old, release=way == "released") for way in ("kept", "released")}
    old.destroy()
    new.destroy()
    return {
        "seconds": seconds,
        "moved bytes": moved,
        "needed bytes": needed,
        "taken bytes": taken,
        "extra bytes": extra,
        "held bytes": held,
    }


def _timed(
    ways: dict[str, Callable[[], Any]], repetitions: int
) -> tuple[dict[str, list[float]], int]:
    """Seconds of every way, in turns, and by how much a resize makes this process grow."""
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    extra: list[int] = []
    for number in range(repetitions + 1):
        turn = number % len(ways)
        for way in [*ways][turn:] + [*ways][:turn]:
            dist.barrier()
            is_watched = way == "resize" and number > 0
            with peak(extra, *OWN) if is_watched else nothing():
                started = time.perf_counter()
                ways[way]()
                dist.barrier()
                seconds[way].append(time.perf_counter() - started)
    return {way: found[1:] for way, found in seconds.items()}, max(extra, default=0)


def _held(engine: Any, release: bool) -> int:
    """By how much a hold makes this process grow, with what is held."""
    found: list[int] = []
    dist.barrier()
    with peak(found, *OWN):
        held = ucp.hold(engine, release=release)
    held.release()
    return found[0]


def _through_files(old: Any, new: Any) -> None:
    old.save_checkpoint(str(FOLDER), tag="tag")
    ucp.load(new, FOLDER)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(FOLDER)


Ranges = dict[tuple[str, str], list[tuple[int, int]]]


def _ranges(engine: Any) -> Ranges:
    """What a rank has of each parameter and state, as ranges of its elements: these engines cut no
    dim."""
    live, out = engine.ucp.present(), Ranges()
    for number, _, part in live.parts():
        buffer = live.manifest.buffers[number]
        for one in buffer.fragments(part):
            name = buffer.members[one.member].param
            for state, _ in buffer.states:
                out.setdefault((name, state), []).append((one.low, one.high))
    return out


def _size(ranges: Ranges) -> int:
    """Bytes of fp32."""
    return 4 * sum(high - low for found in ranges.values() for low, high in found)


def _common(one: Ranges, other: Ranges) -> int:
    """Bytes that both have."""
    return 4 * sum(
        max(0, min(high, last) - max(low, first))
        for key, found in one.items()
        for low, high in found
        for first, last in other.get(key, ())
    )


@contextmanager
def peak(found: list[int], *kinds: str) -> Iterator[None]:
    """Adds by how much these kinds of this process's memory grew inside, as another one sees it."""
    command = [sys.executable, "-c", _WATCH, str(os.getpid()), *kinds]
    watch = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert watch.stdout is not None
    watch.stdout.readline()
    before = held_bytes(*kinds)
    yield
    most, _ = watch.communicate("")
    found.append(int(most) - before)


def held_bytes(*kinds: str) -> int:
    """What this process has of these kinds of memory."""
    with open("/proc/self/status") as status:
        return sum(int(line.split()[1]) * 1024 for line in status if line.startswith(kinds))


def _copying(size_bytes: int) -> Callable[[], Any]:
    """What copies so many bytes, from memory that was used before into such."""
    source = torch.ones(size_bytes, dtype=torch.uint8)
    target = torch.zeros(size_bytes, dtype=torch.uint8)
    return lambda: target.copy_(source)
