"""Whether saves of an engine can hold all that it trains: found when it is attached, before anybody
trains for hours."""

from typing import Any

from megatron_ucp.engines.deepspeed.wrappers import Wrapper, wrapper_of
from megatron_ucp.errors import UnsupportedError
from megatron_ucp.formats.deepspeed.muon import MUON, steps_matrices
from megatron_ucp.formats.optimizers import (
    REFUSED,
    REFUSED_STATES,
    WHOLE_MATRICES,
    full_name,
    in_table,
    name_in_table,
    refuse_step_in_group,
    taken_as,
)

_OWN_LOAD = (
    "leave `attach` out: DeepSpeed's own save and load, which load_checkpoint(native=True) of an "
    "attached engine is, resume on the same mesh"
)
_NAMED = 5


def carried_as(engine: Any) -> str:
    """A note where the optimizer's class is a subclass that is taken as one that is known, else "".

    Raises UnsupportedError for an optimizer whose states can't be cut, and for a trainable
    parameter that no save would hold.
    """
    wrapper = wrapper_of(engine)
    _refuse_unsaved(engine, wrapper)
    if wrapper.base is None:
        return ""
    kind = type(wrapper.base)
    _refuse_states(wrapper, name_in_table(kind), full_name(kind))
    return taken_as(kind)


def _refuse_states(wrapper: Wrapper, name: str, full: str) -> None:
    groups = wrapper.base.param_groups
    flat = wrapper.zero > 0 or type(wrapper.opt).__name__ == "FP16_Optimizer"
    marked = name != MUON and any(map(steps_matrices, groups))
    if flat and (name in WHOLE_MATRICES or marked):
        raise UnsupportedError(
            "this optimizer steps whole matrices (Muon), and its states at this ZeRO stage follow "
            "no partition, which is not supported",
            found=full,
            expected="ZeRO stage 0",
            fix="train with DeepSpeed's own Muon (optimizer.type: muon in its config), at stage 0 "
            f"with torch.optim.Muon, or {_OWN_LOAD}",
        )
    if name in REFUSED:
        raise UnsupportedError(
            "this optimizer can't be carried to another mesh",
            found=f"{full}: {REFUSED[name]}",
            expected="an optimizer whose step of an element depends on that element alone",
            fix=f"train with torch.optim.AdamW and gradient clipping, or {_OWN_LOAD}",
        )
    refuse_step_in_group(name)
    held = {str(key) for state in wrapper.base.state.values() for key in state}
    refused = sorted(key for key in held if key in REFUSED_STATES)
    if not in_table(name) or refused:
        why = "; ".join(f"{key}: {REFUSED_STATES[key]}" for key in refused)
        raise UnsupportedError(
            "the states of this optimizer are not known, so that a save could not be resumed on "
            "another mesh",
            found=f"{full} ({why})" if why else full,
            expected="an optimizer of torch.optim or of DeepSpeed that is known, or a registered "
            "one",
            fix=f'say what it keeps with ucp.register_optimizer("{name}", element=..., '
            f"scalar=...) before, where each element-wise state is independent of its "
            f"neighbours; or {_OWN_LOAD}",
        )


def _elems(param: Any) -> int:
    """Elements of the whole parameter: one without any has no value that could be lost."""
    return int(getattr(param, "ds_numel", param.numel()))


def _refuse_unsaved(engine: Any, wrapper: Wrapper) -> None:
    """At ZeRO-3 DeepSpeed writes the parameters of the optimizer's groups, and frozen ones."""
    if wrapper.zero < 3 or wrapper.base is None:
        return
    stepped = {id(param) for group in wrapper.opt.fp16_groups for param in group}
    lost = [
        name
        for name, param in engine.module.named_parameters()
        if param.requires_grad and id(param) not in stepped and _elems(param)
    ]
    if lost:
        raise UnsupportedError(
            "a trainable parameter is in no group of the optimizer: at ZeRO-3 DeepSpeed never "
            "writes its value, and each save would lose it",
            parameter=lost[0],
            found=f"{len(lost)} such parameters: {', '.join(lost[:_NAMED])}",
            expected="every trainable parameter in a group, or requires_grad_(False)",
            fix="give it to the optimizer or freeze it before deepspeed.initialize. native=True "
            "and ucp.register_optimizer don't help: no file has the value",
        )
