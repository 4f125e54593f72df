"""The parameters of one transformer layer on megatron-core's local layer spec."""

from dataclasses import replace

from megatron_ucp.families.base import Declared, Sizes, bias, column, gated, norm, row, whole


def attention_and_mlp(sizes: Sizes, prefix: str) -> dict[str, Declared]:
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
    return {prefix + name: declared for name, declared in out.items()}
