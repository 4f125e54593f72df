"""The family of a live megatron-core model, at the sizes of its own config, compared with what the
model says itself; or that alone."""

import sys
from functools import partial
from typing import Any

from megatron_ucp.core.mesh import DENSE_CUT, EXPERT_CUT
from megatron_ucp.engines.deepspeed.autotp import is_autotp
from megatron_ucp.engines.deepspeed.experts import refuse_unplaced
from megatron_ucp.engines.deepspeed.stage import OwnStage, parallel_of
from megatron_ucp.engines.megatron.derived import (
    derived_table,
    model_by_itself,
    require_agreement,
    said_together,
)
from megatron_ucp.errors import UsageError
from megatron_ucp.families import model_of_module
from megatron_ucp.families.base import Family, Model
from megatron_ucp.reshard import agree

_REMEMBERED = "_ucp_model"
_OF_ENGINES = "module", "save_checkpoint", "load_checkpoint"


def require_engine(engine: Any) -> None:
    """Raises UsageError for what is no engine."""
    if not hasattr(engine, "__dict__") or not all(hasattr(engine, name) for name in _OF_ENGINES):
        raise UsageError(
            "this is no engine",
            expected="an engine of DeepSpeed, or what ucp.attach_megatron returned",
            found=type(engine).__qualname__,
            fix="give the engine that deepspeed.initialize returned, the first of its results",
        )


def model_of(engine: Any, family: str | Family | None) -> Model | None:
    """The family at the sizes of the engine's model; without one, what an earlier call gave.

    Raises UsageError for a module that is no megatron-core GPTModel, LayoutError where the
    tensor-parallel size does not divide it.
    """
    require_engine(engine)
    if family is None:
        return engine.__dict__.get(_REMEMBERED)
    model = model_of_module(family, engine.module, parallel_of(engine)[0][0])
    remember(engine, model)
    return model


def remember(engine: Any, model: Model) -> None:
    """For later calls that name no family."""
    engine.__dict__[_REMEMBERED] = model


def as_it_says(engine: Any, model: Model | None) -> Model | None:
    """The family's model, once what the engine's module says itself agrees with it; without a
    family what it says. A module that is none of megatron-core's says nothing, and what each of its
    parameters is says AutoTP. Collective. Raises UnsupportedError, LayoutError on every rank."""
    if not all(agree.gather(_says_itself(engine))):
        return model
    with agree.together():
        refuse_unplaced(engine)
        own = OwnStage(engine, None)
    names = {name: own.names[param][0] for param, name in engine.param_names.items()}
    place = own.mesh.place(own.along((*DENSE_CUT, *EXPERT_CUT)))
    said = partial(derived_table, engine.module, names, place, whole=model is None)
    table = said_together(said, own.at, own.speaks)
    if model is None:
        model = model_by_itself(table)
        remember(engine, model)
    else:
        require_agreement(model, table)
    return model


def _says_itself(engine: Any) -> bool:
    parallel = sys.modules.get("megatron.core.parallel_state")
    has_groups = parallel is not None and parallel.model_parallel_is_initialized()
    return has_groups and hasattr(engine.module, "sharded_state_dict") and not is_autotp(engine)
