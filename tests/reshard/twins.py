"""Models of each family on paper, and what their Hugging Face twins must hold, put together by
plain torch: none of it uses the package's tables."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from megatron_ucp.core.manifest import RECORDED
from megatron_ucp.families.deepseek_v3 import DeepSeekSizes
from megatron_ucp.families.family import Sizes
from megatron_ucp.families.mixtral import MixtralSizes
from megatron_ucp.families.settings import Architecture
from tests.reshard import paper

ODD = {"vocab": 48, "true_vocab": 45}  # three rows of padding
LLAMA = Sizes(2, 16, 4, 2, 4, 24, **ODD, gated=True, biases=False, norm_biases=False)
GPT = Sizes(2, 16, 4, 4, 4, 24, **ODD, positions=8, tied=True)
MIXTRAL = MixtralSizes(**asdict(LLAMA), experts=4, expert_ffn=8)
QWEN2, QWEN3 = replace(LLAMA, qkv_biases=True), replace(LLAMA, qk_norms=True)
QWEN3_MOE = MixtralSizes(**asdict(QWEN3), experts=4, expert_ffn=8, every=2)
DEEPSEEK = DeepSeekSizes(
    **{**asdict(QWEN3), "groups": 4, "head_dim": 6},
    **{"experts": 4, "expert_ffn": 8, "shared_ffn": 16, "leading": 1, "predictions": 1},
    **{"query_rank": 6, "rank": 8, "plain": 4, "rotary": 2, "value": 4},
)
GPT_OSS = MixtralSizes(**{**asdict(LLAMA), "biases": True}, experts=4, expert_ffn=8)
SIZES: dict[str, Sizes] = {
    **{"gpt": GPT, "llama": LLAMA, "mixtral": MIXTRAL},
    **{"mistral": LLAMA, "qwen2": QWEN2, "qwen3": QWEN3, "qwen3_moe": QWEN3_MOE},
    "deepseek_v3": DEEPSEEK,
    "gpt_oss": GPT_OSS,
}
EXPERT_NAMES = {
    "mixtral": ("w1", "w3", "w2"),
    "qwen3_moe": ("gate_proj", "up_proj", "down_proj"),
    "deepseek_v3": ("gate_proj", "up_proj", "down_proj"),
}
ARCHITECTURES = {
    "mistral": Architecture(positions=32, activation="silu"),
    "qwen2": Architecture(positions=32, activation="silu", odd={"add_qkv_bias": True}),
    "qwen3": Architecture(positions=32, activation="silu", odd={"qk_layernorm": True}),
    "qwen3_moe": Architecture(
        positions=32, activation="silu", topk=2, odd={"qk_layernorm": True, "moe_layer_freq": 2}
    ),
    "deepseek_v3": Architecture(
        positions=32,
        norm_epsilon=1e-6,
        activation="silu",
        topk=2,
        odd={
            **{"multi_latent_attention": True, "qk_layernorm": True, "mtp_num_layers": 1},
            **{"moe_layer_freq": "[0, 1]", "moe_shared_expert_intermediate_size": 16},
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_router_topk_scaling_factor": 2.5,
        },
    ),
    "gpt_oss": Architecture(
        positions=32,
        activation="quick_gelu",
        rotary_base=150000.0,
        topk=2,
        odd={
            **{"softmax_type": "learnable", "glu_linear_offset": 1.0},
            **{"activation_func_clamp_value": 7.0, "window_size": "(3, 0)"},
            "window_attn_skip_freq": 2,
        },
    ),
    "gpt": Architecture(positions=8),
    "llama": Architecture(positions=32, activation="silu", rotary_base=5e5),
    "mixtral": Architecture(positions=32, activation="silu", topk=2),
}


def model(
    family: str, sizes: Sizes | None = None, dtype: str = "bfloat16", **architecture: Any
) -> paper.Model:
    """A model whose masters all differ, and whose manifest says what it computes."""
    sizes = sizes or SIZES[family]
    table = paper.find_family(family).table(sizes)
    ordered = sorted(table, key=lambda name: paper.position(name, sizes.layers))
    buffers = [name for name in ordered if table[name].buffer]
    kinds, dtypes = dict.fromkeys(buffers, "buffer"), dict.fromkeys(buffers, "float32")
    found = paper.plain_model({name: table[name].shape for name in ordered}, dtype, kinds, dtypes)
    says = {
        "sizes": asdict(sizes),
        "architecture": asdict(replace(ARCHITECTURES[family], **architecture)),
    }
    return replace(found, family=family, sizes=sizes, run={RECORDED: says})


def split_qkv(fused: torch.Tensor, sizes: Sizes) -> list[torch.Tensor]:
    """linear_qkv as queries, keys and values (the reference formula of megatron-core's layout)."""
    r, d = sizes.heads // sizes.groups, sizes.head_dim
    by_group = fused.view(sizes.groups, (r + 2) * d, *fused.shape[1:])
    parts = by_group[:, : r * d], by_group[:, r * d : (r + 1) * d], by_group[:, (r + 1) * d :]
    return [part.reshape(-1, *fused.shape[1:]) for part in parts]


def expected(model: paper.Model) -> dict[str, torch.Tensor]:
    """Every tensor of the twin, in float32."""
    sizes, out = model.sizes, dict[str, torch.Tensor]()
    own = {"gpt": _gpt, "deepseek_v3": _deepseek, "gpt_oss": _gpt_oss}
    make = own.get(model.family, _llama)
    rows = sizes.true_vocab
    words = "transformer.wte.weight" if model.family == "gpt" else "model.embed_tokens.weight"
    out[words] = model.truth("embedding.word_embeddings.weight")[:rows]
    if not sizes.tied:
        out["lm_head.weight"] = model.truth("output_layer.weight")[:rows]
    return {**out, **make(model, sizes)}


def _gpt(model: paper.Model, sizes: Sizes) -> dict[str, torch.Tensor]:
    out = {"transformer.wpe.weight": model.truth("embedding.position_embeddings.weight")}
    for part in ("weight", "bias"):
        out[f"transformer.ln_f.{part}"] = model.truth(f"decoder.final_layernorm.{part}")
        for layer in range(sizes.layers):
            ours, theirs = f"decoder.layers.{layer}.", f"transformer.h.{layer}."
            out[f"{theirs}ln_1.{part}"] = model.truth(f"{ours}input_layernorm.{part}")
            out[f"{theirs}ln_2.{part}"] = model.truth(f"{ours}pre_mlp_layernorm.{part}")
            fused = model.truth(f"{ours}self_attention.linear_qkv.{part}")
            rows = {
                "attn.c_attn": torch.cat(split_qkv(fused, sizes)),
                "attn.c_proj": model.truth(f"{ours}self_attention.linear_proj.{part}"),
                "mlp.c_fc": model.truth(f"{ours}mlp.linear_fc1.{part}"),
                "mlp.c_proj": model.truth(f"{ours}mlp.linear_fc2.{part}"),
            }
            for name, value in rows.items():
                out[f"{theirs}{name}.{part}"] = value.T if value.dim() == 2 else value
    return out


def _llama(model: paper.Model, sizes: Sizes) -> dict[str, torch.Tensor]:
    out = {"model.norm.weight": model.truth("decoder.final_layernorm.weight")}
    for layer in range(sizes.layers):
        ours, theirs = f"decoder.layers.{layer}.", f"model.layers.{layer}."
        fused = model.truth(f"{ours}self_attention.linear_qkv.weight")
        for name, value in zip("qkv", split_qkv(fused, sizes), strict=True):
            out[f"{theirs}self_attn.{name}_proj.weight"] = value
        out |= _qwen(model, sizes, f"{ours}self_attention.", f"{theirs}self_attn.")
        proj = model.truth(f"{ours}self_attention.linear_proj.weight")
        out[f"{theirs}self_attn.o_proj.weight"] = proj
        for one, other in {
            "input_layernorm": "input_layernorm",
            "pre_mlp_layernorm": "post_attention_layernorm",
        }.items():
            out[f"{theirs}{other}.weight"] = model.truth(f"{ours}{one}.weight")
        if isinstance(sizes, MixtralSizes) and not layer % sizes.every:
            module = "block_sparse_moe." if model.family == "mixtral" else "mlp."
            out |= _experts(model, sizes, f"{ours}mlp.", f"{theirs}{module}")
            continue
        gate, up = model.truth(f"{ours}mlp.linear_fc1.weight").chunk(2)
        out[f"{theirs}mlp.gate_proj.weight"], out[f"{theirs}mlp.up_proj.weight"] = gate, up
        out[f"{theirs}mlp.down_proj.weight"] = model.truth(f"{ours}mlp.linear_fc2.weight")
    return out


def _qwen(model: paper.Model, sizes: Sizes, ours: str, theirs: str) -> dict[str, torch.Tensor]:
    out: dict[str, torch.Tensor] = {}
    if sizes.qkv_biases:
        fused = model.truth(f"{ours}linear_qkv.bias")
        for name, value in zip("qkv", split_qkv(fused, sizes), strict=True):
            out[f"{theirs}{name}_proj.bias"] = value
    for name in "qk" if sizes.qk_norms else "":
        out[f"{theirs}{name}_norm.weight"] = model.truth(f"{ours}{name}_layernorm.weight")
    return out


def _experts(
    model: paper.Model, sizes: MixtralSizes, ours: str, theirs: str
) -> dict[str, torch.Tensor]:
    out = {f"{theirs}gate.weight": model.truth(f"{ours}router.weight")}
    for expert in range(sizes.experts):
        one = f"{ours}experts.local_experts.{expert}.linear_fc"
        gate, up = model.truth(f"{one}1.weight").chunk(2)
        down = model.truth(f"{one}2.weight")
        for name, value in zip(EXPERT_NAMES[model.family], (gate, up, down), strict=True):
            out[f"{theirs}experts.{expert}.{name}.weight"] = value
    return out


def _deepseek(model: paper.Model, sizes: DeepSeekSizes) -> dict[str, torch.Tensor]:
    out = {"model.norm.weight": model.truth("decoder.final_layernorm.weight")}
    for layer in range(sizes.layers + sizes.predictions):
        ours, theirs = f"decoder.layers.{layer}.", f"model.layers.{layer}."
        if layer == sizes.layers:
            out |= _prediction(model, "mtp.layers.0.", theirs, sizes.true_vocab)
            ours = "mtp.layers.0.transformer_layer."
        for part in ("q", "kv"):
            fused = f"linear_{part}_up_proj.layer_norm_weight"
            own = fused if sizes.fused else f"{part}_layernorm.weight"
            value = model.truth(f"{ours}self_attention.{own}")
            out[f"{theirs}self_attn.{part}_a_layernorm.weight"] = value
        for one, other in {
            "input_layernorm": "input_layernorm",
            "pre_mlp_layernorm": "post_attention_layernorm",
            "self_attention.linear_q_down_proj": "self_attn.q_a_proj",
            "self_attention.linear_q_up_proj": "self_attn.q_b_proj",
            "self_attention.linear_kv_down_proj": "self_attn.kv_a_proj_with_mqa",
            "self_attention.linear_kv_up_proj": "self_attn.kv_b_proj",
            "self_attention.linear_proj": "self_attn.o_proj",
        }.items():
            out[f"{theirs}{other}.weight"] = model.truth(f"{ours}{one}.weight")
        if not layer:
            out |= _mlp(model, f"{ours}mlp.", f"{theirs}mlp.")
            continue
        bias = model.truth(f"{ours}mlp.router.expert_bias")
        out[f"{theirs}mlp.gate.e_score_correction_bias"] = bias
        out |= _experts(model, sizes, f"{ours}mlp.", f"{theirs}mlp.")
        out |= _mlp(model, f"{ours}mlp.shared_experts.", f"{theirs}mlp.shared_experts.")
    return out


def _mlp(model: paper.Model, ours: str, theirs: str) -> dict[str, torch.Tensor]:
    gate, up = model.truth(f"{ours}linear_fc1.weight").chunk(2)
    down = model.truth(f"{ours}linear_fc2.weight")
    parts = {"gate_proj": gate, "up_proj": up, "down_proj": down}
    return {f"{theirs}{name}.weight": value for name, value in parts.items()}


def _prediction(model: paper.Model, ours: str, theirs: str, rows: int) -> dict[str, torch.Tensor]:
    out = {
        f"{theirs}{name}.weight": model.truth(f"{ours}{name}.weight")
        for name in ("enorm", "hnorm", "eh_proj")
    }
    out[f"{theirs}shared_head.norm.weight"] = model.truth(f"{ours}final_layernorm.weight")
    copies = {
        "embed_tokens": "embedding.word_embeddings",
        "shared_head.head": "output_layer",
    }
    for name, param in copies.items():
        out[f"{theirs}{name}.weight"] = model.truth(f"{param}.weight")[:rows]
    return out


def _gpt_oss(model: paper.Model, sizes: MixtralSizes) -> dict[str, torch.Tensor]:
    out = {"model.norm.weight": model.truth("decoder.final_layernorm.weight")}
    for layer in range(sizes.layers):
        ours, theirs = f"decoder.layers.{layer}.", f"model.layers.{layer}."
        for one, other in {
            "input_layernorm.weight": "input_layernorm.weight",
            "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
            "self_attention.core_attention.softmax_offset": "self_attn.sinks",
        }.items():
            out[theirs + other] = model.truth(ours + one)
        for part in ("weight", "bias"):
            fused = model.truth(f"{ours}self_attention.linear_qkv.{part}")
            for name, value in zip("qkv", split_qkv(fused, sizes), strict=True):
                out[f"{theirs}self_attn.{name}_proj.{part}"] = value
            proj = model.truth(f"{ours}self_attention.linear_proj.{part}")
            out[f"{theirs}self_attn.o_proj.{part}"] = proj
            out[f"{theirs}mlp.router.{part}"] = model.truth(f"{ours}mlp.router.{part}")
        out |= _stacks(model, sizes, f"{ours}mlp.experts.", f"{theirs}mlp.experts.")
    return out


def _stacks(
    model: paper.Model, sizes: MixtralSizes, ours: str, theirs: str
) -> dict[str, torch.Tensor]:
    """All experts in a tensor, transposed; gate, up, gate, up ..."""
    held: dict[str, list[torch.Tensor]] = {}
    for expert in range(sizes.experts):
        one = f"{ours}local_experts.{expert}.linear_fc"
        for part, end in (("weight", ""), ("bias", "_bias")):
            both = torch.stack(model.truth(f"{one}1.{part}").chunk(2), 1).flatten(0, 1)
            held.setdefault(f"gate_up_proj{end}", []).append(both.t())
            held.setdefault(f"down_proj{end}", []).append(model.truth(f"{one}2.{part}").t())
    return {theirs + name: torch.stack(tensors) for name, tensors in held.items()}


COPIES = ("2.embed_tokens.weight", "2.shared_head.head.weight")  # ends of their names


def in_dtype(wanted: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """As an export writes them: buffers stay in fp32."""
    kept = ".e_score_correction_bias"
    return {n: t if n.endswith(kept) else t.to(dtype) for n, t in wanted.items()}


def read(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a folder, by the safetensors library."""
    from safetensors.torch import load_file

    out: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        out |= load_file(path)
    return out


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> list[str]:
    """The tensors that are not equal in name, dtype, shape and bits."""
    names = {*found, *wanted}
    return sorted(
        name
        for name in names
        if name not in found or name not in wanted or not paper.same(found[name], wanted[name])
    )
