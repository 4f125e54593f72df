"""The published evaluation of Universal Checkpointing, run anew: one source to ten targets, seven
sources to one target, and a mixture of experts.

    bash examples/evaluation.sh                     all tables, up to eight ranks
    bash examples/evaluation.sh --most-ranks 4      only the rows that four ranks can run

Meshes from the paper (Lian et al., USENIX ATC 2025, arXiv 2406.18820, section 6) and its blog (July
2024); their rows with SP=2 are Ulysses-style there, and here tp=2 with Megatron's sequence
parallelism. Their mixture of experts goes from tp=1, pp=2 to tp=2, pp=2; here the experts are
divided among other numbers of ranks too. The paper shows loss curves; here every state is compared
bit by bit as well, by `states.py`. Exit code 0 when all are equal and no loss is further away than
1e-5.
"""

import argparse
import sys
import time
from pathlib import Path

from quickstart import HERE, Mesh, Row, compare, make_table, plot, stop_on_signals

SOURCE = Mesh(2, 2, 2, 1)
TARGETS = [
    Mesh(1, 1, 1, 1),
    Mesh(1, 1, 2, 3),
    Mesh(2, 1, 2, 1, sp=True),
    Mesh(1, 1, 4, 2),
    Mesh(1, 1, 4, 3),
    Mesh(1, 2, 2, 1),
    Mesh(2, 1, 1, 1),
    Mesh(2, 1, 2, 1),
    Mesh(2, 1, 2, 2),
    Mesh(2, 2, 1, 1),
]
TARGET = Mesh(2, 2, 1, 1)
SOURCES = [
    Mesh(2, 1, 2, 1, sp=True),
    Mesh(1, 1, 4, 3),
    Mesh(2, 1, 1, 1),
    Mesh(2, 1, 2, 2),
    Mesh(2, 2, 1, 1),
    Mesh(1, 2, 2, 1),
    Mesh(2, 2, 2, 1),
]
SMALL_SOURCE = Mesh(2, 2, 1, 1)  # where eight ranks are too many
EXPERTS_SOURCE = Mesh(1, 2, 4, 1, ep=2)
EXPERTS_TARGETS = [
    Mesh(2, 2, 2, 1, ep=2),
    Mesh(2, 2, 1, 1, ep=1),
    Mesh(1, 1, 4, 2, ep=4),
    Mesh(2, 1, 2, 1, ep=2),
    Mesh(1, 1, 1, 3, ep=1),
]
SMALL_EXPERTS_SOURCE = Mesh(1, 2, 2, 1, ep=2)


def main() -> int:
    args = parse()
    stop_on_signals()
    out: Path = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    rows: list[Row] = []
    text = ""
    try:
        for name, table in TABLES.items():
            if args.table in (name, "all"):
                title, found, shown = table(args, out)
                text += f"## {title}\n\n{shown}\n"
                rows += found
    except KeyboardInterrupt:
        print("\nevaluation: interrupted; all ranks are stopped", file=sys.stderr)
        return 130
    (out / "evaluation.md").write_text(text)
    print(f"\n{text}{time.monotonic() - started:.0f} s in all; tables and picture are in {out}")
    return 0 if rows and all(row.good for row in rows) else 1


def one_to_ten(args: argparse.Namespace, out: Path) -> tuple[str, list[Row], str]:
    """The title, the results and their table; the picture is drawn."""
    source = SOURCE if SOURCE.ranks <= args.most_ranks else SMALL_SOURCE
    return one_to_many(args, source, TARGETS, out / "one_to_ten")


def experts(args: argparse.Namespace, out: Path) -> tuple[str, list[Row], str]:
    """As `one_to_ten`, with experts."""
    source = EXPERTS_SOURCE if EXPERTS_SOURCE.ranks <= args.most_ranks else SMALL_EXPERTS_SOURCE
    return one_to_many(args, source, EXPERTS_TARGETS, out / "experts")


def one_to_many(
    args: argparse.Namespace, source: Mesh, meshes: list[Mesh], folder: Path
) -> tuple[str, list[Row], str]:
    targets = [mesh for mesh in meshes if mesh.ranks <= args.most_ranks]
    rows, reference = compare(source, targets, folder, args.steps, args.more)
    plot(source, reference, rows, args.steps, folder.with_suffix(".png"))
    return f"Saved at {source}, resumed on {len(rows)} meshes", rows, make_table(rows, args.more)


def seven_to_one(args: argparse.Namespace, out: Path) -> tuple[str, list[Row], str]:
    """The title, the results and their table."""
    rows, names = [], []
    for source in SOURCES:
        if source.ranks <= args.most_ranks:
            folder = out / f"from_{source.name}"
            found, _ = compare(source, [TARGET], folder, args.steps, args.more)
            rows.append(found[0])
            names.append(str(source))
    shown = make_table(rows, args.more, "saved at", names)
    return f"Saved on {len(rows)} meshes, resumed at {TARGET}", rows, shown


TABLES = {"one-to-ten": one_to_ten, "seven-to-one": seven_to_one, "experts": experts}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="evaluation.sh",
        description="One source to ten targets, seven sources to one target, and experts.",
    )
    parser.add_argument("--out", type=Path, default=HERE.parent / "runs" / "evaluation")
    parser.add_argument("--steps", type=int, default=20, help="steps before the save")
    parser.add_argument("--more", type=int, default=20, help="steps after it")
    parser.add_argument("--most-ranks", type=int, default=8, help="leave out meshes of more ranks")
    parser.add_argument("--table", choices=(*TABLES, "all"), default="all")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
