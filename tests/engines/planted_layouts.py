"""Faults in what a model says of its layouts, each as a context in which the model has it."""

from typing import Any
from unittest import mock

import torch
import torch.distributed as dist


def _swapped_experts(model: Any) -> Any:
    """The files have the experts of a rank in another order than the layer says."""
    from megatron.core.transformer.moe.moe_layer import MoELayer

    layer = next(one for one in model.modules() if isinstance(one, MoELayer))
    own = layer.local_expert_indices
    return mock.patch.object(layer, "local_expert_indices", own[::-1])


def _later_prediction(model: Any) -> Any:
    """A layer for multi-token prediction has the number of the next one."""
    layer = model.mtp.layers[0]
    return mock.patch.object(layer, "layer_number", layer.layer_number + 1)


def _cut_by_columns(linear: Any) -> Any:
    """One rank says that a matrix is cut along its columns."""
    from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

    def said(prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> Any:
        held = linear.state_dict(prefix="", keep_vars=True)
        dim = dist.get_rank() % 2
        return make_sharded_tensors_for_checkpoint(held, prefix, {"weight": dim}, sharded_offsets)

    return mock.patch.object(linear, "sharded_state_dict", said)


def _whole_latents(model: Any) -> Any:
    """Every rank has all rows of a down projection, which its module says to be cut."""
    linear = model.decoder.layers[0].self_attention.linear_kv_down_proj
    rows = torch.cat([linear.weight] * dist.get_world_size())
    return mock.patch.dict(linear._parameters, weight=torch.nn.Parameter(rows))


def _whole_sinks(model: Any) -> Any:
    """One rank says that all have the same softmax offset."""
    from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

    attention = model.decoder.layers[1].self_attention.core_attention
    stock = attention.sharded_state_dict

    def said(prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> Any:
        if dist.get_rank() % 2 == 0:
            return stock(prefix, sharded_offsets, metadata)
        held = attention.state_dict(prefix="", keep_vars=True)
        return make_sharded_tensors_for_checkpoint(held, prefix, {}, sharded_offsets)

    return mock.patch.object(attention, "sharded_state_dict", said)


def _forgotten_cut(model: Any) -> Any:
    """A module says that every rank has all of a matrix, which its layer marks as cut."""
    from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

    linear = model.decoder.layers[0].mlp.linear_fc2

    def said(prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> Any:
        held = linear.state_dict(prefix="", keep_vars=True)
        return make_sharded_tensors_for_checkpoint(held, prefix, {}, sharded_offsets)

    return mock.patch.object(linear, "sharded_state_dict", said)


def _fails_on_rank_1(model: Any) -> Any:
    """A module whose method fails, on one rank."""
    layer = model.decoder.layers[0]
    stock = layer.sharded_state_dict

    def said(*args: Any, **kwargs: Any) -> Any:
        if dist.get_rank() == 1:
            raise KeyError("of somebody's module")
        return stock(*args, **kwargs)

    return mock.patch.object(layer, "sharded_state_dict", said)


PLANTS: dict[str, Any] = {
    "a method that fails": _fails_on_rank_1,
    "a forgotten cut": _forgotten_cut,
    "swapped experts": _swapped_experts,
    "later prediction": _later_prediction,
    "cut by columns": lambda model: _cut_by_columns(
        model.decoder.layers[0].self_attention.linear_q_up_proj
    ),
    "cross attention by columns": lambda model: _cut_by_columns(
        model.decoder.layers[1].cross_attention.linear_kv
    ),
    "whole latents": _whole_latents,
    "whole sinks": _whole_sinks,
}
