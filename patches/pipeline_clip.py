"""A pipeline in fp32 without ZeRO: the gradient norm counts every stage's parameters, and tied ones
once."""

import functools
from collections.abc import Iterable
from typing import Any

from . import Patch


def change() -> None:
    import torch
    from deepspeed import comm
    from deepspeed.runtime import engine
    from deepspeed.runtime.constants import PIPE_REPLICATED
    from deepspeed.runtime.utils import is_model_parallel_parameter
    from deepspeed.utils.bwc import bwc_tensor_model_parallel_rank

    stock: Any = engine.clip_grad_norm_

    @functools.wraps(stock)
    def clip_grad_norm_(
        parameters: Iterable[Any], max_norm: float, norm_type: float = 2, mpu: Any = None
    ) -> Any:
        if mpu is None or not hasattr(
            mpu, "get_pipe_parallel_world_size"
        ):  # not the grid of a pipeline
            return stock(parameters, max_norm, norm_type, mpu)
        params = [param for param in parameters if param.grad is not None]
        first = bwc_tensor_model_parallel_rank(mpu) == 0
        counted = [
            param.grad.detach().float().norm(norm_type)
            for param in params
            if not getattr(param, PIPE_REPLICATED, False)
            and (first or is_model_parallel_parameter(param))
        ]
        device = params[0].grad.device if params else "cpu"
        total = (
            torch.stack(counted).pow(norm_type).sum() if counted else torch.zeros((), device=device)
        )
        comm.all_reduce(total, group=mpu.get_model_parallel_group())
        total = total.pow(1.0 / norm_type)
        factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
        for param in params:
            param.grad.mul_(factor)
        return total

    engine.clip_grad_norm_ = clip_grad_norm_


PATCH = Patch(
    package="deepspeed",
    versions=("0.19.8",),
    upstream="deepspeed.runtime.utils.clip_grad_norm_",
    why="it asks for the model-parallel rank, which in a pipeline counts stages too, and so leaves "
    "out biases and norms of all "
    "stages but the first; and it counts a tied weight once for each stage that holds it: another "
    "norm than without a "
    "pipeline, and another clipping",
    until="upstream asks for the tensor-parallel rank and leaves out ds_pipe_replicated, as "
    "get_weight_norm does",
    change=change,
)
