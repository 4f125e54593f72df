"""Qwen2 on megatron-core's local layer spec: a LLaMA with biases on queries, keys and values."""

from megatron_ucp.families import llama
from megatron_ucp.families.twin import Config, check_config


def accepted(found: Config) -> Config:
    """The config of any Qwen: a window that is not used may be in it. Raises UnsupportedError."""
    check_config(found, {"use_sliding_window": (False,)})
    return {**found, "sliding_window": None}


FAMILY = llama.alike(
    "Qwen2", {"use_sliding_window": False}, accepted, {"qkv_biases": "add_qkv_bias"}
)
