"""What the line `help:` of an error names: the text, why it comes, and what to do. Without an ID
all of them."""

import argparse
import re
from pathlib import Path
from typing import Any

from megatron_ucp.cli.output import DONE, nearest, print_json
from megatron_ucp.errors import HELP_FILE, DamagedFileError, UsageError

HELP = "says more about an error, by the id in its last line"
EXAMPLE = "help no-checkpoint"
_PACKAGE = Path(__file__).parent.parent


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The id of an error."""
    parser.add_argument("id", metavar="ID", nargs="?", help="as in `help:` of an error")


def run(args: Any) -> int:
    found = sections()
    if args.id is None:
        return print_json({"ids": [*found]}, DONE) if args.json else _listed(found)
    if args.id not in found:
        raise UsageError(
            f"there is no help for {args.id[:80]!r}",
            expected=", ".join(found),
            found=args.id[:200],
            fix=nearest(args.id, [*found], "megatron-ucp help"),
        )
    if args.json:
        return print_json({"id": args.id, "text": found[args.id]}, DONE)
    print(found[args.id])
    return DONE


def _listed(found: dict[str, str]) -> int:
    width = max(map(len, found))
    for name, text in found.items():
        first = text.partition("```text\n")[2].partition("\n")[0]
        print(f"{name:{width}}  {first}")
    return DONE


def _plain(text: str) -> str:
    """A page without what a terminal has no use for: comments, and the targets of links."""
    return re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", re.sub(r"<!--.*?-->\n", "", text))


def sections() -> dict[str, str]:
    """The sections of the page by their ids, as an installation has them, or a checkout. Raises
    DamagedFileError where neither has it."""
    for page in (_PACKAGE / Path(HELP_FILE).name, _PACKAGE.parent / HELP_FILE):
        if page.is_file():
            text = _plain(page.read_text(encoding="utf-8"))
            parts = re.split(r"^## ", text, flags=re.MULTILINE)[1:]
            return {part.partition("\n")[0]: part.partition("\n")[2].strip() for part in parts}
    raise DamagedFileError(
        "this installation lacks its page of errors",
        file=_PACKAGE / Path(HELP_FILE).name,
        fix="install the package again",
        id="",
    )
