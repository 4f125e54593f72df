"""Resizes in memory: seconds against copying as many bytes in memory, and against a save and a load
through files in /dev/shm; memory of a rank, seen from outside.

    python -m benchmarks.resize                         # 124M parameters, four ranks: ten minutes
    python -m benchmarks.resize --sizes tiny --repetitions 2    # to see that it runs

Four ranks over gloo on one machine. In each repetition, one after the other: the hold and the load
of what it held, into an engine of another ZeRO stage on as many ranks; `ucp.resize` of the one
engine into the other; a save (`save="direct"`, not synced) and a load through /dev/shm; and a copy
in memory of as many bytes as each rank takes, on all ranks at once. The slowest rank counts, and
medians are compared. What a rank adds to its memory is the peak of RssAnon and RssShmem in
/proc, read by another process, over that before; so is what a hold adds, which lets go of the
engine's memory and which does not. Writes benchmarks/results/resize.json.
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from benchmarks import resize_ranks
from benchmarks.machine import description
from benchmarks.model import TINY
from benchmarks.resize_ranks import PAIRS
from megatron_ucp.reshard.kept_moves import EXTRA_BYTES
from tests.ranks import RankPool

RANKS, RESULTS = 4, Path(__file__).parent / "results" / "resize.json"
SIZES: dict[str, dict[str, int]] = {
    "tiny": TINY,
    "124M": {},
    "1B": {"width": 1792, "layers": 24},
}
# what, numerator, denominator, at most
CLAIMS = [
    ("resize / copying as many bytes", "resize", "copy", 4.0),
    ("resize / save and load through /dev/shm", "resize", "files", 0.5),
    ("hold and load / save and load through /dev/shm", "hold and load", "files", None),
]


def main() -> int:
    args = parse()
    found: dict[str, Any] = {}
    for size in args.sizes:
        for name in PAIRS:
            found[f"{name}, {size}"] = measured(name, size, args.repetitions)
            print(told(f"{name}, {size}", found[f"{name}, {size}"]), flush=True)
    result = {"machine": description(), "repetitions": args.repetitions, "found": found}
    if "tiny" not in args.sizes:
        RESULTS.write_text(json.dumps(result, indent=1) + "\n")
    is_met = all(one["met"] for row in found.values() for one in row["claims"])
    return 0 if is_met or "tiny" in args.sizes else 1


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["124M"])
    parser.add_argument("--repetitions", type=int, default=5)
    return parser.parse_args()


def measured(name: str, size: str, repetitions: int) -> dict[str, Any]:
    """One pair of meshes, in processes of its own."""
    pool = RankPool(RANKS, gloo=True)
    job = resize_ranks.measure
    try:
        ranks: list[dict[str, Any]] = pool.run(
            RANKS, job, name, SIZES[size], repetitions, timeout_s=1500
        )
    finally:
        pool.close()
    seconds = {
        way: [max(rank["seconds"][way][n] for rank in ranks) for n in range(repetitions)]
        for way in ranks[0]["seconds"]
    }
    medians = {way: statistics.median(found) for way, found in seconds.items()}
    return {
        "seconds": seconds,
        "medians": medians,
        "moved bytes": sum(rank["moved bytes"] for rank in ranks),
        "needed bytes": sum(rank["needed bytes"] for rank in ranks),
        "taken bytes": [rank["taken bytes"] for rank in ranks],
        "extra bytes": max(rank["extra bytes"] for rank in ranks),
        "held bytes": [rank["held bytes"] for rank in ranks],
        "claims": [*map(claim_of(medians), CLAIMS), *of_bytes(ranks)],
    }


def claim_of(medians: dict[str, float]) -> Any:
    """A row of CLAIMS with what was measured."""

    def claim(row: tuple[str, str, str, float | None]) -> dict[str, Any]:
        what, over, under, limit = row
        ratio = medians[over] / medians[under]
        met = limit is None or ratio <= limit
        return {"claim": what, "ratio": round(ratio, 3), "at most": limit, "met": met}

    return claim


def of_bytes(ranks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Bytes that moved over those that had to, and memory beside the engine."""
    moved, needed = (sum(rank[f"{what} bytes"] for rank in ranks) for what in ("moved", "needed"))
    extra = max(rank["extra bytes"] for rank in ranks)
    kept, released = (
        max(rank["held bytes"][way] for rank in ranks) for way in ("kept", "released")
    )
    return [
        {
            "claim": "bytes moved / bytes that had to",
            "ratio": round(moved / needed, 4) if needed else 1.0,
            "at most": 1.0,
            "met": moved <= needed,
        },
        {
            "claim": "memory beside the engines / the bound",
            "ratio": round(extra / EXTRA_BYTES, 3),
            "at most": 1.0,
            "met": extra <= EXTRA_BYTES,
        },
        {
            "claim": "memory beside one copy of the state in a hold with release=True / the bound",
            "ratio": round(released / EXTRA_BYTES, 3),
            "at most": 1.0,
            "met": released <= EXTRA_BYTES,
        },
        {
            "claim": "the same / that of a hold without it",
            "ratio": round(released / kept, 3),
            "at most": None,
            "met": True,
        },
    ]


def told(name: str, row: dict[str, Any]) -> str:
    """For people."""
    lines = [name]
    lines += [f"  {way}: {seconds:.3f} s" for way, seconds in row["medians"].items()]
    for one in row["claims"]:
        limit = "" if one["at most"] is None else f", at most {one['at most']}"
        met = "" if one["met"] else "  MISSED"
        lines.append(f"  {one['claim']}: {one['ratio']}{limit}{met}")
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
