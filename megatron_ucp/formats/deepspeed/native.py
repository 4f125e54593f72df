"""DeepSpeed's native checkpoints: which record of which file holds which slot.

The structure is rebuilt from what the files themselves say. A manifest beside them is evidence: it
adds layouts and the order of parameters that stage 0 does not store, and every file is compared
with it.
"""

from collections.abc import Collection, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from megatron_ucp.core.experts import (
    LocalExperts,
    Spread,
    counts_of,
    etp_of,
    file_rank,
    for_experts,
)
from megatron_ucp.core.flat import FlatBuffer
from megatron_ucp.core.keepers import Keeper
from megatron_ucp.core.layers import Layers
from megatron_ucp.core.manifest import FILE_NAME, RENAMED, Manifest, Order
from megatron_ucp.core.mesh import EXPERTS, Coords, stage_of
from megatron_ucp.core.plan import Slot
from megatron_ucp.core.stages import Stage, check_replicas, join
from megatron_ucp.core.states import MASTER, VALUE
from megatron_ucp.errors import DamagedFileError, ForeignFileError, NotFoundError, UnsupportedError
from megatron_ucp.formats.base import Checkpoint, Extras, Told, Where
from megatron_ucp.formats.deepspeed.autotp import is_uneven
from megatron_ucp.formats.deepspeed.copies import Copies, copies_of
from megatron_ucp.formats.deepspeed.counts import count_ranks, is_pipeline
from megatron_ucp.formats.deepspeed.declared import LayoutSource, compared, pipe_names
from megatron_ucp.formats.deepspeed.derived import Derived
from megatron_ucp.formats.deepspeed.doctor import refuse_mics, refuse_unusable, said_of
from megatron_ucp.formats.deepspeed.evidence import compare, group_order
from megatron_ucp.formats.deepspeed.expert_files import ExpertFiles, WithExperts
from megatron_ucp.formats.deepspeed.extras import extras_of, layers_of
from megatron_ucp.formats.deepspeed.flattened import flattened
from megatron_ucp.formats.deepspeed.folder import WRONG_STRUCTURE, TagFolder
from megatron_ucp.formats.deepspeed.muon import check_momentum
from megatron_ucp.formats.deepspeed.optimizer_files import Contents, OptimizerFile
from megatron_ucp.formats.deepspeed.optimizer_formats import element_of, reader_for
from megatron_ucp.formats.deepspeed.own_values import differs_in, held_by
from megatron_ucp.formats.deepspeed.paths import (
    expert_optimizer_name,
    is_universal,
    tp_of,
    without_sequence_ranks,
)
from megatron_ucp.formats.deepspeed.pipe_names import PipeNames
from megatron_ucp.formats.deepspeed.positions import MATCHED, by_position
from megatron_ucp.formats.deepspeed.stage_0_files import PlainFile, Unpartitioned, own_slice
from megatron_ucp.formats.deepspeed.stage_order import orders_of, wrong_structure
from megatron_ucp.formats.deepspeed.weights import LayerFiles, StageModels, Weights, WholeModel
from megatron_ucp.formats.deepspeed.whole import check_file
from megatron_ucp.formats.loss_scale import LossScale
from megatron_ucp.formats.of_ranks import PER_RANK, OwnValues, PerRank
from megatron_ucp.formats.pt.unpickler import ITEMSIZE, TensorRef
from megatron_ucp.formats.tags import tag_folder


