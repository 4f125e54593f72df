"""Elastic runs (--elastic): after each start by torchrun the ranks that are there get a mesh, and
the global batch stays what it was.

Everything here is arithmetic on the arguments, the same on every rank.
"""

import argparse
import math
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from megatron_ucp.core.mesh import Mesh
from megatron_ucp.errors import UsageError
from pretrain.engine import DEEPSPEED, chunks_of

MINUTES, ELASTIC_MINUTES = 30.0, 10.0
AGAIN = 75  # exit code of a rank that its agent shall start again; EX_TEMPFAIL of sysexits.h
NOTICE_S = 2.0
# What the first start alone reads from --load: a later one goes on from --save.
_OF_THE_FIRST_START = ("ckpt_step", "load_tag", "finetune", "no_load_optim")


def timeout(given: Mapping[str, Any]) -> timedelta:
    """How long a rank waits for others at most. Of an elastic run it is less: where a node is lost
    without a word, nothing else ends the wait."""
    usual = ELASTIC_MINUTES if given.get("elastic") else MINUTES
    minutes = given.get("distributed_timeout_minutes")
    return timedelta(minutes=usual if minutes is None else minutes)


def save_options(args: argparse.Namespace) -> dict[str, float]:
    """Options of saves in the background: of an elastic run they too wait for no dead rank."""
    bounded = args.elastic and args.async_save
    return {"deadline": timeout(vars(args)).total_seconds()} if bounded else {}


def memory_options(args: argparse.Namespace) -> dict[str, Any]:
    """Options of in-memory checkpoints."""
    if args.keep_memory_every is None:
        return {}
    every, copies = args.keep_memory_every, args.keep_memory_copies
    return {"keep": "memory", "every": every, "copies": copies, "folder": args.save}


def check_launcher(given: Mapping[str, Any], environment: Mapping[str, str]) -> None:
    """Raises UsageError where torchrun's agents keep one store for all of their starts: gloo and
    NCCL would look for ranks of the start before (pytorch 135712). Also where NCCL is told to wait
    for ever."""
    if not given.get("elastic"):
        return
    if environment.get("TORCH_NCCL_ASYNC_ERROR_HANDLING") == "0":
        raise UsageError(
            "with TORCH_NCCL_ASYNC_ERROR_HANDLING=0 a rank waits for a lost node for ever",
            expected="1, as torchrun sets it",
            found="0",
            fix="unset it on every node, and start again",
        )
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        raise UsageError(
            "torchrun shares its store with the ranks: after a restart they would wait for those "
            "that are gone",
            expected="TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in the environment of torchrun",
            found="not set",
            fix="export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 on every node, and start again",
        )


def resumed_flags(given: Mapping[str, Any]) -> dict[str, Any]:
    """The flags of a start that finds tags in --save: it takes the newest whole one, whatever the
    first start was told to load."""
    others = {name: value for name, value in given.items() if name not in _OF_THE_FIRST_START}
    return others | {"load": given["save"], "universal_checkpoint": True}


def mesh_names(meshes: str | None) -> list[str]:
    """The meshes of --elastic-meshes one by one, in the order and the words of the user."""
    return [text for text in map(str.strip, (meshes or "").split(";")) if text]


def allowed_meshes(args: argparse.Namespace) -> list[Mesh]:
    """The meshes of --elastic-meshes. Raises UsageError."""
    return [Mesh.parse(text) for text in mesh_names(args.elastic_meshes)]


def vocabulary_multiple(args: argparse.Namespace) -> int:
    """What the rows of the embedding have to divide by, so that each mesh can cut them."""
    sizes = [mesh.size("tp") for mesh in allowed_meshes(args)] if args.elastic else []
    return math.lcm(args.tensor_model_parallel_size, *sizes)


# ---------------------------------------------------------------- the mesh


def choose_mesh(args: argparse.Namespace, ranks: int) -> None:
    """Sets the sizes of the mesh for so many ranks: the first of --elastic-meshes that has as many,
    or tp, pp and sp as the flags say, and dp as large as it gets. Raises UsageError where there is
    none."""
    meshes = allowed_meshes(args)
    if not meshes:
        _check_sizes(args, ranks)
        return
    found = next((mesh for mesh in meshes if mesh.world == ranks), None)
    if found is None:
        raise UsageError(
            f"no mesh of --elastic-meshes has {ranks} ranks",
            expected="; ".join(f"{mesh} ({mesh.world} ranks)" for mesh in meshes),
            found=f"{ranks} ranks",
            fix=f"add a mesh of {ranks} ranks; or keep torchrun's --nnodes to numbers of nodes "
            "that have a mesh",
        )
    _set_mesh(args, found)


