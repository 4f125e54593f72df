"""What a checkpoint is: format, model, step, mesh, optimizer, dtypes, date, size. Reads no tensor
and imports no torch."""

import argparse
from typing import Any

from megatron_ucp.cli.output import DONE, add_checkpoint, named, print_json

HELP = "what a checkpoint is: format, model, step, mesh, optimizer, size"
EXAMPLE = "inspect runs/llama --all"
OPTIONS = {"--all": "also settings, groups, the model's sizes, and the table of parameters"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_checkpoint(parser)


def run(args: Any) -> int:
    from megatron_ucp.reshard.inspect import inspect

    found = inspect(args.path, **named(args, "tag", "rules"))
    if args.json:
        return print_json(_tree(found), DONE)
    print(found)
    if args.all:
        print(f"\n{found.details()}")
    return DONE


def _tree(found: Any) -> dict[str, Any]:
    from megatron_ucp.reshard.describe import experts

    manifest = found.manifest
    return {
        "path": found.path,
        "engine": manifest.keeper,
        "family": manifest.family,
        "mesh": manifest.written_on,
        "run": manifest.run,
        "has_manifest": bool(manifest.save_id),
        "parameters": len(manifest.params),
        "elements": found.elems,
        "files": len(manifest.files),
        "file_bytes": manifest.size_bytes,
        "experts": experts(manifest),
        "states": {
            name: {"dtypes": dtypes, "bytes": size} for name, (dtypes, size) in found.states.items()
        },
        "groups": [
            {"optimizer": group.optimizer, "settings": group.settings} for group in manifest.groups
        ],
        "notes": found.notes,
        "table": found.rows,
    }
