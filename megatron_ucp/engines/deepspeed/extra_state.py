"""What modules keep besides tensors: torch's `get_extra_state` and `set_extra_state`, entries
`_extra_state` of a state dict."""

from collections.abc import Mapping
from typing import Any

import torch

from megatron_ucp.engines.built import Values
from megatron_ucp.engines.deepspeed.stage import parallel_of
from megatron_ucp.engines.values import WHAT_TRAVELS, strange
from megatron_ucp.errors import ModelMismatchError, UnsupportedError, some_of
from megatron_ucp.formats.base import Checkpoint
from megatron_ucp.reshard.engine import How

_KEY = "_extra_state"
_NATIVE = "keep it in buffers instead, or leave `attach` out: DeepSpeed's own load on the same mesh"


def states_of(module: torch.nn.Module) -> dict[str, Any]:
    """What the modules in a module keep now, by the names of these entries of its state dict; not
    of those that keep nothing, as megatron-core's linear layers."""
    found = {name: held.get_extra_state() for name, held in _keepers(module).items()}
    return {name: value for name, value in found.items() if not _is_nothing(value)}


def check_states(engine: Any) -> None:
    """Raises UnsupportedError where no load could give a module what it keeps back as it is."""
    kept = states_of(engine.module)
    (tp, _), (stages, _) = parallel_of(engine)
    if kept and tp * stages > 1:
        raise UnsupportedError(
            "modules keep an extra state (get_extra_state), of which each model-parallel rank has "
            "its own, and nothing says how it is cut",
            parameter=next(iter(kept)),
            expected="one model-parallel rank",
            found=f"{tp} tensor-parallel ranks, {stages} pipeline stages",
            fix=_NATIVE,
        )
    for name, value in kept.items():
        for place, wrong in strange(value, name, live=False):
            raise UnsupportedError(
                "no load could give a module's extra state (get_extra_state) back as it is",
                parameter=name,
                expected=WHAT_TRAVELS,
                found=f"{place}: {wrong}",
                fix=_NATIVE,
            )


def states_for(
    module: torch.nn.Module,
    source: Checkpoint,
    values: Values,
    how: How,
) -> dict[str, Any]:
    """What a load gives to the modules in a module. `values` builds them.

    Raises ModelMismatchError where one side has other states, but for what is allowed;
    UnsafePickleError for a value of a class that is not known."""
    held = _keepers(module)
    own = {} if how.own is None else how.own.buffers
    saved = {**source.extras.modules, **{n: v for n, v in own.items() if n in held}}
    if saved and source.manifest.mesh.tp > 1:
        raise UnsupportedError(
            "modules kept an extra state on each tensor-parallel rank, and nothing says how it is "
            "put together",
            file=source.main_file,
            parameter=next(iter(saved)),
            fix=_NATIVE,
        )
    _require_alike(module, source, saved, how)
    found = {name: values.built(value, name) for name, value in saved.items() if name in held}
    nothing = {name: None for name, value in source.extras.stateless.items() if value is None}
    return {**{name: None for name in nothing if name in held}, **found}


def _require_alike(
    module: torch.nn.Module, source: Checkpoint, saved: Mapping[str, Any], how: How
) -> None:
    """Raises ModelMismatchError where one side has other states, but for what is allowed."""
    lacking = set(states_of(module)) - {*source.extras.modules, *source.extras.stateless}
    extra = saved.keys() - _keepers(module).keys()
    for names, what, word in (
        (lacking, "the model has an extra state that the checkpoint lacks", "missing"),
        (extra, "the checkpoint holds an extra state that the model lacks", "extra"),
    ):
        if names and word not in how.allow:
            raise ModelMismatchError(
                what,
                file=source.main_file,
                parameter=min(names),
                found=some_of(sorted(names)),
                fix="build the model with the configuration that the checkpoint was trained with, "
                f'or go on without with allow={{"{word}"}}',
            )


def set_states(module: torch.nn.Module, found: Mapping[str, Any]) -> None:
    """Gives them to the modules."""
    held = _keepers(module)
    for name, value in found.items():
        held[name].set_extra_state(value)


def _keepers(module: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """The modules with methods of their own for it, by the names of their entries."""
    none = torch.nn.Module
    return {
        f"{name}.{_KEY}" if name else _KEY: held
        for name, held in module.named_modules()
        if type(held).get_extra_state is not none.get_extra_state
        and type(held).set_extra_state is not none.set_extra_state
    }


def _is_nothing(value: Any) -> bool:
    return value is None or (isinstance(value, torch.Tensor) and not value.numel())
