"""Compares a file of rules with a checkpoint."""

import argparse
from typing import Any

from megatron_ucp.cli.output import DONE, FOUND, show

HELP = "check the rules of a model that no family covers"
EXAMPLE = "rules runs/llama --check rules.toml"
OPTIONS = {
    "--tag TAG": "another tag in that folder",
    "--check FILE": "compare this file with the checkpoint",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="PATH", help="a tag folder, or the folder above it")


def run(args: Any) -> int:
    from megatron_ucp.reshard.rules import rules

    checked = rules(args.path, check=args.check, tag=args.tag)
    return show(args, checked, DONE if checked else FOUND)
