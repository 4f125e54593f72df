"""Loading a Hugging Face folder into a live engine, against one reading of the bytes that a rank
needs: 124 million parameters, two ranks.

    python -m benchmarks.import_hf                         # two minutes
    python -m benchmarks.import_hf --tiny --repetitions 2  # to see that it runs

The folder is an export in fp32 of a save of the same model. `floor` reads as many bytes as a rank
has of the masters, once, into fresh memory. What ZeRO-1 has to do then, whoever loads, is shown
beside it: each rank gets the weights that the other one steps. Ratios are of medians of one run,
interleaved, the page cache warm. Writes benchmarks/results/import_hf.json.
"""

import argparse
import json
import shutil
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import load_ranks
from benchmarks.cases import TP1Z1, TP2Z1, Mesh
from benchmarks.machine import description
from benchmarks.model import HEADS, TINY
from benchmarks.tool import claim
from tests.ranks import RankPool

RANKS, RESULTS, LIMIT = 2, Path(__file__).parent / "results" / "import_hf.json", 1.3
SMALL = TINY | {"width": 8 * HEADS}  # GPT-2 has as many elements as its heads have together


def main() -> int:
    args = parse()
    size, rows, seconds = SMALL if args.tiny else {}, list[dict[str, Any]](), dict[str, Any]()
    folder = Path(tempfile.mkdtemp(prefix="import_hf_", dir=args.folder))
    pool = RankPool(RANKS, gloo=True)
    try:
        for mesh in (TP1Z1, TP2Z1):
            pool.run(RANKS, load_ranks.save, str(folder), mesh, size, timeout_s=600)
            found = pool.run(
                RANKS,
                load_ranks.measure_weights,
                str(folder),
                mesh,
                size,
                args.repetitions,
                timeout_s=600,
            )[0]
            rows.append(evaluated(mesh, found))
            seconds[str(mesh)] = found
    finally:
        pool.close()
        shutil.rmtree(folder)
    result = {"ratios": rows, "seconds": seconds, "ranks": RANKS, "machine": description()}
    if not args.tiny:
        RESULTS.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if args.tiny or all(row["met"] for row in rows) else 1


def evaluated(mesh: Mesh, found: dict[str, list[float]]) -> dict[str, Any]:
    """The ratio of medians, printed too."""
    load, floor, both = (
        statistics.median(found[name]) for name in ("load", "floor", "floor and exchange")
    )
    row = claim(f"load into {mesh} / floor", load / floor, LIMIT)
    more = f"{load / both:.2f} of the floor with the exchange of weights"
    print(f"{row['what']}: {load / floor:.2f} (at most {LIMIT}); {load:.2f} s, {more}")
    return {**row, "over_floor_and_exchange": load / both}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="a tiny model, nothing is written")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--folder", help="for the checkpoints; default: the temporary folder")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
