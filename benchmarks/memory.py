"""Steps in memory: seconds in which training stands still for one, against a copy in memory of as
many bytes; and a load from memory, against one from disk with a cold cache.

    python -m benchmarks.memory                         # 124M parameters, two ranks: two minutes
    python -m benchmarks.memory --size tiny --repetitions 2     # to see that it runs

Two ranks over gloo on one machine, ZeRO-1. In each repetition, one after the other: a step that is
kept, as the end of a training step keeps it; a copy in memory of as many bytes as a rank keeps; a
load from memory; and a load from a tag on disk, of whose files the page cache has nothing. The
slowest rank counts, and medians are compared; all buffers were used before. Writes
benchmarks/results/memory.json.
"""

import argparse
import json
import shutil
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import memory_ranks
from benchmarks.machine import description
from benchmarks.model import TINY
from benchmarks.tool import claim
from tests.ranks import RankPool

RANKS, RESULTS = 2, Path(__file__).parent / "results" / "memory.json"
SIZES: dict[str, dict[str, int]] = {"tiny": TINY, "124M": {}}
# what, numerator, denominator, at most
CLAIMS = [
    ("training waits / copy in memory", "blocked", "copy", 1.1),
    ("load from memory / load from disk, cold", "load from memory", "load from disk", 1.0),
]


def main() -> int:
    args = parse()
    folder = tempfile.mkdtemp(prefix="memory_", dir=args.folder)
    pool = RankPool(RANKS, gloo=True)
    try:
        job = memory_ranks.measure
        ranks: list[dict[str, Any]] = pool.run(
            RANKS, job, folder, SIZES[args.size], args.repetitions, timeout_s=1000
        )
    finally:
        pool.close()
        shutil.rmtree(folder)
    result = evaluated(ranks)
    print(told(result))
    if args.size != "tiny":
        RESULTS.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if args.size == "tiny" or all(one["met"] for one in result["claims"]) else 1


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--size", choices=SIZES, default="124M")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--folder", help="of the tag on disk; default that for temporary files")
    return parser.parse_args()


def evaluated(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """The slowest rank's seconds, medians of them, and what is claimed."""
    seconds = {
        way: [max(each) for each in zip(*(rank["seconds"][way] for rank in ranks), strict=True)]
        for way in ranks[0]["seconds"]
    }
    medians = {way: statistics.median(found) for way, found in seconds.items()}
    return {
        "machine": description(),
        "bytes": [rank["bytes"] for rank in ranks],
        "seconds": seconds,
        "medians": medians,
        "claims": [claim(what, medians[a] / medians[b], limit) for what, a, b, limit in CLAIMS],
    }


def told(result: dict[str, Any]) -> str:
    """For people."""
    lines = [f"{way}: {seconds:.3f} s" for way, seconds in result["medians"].items()]
    for one in result["claims"]:
        met = "" if one["met"] else "  MISSED"
        lines.append(f"{one['what']}: {one['ratio']:.3f}, at most {one['limit']}{met}")
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
