"""A machine without a GPU: the all-to-all dispatcher of tokens counts them without CUDA streams."""

from typing import Any

import torch

from . import MEGATRON_CORE, Patch

COUNTS = ("input_splits", "output_splits", "output_splits_tp")


def change() -> None:
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    def counts_as_numbers(
        self: Any, point: str, tokens_per_expert: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        if point == self.cuda_dtoh_point and not self.drop_and_pad:
            for name in COUNTS:
                value = getattr(self, name)
                if torch.is_tensor(value):  # as numpy, which it is after the copy from a GPU
                    setattr(self, name, value.numpy())
        return tokens_per_expert

    dispatcher: Any = MoEAlltoAllTokenDispatcher
    dispatcher._maybe_dtoh_and_synchronize = counts_as_numbers
    dispatcher.cuda_dtoh_stream = "none"  # it makes one where there is none


PATCH = Patch(
    package="megatron-core",
    versions=MEGATRON_CORE,
    only_without_gpu=True,
    upstream="megatron.core.transformer.moe.token_dispatcher.MoEAlltoAllTokenDispatcher",
    why="it makes a CUDA stream to copy the numbers of tokens from the GPU, which raises without "
    "one; and numbers that are on the CPU already stay tensors, which all_to_all_single refuses",
    until="upstream takes the stream from torch.accelerator and turns all counts into numbers",
    change=change,
)
