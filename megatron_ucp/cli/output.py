"""Exit codes, arguments and output that several verbs share."""

import argparse
import sys
from typing import Any

DONE, FOUND, UNUSABLE = 0, 1, 2


def add_checkpoint(verb: argparse.ArgumentParser, optional: bool = False) -> None:
    """The arguments that say which checkpoint is meant; with `optional` the path may be left
    out."""
    verb.add_argument(
        "path", nargs="?" if optional else None, help="a tag folder, or the folder with `latest`"
    )
    verb.add_argument("--tag", help="a tag in that folder instead of the one that `latest` names")
    add_rules(verb)


def add_rules(verb: argparse.ArgumentParser) -> None:
    """The argument that says how the checkpoint is cut, where it does not say so itself."""
    verb.add_argument(
        "--rules",
        metavar="FILE",
        help="a TOML file that says how parameters are cut and named (docs/reference/rules.md)",
    )


def allowed(args: Any) -> frozenset[str]:
    """The words of --allow, between commas."""
    return frozenset(filter(None, args.allow.replace(" ", "").split(",")))


def print_findings(found: Any) -> None:
    """Findings with their facts, then the notes."""
    for one in found.findings:
        print(": ".join(filter(None, (one.parameter, one.what))))
        for key in ("file", "expected", "found"):
            if getattr(one, key):
                print(f"  {key}: {getattr(one, key)}")
    for note in found.notes:
        print(f"note: {note}")


def progress_bar(args: Any, unit: str = "parameter") -> Any:
    """A progress bar on a terminal, else nothing."""
    if args.json or not sys.stderr.isatty():
        return None
    from tqdm import tqdm

    bar = tqdm(unit=unit, unit_scale=unit == "B", leave=False)

    def show(done: int, total: int) -> None:
        bar.total = total
        bar.update(done - bar.n)

    return show
