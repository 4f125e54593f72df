"""A pipeline with ZeRO: stages with different numbers of parameter groups take part in the same
number of collectives."""

import functools
from typing import Any

from . import Patch


def change() -> None:
    import torch
    from deepspeed import comm
    from deepspeed.runtime.utils import combine_grad_norm_groups
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    stock: Any = DeepSpeedZeroOptimizer.scaled_global_norm

    def most_groups(self: Any) -> tuple[int, int]:
        """The fewest and the most groups of a stage; asked once, as groups never change."""
        if not hasattr(self, "_groups_of_stages"):
            count = torch.tensor(
                [-len(self.bit16_groups), len(self.bit16_groups)], device=self.device
            )
            self._model_parallel_all_reduce(tensor=count, op=comm.ReduceOp.MAX)
            self._groups_of_stages = (-int(count[0]), int(count[1]))
        return self._groups_of_stages

    @functools.wraps(stock)
    def scaled_global_norm(self: Any, norm_type: int = 2) -> Any:
        if getattr(self.mpu, "pipe_parallel_size", 1) == 1:  # no stages: nobody needs to ask
            return stock(self, norm_type)
        fewest, most = most_groups(self)
        if fewest == most:
            return stock(self, norm_type)
        norms = []
        for group in range(most):
            here = group < len(self.bit16_groups)
            params = self.params_in_partition[group] if here else []
            if self.cpu_offload:
                norms.append(self.complete_grad_norm_calculation_for_cpu_offload(params))
            else:
                norms.append(
                    self.get_grad_norm_direct(
                        self.averaged_gradients[group] if here else [], params
                    )
                )
        return combine_grad_norm_groups(norms, norm_type=norm_type)

    DeepSpeedZeroOptimizer.scaled_global_norm = scaled_global_norm


PATCH = Patch(
    package="deepspeed",
    versions=("0.19.8",),
    upstream="deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer.scaled_global_norm",
    why="it reduces the norm of each parameter group over all stages, though a stage may have "
    "fewer groups than another (an "
    "embedding or a head alone has matrices only): the first step never ends, or sums numbers of "
    "different things",
    until="upstream sums over a stage's groups before it reduces over stages",
    change=change,
)
