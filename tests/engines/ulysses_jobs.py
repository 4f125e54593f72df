"""What the ranks do where sequence parallelism (Ulysses) stands beside tensor parallelism, or
beside mixtures of experts."""

from typing import Any
from unittest import mock

import torch.distributed as dist

import megatron_ucp as ucp
from tests.engines import kinds
from tests.engines.moe_jobs import Moe
from tests.engines.tensor_jobs import Mega


class Mpu:
    """megatron-core's groups, and beside them `sp` ranks that share each sequence: what programs
    around DeepSpeed bring as mpu."""

    def __init__(self, inner: Any, sp: int) -> None:
        self.inner, self.ranks = inner, inner.get_data_parallel_group()
        tp, world = inner.get_tensor_model_parallel_world_size(), dist.get_world_size()
        self.groups: dict[str, Any] = {}
        for share in range(tp):  # ranks that differ in data and sequence
            alike = list(range(share, world, tp))
            rows = [alike[n : n + sp] for n in range(0, len(alike), sp)]
            for axis, parts in (("sequence", rows), ("data", zip(*rows, strict=True))):
                for part in parts:
                    group = dist.new_group(list(part))
                    if dist.get_rank() in part:
                        self.groups[axis] = group

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def get_sequence_parallel_group(self) -> Any:
        return self.groups["sequence"]

    def get_sequence_parallel_world_size(self) -> int:
        return dist.get_world_size(self.groups["sequence"])

    def get_sequence_parallel_rank(self) -> int:
        return dist.get_rank(self.groups["sequence"])

    def get_data_parallel_group(self) -> Any:
        return self.groups["data"]

    def get_data_parallel_world_size(self) -> int:
        return dist.get_world_size(self.groups["data"])

    def get_data_parallel_rank(self) -> int:
        return dist.get_rank(self.groups["data"])

    def get_sequence_data_parallel_group(self) -> Any:
        return self.ranks

    def get_sequence_data_parallel_world_size(self) -> int:
        return dist.get_world_size(self.ranks)

    def get_sequence_data_parallel_rank(self) -> int:
        return dist.get_rank(self.ranks)


def sharing(sp: int, job: str, setup: Mega | Moe, *arguments: Any, **options: Any) -> Any:
    """A job of `kinds`, where `sp` ranks share each sequence; what it refuses."""
    import deepspeed
    from deepspeed.runtime.sequence_parallel import parallel_state_sp

    stock, experts = deepspeed.initialize, isinstance(setup, Moe)
    if experts and sp > 1:
        parallel_state_sp.initialize_sequence_parallel(sp)

    def initialize(mpu: Any = None, **kwargs: Any) -> Any:
        if sp > 1:
            mpu = parallel_state_sp if experts else Mpu(mpu, sp)
        return stock(mpu=mpu, **kwargs)

    with mock.patch.object(deepspeed, "initialize", initialize):
        try:
            return getattr(kinds, job)(setup, *arguments, **options)
        except ucp.UcpError as error:
            return f"{type(error).__name__}: {error}"


def save(sharing_by: tuple[int, Mega | Moe], folder: str) -> None:
    sp, setup = sharing_by
    said = sharing(sp, "save", setup, folder, more=0)
    assert said is None, said
