"""megatron-core's stack as an engine of this package: `attach_megatron`, and where its steps
end."""

import functools
from collections.abc import Sequence
from typing import Any

from megatron_ucp import say
from megatron_ucp.engines.background import (
    BESIDE,
    Background,
    BackgroundOptions,
    beside_training,
    keep_background,
)
from megatron_ucp.engines.handle import Handle, check_versions
from megatron_ucp.engines.hold import HoldOptions, LentRun
from megatron_ucp.engines.live import require_usable
from megatron_ucp.engines.megatron.live import LiveMegatron, describe
from megatron_ucp.engines.megatron.model import bare_model, model_of, table_of
from megatron_ucp.engines.megatron.optimizer import inner_optimizers
from megatron_ucp.engines.megatron.refuse import refuse_stack
from megatron_ucp.engines.megatron.save import CurrentStates, present_states, taken
from megatron_ucp.engines.megatron.save import save as save_stack
from megatron_ucp.engines.megatron.shard import MegatronStack, mesh_of
from megatron_ucp.engines.memory import (
    IN_MEMORY,
    MemoryOptions,
    MemorySteps,
    in_memory_as,
    keep_steps,
)
from megatron_ucp.engines.save import BACKGROUND, DIRECT, SaveReport, refuse_way
from megatron_ucp.engines.trainers import guard_removals
from megatron_ucp.families.family import Family
from megatron_ucp.reshard import agree
from megatron_ucp.reshard.options import require_known

# ---- steps
#
# Where a step of megatron-core's stack has ended: at the next one's `zero_grad`, when the program
# has stepped the schedule and counted.


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


# ---- attach
#
# The way in: a stack that ucp.load fills and ucp.save writes.


_WAYS = (DIRECT, BACKGROUND)  # there is no code of a program's own that "stock" could mean


@agree.door("attach_megatron")
def attach_megatron(
    model_chunks: Sequence[Any] | Any,
    optimizer: Any,
    scheduler: Any = None,
    family: str | Family | None = None,
    *,
    save: str | None = None,
    **beside: Any,
) -> MegatronStack:
    """Makes megatron-core's own stack one that `ucp.load` fills and `ucp.save` writes. Collective.
    Nothing is changed.

    Args:
        model_chunks: What Megatron-LM's `get_model` returns: one chunk, or a list of them.
        optimizer: What `get_megatron_optimizer` returns.
        scheduler: An `OptimizerParamScheduler`, or None.
        family: The model family (a registered name, or a `Family`). Default: the first one that
            has all of the model's parameters; where none has, the layouts are those that the model
            says itself.
        save: When `ucp.save` writes the files: before it returns ("direct", the default), or while
            training goes on ("background": it returns when a snapshot is taken; see `wait`).
        beside: How a save goes on in the background: `busy`, `deadline`, `on_error`,
            `snapshot_bytes`, `keep_snapshot`; see `BackgroundOptions`. What is kept in memory
            between saves: `keep`, `every`, `copies`, `folder`, `client_state`; see
            `MemoryOptions`. Other options are refused.

    Returns:
        The stack, whose `iteration` and `consumed_samples` a load sets and a save writes.

    Raises:
        UnsupportedError: On every rank, for a stack that can't be loaded exactly.
        UsageError: For what is no such stack, and for options that are not known, or differ
            between ranks.
        LayoutError: Where a live parameter contradicts its family.

    Example:
        >>> stack = ucp.attach_megatron(model, optimizer, opt_param_scheduler)
        >>> report = ucp.load(stack, "checkpoints")
    """
    chunks = list(model_chunks) if isinstance(model_chunks, list | tuple) else [model_chunks]
    check_versions()
    how, in_memory = _saved_how(save, beside)
    with agree.together():
        refuse_stack(chunks, optimizer)
        inner_optimizers(optimizer)  # all of a known kind
        mesh = mesh_of(chunks)
    table = table_of(chunks, mesh)
    with agree.together():
        model = model_of(bare_model(chunks[0]), table, mesh.tp, family)
        stack = MegatronStack(chunks, optimizer, scheduler, mesh, model)
    describe(stack)  # compares every parameter with its family, and every position
    stack.ucp = _StackHandle(stack, bare_model(chunks[0]), model)
    if how is not None:
        keep_background(stack, Background(how))
        guard_removals()
    if in_memory is not None:
        with agree.together():
            kept = MemorySteps(stack.ucp, in_memory)
        keep_steps(stack, kept)
        StackSteps(stack, kept).watch()
    return stack


def _saved_how(
    way: str | None, options: dict[str, Any]
) -> tuple[BackgroundOptions | None, MemoryOptions | None]:
    """How saves go on beside training, and what is kept in memory; None for what is not.
    Collective. Raises UsageError."""
    with agree.together() as told:
        told.value = {key: agree.plain_option(one) for key, one in {"save": way, **options}.items()}
    agree.require_same(told.values)
    with agree.together():
        if way not in (None, *_WAYS):
            refuse_way(way, _WAYS)
        require_known(options, ("save", *BESIDE, *IN_MEMORY))
        of_memory = {key: options.pop(key) for key in IN_MEMORY if key in options}
        how, in_memory = beside_training(way == BACKGROUND, options), in_memory_as(of_memory)
    return how, in_memory


class _StackHandle(Handle):
    """A stack of megatron-core's."""

    def describe(self) -> LiveMegatron:
        return describe(self.program)

    def present(self) -> CurrentStates:
        return present_states(self.describe())

    def require_usable(self) -> None:
        with agree.together():
            require_usable(self.program.optimizer)

    def to_fill(self, family: Any) -> LiveMegatron:
        return self.describe()

    def lent(self, how: HoldOptions) -> LentRun:
        return taken(self.program, how)

    def save(self, save_dir: Any, **options: Any) -> SaveReport:
        return save_stack(self.program, save_dir, **options)
