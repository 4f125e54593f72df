"""A pipeline of layers with experts: the auxiliary losses of a stage are scaled as the loss of the
last one."""

import functools
from typing import Any

import torch

from . import Patch


def change() -> None:
    from deepspeed.runtime.pipe import schedule
    from deepspeed.runtime.pipe.engine import PipelineEngine

    stock: Any = PipelineEngine._exec_backward_pass

    @functools.wraps(stock)
    def exec_backward_pass(self: Any, buffer_id: int) -> Any:
        if not self.is_last_stage():  # there the loss itself carries the scale
            from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

            scale = getattr(self.optimizer, "loss_scale", 1.0) / self.gradient_accumulation_steps()
            MoEAuxLossAutoScaler.main_loss_backward_scale = torch.tensor(scale, device=self.device)
        return stock(self, buffer_id)

    PipelineEngine._exec_backward_pass = exec_backward_pass
    # the schedule calls methods by this table
    PipelineEngine._INSTRUCTION_MAP[schedule.BackwardPass] = exec_backward_pass


PATCH = Patch(
    package="deepspeed",
    versions=("0.19.8",),
    upstream="deepspeed.runtime.pipe.engine.PipelineEngine._exec_backward_pass",
    why="gradients that come from the next stage are divided by the number of micro batches "
    "already; those of megatron-core's auxiliary losses start on each stage, where nobody divides "
    "them (or multiplies them by the loss scale)",
    until="DeepSpeed lets a stage add a loss of its own",
    change=change,
)
