"""The weights that a model computed with, which DeepSpeed saves beside the masters: half of their
bytes in bf16."""

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from megatron_ucp.core.flat import alone
from megatron_ucp.core.keepers import Keeper
from megatron_ucp.core.layout import Partial
from megatron_ucp.core.manifest import Manifest
from megatron_ucp.core.mesh import Coords
from megatron_ucp.core.plan import Slot
from megatron_ucp.core.states import VALUE
from megatron_ucp.formats.base import ByteFile, Where
from megatron_ucp.formats.deepspeed.file_checks import COMPARED, check_weights
from megatron_ucp.formats.deepspeed.file_manifest import shares
from megatron_ucp.formats.deepspeed.slot_places import SlotPlaces
from megatron_ucp.formats.deepspeed.tag_folder import TagFolder
from megatron_ucp.formats.pt.unpickler import TensorRef

# What is compared with the masters of each part of a parameter. One element of some parameters, as
# `check` compares them, says of which run all files are; but one file among many (of a layer, or of
# an expert) may be of a step before, from which few weights have changed: of an embedding the rows
# of the tokens that were seen. The first ones are the most frequent, and rows for padding and for
# tokens that were added, which programs write by hand, stand at the ends.
RUNS, RUN_ELEMS = 3, 512


@dataclass(frozen=True)
class TrainedWeights:
    """The parameters of a checkpoint as its model files hold them: `held` are the weights of each
    buffer of the manifest at each place along the axes that cut it, with the names of their
    files."""

    manifest: Manifest
    files: TagFolder
    held: Mapping[tuple[int, Coords], tuple[TensorRef, str]]

    def where(self, slot: Slot) -> Where:
        """Place of a slot of the manifest."""
        ref, name = self.held[slot.buffer, slot.cut]
        return self.files.place(name, ref)

    def opened(self, path: str) -> ByteFile:
        return self.files.opened(path)

    def check_read(self) -> None:
        self.files.check_read()


def trained_weights(step: SlotPlaces) -> TrainedWeights | None:
    """The weights in the files of a checkpoint; None where they have not all of them, where there
    are no masters beside them, and where several are averaged: the mean of masters is rounded once.
    Raises ForeignFileError for one that is not its master, rounded."""
    if step.contents.keeper not in COMPARED or _averaged(step.manifest):
        return None
    manifest = _manifest(step)
    held: dict[tuple[int, Coords], tuple[TensorRef, str]] = {}
    for number, buffer in enumerate(manifest.buffers):
        want = buffer.length, dict(buffer.states)[VALUE]
        for cut in manifest.cuts_of(buffer):
            ref, name = step.weight(buffer.members[0].param, cut)
            if not isinstance(ref, TensorRef) or not ref.is_contiguous:
                return None
            if (ref.numel, ref.storage.dtype) != want:
                return None
            held[number, cut] = ref, name
    for part, mp in step.names.optimizer:
        check_weights(step, step.rank_of_file(part, mp), sys.maxsize, RUNS, RUN_ELEMS)
    return TrainedWeights(manifest, step.files, held)


def _averaged(manifest: Manifest) -> bool:
    """Whether ranks have copies of a parameter that may differ."""
    return any(
        isinstance(spec.layout, Partial) and manifest.mesh.size(spec.layout.axis) > 1
        for spec in manifest.params
    )


def _manifest(step: SlotPlaces) -> Manifest:
    """Every parameter in a buffer of its own, in the dtype of training."""
    whole = step.manifest
    buffers = [buffer for buffer in whole.buffers if not buffer.stepped]
    for spec in whole.params:
        if spec.name not in whole.holders or not whole.first_holder(spec.name)[0].stepped:
            continue
        local = spec.layout.local_shape(spec.name, spec.shape, step.mesh.shares())
        axes, states = step.spread.axes(spec.name), ((VALUE, spec.dtype),)
        own = alone(spec.name, math.prod(local), states, axes=axes)
        buffers += shares(step, spec, own)
    return Manifest(Keeper.WEIGHTS, whole.mesh, whole.params, tuple(buffers), ties=whole.ties)
