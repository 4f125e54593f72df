"""A machine without a GPU: tokens are gathered from ranks that have different numbers of them."""

import functools
from typing import Any

import torch
import torch.distributed as dist

from . import MEGATRON_CORE, Patch


def change() -> None:
    from megatron.core.tensor_parallel import mappings

    stock: Any = mappings._gather_along_first_dim

    @functools.wraps(stock)
    def gather(
        input_: torch.Tensor,
        group: Any,
        output_split_sizes: Any = None,
        use_global_buffer: bool = False,
    ) -> torch.Tensor:
        if output_split_sizes is None or group.size() == 1:
            return stock(input_, group, output_split_sizes, use_global_buffer)
        counts = [int(count) for count in output_split_sizes]
        # gloo gathers tensors of one shape only
        padded = input_.new_zeros(max(counts), *input_.shape[1:])
        padded[: len(input_)] = input_
        parts = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(parts, padded, group=group)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    mappings._gather_along_first_dim = gather


PATCH = Patch(
    package="megatron-core",
    versions=MEGATRON_CORE,
    only_without_gpu=True,
    upstream="megatron.core.tensor_parallel.mappings._gather_along_first_dim",
    why="with the sizes of the parts it calls all_gather with tensors of different shapes, which "
    "gloo refuses: the all-to-all dispatcher with expert tensor parallelism does so, as each rank "
    "got another number of tokens",
    until="gloo's all_gather takes tensors of different shapes, as NCCL's does",
    change=change,
)
