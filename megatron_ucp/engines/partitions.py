"""Partitions of a buffer, of which each rank of a process group holds its own."""

from collections.abc import Sequence
from typing import Any

import torch


def on_cpu(partitions: Sequence[torch.Tensor]) -> bool:
    """Whether gloo, and not NCCL, moves them."""
    return all(partition.device.type == "cpu" for partition in partitions)


def broadcast_each(partitions: Sequence[torch.Tensor], group: Any) -> None:
    """Gives every rank all partitions, which are listed in the order of the group's ranks; each one
    is written where it is. For those on the CPU. Collective.

    gloo's all-gather collects in fresh memory of the whole buffer's size first. Broadcasts take a
    quarter of its time, and a load needs no memory on top of the engine's own.
    """
    ranks = torch.distributed.get_process_group_ranks(group)
    sent: list[Any] = [
        torch.distributed.broadcast(partition.data, rank, group, async_op=True)
        for rank, partition in zip(ranks, partitions, strict=True)
    ]
    for work in sent:
        work.wait()
