"""What this machine has: versions of torch, DeepSpeed, megatron-core and transformers beside those
that were tested, compiler, GPU; with --ds-config whether that config attaches engines."""

import argparse
from typing import Any

from megatron_ucp.cli.output import DONE, FOUND, print_json

HELP = "versions beside those that were tested, compiler, GPU"
EXAMPLE = "doctor --ds-config ds_config.json"
OPTIONS = {"--ds-config FILE": "a DeepSpeed config to look into"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Has options alone."""


def run(args: Any) -> int:
    from megatron_ucp.reshard.look import doctor

    found = doctor(args.ds_config)
    code = DONE if found else FOUND
    if args.json:
        return print_json({"ok": bool(found), "rows": found.rows}, code)
    print(found)
    return code
