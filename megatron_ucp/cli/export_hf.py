"""The weights of a checkpoint as a folder of a Hugging Face model, straight from native files of
any mesh.

OUTPUT is the new folder; it must not exist, and appears whole or not at all. Neither a GPU nor
DeepSpeed nor Megatron is needed.
"""

import argparse
import json
from dataclasses import asdict
from typing import Any

from megatron_ucp.cli.output import DONE, add_checkpoint, allowed, progress_bar

HELP = "write the weights as a folder of a Hugging Face model"


def add_arguments(verb: argparse.ArgumentParser) -> None:
    add_checkpoint(verb)
    verb.add_argument("output", help="the new folder")
    verb.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16", "float64"),
        help="of the weights, which are rounded from the masters (default: that of training)",
    )
    verb.add_argument(
        "--max-shard-size",
        default="5GB",
        metavar="SIZE",
        help="of a file: 5GB (the default), 200MB",
    )
    verb.add_argument(
        "--config",
        metavar="DIR",
        help="a folder with the model's config.json, where the checkpoint does not say what its "
        "model is; tokenizer files are copied from there",
    )
    verb.add_argument("--family", default="", help="of a checkpoint that does not say its own")
    verb.add_argument("--tokenizer", metavar="DIR", help="copy the tokenizer files of this folder")
    verb.add_argument(
        "--merge",
        metavar="BASE",
        help="the folder of the base model of a LoRA run: write that model with the adapter added "
        "(--config DIR then has adapter_config.json); without it the adapter alone is written",
    )
    verb.add_argument(
        "--verify",
        action="store_true",
        help="read the files back and compare them with the checkpoint, bit by bit",
    )
    verb.add_argument(
        "--allow",
        default="",
        help="what may happen besides exact copies and rounding: mean, stale, weights "
        "(comma-separated)",
    )


def run(args: Any) -> int:
    from megatron_ucp.reshard.export import export_hf

    found = export_hf(
        args.path,
        args.output,
        dtype=args.dtype,
        max_shard_size=args.max_shard_size,
        tag=args.tag,
        rules=args.rules,
        config=args.config,
        family=args.family,
        tokenizer=args.tokenizer,
        merge=args.merge,
        verify=args.verify,
        allow=allowed(args),
        progress=progress_bar(args, "B"),
    )
    if args.json:
        print(json.dumps(asdict(found)))
        return DONE
    for note in found.notes:
        print(f"note: {note}")
    read_back = ", read back and equal" if found.verified else ""
    print(
        f"{found.path}: {found.source_mesh} became {found.tensors} tensors of {found.dtype} in "
        f"{found.files} files, {found.written_bytes:,} bytes in {found.seconds:.1f} s{read_back}"
    )
    return DONE
