"""What a resume on another mesh would read, rank by rank: files, bytes, copies, memory. Nothing is
loaded.

With --simulate neither the checkpoint nor the model needs to exist: a family, its sizes and two
meshes are enough.
"""

import argparse
import json
from dataclasses import asdict
from typing import Any

from megatron_ucp.cli.convert import add_target, read_json, target_of
from megatron_ucp.cli.output import DONE, add_checkpoint, progress_bar
from megatron_ucp.errors import UsageError
from megatron_ucp.families import families

HELP = "what a resume on another mesh would read, and a picture of it"
_SHOWN = 32  # ranks in the table


def add_arguments(verb: argparse.ArgumentParser) -> None:
    add_checkpoint(verb, optional=True)
    add_target(verb)
    verb.add_argument(
        "--picture",
        metavar="FILE",
        help="draw who reads what from whom into a PNG, PDF or SVG file",
    )
    verb.add_argument(
        "--simulate",
        metavar="FAMILY",
        help=f"no checkpoint: a model of this family ({', '.join(families())}) on paper",
    )
    verb.add_argument(
        "--sizes",
        help="of that model: layers=32,hidden=4096,heads=32,groups=8,ffn=14336,vocab=128256",
    )
    verb.add_argument("--source-mesh", help="the mesh that would have written it, as --mesh")


def run(args: Any) -> int:
    from megatron_ucp.reshard import preview

    if not args.mesh:
        raise UsageError(
            "a plan is for one mesh",
            expected="--mesh tp=1,dp=4,zero=1",
            found="none",
            fix="give --mesh, such as --mesh tp=1,dp=4,zero=1",
        )
    target, bar = target_of(args), progress_bar(args, "rank")
    config = read_json(args.config) if args.config else None
    if args.simulate:
        of_files = args.path or args.tag or args.rules
        if of_files or not args.sizes or not args.source_mesh:
            raise UsageError(
                "a simulation needs sizes and a source mesh, and no checkpoint",
                expected="--sizes and --source-mesh",
                found=of_files or "not both of them",
                fix="give --sizes and --source-mesh, and leave path, --tag and --rules out",
            )
        from megatron_ucp.core.mesh import Mesh

        found = preview.simulate(
            args.simulate,
            preview.paper_sizes(args.simulate, args.sizes),
            Mesh.parse(args.source_mesh),
            target,
            config,
            bar,
        )
    elif not args.path:
        raise UsageError(
            "plan needs a checkpoint",
            expected="a path, or --simulate",
            found="neither",
            fix="give the folder of a checkpoint; or --simulate with --sizes and --source-mesh",
        )
    else:
        found = preview.preview(args.path, target, args.tag, args.rules, config, bar)
    if args.picture:
        preview.draw(found, args.picture)
    if args.json:
        print(
            json.dumps(
                {
                    **asdict(found),
                    "ranks": [{**asdict(one), "read_bytes": one.read_bytes} for one in found.ranks],
                }
            )
        )
        return DONE
    _print(found)
    return DONE


def _print(found: Any) -> None:
    print(f"{found.source_mesh}  to  {found.mesh}")
    heads = ("files", "MB read", "copies", "MB of states", "MB at most")
    rows: list[tuple[str, ...]] = [("rank", *found.ranks[0].coord.shown, *heads)]
    for one in found.ranks[:_SHOWN]:
        place = map(str, (one.rank, *one.coord.shown.values(), len(one.files)))
        sizes = (one.read_bytes, one.state_bytes, one.peak_bytes)
        megabytes = [f"{size / 1e6:,.1f}" for size in sizes]
        rows.append((*place, megabytes[0], f"{one.copies:,}", *megabytes[1:]))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        print("  ".join(f"{text:>{width}}" for text, width in zip(row, widths, strict=True)))
    if len(found.ranks) > _SHOWN:
        print(f"and {len(found.ranks) - _SHOWN} ranks more: --json has them all")
    total = sum(one.read_bytes for one in found.ranks)
    print(
        f"all ranks read {total / 1e6:,.1f} MB, {total / found.stored_bytes:.3f} times the states "
        "of the checkpoint"
    )
    for note in found.notes:
        print(f"note: {note}")
