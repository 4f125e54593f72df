"""Exit codes, arguments and output that several verbs share."""

import argparse
import sys
from typing import Any

DONE, FOUND, UNUSABLE = 0, 1, 2


def add_checkpoint(verb: argparse.ArgumentParser) -> None:
    """The arguments that say which checkpoint is meant."""
    verb.add_argument("path", help="a tag folder, or the folder with `latest`")
    verb.add_argument("--tag", help="a tag in that folder instead of the one that `latest` names")


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
