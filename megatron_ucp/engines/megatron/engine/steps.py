"""Where a step of megatron-core's stack has ended: at the next one's `zero_grad`, when the program
has stepped the schedule and counted."""

import functools
from typing import Any

from megatron_ucp import say
from megatron_ucp.engines.megatron.engine.stack import MegatronStack
from megatron_ucp.engines.memory_steps import MemorySteps


class StackSteps:
    """Watches the optimizer of a stack. The program's loop is its own: it may count before it
    zeroes gradients, or after. A step has ended where it has counted it."""

    def __init__(self, stack: MegatronStack, kept: MemorySteps) -> None:
        self._stack, self._kept = stack, kept
        self._begun: int | None = None  # the iteration in which the optimizer was last called
        self._scheduled: Any = None  # the schedule then; None where it stays as it is
        self._has_said = False

    def watch(self) -> None:
        """Puts methods of ours around the optimizer's own."""
        optimizer = self._stack.optimizer
        step, zero_grad = optimizer.step, optimizer.zero_grad

        @functools.wraps(step)
        def stepped(*args: Any, **kwargs: Any) -> Any:
            before = self._stack.iteration, getattr(self._stack.scheduler, "num_steps", None)
            done = step(*args, **kwargs)
            self._kept.stepped(before[0] + 1)
            self._begun, scheduled = before
            self._scheduled = scheduled if done[0] else None  # an overflow moves no schedule
            return done

        @functools.wraps(zero_grad)
        def zeroed(*args: Any, **kwargs: Any) -> Any:
            self._ended()
            return zero_grad(*args, **kwargs)

        optimizer.step, optimizer.zero_grad = stepped, zeroed

    def _ended(self) -> None:
        """Before gradients are zeroed for the next step."""
        if self._begun is None:
            return
        counted = self._stack.iteration == self._begun + 1
        scheduled = getattr(self._stack.scheduler, "num_steps", None)
        self._begun = None
        if counted and (scheduled is None or scheduled != self._scheduled):
            self._kept.ended_step(self._stack.iteration)
        elif not self._has_said:
            self._has_said = True
            say.note(
                "no step is kept in memory: the optimizer was stepped, and the stack's iteration "
                "or its schedule had not moved when gradients were zeroed for the next step. Let "
                "the loop count before that: stack.iteration += 1, stack.consumed_samples += ..."
            )
