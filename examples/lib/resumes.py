"""What the examples share that start themselves on several ranks: one run that saves, runs that
resume from it, and the table of what came of them."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import launcher

TOLERANCE = 1e-5  # in the loss: other ranks add in another order


@dataclass(frozen=True)
class Case:
    """One run on `ranks`: `where` for the reader, `mesh` as the script takes it."""

    where: str
    ranks: int
    mesh: tuple[int, ...]

    @property
    def name(self) -> str:
        """Of its files."""
        return "_".join(map(str, self.mesh))


def add_arguments(parser: argparse.ArgumentParser, out: str, sizes: int) -> None:
    """The flags of such an example; its ranks get `sizes` numbers as their --mesh."""
    parser.add_argument("--out", type=Path, default=Path(out), help="folder for all of it")
    parser.add_argument("--steps", type=int, default=20, help="steps before the save")
    parser.add_argument("--more", type=int, default=20, help="steps after it, which are compared")
    parser.add_argument("--plant-fault", action="store_true", help="flip a bit after each load")
    parser.add_argument("--mesh", type=int, nargs=sizes, help=argparse.SUPPRESS)  # this is a rank


def write_result(args: argparse.Namespace, result: dict[str, Any]) -> None:
    """What a run came to: its `losses` after the save, and of one that resumed the names of what is
    `different`, the numbers of elements `compared` and of `read_bytes`."""
    name = "_".join(map(str, args.mesh))
    (args.out / f"{name}.json").write_text(json.dumps(result))


def compare(script: str, args: argparse.Namespace, source: Case, targets: list[Case]) -> int:
    """Runs all of them and prints the table; the exit code."""
    args.out.mkdir(parents=True, exist_ok=True)
    reference = launch(script, args, source)["losses"]
    good, rows = True, list[tuple[str, ...]]()
    for case in targets:
        found = launch(script, args, case)
        distance = max(abs(a - b) for a, b in zip(found["losses"], reference, strict=True))
        count = len(found["different"])
        bits = equal_states(count, found["compared"])
        rows.append((case.where, f"{found['read_bytes']:,}", bits, f"{distance:.1e}"))
        good = good and not count and distance <= TOLERANCE
    print(f"\nSaved at {source.where}. Resumed straight from these files:\n")
    heads = ("resumed at", "bytes read", "states bit-equal")
    print(table((*heads, f"largest loss difference, next {args.more} steps"), rows), end="")
    return 0 if good else 1


def launch(script: str, args: argparse.Namespace, case: Case) -> dict[str, Any]:
    """Runs the script on the ranks of a case; what came of it."""
    print(f"running at {case.where} ...", flush=True)
    own = ["--mesh", *map(str, case.mesh), "--out", str(args.out)]
    counts = ["--steps", str(args.steps), "--more", str(args.more)]
    fault = ["--plant-fault"] if args.plant_fault else []
    log = args.out / f"{case.name}.log"
    if launcher.run(case.ranks, [script, *own, *counts, *fault], log):
        raise SystemExit(f"{log.read_text()[-3000:]}\nfailed: the whole output is in {log}")
    return json.loads((args.out / f"{case.name}.json").read_text())


def equal_states(different: int, compared: int) -> str:
    return f"NO ({different} differ)" if different else f"yes ({compared:,} values)"


def table(heads: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """In Markdown."""
    widths = [max(len(row[i]) for row in [heads, *rows]) for i in range(len(heads))]
    lines = [heads, tuple("-" * width for width in widths), *rows]
    return "".join(
        "| " + " | ".join(f"{cell:{w}}" for cell, w in zip(line, widths, strict=True)) + " |\n"
        for line in lines
    )
