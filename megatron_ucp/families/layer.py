"""The parameters of a transformer on megatron-core's local layer spec."""

from collections.abc import Callable
from dataclasses import replace

from megatron_ucp.families.base import (
    Declared,
    Sizes,
    bias,
    column,
    gated,
    norm,
    row,
    vocabulary,
    whole,
)


def transformer(sizes: Sizes, layer: Callable[[int], dict[str, Declared]]) -> dict[str, Declared]:
    """Every parameter of a model; `layer(number)` gives those of a layer."""
    out = {
        "embedding.word_embeddings.weight": vocabulary(sizes, sizes.hidden),
        "decoder.final_layernorm.weight": norm(sizes.hidden),
    }
    if sizes.positions:
        out["embedding.position_embeddings.weight"] = whole(sizes.positions, sizes.hidden)
    if sizes.norm_biases:
        out["decoder.final_layernorm.bias"] = bias(whole(sizes.hidden))
    if not sizes.tied:
        out["output_layer.weight"] = vocabulary(sizes, sizes.hidden)
    for number in range(sizes.layers):
        rows = layer(number)
        out |= {f"decoder.layers.{number}.{name}": declared for name, declared in rows.items()}
    return out


def attention_and_mlp(sizes: Sizes) -> dict[str, Declared]:
    """One transformer layer; biases, gate and norm biases as the sizes say."""
    out = {
        "input_layernorm.weight": norm(sizes.hidden),
        "self_attention.linear_qkv.weight": column(sizes.qkv, sizes.hidden),
        "self_attention.linear_proj.weight": row(sizes.hidden, sizes.heads * sizes.head_dim),
        "pre_mlp_layernorm.weight": norm(sizes.hidden),
        "mlp.linear_fc1.weight": (gated if sizes.gated else column)(sizes.ffn, sizes.hidden),
        "mlp.linear_fc2.weight": row(sizes.hidden, sizes.ffn),
    }
    if sizes.norm_biases:
        out |= {
            "input_layernorm.bias": bias(whole(sizes.hidden)),
            "pre_mlp_layernorm.bias": bias(whole(sizes.hidden)),
        }
    if sizes.biases or sizes.qkv_biases:
        out["self_attention.linear_qkv.bias"] = bias(column(sizes.qkv))
    if sizes.qk_norms:  # of its own heads alone a rank computes the gradient
        one = replace(norm(sizes.head_dim), summed=True)
        out |= {f"self_attention.{name}_layernorm.weight": one for name in ("q", "k")}
    if sizes.biases:
        out |= {
            "self_attention.linear_proj.bias": bias(whole(sizes.hidden)),
            "mlp.linear_fc1.bias": bias((gated if sizes.gated else column)(sizes.ffn)),
            "mlp.linear_fc2.bias": bias(whole(sizes.hidden)),
        }
    return out
