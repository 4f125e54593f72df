"""Canonical names of what a chunk of megatron-core's own pipeline holds: layers and experts by
their numbers in the whole model."""

import re
from typing import Any

from megatron_ucp.engines.megatron.experts import moe_layers
from megatron_ucp.formats.megatron.names import unfused

EMBEDDING = "embedding.word_embeddings.weight"
HEAD = "output_layer.weight"
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")


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
    Transformer Engine a norm is a part of the matrix behind it.
    """
    layers = [layer.layer_number - 1 for layer in model.decoder.layers]
    own_experts = {
        f"{name}.experts.local_experts.{local}.": f"{name}.experts.local_experts.{number}."
        for name, layer in moe_layers(model)
        for local, number in enumerate(layer.local_expert_indices)
    }
    out: dict[str, str] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if value is None or name.endswith("._extra_state"):
            continue  # states of Transformer Engine, empty without it
        whole = name
        for local, prefix in own_experts.items():
            if name.startswith(local):
                whole = prefix + name.removeprefix(local)
        if found := _LAYER.match(whole):
            rest = unfused(whole[found.end() :])
            whole = f"decoder.layers.{layers[int(found[1])]}.{rest}"
        if name == HEAD and getattr(value, "shared_embedding", False):
            whole = EMBEDDING
        out[name] = whole
    return out
