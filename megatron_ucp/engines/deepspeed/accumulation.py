"""Gradients between two steps of the optimizer. No checkpoint holds them: a load drops them, a save
says so."""

from typing import Any

import torch

from megatron_ucp.engines.deepspeed.wrappers import Wrapper


def micro_batches(engine: Any) -> int:
    """How many micro-batches the engine has taken since the boundary of its accumulation; 0 where
    the caller says when that is."""
    managed = getattr(engine, "managed_gradient_accumulation", None)  # 0.19.0 always manages it
    if managed is not None and not managed():
        return 0
    if getattr(engine, "_is_gradient_accumulation_boundary", None) is not None:
        return 0
    return int(engine.micro_steps) % int(engine.gradient_accumulation_steps())


def in_the_middle(engine: Any, wrapper: Wrapper) -> bool:
    """Whether gradients wait for a step."""
    return bool(micro_batches(engine)) or _gradients_wait(engine, wrapper.opt)


def drop_gradients(engine: Any, wrapper: Wrapper) -> list[str]:
    """The engine as after a step: no gradient is left, the next micro-batch is the first one.
    Returns a note where something was dropped."""
    taken, waited = micro_batches(engine), in_the_middle(engine, wrapper)
    opt = wrapper.opt
    for param in engine.module.parameters():
        param.grad = None
        if hasattr(param, "grad_accum"):
            param.grad_accum = None
    if wrapper.base is not None and opt is not wrapper.base:
        opt.zero_grad(set_to_none=True)
        _drop_partitions(opt)
    engine.micro_steps -= taken
    if not waited:
        return []
    return [
        "gradients that waited for a step were dropped: the engine was in the middle of an "
        f"accumulation ({taken} micro-batches since its boundary)"
    ]


def _gradients_wait(engine: Any, opt: Any) -> bool:
    held = (
        getattr(param, name, None)
        for param in engine.module.parameters()
        for name in ("grad", "grad_accum")
    )
    if any(isinstance(grad, torch.Tensor) for grad in held):
        return True
    averaged: Any = getattr(opt, "averaged_gradients", None) or {}
    if any(grads is not None for grads in averaged.values()):
        return True
    return any(any(group) for group in getattr(opt, "fp32_groups_has_gradients", ()))


def _drop_partitions(opt: Any) -> None:
    """What ZeRO keeps of averaged gradients; as its own `step` leaves it."""
    flat = hasattr(opt, "bit16_groups")  # ZeRO-1 and 2
    if hasattr(opt, "averaged_gradients"):
        opt.averaged_gradients = dict.fromkeys(opt.averaged_gradients) if flat else {}
    if hasattr(opt, "all_grad_tensors"):
        opt.all_grad_tensors = dict.fromkeys(opt.all_grad_tensors)
    if hasattr(opt, "reset_cpu_buffers"):
        opt.reset_cpu_buffers()
    for name in ("_offload_accumulated_param_ids", "_offload_boundary_param_ids"):
        if hasattr(opt, name):
            setattr(opt, name, set())
    if hasattr(opt, "micro_step_id"):
        # each counts from its own number: ZeRO-1 and 2 add one before a backward, ZeRO-3 after it
        opt.micro_step_id = -1 if flat else 0
