"""A DeepSpeed engine as a run that a resize moves from."""

from dataclasses import replace
from typing import Any

from megatron_ucp.engines.deepspeed.besides import besides, said_of
from megatron_ucp.engines.deepspeed.extra_state import check_states, states_of
from megatron_ucp.engines.deepspeed.kept import of_caller, of_engine
from megatron_ucp.engines.deepspeed.live import LiveEngine, describe
from megatron_ucp.engines.deepspeed.wrappers import Wrapper
from megatron_ucp.engines.read_back import refuse_strange
from megatron_ucp.engines.taking import LentRun, RankValues, Taking, lent
from megatron_ucp.engines.unusable import require_usable
from megatron_ucp.engines.values import inert
from megatron_ucp.families.base import Model
from megatron_ucp.formats.base import Extras
from megatron_ucp.formats.deepspeed.keys import COUNTERS
from megatron_ucp.formats.loss_scale import LossScale
from megatron_ucp.formats.schedules import of_all_stages
from megatron_ucp.reshard import agree


def taken(engine: Any, model: Model | None, how: Taking, values_left: bool) -> LentRun:
    """Takes an engine as it is; nothing in it is changed. `values_left` as of `Saving`. Collective.
    Raises a UcpError on every rank."""
    with agree.together():
        require_usable(engine)
        check_states(engine)
        refuse_strange(of_caller(how.client_state, engine, None))
        refuse_strange(of_engine(engine), left=values_left)
    live = describe(engine, model, present=True)
    found = besides(live, how.client_state)
    stages = agree.collect(lambda: _schedule(live))
    with agree.together() as block:
        extras = _extras(live, how)
        block.value = live.own.not_carried()
    unknown = sorted({name for names in block.values for name in names})
    notes = [f"states of the optimizer that are not known stay behind: {', '.join(unknown)}"]
    values = RankValues(found.own, found.apart, (*found.notes, *(notes if unknown else ())))
    scheduler = of_all_stages(stages[0][1], _by_stage(stages))
    return lent(live, said_of(live, found), replace(extras, scheduler=scheduler), values, how)


def _schedule(live: LiveEngine) -> tuple[int, Any, int]:
    """The stage of this rank, the scheduler's state, and how many groups the stage has."""
    scheduler = live.engine.lr_scheduler
    state = None if scheduler is None else inert(scheduler.state_dict())
    return live.own.number, state, len(live.own.param_groups)


def _by_stage(ranks: list[tuple[int, Any, int]]) -> list[tuple[Any, int]]:
    """The state and the number of groups of each stage, in their order."""
    first: dict[int, tuple[Any, int]] = {}
    for stage, state, groups in ranks:
        first.setdefault(stage, (state, groups))
    return [first[stage] for stage in sorted(first)]


def _extras(live: LiveEngine, how: Taking) -> Extras:
    """All but the scheduler, as the files of a save have it."""
    engine = live.engine
    kept = {name: inert(value) for name, value in states_of(engine.module).items()}
    return Extras(
        {key: int(getattr(engine, key)) for key in COUNTERS},
        None,
        _scaler(live.wrapper),
        inert(dict(engine.config)),
        {inert(key): inert(value) for key, value in how.client_state.items()},
        _helpers(engine),
        modules=kept,
    )


def _helpers(engine: Any) -> dict[str, Any]:
    """States of DeepSpeed's layer dropping and curriculum learning, where they are used."""
    found: dict[str, Any] = {}
    if engine.random_ltd_enabled():
        found["random_ltd"] = inert(engine.random_ltd_scheduler.state_dict())
    if engine.training_dataloader is not None and engine.curriculum_learning_enabled():
        found["data_sampler"] = inert(engine.training_dataloader.data_sampler.state_dict())
    return found


def _scaler(wrapper: Wrapper) -> LossScale:
    """The loss scale; of an engine that has none, none."""
    if not wrapper.engine.fp16_enabled():
        return LossScale()
    scaler, names = wrapper.scaler()
    fields = {name: getattr(scaler, names.get(name, name), None) for name in vars(LossScale())}
    return LossScale.of_deepspeed({name: one for name, one in fields.items() if one is not None})
