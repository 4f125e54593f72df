"""The arguments that say which job a checkpoint is for."""

import argparse
import re
from typing import Any

from megatron_ucp.cli.output import add_dtype, add_options
from megatron_ucp.errors import UsageError

_MOST_CHARS = 2000  # of the numbers of layers
_DTYPES = ("float32", "bfloat16", "float16")


def add_target(parser: argparse.ArgumentParser) -> None:
    """The arguments that describe a mesh and what it alone does not say."""
    add_options(
        parser,
        {
            "--mesh MESH": "such as tp=2,pp=1,dp=4,zero=1; an axis that is left out is 1, a ZeRO "
            "stage is the source's",
            "--ds-config FILE": "the DeepSpeed config of the job (default: as the source)",
            "--optimizer CLASS": "such as torch.AdamW or deepspeed.FusedAdam (default: the "
            "source's)",
            "--stages HOW": "how the layers of a pipeline are divided: uniform, parameters, layers "
            "(as many of the most frequent kind each), or their numbers, such as 3,3",
            "--groups FILE": "JSON: the names of each parameter group, in the optimizer's order",
        },
    )
    parser.add_argument(
        "--pipeline",
        action=argparse.BooleanOptionalAction,
        help="whether the model is DeepSpeed's PipelineModule on one stage too (default: as the "
        "arguments say that Megatron-DeepSpeed saved)",
    )
    add_dtype(parser, _DTYPES, "of the training weights: float32, bfloat16 or float16")
    parser.add_argument(
        "--sub-group-size", type=int, metavar="ELEMENTS", help="of ZeRO stage 3, for one rank"
    )


def target_of(args: Any, what: str = "") -> Any:
    """The Target that the arguments describe; None where there is no mesh, and nothing that needs
    one. Raises UsageError, without --mesh too where `what` is for one mesh."""
    from megatron_ucp.formats.deepspeed.target import Target
    from megatron_ucp.reshard.options import no_mesh, read_json

    if what and not args.mesh:
        raise no_mesh(what)
    stages = args.stages
    if stages and re.fullmatch("[0-9,]*[0-9][0-9,]*", stages) and len(stages) < _MOST_CHARS:
        stages = tuple(int(count) for count in stages.split(",") if count)
    said = {
        "dtype": args.dtype,
        "optimizer": args.optimizer,
        "groups": _groups(args.groups, read_json(args.groups)) if args.groups else None,
        "stages": stages,
        "sub_group_size": args.sub_group_size,
        "pipeline": args.pipeline,
    }
    given = {name: value for name, value in said.items() if value is not None}
    return Target.of(args.mesh or "", **given) if args.mesh or given else None


def refuse_unused_size(args: Any, target: Any, source: str | None, has_stages: bool = True) -> None:
    """Raises UsageError for --sub-group-size where the output has no ZeRO stage 3: `source` is
    where a stage that nobody names comes from (None: it is 0), `has_stages` says whether the format
    has any."""
    if args.sub_group_size is None:
        return
    stage = target.mesh.zero
    if has_stages and not target.mesh.says_zero and source is not None:
        from megatron_ucp.reshard.look import look

        stage = look(source, args.tag, args.rules).mesh.zero
    if stage != 3 or not has_stages:
        raise UsageError(
            "--sub-group-size is of ZeRO stage 3 alone",
            expected="--mesh with zero=3",
            found=f"ZeRO stage {stage}" if has_stages else "a format without stages",
            fix="leave --sub-group-size out",
        )


def _groups(file: str, found: Any) -> tuple[tuple[str, ...], ...]:
    """Names of each group, from a file. Raises UsageError."""
    lists = isinstance(found, list) and all(isinstance(names, list) for names in found)
    if not lists or not all(isinstance(name, str) for names in found for name in names):
        raise UsageError(
            "the file of groups holds no lists of names",
            file=file,
            expected='[["a.weight"], ["a.bias"]]',
            fix="write one list of names for each group of the optimizer",
        )
    return tuple(tuple(names) for names in found)
