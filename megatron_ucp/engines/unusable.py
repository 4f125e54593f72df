"""Marks an engine unusable, while and after a load fails, or as its memory is let go of: what is in
it is no state of the run, and no door gives it out. It refuses to step, and to be saved, exported,
held or proved, by DeepSpeed's and Megatron's own methods too."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from megatron_ucp.errors import EngineUnusableError

# Methods of engines, and of optimizers of megatron-core, that train with what is there or write it.
# Some are called by the others: a caller may go by the class, around what an engine has itself.
_DOORS = (
    *("step", "train_batch", "save_checkpoint", "save_16bit_model", "save_fp16_model"),
    *("_save_checkpoint", "_save_zero_checkpoint", "_save_moe_checkpoint"),
    *("module_state_dict", "_consolidated_16bit_state_dict"),
    "_zero3_consolidated_16bit_state_dict",
    *("state_dict", "sharded_state_dict", "save_parameter_state"),
)
_SAVED = "_ucp_methods_before_load"
_HOOKS = "_ucp_hooks_while_unusable"
_WHY = "_ucp_is_unusable_as"
_LOAD_FAILED = "a load failed after bytes were written into this engine"


def mark_unusable(
    program: Any, modules: Sequence[torch.nn.Module], why: str = _LOAD_FAILED
) -> None:
    """From now on the `program` (an engine of DeepSpeed, an optimizer of megatron-core) raises
    EngineUnusableError by all of its doors, and so do the state dicts of its `modules`. Twice is
    once."""
    program.__dict__[_WHY] = why
    if _SAVED in program.__dict__:
        return
    program.__dict__[_SAVED] = {
        name: program.__dict__.get(name) for name in _DOORS if hasattr(program, name)
    }
    for name in program.__dict__[_SAVED]:
        program.__dict__[name] = partial(_refuse, program)
    program.__dict__[_HOOKS] = [
        module.register_state_dict_pre_hook(partial(_refuse_values, program)) for module in modules
    ]


def require_usable(program: Any) -> None:
    """Raises EngineUnusableError where the mark is there."""
    if _SAVED in program.__dict__:
        _refuse(program)


def mark_usable(program: Any) -> None:
    """Takes the mark away."""
    for name, method in program.__dict__.pop(_SAVED, {}).items():
        if method is None:
            program.__dict__.pop(name, None)
        else:
            program.__dict__[name] = method
    for hook in program.__dict__.pop(_HOOKS, ()):
        hook.remove()


def _refuse_values(program: Any, _module: Any, _prefix: str, keep_vars: bool) -> None:
    if not keep_vars:  # who asks for the parameters themselves looks at names, and copies nothing
        _refuse(program)


def _refuse(program: Any, *_: Any, **__: Any) -> None:
    raise EngineUnusableError(program.__dict__[_WHY])
