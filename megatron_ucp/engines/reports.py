"""What was last done with a live engine."""

from dataclasses import dataclass
from typing import Any

from megatron_ucp.engines.saves import LOADED, SAVED, SaveReport
from megatron_ucp.errors import UsageError
from megatron_ucp.reshard.resume import Report


@dataclass(frozen=True)
class Reports:
    """The last load and the last save of an engine; None for what it has not done."""

    load: Report | None
    save: SaveReport | None

    def __str__(self) -> str:
        done = [one for one in (self.load, self.save) if one is not None]
        lines = [line for one in done for line in (str(one), *(f"note: {n}" for n in one.notes))]
        return "\n".join(lines) or "neither loaded nor saved"


def report(engine: Any) -> Reports:
    """What the last load and the last save of an engine did, on this rank.

    Args:
        engine: A DeepSpeed engine, or what `attach_megatron` returned.

    Returns:
        `load` and `save`: meshes, bytes, seconds, notes; None for what has not been done.

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
    return Reports(kept.get(LOADED), kept.get(SAVED))
