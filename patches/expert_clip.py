"""Experts in fp32 without ZeRO: the gradient norm counts every expert once."""

import functools
from collections.abc import Iterable
from typing import Any

import torch

from . import Patch


def change() -> None:
    from deepspeed import comm
    from deepspeed.moe.utils import is_moe_param
    from deepspeed.runtime.constants import PIPE_REPLICATED
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.utils import is_model_parallel_parameter
    from deepspeed.utils.bwc import bwc_tensor_model_parallel_rank

    stock: Any = DeepSpeedEngine.clip_fp32_gradients

    @functools.wraps(stock)
    def clip_fp32_gradients(self: Any) -> Any:
        if not _copies() or self.mpu is None:
            return stock(self)
        params = [param for param in self.module.parameters() if param.grad is not None]
        first = bwc_tensor_model_parallel_rank(self.mpu) == 0
        counted = [
            param.grad
            for param in params
            if not is_moe_param(param)
            and not getattr(param, PIPE_REPLICATED, False)
            and (first or is_model_parallel_parameter(param))
        ]
        total = _squares(counted, params)
        comm.all_reduce(total, group=self.mpu.get_model_parallel_group())
        total += squares_of_experts([p.grad for p in params if is_moe_param(p)], params)
        norm = total.sqrt()
        factor = (self.gradient_clipping() / (norm + 1e-6)).clamp(max=1.0)
        for param in params:
            param.grad.mul_(factor)
        return norm

    DeepSpeedEngine.clip_fp32_gradients = clip_fp32_gradients


def squares_of_experts(grads: Iterable[torch.Tensor], near: Iterable[torch.Tensor]) -> torch.Tensor:
    """The sum of the squares of all experts' gradients, each expert once: all ranks together hold
    as many copies of each as its data-parallel group has ranks. Collective over the world; `near`
    are tensors on this rank's device."""
    from deepspeed import comm

    total = _squares(grads, near)
    comm.all_reduce(total)
    return total / _copies()


def _copies() -> int:
    """How many ranks have a copy of an expert; 0 where experts have no groups of their own."""
    from deepspeed import comm
    from deepspeed.utils import groups

    found = groups._get_expert_data_parallel_group_dict()
    return comm.get_world_size(group=next(iter(found.values()))) if found else 0


def _squares(grads: Iterable[torch.Tensor], near: Iterable[torch.Tensor]) -> torch.Tensor:
    each = [grad.detach().float().norm(2).square() for grad in grads]
    device = next((tensor.device for tensor in near), torch.device("cpu"))
    return torch.stack(each).sum() if each else torch.zeros((), device=device)


PATCH = Patch(
    package="deepspeed",
    versions=("0.19.8",),
    upstream="deepspeed.runtime.utils.clip_grad_norm_, called by "
    "DeepSpeedEngine.clip_fp32_gradients",
    why="each data-parallel rank takes the norm of the experts that it holds, and then the mean of "
    "these norms is taken: smaller than the norm of all of them, and another one for each "
    "expert-parallel size",
    until="upstream sums the squares over the ranks that hold different experts",
    change=change,
)
