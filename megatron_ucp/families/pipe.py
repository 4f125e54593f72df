"""A GPT or LLaMA as layers of DeepSpeed's PipelineModule: the names there, and the canonical ones.

Position 0 is the embedding, 1 to L the transformer layers, L+1 the final norm, L+2 the head. A tied
embedding is a TiedLayerSpec with the key "embed", and the head is the same module on the last
stage.
"""

from collections.abc import Callable, Collection, Mapping

from megatron_ucp.core.layers import Layers
from megatron_ucp.families.family import Sizes, attention_and_mlp

TIED_KEY = "embed"
ATTENTION = "decoder.layers.0.self_attention."


def names(sizes: Sizes) -> dict[str, str]:
    """Name in the pipeline -> canonical name, for every parameter."""
    return with_layers(sizes, lambda _: attention_and_mlp(sizes))


def with_layers(sizes: Sizes, layer: Callable[[int], Collection[str]]) -> dict[str, str]:
    """As `names`, where `layer(number)` gives the names of a transformer layer's parameters."""
    embedding = f"tied_modules.{TIED_KEY}" if sizes.tied else "0"
    out = {f"{embedding}.word_embeddings.weight": "embedding.word_embeddings.weight"}
    if sizes.positions:
        out[f"{embedding}.position_embeddings.weight"] = "embedding.position_embeddings.weight"
    for number in range(sizes.layers):
        out |= {f"{number + 1}.{name}": f"decoder.layers.{number}.{name}" for name in layer(number)}
    out[f"{sizes.layers + 1}.weight"] = "decoder.final_layernorm.weight"
    if sizes.norm_biases:
        out[f"{sizes.layers + 1}.bias"] = "decoder.final_layernorm.bias"
    if not sizes.tied:
        out[f"{sizes.layers + 2}.weight"] = "output_layer.weight"
    return out


def layers(held: Collection[str]) -> Layers:
    """The list of layers of a model that has the parameters `held`. The head of a tied model is
    called through a function: its word matrix lies on the last stage, but in no file of its own."""
    sizes = sizes_of(held)
    return listed(sizes, names(sizes))


def sizes_of(held: Collection[str]) -> Sizes:
    """As much of the sizes as the names in a pipeline depend on."""
    count = 1 + max(
        (int(name.split(".")[2]) for name in held if name.startswith("decoder.layers.")), default=-1
    )
    return Sizes(
        count,
        0,
        0,
        0,
        0,
        0,
        0,
        0,
        positions=int("embedding.position_embeddings.weight" in held),
        tied="output_layer.weight" not in held,
        biases="decoder.layers.0.mlp.linear_fc1.bias" in held,
        norm_biases="decoder.final_layernorm.bias" in held,
        qkv_biases=f"{ATTENTION}linear_qkv.bias" in held,
        qk_norms=f"{ATTENTION}q_layernorm.weight" in held,
    )


def listed(sizes: Sizes, found: Mapping[str, str]) -> Layers:
    """The list of layers, from name in the pipeline -> canonical name."""
    at: list[dict[str, str]] = [{} for _ in range(sizes.layers + 3)]
    for pipe in found:
        head, _, rest = pipe.partition(".")
        if head.isdigit():
            at[int(head)][rest] = pipe
        else:
            at[0][rest.partition(".")[2]] = pipe
    if sizes.tied:
        at[-1] = {name: pipe for name, pipe in at[0].items() if name == "word_embeddings.weight"}
    return Layers(tuple(at), found, frozenset(range(len(at) - sizes.tied)))
