"""What flags say of the engine: DeepSpeed, or megatron-core's own gradient buffers, optimizer and
pipeline."""

import argparse
import re
from typing import Any

from megatron_ucp.errors import UsageError
from pretrain.checks import flag_of

DEEPSPEED, MEGATRON = "deepspeed", "megatron"
# Flags of the one engine, and why the other does not take them.
_NOT_DEEPSPEED = {
    "use_distributed_optimizer": "DeepSpeed's counterpart is --zero-stage 1",
    "overlap_grad_reduce": "DeepSpeed overlaps by itself",
    "overlap_param_gather": "DeepSpeed gathers by itself",
    "ddp_bucket_size": "the DeepSpeed config says the size of its buckets",
    "num_layers_per_virtual_pipeline_stage": "DeepSpeed's pipeline has no interleaved schedule",
    "pipeline_model_parallel_layout": "--pipeline-partition-method says which layers a stage holds",
}
_NOT_MEGATRON = {
    "zero_stage": "its counterpart of --zero-stage 1 is --use-distributed-optimizer",
    "deepspeed_config": "there is no DeepSpeed",
}
_USUAL_PARTITION = "type:transformer"


def check_engine(args: argparse.Namespace) -> None:
    """Completes --zero-stage. Raises UsageError for a flag that the other engine has. Tensor and
    pipeline sizes divide the world."""
    refused = _NOT_DEEPSPEED if args.engine == DEEPSPEED else _NOT_MEGATRON
    for name, why in refused.items():
        if getattr(args, name) not in (None, False):
            given = "--deepspeed_config" if name == "deepspeed_config" else flag_of(name)
            raise UsageError(
                f"{given} does not go with --engine {args.engine}: {why}",
                expected="the flag left out",
                found=f"{given} {getattr(args, name)}",
                fix=f"leave {given} out",
            )
    if args.engine == DEEPSPEED:
        args.zero_stage = 1 if args.zero_stage is None else args.zero_stage
        return
    args.zero_stage = int(args.use_distributed_optimizer)
    if args.pipeline_partition_method != _USUAL_PARTITION:
        raise UsageError(
            "--pipeline-partition-method is of DeepSpeed's pipeline",
            expected="--pipeline-model-parallel-layout",
            found=args.pipeline_partition_method,
        )
    needs = ("use_distributed_optimizer", "overlap_grad_reduce")
    if args.overlap_param_gather and not all(getattr(args, name) for name in needs):
        raise UsageError(
            "--overlap-param-gather lacks what it needs",
            expected=" ".join(map(flag_of, needs)),
            found=" ".join(flag_of(name) for name in needs if getattr(args, name)) or "neither",
        )
    _check_stages(args)


def check_sequences(args: argparse.Namespace) -> None:
    """Raises UsageError where ranks can't share sequences (--ds-sequence-parallel-size)."""
    sp, own = args.ds_sequence_parallel_size, "--ds-sequence-parallel-size"
    if sp == 1:
        return
    others = {
        "tensor_model_parallel_size": args.tensor_model_parallel_size,
        "pipeline_model_parallel_size": args.pipeline_model_parallel_size,
        "expert_model_parallel_size": args.expert_model_parallel_size,
    }
    beside = [flag_of(name) for name, size in others.items() if size > 1]
    if beside or args.engine != DEEPSPEED or args.num_experts:
        raise UsageError(
            f"{own} goes with data parallelism alone, under DeepSpeed, without experts",
            expected=f"{own} 1, or none of the others",
            found=" ".join(beside) or f"--engine {args.engine}, --num-experts {args.num_experts}",
        )
    zero: Any = args.ds_config.get("zero_optimization", {})
    if args.zero_stage == 3 and not zero.get("reduce_scatter", True):
        raise UsageError(
            f"{own} at ZeRO-3 needs reduce_scatter: without it DeepSpeed divides some gradients "
            "by another number of ranks than the rest",
            expected="zero_optimization.reduce_scatter true",
            found="false",
        )
    divided = {
        "ranks": args.world_size,
        "--seq-length": args.seq_length,
        "--num-attention-heads": args.num_attention_heads,
        "--num-query-groups": args.num_query_groups or args.num_attention_heads,
    }
    wrong = [f"{name} {count}" for name, count in divided.items() if sp < 1 or count % sp]
    if wrong:
        raise UsageError(
            f"{own} has to divide ranks, sequence, heads and key-value groups",
            expected=f"multiples of {sp}",
            found=", ".join(wrong),
        )


def _check_stages(args: argparse.Namespace) -> None:
    """Raises UsageError for stages that the layers do not divide into."""
    pp, layers = args.pipeline_model_parallel_size, args.num_layers
    each, layout = args.num_layers_per_virtual_pipeline_stage, args.pipeline_model_parallel_layout
    if layout is not None:
        if each is not None:
            raise UsageError(
                "the layers of the stages are given once",
                expected="one flag",
                found="--pipeline-model-parallel-layout and "
                "--num-layers-per-virtual-pipeline-stage",
            )
        if stages_in(layout) % pp:
            raise UsageError(
                "--pipeline-model-parallel-layout has stages that the ranks can't share equally",
                expected=f"a multiple of {pp} stages",
                found=f"{stages_in(layout)} in {layout}",
            )
        return
    if layers % (pp * (each or 1)):
        raise UsageError(
            "the layers do not divide into the stages of the pipeline",
            expected=f"a multiple of {pp * (each or 1)} layers, or "
            "--pipeline-model-parallel-layout",
            found=layers,
        )


def chunks_of(args: argparse.Namespace) -> int:
    """Chunks of a rank: 1 without interleaved stages."""
    pp, layout = args.pipeline_model_parallel_size, args.pipeline_model_parallel_layout
    if layout is not None:
        return stages_in(layout) // pp
    each = args.num_layers_per_virtual_pipeline_stage
    return 1 if each is None else args.num_layers // (pp * each)


def stages_in(layout: str) -> int:
    """Stages of a layout in Megatron's words, where "(tt|)*3" is a part that repeats."""
    repeated = re.compile(r"\(([^()]*)\)\*(\d+)")
    while found := repeated.search(layout):
        layout = layout.replace(found[0], found[1] * int(found[2]), 1)
    return layout.count("|") + 1


def check_interleaved(args: argparse.Namespace) -> None:
    """Raises UsageError for batches that an interleaved schedule can't run."""
    pp = args.pipeline_model_parallel_size
    if args.engine != MEGATRON or chunks_of(args) == 1:
        return
    if pp == 1 or args.gradient_accumulation % pp:
        raise UsageError(
            "an interleaved pipeline does not run these batches",
            expected=f"several stages, and a multiple of {pp} micro batches",
            found=f"{pp} stages, {args.gradient_accumulation} micro batches",
            fix="change --global-batch-size or --micro-batch-size",
        )