class NativeCheckpoint(TagFolder):
    """One opened tag folder. `told` is what the caller knows and files may not say: the order of
    the parameters in files of stage 0 without a manifest (with `positions_too` such a file is read
    without its optimizer), whole shapes, layouts, names of a pipeline. Rules that contradict a
    manifest are an error.

    Raises a UcpError for anything that its directories and pickles can show: a missing, truncated,
    foreign or hostile file. Tensor bytes are not read.
    """

    def __init__(
        self,
        path: str | Path,
        tag: str | None = None,
        told: Told | None = None,
        positions_too: bool = False,
    ) -> None:
        self.told = told or Told()
        super().__init__(tag_folder(path, tag), self.told.classes)
        if is_universal(self.folder):
            raise UnsupportedError(
                "this is a universal folder, not a native one",
                file=self.folder,
                fix="open_checkpoint reads it",
            )
        self._specs, self._rules = self.told.specs, self.told.rules
        self.pipe_names = self.told.names or {}
        self._used: dict[tuple[int, int, bool], int] = {}
        with ExitStack() as undo:
            undo.callback(self.close)
            try:
                self._read(positions_too)
            except WRONG_STRUCTURE as error:
                raise DamagedFileError(
                    "the checkpoint has another structure than its keys promise",
                    file=self.folder,
                    found=f"{type(error).__name__}: {str(error)[:200]}",
                ) from error
            undo.pop_all()

    # ------------------------------------------------ structure

    def _read(self, positions_too: bool) -> None:
        recorded = self.recorded
        self._read_model_file()
        self.pipeline = is_pipeline(self.names, self.meta)
        self.experts = ExpertFiles(self)
        self.counts = count_ranks(self, self.model_name, self.pipeline, self.experts)
        self.mesh = self.counts.mesh
        self.spread = Spread.on(self.mesh, self.counts.partitions)
        self.uneven = self._has_own_buffers()
        self.places = self.mesh.holding(self.uneven)
        if recorded is not None:
            self._specs, self.pipe_names = recorded.by_name, recorded.names
        elif not self.pipeline:
            self.pipe_names = {}  # who knows them need not know what kind of run it was
        elif not self.pipe_names and self._rules is not None and self._rules.pipeline:
            self.pipe_names = pipe_names(self, self.first_of_stages, self._rules)
        self.weights: Weights = self._weights()
        self.declared = self._layout_source()
        self.readers: list[OptimizerFile] = []
        self.stages = self._stages(positions_too)
        self.contents = self._joined()
        self.manifest: Manifest = self._with_evidence(Derived(self).manifest(), recorded)

    def _read_model_file(self) -> None:
        """The first one, which says what kind of run wrote the others."""
        self.model_name = self.names.model.get((None, 0)) or self.names.model.get((0, 0)) or ""
        self.main_file = self.full_path(self.model_name)
        self.meta: Mapping[str, Any] = self.tree(self.model_name)
        if self.meta.get("mp_world_size") == 1:
            self.names = without_sequence_ranks(self.names)
        refuse_mics(self.meta.get("ds_config"), self.main_file)

    def _has_own_buffers(self) -> bool:
        """Whether each tensor-parallel rank has buffers of its own: AutoTP gives some ranks larger
        shares."""
        if self.recorded is not None:
            return any(buffer.share for buffer in self.recorded.buffers)
        info: Any = self.meta.get("universal_checkpoint_info")
        return self.counts.tp > 1 and not self.pipeline and is_uneven(info)

    def _joined(self) -> Contents:
        """The optimizers of all places as one."""
        joined = join(
            [
                Stage((), found.buffers, found.groups, at=at)
                for at, found in zip(self.places, self.stages, strict=True)
            ]
        )
        indices = {
            number: index
            for numbers, found in zip(joined.numbers, self.stages, strict=True)
            for number, index in zip(numbers, found.indices, strict=True)
        }
        return replace(
            self.stages[0],
            buffers=joined.buffers,
            groups=joined.groups,
            indices=tuple(indices[number] for number in range(len(joined.buffers))),
        )

    def _layout_source(self) -> LayoutSource:
        """Raises UnsupportedError where nothing says how tensor-parallel parameters are cut."""
        patterns: Any = self.meta.get("universal_checkpoint_info")
        found = LayoutSource(
            self.counts.mesh,
            self.main_file,
            self._specs,
            self._rules,
            patterns if isinstance(patterns, dict) else None,
            {name: pipe for pipe, name in self.pipe_names.items()},
        )
        if self.counts.tp > 1 and found.silent:
            raise UnsupportedError(
                "a tensor-parallel checkpoint without a manifest needs a family or rules",
                file=self.folder / self.model_name,
                found=f"mp_world_size {self.counts.tp}",
                fix="give --rules (Python: rules=) a file that `megatron-ucp rules` drafts; or "
                "load it into an engine that was attached with a family",
                id="layout-unknown",
            )
        return found

    def _with_evidence(self, derived: Manifest, recorded: Manifest | None) -> Manifest:
        """The recorded manifest, once it is known not to contradict the files; else what the files
        say. Raises ForeignFileError, RuleError, ModelMismatchError."""
        check_replicas(derived, PipeNames(self.pipe_names).tied, str(self.folder))
        if recorded is None:
            return derived
        compare(recorded, derived, self.folder / FILE_NAME)
        if self._rules is not None:
            recorded = compared(recorded, self._rules, str(self.folder / FILE_NAME))
        # An elastic file holds no hyper-parameters: there the manifest is the only evidence.
        if not any(group.settings for group in derived.groups):
            return recorded
        groups = tuple(
            replace(found, optimizer=said.optimizer, steps_as=said.steps_as)
            for found, said in zip(derived.groups, recorded.groups, strict=True)
        )
        return replace(recorded, groups=groups)

    def _weights(self) -> Weights:
        beside = self._weights_of_all()
        if not self.names.experts:
            return beside
        return WithExperts(beside, self.experts, self.mesh, beside.name_of)

    def _weights_of_all(self) -> Weights:
        """Without the experts that lie in files of their own."""
        tp = self.counts.tp
        if not self.pipeline:
            files = {rank: self.model_of(rank) for rank in range(tp)}
            return WholeModel(self, files, self._renamed())
        if not self.pipe_names:
            raise UnsupportedError(
                "a pipeline checkpoint without a manifest needs a family or rules",
                file=self.folder / self.model_name,
                found=f"{self.counts.stages} stages",
                fix="give --rules (Python: rules=) a draft of `megatron-ucp rules`, with "
                "[[pipeline]] entries; or load it into an engine that was attached with a family",
                id="layout-unknown",
            )
        names, mesh = PipeNames(self.pipe_names), self.mesh
        if self.names.layers or self.meta.get("module") is None:
            return LayerFiles(self, names, tp)
        places = [(stage, rank) for stage in range(mesh.pp) for rank in range(tp)]
        return StageModels(self, names, {(s, t): self.model_of(s * tp + t) for s, t in places})

    def _renamed(self) -> Mapping[str, str]:
        """Names of entries of the weights -> those of the model, as the run said, or the caller."""
        said: Any = self.told.renamed if self.recorded is None else self.recorded.run.get(RENAMED)
        return said if isinstance(said, dict) else {}

    def _stages(self, positions_too: bool) -> list[Contents]:
        """The optimizer of every place (see `Mesh.holding`), as the files of its first rank say.
        Each numbers from 0."""
        recorded, out = self.recorded, list[Contents]()
        orders = orders_of(self, self._own_order(self.told.order))
        for at in self.places:
            rank = self.mesh.rank_of(at, 0)
            if recorded is not None:
                wanted = group_order(recorded, at)
            else:
                wanted = self._renumbered(orders[stage_of(at)], rank)
            tree, name = self._optimizer_of_rank(rank)
            file = self.full_path(name)
            unnamed = not self.names.optimizer and wanted is None and positions_too
            if tree is None or unnamed:
                self.readers.append(PlainFile(self._weight_dtype))
                out.append(Contents(Keeper.NOBODY, (), (), LossScale(), ()))
            else:
                config = self.meta.get("ds_config")
                self.readers.append(reader_for(tree, file, self._weight_dtype, config))
                out.append(self.read_contents(tree, file, wanted, rank))
            if out[0].keeper != out[-1].keeper:
                raise ForeignFileError(
                    "the stages of the pipeline have different kinds of optimizers",
                    file=file,
                    expected=out[0].keeper,
                    found=out[-1].keeper,
                )
        return out

    def _own_order(self, order: Order | None) -> Order | None:
        """The order that an engine told, for a rank of this run, which may have other numbers of
        experts."""
        if order is None or self.recorded is not None or not self.names.experts:
            return order
        own = LocalExperts.among(self.expert_counts, self.mesh.ep, 0)
        return for_experts(order, own.counts, str(self.folder))

    def _renumbered(self, order: Order | None, rank: int) -> Order | None:
        """The order at the first expert-parallel rank, for a rank with other experts."""
        ep, _ = self.mesh.expert_place(rank)
        if order is None or not ep:
            return order
        local = LocalExperts.among(self.expert_counts, self.mesh.ep, ep)
        return [[local.whole_name(name) for name in names] for names in order]

    @property
    def first_of_stages(self) -> list[str]:
        """The model file of each stage's first tensor-parallel rank."""
        return [self.model_of(stage * self.counts.tp) for stage in range(self.counts.stages)]

    def file_place(self, rank: int) -> tuple[int, int]:
        """(partition, model-parallel rank) in the names of a rank's files."""
        at = self.mesh.coord(rank)
        return self.mesh.partition_of(rank), at.pp * self.mesh.tp + at.tp

    def rank_of_file(self, part: int, mp: int) -> int:
        """The rank whose files have a partition and a model-parallel rank in their names."""
        return self.mesh.sharers_at(*divmod(mp, self.mesh.tp))[part]

    def _optimizer_of_rank(self, rank: int, of_experts: bool = True) -> tuple[Any, str]:
        """The optimizer's state dict of a rank, and its file; at stage 0 of one like it."""
        part, mp = self.file_place(rank)
        if self.names.optimizer:
            return self.optimizer_tree(part, mp), self.names.optimizer[part, mp]
        name = self.model_of(mp)
        tree = self.tree(name).get("optimizer")
        if not self.names.expert_optimizer or (tree is not None and not of_experts):
            return tree, name
        name = self._expert_optimizer(rank)
        return self.tree(name).get("optimizer"), name

    def _expert_optimizer(self, rank: int) -> str:
        """The file of stage 0 with the states of a rank's experts. Raises NotFoundError."""
        ep, etp = self.mesh.expert_place(rank)
        place = ep, file_rank(self.mesh, self.mesh.coord(rank).pp, ep, etp)
        if place not in self.names.expert_optimizer:
            raise NotFoundError(
                "the optimizer file of an expert-parallel rank is missing",
                file=self.folder / expert_optimizer_name(*place),
                expected=f"expert-parallel rank {place[0]}, model-parallel rank {place[1]}",
                found="no such file",
            )
        return self.names.expert_optimizer[place]

    def optimizer_of(self, mp: int) -> tuple[Any, str]:
        """The optimizer's state dict of the first rank of a model-parallel one, and its file."""
        tree, name = self._optimizer_of_rank(self.rank_of_file(0, mp))
        return tree, self.full_path(name)

    def optimizer_tree(self, part: int, mp: int = 0) -> Any:
        """The optimizer state dict of one partition's file."""
        name = self.names.optimizer[part, mp]
        tree = self.tree(name).get("optimizer_state_dict")
        if not isinstance(tree, dict):
            raise DamagedFileError(
                "an optimizer file holds no optimizer",
                file=self.full_path(name),
                expected="optimizer_state_dict",
                found=type(tree).__name__,
            )
        return cast("Any", tree)

    def place_of_rank(self, rank: int) -> int:
        """The number of a rank's place among `places`."""
        return self.places.index(self.mesh.at(rank, [axis for axis, _ in self.places[0]]))

    def read_contents(self, tree: Any, file: str, order: Order | None, rank: int = 0) -> Contents:
        """One optimizer file of a rank, with canonical names."""
        reader = self.readers[self.place_of_rank(rank)]
        try:
            named = flattened(self, tree, file, order, rank)
            found = reader.contents(
                tree, named, self.spread, file, lambda ref: self.tensor(file, ref)
            )
            check_momentum(found.groups, found.buffers, file)
            return found
        except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
            raise wrong_structure(error, file) from error

    def format_of(self, stage: int) -> OptimizerFile:
        """How the files of a stage keep its optimizer."""
        return self.readers[[stage_of(at) for at in self.places].index(stage)]

    def _weight_dtype(self, name: str) -> str:
        return self.weights.module()[name].storage.dtype

    def model_of(self, mp: int, part: int = 0) -> str:
        """Name of the model file of a model-parallel rank (at ZeRO-3 of one partition)."""
        found = self.names.model.get((None, mp)) or self.names.model.get((part, mp))
        if found is None:
            raise NotFoundError(
                "a model file is missing",
                file=self.folder,
                found="no file",
                expected=f"partition {part}, model-parallel rank {mp}",
            )
        return found

    @cached_property
    def expert_counts(self) -> dict[str, int]:
        """Experts of each layer, by the canonical name of its list."""
        return {**self.experts.autoep.experts, **counts_of(self.weights.module())}

    def fragment(self, name: str, part: int, tp: int = 0) -> Any:
        """One partition of a frozen parameter, as ZeRO-3 keeps it."""
        held = self.tree(self.model_of(tp, part)).get("frozen_param_fragments") or {}
        return held.get(name)

    # ------------------------------------------------ what the operations ask for

    @property
    def notes(self) -> list[str]:
        positions = [MATCHED] if by_position(self) else []
        return [*self.led_here, *self.declared.notes, *positions, *said_of(self.manifest)]

    def read_extras(self) -> Extras:
        return extras_of(self)

    def layers(self) -> Layers | None:
        return layers_of(self) if self.pipeline else None

    def copies(self) -> Copies | None:
        return copies_of(self)

    def check(self, name: str, allow: Collection[str] = (), optimizer: bool = True) -> None:
        # before any comparison of this rank's files: the cause, not what follows from it
        refuse_unusable(self.manifest, self.main_file, allow)
        check_file(self, name, allow, optimizer)

    @property
    def _ranks_have_files(self) -> bool:
        """Whether model files alone show what differs from rank to rank: at ZeRO-3 all have one."""
        said = self.recorded is not None and PER_RANK in self.recorded.run
        return self.manifest.mesh.zero == 3 and not said

    def differs(self, name: str) -> PerRank:
        return differs_in(self, name) if self._ranks_have_files else super().differs(name)

    def of_rank(self, rank: int) -> OwnValues:
        return held_by(self, rank) if self._ranks_have_files else super().of_rank(rank)

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
        file = self.file(name)
        return Where(
            file, file.record(ref.storage), ref.offset_elems * ITEMSIZE[dtype], ref.numel, dtype
        )

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
        tree, file = self._optimizer_of_rank(rank, not EXPERTS.isdisjoint(buffer.axes))
        index, path = self.contents.indices[slot.buffer], self.full_path(file)
        ref = element_of(reader, tree, index, slot.state, path)
        if isinstance(reader, Unpartitioned):
            ref = own_slice(ref, self.manifest.by_name[param].shape, param)
        return ref, file

    def weight(self, name: str, cut: Coords) -> tuple[Any, str]:
        """The weight of a parameter at a place along the axes that cut it, and its file."""
        etp, weights = etp_of(cut), self.weights
        if etp is not None and isinstance(weights, WithExperts):
            return weights.experts(etp).get(name, (None, self.model_name))
        tp = tp_of(cut)
        return weights.module(tp).get(name), weights.file_of(name, tp)


class NativeFormat:
    """DeepSpeed's own files: what no other format recognises."""

    def recognises(self, folder: Path) -> bool:
        return True

    def open(self, folder: Path, told: Told) -> Checkpoint:
        return NativeCheckpoint(folder, None, told, told.order is None)
