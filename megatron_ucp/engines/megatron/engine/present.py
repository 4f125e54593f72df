"""The states that the optimizers of megatron-core's stack have now."""

from dataclasses import dataclass, replace

import torch

from megatron_ucp.core.flat import Scalars, States
from megatron_ucp.core.manifest import BufferPart, Manifest
from megatron_ucp.core.plan import Slot
from megatron_ucp.engines.megatron.engine.live import LiveMegatron
from megatron_ucp.engines.saves import require_unstepped
from megatron_ucp.errors import UsageError
from megatron_ucp.reshard import agree


@dataclass(frozen=True)
class PresentStates:
    """What the ranks hold of masters and moments, and of values: the engine, as the `manifest` says
    with all `states` that its optimizers have now beside the masters (none before the first
    step). Their count of steps is in `scalars`."""

    manifest: Manifest
    live: LiveMegatron
    states: States
    scalars: Scalars

    def parts(self) -> list[BufferPart]:
        return self.live.parts()

    def read(self, slot: Slot, first: int, last: int) -> torch.Tensor:
        return self.live.read(slot, first, last)

    def give_up(self) -> None:
        self.live.give_up()

    def require_unstepped(self) -> None:
        """Raises SaveError where an optimizer has stepped since: what was read meanwhile may be of
        two steps. Sums of what was read can't show that: they fit it."""
        for _, scalars in self.live.own.present():
            require_unstepped(dict(self.scalars), dict(scalars))


def present_states(live: LiveMegatron) -> PresentStates:
    """Collective; nothing is changed. Raises UsageError on every rank where states differ."""
    with agree.together() as told:
        told.value = live.own.present()
    with agree.together():
        states, scalars = _one_of([one for own in told.values for one in own])
    buffers = tuple(
        replace(
            buffer,
            states=(*buffer.states, *states),
            members=tuple(replace(member, scalars=scalars) for member in buffer.members),
        )
        if buffer.stepped
        else buffer
        for buffer in live.manifest.buffers
    )
    return PresentStates(replace(live.manifest, buffers=buffers), live, states, scalars)


def _one_of(found: list[tuple[States, Scalars]]) -> tuple[States, Scalars]:
    """What all pieces of all ranks have. Raises UsageError where it is not the same."""
    first = found[0] if found else ((), {})
    for one in found:
        if one != first:
            raise UsageError(
                "the optimizer's states are not alike",
                expected="the same states and step of all parameters, on every rank",
                found=f"{first} and {one}",
                fix="step all parameters before",
            )
    return first
