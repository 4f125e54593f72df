"""Layers with quantized weights in a live engine (QLoRA: bitsandbytes' 4 and 8 bits): the base is
frozen and quantized by its own loader, an adapter on it is trained, saved and resumed."""

from typing import Any

import torch

from megatron_ucp.engines.built import Values
from megatron_ucp.engines.deepspeed.hooks import side_data_of
from megatron_ucp.errors import ModelMismatchError, some_of
from megatron_ucp.formats.base import Checkpoint


def check_side_data(source: Checkpoint, module: torch.nn.Module) -> None:
    """Compares what quantized layers keep beside their weights in a checkpoint with the live
    model's. Raises ModelMismatchError where the files hold quantized weights that a load would put
    between other scales."""
    saved = source.extras.side_data
    weights = {spec.name for spec in source.manifest.params if spec.kind == "frozen"}
    of_files = {name for name in saved if _lies_beside(name, weights)}
    if not of_files:
        return  # adapters alone, as trainers save them: the base is the engine's own
    live = side_data_of(module)
    values = Values(source, False)
    other = [
        name
        for name in sorted(of_files)
        if name not in live or not _same(values.built(saved[name], name), live[name])
    ]
    if other:
        raise ModelMismatchError(
            "the quantized weights of the base are others than those of the run",
            file=source.main_file,
            parameter=some_of(other),
            expected="the run's scales beside the weights (absmax, quant_state, SCB)",
            found=f"{len(other)} of {len(of_files)} that differ or are missing in the model",
            fix="quantize the base that the run had, with the same settings; or load the adapter "
            "alone, from a save with exclude_frozen_parameters=True",
        )


def quantized_note(module: torch.nn.Module) -> list[str]:
    """A note where a model has such layers."""
    found = side_data_of(module)
    if not found:
        return []
    kinds = {
        f"{type(layer).__module__.partition('.')[0]}'s {type(layer).__name__}"
        for name, layer in module.named_modules()
        if any(True for _ in layer.parameters(recurse=False))
        and any(entry.startswith(f"{name}.") for entry in found)
    }
    return [
        f"quantized layers ({', '.join(sorted(kinds))}): what is trained beside them is saved and "
        "resumed on any mesh. Their scales and settings are in saves that DeepSpeed's own code "
        "writes, and no load sets them: the base's own loader makes them anew"
    ]


def _lies_beside(name: str, weights: set[str]) -> bool:
    """Whether the weight that an entry belongs to is one of these: the entry's name goes on behind
    the weight's (`q.weight.absmax`), or lies in the same layer (`q.SCB`)."""
    path = name
    while path := path.rpartition(".")[0]:
        if weights & {path, f"{path}.weight", f"{path}.W_q"}:
            return True
    return False


def _same(one: Any, two: torch.Tensor) -> bool:
    if not isinstance(one, torch.Tensor) or one.shape != two.shape or one.dtype != two.dtype:
        return False
    flat = [value.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for value in (one, two)]
    return torch.equal(*flat)
