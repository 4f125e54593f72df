"""What DeepSpeed's own files say of the run that wrote them, step by step: opened, its ranks,
the names of weights, the optimizers, the order in a flat buffer, and where each slot lies."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, TypeVar

from megatron_ucp.core.box import Ints
from megatron_ucp.core.experts import LocalExperts, PartitionRanks, counts_of, etp_of, file_rank
from megatron_ucp.core.flat import FlatBuffer
from megatron_ucp.core.manifest import FILE_NAME, Manifest, Order
from megatron_ucp.core.mesh import EXPERTS, Coords, Mesh, stage_of
from megatron_ucp.core.names import MASTER, VALUE
from megatron_ucp.core.plan import Slot
from megatron_ucp.errors import DamagedFileError, ForeignFileError, NotFoundError
from megatron_ucp.formats import expect
from megatron_ucp.formats.byte_files import Where
from megatron_ucp.formats.checkpoint import CallerModel
from megatron_ucp.formats.deepspeed.experts import ExpertFiles, WithExperts
from megatron_ucp.formats.deepspeed.files import (
    TagFiles,
    TagFolder,
    expert_optimizer_name,
    missing_files,
    model_name,
    tp_of,
)
from megatron_ucp.formats.deepspeed.layout_sources import LayoutSource
from megatron_ucp.formats.deepspeed.optimizers import (
    Contents,
    OptimizerFile,
    OptimizerTree,
    PlainFile,
    Unpartitioned,
    as_listed,
    own_slice,
)
from megatron_ucp.formats.deepspeed.weights import Weights, shapes_by_group
from megatron_ucp.formats.pt.refs import TensorRef
from megatron_ucp.formats.wrapped_model import other_prefix

# ---- native steps
#
# What is known of DeepSpeed's own files, step by step: opened, the ranks that wrote them, the
# names of their weights, the optimizers that they hold; last, where each slot lies
# (`SlotPlaces`).


Next = TypeVar("Next")


@dataclass(frozen=True)
class OpenedFiles:
    """The files of a folder; `meta` is what the first model file says, which tells what kind of run
    wrote the others. `told` is what the caller knows."""

    files: TagFolder
    told: CallerModel
    names: TagFiles
    model_name: str
    meta: Mapping[str, Any]
    pipeline: bool

    @property
    def main_file(self) -> str:
        return self.files.main_file

    @property
    def recorded(self) -> Manifest | None:
        return self.files.recorded

    def model_of(self, mp: int, part: int = 0) -> str:
        """Name of the model file of a model-parallel rank (at ZeRO-3 of one partition)."""
        found = self.names.model.get((None, mp)) or self.names.model.get((part, mp))
        if found is None:
            file, expected = model_name(mp, part), f"partition {part}, model-parallel rank {mp}"
            raise missing_files("model file", 1, self.files.folder / file, expected, "no file")
        return found

    def optimizer_tree(self, part: int, mp: int = 0) -> Any:
        """The optimizer state dict of one partition's file."""
        name = self.names.optimizer[part, mp]
        tree = self.files.tree(name).get("optimizer_state_dict")
        if not isinstance(tree, dict):
            raise DamagedFileError(
                "an optimizer file holds no optimizer",
                file=self.files.full_path(name),
                expected="optimizer_state_dict",
                found=type(tree).__name__,
            )
        return tree

    def fragment(self, name: str, part: int, tp: int = 0) -> Any:
        """One partition of a frozen parameter, as ZeRO-3 keeps it."""
        file = self.model_of(tp, part)
        held = self.files.tree(file)
        return expect.key_or(held, "frozen_param_fragments", {}, self.files.full_path(file)).get(
            name
        )


