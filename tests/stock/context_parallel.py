"""Context parallelism on a CPU: megatron-core's own attention refuses it, Transformer Engine's has
it. Here each rank gathers keys and values, and masks what lies behind each of its queries.

A rank of n has the chunks r and 2n-1-r of 2n chunks of the sequence, as Megatron-LM cuts it.
"""

from typing import Any

import torch
import torch.distributed as dist


class _Gathered(torch.autograd.Function):
    """[tokens of this rank, batch, heads, width] -> [all tokens, ...], in their order."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group, ranks = group, group.size()
        found = [torch.empty_like(own) for _ in range(ranks)]
        dist.all_gather(found, own.contiguous(), group=group)
        halves = [one.chunk(2, 0) for one in found]
        return torch.cat([first for first, _ in halves] + [last for _, last in reversed(halves)], 0)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        total = gradient.contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        chunks, rank = total.chunk(2 * ctx.group.size(), 0), ctx.group.rank()
        return torch.cat([chunks[rank], chunks[-1 - rank]], 0), None


def install() -> None:
    """Replaces the attention of megatron-core's local layers in this process."""
    from megatron.core import parallel_state
    from megatron.core.transformer.dot_product_attention import DotProductAttention as Attention

    init, forward = Attention.__init__, Attention.forward

    def made(self: Any, config: Any, *args: Any, **more: Any) -> None:
        ranks, config.context_parallel_size = config.context_parallel_size, 1
        try:
            init(self, config, *args, **more)
        finally:
            config.context_parallel_size = ranks

    def called(self: Any, query: Any, key: Any, value: Any, mask: Any = None, **more: Any) -> Any:
        group: Any = parallel_state.get_context_parallel_group()
        if group.size() > 1:
            chunks = torch.arange(len(query) * group.size()).chunk(2 * group.size())
            at = torch.cat([chunks[group.rank()], chunks[-1 - group.rank()]])
            behind = torch.arange(len(query) * group.size())[None] > at[:, None]
            mask = behind[None, None]
            key, value = _Gathered.apply(key, group), _Gathered.apply(value, group)
        more.pop("attention_mask", None)
        return forward(self, query, key, value, mask, **more)

    Attention.__init__, Attention.forward = made, called  # type: ignore[method-assign]
