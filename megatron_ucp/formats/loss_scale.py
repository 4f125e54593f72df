"""The loss scale of a run in fp16, whichever program keeps it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from megatron_ucp.core.values import InertObject
from megatron_ucp.formats import expect
from megatron_ucp.formats.param_groups import number


@dataclass(frozen=True)
class LossScale:
    """A loss scale in the words of DeepSpeed's scalers; None is what nothing says, and one that
    says nothing is none.

    DeepSpeed counts all steps (`cur_iter`) and knows the last one that overflowed, Megatron counts
    good steps since the scale last changed. Both count the overflows that may still pass
    (`cur_hysteresis` of `delayed_shift`).
    """

    dynamic: bool | None = None
    cur_scale: float | None = None
    cur_iter: int | None = None
    last_overflow_iter: int | None = None
    scale_factor: float | None = None
    scale_window: int | None = None
    min_scale: float | None = None
    delayed_shift: int | None = None
    cur_hysteresis: int | None = None
    consecutive_hysteresis: bool | None = None
    raise_error_at_min_scale: bool | None = None

    @property
    def said(self) -> dict[str, Any]:
        """What is known, by DeepSpeed's names."""
        return {name: value for name, value in vars(self).items() if value is not None}

    @classmethod
    def of_deepspeed(cls, fields: Mapping[str, Any]) -> Self:
        """Of a scaler's fields, among others, as a file has them."""
        return cls(**{name: number(fields[name]) for name in vars(cls()) if name in fields})

    @classmethod
    def pickled(cls, value: Any) -> Self:
        """Of a scaler in a file of DeepSpeed; none of anything else."""
        return cls.of_deepspeed(value.state if isinstance(value, InertObject) else {})

    @classmethod
    def of_megatron(
        cls,
        scale: float | None,
        good: int,
        iteration: int,
        window: int,
        hysteresis: tuple[int, int],
        least: float = 1.0,
    ) -> Self:
        """One that megatron-core halves and doubles: `good` steps since it last changed, of
        `window` after which it grows, at an `iteration`; of the overflows that may pass how many
        there are and how many are left."""
        clock = (iteration, iteration - good - 1, 2.0, window)
        return cls(True, scale, *clock, least, *hysteresis, False, True)

    @classmethod
    def fresh(cls, config: Mapping[str, Any]) -> Self:
        """Before the first step, with the defaults of the `fp16` section of a DeepSpeed config."""
        said = expect.section(config, "fp16")
        if said.get("loss_scale"):
            return cls(False, float(said["loss_scale"]))
        allowed, least = int(said.get("hysteresis", 2)), said.get("min_loss_scale", 1)
        scale = 2.0 ** int(said.get("initial_scale_power", 16))
        clock = (0, -1, 2.0, int(said.get("loss_scale_window", 1000)))
        consecutive = bool(said.get("consecutive_hysteresis", False))
        return cls(True, scale, *clock, least, allowed, allowed, consecutive, True)

    def is_kind(self, dynamic: bool, notes: list[str]) -> bool:
        """Whether it can be set in a program whose scale is dynamic or static; a note where not."""
        if fits := bool(self.dynamic) == dynamic:
            return fits
        notes.append(
            "the loss scale was kept from the engine's configuration: one side is dynamic, the "
            "other static"
        )
        return False

    def good_steps(self, interval: int) -> int:
        """Megatron's `growth_tracker`, for a scale that grows after `interval` good steps: those
        since it last changed.

        DeepSpeed counts them since the last bad one, and doubles the scale in the first good step
        after each `scale_window` of them.
        """
        said = self.said
        good = int(said.get("cur_iter", 0)) - int(said.get("last_overflow_iter", -1)) - 1
        window = int(said.get("scale_window", interval))
        since = good if good <= window else (good - 1) % window
        return min(max(since, 0), interval - 1)