@dataclass(frozen=True)
class RunRanks(OpenedFiles):
    """The ranks of the run: `uneven` says whether each tensor-parallel one has buffers of its own,
    `places` are those that have parameters of their own."""

    experts: ExpertFiles
    mesh: Mesh
    spread: PartitionRanks
    uneven: bool
    places: Sequence[Coords]

    @property
    def first_of_stages(self) -> list[str]:
        """The model file of each stage's first tensor-parallel rank."""
        return [self.model_of(stage * self.mesh.tp) for stage in range(self.mesh.pp)]

    def file_place(self, rank: int) -> tuple[int, int]:
        """(partition, model-parallel rank) in the names of a rank's files."""
        at = self.mesh.coord(rank)
        return self.mesh.partition_of(rank), at.pp * self.mesh.tp + at.tp

    def rank_of_file(self, part: int, mp: int) -> int:
        """The rank whose files have a partition and a model-parallel rank in their names."""
        return self.mesh.sharers_at(*divmod(mp, self.mesh.tp))[part]

    def place_of_rank(self, rank: int) -> int:
        """The number of a rank's place among `places`."""
        return self.places.index(self.mesh.at(rank, [axis for axis, _ in self.places[0]]))

    def optimizer_of(self, mp: int) -> tuple[Any, str]:
        """The optimizer's state dict of the first rank of a model-parallel one, and its file."""
        tree, name = self.optimizer_of_rank(self.rank_of_file(0, mp))
        return tree, self.files.full_path(name)

    def optimizer_of_rank(self, rank: int, of_experts: bool = True) -> tuple[Any, str]:
        """The optimizer's state dict of a rank, and its file; at stage 0 of one like it."""
        part, mp = self.file_place(rank)
        if self.names.optimizer:
            return self.optimizer_tree(part, mp), self.names.optimizer[part, mp]
        name = self.model_of(mp)
        tree = self.files.tree(name).get("optimizer")
        if not self.names.expert_optimizer or (tree is not None and not of_experts):
            return tree, name
        name = self._expert_optimizer(rank)
        return self.files.tree(name).get("optimizer"), name

    def _expert_optimizer(self, rank: int) -> str:
        """The file of stage 0 with the states of a rank's experts. Raises NotFoundError."""
        ep, etp = self.mesh.expert_place(rank)
        place = ep, file_rank(self.mesh, self.mesh.coord(rank).pp, ep, etp)
        if place not in self.names.expert_optimizer:
            file = self.files.folder / expert_optimizer_name(*place)
            expected = f"expert-parallel rank {place[0]}, model-parallel rank {place[1]}"
            raise missing_files("expert optimizer file", 1, file, expected, "no such file")
        return self.names.expert_optimizer[place]


@dataclass(frozen=True)
class NamedWeights(RunRanks):
    """The weights by canonical name; `pipe_names` are those in a pipeline, with the canonical
    ones, `declared` says how parameters are cut."""

    pipe_names: Mapping[str, str]
    weights: Weights
    declared: LayoutSource

    @cached_property
    def expert_counts(self) -> dict[str, int]:
        """Experts of each layer, by the canonical name of its list."""
        return {**self.experts.autoep.experts, **counts_of(self.weights.module())}

    def names_at(self, rank: int, file: str) -> Callable[[str], str]:
        """The canonical name of what the module of a rank calls a parameter."""
        ep, _ = self.mesh.expert_place(rank)
        apart = self.mesh.ep > 1
        local = self.experts.local(self.mesh, ep) if apart else LocalExperts({})
        return lambda name: self.weights.name_of(local.whole_name(name), file)

    def weight_dtype(self, name: str) -> str:
        """The dtype in which a model file keeps a parameter."""
        return self.weights.module()[name].storage.dtype

    def weight(self, name: str, cut: Coords) -> tuple[Any, str]:
        """The weight of a parameter at a place along the axes that cut it, and its file."""
        etp, weights = etp_of(cut), self.weights
        if etp is not None and isinstance(weights, WithExperts):
            return weights.experts(etp).get(name, (None, self.model_name))
        tp = tp_of(cut)
        return weights.module(tp).get(name), weights.file_of(name, tp)


@dataclass(frozen=True)
class Optimizers(NamedWeights):
    """The optimizers: how the files of each place keep theirs, what the first ones hold, and all of
    them as one."""

    readers: Sequence[OptimizerFile]
    stages: Sequence[Contents]
    contents: Contents

    def format_of(self, stage: int) -> OptimizerFile:
        """How the files of a stage keep its optimizer."""
        return self.readers[[stage_of(at) for at in self.places].index(stage)]


def after(step: OpenedFiles, kind: type[Next], **more: Any) -> Next:
    """The next step: what the one before it knew, and more."""
    return kind(**{one.name: getattr(step, one.name) for one in fields(step)}, **more)


# ---- flat order
#
# Which parameters an optimizer file keeps, in the order in which they are flattened.


FlattenedShapes = list[dict[str, Ints]]  # names and rank-local shapes of each group's parameters
_SLICES = "param_slice_mappings"


def flattened(
    step: NamedWeights, found: OptimizerTree, order: Order | None, rank: int
) -> FlattenedShapes:
    """What each group flattens in the file of a rank. `order` has the names that files of stage 0
    don't say. Raises DamagedFileError, NotFoundError."""
    _, mp = step.file_place(rank)
    model = step.model_of(mp)
    file = step.files.full_path(model)
    listed = shapes_by_group(step.files.tree(model), file)
    if step.names.optimizer and listed is not None:
        name_of = step.names_at(rank, model)
        inside = (step.experts.autoep.in_slices(named, file) for named in listed)
        flat = [{name_of(name): shape for name, shape in named.items()} for named in inside]
        return _with_trained_experts(step, flat, rank)
    if step.names.optimizer and _SLICES in found.tree:
        # BF16_Optimizer without ZeRO, in a pipeline: what each partition owns names all, in order
        order = _by_slices(step, rank, model)
    elif step.names.optimizer:
        raise DamagedFileError(
            "the model file does not say how parameters are flattened",
            file=file,
            expected="param_shapes",
            found="none",
        )
    if order is None:
        raise NotFoundError(
            "a stage-0 checkpoint without a manifest does not name its optimizer's parameters",
            file=found.file,
            expected=FILE_NAME,
            found="no manifest",
            fix="load it into an engine, which knows the order of its own groups",
        )
    return _in_order(step, found, order, mp)


