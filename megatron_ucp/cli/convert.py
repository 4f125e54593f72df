"""One checkpoint as another one on disk: native files for another mesh, DeepSpeed's universal
folder, or a folder for Megatron.

OUTPUT is the new tag folder; it must not exist, appears whole or not at all, and the source is
never touched. Not needed to resume: an attached engine loads any checkpoint as it is.
"""

import argparse
import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_ucp.cli.output import DONE, add_checkpoint, allowed, progress_bar
from megatron_ucp.errors import UsageError

_MOST_CHARS = 2000  # of the numbers of layers
HELP = "write native files for another mesh, a universal folder, or one for Megatron"


def add_arguments(verb: argparse.ArgumentParser) -> None:
    add_checkpoint(verb, optional=True)
    verb.add_argument("--input-folder", help=argparse.SUPPRESS)
    verb.add_argument(
        "output", nargs="?", help="the new tag folder, such as converted/global_step100"
    )
    verb.add_argument("--output-folder", help=argparse.SUPPRESS)
    verb.add_argument(
        "--to",
        choices=("native", "universal", "torch_dist"),
        help="what to write (default: native with --mesh, else universal)",
    )
    add_target(verb)
    verb.add_argument(
        "--allow",
        default="",
        help="what may happen besides exact copies: narrow, mean, stale (comma-separated)",
    )
    verb.epilog = (
        "Stock DeepSpeed's --input_folder and --output_folder may take the place of the two paths."
    )


def add_target(verb: argparse.ArgumentParser) -> None:
    """The arguments that describe a mesh and what it alone does not say."""
    verb.add_argument(
        "--mesh", help="such as tp=2,pp=1,dp=4,zero=1; axes that are left out are 1, zero is 0"
    )
    verb.add_argument(
        "--config",
        help="the DeepSpeed config of the job that will load it (default: the source's own)",
    )
    verb.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), help="of the training copies"
    )
    verb.add_argument(
        "--optimizer",
        help="class, such as torch.AdamW or deepspeed.FusedAdam (default: the source's)",
    )
    verb.add_argument(
        "--stages",
        help="how the layers of a pipeline are divided: uniform, parameters, layers (as many each "
        "of the "
        "most frequent kind), or their numbers, such as 3,3",
    )
    verb.add_argument("--sub-group-size", type=int, help="of ZeRO-3, in elements")
    verb.add_argument(
        "--groups",
        help="a JSON file with the list of names of each parameter group, in the optimizer's order",
    )


def target_of(args: Any) -> Any:
    """The Target that the arguments describe. Raises UsageError."""
    from megatron_ucp.core.mesh import Mesh
    from megatron_ucp.formats.deepspeed.target import Target

    stages = args.stages
    if stages and re.fullmatch("[0-9,]*[0-9][0-9,]*", stages) and len(stages) < _MOST_CHARS:
        stages = tuple(int(count) for count in stages.split(",") if count)
    groups = None
    if args.groups:
        groups = read_json(args.groups)
        lists = isinstance(groups, list) and all(isinstance(names, list) for names in groups)
        if not lists or not all(isinstance(name, str) for names in groups for name in names):
            raise UsageError(
                "the file of groups holds no lists of names",
                file=args.groups,
                expected='[["a.weight"], ["a.bias"]]',
                fix="write a list with one list of names for each parameter group",
            )
        groups = tuple(tuple(names) for names in groups)
    return Target(
        Mesh.parse(args.mesh or ""), args.dtype, args.optimizer, groups, stages, args.sub_group_size
    )


def read_json(path: str) -> Any:
    """The value in a JSON file. Raises UsageError."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(
            "the file can't be read as JSON",
            file=path,
            found=f"{type(error).__name__}: {error}",
            fix="check the path of the file, and that it is JSON",
        ) from None


def run(args: Any) -> int:
    from megatron_ucp.reshard.convert import convert

    paths = [
        path for path in (args.input_folder, args.path, args.output_folder, args.output) if path
    ]
    if len(paths) != 2:
        raise UsageError(
            "convert needs a source and an output",
            expected="two paths",
            found=f"{len(paths)}",
            fix="megatron-ucp convert CHECKPOINT OUTPUT --mesh tp=1,dp=4,zero=1",
        )
    to = args.to or ("native" if args.mesh else "universal")
    if to == "native" and not args.mesh:
        raise UsageError(
            "a native checkpoint is for one mesh",
            expected="--mesh",
            found="none",
            fix="give --mesh, such as --mesh tp=1,dp=4,zero=1",
        )
    allow = allowed(args)
    config = read_json(args.config) if args.config else None
    bar = progress_bar(args, "B")
    found = convert(
        paths[0],
        paths[1],
        to=to,
        target=target_of(args),
        tag=args.tag,
        rules=args.rules,
        config=config,
        allow=allow,
        progress=bar,
    )
    if args.json:
        print(json.dumps(asdict(found)))
        return DONE
    for note in found.notes:
        print(f"note: {note}")
    print(
        f"{found.path}: {found.source_mesh} became {found.mesh}, {found.files} files, "
        f"{found.written_bytes:,} bytes of tensors "
        f"in {found.seconds:.1f} s"
    )
    return DONE
