"""LLaMA on megatron-core's local layer spec: grouped queries, SwiGLU (gate above up), RMSNorm,
RoPE, no biases; and the models that are one but for a setting of their attention: Mistral, Qwen2
(biases on queries, keys and values), Qwen3 (which normalises queries and keys, head by head)."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from megatron_ucp.families import gpt, pipe
from megatron_ucp.families.family import (
    SWITCHES,
    Builder,
    Config,
    Declared,
    Family,
    HuggingFace,
    Sizes,
)
from megatron_ucp.families.settings import Architecture
from megatron_ucp.families.twin import (
    ATTENTION_ROWS,
    MLP_ROWS,
    NORM_ROWS,
    by_rows,
    check_config,
    common,
    read_architecture,
    read_common,
    refused_settings,
    refused_sizes,
)

BUILDER = Builder("RMSNorm", gated=True, biases=False, position_embedding_type="rope")
DEFAULTS = {
    "untie_embeddings_and_output_weights": True,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
}


# ------------------------------------------------ Llama of Hugging Face


# No row of q or k changes its place: both sides rotate halves.
LLAMA_ROWS = {**ATTENTION_ROWS, **MLP_ROWS, **NORM_ROWS}


def refuses(sizes: Sizes, architecture: Architecture, *known: str) -> list[str]:
    """What LlamaForCausalLM does not have; `known` are settings that another model has."""
    return refused_settings(architecture, ("silu",), known) + refused_sizes(sizes)


# ------------------------------------------------ families


def llama_like(
    title: str,
    more: Mapping[str, Any],
    accepted: Callable[[Config], Config] = lambda config: config,
    switch: str = "",
) -> Family:
    """A family of models that are LLaMAs but for one of `SWITCHES`, such as "qk_norms".

    `more` is what its config.json says besides `common`; `accepted` gives a config as one of a
    LLaMA, and raises UnsupportedError for what is not computed here.
    """
    name = title.lower()
    switches: dict[str, Any] = {switch: True} if switch else {}
    settings = {SWITCHES[one]: True for one in switches}
    builder = replace(BUILDER, **switches)

    def table(sizes: Sizes) -> dict[str, Declared]:
        builder.check(sizes, title)
        return gpt.table(sizes)

    def from_config(config: Config) -> tuple[Sizes, Architecture]:
        config = accepted(config)
        sizes = Sizes(**read_common(config, int(config["vocab_size"]), **switches))
        return sizes, read_architecture(config, 1e-6, 10000.0, odd=settings)

    twin = HuggingFace(
        name,
        f"{name.capitalize()}ForCausalLM",
        by_rows(table, LLAMA_ROWS),
        lambda sizes, architecture: {**common(sizes, architecture), **more},
        from_config,
        lambda sizes, architecture: refuses(sizes, architecture, *settings),
    )
    return Family(
        name,
        table,
        "megatron_ucp/families/llama.py",
        pipe.names,
        pipe.layers,
        builder=builder,
        defaults=DEFAULTS,
        hugging_face=twin,
    )


def without_window(config: Config) -> Config:
    """The config of a Mistral. Raises UnsupportedError for a sliding window, which the class has
    where nothing says otherwise."""
    check_config({"sliding_window": 4096, **config}, {"sliding_window": (None,)})
    return config


def without_used_window(config: Config) -> Config:
    """The config of any Qwen: a window that is not used may be in it. Raises UnsupportedError."""
    check_config(config, {"use_sliding_window": (False,)})
    return {**config, "sliding_window": None}


LLAMA = llama_like("LLaMA", {"attention_bias": False, "mlp_bias": False})
MISTRAL = llama_like("Mistral", {"sliding_window": None}, without_window)
QWEN2 = llama_like("Qwen2", {"use_sliding_window": False}, without_used_window, "qkv_biases")
QWEN3 = llama_like(
    "Qwen3",
    {"attention_bias": False, "use_sliding_window": False},
    without_used_window,
    "qk_norms",
)
