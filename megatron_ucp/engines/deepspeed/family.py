"""The family of a live megatron-core model, at the sizes of its own config."""

from typing import Any

from megatron_ucp.engines.deepspeed.stage import parallel_of
from megatron_ucp.errors import UsageError
from megatron_ucp.families import model_of_module
from megatron_ucp.families.base import Family, Model

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
    engine.__dict__[_REMEMBERED] = model
    return model