def _check_sizes(args: argparse.Namespace, ranks: int) -> None:
    """Raises UsageError where so many ranks can't keep tp, pp and sp."""
    tp, pp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    each = tp * pp * max(args.ds_sequence_parallel_size, 1)
    if ranks % each:
        raise UsageError(
            f"{ranks} ranks can't keep tp={tp}, pp={pp}",
            expected=f"a multiple of {each} ranks",
            found=f"{ranks} ranks",
            fix=f'allow a mesh of {ranks} ranks: --elastic-meshes "dp={ranks},zero=1;..."; or keep '
            "torchrun's --nnodes to numbers of nodes that have a mesh",
        )


def _set_mesh(args: argparse.Namespace, mesh: Mesh) -> None:
    settable = Mesh(
        tp=mesh.tp, pp=mesh.pp, ep=mesh.ep, etp=mesh.etp, sp=mesh.sp, dp=mesh.dp, zero=mesh.zero
    )
    if mesh != settable:
        raise UsageError(
            "--elastic-meshes has an axis that this program can't choose",
            expected="tp, pp, ep, etp, sp, dp, zero",
            found=str(mesh),
        )
    args.tensor_model_parallel_size = mesh.tp
    args.pipeline_model_parallel_size = mesh.pp
    args.expert_model_parallel_size = mesh.ep
    args.expert_tensor_parallel_size = mesh.etp
    args.ds_sequence_parallel_size = mesh.sp
    if not mesh.says_zero:
        return
    if args.engine == DEEPSPEED:
        args.zero_stage = mesh.zero
    elif mesh.zero > 1:
        raise UsageError(
            "megatron-core's own engine has no such ZeRO stage",
            expected="zero=0 or zero=1, which is --use-distributed-optimizer",
            found=str(mesh),
        )
    else:
        args.use_distributed_optimizer = mesh.zero == 1


# ---------------------------------------------------------------- the batch


def fit_batch(args: argparse.Namespace) -> None:
    """Sets the micro batch, and where --elastic-batch-tolerance allows it the global batch, for the
    data-parallel size that there is. Raises UsageError where the ranks can't share the batch."""
    dp, wanted = args.data_parallel_size, args.global_batch_size
    batch = shared_batch(wanted, dp, args.elastic_batch_tolerance)
    stages = args.pipeline_model_parallel_size if chunks_of(args) > 1 else 1
    keeps = args.num_experts is not None  # the balance of experts is that of a micro batch
    micro = args.micro_batch_size if keeps else _micro(batch // dp, args.micro_batch_size, stages)
    args.global_batch_size, args.micro_batch_size = batch, micro


def shared_batch(wanted: int, dp: int, tolerance: float) -> int:
    """Samples of an iteration: as many as `wanted`, else the nearest number that `dp` ranks share
    equally, within a tolerance (a share of `wanted`). Raises UsageError where there is none."""
    if wanted % dp == 0:
        return wanted
    below = wanted // dp * dp
    near = min((size for size in (below, below + dp) if size), key=lambda size: abs(size - wanted))
    if abs(near - wanted) <= tolerance * wanted:
        return near
    needed = math.ceil(1000 * abs(near / wanted - 1)) / 1000
    raise UsageError(
        f"--global-batch-size {wanted} can't be shared equally by {dp} data-parallel ranks",
        expected=f"a multiple of {dp}",
        found=wanted,
        fix=f"for all meshes of the run give a common multiple, such as {math.lcm(wanted, dp)}; or "
        f"allow {near} here: --elastic-batch-tolerance {needed}",
    )


def _micro(samples: int, most: int, stages: int) -> int:
    """The largest micro batch of at most `most` samples that a rank's share consists of; an
    interleaved pipeline wants a multiple of its stages of them."""
    sizes = [size for size in range(1, most + 1) if not samples % size]
    fitting = [size for size in sizes if not samples // size % stages]
    return max(fitting or sizes)


def last_iteration(args: argparse.Namespace, iteration: int, consumed: int) -> int:
    """Where a run ends that has come to an iteration: after as many samples as without an
    interruption, however many of them an iteration took."""
    return iteration + max(0, args.train_samples - consumed) // args.global_batch_size


def mesh_of(args: argparse.Namespace) -> Mesh:
    """The mesh of complete arguments."""
    return Mesh(
        tp=args.tensor_model_parallel_size,
        pp=args.pipeline_model_parallel_size,
        ep=args.expert_model_parallel_size,
        etp=args.expert_tensor_parallel_size if args.num_experts else 0,
        sp=args.ds_sequence_parallel_size,
        dp=args.data_parallel_size,
        zero=args.zero_stage,
    )


def start_line(args: argparse.Namespace) -> str:
    """The mesh and the batch of a start, in a line."""
    batch, stated = args.global_batch_size, args.stated_batch_size
    changed = (
        "" if batch == stated else f" (--global-batch-size {stated}: {batch / stated - 1:+.1%})"
    )
    return (
        f"elastic: {args.world_size} ranks, {mesh_of(args)}; global batch {batch}{changed} = "
        f"{args.micro_batch_size} x {args.data_parallel_size} ranks x {args.gradient_accumulation}"
    )
