"""Two families that the package does not have, as a user would write them: each one a file.

`MIXER` is a model that megatron-core does not build, with sizes and kinds of parameters of its own.
`NEO` is built by megatron-core's modules, in a combination that is neither GPT nor LLaMA.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from megatron_ucp.core.layers import Layers
from megatron_ucp.core.layout import ShardNC
from megatron_ucp.families import family, gpt
from megatron_ucp.families import pipe as dense_pipe


@dataclass(frozen=True, kw_only=True)
class MixerSizes(family.Sizes):
    """`states` is the width of the second part of a fused projection."""

    states: int


def fused(parts: tuple[int, ...], *rest: int) -> family.Declared:
    """Parts of several sizes, one above the other, each cut on dim 0 for itself."""
    return family.Declared(
        (sum(parts), *rest),
        ShardNC("tp", 0, parts),
        {"tensor_model_parallel": True, "partition_dim": 0},
    )


def mixer_table(sizes: MixerSizes) -> dict[str, family.Declared]:
    out = {"words": family.vocabulary(sizes, sizes.hidden)}
    for layer in range(sizes.layers):
        out |= {f"layers.{layer}.{name}": declared for name, declared in mixer_layer(sizes).items()}
    return out


def mixer_layer(sizes: MixerSizes) -> dict[str, family.Declared]:
    return {
        "norm": family.norm(sizes.hidden),
        "in_proj": fused((sizes.ffn, sizes.states, sizes.heads), sizes.hidden),
        "conv": fused((sizes.ffn, sizes.states), 1, 3),
        "skip": family.column(sizes.heads),
        "out_proj": family.row(sizes.hidden, sizes.ffn),
    }


def mixer_divided(sizes: MixerSizes) -> tuple[family.Divided, ...]:
    return (
        family.Divided("heads", sizes.heads),
        family.Divided("states", sizes.states),
        family.Divided("the inner width", sizes.ffn),
        family.Divided("the padded vocabulary", sizes.vocab),
    )


def staged(name: str) -> str:
    """In a pipeline the words are at position 0, layer N at N+1."""
    if name == "words":
        return "0.words"
    _, layer, rest = name.split(".")
    return f"{int(layer) + 1}.{rest}"


def mixer_pipe(sizes: MixerSizes) -> dict[str, str]:
    return {staged(name): name for name in mixer_table(sizes)}


def mixer_layers(held: Collection[str]) -> Layers:
    names = {staged(name): name for name in held}
    count = 1 + max(int(pipe.partition(".")[0]) for pipe in names)
    at: list[dict[str, str]] = [{} for _ in range(count)]
    for pipe in names:
        position, _, rest = pipe.partition(".")
        at[int(position)][rest] = pipe
    return Layers(tuple(at), names, frozenset(range(count)))


def mixer_sizes(module: Any) -> family.Sizes:
    """From a live module, which knows them."""
    return module.sizes


MIXER = family.Family(
    "mixer",
    mixer_table,
    "tests/families/own.py",
    mixer_pipe,
    mixer_layers,
    divided=mixer_divided,
    sizes=MixerSizes,
    measure=mixer_sizes,
)
NEO = family.Family(
    "neo",
    gpt.table,
    "tests/families/own.py",
    dense_pipe.names,
    dense_pipe.layers,
    builder=family.Builder("RMSNorm", gated=False, biases=True, position_embedding_type="rope"),
    defaults={"untie_embeddings_and_output_weights": True, "hidden_dropout": 0.0},
)
