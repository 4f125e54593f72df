"""What several ranks hold alike is read by one of them, and sent to the others.

Without ZeRO, with plain optimizers, and of frozen weights up to ZeRO-2 each data-parallel rank has
all of a buffer: where each reads what it holds, files are read as many times as there are ranks.

Such a buffer is whole on all of these ranks, so that nothing has to be planned anew. Its memory is
divided into windows of 2 MiB, which go round: of four ranks the first reads the windows 0, 4, 8,
the second 1, 5, 9. Each window is broadcast as soon as it is read, and lands where it stays. Four
rounds at most are under way, while the next is read; no memory is needed beside the engine's own.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron_ucp.core.box import Ints
from megatron_ucp.core.manifest import Manifest
from megatron_ucp.core.mesh import EXPERTS, Mesh
from megatron_ucp.core.names import ITEMSIZE
from megatron_ucp.core.plan import Want, Windows
from megatron_ucp.reshard import agree
from megatron_ucp.reshard.execute import OfOp, TensorOf
from megatron_ucp.reshard.files import WINDOW_BYTES, SharedFiles
from megatron_ucp.reshard.messages import device_of_messages
from megatron_ucp.reshard.transfer import Proved, TransferRun

ONCE, EACH = READS = ("once", "each")
MOST_EACH = 8  # copies of which each rank reads its own, where nobody says how
_UNDER_WAY = 4  # rounds

# ---- on paper


def holders(mesh: Mesh, manifest: Manifest, number: int, rank: int) -> Ints:
    """The ranks that hold the same as a rank of a buffer, which it holds; that rank alone where
    each has a part of its own.

    Example: at dp=4, tp=2 rank 1 holds the same as ranks 3, 5 and 7 of a buffer that is not cut.
    """
    buffer = manifest.buffers[number]
    return (rank,) if buffer.partitions > 1 else mesh.replica_ranks(rank, buffer.held_along)


def is_read_once(read: str | None, copies: int) -> bool:
    """Whether one of so many ranks reads what all of them hold; by default where they are many."""
    return copies > 1 and (read == ONCE or (read is None and copies > MOST_EACH))


@dataclass(frozen=True)
class SharedPart:
    """The wants of a part that `ranks` hold alike; `number` is that of the part."""

    number: int
    ranks: Ints
    wants: tuple[Want, ...]

    def windows(self, target: Manifest) -> Iterator[tuple[Want, int, int]]:
        """Each want in windows, with their first and last elements: number n is read by rank n of
        `ranks`, which go round."""
        for want in self.wants:
            slot = want[0]
            buffer = target.buffers[slot.buffer]
            elems = buffer.of(slot.state).elems(slot.part)
            step = WINDOW_BYTES // ITEMSIZE[buffer.dtype_of(slot.state)]
            for low in range(0, elems, step):
                yield want, low, min(low + step, elems)

    def reader(self, number: int) -> int:
        return self.ranks[number % len(self.ranks)]


def shared_parts(parts: Sequence[Proved], read: str | None, rank: int) -> list[SharedPart]:
    """What of some parts is read once, the same on all ranks that share it, and in the same order:
    what is no expert's first. Rows of a vocabulary that keep the engine's values are read by each
    rank, with all of their buffer."""
    out: list[SharedPart] = []
    for one in parts:
        target, by_ranks = one.part.target, dict[tuple[bool, Ints], list[Want]]()
        kept = {fill.slot.place for fill in one.plan.fills if fill.is_kept}
        for want in one.part.wants:
            slot = want[0]
            ranks = holders(target.mesh, target, slot.buffer, rank)
            if is_read_once(read, len(ranks)) and slot.place not in kept:
                of_experts = bool(EXPERTS & {*target.buffers[slot.buffer].held_along})
                by_ranks.setdefault((of_experts, ranks), []).append(want)
        out += [
            SharedPart(one.number, ranks, tuple(wants))
            for (_, ranks), wants in sorted(by_ranks.items(), key=lambda item: item[0][0])
        ]
    return out


# ---- reading


def fill(
    source: SharedFiles,
    parts: Sequence[Proved],
    into: TensorOf,
    run: TransferRun,
    is_summed: OfOp,
    read: str | None,
) -> None:
    """As `SharedFiles.fill`, of what several ranks hold alike by one of them. Collective among
    these. After an error this rank goes on sending, so that nobody waits for ever, and raises it in
    the end."""
    shared = shared_parts(parts, read, agree.world()[0])
    slots = {slot for one in shared for slot, _ in one.wants}
    kept = agree.KeptBack()
    with kept:
        own = [one.only({want[0] for want in one.plan.wants} - slots) for one in parts]
        source.fill(own, into, run, is_summed)
    by_number = {one.number: one for one in parts}
    with _Groups() as groups:
        for one in shared:
            proved = by_number[one.number]
            held = source.manifest_of(one.number)
            planner = Windows(held, proved.part.target, proved.allow)
            _fill_shared(source, one, proved, planner, into, is_summed, groups, kept)
    kept.raise_kept()


def _fill_shared(
    source: SharedFiles,
    one: SharedPart,
    proved: Proved,
    planner: Windows,
    into: TensorOf,
    is_summed: OfOp,
    groups: "_Groups",
    kept: agree.KeptBack,
) -> None:
    """Fills what some ranks hold alike: each reads its windows, and broadcasts them."""
    rank, under_way = agree.world()[0], deque[list[Any]]()
    sent: list[Any] = []
    for number, ((slot, state), low, high) in enumerate(one.windows(proved.part.target)):
        memory = into(slot)[low:high]
        if one.reader(number) == rank:
            with kept:
                source.fill_window(planner.plan(slot, state, low, high), memory, is_summed)
        group = groups.of(one.ranks, memory.device)
        data = memory.view(torch.uint8)
        sent.append(dist.broadcast(data, one.reader(number), group, async_op=True))
        if len(sent) == len(one.ranks):
            under_way.append(sent)
            sent = []
        while len(under_way) > _UNDER_WAY:
            for work in under_way.popleft():
                work.wait()
    for works in (*under_way, sent):
        for work in works:
            work.wait()


class _Groups:
    """Process groups of the ranks that hold the same, made where they are asked for: those ranks
    alone take part in that."""

    def __init__(self) -> None:
        self._made: dict[tuple[Ints, str], Any] = {}

    def __enter__(self) -> "_Groups":
        return self

    def __exit__(self, *_: object) -> None:
        for group in self._made.values():
            if group is not dist.group.WORLD:
                dist.destroy_process_group(group)

    def of(self, ranks: Ints, device: torch.device) -> Any:
        """The group for memory of a device."""
        key = ranks, device.type
        if key not in self._made:
            self._made[key] = self._group(ranks, device)
        return self._made[key]

    def _group(self, ranks: Ints, device: torch.device) -> Any:
        # a world of NCCL alone sends nothing that lies on a CPU
        fits = device_of_messages() == "cpu" or device.type != "cpu"
        if fits and len(ranks) == dist.get_world_size():
            return dist.group.WORLD
        backend = None if fits else "gloo"
        return dist.new_group([*ranks], backend=backend, use_local_synchronization=True)
