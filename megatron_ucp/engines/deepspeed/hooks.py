"""Hooks of a model's state dict: what the files call its parameters and buffers."""

from typing import Any

import torch

from megatron_ucp.errors import UnsupportedError
from megatron_ucp.formats.deepspeed.weights import is_extra_state


def renamed_entries(module: torch.nn.Module) -> dict[str, str]:
    """Entries of the state dict under names that no parameter or buffer has, with the names of
    those that they are."""
    held, names = _held(module), _names(module)
    return {
        entry: names[id(value)]
        for entry, value in _entries(module).items()
        if entry not in held and id(value) in names
    }


def refuse_hooks(module: torch.nn.Module) -> None:
    """Raises UnsupportedError for an entry of the state dict that is no parameter and no buffer of
    the model: its file would have what no load can put back. What quantized layers add beside
    their frozen weights is no such entry: see `side_data_of`."""
    held, names = _held(module), _names(module)
    for entry, value in _entries(module).items():
        is_own = id(value) == id(held[entry]) if entry in held else id(value) in names
        if not is_own and not _is_of_frozen_weights(module, entry, held):
            raise UnsupportedError(
                "a hook of the model's state dict changes values or adds entries, which is not "
                "supported",
                parameter=entry,
                expected="the model's own parameters and buffers, under any names",
                found="another tensor than the model's" if entry in held else type(value).__name__,
                fix="take the hook away, or leave `attach` out: DeepSpeed's own save and load "
                "resume on the same mesh",
            )


def side_data_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """What quantized layers add to the state dict beside their frozen weights, as bitsandbytes'
    layers do: tensors by the names of these entries."""
    held, names = _held(module), _names(module)
    return {
        entry: value
        for entry, value in _entries(module).items()
        if entry not in held and id(value) not in names and isinstance(value, torch.Tensor)
    }


def _is_of_frozen_weights(module: torch.nn.Module, entry: str, held: dict[str, Any]) -> bool:
    """Whether an entry is added by a module that has weights, all of them frozen."""
    if entry in held:
        return False
    path = entry
    modules = dict(module.named_modules())
    while path and path not in modules:
        path = path.rpartition(".")[0]
    params = [*modules[path].parameters(recurse=False)] if path else []
    return bool(params) and not any(param.requires_grad for param in params)


def _held(module: torch.nn.Module) -> dict[str, Any]:
    """Parameters and buffers by all of their names."""
    params = module.named_parameters(remove_duplicate=False)
    return {**dict(params), **dict(module.named_buffers(remove_duplicate=False))}


def _names(module: torch.nn.Module) -> dict[int, str]:
    """The first name of each."""
    return {id(value): name for name, value in reversed(_held(module).items())}


def _entries(module: torch.nn.Module) -> dict[str, Any]:
    entries = module.state_dict(keep_vars=True).items()
    return {name: value for name, value in entries if not is_extra_state(name)}
