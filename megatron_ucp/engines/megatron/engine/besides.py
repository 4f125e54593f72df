"""What megatron-core's stack is, found on all ranks: the states that it has now, and all
besides."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from megatron_ucp.core.manifest import RECORDED, RUN
from megatron_ucp.engines import random_states
from megatron_ucp.engines.megatron.engine.inner import inner_optimizers
from megatron_ucp.engines.megatron.engine.live import LiveMegatron, describe
from megatron_ucp.engines.megatron.engine.present import PresentStates, present_states
from megatron_ucp.engines.megatron.engine.stack import MegatronStack
from megatron_ucp.engines.megatron.names import bare_model
from megatron_ucp.engines.own_values import LiveValues
from megatron_ucp.engines.read_back import KeptValue, kept_of, refuse_strange
from megatron_ucp.engines.saves import run_of
from megatron_ucp.engines.unusable import require_usable
from megatron_ucp.errors import UcpError
from megatron_ucp.families.architecture import recorded
from megatron_ucp.formats.base import Extras
from megatron_ucp.formats.loss_scale import LossScale
from megatron_ucp.reshard import agree


def described(stack: MegatronStack, error: type[UcpError]) -> PresentStates:
    """The engine with the states that its optimizers have now. Collective. Raises an `error` of
    that class for a value that no load could give back."""
    with agree.together():
        refuse_strange(_kept(stack), error)
        require_usable(stack.optimizer)
    live = describe(stack)
    live.finish_gathers()
    found = present_states(live)
    run = {
        random_states.STEPS: stack.iteration,
        random_states.SEED: torch.initial_seed(),
        "skipped_steps": stack.skipped_iterations,
        RECORDED: recorded(stack.model.sizes, bare_model(stack.chunks[0])),
        RUN: run_of(stack).id,
    }
    return replace(found, manifest=replace(found.manifest, run=run))


def _kept(stack: MegatronStack) -> Iterator[KeptValue]:
    """Plain values that are taken along."""
    for inner in inner_optimizers(stack.optimizer):
        groups = inner.optimizer.param_groups
        yield from kept_of("scheduler", stack.scheduler, groups, live=False)


def values_of(live: LiveMegatron) -> LiveValues:
    """What this rank has for itself: a stack has no client state, and one schedule."""
    buffers = {value.name: value.tensor for value in live.own.values if value.kind == "buffer"}
    return LiveValues(buffers, {}, None, False, {})


def extras_of(live: LiveMegatron, client_state: Mapping[str, Any]) -> Extras:
    """Schedule, counters and loss scale, as they are; and a client state."""
    stack = live.stack
    counters = {
        "global_steps": stack.iteration,
        "global_samples": stack.consumed_samples,
        "skipped_steps": stack.skipped_iterations,
    }
    schedule = None if stack.scheduler is None else stack.scheduler.state_dict()
    return Extras(counters, schedule, _scaler(live), None, client_state)


def _scaler(live: LiveMegatron) -> LossScale:
    """The loss scale, where it changes."""
    scaler = next((getattr(one, "grad_scaler", None) for one in live.own.inner), None)
    if scaler is None or not hasattr(scaler, "_growth_tracker"):
        return LossScale()
    return LossScale.of_megatron(
        float(scaler.scale),
        scaler._growth_tracker,
        live.stack.iteration,
        scaler.growth_interval,
        (scaler.hysteresis, scaler._hysteresis_tracker),
    )
