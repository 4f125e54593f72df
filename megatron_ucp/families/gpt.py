"""GPT on megatron-core's local layer spec: learned positions, LayerNorm, gelu, biases, tied or
untied head."""

from megatron_ucp.families import pipe
from megatron_ucp.families.base import (
    Builder,
    Declared,
    Family,
    Sizes,
    bias,
    norm,
    vocabulary,
    whole,
)
from megatron_ucp.families.layer import attention_and_mlp


def table(sizes: Sizes) -> dict[str, Declared]:
    """Every parameter of the model."""
    out = {
        "embedding.word_embeddings.weight": vocabulary(sizes, sizes.hidden),
        "decoder.final_layernorm.weight": norm(sizes.hidden),
    }
    if sizes.positions:
        out["embedding.position_embeddings.weight"] = whole(sizes.positions, sizes.hidden)
    if sizes.norm_biases:
        out["decoder.final_layernorm.bias"] = bias(whole(sizes.hidden))
    if not sizes.tied:
        out["output_layer.weight"] = vocabulary(sizes, sizes.hidden)
    for layer in range(sizes.layers):
        out |= attention_and_mlp(sizes, f"decoder.layers.{layer}.")
    return out


FAMILY = Family(
    "gpt",
    table,
    "megatron_ucp/families/gpt.py",
    pipe.names,
    pipe.layers,
    builder=Builder(
        "LayerNorm", gated=False, biases=True, position_embedding_type="learned_absolute"
    ),
    defaults={"untie_embeddings_and_output_weights": False},
    paper={"positions": 1024},
)
