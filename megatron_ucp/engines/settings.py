"""Steps and hyper-parameters as a live torch optimizer keeps them."""

from collections.abc import Mapping
from typing import Any

import torch

from megatron_ucp.formats.optimizers import Kept

# How an optimizer is run on some hardware, and what its class says already (AdamW is Adam with
# `decoupled_weight_decay`); not what a run sets.
IMPLEMENTATION = frozenset(
    {"foreach", "fused", "capturable", "differentiable", "decoupled_weight_decay"}
)
# What a group says of a variant of Adam that is not used: another Adam need not know the word.
_USUAL = {"amsgrad": False, "maximize": False, "bias_correction": True}
# What torch's and megatron-core's schedules keep in the groups that they move.
_OF_SCHEDULES = frozenset({"initial_lr", "max_lr"})


def scalar_state(
    value: float, keeps: Kept, group: Mapping[str, Any], master: torch.Tensor
) -> torch.Tensor | int:
    """A scalar state as the optimizer keeps it. A tensor of its own for every master: optimizers
    step it in place."""
    if keeps.step == "int":
        return int(value)
    on_device = group.get("capturable") or group.get("fused")
    device = master.device if on_device else torch.device("cpu")
    wide = torch.get_default_dtype() == torch.float64 and not group.get("fused")
    return torch.tensor(value, dtype=torch.float64 if wide else torch.float32, device=device)


def set_group(
    number: int, group: dict[str, Any], saved: Mapping[str, Any], notes: list[str]
) -> None:
    """Gives a group of an optimizer the hyper-parameters of a checkpoint; what changes by it, and
    what the optimizer does not know, becomes a note. Not so a rate that a schedule moves: it is
    another one at every step."""
    for key, value in saved.items():
        if key in IMPLEMENTATION:
            continue
        if key not in group and key in _USUAL and value == _USUAL[key]:
            continue
        if key not in group and key != "initial_lr":
            notes.append(f"group {number}: {key}={value} is not known to this optimizer")
            continue
        old = group.get(key)
        if isinstance(old, torch.Tensor):
            old.fill_(value)
            continue
        is_moved = key == "lr" and not _OF_SCHEDULES.isdisjoint(group)
        if key in group and not is_moved and _listed(old) != _listed(value):
            notes.append(
                f"group {number}: {key} {old} of the engine's configuration became {value} of the "
                "checkpoint"
            )
        group[key] = list(value) if isinstance(old, list) else value


def _listed(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, list | tuple) else (value,)
