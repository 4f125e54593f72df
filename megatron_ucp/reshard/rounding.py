"""Reads a source for a target that may be narrower, and looks at every value that is rounded."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial

import torch

from megatron_ucp.core.manifest import Manifest
from megatron_ucp.core.plan import Slot, Want
from megatron_ucp.formats.base import Source
from megatron_ucp.reshard.execute import TORCH_DTYPES
from megatron_ucp.reshard.overflows import Overflows, is_looked_at
from megatron_ucp.reshard.windows import WindowReader


class RoundingReader(WindowReader):
    """A WindowReader that reads again what became infinite, as it is saved, to tell what is lost
    from what was infinite before."""

    def __init__(self, source: Source, allow: frozenset[str] = frozenset()) -> None:
        super().__init__(source, allow)
        self._overflows = Overflows()
        self._exact: dict[tuple[int, Slot], Manifest] = {}  # (id of the target, its slot)

    def prove(
        self, target: Manifest, wants: Iterable[Want], allow: frozenset[str] = frozenset()
    ) -> None:
        wants = list(wants)
        super().prove(target, wants, allow)
        looked_at = [want for want in wants if self._is_looked_at(target, want)]
        if looked_at:
            exact = self._as_saved(target, looked_at)
            super().prove(exact, looked_at, allow)
            self._exact.update({(id(target), slot): exact for slot, _ in looked_at})

    def fill(
        self, target: Manifest, slot: Slot, state: str, low: int, memory: torch.Tensor
    ) -> None:
        super().fill(target, slot, state, low, memory)
        exact = self._exact.get((id(target), slot))
        if exact is None:
            return
        buffer, high = target.buffers[slot.buffer].of(slot.state), low + memory.numel()
        for one in buffer.fragments(slot.part):
            first, last = max(one.offset, low), min(one.offset + one.high - one.low, high)
            if first < last:
                name = buffer.members[one.member].param
                values = partial(self._values, exact, slot, state, first, last)
                self._overflows.look(name, memory[first - low : last - low], values)

    def check_overflows(self, file: str) -> None:
        """Raises InexactError that lists every parameter with values which its dtype can't hold."""
        self._overflows.check(file, "train")

    def _is_looked_at(self, target: Manifest, want: Want) -> bool:
        slot, state = want
        buffer = target.buffers[slot.buffer]
        dtype = dict(buffer.states)[slot.state]
        params = {member.param for member in buffer.members}
        return any(is_looked_at(self.source.manifest, name, state, dtype) for name in params)

    def _as_saved(self, target: Manifest, wants: Sequence[Want]) -> Manifest:
        """A target that holds the wanted slots in dtypes that keep every value."""
        buffers = list(target.buffers)
        for slot, state in dict.fromkeys((replace(s, cut=(), part=0), state) for s, state in wants):
            buffer = buffers[slot.buffer]
            names = [member.param for member in buffer.members]
            dtype = _widest({self.source.manifest.states_of(name)[state] for name in names})
            own = tuple((key, dtype if key == slot.state else d) for key, d in buffer.states)
            buffers[slot.buffer] = replace(buffer, states=own)
        return replace(target, buffers=tuple(buffers))

    def _values(
        self, exact: Manifest, slot: Slot, state: str, first: int, last: int
    ) -> torch.Tensor:
        """Elements [first, last) of a slot as they are saved."""
        dtype = dict(exact.buffers[slot.buffer].states)[slot.state]
        out = torch.empty(last - first, dtype=TORCH_DTYPES[dtype])
        super().fill(exact, slot, state, first, out)
        return out


def _widest(dtypes: set[str]) -> str:
    """A dtype that holds what all of them do."""
    if len(dtypes) == 1:
        return min(dtypes)
    return "float64" if "float64" in dtypes else "float32"
