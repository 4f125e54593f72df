"""The flags of Megatron-LM's running program, as a file may hold them."""

from collections.abc import Mapping
from enum import Enum
from typing import Any

import torch

from megatron_ucp.engines.megatron.engine.stack import MegatronStack
from megatron_ucp.engines.megatron.names import bare_model

_PLAIN = (bool, int, float, str, type(None))


def plain_flags(arguments: Mapping[str, Any] | Any) -> dict[str, Any]:
    """A Namespace or a mapping as plain values; dtypes become their names. What no file should hold
    (enums, functions) is left out: Megatron-LM takes its own."""
    out: dict[str, Any] = {}
    for name, value in _said(arguments).items():
        if isinstance(value, torch.dtype):
            out[str(name)] = str(value)
        elif _is_plain(value):
            out[str(name)] = value
    return out


def flags_of_model(stack: MegatronStack) -> dict[str, bool]:
    """The flag by which a reader knows that weights and masters were scaled apart, where the model
    says it: of a save that is given no flags."""
    return {"qk_clip": True} if getattr(bare_model(stack.chunks[0]).config, "qk_clip", None) else {}


def _said(arguments: Mapping[str, Any] | Any) -> Mapping[Any, Any]:
    return vars(arguments) if hasattr(arguments, "__dict__") else dict(arguments or {})


def _is_plain(value: Any) -> bool:
    """Whether a value is a number, a text, or made of such."""
    if isinstance(value, list | tuple):
        return all(_is_plain(item) for item in value)
    if isinstance(value, dict):
        return all(_is_plain(item) for pair in value.items() for item in pair)
    return isinstance(value, _PLAIN) and not isinstance(value, Enum)
