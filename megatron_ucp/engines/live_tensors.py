"""Live tensors as manifests describe them, whatever engine holds them."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from megatron_ucp.core.box import Ints, dims_in_memory
from megatron_ucp.core.experts import number_and_count
from megatron_ucp.core.manifest import ParamSpec
from megatron_ucp.core.mesh import Mesh
from megatron_ucp.errors import LayoutError, UnsupportedError
from megatron_ucp.families.base import Model


def spec_of(
    model: Model | None,
    mesh: Mesh,
    experts: Mapping[str, int],
    name: str,
    local: tuple[int, ...],
    tensor: Any,
    kind: str,
) -> ParamSpec:
    """A parameter as its family declares it, after the live one, which has the shape `local` on
    this rank, was compared with the declaration; without a family each is whole. `experts` are
    those of each layer, by its canonical name. Raises LayoutError."""
    dtype = dtype_name(tensor.dtype)
    expert = number_and_count(name, experts)
    if model is None or kind == "buffer":
        return ParamSpec(name, local, dtype, kind, expert=expert)
    declared = model.find(name)
    share = declared.layout.local_shape(name, declared.shape, mesh.shares())
    if share != local:
        raise LayoutError(
            "a live parameter has another shape than its family declares",
            parameter=name,
            found=local,
            expected=f"{share} of {declared.shape} at tp={mesh.tp}",
            fix=f"check that the model is a {model.family.name} with the sizes of its config",
        )
    for attribute, value in declared.attributes.items():
        # absent where the layer spec sets none: the shape was checked
        found = getattr(tensor, attribute, value)
        if found != value:
            raise LayoutError(
                f"a live parameter's attribute {attribute} contradicts its family",
                parameter=name,
                expected=value,
                found=found,
                fix=f"check {model.family.source}",
            )
    return replace(declared.spec(name, dtype, kind), expert=expert)


def flat_view(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor. Raises UnsupportedError for one with gaps."""
    if not tensor.is_contiguous():
        raise UnsupportedError(
            "a live tensor is not contiguous",
            found=f"shape {tuple(tensor.shape)}, strides {tensor.stride()}",
            fix="make it contiguous when the model is built",
        )
    return tensor.view(-1)


def order_of(tensor: torch.Tensor) -> Ints | None:
    """The dims in the order in which the memory stores them, where that is not their own. Raises
    UnsupportedError for a tensor whose memory has gaps, or is shared by its elements."""
    if tensor.is_contiguous():
        return None
    order = dims_in_memory(tuple(tensor.shape), tensor.stride())
    if order is None:
        flat_view(tensor)
    return order


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor, flat, its dims in the order of `order_of`."""
    order = order_of(tensor)
    return flat_view(tensor if order is None else tensor.permute(order))


def dtype_name(dtype: torch.dtype) -> str:
    """As manifests write it."""
    return str(dtype).removeprefix("torch.")
