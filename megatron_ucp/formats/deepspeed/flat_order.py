"""Which parameters an optimizer file keeps, in the order in which they are flattened."""

from collections.abc import Iterator, Mapping
from typing import Any

from megatron_ucp.core.box import Ints
from megatron_ucp.core.manifest import FILE_NAME, Order
from megatron_ucp.errors import DamagedFileError, ForeignFileError, NotFoundError
from megatron_ucp.formats.deepspeed.model_file import shapes_by_group
from megatron_ucp.formats.deepspeed.muon import as_listed
from megatron_ucp.formats.deepspeed.native_steps import NamedWeights
from megatron_ucp.formats.deepspeed.optimizer_files import OptimizerTree
from megatron_ucp.formats.foreign import at_key, each, texts
from megatron_ucp.formats.prefixes import other_prefix
from megatron_ucp.formats.pt.unpickler import TensorRef

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
        base = at_key(base, "optimizer_state_dict", dict, found.file)
    groups = each(base.get("param_groups"), dict, "param_groups", found.file)
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
    groups = each(step.optimizer_tree(partition, mp).get(_SLICES), dict, _SLICES, file)
    return [texts(list(group), _SLICES, file) for group in groups]
