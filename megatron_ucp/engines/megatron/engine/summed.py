"""The fingerprint of a save of megatron-core's stack: of what its files hold."""

from collections.abc import Sequence

import torch

from megatron_ucp.core.plan import Slot
from megatron_ucp.engines.megatron.engine.output import StackOutput
from megatron_ucp.engines.megatron.engine.present import PresentStates
from megatron_ucp.reshard import agree
from megatron_ucp.reshard.fingerprint import Sums, sums_of, sums_of_rank, table_of


class WrittenSums:
    """Each rank sums what it writes, as it writes it, and before that its copies of what others
    write: so that copies which differ are seen. Nothing of the engine's memory is needed once it
    is made."""

    def __init__(self, present: PresentStates, output: StackOutput) -> None:
        self._manifest, self._output = present.manifest, output
        self._copies = _copies(present, output)
        self._windows: dict[tuple[int, Slot, int], Sums] = {}
        self._ranks: Sequence[Sums] = ()

    def wrote(self, part: int, slot: Slot, low: int, memory: torch.Tensor) -> None:
        """Elements of a part of the output."""
        state = self._output.stands_for(part, slot)
        if state is None:
            return
        target, window = self._output.parts[part].target, (low, low + len(memory))
        found = sums_of(
            target, [(slot, state)], lambda _, a, b: memory[a - low : b - low], within=window
        )
        # some weights are written twice, under two keys
        self._windows[part, slot, low] = {
            (name, kept, dtype, *self._output.home(part, slot.buffer)): sum_
            for (name, kept, dtype, *_), sum_ in found.items()
        }

    def of_rank(self) -> Sums:
        out = dict(self._copies)
        for window in self._windows.values():
            for key, sum_ in window.items():
                out[key] = out.get(key, 0) ^ sum_
        return out

    def of_all(self, ranks: Sequence[Sums]) -> None:
        self._ranks = ranks

    def table(self) -> tuple[dict[str, dict[str, str]], list[str]]:
        """As `table_of`, once all ranks have written."""
        return table_of(self._manifest, self._ranks)


def _copies(present: PresentStates, output: StackOutput) -> Sums:
    """Of what this rank does not write. Of data-parallel ranks that have the same the first one
    looks; of buffers of modules, which may differ, all."""
    manifest, rank = present.manifest, agree.world()[0]
    written = output.written

    def is_copy(slot: Slot, param: str) -> bool:
        place = slot.place
        if rank == output.first_rank(place):
            return (param, place) not in written
        return manifest.by_name[param].kind == "buffer"

    return sums_of_rank(present, is_copy)
