"""A machine without a GPU: megatron-core's optimizers know parameters by the names of CUDA
types."""

import sys
from typing import Any

import torch

from . import MEGATRON_CORE, Patch

ASKING = "megatron.core.optimizer"


def change() -> None:
    stock: Any = torch.Tensor.type

    def type_name(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        found = stock(self, *args, **kwargs)
        if not isinstance(found, str):
            return found
        # DeepSpeed compares such names too, and must go on to see the CPU's
        asks = str(sys._getframe(1).f_globals.get("__name__"))
        return found.replace("torch.", "torch.cuda.", 1) if asks.startswith(ASKING) else found

    torch.Tensor.type = type_name


PATCH = Patch(
    package="megatron-core",
    versions=MEGATRON_CORE,
    only_without_gpu=True,
    upstream="megatron.core.optimizer: param.type() == 'torch.cuda.FloatTensor' and the like",
    why="DistributedOptimizer and Float16OptimizerWithFloat16Params raise TypeError for a "
    "parameter whose type is torch.FloatTensor: they know parameters on a GPU only",
    until="upstream compares param.dtype",
    change=change,
)
