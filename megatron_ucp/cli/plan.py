"""What a resume on another mesh would read, rank by rank: files, bytes, memory. Nothing is loaded:
it is the dry run of a resume, and of `convert`.

With --simulate neither the checkpoint nor the model needs to exist: a family, its sizes and two
meshes are enough."""

import argparse
from typing import Any

from megatron_ucp.cli.output import (
    DONE,
    add_checkpoint,
    named,
    print_json,
    print_notes,
)
from megatron_ucp.cli.target import add_target, refuse_unused_size, require_mesh, target_of
from megatron_ucp.errors import UsageError
from megatron_ucp.families import families

HELP = "the dry run of a resume on another mesh, and a picture of it"
EXAMPLE = "plan runs/llama --mesh dp=3,zero=1 --picture plan.png"
_SHOWN = 32  # ranks in the table
OPTIONS = {
    "--picture FILE": "draw who reads what from whom into a PNG, PDF or SVG file",
    "--sizes SIZES": "of the model of --simulate: "
    "layers=32,hidden=4096,heads=32,groups=8,ffn=14336,vocab=128256",
    "--source-mesh MESH": "the mesh that would have written it",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_checkpoint(parser, optional=True)
    known = ", ".join(families())  # when it is asked for: others register theirs
    what = f"no checkpoint: a model of this family ({known})"
    parser.add_argument("--simulate", metavar="FAMILY", help=what)
    add_target(parser)


def run(args: Any) -> int:
    from megatron_ucp.reshard import plan

    require_mesh(args, "a plan is")
    target = target_of(args)
    if args.simulate:
        found = _simulated(args, target)
    elif not args.path:
        raise UsageError(
            "plan needs a checkpoint",
            expected="a path, or --simulate",
            found="neither",
            fix="give the folder of the checkpoint",
        )
    else:
        refuse_unused_size(args, target, args.path)
        found = plan.plan(args.path, target, **named(args, "tag", "rules", "ds_config"))
    if args.picture:
        plan.draw(found, args.picture)
    if args.json:
        ranks = [{**vars(one), "read_bytes": one.read_bytes} for one in found.ranks]
        return print_json({**vars(found), "ranks": ranks}, DONE)
    _print(found)
    return DONE


def _simulated(args: Any, target: Any) -> Any:
    """The plan of a model and meshes that need not exist. Raises UsageError."""
    from megatron_ucp.core.mesh import Mesh
    from megatron_ucp.reshard import plan
    from megatron_ucp.reshard.options import parsed_config

    plan.find_family(args.simulate)
    of_files = args.path or args.tag or args.rules
    if of_files or not args.sizes or not args.source_mesh:
        raise UsageError(
            "a simulation needs sizes and a source mesh, and no checkpoint",
            expected="--sizes and --source-mesh",
            found=of_files or "not both of them",
            fix=f"megatron-ucp plan --simulate {args.simulate} "
            "--sizes layers=32,hidden=4096,heads=32,vocab=32000 --source-mesh dp=8,zero=1 "
            "--mesh dp=6,zero=1",
        )
    sizes = plan.paper_sizes(args.simulate, args.sizes)
    source = Mesh.parse(args.source_mesh)
    return plan.simulate(
        args.simulate, sizes, source, target.with_zero_of(source), parsed_config(args.ds_config)
    )


def _print(found: Any) -> None:
    print(f"{found.source_mesh}  to  {found.mesh}")
    rows = _table(found.ranks)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(f"{text:>{width}}" for text, width in zip(row, widths, strict=True)))
    if len(found.ranks) > _SHOWN:
        print(f"and {len(found.ranks) - _SHOWN} ranks more: --json has them all")
    total = sum(one.read_bytes for one in found.ranks)
    print(
        f"all ranks read {total / 1e6:,.1f} MB, {total / found.stored_bytes:.3f} times the states "
        "of the checkpoint"
    )
    print_notes(found.notes)


def _table(ranks: Any) -> list[tuple[str, ...]]:
    heads = ("files", "MB read", "segments", "MB of states", "MB at most")
    rows: list[tuple[str, ...]] = [("rank", *ranks[0].coord.shown, *heads)]
    for one in ranks[:_SHOWN]:
        place = map(str, (one.rank, *one.coord.shown.values(), len(one.files)))
        sizes = (one.read_bytes, one.state_bytes, one.peak_bytes)
        read, *memory = [f"{size / 1e6:,.1f}" for size in sizes]
        rows.append((*place, read, f"{one.copies:,}", *memory))
    return rows
