"""What a checkpoint is: format, model, step, mesh, optimizer, dtypes, date, size. Reads no tensor
and imports no torch, but for a fingerprint."""

import argparse
from typing import Any

from megatron_ucp.cli.output import DONE, add_checkpoint, named, print_json
from megatron_ucp.core.manifest import FINGERPRINT

HELP = "what a checkpoint is: format, model, step, mesh, optimizer, size"
EXAMPLE = "inspect runs/llama --all"
OPTIONS = {
    "--all": "also settings, groups, the model's sizes, and the table of parameters",
    "--fingerprint": "also read every byte: what the state is, on whatever mesh it lies",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_checkpoint(parser)


def run(args: Any) -> int:
    from megatron_ucp.reshard.look import inspect

    found = inspect(args.path, **named(args, "tag", "rules"))
    summed = _summed(args) if args.fingerprint else {}
    if args.json:
        return print_json({**_tree(found), **summed}, DONE)
    print(found)
    for name, one in summed.items():
        print(f"{name:12} {one['digest']}")
    if args.all:
        print(f"\n{found.details()}")
    return DONE


def _summed(args: Any) -> dict[str, dict[str, Any]]:
    from megatron_ucp.reshard.fingerprint import PARTS, of_path

    found = of_path(args.path, **named(args, "tag", "rules"))
    return {FINGERPRINT: {"digest": found.digest, **{key: getattr(found, key) for key in PARTS}}}


def _tree(found: Any) -> dict[str, Any]:
    from megatron_ucp.reshard.look import experts

    manifest = found.manifest
    # a value for each parameter and state, which are long and say nothing to a reader
    return {
        "path": found.path,
        "engine": manifest.keeper,
        "family": manifest.family,
        "mesh": manifest.written_on,
        "run": {key: value for key, value in manifest.run.items() if key != FINGERPRINT},
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
