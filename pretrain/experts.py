"""What flags say of experts: checked, and as `engines/megatron` takes it."""

import argparse
from collections.abc import Mapping
from typing import Any

from megatron_ucp.errors import UsageError
from megatron_ucp.families import find_family
from pretrain.checks import check_divides, flag_of
from pretrain.engine import DEEPSPEED
from pretrain.family import trained_families
from pretrain.flags import FLAGS

# Flags that only a family with experts has; the attribute of `--num-experts` comes first.
ATTRIBUTES = (
    "num_experts",
    "moe_ffn_hidden_size",
    "moe_shared_expert_intermediate_size",
    "moe_layer_freq",
    "moe_router_topk",
    "moe_router_score_function",
    "moe_router_pre_softmax",
    "moe_router_enable_expert_bias",
    "moe_router_bias_update_rate",
    "moe_aux_loss_coeff",
    "moe_z_loss_coeff",
    "moe_token_dispatcher_type",
)
# Of these, what makes another model.
MODEL = ATTRIBUTES[:8]


def has_experts(family: str) -> bool:
    """Whether layers of the family may have experts."""
    builder = find_family(family).builder
    return builder is not None and builder.experts


def check_experts(args: argparse.Namespace, given: Mapping[str, Any]) -> None:
    """Completes the flags of experts. Raises UsageError for those that the family does not have,
    and for what is no model."""
    if not has_experts(args.model_family):
        _check_dense(args, given)
        return
    if args.moe_ffn_hidden_size is None:
        args.moe_ffn_hidden_size = args.ffn_hidden_size
    experts_of(args)  # its sizes fit


def _check_dense(args: argparse.Namespace, given: Mapping[str, Any]) -> None:
    usual = {flag.attribute: flag.default for flag in FLAGS}
    # a checkpoint's arguments have all of them; what every model has says nothing
    flags = [name for name in ATTRIBUTES if given.get(name) not in (None, usual[name])]
    if args.num_experts == 1:  # which is what Megatron-DeepSpeed calls a model without
        flags.remove("num_experts")
        args.num_experts = None
    if flags:
        others = [name for name in trained_families() if has_experts(name)]
        raise UsageError(
            f"the layers of --model-family {args.model_family} have no experts",
            expected=f"--model-family {' or '.join(others)}",
            found=f"{flag_of(flags[0])} {given[flags[0]]}",
            fix="leave it out, or use another family",
        )


def check_expert_mesh(args: argparse.Namespace) -> None:
    """Completes --expert-tensor-parallel-size. Raises UsageError where the mesh can't train the
    experts. The sizes tp and pp divide the world."""
    tp, ep = args.tensor_model_parallel_size, args.expert_model_parallel_size
    if not has_experts(args.model_family):
        _check_no_expert_mesh(args)
        args.expert_tensor_parallel_size = tp
        return
    args.expert_tensor_parallel_size = args.expert_tensor_parallel_size or tp
    etp = args.expert_tensor_parallel_size
    stage = args.world_size // args.pipeline_model_parallel_size
    if stage % (ep * etp):
        raise UsageError(
            "--expert-model-parallel-size x --expert-tensor-parallel-size does not divide the "
            "ranks of a stage",
            expected=f"a divisor of {stage}",
            found=f"{ep} x {etp}",
        )
    check_divides(args, "expert_model_parallel_size", args.num_experts, "--num-experts")
    width = args.moe_ffn_hidden_size
    check_divides(args, "expert_tensor_parallel_size", width, "--moe-ffn-hidden-size")
    apart = (ep, etp) != (1, tp)
    if args.engine == DEEPSPEED and apart and not etp <= tp <= etp * ep:
        raise UsageError(
            "DeepSpeed would not save all parts of a model whose experts are cut like that",
            expected="--expert-tensor-parallel-size <= --tensor-model-parallel-size <= "
            "--expert-tensor-parallel-size x --expert-model-parallel-size",
            found=f"{etp}, {tp}, {etp} x {ep}",
            fix="leave --expert-tensor-parallel-size out",
        )
    if tp > 1 and not args.sequence_parallel:
        raise UsageError(
            "megatron-core trains experts under tensor parallelism with sequence parallelism only",
            expected="--sequence-parallel",
            found=f"--tensor-model-parallel-size {tp} without it",
        )


def _check_no_expert_mesh(args: argparse.Namespace) -> None:
    """Raises UsageError where ranks are to share experts that the family has not."""
    ep, etp = args.expert_model_parallel_size, args.expert_tensor_parallel_size
    if ep > 1 or etp not in (None, 1, args.tensor_model_parallel_size):
        raise UsageError(
            f"the layers of --model-family {args.model_family} have no experts",
            expected="--expert-model-parallel-size 1",
            found=f"{ep}, --expert-tensor-parallel-size {etp or 1}",
        )


def check_expert_zero(args: argparse.Namespace) -> None:
    """Raises UsageError for a ZeRO stage that can't train the experts."""
    ep, etp = args.expert_model_parallel_size, args.expert_tensor_parallel_size
    apart = ep > 1 or etp != args.tensor_model_parallel_size
    if args.zero_stage == 3 and has_experts(args.model_family) and apart:
        raise UsageError(
            "--zero-stage 3 does not go with experts that ranks share: DeepSpeed partitions all "
            "parameters over the same ranks",
            expected="--zero-stage 0, 1 or 2, or --expert-model-parallel-size 1 and "
            "--expert-tensor-parallel-size as --tensor-model-parallel-size",
            found=f"--zero-stage 3, {ep} and {etp}",
        )


def experts_of(args: argparse.Namespace) -> Any:
    """The experts that the flags say; None for a family without. Raises UsageError."""
    if not has_experts(args.model_family):
        return None
    # here, as it imports torch: --help is quick
    from pretrain.mcore.experts import Experts

    return Experts(
        number=args.num_experts,
        ffn=args.moe_ffn_hidden_size,
        topk=args.moe_router_topk,
        shared_ffn=args.moe_shared_expert_intermediate_size or 0,
        every=args.moe_layer_freq,
        dispatcher=args.moe_token_dispatcher_type,
        score=args.moe_router_score_function,
        pre_softmax=args.moe_router_pre_softmax,
        aux_loss=args.moe_aux_loss_coeff,
        z_loss=args.moe_z_loss_coeff,
        bias=args.moe_router_enable_expert_bias,
        bias_rate=args.moe_router_bias_update_rate,
    )
