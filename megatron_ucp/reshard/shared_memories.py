"""The memories of all ranks as a source of memory that is filled in place: each rank takes what it
needs, straight to where it belongs."""

from collections.abc import Iterable, Iterator, Sequence

import torch

from megatron_ucp.core.manifest import BufferPart
from megatron_ucp.core.plan import Plan, Slot
from megatron_ucp.formats.pt.values import ITEMSIZE
from megatron_ucp.reshard import agree
from megatron_ucp.reshard.engine import Engine, Holder, Lender
from megatron_ucp.reshard.execute import OfOp, TensorOf
from megatron_ucp.reshard.memories import MESSAGE_BYTES, Memories, Window
from megatron_ucp.reshard.overflows import Lost
from megatron_ucp.reshard.transfer import Proved, Rounding, TransferRun

# What moving takes beside the memory that is filled, on any rank: what it gives to all others in a
# round, and what it takes.
EXTRA_BYTES = 256 * 2**20
_COPIES = 4  # of the window that a rank takes: its messages, one of them in order, the window
_LEAST_BYTES = 64 * 2**10  # of a window, whatever the number of ranks


class SharedMemories(Memories):
    """Each rank fills the parts that it has of a sink. Making one is collective. `lender`: the
    holder, where its memory goes as it is used up."""

    def __init__(self, file: str, holder: Holder, lender: Lender | None = None) -> None:
        super().__init__(file, holder, lender=lender)
        self._lost: Lost = {}
        self.sums, self.read_by_all = (0, 0, 0), 0

    def fill(
        self, parts: Sequence[Proved], into: TensorOf, run: TransferRun, is_summed: OfOp
    ) -> None:
        """Fills what this rank has of some parts. Collective."""
        rounding, queue = Rounding(self, parts), [*self._queue(parts)]
        run.total = sum(_bytes_of(one, parts) for one in queue)
        known: dict[Slot, torch.Tensor] = {}

        def place(window: Window) -> torch.Tensor:
            # asked for while it moves: what fails there is kept back, and nobody waits for ever
            if window.slot not in known:
                known[window.slot] = into(window.slot)
            return known[window.slot][window.low : window.low + window.elems]

        def room(window: Window, size_bytes: int) -> torch.Tensor | None:
            memory = place(window)
            return memory.view(torch.uint8) if memory.nbytes == size_bytes else None

        def put(window: Window, exact: torch.Tensor) -> None:
            memory = place(window)
            found = rounding.rounded(window.part, window.slot, window.low, exact)
            if found.data_ptr() != memory.data_ptr():
                memory.copy_(found)
            run.count(memory.nbytes)

        self.move(queue, put, room)
        self._lost = rounding.overflows.found

    def check_records(self, slots: Iterable[Slot]) -> None:
        """Memory has none."""

    def lost(self, engine: Engine, plan: Plan) -> Lost:
        """What was found while it moved."""
        return self._lost

    def check(self, thorough: bool) -> None:
        """Memory has no checksums. Counts what all ranks took. Collective."""
        self.sums = self.read_bytes, 0, 0
        self.read_by_all = sum(agree.gather(self.read_bytes))

    def _queue(self, parts: Sequence[Proved]) -> Iterator[Window]:
        """What this rank takes, window by window; those of states that are cut alike follow each
        other."""
        for one in parts:
            places: dict[tuple[BufferPart, int, int], list[Slot]] = {}
            for slot, _ in one.part.wants:
                buffer = one.part.target.buffers[slot.buffer]
                elems = buffer.of(slot.state).elems(slot.part)
                step = window_bytes(self.world) // ITEMSIZE[buffer.dtype_of(slot.state)]
                places.setdefault((slot.place, elems, step), []).append(slot)
            for (_, elems, step), slots in places.items():
                for low in range(0, elems, step):
                    for slot in slots:
                        yield Window(one.number, slot, low, min(step, elems - low))


def _bytes_of(window: Window, parts: Sequence[Proved]) -> int:
    buffer = parts[window.part].part.target.buffers[window.slot.buffer]
    return window.elems * ITEMSIZE[buffer.dtype_of(window.slot.state)]


def window_bytes(world: int) -> int:
    """How large the windows may be that so many ranks take at once."""
    return max(_LEAST_BYTES, min(MESSAGE_BYTES, EXTRA_BYTES // (world + _COPIES)))
