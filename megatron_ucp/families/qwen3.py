"""Qwen3 on megatron-core's local layer spec: a LLaMA that normalises queries and
keys, head by head."""

from typing import Any

from megatron_ucp.families import llama, pipe, qwen2
from megatron_ucp.families.architecture import Architecture
from megatron_ucp.families.base import Builder, Declared, Family, Sizes
from megatron_ucp.families.hugging_face import (
    Config,
    HuggingFace,
    common,
    refused_settings,
    refused_sizes,
)


def table(sizes: Sizes) -> dict[str, Declared]:
    """Every parameter of the model. Raises UsageError for sizes that are no Qwen3."""
    return llama.checked(sizes, "Qwen3", qk_norms=True)


def config(sizes: Sizes, architecture: Architecture) -> dict[str, Any]:
    """config.json of Qwen3."""
    return {**common(sizes, architecture), "attention_bias": False, "use_sliding_window": False}


def refuses(sizes: Sizes, architecture: Architecture) -> list[str]:
    """What Qwen3ForCausalLM does not have."""
    return refused_settings(architecture, ("silu",), ("qk_layernorm",)) + refused_sizes(sizes)


def read(found: Config) -> tuple[Sizes, Architecture]:
    """Sizes and architecture of a Qwen3. Raises UnsupportedError for what is not computed
    here."""
    return qwen2.read_qwen(found, "qk_layernorm", qk_norms=True)


FAMILY = Family(
    "qwen3",
    table,
    "megatron_ucp/families/qwen3.py",
    pipe.names,
    pipe.layers,
    builder=Builder(
        "RMSNorm", gated=True, biases=False, position_embedding_type="rope", qk_norms=True
    ),
    defaults=llama.FAMILY.defaults,
    hugging_face=HuggingFace("qwen3", "Qwen3ForCausalLM", llama.tensors, config, read, refuses),
)
