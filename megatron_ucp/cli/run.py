"""Runs a training script of DeepSpeed or Megatron-LM unchanged: its saves are atomic, and it loads
what any mesh saved. The same as `python -m megatron_ucp.run`."""

import argparse
from typing import Any

HELP = "run a training script, which then resumes on any mesh"
EXAMPLE = (
    "run train.py --epochs 3\n  torchrun --nproc_per_node 6 -m megatron_ucp.run train.py --epochs 3"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("script", nargs="*", help="the script, or -m module, with its arguments")


def run(args: Any) -> int:
    from megatron_ucp.run import main

    return main(args.script)
