"""What was last done with a live engine."""

from dataclasses import dataclass
from typing import Any

from megatron_ucp.engines.memory_steps import KeptReport, steps_of
from megatron_ucp.engines.saves import LOADED, SAVED, SaveReport
from megatron_ucp.errors import UsageError
from megatron_ucp.reshard.report import Report


@dataclass(frozen=True)
class Reports:
    """The last load and the last save of an engine, and the last step that was kept in memory; None
    for what it has not done."""

    load: Report | None
    save: SaveReport | None
    memory: KeptReport | None = None

    def __str__(self) -> str:
        done = [one for one in (self.load, self.save) if one is not None]
        lines = [line for one in done for line in (str(one), *(f"note: {n}" for n in one.notes))]
        return "\n".join(lines) or "neither loaded nor saved"


def report(engine: Any) -> Reports:
    """What the last load and the last save of an engine did, and the last step that it kept in
    memory, on this rank.

    Args:
        engine: A DeepSpeed engine, or what `attach_megatron` returned.

    Returns:
        `load` and `save`: meshes, bytes, seconds, notes. `memory`: step, bytes, seconds. None for
        what has not been done.

    Raises:
        UsageError: For what is no engine.

    Example:
        >>> engine.load_checkpoint("checkpoints")
        >>> ucp.report(engine).load.notes
        ()
    """
    kept = getattr(engine, "__dict__", None)
    if kept is None or not (hasattr(engine, "module") or hasattr(engine, "chunks")):
        raise UsageError(
            "this is no engine",
            expected="a DeepSpeed engine, or what ucp.attach_megatron returned",
            found=type(engine).__name__,
            fix="give the engine that was loaded or saved",
        )
    steps = steps_of(engine)
    memory = None if steps is None else steps.report
    return Reports(kept.get(LOADED), kept.get(SAVED), memory)
