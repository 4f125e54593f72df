"""Canonical names of what a chunk of megatron-core's own pipeline holds: layers and experts by
their numbers in the whole model, in the words of megatron-core's own modules."""

import re
from collections.abc import Iterator
from typing import Any

import torch

from megatron_ucp.formats.megatron.names import with_unfused_norms

EMBEDDING = "embedding.word_embeddings.weight"
POSITIONS = "embedding.position_embeddings.weight"
HEAD = "output_layer.weight"
_LAYER = re.compile(r"((?:\w+\.)*layers)\.\d+")  # the name of a module in a list of layers
_INNER_LAYER = re.compile(r"(mtp\.layers\.\d+\.)mtp_model_layer\.(?!layers\.)")
_CONVOLUTION = re.compile(r"(.+\.mixer\.conv1d)_(weight|bias)")
# of TEGroupedMLP: a parameter for each expert of the rank
_GROUPED = re.compile(r"(.+\.experts)\.(linear_fc[12])\.(weight|bias)(\d+)")


def bare_model(chunk: Any) -> Any:
    """The GPTModel in megatron-core's wrappers."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def canonical_names(model: Any) -> dict[str, str]:
    """For every parameter and persistent buffer of a bare chunk: its name there -> its name in the
    whole model.

    A chunk counts its layers from 0, and a rank its experts: their numbers are asked of the
    modules. The last stage's copy of a tied embedding has the embedding's name. In layers of
    Transformer Engine a norm is a part of the matrix behind it, and all experts of a rank are one
    module. Of a parameter under several names the first one counts, as in `named_parameters`.
    """
    layers, own_experts = _layers(model), expert_prefixes(model)
    out, seen = dict[str, str](), set[int]()
    for name, value in model.state_dict(keep_vars=True).items():
        if value is None or name.endswith("._extra_state") or id(value) in seen:
            continue  # states of Transformer Engine, empty without it
        seen.add(id(value))
        whole = _expert_by_expert(name)
        for local, prefix in own_experts.items():
            if whole.startswith(local):
                whole = prefix + whole.removeprefix(local)
        for local, prefix in layers.items():
            if whole.startswith(local):
                whole = with_unfused_norms(prefix + whole.removeprefix(local))
                break
        if name == HEAD and getattr(value, "shared_embedding", False):
            whole = EMBEDDING
        out[name] = _as_in_files(whole)
    return out


def _as_in_files(name: str) -> str:
    """A name as it was before an attribute of megatron-core's was renamed: its key in files stays.
    Since 0.17 that is the inner layer of multi-token prediction, since 0.19 Mamba's convolution."""
    name = _INNER_LAYER.sub(r"\1transformer_layer.", name)
    return _CONVOLUTION.sub(r"\1.\2", name)


def _layers(model: Any) -> dict[str, str]:
    """What names in each layer begin with -> what they do in the whole model: megatron-core's
    layers know their numbers."""
    out: dict[str, str] = {}
    for name, module in model.named_modules():
        found = _LAYER.fullmatch(name)
        if found is not None and hasattr(module, "layer_number"):
            out[f"{name}."] = f"{found[1]}.{module.layer_number - 1}."
    return out


def _expert_by_expert(name: str) -> str:
    """The name that a parameter of TEGroupedMLP has in a SequentialMLP; any other name as it is."""
    found = _GROUPED.fullmatch(name)
    if found is None:
        return name
    experts, matrix, kind, local = found.groups()
    return f"{experts}.local_experts.{local}.{matrix}.{kind}"


def moe_layers(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """megatron-core's MoE layers, by name in the model."""
    from megatron.core.transformer.moe.moe_layer import MoELayer

    for name, module in model.named_modules():
        if isinstance(module, MoELayer):
            yield name, module


def expert_prefixes(model: torch.nn.Module) -> dict[str, str]:
    """What names of a rank's experts begin with -> what they do in the whole model."""
    return {
        f"{name}.experts.local_experts.{local}.": f"{name}.experts.local_experts.{number}."
        for name, layer in moe_layers(model)
        for local, number in enumerate(layer.local_expert_indices)
    }
