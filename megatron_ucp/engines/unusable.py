"""Marks an engine unusable, while and after a load fails, or as its memory is let go of: it refuses
to step, to save and to be exported."""

from functools import partial
from typing import Any

from megatron_ucp.errors import EngineUnusableError

_METHODS = ("step", "train_batch", "save_checkpoint")  # a pipeline trains by `train_batch`
_SAVED = "_ucp_methods_before_load"
_WHY = "_ucp_is_unusable_as"
_LOAD_FAILED = "a load failed after bytes were written into this engine"


def mark_unusable(engine: Any, why: str = _LOAD_FAILED) -> None:
    """From now on `step`, `train_batch` and `save_checkpoint` raise EngineUnusableError. Twice is
    once."""
    engine.__dict__[_WHY] = why
    if _SAVED in engine.__dict__:
        return
    engine.__dict__[_SAVED] = {
        name: engine.__dict__.get(name) for name in _METHODS if hasattr(engine, name)
    }
    for name in engine.__dict__[_SAVED]:
        setattr(engine, name, partial(_refuse, engine))


def require_usable(engine: Any) -> None:
    """Raises EngineUnusableError where the mark is there."""
    if _SAVED in engine.__dict__:
        _refuse(engine)


def mark_usable(engine: Any) -> None:
    """Takes the mark away."""
    for name, method in engine.__dict__.pop(_SAVED, {}).items():
        if method is None:
            engine.__dict__.pop(name, None)
        else:
            engine.__dict__[name] = method


def _refuse(engine: Any, *_: Any, **__: Any) -> None:
    raise EngineUnusableError(engine.__dict__[_WHY])
