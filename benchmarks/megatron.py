"""Megatron-core's own stack: `ucp.save` and `ucp.load` beside megatron-core's own save and load of
`fully_reshardable` files, 80 million parameters in bf16 on two ranks.

    python -m benchmarks.megatron                         # about four minutes
    python -m benchmarks.megatron --tiny --repetitions 2  # to see that it runs

Every ratio is of medians of one run in the same processes, the repetitions interleaved, the page
cache warm. `ucp.save` syncs its files before it returns and megatron-core's does not; a save is
also compared with `cp` and `sync` of the same bytes. `floor` reads as many bytes as a rank's
masters and moments, once; shown beside it is that with the exchange of weights between the ranks,
which the distributed optimizer has to do after any load. Writes benchmarks/results/megatron.json.
"""

import argparse
import json
import shutil
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import megatron_ranks
from benchmarks.machine import description
from benchmarks.megatron_ranks import FULL
from benchmarks.tool import claim
from tests.ranks import RankPool

RANKS, RESULTS = 2, Path(__file__).parent / "results" / "megatron.json"
CLAIMS = [
    ("load / megatron-core's load", "ours load", "stock load", 0.5),
    ("load of megatron-core's files / its load", "ours load of stock's", "stock load", 0.5),
    ("load / floor", "ours load", "floor", 1.2),
    ("save / megatron-core's save", "ours save", "stock save", 0.2),
    ("save / cp and sync", "ours save", "copy", 1.3),
]


def main() -> int:
    args = parse()
    folder = Path(tempfile.mkdtemp(prefix="megatron_", dir=args.folder))
    pool = RankPool(RANKS, gloo=True)
    try:
        job, size = megatron_ranks.measure, {"layers": 2} if args.tiny else FULL
        found = pool.run(RANKS, job, str(folder), size, args.repetitions, timeout_s=1500)[0]
    finally:
        pool.close()
        shutil.rmtree(folder)
    result = evaluated(found)
    for row in result["ratios"]:
        print(f"{row['what']}: {row['ratio']:.2f} (at most {row['limit']})")
    print(f"load / floor with the exchange of weights: {result['over_floor_and_exchange']:.2f}")
    if not args.tiny:
        RESULTS.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if args.tiny or all(row["met"] for row in result["ratios"]) else 1


def evaluated(found: dict[str, Any]) -> dict[str, Any]:
    """Ratios of medians, with the seconds that they come from."""
    median = {name: statistics.median(each) for name, each in found["seconds"].items()}
    rows = [claim(what, median[a] / median[b], limit) for what, a, b, limit in CLAIMS]
    both = median["ours load"] / median["floor and exchange"]
    more = {"over_floor_and_exchange": both, "ranks": RANKS, "machine": description()}
    return {"ratios": rows, **found, **more}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="a tiny model, nothing is written")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--folder", help="for the checkpoints; default: the temporary folder")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
