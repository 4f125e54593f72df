"""Qwen3 on megatron-core's local layer spec: a LLaMA that normalises queries and
keys, head by head."""

from megatron_ucp.families import llama, qwen2

FAMILY = llama.alike(
    "Qwen3",
    {"attention_bias": False, "use_sliding_window": False},
    qwen2.accepted,
    {"qk_norms": "qk_layernorm"},
)
