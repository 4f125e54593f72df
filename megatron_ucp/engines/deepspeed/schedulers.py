"""Whose state a scheduler's is: DeepSpeed's files don't say it, so a save's manifest does."""

from typing import Any

from megatron_ucp.errors import StateMismatchError
from megatron_ucp.formats.base import Checkpoint

CLASS = "scheduler"  # of a manifest's run
_OF_VERSIONS = frozenset({"verbose"})  # some versions of torch keep it, and none needs it


def class_of(scheduler: Any) -> str | None:
    """How a manifest names a scheduler's class; None without one."""
    kind = type(scheduler)
    return None if scheduler is None else f"{kind.__module__}.{kind.__qualname__}"


def check_class(saved: Any, scheduler: Any, source: Checkpoint, allow: bool) -> list[str]:
    """Notes about a state that goes into a scheduler of another class. Raises StateMismatchError
    unless that is allowed.

    Where the manifest names the class, its name decides, as a module may have moved; else, and
    where two modules have a class of that name, what both keep.
    """
    if scheduler is None:
        return []
    said, have = source.manifest.run.get(CLASS), class_of(scheduler)
    named = isinstance(said, str) and bool(said)
    if named and said == have:
        return []
    keys, own = _kept(saved), _kept(scheduler.state_dict())
    same_name = named and str(said).rpartition(".")[2] == str(have).rpartition(".")[2]
    if keys == own and (same_name or not named):
        return []
    wrote = str(said) if named else f"one that keeps {', '.join(sorted(keys)) or 'nothing'}"
    if not allow:
        raise StateMismatchError(
            "the scheduler of the checkpoint is of another class than the engine's",
            file=source.main_file,
            expected=f"{have}, which keeps {', '.join(sorted(own)) or 'nothing'}",
            found=wrote,
            fix="build the scheduler of the run, keep the engine's with "
            'load_lr_scheduler_states=False, or give it this state with allow={"scheduler"}',
        )
    return [f"the state of another scheduler ({wrote}) was given to {have}, as allowed"]


def _kept(state: Any) -> frozenset[str]:
    """Names of a state without those that torch's base class keeps for itself."""
    names = state if isinstance(state, dict) else ()
    return frozenset(str(name) for name in names if not str(name).startswith("_")) - _OF_VERSIONS
