"""The command line: verbs that parse, print and map errors to exit codes. No logic."""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from megatron_ucp.core.manifest import Manifest
from megatron_ucp.errors import UcpError

DONE, FOUND, UNUSABLE = 0, 1, 2


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `megatron-ucp`. Exit 0: done; 1: a difference was found; 2: wrong usage or unusable input."""
    args = _parser().parse_args(argv)
    try:
        return int(args.verb(args))
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
    inspect = verbs.add_parser("inspect", help="engine, mesh, step, sizes and the parameter table of a checkpoint")
    inspect.add_argument("path", help="a tag folder, or the folder with `latest`")
    inspect.add_argument("--tag", help="a tag in that folder instead of the one that `latest` names")
    inspect.add_argument("--no-table", "--no_table", action="store_true", help="leave out the table of parameters")
    inspect.set_defaults(verb=_inspect)
    verify = verbs.add_parser("verify", help="whether a checkpoint is whole: files, cover; with --deep every byte and copy")
    verify.add_argument("path", help="a tag folder, or the folder with `latest`")
    verify.add_argument("--tag", help="a tag in that folder instead of the one that `latest` names")
    verify.add_argument("--deep", action="store_true", help="read everything: checksums, copies of one parameter, NaN")
    verify.add_argument("--allow-nan", "--allow_nan", action="store_true", help="NaN is no damage")
    verify.set_defaults(verb=_verify)
    diff = verbs.add_parser("diff", help="compare two checkpoints of any meshes bit by bit")
    diff.add_argument("a")
    diff.add_argument("b")
    diff.add_argument("--limit", type=int, default=20, help="print at most so many differences (default 20)")
    diff.set_defaults(verb=_diff)
    for verb in (inspect, verify, diff):
        verb.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _inspect(args: Any) -> int:
    from megatron_ucp.reshard.describe import describe
    manifest = describe(args.path, args.tag)
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


def _verify(args: Any) -> int:
    from megatron_ucp.reshard.verify import verify
    found = verify(args.path, args.tag, args.deep, args.allow_nan, _bar(args, "B"))
    if args.json:
        print(json.dumps(asdict(found)))
        return FOUND if found.findings else DONE
    for one in found.findings:
        print(": ".join(filter(None, (one.parameter, one.what))))
        for key in ("file", "expected", "found"):
            if getattr(one, key):
                print(f"  {key}: {getattr(one, key)}")
    for note in found.notes:
        print(f"note: {note}")
    what = f"{found.read_bytes:,} bytes read" if args.deep else "tensors were not read: --deep does that"
    print(f"{found.path}: {len(found.findings) or 'no'} damage found in {found.files} files, {what}")
    return FOUND if found.findings else DONE


def _diff(args: Any) -> int:
    from megatron_ucp.reshard.diff import diff
    bar = _bar(args)
    found = diff(args.a, args.b, bar)
    if args.json:
        print(json.dumps([asdict(d) for d in found]))
    else:
        for d in found[:args.limit]:
            print(f"{d.parameter or 'run'}: {d.what}: {d.a} and {d.b}")
        if len(found) > args.limit:
            print(f"and {len(found) - args.limit} more")
        print("equal" if not found else f"{len(found)} differences")
    return FOUND if found else DONE


def _bar(args: Any, unit: str = "parameter") -> Any:
    """A progress bar on a terminal, else nothing."""
    if args.json or not sys.stderr.isatty():
        return None
    from tqdm import tqdm
    bar = tqdm(unit=unit, unit_scale=unit == "B", leave=False)

    def show(done: int, total: int) -> None:
        bar.total = total
        bar.update(done - bar.n)
    return show


if __name__ == "__main__":
    sys.exit(main())
