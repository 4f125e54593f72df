"""A pipeline in bf16 under BF16_Optimizer: a stage may have nothing to add to the gradient norm."""

import functools
from typing import Any

from . import Patch


def change() -> None:
    import torch
    from deepspeed.accelerator import get_accelerator
    from deepspeed.runtime import bf16_optimizer

    stock: Any = bf16_optimizer.get_global_norm_of_tensors

    @functools.wraps(stock)
    def get_global_norm_of_tensors(input_tensors: Any, *args: Any, **kwargs: Any) -> Any:
        accelerator: Any = get_accelerator()
        return stock(
            input_tensors or [torch.zeros(1, device=accelerator.current_device_name())],
            *args,
            **kwargs,
        )

    bf16_optimizer.get_global_norm_of_tensors = get_global_norm_of_tensors


PATCH = Patch(
    package="deepspeed",
    versions=("0.19.8",),
    upstream="deepspeed.runtime.utils.get_global_norm_of_tensors",
    why="it stacks a list that is empty on a stage whose parameters are all counted elsewhere (a "
    "tied head alone; a norm alone on "
    "tensor-parallel ranks above 0), and raises: expected a non-empty TensorList",
    until="upstream takes an empty list for a norm of 0, as get_weight_norm does",
    change=change,
)
