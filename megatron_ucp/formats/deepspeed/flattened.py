"""Which parameters an optimizer file keeps, in the order in which they are flattened."""

from typing import TYPE_CHECKING, Any

from megatron_ucp.core.box import Ints
from megatron_ucp.core.manifest import FILE_NAME
from megatron_ucp.errors import DamagedFileError, NotFoundError
from megatron_ucp.formats.base import Order
from megatron_ucp.formats.deepspeed.model_file import shapes_by_group

if TYPE_CHECKING:
    from megatron_ucp.formats.deepspeed.native import NativeCheckpoint


def flattened(
    checkpoint: "NativeCheckpoint", tree: Any, file: str, order: Order | None, mp: int
) -> list[dict[str, Ints]]:
    """Names and rank-local shapes of each group's parameters in the file of the model-parallel rank
    `mp`, whose optimizer is `tree`. `order` has the names that files of stage 0 don't say. Raises
    DamagedFileError, NotFoundError."""
    model = checkpoint.model_of(mp)
    shapes = shapes_by_group(checkpoint.tree(model))
    if checkpoint.names.optimizer and isinstance(shapes, list):
        return [
            {checkpoint.weights.name_of(name, model): shape for name, shape in named.items()}
            for named in shapes
        ]
    if checkpoint.names.optimizer and "param_slice_mappings" in tree:
        order = _by_slices(checkpoint, tree, model, mp)
    elif checkpoint.names.optimizer:
        raise DamagedFileError(
            "the model file does not say how parameters are flattened",
            file=checkpoint.full_path(model),
            expected="param_shapes",
            found=type(shapes).__name__,
        )
    if order is None:
        raise NotFoundError(
            "a stage-0 checkpoint without a manifest does not name its optimizer's parameters",
            file=file,
            expected=FILE_NAME,
            found="no manifest",
            fix="load it into an engine, which knows the order of its own groups",
        )
    module = checkpoint.weights.module(mp % checkpoint.counts.tp)
    return [{name: checkpoint.shape_of(module, name) for name in names} for names in order]


def _by_slices(checkpoint: "NativeCheckpoint", tree: Any, model: str, mp: int) -> Order:
    """BF16_Optimizer without ZeRO, in a pipeline: what each partition owns names all, in order."""
    parts = range(checkpoint.counts.partitions)
    owned = [checkpoint.optimizer_tree(part, mp)["param_slice_mappings"] for part in parts]
    out: list[list[str]] = []
    for group in range(len(tree["param_slice_mappings"])):
        names = [name for slices in owned for name in slices[group]]
        out.append(list(dict.fromkeys(checkpoint.weights.name_of(name, model) for name in names)))
    return out
