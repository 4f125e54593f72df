"""Engine, mesh, step, sizes, dtypes and the parameter table of a checkpoint. Reads no tensor and imports no torch."""

import argparse
import json
import math
from typing import Any

from megatron_ucp.cli.output import DONE, add_checkpoint
from megatron_ucp.core.manifest import Manifest

HELP = "engine, mesh, step, sizes and the parameter table of a checkpoint"


def add_arguments(verb: argparse.ArgumentParser) -> None:
    add_checkpoint(verb)
    verb.add_argument("--no-table", "--no_table", action="store_true", help="leave out the table of parameters")


def run(args: Any) -> int:
    from megatron_ucp.reshard.describe import describe
    manifest = describe(args.path, args.tag, args.rules)
    rows = [_row(manifest, name) for name in manifest.by_name]
    head = {"engine": manifest.engine, "family": manifest.family, "mesh": str(manifest.mesh), **manifest.run,
            "optimizer": manifest.optimizer, "manifest": bool(manifest.save_id), "parameters": len(rows),
            "elements": sum(math.prod(spec.shape) for spec in manifest.params),
            "file_bytes": sum(entry.size_bytes for entry in manifest.files), "groups": [dict(g) for g in manifest.groups]}
    if args.json:
        print(json.dumps({**head, "table": rows}, default=str))
        return DONE
    for key, value in head.items():
        if key == "groups":
            for number, group in enumerate(manifest.groups):
                print(f"{f'group {number}':12} " + ", ".join(f"{k}={v}" for k, v in group.items()))
        elif value not in ("", None, 0) or key in ("global_steps", "skipped_steps"):
            print(f"{key:12} {value:,}" if isinstance(value, int) and not isinstance(value, bool) else f"{key:12} {value}")
    if not args.no_table:
        widths = [max(len(str(row[key])) for row in rows) for key in rows[0]] if rows else []
        print()
        for row in [{key: key for key in rows[0]}, *rows] if rows else []:
            print("  ".join(f"{value!s:{width}}" for value, width in zip(row.values(), [max(w, len(k)) for w, k in zip(
                widths, row, strict=True)], strict=True)).rstrip())
    return DONE


def _row(manifest: Manifest, name: str) -> dict[str, Any]:
    spec = manifest.by_name[name]
    buffer = manifest.buffers[manifest.holders[name][0][0]]
    ties = [alias for tie in manifest.ties if tie.canonical == name for alias in tie.aliases]
    return {"name": name, "shape": "x".join(map(str, spec.shape)) or "scalar", "dtype": spec.dtype, "kind": spec.kind,
            "group": "-" if buffer.group is None else buffer.group, "states": " ".join(s for s, _ in buffer.states),
            "also": " ".join(ties)}
