"""Ulysses under megatron-core's models: each of `size` ranks has a run of every sequence, and in
attention all of the sequence for a part of the heads (Jacobs et al., arXiv 2309.14509)."""

from typing import Any

import torch
from torch.distributed.nn.functional import all_to_all_single

from megatron_ucp.errors import UsageError


def start(size: int) -> None:
    """Makes DeepSpeed's groups of ranks that share sequences: neighbours. Collective."""
    from deepspeed.runtime.sequence_parallel import parallel_state_sp

    parallel_state_sp.initialize_sequence_parallel(size)


def stop() -> None:
    """Forgets the groups, which their maker has closed."""
    from deepspeed.runtime.sequence_parallel import parallel_state_sp

    parallel_state_sp._release_sequence_parallel_groups()


def mpu() -> Any:
    """The object for `deepspeed.initialize(mpu=...)`."""
    from deepspeed.runtime.sequence_parallel import parallel_state_sp

    return parallel_state_sp


def share_sequences(model: torch.nn.Module) -> torch.nn.Module:
    """Changes a model of `models.build`, so that its ranks share sequences; returns it. Names and
    shapes of parameters stay. Raises UsageError where the ranks don't divide heads and
    key-value groups."""
    group: Any = mpu().get_sequence_parallel_group()
    size, rank = group.size(), group.rank()
    for module in model.modules():
        kind = type(module).__name__
        if kind == "DotProductAttention":
            _check_heads(module, size)
            _share_heads(module, group)
        elif kind == "RotaryEmbedding":
            _place(module, size, rank)
    return model


def _check_heads(core: Any, size: int) -> None:
    heads, groups = core.num_attention_heads_per_partition, core.num_query_groups_per_partition
    if heads % size or groups % size:
        raise UsageError(
            "the ranks of a sequence don't divide the heads",
            expected=f"a divisor of {heads} heads and of {groups} key-value groups",
            found=size,
            fix="change --ds-sequence-parallel-size, --num-attention-heads or --num-query-groups",
        )


def _share_heads(core: Any, group: Any) -> None:
    """Attention gets whole sequences of this rank's heads, [sequence, batch, heads, head size], and
    gives its run of the sequence back."""
    attend, size = core.forward, group.size()
    core.num_attention_heads_per_partition //= size
    core.num_query_groups_per_partition //= size
    core.hidden_size_per_partition //= size

    def forward(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **more: Any
    ) -> torch.Tensor:
        query, key, value = (_whole_sequence(part, group) for part in (query, key, value))
        length, batch, heads, _ = query.shape
        later = torch.ones(length, length, dtype=torch.bool, device=query.device).triu(1)
        found = attend(query, key, value, later[None, None], **more)
        return _whole_heads(found.reshape(length, batch, heads, -1), group).flatten(2)

    core.forward = forward


def _whole_sequence(part: torch.Tensor, group: Any) -> torch.Tensor:
    """Of a run of a sequence with all heads: all of it, with this rank's heads."""
    size = group.size()
    run, batch, heads, width = part.shape
    by_rank = part.reshape(run, batch, size, heads // size, width).permute(2, 0, 1, 3, 4)
    found = _exchange(by_rank.contiguous(), group)
    return found.reshape(size * run, batch, heads // size, width)


def _whole_heads(part: torch.Tensor, group: Any) -> torch.Tensor:
    """The inverse of `_whole_sequence`."""
    size = group.size()
    length, batch, heads, width = part.shape
    by_rank = part.reshape(size, length // size, batch, heads, width)
    found = _exchange(by_rank.contiguous(), group)
    return found.permute(1, 2, 0, 3, 4).reshape(length // size, batch, size * heads, width)


def _exchange(by_rank: torch.Tensor, group: Any) -> torch.Tensor:
    """Sends part i to rank i; what comes back is in the order of the ranks that sent it."""
    return all_to_all_single(torch.empty_like(by_rank), by_rank, group=group)


def _place(rotary: Any, size: int, rank: int) -> None:
    """Rotary embeddings for this rank's run of the sequence."""
    embed = rotary.forward

    def forward(length: int, *args: Any, **kwargs: Any) -> torch.Tensor:
        return embed(length * size, *args, **kwargs)[rank * length : (rank + 1) * length]

    rotary.forward = forward
