"""Engine, mesh, step, sizes, dtypes and the parameter table of a checkpoint. Reads no tensor and
imports no torch."""

import argparse
import json
import math
from typing import Any

from megatron_ucp.cli.output import DONE, add_checkpoint
from megatron_ucp.core.manifest import Manifest
from megatron_ucp.formats.deepspeed.doctor import NOT_SAVED

HELP = "engine, mesh, step, sizes and the parameter table of a checkpoint"


def add_arguments(verb: argparse.ArgumentParser) -> None:
    add_checkpoint(verb)
    verb.add_argument("--no-table", action="store_true", help="leave out the table of parameters")


def run(args: Any) -> int:
    from megatron_ucp.families.arguments import with_model
    from megatron_ucp.formats.registry import find_checkpoint
    from megatron_ucp.reshard.describe import experts, look, sizes

    found = find_checkpoint(args.path, args.tag)
    manifest = with_model(look(found.folder, None, args.rules))
    rows = _rows(manifest)
    head = {
        "engine": manifest.engine,
        "family": manifest.family,
        "mesh": str(manifest.mesh),
        **manifest.run,
        "optimizer": manifest.optimizer,
        "manifest": bool(manifest.save_id),
        "parameters": len(rows),
        "experts": experts(manifest),
        "elements": sum(math.prod(spec.shape) for spec in manifest.params),
        "files": len(manifest.files),
        "file_bytes": sum(entry.size_bytes for entry in manifest.files),
        "states": {
            state: {"dtypes": dtypes, "bytes": size}
            for state, (dtypes, size) in sizes(manifest).items()
        },
        "groups": [dict(group.settings) for group in manifest.groups],
        **({"notes": found.notes} if found.notes else {}),
    }
    if args.json:
        print(json.dumps({**head, "table": rows}, default=str))
        return DONE
    _print_head(head)
    if not args.no_table and rows:
        _print_table(rows)
    return DONE


def _print_head(head: dict[str, Any]) -> None:
    for key, value in head.items():
        if key == "groups":
            for number, group in enumerate(value):
                print(f"{f'group {number}':12} " + ", ".join(f"{k}={v}" for k, v in group.items()))
        elif key == "experts":
            for text, layers in value.items():
                print(f"{key:12} {text}: {len(layers)} layers")
        elif key == "states":
            for state, held in value.items():
                print(f"{state:12} {' '.join(held['dtypes'])}, {held['bytes']:,} bytes")
        elif key == "model":
            for part, said in value.items():
                print(f"{part:12} " + ", ".join(f"{k}={v}" for k, v in said.items()))
        elif key == "notes":
            for note in value:
                print(f"note: {note}")
        elif key == NOT_SAVED:
            for sentence in value:
                print(f"{'not saved':12} {sentence}")
        elif value not in ("", None, 0) or key in ("global_steps", "skipped_steps"):
            print(
                f"{key:12} {value:,}"
                if isinstance(value, int) and not isinstance(value, bool)
                else f"{key:12} {value}"
            )


def _print_table(rows: list[dict[str, Any]]) -> None:
    rows = [{key: key for key in rows[0]}, *rows]
    widths = [max(len(str(row[key])) for row in rows) for key in rows[0]]
    print()
    for row in rows:
        print(
            "  ".join(
                f"{value!s:{width}}" for value, width in zip(row.values(), widths, strict=True)
            ).rstrip()
        )


def _rows(manifest: Manifest) -> list[dict[str, Any]]:
    ties = {tie.canonical: " ".join(tie.aliases) for tie in manifest.ties}
    out: list[dict[str, Any]] = []
    for name, spec in manifest.by_name.items():
        held = manifest.holders.get(name)
        buffer = manifest.buffers[held[0][0]] if held else None
        out.append(
            {
                "name": name,
                "shape": "x".join(map(str, spec.shape)) or "scalar",
                "dtype": spec.dtype,
                "kind": spec.kind,
                "group": "-" if buffer is None or buffer.group is None else buffer.group,
                "states": " ".join(s for s, _ in buffer.states) if buffer else "",
                "also": ties.get(name, ""),
            }
        )
    return out
