"""The family of a live megatron-core model, at the sizes of its own config."""

from typing import Any, cast

from megatron_ucp.engines.deepspeed.stage import parallel_of
from megatron_ucp.errors import UsageError
from megatron_ucp.families import find_family
from megatron_ucp.families.base import Family, Model
from megatron_ucp.families.measure import measured

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
    chosen = find_family(family) if isinstance(family, str) else family
    if not isinstance(cast("object", chosen), Family):
        raise UsageError(
            "this is no family",
            expected="the name of a family, or a megatron_ucp.families.base.Family",
            found=repr(family)[:200],
            fix="give its name, such as llama",
        )
    measure = chosen.measure or measured
    model = Model(chosen, measure(engine.module))
    model.check_cut(parallel_of(engine)[0][0])
    engine.__dict__[_REMEMBERED] = model
    return model
