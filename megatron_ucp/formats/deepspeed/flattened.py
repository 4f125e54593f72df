"""Which parameters an optimizer file keeps, in the order in which they are flattened."""

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from megatron_ucp.core.box import Ints
from megatron_ucp.core.experts import LocalExperts
from megatron_ucp.core.manifest import FILE_NAME, Order
from megatron_ucp.errors import DamagedFileError, ForeignFileError, NotFoundError
from megatron_ucp.formats.deepspeed.model_file import shapes_by_group
from megatron_ucp.formats.deepspeed.muon import as_listed
from megatron_ucp.formats.prefixes import other_prefix
from megatron_ucp.formats.pt.unpickler import TensorRef

if TYPE_CHECKING:
    from megatron_ucp.formats.deepspeed.native import NativeCheckpoint


def flattened(
    checkpoint: "NativeCheckpoint", tree: Any, file: str, order: Order | None, rank: int
) -> list[dict[str, Ints]]:
    """Names and rank-local shapes of each group's parameters in the file of a rank, whose optimizer
    is `tree`. `order` has the names that files of stage 0 don't say. Raises DamagedFileError,
    NotFoundError."""
    _, mp = checkpoint.file_place(rank)
    model = checkpoint.model_of(mp)
    listed = shapes_by_group(checkpoint.tree(model))
    name_of = names_at(checkpoint, rank, model)
    if checkpoint.names.optimizer and isinstance(listed, list):
        file = checkpoint.full_path(model)
        inside = (checkpoint.experts.autoep.in_slices(named, file) for named in listed)
        found = [{name_of(name): shape for name, shape in named.items()} for named in inside]
        return _with_trained_experts(checkpoint, found, rank)
    if checkpoint.names.optimizer and "param_slice_mappings" in tree:
        # BF16_Optimizer without ZeRO, in a pipeline: what each partition owns names all, in order
        order = [
            list(dict.fromkeys(map(name_of, _by_slices(checkpoint, rank, group))))
            for group in range(len(tree["param_slice_mappings"]))
        ]
    elif checkpoint.names.optimizer:
        raise DamagedFileError(
            "the model file does not say how parameters are flattened",
            file=checkpoint.full_path(model),
            expected="param_shapes",
            found=type(listed).__name__,
        )
    if order is None:
        raise NotFoundError(
            "a stage-0 checkpoint without a manifest does not name its optimizer's parameters",
            file=file,
            expected=FILE_NAME,
            found="no manifest",
            fix="load it into an engine, which knows the order of its own groups",
        )
    return _in_order(checkpoint, tree, file, order, mp)


def shape_of(checkpoint: "NativeCheckpoint", module: Mapping[str, Any], name: str) -> Ints:
    """The rank-local shape of a parameter that the caller, or the manifest, names. Raises
    ForeignFileError where the weights lack it, ModelMismatchError where a prefix does that."""
    ref = module.get(name)
    if not isinstance(ref, TensorRef):
        wanted = [param for names in checkpoint.told.order or () for param in names]
        raise other_prefix(module, wanted, checkpoint.main_file) or ForeignFileError(
            "the model of the engine has a parameter that the checkpoint lacks",
            parameter=name,
            file=checkpoint.main_file,
            found=f"{len(module)} other tensors",
            fix="build the model with the configuration that the checkpoint was trained with",
        )
    return ref.shape


def _in_order(
    checkpoint: "NativeCheckpoint", tree: Any, file: str, order: Order, mp: int
) -> list[dict[str, Ints]]:
    """What a file without shapes keeps, in an order that the caller told, or that the manifest or
    the optimizer files say."""
    module = checkpoint.weights.module(mp % checkpoint.counts.tp)
    shapes = [{name: shape_of(checkpoint, module, name) for name in names} for names in order]
    if checkpoint.uneven:  # a rank without a share of a parameter does not step it
        shapes = [{n: shape for n, shape in named.items() if 0 not in shape} for named in shapes]
    if checkpoint.recorded is not None or checkpoint.names.optimizer:
        return shapes
    groups = tree.get("optimizer_state_dict", tree)["param_groups"]
    return as_listed(shapes, groups, checkpoint.told.shapes or {}, file)


def _with_trained_experts(
    checkpoint: "NativeCheckpoint", found: list[dict[str, Ints]], rank: int
) -> list[dict[str, Ints]]:
    """What a rank flattens, with its own experts. `found` is what the first expert-parallel rank
    does, renumbered: others may train other ones of theirs, which a manifest alone says."""
    recorded, at = checkpoint.recorded, checkpoint.places[checkpoint.place_of_rank(rank)]
    if (
        recorded is None
        or not checkpoint.names.experts
        or not checkpoint.mesh.expert_place(rank)[0]
    ):
        return found
    here = [b for b in recorded.buffers if b.stepped and b.is_held_at(at)]
    said = [[member.param for member in buffer.members] for buffer in here]
    if [*map(set, said)] == [*map(set, found)]:  # then the files' own order is the evidence
        return found
    module = checkpoint.weights.module(checkpoint.mesh.coord(rank).tp)
    return [{name: shape_of(checkpoint, module, name) for name in names} for names in said]


def names_at(checkpoint: "NativeCheckpoint", rank: int, file: str) -> Callable[[str], str]:
    """The canonical name of what the module of a rank calls a parameter."""
    ep, _ = checkpoint.mesh.expert_place(rank)
    apart = checkpoint.mesh.ep > 1
    local = checkpoint.experts.local(checkpoint.mesh, ep) if apart else LocalExperts({})
    return lambda name: checkpoint.weights.name_of(local.whole_name(name), file)


def _by_slices(checkpoint: "NativeCheckpoint", rank: int, group: int) -> Iterator[str]:
    """What the optimizer files of all partitions of a rank's buffer of a group name, in order; of
    experts only the rank's own."""
    mesh = checkpoint.mesh
    own = mesh.expert_place(rank)
    for other in mesh.partition_group(rank):
        held = checkpoint.optimizer_tree(*checkpoint.file_place(other))["param_slice_mappings"]
        alike = mesh.expert_place(other) == own
        yield from (name for name in held[group] if alike or not checkpoint.spread.is_apart(name))
