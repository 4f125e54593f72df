"""What a DeepSpeed engine is besides tensors, found on all ranks: what a save writes beside them,
and what a resize takes along."""

from dataclasses import dataclass
from typing import Any

import torch

from megatron_ucp.core.manifest import RECORDED, RENAMED, RUN
from megatron_ucp.engines import random_states
from megatron_ucp.engines.deepspeed.accumulation import in_the_middle, micro_batches
from megatron_ucp.engines.deepspeed.batch import BATCH, batch_of
from megatron_ucp.engines.deepspeed.extra_state import states_of
from megatron_ucp.engines.deepspeed.kept import of_engine
from megatron_ucp.engines.deepspeed.live import LiveEngine
from megatron_ucp.engines.deepspeed.restore import MIDDLE
from megatron_ucp.engines.deepspeed.schedulers import CLASS, class_of
from megatron_ucp.engines.own_values import LiveValues
from megatron_ucp.engines.read_back import names_of
from megatron_ucp.engines.same_model import recorded_settings
from megatron_ucp.engines.saves import run_of
from megatron_ucp.engines.values import members_by_value, named_in
from megatron_ucp.families.architecture import recorded
from megatron_ucp.formats import of_ranks
from megatron_ucp.formats.deepspeed.tag_folder import CLASSES, MEMBERS
from megatron_ucp.formats.of_ranks import PerRank
from megatron_ucp.formats.plain_values import GROUP_MARKS
from megatron_ucp.reshard import agree


@dataclass(frozen=True)
class Besides:
    """This rank's values, what of them differs from rank to rank, and how many micro-batches came
    since the last step (None: no gradient waits for one)."""

    own: LiveValues
    apart: PerRank
    waiting: int | None

    @property
    def notes(self) -> list[str]:
        """About what no load on another mesh gets."""
        notes: list[str] = []
        if self.waiting is not None:
            notes.append(
                "the save came in the middle of an accumulation: the gradients of "
                f"{self.waiting or 'some'} micro-batches since the last step are not in it"
            )
        if self.apart:
            notes.append(f"differs from rank to rank, and is kept for each: {self.apart}")
        return notes


def besides(live: LiveEngine, client_state: Any) -> Besides:
    """Collective. Raises SaveError."""
    engine = live.engine
    waiting = micro_batches(engine) if in_the_middle(engine, live.wrapper) else None
    with agree.together() as told:
        own = _live_values(live, client_state)
        told.value = own.digest()
    return Besides(own, own.differing(told.values), waiting)


def _live_values(live: LiveEngine, client_state: Any) -> LiveValues:
    engine = live.engine
    buffers = {n: v.tensor for n, v in live.own.values.items() if v.kind == "buffer"}
    scheduler = None if engine.lr_scheduler is None else engine.lr_scheduler.state_dict()
    compared = bool(client_state) or live.wrapper.zero == 3
    own = live.own
    groups = [
        (f"param_groups[{number}][{key!r}] of stage {own.number}", value)
        for number, group in enumerate(own.param_groups)
        for key, value in group.items()
        if key not in GROUP_MARKS
    ]
    held = {**buffers, **states_of(engine.module)}
    return LiveValues(held, client_state, scheduler, compared, dict(groups), own.number)


def said_of(live: LiveEngine, found: Besides) -> dict[str, Any]:
    """What a manifest says of the engine besides what it holds; what says nothing is left out."""
    import deepspeed

    engine, model = live.engine, live.own.model
    kept = [one.value for one in of_engine(engine)]
    module = engine.module
    optional = {
        RECORDED: recorded_settings(module) if model is None else recorded(model.sizes, module),
        RENAMED: live.own.renamed,
        CLASSES: sorted({*named_in(kept), *names_of(kept)}),
        MEMBERS: list(dict.fromkeys(members_by_value(kept))),
        CLASS: class_of(engine.lr_scheduler),
    }
    middle = {} if found.waiting is None else {MIDDLE: found.waiting}
    return {
        random_states.STEPS: engine.global_steps,
        "skipped_steps": engine.skipped_steps,
        BATCH: batch_of(engine),
        random_states.SEED: torch.initial_seed(),
        "ds_version": deepspeed.__version__,
        RUN: run_of(engine).id,
        of_ranks.PER_RANK: found.apart.as_value() if found.apart else {},
        **middle,
        **{key: value for key, value in optional.items() if value},
    }
