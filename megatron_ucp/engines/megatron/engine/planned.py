"""What a save of megatron-core's stack plans and proves, kept for the next one: a save in the
background has to do nothing but copy while training stands still."""

from collections.abc import Sequence
from typing import Any

from megatron_ucp.engines.megatron.engine.family import keys_of_chunks
from megatron_ucp.engines.megatron.engine.inner import kind_of
from megatron_ucp.engines.megatron.engine.output import SavedWeights, StackOutput
from megatron_ucp.engines.megatron.engine.present import PresentStates
from megatron_ucp.engines.megatron.engine.stack import MegatronStack
from megatron_ucp.engines.saves import SaveSink
from megatron_ucp.reshard import agree
from megatron_ucp.reshard.memories import Memories
from megatron_ucp.reshard.transfer import Moved, Proved, TransferRun, moved

_KEPT = "_ucp_planned"  # of a stack


def structure_of(stack: MegatronStack, present: PresentStates) -> tuple[Any, ...]:
    """Everything that the plan of a save depends on: equal where the plan is. Values, steps and
    hyper-parameters are no part of it; of the ranks all that matters is in the mesh."""
    bare = present.live.manifest  # whose members have no steps yet
    held = (bare.mesh, bare.params, bare.buffers, present.states)
    return (kind_of(stack.optimizer), *held, agree.world())


class UnsteppedMemories(Memories):
    """Those of a stack, whose optimizers may not step while they are read."""

    def __init__(self, file: str, present: PresentStates, weights: SavedWeights) -> None:
        super().__init__(file, present, weights, keeps=True)
        self.present = present

    def check(self, thorough: bool) -> None:
        """Raises SaveError where one did."""
        self.present.require_unstepped()


class PlannedSave:
    """The files of a save on paper, what they are made of, and the proof. Making one is
    collective."""

    def __init__(
        self, stack: MegatronStack, structure: tuple[Any, ...], present: PresentStates, file: str
    ) -> None:
        self.structure = structure
        keys = keys_of_chunks(stack.chunks, present.manifest.by_name)
        self.output = StackOutput(present.manifest, kind_of(stack.optimizer), keys)
        self._weights = SavedWeights(present)
        self._source = UnsteppedMemories(file, present, self._weights)
        self._parts: Sequence[Proved] = ()

    def moved(self, present: PresentStates, sink: SaveSink, run: TransferRun) -> Moved:
        """Takes the values that there are now. Collective. Raises a UcpError on every rank."""
        self._weights.use(present)
        self._source.present = present
        self._source.use(str(sink.folder), present, self._weights)
        found = moved(self._source, sink, run=run, known=self._parts)
        self._parts = found.parts
        return found


def knows(stack: MegatronStack, structure: tuple[Any, ...]) -> bool:
    """Whether this rank has the plan of a save of this structure."""
    kept: PlannedSave | None = stack.__dict__.get(_KEPT)
    return kept is not None and kept.structure == structure


def planned(
    stack: MegatronStack,
    structure: tuple[Any, ...],
    present: PresentStates,
    file: str,
    known: bool,
) -> PlannedSave:
    """The plan of a save, which every rank has (`known`), or makes. Collective."""
    if not known:
        stack.__dict__.pop(_KEPT, None)
        stack.__dict__[_KEPT] = PlannedSave(stack, structure, present, file)
    return stack.__dict__[_KEPT]
