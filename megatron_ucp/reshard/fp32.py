"""The fp32 master weights of a checkpoint as tensors, each whole: what `zero_to_fp32.py` gives."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import torch

from megatron_ucp import say
from megatron_ucp.core.names import MASTER
from megatron_ucp.errors import InexactError, some_of
from megatron_ucp.formats.checkpoint import Checkpoint
from megatron_ucp.formats.registry import open_checkpoint
from megatron_ucp.reshard.check import read_state, weight_of


def fp32_tensors(
    path: str | Path, *, tag: str | None = None, rules: str | Path | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """The fp32 weights of a checkpoint, one tensor after the other, in the memory of one of them.

    Args:
        path: A tag folder, or the folder above it.
        tag: The tag in `path`, where it is not the newest.
        rules: A file of rules (docs/reference/rules.md), where no family knows the layouts.

    Returns:
        An iterator of (name, tensor), under the model's own names. A trained parameter is its fp32
        master weights; a frozen one and a buffer are converted to fp32 where they hold floating
        point numbers. Tied names share one tensor. A padded vocabulary keeps its padding.

    Raises:
        NotFoundError: Where there is no checkpoint.
        InexactError: Where ranks have copies of a parameter that differ.
        UcpError: For one that can't be read, or whose checksums differ.

    Example:
        >>> import megatron_ucp as ucp
        >>> sizes = {name: one.numel() for name, one in ucp.fp32_tensors("runs/llama")}
    """
    with ExitStack() as opened:
        source = opened.enter_context(open_checkpoint(path, tag, rules))
        source.check_all(source.file_names)
        _refuse_copies(source)
        _note_rounded(source)
        ties = {tie.canonical: tie.aliases for tie in source.manifest.ties}
        for name, spec in source.manifest.by_name.items():
            flat = read_state(source, name, weight_of(source.manifest, name)[0])
            tensor = flat.view(spec.shape)
            tensor = tensor.float() if tensor.is_floating_point() else tensor
            for each in (name, *ties.get(name, ())):
                yield each, tensor


def fp32_state_dict(
    path: str | Path, *, tag: str | None = None, rules: str | Path | None = None
) -> dict[str, torch.Tensor]:
    """The fp32 weights of a checkpoint as a state dict on the CPU, from any mesh. What
    `get_fp32_state_dict_from_zero_checkpoint` of DeepSpeed's `zero_to_fp32` gives.

    Args:
        path: A tag folder, or the folder above it.
        tag: The tag in `path`, where it is not the newest.
        rules: A file of rules (docs/reference/rules.md), where no family knows the layouts.

    Returns:
        Name -> tensor; see `fp32_tensors`, which needs the memory of one tensor alone.

    Raises:
        UcpError: As `fp32_tensors`.

    Example:
        >>> import megatron_ucp as ucp
        >>> model.load_state_dict(ucp.fp32_state_dict("checkpoints"))
    """
    return dict(fp32_tensors(path, tag=tag, rules=rules))


def _refuse_copies(source: Checkpoint) -> None:
    manifest = source.manifest
    partial = [
        spec.name
        for spec in manifest.params
        if spec.layout.mean_over and manifest.mesh.size(spec.layout.mean_over) > 1
    ]
    if partial:
        raise InexactError(
            "every rank has a copy of its own of a parameter",
            file=source.folder,
            parameter=partial[0],
            expected="one value of each parameter",
            found=f"copies of {some_of(partial)}",
            fix="average them into a new checkpoint first: convert with --allow mean "
            '(Python: allow={"mean"})',
        )


def _note_rounded(source: Checkpoint) -> None:
    """Shows a note where a trained parameter has no fp32 master weights."""
    found = [
        spec.name
        for spec in source.manifest.params
        if spec.kind == "trainable"
        and spec.dtype not in ("float32", "float64")
        and weight_of(source.manifest, spec.name)[0] != MASTER
    ]
    if found:
        say.note(f"no fp32 master weights of {some_of(found)}: its weights are those of training")
