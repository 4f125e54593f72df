"""What resumes in megatron-core's stack besides tensors: schedule, counters, loss scale, random
states, data position."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megatron_ucp.core.manifest import RECORDED, RUN
from megatron_ucp.engines.mcore_model import bare_model
from megatron_ucp.engines.megatron.optimizer import inner_optimizers
from megatron_ucp.engines.record import run_of
from megatron_ucp.engines.run_state import (
    NUM_STEPS,
    SEED,
    STEPS,
    CommonState,
    DrawnState,
    RunState,
    changed_settings,
    keeps_own_settings,
)
from megatron_ucp.engines.values import LiveValues, Values, inert, refuse_strange, saved_values
from megatron_ucp.errors import UcpError
from megatron_ucp.families.settings import recorded
from megatron_ucp.formats.checkpoint import Extras
from megatron_ucp.formats.loss_scale import LossScale
from megatron_ucp.formats.megatron.groups import SCHEDULED
from megatron_ucp.formats.megatron.run_state import OPERATIONS
from megatron_ucp.formats.store import Location
from megatron_ucp.reshard.engine import LoadOptions, Wants

if TYPE_CHECKING:
    from megatron_ucp.engines.megatron.shard import LocalShard, MegatronStack


@dataclass(frozen=True)
class StackState:
    """Values ready to be set in a stack. `schedule` are settings of the scheduler that change,
    `samples` those that it has seen (None: it is left as it is), `marks` what megatron-core kept
    of each group. Of `options` it follows what else is set. `groups` are the hyper-parameters of
    this rank's groups; `carried` as of `Wants`."""

    stack: "MegatronStack"
    shard: "LocalShard"
    options: LoadOptions
    common: CommonState
    schedule: Mapping[str, Any]
    samples: int | None
    marks: Sequence[Mapping[str, Any]]
    carried: bool
    notes: tuple[str, ...] = ()
    groups: Sequence[Mapping[str, Any]] = ()

    @property
    def client_state(self) -> Mapping[str, Any]:
        return self.common.client_state

    @classmethod
    def prepare(
        cls,
        wants: Wants,
        stack: "MegatronStack",
        shard: "LocalShard",
        marks: Sequence[Mapping[str, Any]],
    ) -> "StackState":
        """`marks` are what megatron-core kept of each of the stack's groups, where the checkpoint
        is of megatron-core. Raises StateMismatchError where the scheduler's settings are others
        than the checkpoint's, or the data position does not fit the loader."""
        source, options, notes = wants.source, wants.options, list[str]()
        saved, scheduler = source.extras, options.scheduler
        values = Values.of(source, "values" in options.allow)
        schedule: dict[str, Any] = {}
        samples = None
        if scheduler and stack.scheduler is not None:
            here = stack.scheduler.state_dict()
            found = values.built(saved.scheduler or {}, "opt_param_scheduler", here)
            schedule = changed_settings(stack.scheduler, found, source.main_file)
            samples = _samples(found, saved.counters, notes)
        elif scheduler and saved.scheduler is not None:
            notes.append("the scheduler was not restored: the engine has none")
        place = stack.mesh.partition_of(shard.rank), stack.mesh.coord(shard.rank).pp
        common = CommonState.prepare(source, values, options, stack.mesh, place)
        kept = marks if scheduler and not keeps_own_settings(stack.scheduler) else []
        notes += values.notes
        told = common, schedule, samples, kept, wants.carried, tuple(notes)
        return cls(stack, shard, options, *told)

    def apply(self) -> list[str]:
        """Sets everything; the loss scale where the states of the optimizer were loaded. Returns
        notes."""
        notes: list[str] = []
        if self.options.module_only:
            return notes
        stack, counters = self.stack, self.common.counters
        if self.options.optimizer:
            for inner in self.shard.inner:
                _set_scaler(getattr(inner, "grad_scaler", None), self.common.scaler, notes)
            for number, saved in enumerate(self.marks):
                _set_rates(number, self.shard.param_groups[number], saved, notes)
        if self.samples is not None:
            _set_schedule(
                stack.scheduler, self.schedule, self.samples, self.options.optimizer, notes
            )
        stack.iteration = counters.get("global_steps", stack.iteration)
        stack.consumed_samples = counters.get("global_samples", stack.consumed_samples)
        stack.skipped_iterations = counters.get("skipped_steps", stack.skipped_iterations)
        operations = self.client_state.get(OPERATIONS)
        if isinstance(operations, int | float):
            stack.floating_point_operations = operations
        return [*dict.fromkeys(notes), *self.common.apply()]


# ------------------------------------------------ what a save writes, and a hold keeps


def require_saved_values(stack: "MegatronStack", error: type[UcpError]) -> None:
    """Raises an `error` of that class for a value that no load could give back."""
    for inner in inner_optimizers(stack.optimizer):
        groups = inner.optimizer.param_groups
        refuse_strange(saved_values("scheduler", stack.scheduler, groups, live=False), error)


