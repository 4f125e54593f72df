"""Where each slot of a manifest lies in DeepSpeed's own files."""

from dataclasses import dataclass, field
from typing import Any

from megatron_ucp.core.flat import FlatBuffer
from megatron_ucp.core.manifest import Manifest
from megatron_ucp.core.mesh import EXPERTS
from megatron_ucp.core.plan import Slot
from megatron_ucp.core.states import MASTER, VALUE
from megatron_ucp.errors import ForeignFileError
from megatron_ucp.formats.base import Where
from megatron_ucp.formats.deepspeed.native_steps import Optimizers
from megatron_ucp.formats.deepspeed.paths import tp_of
from megatron_ucp.formats.deepspeed.stage_0_files import PlainFile, Unpartitioned, own_slice
from megatron_ucp.formats.foreign import of_kind
from megatron_ucp.formats.pt.unpickler import TensorRef


@dataclass(frozen=True)
class SlotPlaces(Optimizers):
    """All that is known of the files: their `manifest`, and the place of each of its slots."""

    manifest: Manifest
    _used: dict[tuple[int, int, bool], int] = field(default_factory=dict[Any, Any], init=False)

    def where(self, slot: Slot) -> Where:
        """Place of a slot. Raises DamagedFileError or ForeignFileError where the file disagrees
        with the structure."""
        buffer = self.manifest.buffers[slot.buffer]
        ref, name = self._ref(slot, buffer)
        param = buffer.members[0].param if buffer.members else None
        order = self.manifest.by_name[param].order if param else None
        if not isinstance(ref, TensorRef):
            raise ForeignFileError(
                f"a file lacks the state {slot.state} that the first file has",
                file=self.files.full_path(name),
                parameter=param,
                expected=f"{buffer.partition_elems} elements",
                found=type(ref).__name__,
            )
        used = self._used_elems(slot)
        dtype, most = dict(buffer.states)[slot.state], buffer.of(slot.state).elems(slot.part)
        fits = used <= ref.numel <= most
        if not ref.lies_in(order) or ref.storage.dtype != dtype or not fits:
            raise ForeignFileError(
                f"the state {slot.state} has another size or type than the run's structure says",
                file=self.files.full_path(name),
                parameter=param,
                expected=f"{used} to {most} contiguous elements of {dtype}",
                found=f"{ref.shape} of {ref.storage.dtype}",
            )
        return self.files.place(name, ref)

    def _used_elems(self, slot: Slot) -> int:
        """Elements of a slot up to the end of its last parameter. Kept: every place of a checkpoint
        asks for it."""
        buffer = self.manifest.buffers[slot.buffer]
        key = slot.buffer, slot.part, slot.state in buffer.uncut
        if key not in self._used:
            fragments = buffer.of(slot.state).fragments(slot.part)
            self._used[key] = max((f.offset + f.high - f.low for f in fragments), default=0)
        return self._used[key]

    def _ref(self, slot: Slot, buffer: FlatBuffer) -> tuple[Any, str]:
        """The tensor of a slot as its file has it, and the name of the file."""
        param = buffer.members[0].param if buffer.members else ""
        if slot.state == VALUE and buffer.rule == "each":
            tp = tp_of(slot.cut)
            return self.fragment(param, slot.part, tp), self.model_of(tp, slot.part)
        rank = self.mesh.rank_of((*buffer.at, *slot.cut), slot.part)
        reader = self.readers[self.place_of_rank(rank)]
        plain = isinstance(reader, PlainFile) and not self.names.optimizer
        if slot.state == VALUE or (slot.state == MASTER and plain):
            return self.weight(param, slot.cut)
        tree, file = self.optimizer_of_rank(rank, not EXPERTS.isdisjoint(buffer.axes))
        index, path = self.contents.indices[slot.buffer], self.files.full_path(file)
        ref = reader.element(of_kind(tree, dict, "the optimizer", path), index, slot.state, path)
        if isinstance(reader, Unpartitioned):
            ref = own_slice(ref, self.manifest.by_name[param].shape, param)
        return ref, file
