"""A machine without a GPU: megatron-core's optimizers, schedules and checkpoints make their small
tensors on the CPU."""

import functools
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any

import torch

from . import MEGATRON_CORE, Patch

# where the stack asks for device="cuda" in so many words
MODULES = (
    "utils",
    "optimizer.optimizer",
    "optimizer.grad_scaler",
    "optimizer.clip_grads",
    "pipeline_parallel.schedules",
    "dist_checkpointing.exchange_utils",
    "dist_checkpointing.strategies.state_dict_saver",
)
FACTORIES = frozenset({"tensor", "zeros", "ones", "empty", "empty_like"})


class TorchOnCpu(ModuleType):
    """`torch` as these modules see it: a factory that is told "cuda" takes the CPU."""

    def __getattr__(self, name: str) -> Any:
        found = getattr(torch, name)
        return _on_cpu(found) if name in FACTORIES else found


def _on_cpu(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(make)
    def made(*args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
        asked = None if device is None else torch.device(device)
        on_gpu = asked is not None and asked.type == "cuda"
        return make(*args, device="cpu" if on_gpu else asked, **kwargs)

    return made


def change() -> None:
    for name in MODULES:
        module: Any = import_module(f"megatron.core.{name}")
        module.torch = TorchOnCpu("torch")


PATCH = Patch(
    package="megatron-core",
    versions=MEGATRON_CORE,
    only_without_gpu=True,
    upstream='megatron.core.optimizer, schedules, dist_checkpointing: every device="cuda"',
    why="loss scale, found_inf, token counts and the norm of the gradients are made on "
    '"cuda" in so many words: no optimizer can be built without a GPU',
    until="upstream takes the device from its inputs or from torch.accelerator",
    change=change,
)