def read_state(
    stack: "MegatronStack",
    shard: "LocalShard",
    drawn_now: Callable[[], DrawnState],
    folder: Location = Path(),
) -> RunState:
    """The state of the run that is no element of a tensor. Errors name files in `folder`.
    Collective. Raises SaveError."""

    def read() -> tuple[dict[str, Any], LiveValues]:
        facts = {
            STEPS: stack.iteration,
            SEED: torch.initial_seed(),
            "skipped_steps": stack.skipped_iterations,
            RECORDED: recorded(stack.model.sizes, bare_model(stack.chunks[0])),
            RUN: run_of(stack).id,
        }
        # a stack has no client state, and one schedule
        buffers = {value.name: value.tensor for value in shard.values if value.kind == "buffer"}
        return facts, LiveValues(buffers, {}, None, False, {})

    return RunState.of_ranks(read, drawn_now, folder, shard.taken_as)


def client_state_of(stack: "MegatronStack", own: Mapping[str, Any]) -> dict[Any, Any]:
    """Values of the program, with what the stack counts beside its steps, in inert form."""
    counted = {OPERATIONS: stack.floating_point_operations, **own}
    return {inert(key): inert(value) for key, value in counted.items()}


def read_extras(
    stack: "MegatronStack", shard: "LocalShard", client_state: Mapping[str, Any]
) -> Extras:
    """Schedule, counters and loss scale, as they are; and a client state."""
    counters = {
        "global_steps": stack.iteration,
        "global_samples": stack.consumed_samples,
        "skipped_steps": stack.skipped_iterations,
    }
    schedule = None if stack.scheduler is None else stack.scheduler.state_dict()
    return Extras(counters, schedule, _scaler(stack, shard), None, client_state)


def _scaler(stack: "MegatronStack", shard: "LocalShard") -> LossScale:
    """The loss scale, where it changes."""
    scaler = next((getattr(one, "grad_scaler", None) for one in shard.inner), None)
    if scaler is None or not hasattr(scaler, "_growth_tracker"):
        return LossScale()
    return LossScale.of_megatron(
        float(scaler.scale),
        scaler._growth_tracker,
        stack.iteration,
        scaler.growth_interval,
        (scaler.hysteresis, scaler._hysteresis_tracker),
    )


# ------------------------------------------------ schedule


def _set_rates(
    number: int, group: dict[str, Any], saved: Mapping[str, Any], notes: list[str]
) -> None:
    """The values between which the schedule moves a group."""
    for key in SCHEDULED:
        if key in saved and group.get(key) != saved[key]:
            notes.append(f"group {number}: {key} {group.get(key)} became {saved[key]}")
            group[key] = saved[key]


def _samples(saved: Mapping[str, Any], counters: Mapping[str, int], notes: list[str]) -> int:
    """How many samples the schedule has seen: those of iterations that were not skipped."""
    if NUM_STEPS in saved:
        return int(saved[NUM_STEPS])
    steps, skipped = counters.get("global_steps", 0), counters.get("skipped_steps", 0)
    samples = counters.get("global_samples", 0)
    taken = samples * (steps - skipped) // steps if steps else samples
    notes.append(
        "the checkpoint holds no schedule that counts samples: the engine's goes on from "
        f"{taken} samples"
    )
    return taken


def _set_schedule(
    scheduler: Any, changed: Mapping[str, Any], samples: int, optimizer: bool, notes: list[str]
) -> None:
    for key, value in changed.items():
        notes.append(f"schedule: {key} {getattr(scheduler, key)} became {value}")
        setattr(scheduler, key, value)
    scheduler.num_steps = samples
    if not optimizer:
        scheduler.step(0)
        return
    for number, group in enumerate(scheduler.optimizer.param_groups):
        decay = scheduler.get_wd(group) * group.get("wd_mult", 1.0)
        for key, want in (("lr", scheduler.get_lr(group)), ("weight_decay", decay)):
            if group[key] != want:
                notes.append(
                    f"group {number}: the next step has the checkpoint's {key} {group[key]}, those "
                    f"after it what the schedule says, {want} now"
                )


# ------------------------------------------------ loss scale


def _set_scaler(scaler: Any, saved: LossScale, notes: list[str]) -> None:
    """Carries the loss scale from fp16 to fp16; every other target ignores it."""
    if scaler is None or not saved.said:
        return
    dynamic = hasattr(scaler, "_growth_tracker")
    if saved.is_kind(dynamic, notes) and dynamic:  # a constant is the configuration's
        scaler._scale.fill_(saved.cur_scale)
        scaler._growth_tracker = saved.good_steps(scaler.growth_interval)
        scaler._hysteresis_tracker = int(saved.said.get("cur_hysteresis", scaler.hysteresis))
