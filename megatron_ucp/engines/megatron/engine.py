"""megatron-core's stack as an engine of this package: `attach_megatron`, and where its steps
end."""

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from megatron_ucp import say
from megatron_ucp.engines.background import Background, background_options, keep_background
from megatron_ucp.engines.handle import Handle, check_versions
from megatron_ucp.engines.hold import HoldOptions, MemoryRun, lent
from megatron_ucp.engines.live import require_usable
from megatron_ucp.engines.load import as_compared
from megatron_ucp.engines.mcore_model import bare_model, model_of, table_of
from megatron_ucp.engines.megatron.live import (
    CurrentStates,
    LiveMegatron,
    describe,
    lies_at,
    present_states,
    present_to_save,
)
from megatron_ucp.engines.megatron.optimizer import inner_optimizers
from megatron_ucp.engines.megatron.refuse import refuse_stack
from megatron_ucp.engines.megatron.save import save as save_stack
from megatron_ucp.engines.megatron.shard import MegatronStack, mesh_of
from megatron_ucp.engines.megatron.state import client_state_of, read_extras, read_state
from megatron_ucp.engines.memory import MemorySteps, keep_steps, memory_options
from megatron_ucp.engines.save import SaveReport
from megatron_ucp.engines.trainers import guard_removals
from megatron_ucp.engines.values import inert
from megatron_ucp.errors import UnsupportedError
from megatron_ucp.families.family import Family
from megatron_ucp.reshard import agree
from megatron_ucp.reshard.options import (
    BACKGROUND,
    DIRECT,
    IN_BACKGROUND,
    IN_MEMORY,
    OPTIONS,
    STORES,
    check_given,
    one_of,
    require_known,
    use_store,
)

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


# There is no code of a program's own that "stock" could mean.
_SAVE = one_of(DIRECT, BACKGROUND)


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
    options = {"save": save or DIRECT, **beside}
    agree.require_same(as_compared(options))
    with agree.together():
        taken = {IN_BACKGROUND, IN_MEMORY, STORES}
        known = [name for name, row in OPTIONS.items() if taken & {*row.of}]
        require_known(options, ["save", *known])
        _SAVE("save", options["save"])
        check_given({name: options[name] for name in options if name == "store"})
        use_store(options)
        in_background, in_memory = background_options(options), memory_options(options)
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
    if in_background is not None:
        keep_background(stack, Background(in_background))
        guard_removals()
    if in_memory is not None:
        with agree.together():
            kept = MemorySteps(stack.ucp, in_memory)
        keep_steps(stack, kept)
        StackSteps(stack, kept).watch()
    return stack


class _StackHandle(Handle):
    """A stack of megatron-core's."""

    def describe(self) -> LiveMegatron:
        return describe(self.program)

    def present(self) -> CurrentStates:
        return present_states(self.describe())

    def weights(self) -> LiveMegatron:
        return describe(self.program, weights=True)

    def lies_at(self, masters: bool) -> list[object]:
        return lies_at(self.program, masters)

    def check_usable(self) -> None:
        require_usable(self.program.optimizer)

    def to_fill(self, family: Any) -> LiveMegatron:
        return self.describe()

    def lent(self, options: HoldOptions) -> MemoryRun:
        stack = self.program
        present = present_to_save(stack, UnsupportedError)
        state = read_state(stack, present.live.shard, options.drawn_now)
        with agree.together():
            client = client_state_of(stack, options.client_state)
            extras = read_extras(stack, present.live.shard, client)
            extras = replace(extras, scheduler=inert(extras.scheduler))
        return lent(present, state, extras, options)

    def save(self, save_dir: Any, **options: Any) -> SaveReport:
        return save_stack(self.program, save_dir, **options)
