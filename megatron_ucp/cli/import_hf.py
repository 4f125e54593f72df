"""A folder of a Hugging Face model as DeepSpeed's files for any mesh, before the first step of
training. Not needed to train: an engine loads the Hugging Face folder itself.

OUTPUT is the new tag folder: it must not exist, and appears as a whole or not at all."""

import argparse
from typing import Any

from megatron_ucp.cli.output import add_allow, allowed, named, show
from megatron_ucp.cli.target import add_target, refuse_unused_size, require_mesh, target_of
from megatron_ucp.reshard.options import IMPORT

HELP = "write DeepSpeed's files from a folder of a Hugging Face model"
EXAMPLE = "import-hf hf start/global_step0 --mesh tp=2,dp=2,zero=1"
OPTIONS = {
    "--latest": "let `latest` of the folder above name OUTPUT; it does anyway where that "
    "folder is a run without one"
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="FOLDER", help="with config.json and the safetensors files")
    parser.add_argument(
        "output", metavar="OUTPUT", help="the new tag folder, such as llama/global_step0"
    )
    add_target(parser)
    parser.add_argument(
        "--family",
        default="",
        metavar="NAME",
        help="of megatron-core's modules (default: as config.json says)",
    )
    parser.add_argument(
        "--padded-vocab-size",
        type=int,
        metavar="ROWS",
        help="of the vocabulary with padding, which is zeros (default: as many as there are)",
    )
    add_allow(parser, IMPORT)


def run(args: Any) -> int:
    from megatron_ucp.reshard.hugging_face.import_hf import import_hf

    require_mesh(args, "DeepSpeed's own files are")
    target = target_of(args)
    refuse_unused_size(args, target, None)
    found = import_hf(
        args.path,
        args.output,
        target=target,
        padded_vocab=args.padded_vocab_size,
        allow=allowed(args),
        **named(args, "latest", "family", "ds_config"),
    )
    return show(args, found)
