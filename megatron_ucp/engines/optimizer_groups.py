"""Steps and hyper-parameters as a live torch optimizer keeps them."""

from collections.abc import Container, Mapping, Sequence
from typing import Any

import torch

from megatron_ucp.core.manifest import ParamGroup
from megatron_ucp.core.values import alike, shown
from megatron_ucp.engines.built import Building, built
from megatron_ucp.engines.values import inert
from megatron_ucp.formats.optimizers import DECOUPLED, Kept, steps_as

# How an optimizer is run on some hardware, not what a run sets.
_IMPLEMENTATION = frozenset({"foreach", "fused", "capturable", "differentiable"})
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


def group_of(group: Mapping[str, Any], without: Container[str], name: str, base: Any) -> ParamGroup:
    """A live parameter group as a manifest describes it; `name` is that of its optimizer `base` in
    the table."""
    settings = {str(key): inert(value) for key, value in group.items() if key not in without}
    said = {**settings, **decay_of(base)}
    return ParamGroup(settings, name, steps_as=steps_as(name, said))


def decay_of(optimizer: Any) -> dict[str, bool]:
    """What torch's groups say of the kind of weight decay, and the fused ones by an attribute."""
    mode = getattr(optimizer, "adam_w_mode", None)
    return {} if mode is None else {DECOUPLED: bool(mode)}


def built_groups(
    live: Sequence[Mapping[str, Any]], saved: Sequence[Mapping[str, Any]], file: str, allow: bool
) -> tuple[list[Mapping[str, Any]], list[str]]:
    """The hyper-parameters of a checkpoint as live values, and notes of those that are left out.
    Raises UnsafePickleError."""
    out: list[Mapping[str, Any]] = []
    left: list[str] = []
    for number, (group, settings) in enumerate(zip(live, saved, strict=True)):
        like = {key: value for key, value in group.items() if key != "params"}
        how = Building(file, f"param_groups[{number}]", like, None, allow, left)
        out.append(built(dict(settings), how))
    return out, [f"left as the engine has it: {one}" for one in left]


def set_group(
    number: int, group: dict[str, Any], saved: Mapping[str, Any], carried: bool, notes: list[str]
) -> None:
    """Gives a group of an optimizer the hyper-parameters of a checkpoint; what changes by it, and
    what is not carried, becomes a note. Not so a rate that a schedule moves: it is another one at
    every step. `carried`: the optimizer is the one of the checkpoint, so that keys which the group
    lacks are the program's own."""
    for key, value in saved.items():
        if key == DECOUPLED:
            continue  # of the optimizer's class, which was compared
        old, same = group.get(key), key in group and alike(inert(group[key]), inert(value))
        if key in _IMPLEMENTATION:
            if key in group and not same:
                notes.append(
                    f"group {number}: {key} {old} of the engine stays, the checkpoint has {value}: "
                    "it says how the optimizer runs, not what it computes"
                )
            continue
        if key not in group and not carried and key != "initial_lr":
            if key not in _USUAL or value != _USUAL[key]:
                notes.append(f"group {number}: {key}={shown(value)} is not known to this optimizer")
            continue
        is_moved = key == "lr" and not _OF_SCHEDULES.isdisjoint(group)
        if key in group and not is_moved and not same:
            notes.append(
                f"group {number}: {key} {shown(old)} of the engine's configuration became "
                f"{shown(value)} of the checkpoint"
            )
        _set(group, key, value)


def _set(group: dict[str, Any], key: str, value: Any) -> None:
    """A tensor that others may hold (a rate that a compiled step reads) is filled and stays."""
    old = group.get(key)
    with torch.no_grad():
        if isinstance(old, torch.Tensor) and not isinstance(value, torch.Tensor):
            old.fill_(value)
        elif isinstance(old, torch.Tensor) and (old.shape, old.dtype) == (value.shape, value.dtype):
            old.copy_(value)
        else:
            group[key] = value
