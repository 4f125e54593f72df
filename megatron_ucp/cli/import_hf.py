"""A folder of a Hugging Face model as native files for any mesh, before the first step of training.

OUTPUT is the new tag folder; it must not exist, and appears whole or not at all. Not needed to
train: an engine loads the Hugging Face folder itself.
"""

import argparse
import json
from dataclasses import asdict
from typing import Any

from megatron_ucp.cli.convert import add_target, read_json, target_of
from megatron_ucp.cli.output import DONE, allowed, progress_bar

HELP = "write native files from a folder of a Hugging Face model"


def add_arguments(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("path", help="the folder with config.json and the safetensors files")
    verb.add_argument("output", help="the new tag folder, such as llama/global_step0")
    add_target(verb)
    verb.add_argument(
        "--family", default="", help="of megatron-core's modules (default: as config.json says)"
    )
    verb.add_argument(
        "--padded-vocab-size",
        type=int,
        help="rows of the vocabulary with padding, which is zeros (default: as many as there are)",
    )
    verb.add_argument(
        "--allow", default="", help="narrow: round a folder in fp64 to the fp32 masters"
    )


def run(args: Any) -> int:
    from megatron_ucp.reshard.import_hf import import_hf

    found = import_hf(
        args.path,
        args.output,
        target=target_of(args),
        family=args.family,
        padded_vocab=args.padded_vocab_size,
        config=read_json(args.config) if args.config else None,
        allow=allowed(args),
        progress=progress_bar(args, "B"),
    )
    if args.json:
        print(json.dumps(asdict(found)))
        return DONE
    for note in found.notes:
        print(f"note: {note}")
    print(
        f"{found.path}: {found.source_mesh} became {found.mesh}, {found.files} files, "
        f"{found.written_bytes:,} bytes of tensors in {found.seconds:.1f} s"
    )
    return DONE
