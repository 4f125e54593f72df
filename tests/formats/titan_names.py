"""torchtitan's tensors put together from those of transformers, by plain torch: none of it uses the
package's tables. As the adapters of torchtitan 0.3.0 have it."""

import re
from collections.abc import Mapping

import torch

_TOP = {
    "model.embed_tokens.weight": "tok_embeddings.weight",
    "model.norm.weight": "norm.weight",
    "lm_head.weight": "lm_head.weight",
}
_ENDS = [
    (r"input_layernorm", "attention_norm"),
    (r"post_attention_layernorm", "ffn_norm"),
    (r"self_attn\.(q|k|v)_proj", r"attention.qkv_linear.w\1"),
    (r"self_attn\.o_proj", "attention.wo"),
    (r"self_attn\.sinks", "attention.sinks"),
    (r"self_attn\.q_a_proj", "attention.wq_a"),
    (r"self_attn\.q_a_layernorm", "attention.q_norm"),
    (r"self_attn\.q_b_proj", "attention.wq_b"),
    (r"self_attn\.kv_a_proj_with_mqa", "attention.wkv_a"),
    (r"self_attn\.kv_a_layernorm", "attention.kv_norm"),
    (r"self_attn\.kv_b_proj", "attention.wkv_b"),
    (r"self_attn\.(q|k)_norm", r"attention.\1_norm"),
    (r"mlp\.shared_experts\.gate_proj", "moe.shared_experts.w1"),
    (r"mlp\.shared_experts\.up_proj", "moe.shared_experts.w3"),
    (r"mlp\.shared_experts\.down_proj", "moe.shared_experts.w2"),
    (r"mlp\.gate_proj", "feed_forward.w1"),
    (r"mlp\.up_proj", "feed_forward.w3"),
    (r"mlp\.down_proj", "feed_forward.w2"),
    (r"mlp\.gate\.e_score_correction_bias", "moe.expert_bias_E"),
    (r"mlp\.(gate|router)", "moe.router.gate"),
]
_EXPERT = {"gate_proj": "w1_EFD", "up_proj": "w3_EFD", "down_proj": "w2_EDF"}
_STACK = {
    "gate_up_proj": "mlp1_weight_EGD",
    "gate_up_proj_bias": "mlp1_bias_EG",
    "down_proj": "mlp2_weight_EDF",
    "down_proj_bias": "mlp2_bias_ED",
}


def turned(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Halves of each head, row by row in turns."""
    size = rows.shape[0] // heads
    halves = rows.reshape(heads, 2, size // 2, -1)
    return halves.transpose(1, 2).reshape(rows.shape)


def to_torchtitan(
    found: Mapping[str, torch.Tensor], kind: str, heads: int, groups: int
) -> dict[str, torch.Tensor]:
    """As a save has the weights."""
    out: dict[str, torch.Tensor] = {}
    experts: dict[str, dict[int, torch.Tensor]] = {}
    for name, value in found.items():
        if name in _TOP:
            out[_TOP[name]] = value
            continue
        number, end = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name).groups()  # type: ignore
        first = f"layers.{number}."
        if one := re.fullmatch(r"mlp\.experts\.(\d+)\.(\w+)\.weight", end):
            stack = f"{first}moe.routed_experts.inner_experts.{_EXPERT[one[2]]}"
            experts.setdefault(stack, {})[int(one[1])] = value
        elif one := re.fullmatch(r"mlp\.experts\.(\w+)", end):
            if one[1] in ("gate_up_proj", "down_proj"):
                value = value.transpose(1, 2)
            out[f"{first}moe.routed_experts.inner_experts.{_STACK[one[1]]}"] = value
        else:
            for old, new in _ENDS:
                if re.match(rf"{old}(\.|$)", end):
                    end = re.sub(rf"^{old}", new, end)
                    break
            if kind == "llama3" and end.endswith(("wq.weight", "wk.weight")):
                value = turned(value, heads if ".wq." in end else groups)
            out[first + end] = value
    for stack, by_number in experts.items():
        out[stack] = torch.stack([by_number[number] for number in sorted(by_number)])
    return out


def fused(found: Mapping[str, torch.Tensor], groups: int) -> dict[str, torch.Tensor]:
    """As the optimizer has the states of such weights: queries, keys and values in one."""
    out = dict(found)
    for name in [name for name in found if name.endswith((".wq.weight", ".wq.bias"))]:
        if ".qkv_linear." not in name:
            continue
        parts = [out.pop(name.replace(".wq.", f".w{which}.")) for which in "qkv"]
        cut = [part.reshape(groups, -1, *part.shape[1:]) for part in parts]
        out[name.replace(".wq.", ".wqkv.")] = torch.cat(cut, 1).flatten(0, 1)
    return out
