"""The weights of a checkpoint as a folder that transformers loads, straight from the files of any
mesh. Replaces zero_to_fp32.py; --dtype float32 gives its dtype.

OUTPUT is the new folder: it must not exist, and appears as a whole or not at all. Neither a GPU nor
DeepSpeed nor Megatron is needed."""

import argparse
from typing import Any

from megatron_ucp.cli.output import (
    DONE,
    FOUND,
    add_allow,
    add_checkpoint,
    add_dtype,
    allowed,
    named,
    show,
)
from megatron_ucp.reshard.options import EXPORT

HELP = "write the weights as a folder that transformers loads"
EXAMPLE = "export-hf runs/llama hf --dtype bf16 --verify"
_PLAIN = (
    *("dtype", "max_shard_size", "tag", "rules", "config", "family"),
    *("tokenizer", "merge", "verify", "force"),
)
_DTYPES = ("float32", "bfloat16", "float16", "float64")
OPTIONS = {
    "--config FILE_OR_FOLDER": "the model's config.json, or its folder (an adapter's "
    "adapter_config.json); tokenizer files are copied from there. Default: what the "
    "checkpoint says, else the file beside it",
    "--tokenizer FOLDER": "copy the tokenizer files of this folder",
    "--merge BASE": "refused: the adapter is written, and peft merges it",
    "--verify": "read the files back and compare them with the checkpoint, bit by bit",
    "--force": "replace OUTPUT, if this command wrote it and nobody changed it since",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_checkpoint(parser)
    parser.add_argument("output", metavar="OUTPUT", help="the new folder")
    add_dtype(
        parser,
        _DTYPES,
        "of the weights, to which the fp32 master weights are rounded: float32, bfloat16, float16 "
        "(default: that of training)",
    )
    parser.add_argument(
        "--max-shard-size", default="5GB", metavar="SIZE", help="of a file (default 5GB)"
    )
    parser.add_argument(
        "--family",
        default="",
        metavar="NAME",
        help="where neither the checkpoint nor its config says one",
    )
    add_allow(parser, EXPORT)


def run(args: Any) -> int:
    from megatron_ucp.reshard.hugging_face.export import export_hf

    found = export_hf(
        args.path,
        args.output,
        allow=allowed(args),
        **named(args, *_PLAIN),
    )
    return show(args, found, DONE if found.loadable else FOUND)
