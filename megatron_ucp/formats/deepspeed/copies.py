"""The weights that a model computed with, which DeepSpeed saves beside the masters: half of their
bytes in bf16."""

import math
import sys
from typing import TYPE_CHECKING

from megatron_ucp.core.flat import FlatBuffer, alone
from megatron_ucp.core.layout import Partial
from megatron_ucp.core.manifest import Manifest, ParamSpec
from megatron_ucp.core.mesh import Coords
from megatron_ucp.core.plan import Slot
from megatron_ucp.core.shares import WEIGHTS
from megatron_ucp.core.states import VALUE
from megatron_ucp.formats.base import ByteFile, Where
from megatron_ucp.formats.deepspeed.derived import Derived
from megatron_ucp.formats.deepspeed.whole import COMPARED, check_weights
from megatron_ucp.formats.pt.unpickler import ITEMSIZE, TensorRef

if TYPE_CHECKING:
    from megatron_ucp.formats.deepspeed.native import NativeCheckpoint

# Elements of each part of a parameter that are compared with its masters. One element of some
# parameters, as `check` compares them, says of which run all files are; but one file among many (of
# a layer, or of an expert) may be of a step before, from which few weights have changed.
RUN_ELEMS = 1024


class Copies:
    """The parameters of a checkpoint as its model files hold them. See `Checkpoint.copies`."""

    def __init__(self, of: "NativeCheckpoint") -> None:
        self._of = of
        manifest, derived = of.manifest, Derived(of)
        buffers = [buffer for buffer in manifest.buffers if not buffer.stepped]
        for spec in manifest.params:
            if spec.name in manifest.holders and manifest.first_holder(spec.name)[0].stepped:
                buffers += derived.shares(spec, self._buffer(spec))
        self.manifest = Manifest(
            WEIGHTS, manifest.mesh, manifest.params, tuple(buffers), ties=manifest.ties
        )

    def _buffer(self, spec: ParamSpec) -> FlatBuffer:
        local = spec.layout.local_shape(spec.name, spec.shape, self._of.mesh.shares())
        axes = self._of.spread.axes(spec.name)
        return alone(spec.name, math.prod(local), ((VALUE, spec.dtype),), axes=axes)

    @property
    def are_whole(self) -> bool:
        """Whether every weight is there, in the dtype of training."""
        return all(
            self._ref(buffer, cut) is not None
            for buffer in self.manifest.buffers
            for cut in self.manifest.cuts_of(buffer)
        )

    @property
    def are_averaged(self) -> bool:
        """Whether there are several copies of a weight: their mean is that of the masters, rounded
        once."""
        return any(
            isinstance(spec.layout, Partial) and self.manifest.mesh.size(spec.layout.axis) > 1
            for spec in self.manifest.params
        )

    def _ref(self, buffer: FlatBuffer, cut: Coords) -> tuple[TensorRef, str] | None:
        ref, name = self._of.weight(buffer.members[0].param, cut)
        want = buffer.length, dict(buffer.states)[VALUE]
        if not isinstance(ref, TensorRef) or not ref.is_contiguous:
            return None
        return (ref, name) if (ref.numel, ref.storage.dtype) == want else None

    def where(self, slot: Slot) -> Where:
        """Place of a slot of the manifest."""
        found = self._ref(self.manifest.buffers[slot.buffer], slot.cut)
        if found is None:
            raise KeyError(slot)  # see `are_whole`
        ref, name = found
        file, dtype = self._of.file(name), ref.storage.dtype
        start = ref.offset_elems * ITEMSIZE[dtype]
        return Where(file, file.record(ref.storage), start, ref.numel, dtype)

    def opened(self, path: str) -> ByteFile:
        return self._of.opened(path)

    def check_read(self) -> None:
        self._of.check_read()


def copies_of(checkpoint: "NativeCheckpoint") -> Copies | None:
    """The copies in the files of a checkpoint; None where they have not all of them, where there
    are no masters beside them, and where several are averaged. Raises ForeignFileError for one that
    is not its master, rounded."""
    if checkpoint.contents.engine not in COMPARED:
        return None
    found = Copies(checkpoint)
    if found.are_averaged or not found.are_whole:
        return None
    for part, mp in checkpoint.names.optimizer:
        rank = checkpoint.rank_of_file(part, mp)
        check_weights(checkpoint, rank, most=sys.maxsize, run_elems=RUN_ELEMS)
    return found
