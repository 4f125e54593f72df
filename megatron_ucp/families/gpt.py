"""GPT on megatron-core's local layer spec: learned positions, LayerNorm, gelu, biases, tied or
untied head."""

from megatron_ucp.families import pipe
from megatron_ucp.families.base import Declared, Family, Sizes, column, whole
from megatron_ucp.families.layer import attention_and_mlp


def table(sizes: Sizes) -> dict[str, Declared]:
    """Every parameter of the model."""
    out = {
        "embedding.word_embeddings.weight": column(sizes.vocab, sizes.hidden),
        "decoder.final_layernorm.weight": whole(sizes.hidden),
    }
    if sizes.positions:
        out["embedding.position_embeddings.weight"] = whole(sizes.positions, sizes.hidden)
    if sizes.norm_biases:
        out["decoder.final_layernorm.bias"] = whole(sizes.hidden)
    if not sizes.tied:
        out["output_layer.weight"] = column(sizes.vocab, sizes.hidden)
    for layer in range(sizes.layers):
        out |= attention_and_mlp(sizes, f"decoder.layers.{layer}.")
    return out


FAMILY = Family("gpt", table, "megatron_ucp/families/gpt.py", pipe.names, pipe.layers)
