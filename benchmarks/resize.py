"""Resizes in memory: seconds against copying as many bytes in memory, and against a save and a load
through files in /dev/shm; memory of a rank, seen from outside.

    python -m benchmarks.resize                         # 124M parameters, four ranks: ten minutes
    python -m benchmarks.resize --sizes tiny --repetitions 2    # to see that it runs

Four ranks over gloo on one machine. The ways are the hold and the load of what it held, into an
engine of another ZeRO stage on as many ranks; `ucp.resize` of the one engine into the other; a save
(`save="direct"`, not synced) and a load through /dev/shm; and a copy in memory of as many bytes as
each rank takes, on all ranks at once. What a rank adds to its memory is the peak of RssAnon and
RssShmem over that before. Results: benchmarks/results/resize.json, "Resizes" in
docs/reference/performance.md. Two commits are compared with it, too.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

import megatron_ucp as ucp
from benchmarks import frame
from benchmarks.model import SIZES, Mesh, make_engine, train_step
from megatron_ucp.reshard.kept_moves import EXTRA_BYTES

RANKS = 4
# the engine that is resized, and the one that is filled
PAIRS = {
    "ZeRO-1 to ZeRO-3": (Mesh(1), Mesh(3)),
    "ZeRO-3 to ZeRO-1": (Mesh(3), Mesh(1)),
    "ZeRO-2 to ZeRO-3": (Mesh(2), Mesh(3)),
}
OWN = "RssAnon", "RssShmem"  # kinds of memory that a rank adds: its own, and what ranks share
FOLDER = Path("/dev/shm/ucp_benchmark_of_resizes")
CLAIMS: list[frame.Claim] = [
    ("resize / copying as many bytes", "resize", "copy", 4.0),
    ("resize / save and load through /dev/shm", "resize", "files", 0.5),
    ("hold and load / save and load through /dev/shm", "hold and load", "files", None),
]


def measure(options: argparse.Namespace) -> dict[str, Any]:
    return frame.of_pairs(options, RANKS, PAIRS, measure_pair, result)


def result(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """What all ranks say together."""
    seconds = frame.slowest([rank["seconds"] for rank in ranks])
    moved, needed = (sum(rank[f"{what} bytes"] for rank in ranks) for what in ("moved", "needed"))
    extra = max(rank["extra bytes"] for rank in ranks)
    return {
        "seconds": seconds,
        "medians": frame.medians(seconds),
        "moved bytes": moved,
        "needed bytes": needed,
        "taken bytes": [rank["taken bytes"] for rank in ranks],
        "extra bytes": extra,
        "claims": [
            *frame.claims_of(seconds, CLAIMS),
            frame.claim("bytes moved / bytes that had to", moved / needed if needed else 1.0, 1.0),
            frame.claim("memory beside the engines / the bound", extra / EXTRA_BYTES, 1.0),
        ],
    }


# ---- on the ranks


def measure_pair(name: str, size: str, repetitions: int) -> dict[str, Any]:
    """Seconds of every way on this rank, by repetition, and bytes."""
    source, target = PAIRS[name]
    old: Any = ucp.attach(make_engine(source, SIZES[size]), save="direct", durable=False)
    train_step(old, source)
    new: Any = ucp.attach(make_engine(target, SIZES[size]))
    train_step(new, target)
    had, wanted = ranges_of(old), ranges_of(new)
    taken, moved, grown = bytes_of(wanted), 0, list[int]()

    ways: dict[str, Callable[[], Any]] = {
        "resize": lambda: ucp.resize(old, new),
        "hold and load": lambda: ucp.load(new, ucp.hold(old)),
        "files": lambda: through_files(old, new),
        "copy": frame.copying(taken),
    }
    seconds = frame.in_turns(ways, repetitions)
    for _ in range(repetitions):
        dist.barrier()
        with frame.peak(grown, *OWN):
            moved = ucp.resize(old, new).read_bytes
    return {
        "seconds": seconds,
        "moved bytes": moved,
        "needed bytes": taken - common_bytes(had, wanted),
        "taken bytes": taken,
        "extra bytes": max(grown),
    }


def through_files(old: Any, new: Any) -> None:
    old.save_checkpoint(str(FOLDER), tag="tag")
    ucp.load(new, FOLDER)
    frame.remove(FOLDER)


Ranges = dict[tuple[str, str], list[tuple[int, int]]]


def ranges_of(engine: Any) -> Ranges:
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


def bytes_of(ranges: Ranges) -> int:
    """Bytes of fp32."""
    return 4 * sum(high - low for found in ranges.values() for low, high in found)


def common_bytes(one: Ranges, other: Ranges) -> int:
    """Bytes that both have."""
    return 4 * sum(
        max(0, min(high, last) - max(low, first))
        for key, found in one.items()
        for low, high in found
        for first, last in other.get(key, ())
    )


if __name__ == "__main__":
    raise SystemExit(frame.main("resize", sizes=("124M",)))
