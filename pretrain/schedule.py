"""Learning rate and weight decay as functions of consumed samples; megatron-core's arithmetic and
state names.

Samples and not iterations: a changed global batch or mesh does not move the schedule.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from megatron_ucp.errors import StateMismatchError, UsageError

STYLES = ("constant", "linear", "cosine", "inverse-square-root", "WSD")
# What a user changes to change a field: for the error message.
_FLAGS = {
    "max_lr": "--lr",
    "min_lr": "--min-lr",
    "init_lr": "--lr-warmup-init",
    "lr_decay_style": "--lr-decay-style",
    "lr_warmup_steps": "--lr-warmup-iters, -samples or -fraction",
    "weight_decay": "--weight-decay",
    "lr_decay_steps": "--lr-decay-iters or -samples (default: --train-iters)",
    "wsd_decay_steps": "--lr-wsd-decay-iters or -samples",
    "lr_wsd_decay_style": "--lr-wsd-decay-style",
}


@dataclass(frozen=True)
class Settings:
    """The shape of a schedule; steps are samples. Raises UsageError for settings that are no
    schedule."""

    max_lr: float
    min_lr: float
    init_lr: float
    lr_warmup_steps: int
    lr_decay_steps: int
    lr_decay_style: str
    weight_decay: float
    wsd_decay_steps: int | None = None
    lr_wsd_decay_style: str = "exponential"

    def __post_init__(self) -> None:
        if self.lr_decay_style not in STYLES:
            raise UsageError(
                "--lr-decay-style is not known",
                expected=", ".join(STYLES),
                found=self.lr_decay_style,
            )
        if not 0.0 <= self.min_lr <= self.max_lr or self.init_lr > self.max_lr:
            raise UsageError(
                "--lr is the largest of the three rates",
                expected="0 <= --min-lr, --lr-warmup-init <= --lr",
                found=f"--lr {self.max_lr}, --min-lr {self.min_lr}, --lr-warmup-init "
                f"{self.init_lr}",
            )
        if not 0 <= self.lr_warmup_steps < self.lr_decay_steps:
            raise UsageError(
                "the warm-up is longer than the schedule",
                expected=f"fewer than {self.lr_decay_steps} samples",
                found=self.lr_warmup_steps,
                fix="shorten --lr-warmup-*, or lengthen --lr-decay-* or --train-*",
            )
        if (
            self.lr_decay_style == "WSD"
            and not 0 < (self.wsd_decay_steps or 0) <= self.lr_decay_steps
        ):
            raise UsageError(
                "--lr-decay-style WSD needs the length of its decay",
                found=self.wsd_decay_steps,
                expected=f"1 to {self.lr_decay_steps} samples",
                fix="give --lr-wsd-decay-iters or --lr-wsd-decay-samples",
            )

    def lr(self, samples: int) -> float:
        """The rate for the batch that starts after `samples` consumed samples."""
        if self.lr_warmup_steps > 0 and samples <= self.lr_warmup_steps:
            return self.init_lr + (self.max_lr - self.init_lr) * samples / self.lr_warmup_steps
        if self.lr_decay_style == "constant":
            return self.max_lr
        if samples > self.lr_decay_steps:
            return self.min_lr
        if self.lr_decay_style == "inverse-square-root":
            return max(
                self.min_lr,
                self.max_lr * max(self.lr_warmup_steps, 1) ** 0.5 / max(samples, 1) ** 0.5,
            )
        return self.min_lr + self._share(samples) * (self.max_lr - self.min_lr)

    def _share(self, samples: int) -> float:
        """From 1 at the end of the warm-up to 0 at the end of the decay."""
        done = (samples - self.lr_warmup_steps) / (self.lr_decay_steps - self.lr_warmup_steps)
        if self.lr_decay_style == "linear":
            return 1.0 - done
        if self.lr_decay_style == "cosine":
            return 0.5 * (math.cos(math.pi * done) + 1.0)
        assert self.wsd_decay_steps is not None
        into = samples - (self.lr_decay_steps - self.wsd_decay_steps)
        if into <= 0:
            return 1.0
        done = into / self.wsd_decay_steps
        shapes = {
            "linear": 1.0 - done,
            "cosine": 0.5 * (math.cos(math.pi * done) + 1.0),
            "exponential": 2.0 * 0.5**done - 1.0,
            "minus_sqrt": 1.0 - math.sqrt(done),
        }
        return shapes[self.lr_wsd_decay_style]


class Scheduler:
    """Sets the rates of an optimizer's groups. DeepSpeed steps, saves and loads it as the engine's
    scheduler.

    `decays` says which groups have weight decay (None: those that have it now).
    At a load, settings that differ from the checkpoint's are a
    StateMismatchError, unless `override` (these win) or `use_checkpoint` (the checkpoint's win).
    """

    def __init__(
        self,
        optimizer: Any,
        settings: Settings,
        override: bool = False,
        use_checkpoint: bool = False,
        decays: list[bool] | None = None,
    ) -> None:
        if override and use_checkpoint:
            raise UsageError(
                "the settings of the schedule come from one place",
                expected="one flag",
                found="--override-opt_param-scheduler and --use-checkpoint-opt_param-scheduler",
            )
        self.optimizer, self.settings = optimizer, settings
        self.override, self.use_checkpoint = override, use_checkpoint
        self.num_steps = 0
        self._decays = decays or [group["weight_decay"] != 0.0 for group in optimizer.param_groups]
        self.step(0)

    def step(self, increment: int) -> None:
        """`increment` more samples were consumed."""
        self.num_steps += increment
        for group, decays in zip(self.optimizer.param_groups, self._decays, strict=True):
            group["lr"] = self.settings.lr(self.num_steps)
            group["weight_decay"] = self.settings.weight_decay if decays else 0.0

    def get_last_lr(self) -> list[float]:
        return [group["lr"] for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        return {"num_steps": self.num_steps, **asdict(self.settings)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.settings = self.merged(state)
        self.num_steps = int(state["num_steps"])
        self.step(0)

    def merged(self, state: Mapping[str, Any]) -> Settings:
        """The settings to go on with; raises without touching anything."""
        saved = {key: state[key] for key in asdict(self.settings) if key in state}
        if "start_wd" in state:  # of megatron-core's own scheduler
            saved["weight_decay"] = _constant_decay(state)
        changed = {
            key: value for key, value in saved.items() if getattr(self.settings, key) != value
        }
        if self.override or not changed:
            return self.settings
        if self.use_checkpoint:
            return Settings(**{**asdict(self.settings), **saved})
        raise StateMismatchError(
            "the schedule differs from the checkpoint's: "
            + ", ".join(_FLAGS[key] for key in changed),
            expected=", ".join(f"{key}={value}" for key, value in changed.items()),
            found=", ".join(f"{key}={getattr(self.settings, key)}" for key in changed),
            fix="--override-opt_param-scheduler goes on with these flags, "
            "--use-checkpoint-opt_param-scheduler with the "
            "checkpoint's",
        )


def _constant_decay(state: Mapping[str, Any]) -> float:
    """The weight decay of megatron-core's own scheduler. Raises StateMismatchError where it
    grows."""
    if state["start_wd"] != state["end_wd"]:
        raise StateMismatchError(
            "the checkpoint's schedule lets the weight decay grow",
            expected="one weight decay",
            found=f"{state['start_wd']} to {state['end_wd']}",
            fix="resume with --engine megatron",
        )
    return float(state["end_wd"])
