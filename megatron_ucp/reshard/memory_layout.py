"""A run in the memory of ranks: how it is divided among those that stay, and the sink that takes
it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch

from megatron_ucp.core.manifest import BufferPart, Manifest
from megatron_ucp.core.mesh import Mesh
from megatron_ucp.core.plan import Slot
from megatron_ucp.errors import ForeignFileError, UsageError
from megatron_ucp.formats.pt.refs import ITEMSIZE
from megatron_ucp.reshard import agree
from megatron_ucp.reshard.execute import TORCH_DTYPES
from megatron_ucp.reshard.fingerprint import (
    JoinedSums,
    Table,
    compared_with,
    joined_sums,
    require_alike,
    require_recorded,
    sums_of_rank,
    table_of,
)
from megatron_ucp.reshard.kept_moves import SharedMemories
from megatron_ucp.reshard.transfer import Lost, Proved, SinkPart, TransferRun

# ---- layouts
#
# How a run lies in the memory of the ranks that stay, while the program builds its new engine.


Takers = Sequence[Sequence[BufferPart]]  # the parts that each rank of the world keeps


def on_the_first(manifest: Manifest, here: Takers, stay: int) -> Takers:
    """What the first ranks of a world keep: what each has, and what the others alone have, as many
    bytes on each as can be. `here` are the parts that ranks have."""
    kept = [[*parts] for parts in here[:stay]]
    sizes = [sum(_bytes_of(manifest, part) for part in parts) for parts in kept]
    held = {part for parts in kept for part in parts}
    left = dict.fromkeys(part for parts in here[stay:] for part in parts if part not in held)
    for part in sorted(left, key=lambda part: -_bytes_of(manifest, part)):
        rank = min(range(stay), key=sizes.__getitem__)
        kept[rank].append(part)
        sizes[rank] += _bytes_of(manifest, part)
    return [*kept, *([] for _ in here[stay:])]


def _bytes_of(manifest: Manifest, part: BufferPart) -> int:
    buffer = manifest.buffers[part[0]]
    return sum(buffer.of(state).elems(part[2]) * ITEMSIZE[dtype] for state, dtype in buffer.states)


@dataclass(frozen=True)
class CopiedLayout:
    """What ranks keep so that machines may be lost: each its `own` parts, of those that it has, and
    what it gets of others (part, rank that gives it, rank that gets it)."""

    own: Sequence[Sequence[BufferPart]]
    sent: Sequence[tuple[BufferPart, int, int]]

    def kept_by(self, rank: int) -> list[BufferPart]:
        """All that a rank keeps, its own parts first."""
        return [*self.own[rank], *(part for part, _, taker in self.sent if taker == rank)]


def copied(
    manifest: Manifest, here: Sequence[Sequence[BufferPart]], nodes: Sequence[str], copies: int
) -> CopiedLayout:
    """Each part on one machine and on `copies` more, as far as there are so many: machines that
    have it keep it themselves, the others are the next ones in order. On each machine the ranks
    share the work. `here` are the parts that ranks have, `nodes` their machines."""
    holders: dict[BufferPart, dict[str, list[int]]] = {}
    for rank, parts in enumerate(here):
        for part in parts:
            holders.setdefault(part, {}).setdefault(nodes[rank], []).append(rank)
    work = _Work(nodes, copies + 1)
    for part, having in holders.items():
        work.give(part, having, _bytes_of(manifest, part))
    return CopiedLayout(work.own, work.sent)


class _Work:
    """What the ranks of `nodes` keep, each part on `wanted` machines."""

    def __init__(self, nodes: Sequence[str], wanted: int) -> None:
        self._ranks: dict[str, list[int]] = {}  # of each machine
        for rank, node in enumerate(nodes):
            self._ranks.setdefault(node, []).append(rank)
        self._wanted, self._bytes = wanted, [0] * len(nodes)
        self.own: list[list[BufferPart]] = [[] for _ in nodes]
        self.sent: list[tuple[BufferPart, int, int]] = []

    def give(self, part: BufferPart, having: dict[str, list[int]], size: int) -> None:
        """A part that some machines have, each on some ranks."""
        first, *more = sorted(having, key=lambda node: self._bytes[self._least(having[node])])
        near = [first, *more][: self._wanted]
        givers = [self._takes(having[node], size) for node in near]
        for rank in givers:
            self.own[rank].append(part)
        order = [*self._ranks]
        at = order.index(first)
        others = [node for node in order[at:] + order[:at] if node not in near]
        for node in others[: self._wanted - len(near)]:
            self.sent.append((part, givers[0], self._takes(self._ranks[node], size)))

    def _least(self, ranks: Sequence[int]) -> int:
        return min(ranks, key=lambda rank: (self._bytes[rank], rank))

    def _takes(self, ranks: Sequence[int], size: int) -> int:
        """The rank among some that keeps so many more bytes."""
        rank = self._least(ranks)
        self._bytes[rank] += size
        return rank


def ranks_that_stay(mesh: Mesh | None, ranks: int | None, world: int) -> int:
    """How many ranks keep what is held. Raises UsageError for numbers that don't fit."""
    wanted = mesh.world if mesh is not None else ranks
    stay = world if wanted is None else wanted
    if ranks is not None and (isinstance(ranks, bool) or not 1 <= ranks <= world):
        raise UsageError(
            "ranks says how many ranks of this world stay",
            expected=f"1 to {world}",
            found=repr(ranks),
            fix="give such a number, or leave ranks out where the world grows",
        )
    if mesh is not None and ranks is not None and mesh.world != ranks:
        raise UsageError(
            "the mesh has another number of ranks than stay",
            expected=f"a mesh of {ranks} ranks",
            found=f"{mesh}, which has {mesh.world}",
            fix="leave ranks out, or correct the mesh",
        )
    return min(stay, world)


