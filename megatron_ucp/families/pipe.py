"""A GPT or LLaMA as layers of DeepSpeed's PipelineModule: the names there, and the canonical ones.

Position 0 is the embedding, 1 to L the transformer layers, L+1 the final norm, L+2 the head. A tied embedding is a
TiedLayerSpec with the key "embed", and the head is the same module on the last stage.
"""

from megatron_ucp.families.base import Sizes
from megatron_ucp.families.layer import attention_and_mlp

TIED_KEY = "embed"


def names(sizes: Sizes) -> dict[str, str]:
    """Name in the pipeline -> canonical name, for every parameter."""
    embedding = f"tied_modules.{TIED_KEY}" if sizes.tied else "0"
    out = {f"{embedding}.word_embeddings.weight": "embedding.word_embeddings.weight"}
    if sizes.positions:
        out[f"{embedding}.position_embeddings.weight"] = "embedding.position_embeddings.weight"
    for layer in range(sizes.layers):
        out |= {f"{layer + 1}.{name}": f"decoder.layers.{layer}.{name}" for name in attention_and_mlp(sizes, "")}
    out[f"{sizes.layers + 1}.weight"] = "decoder.final_layernorm.weight"
    if sizes.norm_biases:
        out[f"{sizes.layers + 1}.bias"] = "decoder.final_layernorm.bias"
    if not sizes.tied:
        out[f"{sizes.layers + 2}.weight"] = "output_layer.weight"
    return out
