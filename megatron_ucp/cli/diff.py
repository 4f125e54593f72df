"""Two checkpoints of any formats and meshes, compared bit by bit in their canonical state."""

import argparse
import json
from dataclasses import asdict
from typing import Any

from megatron_ucp.cli.output import DONE, FOUND, add_rules, progress_bar

HELP = "compare two checkpoints of any meshes bit by bit"


def add_arguments(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("a", help="a tag folder, or the folder with `latest`")
    verb.add_argument("b", help="the other one")
    add_rules(verb)
    verb.add_argument("--rules-b", metavar="FILE", help="other rules for B")
    verb.add_argument(
        "--limit", type=int, default=20, help="print at most so many differences (default 20)"
    )


def run(args: Any) -> int:
    from megatron_ucp.formats.registry import find_checkpoint
    from megatron_ucp.reshard.diff import diff

    found = diff(
        args.a, args.b, progress=progress_bar(args, "B"), rules=args.rules, rules_b=args.rules_b
    )
    if args.json:
        print(json.dumps([asdict(d) for d in found]))
    else:
        for note in (*find_checkpoint(args.a).notes, *find_checkpoint(args.b).notes):
            print(f"note: {note}")
        for d in found[: args.limit]:
            print(f"{d.parameter or 'run'}: {d.what}: {d.a} and {d.b}")
        if len(found) > args.limit:
            print(f"and {len(found) - args.limit} more")
        print("equal" if not found else f"{len(found)} differences")
    return FOUND if found else DONE
