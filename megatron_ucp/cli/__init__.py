"""The command line: verbs that parse, print and map errors to exit codes. No logic. One module per verb."""

import argparse
import json
import sys
from collections.abc import Sequence
from importlib import import_module

from megatron_ucp.cli.output import DONE, UNUSABLE
from megatron_ucp.errors import UcpError

VERBS = ("inspect", "plan", "convert", "verify", "diff", "rules")


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `megatron-ucp`. Exit 0: done; 1: a difference or damage was found; 2: wrong usage or unusable input."""
    args = _parser().parse_args(argv)
    try:
        return int(args.run(args))
    except UcpError as error:
        if args.json:
            print(json.dumps({"error": type(error).__name__, **{k: v for k, v in error.__dict__.items() if v is not None}}))
        else:
            print(f"megatron-ucp: {error}", file=sys.stderr)
        return UNUSABLE
    except BrokenPipeError:
        return DONE
    except KeyboardInterrupt:
        print("megatron-ucp: interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="megatron-ucp", description="Look into DeepSpeed checkpoints, check and compare them.")
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    for name in VERBS:
        module = import_module(f"megatron_ucp.cli.{name}")
        verb = verbs.add_parser(name, help=module.HELP, description=module.__doc__)
        module.add_arguments(verb)
        verb.add_argument("--json", action="store_true", help="print JSON")
        verb.set_defaults(run=module.run)
    return parser
