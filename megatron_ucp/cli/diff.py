"""Two checkpoints of any formats and meshes, compared bit by bit: fp32 master weights, optimizer
states, steps, hyper-parameters, schedules."""

import argparse
from typing import Any

from megatron_ucp.cli.output import DONE, FOUND, RULES, named, print_json, print_notes

HELP = "compare two checkpoints of any meshes bit by bit"
EXAMPLE = "diff runs/llama converted/global_step80"
OPTIONS = {
    **RULES,
    "--rules-b FILE": "other rules for B",
    "--fingerprint": "compare what the saves recorded of their bytes, and read no tensor",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "a", metavar="A", help="a tag folder, the folder above it, or a saved fingerprint"
    )
    parser.add_argument("b", metavar="B", help="the other one")
    parser.add_argument(
        "--limit",
        type=_count,
        default=20,
        metavar="COUNT",
        help="print at most so many differences (default 20)",
    )


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text[:80]!r} is no number of at least 0")
    return int(text)


def run(args: Any) -> int:
    from megatron_ucp.formats.registry import find_checkpoint
    from megatron_ucp.reshard.check import diff
    from megatron_ucp.reshard.fingerprint import is_kept

    found = diff(args.a, args.b, **named(args, "rules", "rules_b", "fingerprint"))
    code = FOUND if found else DONE
    if args.json:
        return print_json({"equal": not found, "differences": found}, code)
    folders = [path for path in (args.a, args.b) if not is_kept(path)]
    print_notes(note for path in folders for note in find_checkpoint(path).notes)
    for one in found[: args.limit]:
        print(f"{one.parameter or 'run'}: {one.what}: {one.a} and {one.b}")
    if len(found) > args.limit:
        print(f"and {len(found) - args.limit} more")
    count = f"{len(found)} difference{'s' if len(found) != 1 else ''}"
    how = ", as the saves recorded it: no tensor was read" if args.fingerprint else ""
    print(f"{count if found else 'equal'}{how}")
    return code