# ---- memory sink
#
# Memory that lies beside all engines, as a sink and as a holder: what a resize keeps while the
# program builds its new engine.


_ALIGNED_BYTES = 64  # where slots begin in flat memory


class HostMemory:
    """This rank's `parts` of what a manifest says, in host memory."""

    def __init__(self, manifest: Manifest, parts: Sequence[BufferPart]) -> None:
        self.manifest, self._parts = manifest, list(parts)
        self._memory: dict[Slot, torch.Tensor] = {}

    def parts(self) -> list[BufferPart]:
        return self._parts

    def read(self, slot: Slot, first: int, last: int) -> torch.Tensor:
        return self._memory[slot][first:last]

    def tensor(self, slot: Slot) -> torch.Tensor:
        return self._memory[slot]

    @property
    def size_bytes(self) -> int:
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
        self._parts, self._memory = [], {}


class MemorySink:
    """Fills the memory that this rank holds. All elements stay as they are: `recorded` is what the
    run said of them (empty: nothing), and is compared."""

    verb, thorough = "hold", False

    def __init__(self, held: HostMemory, recorded: Table) -> None:
        self.held, self._recorded, self._file = held, recorded, ""
        wants = [  # every state of every part, as it is
            (Slot(*part, state), state)
            for part in held.parts()
            for state, _ in held.manifest.buffers[part[0]].states
        ]
        self.parts = (SinkPart(held.manifest, tuple(wants)),)

    def __enter__(self) -> Self:
        self.held.allocate()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            self.held.release()

    def move(self, source: SharedMemories, parts: Sequence[Proved], run: TransferRun) -> None:
        self._file = source.file
        source.fill(parts, self.held.tensor, run, lambda op: False)

    def compare(self) -> None:
        """Raises ForeignFileError where what ranks hold now is not what the run had."""
        if not self._recorded:
            return
        with agree.together():
            own = sums_of_rank(self.held)
        joined = joined_sums(own)
        agree.of_first(lambda: self._compared(joined))

    def _compared(self, sums: JoinedSums) -> None:
        table, apart = table_of(self.held.manifest, sums)
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

    def lost(self) -> Lost:
        """Nothing is rounded."""
        return {}

    def finish(self) -> None:
        """All of it is in place."""

    def publish(self) -> None:
        """Nobody else asks for it."""