def shape_of(step: NamedWeights, module: Mapping[str, Any], name: str) -> Ints:
    """The rank-local shape of a parameter that the caller, or the manifest, names. Raises
    ForeignFileError where the weights lack it, ModelMismatchError where a prefix does that."""
    ref = module.get(name)
    if not isinstance(ref, TensorRef):
        wanted = [param for names in step.told.order or () for param in names]
        raise other_prefix(module, wanted, step.main_file) or ForeignFileError(
            "the model of the engine has a parameter that the checkpoint lacks",
            parameter=name,
            file=step.main_file,
            found=f"{len(module)} other tensors",
            fix="build the model with the configuration that the checkpoint was trained with",
        )
    return ref.shape


def _in_order(step: NamedWeights, found: OptimizerTree, order: Order, mp: int) -> FlattenedShapes:
    """What a file without shapes keeps, in an order that the caller told, or that the manifest or
    the optimizer files say."""
    module = step.weights.module(mp % step.mesh.tp)
    shapes = [{name: shape_of(step, module, name) for name in names} for names in order]
    if step.uneven:  # a rank without a share of a parameter does not step it
        shapes = [{n: shape for n, shape in named.items() if 0 not in shape} for named in shapes]
    if step.recorded is not None or step.names.optimizer:
        return shapes
    base = found.tree
    if "optimizer_state_dict" in base:
        base = expect.key(base, "optimizer_state_dict", dict, found.file)
    groups = expect.each(base.get("param_groups"), dict, "param_groups", found.file)
    return as_listed(shapes, groups, step.told.shapes or {}, found.file)


def _with_trained_experts(step: NamedWeights, flat: FlattenedShapes, rank: int) -> FlattenedShapes:
    """What a rank flattens, with its own experts. `flat` is what the first expert-parallel rank
    does, renumbered: others may train other ones of theirs, which a manifest alone says."""
    recorded, at = step.recorded, step.places[step.place_of_rank(rank)]
    if recorded is None or not step.names.experts or not step.mesh.expert_place(rank)[0]:
        return flat
    here = [b for b in recorded.buffers if b.stepped and b.is_held_at(at)]
    said = [[member.param for member in buffer.members] for buffer in here]
    if [*map(set, said)] == [*map(set, flat)]:  # then the files' own order is the evidence
        return flat
    module = step.weights.module(step.mesh.coord(rank).tp)
    return [{name: shape_of(step, module, name) for name in names} for names in said]


def _by_slices(step: NamedWeights, rank: int, model: str) -> list[list[str]]:
    """The parameters of each group: what the optimizer files of all partitions of a rank's buffers
    name, in order; of experts only the rank's own."""
    mesh, name_of = step.mesh, step.names_at(rank, model)
    own = mesh.expert_place(rank)
    held = [
        (_slices(step, *step.file_place(other)), mesh.expert_place(other) == own)
        for other in mesh.partition_group(rank)
    ]
    counts = {len(groups) for groups, _ in held}
    if len(counts) != 1:
        raise ForeignFileError(
            "optimizer files hold different numbers of groups",
            file=step.files.full_path(model),
            expected="as many in each",
            found=", ".join(map(str, sorted(counts))),
        )

    def named(group: int) -> Iterator[str]:
        for groups, alike in held:
            yield from (n for n in groups[group] if alike or not step.spread.is_apart(n))

    return [list(dict.fromkeys(map(name_of, named(group)))) for group in range(counts.pop())]


def _slices(step: NamedWeights, partition: int, mp: int) -> list[list[str]]:
    """What a partition owns of each group. Raises DamagedFileError."""
    file = step.files.full_path(step.names.optimizer[partition, mp])
    groups = expect.each(step.optimizer_tree(partition, mp).get(_SLICES), dict, _SLICES, file)
    return [expect.texts(list(group), _SLICES, file) for group in groups]


# ---- slot places
#
# Where each slot of a manifest lies in DeepSpeed's own files.


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
        ref = reader.element(
            expect.kind(tree, dict, "the optimizer", path), index, slot.state, path
        )
        if isinstance(reader, Unpartitioned):
            ref = own_slice(ref, self.manifest.by_name[param].shape, param)
        return ref, file
