"""Whether a checkpoint is whole: every file, exact cover; with --deep every byte, every copy, every
number."""

import argparse
import json
from dataclasses import asdict
from typing import Any

from megatron_ucp.cli.output import DONE, FOUND, add_checkpoint, print_findings, progress_bar

HELP = "whether a checkpoint is whole: files, cover; with --deep every byte and copy"


def add_arguments(verb: argparse.ArgumentParser) -> None:
    add_checkpoint(verb)
    verb.add_argument(
        "--deep",
        action="store_true",
        help="read everything: checksums, copies of one parameter, NaN",
    )
    verb.add_argument(
        "--allow-nan", action="store_true", help="don't look for NaN, which is no damage"
    )


def run(args: Any) -> int:
    from megatron_ucp.reshard.verify import verify

    found = verify(
        args.path,
        tag=args.tag,
        deep=args.deep,
        allow_nan=args.allow_nan,
        progress=progress_bar(args, "B"),
        rules=args.rules,
    )
    if args.json:
        print(json.dumps(asdict(found)))
        return FOUND if found.findings else DONE
    print_findings(found)
    what = (
        f"{found.read_bytes:,} bytes read"
        if args.deep
        else "tensors were not read: --deep does that"
    )
    print(
        f"{found.path}: {len(found.findings) or 'no'} damage found in {found.files} files, {what}"
    )
    return FOUND if found.findings else DONE
