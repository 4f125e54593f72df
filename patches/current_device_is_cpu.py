"""A machine without a GPU: `torch.cuda.current_device()` is the CPU, which megatron-core takes as a
device everywhere."""

import torch

from . import MEGATRON_CORE, Patch


def change() -> None:
    cpu = torch.device("cpu")
    torch.cuda.current_device = lambda: cpu  # type: ignore[assignment]


PATCH = Patch(
    package="megatron-core",
    versions=MEGATRON_CORE,
    only_without_gpu=True,
    upstream="megatron.core: every device=torch.cuda.current_device()",
    why="attention scores, rotary tables, gathered activations and sequence-parallel buffers are "
    "made on "
    "torch.cuda.current_device(), which raises without a GPU: GPTModel does not complete a forward "
    "pass",
    until="upstream takes the device from its inputs or from torch.accelerator",
    change=change,
)
