"""Exit codes, arguments and output that several verbs share."""

import argparse
import sys
from typing import Any

DONE, FOUND, UNUSABLE = 0, 1, 2


def add_checkpoint(verb: argparse.ArgumentParser, alias: str = "") -> None:
    """The arguments that say which checkpoint is meant; `alias` is an option that may take the place of the path."""
    verb.add_argument("path", nargs="?" if alias else None, help="a tag folder, or the folder with `latest`")
    if alias:
        verb.add_argument(alias, help=argparse.SUPPRESS)
    verb.add_argument("--tag", help="a tag in that folder instead of the one that `latest` names")
    add_rules(verb)


def add_rules(verb: argparse.ArgumentParser) -> None:
    """The argument that says how the checkpoint is cut, where it does not say so itself."""
    verb.add_argument("--rules", metavar="FILE", help="a TOML file that says how parameters are cut and named (docs/rules.md)")


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
