"""One checkpoint as another one on disk: DeepSpeed's files for another mesh, its universal folder,
or a folder for Megatron-LM. Not needed to resume: a job loads any checkpoint as it is.

OUTPUT is the new tag folder: it must not exist, and appears as a whole or not at all. The source is
never touched. `plan` is the dry run. Weights for transformers are written by `export-hf`."""

import argparse
from typing import Any

from megatron_ucp.cli.output import (
    add_allow,
    add_checkpoint,
    allowed,
    named,
    show,
)
from megatron_ucp.cli.target import add_target, refuse_unused_size, require_mesh, target_of
from megatron_ucp.errors import UsageError
from megatron_ucp.reshard.options import CONVERT

HELP = "write files for another mesh, a universal folder, or one for Megatron-LM"
EXAMPLE = "convert runs/llama converted/global_step80 --mesh dp=3,zero=1"
_FORMATS = ("native", "universal", "torch_dist")
OPTIONS = {
    "--latest": "let the pointer (`latest`) of the folder above name OUTPUT; it does anyway "
    "where that folder is a run of the same format without one"
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_checkpoint(parser, optional=True)
    parser.add_argument("--input-folder", help=argparse.SUPPRESS)
    parser.add_argument(
        "output",
        nargs="?",
        metavar="OUTPUT",
        help="the new tag folder, such as converted/global_step80",
    )
    parser.add_argument("--output-folder", help=argparse.SUPPRESS)
    parser.add_argument(
        "--to",
        choices=_FORMATS,
        metavar="FORMAT",
        help="native (DeepSpeed's own files for one mesh; the default with --mesh), universal (the "
        "default without), torch_dist (for Megatron-LM)",
    )
    add_target(parser)
    add_allow(parser, CONVERT)


def run(args: Any) -> int:
    from megatron_ucp.reshard.convert import convert

    given = (args.input_folder, args.path, args.output_folder, args.output)
    paths = [path for path in given if path]
    if len(paths) != 2:
        raise UsageError(
            "convert needs a source and an output",
            expected="two paths",
            found=f"{len(paths)}",
            fix="megatron-ucp convert CHECKPOINT OUTPUT --mesh tp=1,dp=4,zero=1",
        )
    to = args.to or ("native" if args.mesh else "universal")
    if to == "native":
        require_mesh(args, "DeepSpeed's own files are")
    target = target_of(args)
    refuse_unused_size(args, target, paths[0], to == "native")
    found = convert(
        paths[0],
        paths[1],
        to=to,
        target=target,
        allow=allowed(args),
        **named(args, "latest", "tag", "rules", "ds_config"),
    )
    return show(args, found)
