"""The tags of a folder: step, mesh, date, size, whether each is whole, and which one a load
takes."""

import argparse
from typing import Any

from megatron_ucp.cli.output import DONE, print_json

HELP = "the tags of a folder, and which of them are whole"
EXAMPLE = "ls runs/llama"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="PATH", help="the folder above the tags")


def run(args: Any) -> int:
    from megatron_ucp.reshard.look import ls

    found = ls(args.path)
    if args.json:
        tags = [{**vars(one), "whole": one.whole} for one in found.tags]
        return print_json({"path": found.path, "tags": tags, "notes": found.notes}, DONE)
    print(found)
    return DONE
