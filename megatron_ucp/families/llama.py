"""LLaMA on megatron-core's local layer spec: grouped queries, SwiGLU (gate above up), RMSNorm,
RoPE, no biases."""

from typing import Any

from megatron_ucp.core.shares import Share
from megatron_ucp.errors import UsageError
from megatron_ucp.families import gpt, pipe
from megatron_ucp.families.architecture import Architecture
from megatron_ucp.families.base import Builder, Declared, Family, Sizes
from megatron_ucp.families.hugging_face import (
    Config,
    HuggingFace,
    attention,
    common,
    gated_halves,
    read_architecture,
    read_common,
    refused_settings,
    refused_sizes,
    with_layers,
)


def table(sizes: Sizes) -> dict[str, Declared]:
    """Every parameter of the model. Raises UsageError for sizes that are no LLaMA."""
    return checked(sizes, "LLaMA")


def checked(
    sizes: Sizes, name: str, qkv_biases: bool = False, qk_norms: bool = False
) -> dict[str, Declared]:
    """Every parameter of a model that is a LLaMA but for biases and norms of its attention. Raises
    UsageError for sizes that are none."""
    own = (sizes.qkv_biases, sizes.qk_norms) == (qkv_biases, qk_norms)
    if sizes.biases or sizes.norm_biases or sizes.positions or not sizes.gated or not own:
        raise UsageError(
            f"these sizes are no {name}",
            expected=f"a gated MLP, no biases, no learned positions, qkv_biases={qkv_biases}, "
            f"qk_norms={qk_norms}",
            found=str(sizes),
            fix="give the family that the model was built with",
        )
    return gpt.table(sizes)


# ------------------------------------------------ Llama of Hugging Face


def tensors(sizes: Sizes) -> dict[str, Share]:
    """What each tensor of LlamaForCausalLM holds. No row of q or k changes its place: both sides
    rotate halves."""
    return with_layers(sizes, lambda _, prefix, canonical: layer(sizes, prefix, canonical))


def layer(sizes: Sizes, prefix: str, canonical: str) -> dict[str, Share]:
    """Attention and gated MLP."""
    mlp, names = f"{canonical}mlp.linear_fc", ("gate_proj.weight", "up_proj.weight")
    return {
        **attention(sizes, f"{prefix}self_attn.", f"{canonical}self_attention."),
        **gated_halves(f"{prefix}mlp.", f"{mlp}1.weight", names, sizes.ffn, sizes.hidden),
        f"{prefix}mlp.down_proj.weight": Share(f"{mlp}2.weight"),
    }


def config(sizes: Sizes, architecture: Architecture) -> dict[str, Any]:
    """config.json of Llama."""
    return {**common(sizes, architecture), "attention_bias": False, "mlp_bias": False}


def refuses(sizes: Sizes, architecture: Architecture) -> list[str]:
    """What LlamaForCausalLM does not have."""
    return refused_settings(architecture, ("silu",)) + refused_sizes(sizes)


def read(found: Config) -> tuple[Sizes, Architecture]:
    """Sizes and architecture of a Llama. Raises UnsupportedError for what is not computed here."""
    sizes = Sizes(**read_common(found, int(found["vocab_size"])))
    return sizes, read_architecture(found, 1e-6, 10000.0)


FAMILY = Family(
    "llama",
    table,
    "megatron_ucp/families/llama.py",
    pipe.names,
    pipe.layers,
    builder=Builder("RMSNorm", gated=True, biases=False, position_embedding_type="rope"),
    defaults={
        "untie_embeddings_and_output_weights": True,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
    },
    hugging_face=HuggingFace("llama", "LlamaForCausalLM", tensors, config, read, refuses),
)
