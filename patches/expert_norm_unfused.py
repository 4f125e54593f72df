"""Experts in half precision without ZeRO: the gradient norm counts them."""

import functools
from typing import Any

from . import Patch
from .expert_clip import squares_of_experts


def change() -> None:
    from deepspeed.moe.utils import is_moe_param
    from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer

    stock: Any = FP16_UnfusedOptimizer.unscale_and_clip_grads

    @functools.wraps(stock)
    def unscale_and_clip_grads(self: Any, total_norm: Any, *args: Any, **kwargs: Any) -> Any:
        pairs = [
            (model, master)
            for group, masters in zip(self.fp16_groups, self.fp32_groups, strict=True)
            for model, master in zip(group, masters, strict=True)
        ]
        grads = [master.grad for model, master in pairs if is_moe_param(model)]
        if grads:
            squares = squares_of_experts(grads, grads)
            total_norm = float((squares + float(total_norm) ** 2).sqrt())
            self._global_grad_norm = total_norm
        return stock(self, total_norm, *args, **kwargs)

    FP16_UnfusedOptimizer.unscale_and_clip_grads = unscale_and_clip_grads


PATCH = Patch(
    package="deepspeed",
    versions=("0.19.8",),
    upstream="deepspeed.runtime.fp16.unfused_optimizer.FP16_UnfusedOptimizer.step",
    why="it leaves experts out of the gradient norm, as if they had no gradient: what it clips to "
    "depends on the expert-parallel size",
    until="upstream adds the experts' norms, as FP16_Optimizer does",
    change=change,
)
