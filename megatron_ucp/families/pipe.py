"""A GPT or LLaMA as layers of DeepSpeed's PipelineModule: the names there, and the canonical ones.

Position 0 is the embedding, 1 to L the transformer layers, L+1 the final norm, L+2 the head: of a
model with two layers `3.weight` is `decoder.final_layernorm.weight`. A tied embedding is a
TiedLayerSpec with the key "embed", and the head is the same module on the last stage.
"""

from collections.abc import Collection

from megatron_ucp.core.layers import Layers
from megatron_ucp.families.family import Sizes, attention_and_mlp, transformer

TIED_KEY = "embed"
_LAYERS, _WORDS = "decoder.layers.", "word_embeddings.weight"


def names(sizes: Sizes) -> dict[str, str]:
    """Name in the pipeline -> canonical name, for every parameter of a dense model."""
    return dict(layers(transformer(sizes, lambda _: attention_and_mlp(sizes))).names)


def layers(params: Collection[str]) -> Layers:
    """The list of layers of a model with these parameters; what lies elsewhere, as a rotary table,
    is left out. The head of a tied model is called through a function: its word matrix lies on the
    last stage, but in no file of its own."""
    numbers = [int(name.split(".")[2]) for name in params if name.startswith(_LAYERS)]
    count, tied = 1 + max(numbers, default=-1), "output_layer.weight" not in params
    ends = {"embedding.": 0, "decoder.final_layernorm.": count + 1, "output_layer.": count + 2}
    at: list[dict[str, str]] = [{} for _ in range(count + 3)]
    canonical: dict[str, str] = {}
    for name in params:
        if name.startswith(_LAYERS):
            number, _, rest = name.removeprefix(_LAYERS).partition(".")
            position = int(number) + 1
        else:
            prefix = next((one for one in ends if name.startswith(one)), None)
            if prefix is None:
                continue
            position, rest = ends[prefix], name.removeprefix(prefix)
        pipe = f"tied_modules.{TIED_KEY}.{rest}" if tied and not position else f"{position}.{rest}"
        at[position][rest], canonical[pipe] = pipe, name
    if tied:
        at[-1] = {name: pipe for name, pipe in at[0].items() if name == _WORDS}
    return Layers(tuple(at), canonical, frozenset(range(len(at) - tied)))
