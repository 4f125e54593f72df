"""DeepSpeed's native checkpoints: which record of which file holds which slot.

The structure is rebuilt from what the files themselves say. A manifest beside them is evidence: it
adds layouts and the order of parameters that stage 0 does not store, and every file is compared
with it.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

from megatron_ucp.core.flat import FlatBuffer
from megatron_ucp.core.join_ranks import check_replicas
from megatron_ucp.core.layers import Layers
from megatron_ucp.core.manifest import FILE_NAME, Manifest
from megatron_ucp.core.mesh import EXPERTS
from megatron_ucp.core.names import MASTER, VALUE
from megatron_ucp.core.plan import Slot
from megatron_ucp.errors import ForeignFileError, UnsupportedError
from megatron_ucp.formats import expect
from megatron_ucp.formats.byte_files import Where
from megatron_ucp.formats.checkpoint import CallerModel, Checkpoint, Extras
from megatron_ucp.formats.deepspeed.checks import (
    TrainedWeights,
    check_file,
    trained_weights,
    will_check_files,
)
from megatron_ucp.formats.deepspeed.expected_files import (
    require_expert_files,
    require_layer_files,
    require_rank_files,
)
from megatron_ucp.formats.deepspeed.extras import extras_of, layers_of, notes_of_keys
from megatron_ucp.formats.deepspeed.files import is_universal, tp_of
from megatron_ucp.formats.deepspeed.layout_sources import compared
from megatron_ucp.formats.deepspeed.lost_states import refuse_unusable, said_of
from megatron_ucp.formats.deepspeed.manifest import compare, manifest_of
from megatron_ucp.formats.deepspeed.optimizers import PlainFile, Unpartitioned, own_slice
from megatron_ucp.formats.deepspeed.per_rank import differs_in, held_by
from megatron_ucp.formats.deepspeed.run import NativeRun
from megatron_ucp.formats.deepspeed.weights import PipeNames, said_of_side_data
from megatron_ucp.formats.folder import Folder
from megatron_ucp.formats.per_rank import PER_RANK, OwnValues, PerRank
from megatron_ucp.formats.pt.refs import TensorRef

_WEIGHTS_ALONE = "the weights alone were looked at, as allowed: master weights begin as these"
_BY_POSITION = (
    "optimizer states were matched by position, in the order of Megatron-DeepSpeed's model: files "
    "of stage 0 without a manifest name no parameters of theirs"
)


class NativeCheckpoint(NativeRun):
    """One opened tag folder. Rules that contradict a manifest are an error.

    Raises a UcpError for anything that its directories and pickles can show: a missing, truncated,
    foreign or hostile file. Tensor bytes are not read.
    """

    def __init__(
        self,
        folder: Folder,
        told: CallerModel | None = None,
    ) -> None:
        super().__init__(folder, told or CallerModel())
        self._used: dict[tuple[int, int, bool], int] = {}  # see `_used_elems`
        with self.closed_on_failure():
            if is_universal(folder):
                raise UnsupportedError(
                    "this is a universal folder, not a native one",
                    file=folder,
                    fix="open_checkpoint reads it",
                )
            require_rank_files(self)
            require_expert_files(self)
            require_layer_files(self)
            self.require_described()
            self.manifest = self._with_evidence(manifest_of(self))
            self.layouts.check_patterns()

    def _with_evidence(self, derived: Manifest) -> Manifest:
        """The recorded manifest, once it is known not to contradict the files; else what the files
        say. Raises ForeignFileError, RuleError, ModelMismatchError."""
        recorded, file = self.recorded, self.folder / FILE_NAME
        check_replicas(derived, PipeNames(self.pipe_names).tied, str(self.folder))
        if recorded is None:
            return derived
        compare(recorded, derived, file)
        recorded = replace(recorded, run={**derived.run, **recorded.run})
        if self.told.rules is not None:
            recorded = compared(recorded, self.told.rules, file)
        # An elastic file holds no hyper-parameters: there the manifest is the only evidence.
        if not any(group.settings for group in derived.groups):
            return recorded
        groups = tuple(
            replace(group, optimizer=known.optimizer, steps_as=known.steps_as)
            for group, known in zip(derived.groups, recorded.groups, strict=True)
        )
        return replace(recorded, groups=groups)

    # ------------------------------------------------ what the operations ask for

    @property
    def notes(self) -> list[str]:
        return [
            *self.path_notes,
            *([_WEIGHTS_ALONE] if self.told.weights else []),
            *self.layouts.notes,
            *([_BY_POSITION] if self.lies_by_position else []),
            *said_of(self.manifest),
            *said_of_side_data(self.weights.side_data()),
            *notes_of_keys(self.meta),
        ]

    def read_extras(self) -> Extras:
        return extras_of(self)

    def layers(self) -> Layers | None:
        return layers_of(self) if self.pipeline else None

    def copies(self) -> TrainedWeights | None:
        return trained_weights(self)

    def check(self, name: str, allow: Collection[str] = ()) -> None:
        # before any comparison of this rank's files: the cause, not what follows from it
        refuse_unusable(self.manifest, self.main_file, allow)
        check_file(self, name, allow)

    def check_headers(self, names: Sequence[str]) -> None:
        for name in names:
            check_file(self, name, ("stale",))

    def will_check(self, names: Collection[str], allow: Collection[str]) -> None:
        will_check_files(self, names, allow)

    @property
    def _ranks_have_files(self) -> bool:
        """Whether model files alone show what differs from rank to rank: at ZeRO-3 all have one,
        else each model-parallel rank."""
        is_listed = self.recorded is not None and PER_RANK in self.recorded.run
        return (self.manifest.mesh.zero == 3 or self.model_ranks > 1) and not is_listed

    def differs(self, name: str) -> PerRank:
        return differs_in(self, name) if self._ranks_have_files else super().differs(name)

    def of_rank(self, rank: int) -> OwnValues:
        return held_by(self, rank) if self._ranks_have_files else super().of_rank(rank)

    # ------------------------------------------------ where slots lie

    def will_place(self, slots: Iterable[Slot]) -> None:
        for slot in slots:
            ref, name = self._ref(slot, self.manifest.buffers[slot.buffer])
            if isinstance(ref, TensorRef):
                self.file(name).will_locate(ref.storage)
        self.begin_reading()

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
                file=self.full_path(name),
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
                file=self.full_path(name),
                parameter=param,
                expected=f"{used} to {most} contiguous elements of {dtype}",
                found=f"{ref.shape} of {ref.storage.dtype}",
            )
        return self.place(name, ref)

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
        param = buffer.first_param
        if slot.state == VALUE and buffer.rule == "each":
            tp = tp_of(slot.cut)
            return self.fragment(param, slot.part, tp), self.model_of(tp, slot.part)
        rank = self.mesh.rank_of((*buffer.at, *slot.cut), slot.part)
        reader = self.stages[self.place_of_rank(rank)].format
        plain = isinstance(reader, PlainFile) and not self.names.optimizer
        if slot.state == VALUE or (slot.state == MASTER and plain):
            return self.weight(param, slot.cut)
        tree, name = self.optimizer_of_rank(rank, not EXPERTS.isdisjoint(buffer.axes))
        index, file = self.contents.indices[slot.buffer], self.full_path(name)
        tree = expect.kind(tree, dict, "the optimizer", file)
        ref = reader.element(tree, index, slot.state, file)
        if isinstance(reader, Unpartitioned):
            ref = own_slice(ref, self.manifest.by_name[param].shape, param)
        return ref, name


class NativeFormat:
    """DeepSpeed's own files: what no other format recognises."""

    def recognises(self, folder: Folder) -> bool:
        return True

    def open(self, folder: Folder, told: CallerModel) -> Checkpoint:
        return NativeCheckpoint(folder, told)
