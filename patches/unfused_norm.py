"""Half precision without ZeRO, tensor parallel: the gradient norm counts the parts of every
tensor-parallel rank."""

from typing import Any

from . import Patch

READ_BY_THE_NORM = ("tensor_model_parallel", "model_parallel", "ds_pipe_replicated")


def change() -> None:
    from deepspeed.moe.utils import split_params_grads_into_shared_and_expert_params as split
    from deepspeed.runtime.fp16 import unfused_optimizer

    def split_tagged(group: list[Any]) -> Any:
        for param in group:
            if param.grad is not None:
                for name in READ_BY_THE_NORM:
                    if hasattr(param, name):
                        setattr(param.grad, name, getattr(param, name))
        return split(group)

    unfused_optimizer.split_params_grads_into_shared_and_expert_params = split_tagged


PATCH = Patch(
    package="deepspeed",
    versions=("0.19.8",),
    upstream="deepspeed.runtime.fp16.unfused_optimizer.FP16_UnfusedOptimizer.step",
    why="it hands gradients, which carry no attributes, to get_weight_norm, which looks for "
    "tensor_model_parallel on them and so "
    "takes all gradients of tensor-parallel ranks above 0 for copies: a norm too small by a "
    "quarter at tp=2, and the clipping "
    "that follows it",
    until="upstream passes the parameters beside their gradients, as FP16_Optimizer does",
    change=change,
)
