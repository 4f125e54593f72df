"""The flags of Megatron-LM's running program, as a file may hold them."""

from collections.abc import Mapping
from enum import Enum
from typing import Any

import torch

_PLAIN = (bool, int, float, str, type(None))


def plain_flags(arguments: Mapping[str, Any] | Any) -> dict[str, Any]:
    """A Namespace or a mapping as plain values; dtypes become their names. What no file should hold
    (enums, functions) is left out: Megatron-LM takes its own."""
    said = vars(arguments) if hasattr(arguments, "__dict__") else dict(arguments or {})
    out: dict[str, Any] = {}
    for name, value in said.items():
        if isinstance(value, torch.dtype):
            out[str(name)] = str(value)
        elif _is_plain(value):
            out[str(name)] = value
    return out


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(_is_plain(one) for pair in value.items() for one in pair)
    return isinstance(value, _PLAIN) and not isinstance(value, Enum)
