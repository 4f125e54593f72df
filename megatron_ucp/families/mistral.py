"""Mistral on megatron-core's local layer spec: a LLaMA. A sliding window is not supported."""

from typing import Any

from megatron_ucp.families import llama, pipe
from megatron_ucp.families.architecture import Architecture
from megatron_ucp.families.base import Builder, Declared, Family, Sizes
from megatron_ucp.families.hugging_face import (
    Config,
    HuggingFace,
    check_config,
    common,
    read_architecture,
    read_common,
    refused_settings,
    refused_sizes,
)


def table(sizes: Sizes) -> dict[str, Declared]:
    """Every parameter of the model. Raises UsageError for sizes that are no Mistral."""
    return llama.checked(sizes, "Mistral")


def config(sizes: Sizes, architecture: Architecture) -> dict[str, Any]:
    """config.json of Mistral."""
    return {**common(sizes, architecture), "sliding_window": None}


def refuses(sizes: Sizes, architecture: Architecture) -> list[str]:
    """What MistralForCausalLM does not have."""
    return refused_settings(architecture, ("silu",)) + refused_sizes(sizes)


def read(found: Config) -> tuple[Sizes, Architecture]:
    """Sizes and architecture of a Mistral. Raises UnsupportedError for what is not computed
    here."""
    check_config({"sliding_window": 4096, **found}, {"sliding_window": (None,)})  # the class's own
    sizes = Sizes(**read_common(found, int(found["vocab_size"])))
    return sizes, read_architecture(found, 1e-6, 10000.0)


FAMILY = Family(
    "mistral",
    table,
    "megatron_ucp/families/mistral.py",
    pipe.names,
    pipe.layers,
    builder=Builder("RMSNorm", gated=True, biases=False, position_embedding_type="rope"),
    defaults=llama.FAMILY.defaults,
    hugging_face=HuggingFace("mistral", "MistralForCausalLM", llama.tensors, config, read, refuses),
)
