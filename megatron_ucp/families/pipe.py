"""A GPT or LLaMA as layers of DeepSpeed's PipelineModule: the names there, and the canonical ones.

Position 0 is the embedding, 1 to L the transformer layers, L+1 the final norm, L+2 the head: of a
model with two layers `3.weight` is `decoder.final_layernorm.weight`. A tied embedding is a
TiedLayerSpec with the key "embed", and the head is the same module on the last stage.
"""

from collections.abc import Collection, Mapping

from megatron_ucp.core.layers import TIED, Layers
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
    norm, tied = 1 + layer_count(params, _LAYERS), "output_layer.weight" not in params
    ends = {
        "embedding.": (0, ""),
        "decoder.final_layernorm.": (norm, ""),
        "output_layer.": (norm + 1, ""),
    }
    held, canonical = by_position(params, _LAYERS, 1, ends, tied)
    if tied:
        held[-1] = {name: pipe for name, pipe in held[0].items() if name == _WORDS}
    return Layers(tuple(held), canonical, frozenset(range(len(held) - tied)))


def layer_count(params: Collection[str], layers: str) -> int:
    """How many layers have parameters whose names begin with `layers` and their number."""
    named = (name.removeprefix(layers) for name in params if name.startswith(layers))
    return 1 + max((int(name.partition(".")[0]) for name in named), default=-1)


def by_position(
    params: Collection[str],
    layers: str,
    first: int,
    ends: Mapping[str, tuple[int, str]],
    tied: bool,
) -> tuple[list[dict[str, str]], dict[str, str]]:
    """For each position of a list of layers the names in its file, with those in the pipeline; and
    of these the canonical ones. The layers begin at position `first`, behind the embedding, which
    may be `tied`. `ends` say of other names by what they begin with their position, and what their
    rest begins with there."""
    held: list[dict[str, str]] = [{} for _ in range(1 + max(at for at, _ in ends.values()))]
    canonical: dict[str, str] = {}
    for name in params:
        if name.startswith(layers):
            number, _, rest = name.removeprefix(layers).partition(".")
            position = first + int(number)
        elif prefix := next((one for one in ends if name.startswith(one)), ""):
            position, before = ends[prefix]
            rest = before + name.removeprefix(prefix)
        else:
            continue
        is_tied = tied and position == first - 1
        pipe = f"{TIED}.{TIED_KEY}.{rest}" if is_tied else f"{position}.{rest}"
        held[position][rest], canonical[pipe] = pipe, name
    return held, canonical
