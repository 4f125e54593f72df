"""Drafts a file of rules from what a checkpoint says by itself; with --check compares such a file
with the checkpoint."""

import argparse
from typing import Any

from megatron_ucp.cli.output import DONE, FOUND, print_json, show
from megatron_ucp.errors import UsageError

HELP = "draft the rules of a model that no family covers, or check them"
EXAMPLE = "rules runs/llama --out rules.toml"
OPTIONS = {
    "--tag TAG": "another tag in that folder",
    "--check FILE": "compare this file with the checkpoint",
    "--out FILE": "write the draft there, not to the terminal",
    "--force": "replace an --out that exists",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="PATH", help="a tag folder, or the folder above it")


def run(args: Any) -> int:
    if args.check:
        return _check(args)
    from megatron_ucp.reshard.rules.draft import draft_rules, write_draft

    text = draft_rules(args.path, args.tag)
    if args.out:
        write_draft(text, args.out, args.force)
    if args.json:
        return print_json({"out": args.out} if args.out else {"draft": text}, DONE)
    print(f"written to {args.out}" if args.out else text, end="\n" if args.out else "")
    return DONE


def _check(args: Any) -> int:
    from megatron_ucp.reshard.rules.comparison import check_rules

    if args.out:
        raise UsageError(
            "--out is for a draft, and --check writes none", fix="leave one of the two out"
        )
    found = check_rules(args.path, args.check, args.tag)
    return show(args, found, DONE if found else FOUND)
