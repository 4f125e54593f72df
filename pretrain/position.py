"""Where a run is in its data, and who else is told."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from megatron_ucp.engines.memory import steps_of


@dataclass
class Position:
    """How far the run is."""

    iteration: int = 0
    consumed: int = 0


def program_of(engine: Any) -> Any:
    """What `ucp.load` and `ucp.save` take: of megatron-core's own stack its handle."""
    return getattr(engine, "handle", engine)


def said_of(position: Position) -> dict[str, Any]:
    return {"iteration": position.iteration, "consumed_train_samples": position.consumed}


def keep_position(engine: Any, position: Callable[[], Position]) -> None:
    """Steps that are kept in memory say the position too, if any are kept."""
    kept = steps_of(program_of(engine))
    if kept is not None:
        kept.how = replace(kept.how, client_state=lambda: said_of(position()))


def count(engine: Any, position: Position) -> None:
    """After a step: megatron-core's own stack has the position itself."""
    if (handle := getattr(engine, "handle", None)) is not None:
        handle.iteration, handle.consumed_samples = position.iteration, position.consumed
