"""What each data-parallel rank of a DeepSpeed engine holds whole: the weights that ZeRO-1 and 2
gather after every step."""

from typing import Any

import torch
import torch.distributed as dist

from megatron_ucp.engines.live_archive import storage_bytes
from megatron_ucp.engines.rank_files import Replicas

_GATHERED = (1, 2)  # ZeRO stages at which every rank gets all weights from those that step them


def replicas_of(engine: Any) -> Replicas:
    """Storages of weights that are the same on all ranks of the data-parallel group, by the name of
    the first parameter in each. Experts are not: fewer ranks share them."""
    if engine.zero_optimization_stage() not in _GATHERED or not dist.is_initialized():
        return Replicas()
    found: dict[int, tuple[str, torch.UntypedStorage]] = {}
    apart: set[int] = set()
    for name, param in engine.module.named_parameters():
        storage = param.untyped_storage()
        found.setdefault(storage.data_ptr(), (name, storage))
        if not param.requires_grad or not getattr(param, "allreduce", True):
            apart.add(storage.data_ptr())
    memory = {
        name: storage_bytes(storage)
        for place, (name, storage) in found.items()
        if place not in apart
    }
    return Replicas(tuple(dist.get_process_group_ranks(engine.seq_data_parallel_group)), memory)
