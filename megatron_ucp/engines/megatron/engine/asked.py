"""A save of megatron-core's stack as it was asked for, in whatever format."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from megatron_ucp.core.flat import States
from megatron_ucp.engines.background import Background, background_of
from megatron_ucp.engines.megatron.engine.besides import described
from megatron_ucp.engines.megatron.engine.present import PresentStates
from megatron_ucp.engines.megatron.engine.stack import MegatronStack
from megatron_ucp.engines.saves import Saving
from megatron_ucp.errors import SaveError, UnsupportedError, UsageError
from megatron_ucp.formats.megatron.torch_dist import BACKEND as TORCH_DIST
from megatron_ucp.formats.pointers import iteration_name
from megatron_ucp.reshard import agree

TORCH = "torch"  # as Megatron-LM calls its older files: they are read, and written by itself


@dataclass(frozen=True)
class AskedOfStack:
    """What is saved, and how. `retain_interval`: the save before this one goes, unless its
    iteration is a multiple (None: it stays)."""

    stack: MegatronStack
    folder: Path
    arguments: Any
    how: Saving
    retain_interval: int | None = None

    @cached_property
    def tag(self) -> str:
        """The name of the folder that it gets, of the iteration when it is first asked for."""
        return iteration_name(self.stack.iteration)

    @property
    def background(self) -> Background | None:
        """What goes on with the save while the stack trains; None where that waits."""
        return background_of(self.stack)


def require_written(ckpt_format: object) -> None:
    """Raises UnsupportedError for another format than torch_dist, the one that is written."""
    if ckpt_format != TORCH_DIST:
        raise UnsupportedError(
            "this format of Megatron-LM's is loaded here, but not written",
            expected=f"--ckpt-format {TORCH_DIST}",
            found=f"--ckpt-format {ckpt_format}",
            fix="leave it out (Python: ckpt_format=): Megatron-LM and every engine here load "
            "torch_dist on any mesh; or call Megatron-LM's own save_checkpoint",
        )


def described_to_save(stack: MegatronStack) -> PresentStates:
    """The engine with the states that its optimizers have now. Collective."""
    found = described(stack, SaveError)
    with agree.together():
        _require_loadable(found.states)
    return found


def _require_loadable(states: States) -> None:
    """Raises UsageError where the optimizer has no states, UnsupportedError for some that are not
    in fp32."""
    if not states:
        raise UsageError(
            "there is nothing that Megatron-LM could load as the state of an optimizer",
            expected="its states",
            found="none, before the first step",
            fix="save after the first step",
        )
    if odd := [f"{state} in {dtype}" for state, dtype in states if dtype != "float32"]:
        raise UnsupportedError(
            "the optimizer keeps a state in another dtype than megatron-core's files have",
            expected="float32",
            found=", ".join(odd),
            fix="keep the optimizer's states in fp32: leave --exp-avg-dtype and "
            "--exp-avg-sq-dtype out",
        )
