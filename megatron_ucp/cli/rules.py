"""Drafts a file of rules from what a checkpoint says by itself; with --rules checks such a file
against the checkpoint."""

import argparse
import json
from dataclasses import asdict
from typing import Any

from megatron_ucp.cli.output import DONE, FOUND, add_checkpoint, print_findings, progress_bar
from megatron_ucp.errors import UsageError

HELP = "draft the rules of a model that no family covers, or check them"


def add_arguments(verb: argparse.ArgumentParser) -> None:
    add_checkpoint(verb)
    verb.add_argument("--out", metavar="FILE", help="write the draft there instead of printing it")
    verb.add_argument("--force", action="store_true", help="replace an --out that exists")


def run(args: Any) -> int:
    if args.rules:
        return _check(args)
    from megatron_ucp.reshard.rule_draft import draft_rules, write_draft

    text = draft_rules(args.path, args.tag, progress_bar(args))
    if args.out:
        write_draft(text, args.out, args.force)
    if args.json:
        print(json.dumps({"out": args.out} if args.out else {"draft": text}))
    else:
        print(f"written to {args.out}" if args.out else text, end="\n" if args.out else "")
    return DONE


def _check(args: Any) -> int:
    from megatron_ucp.reshard.rules import check_rules

    if args.out:
        raise UsageError(
            "--out is for a draft, which is made without --rules", fix="leave one of the two out"
        )
    found = check_rules(args.path, args.rules, args.tag, progress_bar(args))
    if args.json:
        print(json.dumps(asdict(found)))
        return FOUND if found.findings else DONE
    print_findings(found)
    print(
        f"{found.rules}: {len(found.findings) or 'no'} findings for {found.parameters} parameters "
        f"and buffers of {found.path}"
    )
    return FOUND if found.findings else DONE
