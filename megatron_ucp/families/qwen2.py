"""Qwen2 on megatron-core's local layer spec: a LLaMA with biases on queries, keys and values."""

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
    """Every parameter of the model. Raises UsageError for sizes that are no Qwen2."""
    return llama.checked(sizes, "Qwen2", qkv_biases=True)


def config(sizes: Sizes, architecture: Architecture) -> dict[str, Any]:
    """config.json of Qwen2."""
    return {**common(sizes, architecture), "use_sliding_window": False}


def refuses(sizes: Sizes, architecture: Architecture) -> list[str]:
    """What Qwen2ForCausalLM does not have."""
    return refused_settings(architecture, ("silu",), ("add_qkv_bias",)) + refused_sizes(sizes)


def read(found: Config) -> tuple[Sizes, Architecture]:
    """Sizes and architecture of a Qwen2. Raises UnsupportedError for what is not computed
    here."""
    return read_qwen(found, "add_qkv_bias", qkv_biases=True)


def read_qwen(found: Config, setting: str, **attention: bool) -> tuple[Sizes, Architecture]:
    """As `read`, for any Qwen: `setting` is megatron-core's for what its attention has besides,
    `attention` that of Sizes. A window that is not used may be in the config."""
    check_config(found, {"use_sliding_window": (False,)})
    sizes = Sizes(**read_common(found, int(found["vocab_size"]), **attention))
    without_window = {**found, "sliding_window": None}
    return sizes, read_architecture(without_window, 1e-6, 10000.0, odd={setting: True})


FAMILY = Family(
    "qwen2",
    table,
    "megatron_ucp/families/qwen2.py",
    pipe.names,
    pipe.layers,
    builder=Builder(
        "RMSNorm", gated=True, biases=False, position_embedding_type="rope", qkv_biases=True
    ),
    defaults=llama.FAMILY.defaults,
    hugging_face=HuggingFace("qwen2", "Qwen2ForCausalLM", llama.tensors, config, read, refuses),
)
