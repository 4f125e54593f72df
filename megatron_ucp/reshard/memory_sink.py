"""Memory that lies beside all engines, as a sink and as a holder: what a resize keeps while the
program builds its new engine."""

from collections.abc import Sequence
from typing import Self

import torch

from megatron_ucp.core.manifest import BufferPart, Manifest
from megatron_ucp.core.plan import Slot
from megatron_ucp.errors import ForeignFileError
from megatron_ucp.formats.pt.values import ITEMSIZE
from megatron_ucp.reshard.execute import TORCH_DTYPES
from megatron_ucp.reshard.fingerprint import (
    Sums,
    Table,
    compared_with,
    require_alike,
    require_recorded,
    sums_of_rank,
    table_of,
)
from megatron_ucp.reshard.overflows import Lost
from megatron_ucp.reshard.shared_memories import SharedMemories
from megatron_ucp.reshard.transfer import Proved, SinkPart, TransferRun

_ALIGNED_BYTES = 64  # where slots begin in flat memory


class HeldMemory:
    """This rank's `parts` of what a manifest says, in host memory."""

    def __init__(self, manifest: Manifest, parts: Sequence[BufferPart]) -> None:
        self.manifest, self._parts = manifest, list(parts)
        self._memory: dict[Slot, torch.Tensor] = {}

    def parts(self) -> list[BufferPart]:
        return self._parts

    def read(self, slot: Slot, first: int, last: int) -> torch.Tensor:
        return self._memory[slot][first:last]

    def tensor(self, slot: Slot) -> torch.Tensor:
        """All that this rank has of a slot."""
        return self._memory[slot]

    @property
    def size_bytes(self) -> int:
        """What it takes."""
        return sum(memory.nbytes for memory in self._memory.values())

    def allocate(self) -> None:
        """Memory for all of it, its values not set."""
        for part in self._parts:
            buffer = self.manifest.buffers[part[0]]
            for state, dtype in buffer.states:
                elems = buffer.of(state).elems(part[2])
                self._memory[Slot(*part, state)] = torch.empty(elems, dtype=TORCH_DTYPES[dtype])

    def places(self) -> list[tuple[Slot, int, int]]:
        """All of it in flat memory: each slot, its first byte, and how many it has."""
        out: list[tuple[Slot, int, int]] = []
        at = 0
        for part in self._parts:
            buffer = self.manifest.buffers[part[0]]
            for state, dtype in buffer.states:
                size = buffer.of(state).elems(part[2]) * ITEMSIZE[dtype]
                out.append((Slot(*part, state), at, size))
                at += size + -size % _ALIGNED_BYTES
        return out

    def lie_in(self, flat: torch.Tensor, places: Sequence[tuple[Slot, int, int]]) -> None:
        """Its slots are these bytes of flat memory."""
        for slot, at, size in places:
            dtype = TORCH_DTYPES[self.manifest.buffers[slot.buffer].dtype_of(slot.state)]
            self._memory[slot] = flat[at : at + size].view(dtype)

    def release(self) -> None:
        """Lets go of all of it."""
        self._parts, self._memory = [], {}


class MemorySink:
    """Fills the memory that this rank holds. All elements stay as they are: `recorded` is what the
    run said of them (empty: nothing), and is compared."""

    verb, thorough = "hold", False

    def __init__(self, held: HeldMemory, recorded: Table) -> None:
        self.held, self._recorded, self._file = held, recorded, ""
        self.parts = (_all_of(held),)

    def __enter__(self) -> Self:
        self.held.allocate()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            self.held.release()

    def move(self, source: SharedMemories, parts: Sequence[Proved], run: TransferRun) -> None:
        self._file = source.file
        source.fill(parts, self.held.tensor, run, lambda op: False)

    def lost(self) -> Lost:
        """Nothing is rounded."""
        return {}

    def finish(self) -> Sums:
        """What this rank's memory adds to the fingerprint of all."""
        return sums_of_rank(self.held) if self._recorded else {}

    def publish(self, told: Sequence[Sums]) -> None:
        """Raises ForeignFileError where what ranks hold now is not what the run had."""
        if not self._recorded:
            return
        table, apart = table_of(self.held.manifest, told)
        require_alike(apart, self._file)
        require_recorded(table, self._recorded, self._file)
        same, _ = compared_with(table, self._recorded)
        lacking = sorted(self._recorded.keys() - {name for name, _ in same})
        if lacking:
            raise ForeignFileError(
                "what is held does not have all of a parameter that the run had",
                file=self._file,
                parameter=lacking[0],
                found=f"{len(lacking)} such parameters",
                fix="report this: the plan was proved",
            )


def _all_of(held: HeldMemory) -> SinkPart:
    """Every state of every part, as it is."""
    manifest = held.manifest
    wants = [
        (Slot(*part, state), state)
        for part in held.parts()
        for state, _ in manifest.buffers[part[0]].states
    ]
    return SinkPart(manifest, tuple(wants))
