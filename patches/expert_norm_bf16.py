"""Experts in bf16 under BF16_Optimizer (or FP16_Optimizer): the gradient norm counts every expert
once."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from . import Patch
from .expert_clip import squares_of_experts


def change() -> None:
    from deepspeed.runtime import bf16_optimizer
    from deepspeed.runtime.fp16 import fused_optimizer
    from deepspeed.runtime.utils import is_invalid_grad_norm

    def get_norm_with_moe_layers(
        non_expert_norm: Any,
        mpu: Any,
        expert_tensors: Mapping[str, Sequence[torch.Tensor]],
        norm_type: int = 2,
    ) -> Any:
        grads = [grad for group in expert_tensors.values() for grad in group]
        total = squares_of_experts(grads, grads) + float(non_expert_norm) ** 2
        norm = float(total.sqrt())
        return -1 if is_invalid_grad_norm(non_expert_norm) or norm != norm else norm

    modules: tuple[Any, ...] = (bf16_optimizer, fused_optimizer)
    for module in modules:
        module.get_norm_with_moe_layers = get_norm_with_moe_layers


PATCH = Patch(
    package="deepspeed",
    versions=("0.19.8",),
    upstream="deepspeed.runtime.utils.get_norm_with_moe_layers",
    why="it sums over expert-parallel ranks, and over tensor-parallel ones where experts are cut: "
    "right only where the same ranks cut experts and attention",
    until="upstream sums over all ranks and divides by the copies of an expert",
    change=change,
)
