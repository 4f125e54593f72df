"""Whether a checkpoint is whole: every file, exact cover; with --deep every byte, every copy, every
number. All damage is listed."""

import argparse
from typing import Any

from megatron_ucp.cli.output import DONE, FOUND, add_checkpoint, named, show

HELP = "whether a checkpoint is whole; with --deep every byte of it"
EXAMPLE = "verify runs/llama --deep"
OPTIONS = {
    "--deep": "read everything: checksums, copies of one parameter, NaN",
    "--allow-nan": "don't look for NaN, which is no corruption",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_checkpoint(parser)


def run(args: Any) -> int:
    from megatron_ucp.reshard.check import verify

    found = verify(args.path, **named(args, "tag", "deep", "allow_nan", "rules"))
    return show(args, found, DONE if found else FOUND, ok=found.ok)
