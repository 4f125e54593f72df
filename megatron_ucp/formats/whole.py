"""Whether the files of a tag folder belong together: one run, one step, one mesh."""

from typing import Any

from megatron_ucp.core.plan import Slot
from megatron_ucp.core.states import MASTER
from megatron_ucp.errors import ForeignFileError
from megatron_ucp.formats.deepspeed import NativeCheckpoint
from megatron_ucp.formats.evidence import difference
from megatron_ucp.formats.model_file import shapes_by_group
from megatron_ucp.formats.optimizer_files import number
from megatron_ucp.formats.pt_file import PtFile, Record
from megatron_ucp.formats.safe_pickle import ITEMSIZE, TensorRef

SAMPLES = 16  # parameters of one partition whose masters are compared with the weights


def check_file(checkpoint: NativeCheckpoint, name: str, stale: bool = False) -> None:
    """Compares one file with the structure. Raises ForeignFileError for a file of another run, step or mesh.

    `stale` lets masters differ from the weights in the model file.
    """
    if name in checkpoint.names.optimizer.values():
        part, mp = next(key for key, n in checkpoint.names.optimizer.items() if n == name)
        found = checkpoint.read_contents(checkpoint.optimizer_tree(part, mp), checkpoint.full_path(name), None)
        for what in ("engine", "buffers", "groups", "scalars", "scaler"):
            ours, theirs = getattr(checkpoint.contents, what), getattr(found, what)
            if ours != theirs:
                raise ForeignFileError(f"an optimizer file differs from the first one in its {what}",
                                       file=checkpoint.full_path(name), **difference(ours, theirs))
        if not stale and found.engine in ("zero12", "bf16"):
            _check_weights(checkpoint, part, mp)
    elif name in checkpoint.names.model.values():
        tree = checkpoint.tree(name)
        for key in ("global_steps", "skipped_steps", "dp_world_size", "ds_version", "param_shapes"):
            read = shapes_by_group if key == "param_shapes" else lambda meta, key=key: number(meta.get(key))
            ours, theirs = read(checkpoint.meta), read(tree)
            if ours != theirs:
                raise ForeignFileError(f"a model file differs from the first one in {key}", file=checkpoint.full_path(name),
                                       **difference(ours, theirs))
    else:
        checkpoint.file(name)


def _check_weights(checkpoint: NativeCheckpoint, part: int, mp: int) -> None:
    """Samples a partition: its masters, rounded, are the weights of the model file, or it is of another run."""
    import torch  # inspecting a checkpoint must not need it
    module = checkpoint.module(mp)
    for index, buffer in enumerate(checkpoint.contents.buffers):
        fragments = list(buffer.fragments(part))
        for fragment in fragments[::max(1, len(fragments) // SAMPLES)]:
            name = buffer.members[fragment.member].param
            weight = module.get(name)
            if not isinstance(weight, TensorRef) or not weight.is_contiguous:
                continue
            where = checkpoint.where(Slot(index, (("tp", mp),), part, MASTER))
            middle = (fragment.high - fragment.low) // 2
            ours = _element(where.file, where.record, where.dtype,
                                 where.offset_bytes // ITEMSIZE[where.dtype] + fragment.offset + middle)
            model = checkpoint.file(checkpoint.model_of(mp))
            theirs = _element(model, model.record(weight.storage), weight.storage.dtype,
                                   weight.offset_elems + fragment.low + middle)
            if not torch.equal(ours.to(theirs.dtype).view(torch.uint8), theirs.view(torch.uint8)):
                raise ForeignFileError(
                    "the master weights are not those of the model file", file=where.file.path, parameter=name,
                    expected=f"{theirs.item()} as in {checkpoint.model_of(mp)}", found=f"{ours.item()}",
                    fix="put the files of one save into the folder; if masters were changed on purpose, load with "
                        'allow={"stale"}')

def _element(file: PtFile, record: Record, dtype: str, index: int) -> Any:
    import torch
    data = bytearray(ITEMSIZE[dtype])
    file.read_into(record, index * len(data), memoryview(data))
    return torch.frombuffer(data, dtype=getattr(torch, dtype))
