"""DeepSeek-V3 and what is built like it (Kimi-K2, Moonlight, GLM-4.7-Flash) on megatron-core's
modules: latent attention with norms on the latents; a few layers with an MLP, then layers with
experts, one of them for every token; routers with sigmoid scores and a bias, which is a buffer; and
layers that predict further tokens.

Somebody else builds it: megatron-core's latent attention needs Transformer Engine's core attention.
Transformer Engine's layers have the down projections whole on every rank, and the norms of latents
as a part of the up projections (`fused`); megatron-core's own cut the ones (`cut_latents`), and
have the others by themselves.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

from megatron_ucp.core.layout import Chunks
from megatron_ucp.core.tensor_parts import TensorPart
from megatron_ucp.errors import UnsupportedError, UsageError
from megatron_ucp.families import llama, mixtral
from megatron_ucp.families.family import (
    Config,
    Declared,
    Divided,
    Family,
    HuggingFace,
    column,
    measured,
    no_such_sizes,
    norm,
    row,
    transformer,
    whole,
)
from megatron_ucp.families.family import dense as divided_of_dense
from megatron_ucp.families.mixtral import ROUTER, SHARED, SHARED_WIDTH, MixtralSizes
from megatron_ucp.families.settings import (
    FREQUENCY,
    GROUPS,
    GROUPS_OF_TOKEN,
    LATENT,
    SCALED_LATENT,
    SCORES,
    Architecture,
)
from megatron_ucp.families.twin import (
    MLP_ROWS,
    NORM_ROWS,
    ROPE,
    TOP,
    Rows,
    block,
    by_rows,
    check_config,
    common,
    gate_and_up,
    read_architecture,
    read_common,
    rope_of,
    same,
)

BIAS = f"{ROUTER}expert_bias"
SCALING, HAS_BIAS = "moe_router_topk_scaling_factor", "moe_router_enable_expert_bias"
PREDICTIONS, LATENT_NORMS = "mtp_num_layers", "qk_layernorm"
_NORM_OF_LATENTS = 1e-6  # the epsilon that transformers has there, whatever its config says


@dataclass(frozen=True, kw_only=True)
class DeepSeekSizes(MixtralSizes):
    """Queries come out of `query_rank` latents (0: out of the hidden states), keys and values out
    of `rank`. A head has `plain` dims without positions and `rotary` ones with, and values of the
    width `value`. The first `leading` layers have an MLP; `predictions` layers predict further
    tokens."""

    query_rank: int = 0
    rank: int
    plain: int
    rotary: int
    value: int
    leading: int = 0
    predictions: int = 0
    cut_latents: bool = False
    fused: bool = False
    gated: bool = True
    biases: bool = False
    norm_biases: bool = False

    def has_experts(self, number: int) -> bool:
        """Whether a layer has experts."""
        return number >= self.leading


def table(sizes: DeepSeekSizes) -> dict[str, Declared]:
    """Every parameter of the model, and the routers' buffers. Raises UsageError for sizes of
    none."""
    if sizes.experts < 1 or sizes.leading > sizes.layers or sizes.biases:
        expected = "at least declared expert, no biases, no more leading layers than layers"
        raise no_such_sizes("DeepSeek-V3", expected, sizes)
    out = transformer(sizes, lambda number: layer(sizes, number))
    for number in range(sizes.predictions):
        prefix = f"mtp.layers.{number}."
        out |= {f"{prefix}{name}": declared for name, declared in _prediction(sizes).items()}
        inner = layer(sizes, sizes.layers)  # as those at the end of the decoder
        out |= {f"{prefix}transformer_layer.{name}": declared for name, declared in inner.items()}
    return out


def layer(sizes: DeepSeekSizes, number: int) -> dict[str, Declared]:
    """A transformer layer, with experts or without."""
    rows = {
        name: declared
        for name, declared in mixtral.layer(sizes, number).items()
        if not name.startswith("self_attention.")
    }
    if sizes.has_experts(number):
        rows[BIAS] = Declared((sizes.experts,), whole(sizes.experts).layout, buffer=True)
    for name, declared in _latent(sizes).items():
        rows[f"self_attention.{_FUSED.get(name, name) if sizes.fused else name}"] = declared
    return rows


# norms of latents, and their names as a part of the matrix behind them
_FUSED = {
    "q_layernorm.weight": "linear_q_up_proj.layer_norm_weight",
    "kv_layernorm.weight": "linear_kv_up_proj.layer_norm_weight",
}


def fitted(sizes: DeepSeekSizes, names: Collection[str]) -> DeepSeekSizes:
    """The sizes of a model whose parameters have these names."""
    return replace(sizes, fused=_has_fused_norms(names))


def _has_fused_norms(names: Collection[str]) -> bool:
    return any(name.endswith(tuple(_FUSED.values())) for name in names)


def _latent(sizes: DeepSeekSizes) -> dict[str, Declared]:
    """Attention."""
    down = column if sizes.cut_latents else whole
    queries = sizes.heads * (sizes.plain + sizes.rotary)
    out = {
        "linear_kv_down_proj.weight": down(sizes.rank + sizes.rotary, sizes.hidden),
        "kv_layernorm.weight": norm(sizes.rank),
        "linear_kv_up_proj.weight": column(sizes.heads * (sizes.plain + sizes.value), sizes.rank),
        "linear_proj.weight": row(sizes.hidden, sizes.heads * sizes.value),
    }
    if not sizes.query_rank:
        return out | {"linear_q_proj.weight": column(queries, sizes.hidden)}
    return out | {
        "linear_q_down_proj.weight": down(sizes.query_rank, sizes.hidden),
        "q_layernorm.weight": norm(sizes.query_rank),
        "linear_q_up_proj.weight": column(queries, sizes.query_rank),
    }


def _prediction(sizes: DeepSeekSizes) -> dict[str, Declared]:
    """What a layer that predicts a further token has around its transformer layer."""
    return {
        "enorm.weight": norm(sizes.hidden),
        "hnorm.weight": norm(sizes.hidden),
        "eh_proj.weight": column(sizes.hidden, 2 * sizes.hidden),
        "final_layernorm.weight": norm(sizes.hidden),
    }


def divided(sizes: DeepSeekSizes) -> tuple[Divided, ...]:
    """What tensor parallelism cuts."""
    left_out = ("key-value groups", "" if sizes.leading else "ffn_hidden_size")
    parts = [part for part in divided_of_dense(sizes) if part.what not in left_out]
    widths = {
        "the width of the shared expert": sizes.shared_ffn,
        "the hidden size": sizes.hidden if sizes.predictions else 0,
        "latents of queries": sizes.query_rank if sizes.cut_latents else 0,
        "latents of keys and values": sizes.rank + sizes.rotary if sizes.cut_latents else 0,
    }
    return (*parts, *(Divided(what, size) for what, size in widths.items() if size))


def measure(module: Any) -> DeepSeekSizes:
    """From a megatron-core GPTModel with latent attention and experts. Raises UsageError for
    another one."""
    config: Any = getattr(module, "config", None)
    wanted = (LATENT, "num_moe_experts", LATENT_NORMS, HAS_BIAS)
    if missing := [name for name in wanted if not getattr(config, name, None)]:
        raise UsageError(
            "the family deepseek_v3 describes a GPTModel with latent attention, norms on the "
            "latents, and experts with biased routers",
            expected=", ".join(wanted),
            found=f"no {', '.join(missing)}",
            fix="leave the family out: how a model is cut, it says itself",
        )
    common_sizes = vars(measured(module)) | {
        "groups": config.num_attention_heads,
        "head_dim": config.qk_head_dim + config.qk_pos_emb_head_dim,
    }
    return DeepSeekSizes(
        **common_sizes,
        experts=config.num_moe_experts,
        expert_ffn=config.moe_ffn_hidden_size,
        shared_ffn=config.moe_shared_expert_intermediate_size or 0,
        query_rank=config.q_lora_rank or 0,
        rank=config.kv_lora_rank,
        plain=config.qk_head_dim,
        rotary=config.qk_pos_emb_head_dim,
        value=config.v_head_dim,
        leading=_leading(config.moe_layer_freq, config.num_layers),
        predictions=config.mtp_num_layers or 0,
        cut_latents=_cuts_latents(module),
        fused=_has_fused_norms([name for name, _ in module.named_parameters()]),
    )


def _leading(frequency: Any, layers: int) -> int:
    """How many layers with an MLP come before those with experts. Raises UsageError."""
    marks = (
        [not number % frequency for number in range(layers)]
        if isinstance(frequency, int)
        else frequency
    )
    leading = [*map(bool, marks)].index(True) if any(marks) else layers
    if not all(marks[leading:]) or len(marks) != layers:
        raise UsageError(
            "the family deepseek_v3 has layers with an MLP before those with experts alone",
            expected=f"{FREQUENCY} such as [0, 0, 1, 1]",
            found=frequency,
            fix="leave the family out: how a model is cut, it says itself",
        )
    return leading


def _cuts_latents(module: Any) -> bool:
    """Whether the down projections are cut, as in megatron-core's own layers."""
    for name, part in module.named_modules():
        if name.endswith(".linear_kv_down_proj"):
            return bool(getattr(part.weight, "tensor_model_parallel", False))
    return False


# ------------------------------------------------ DeepSeek-V3 of Hugging Face

_ROWS: Rows = {
    **mixtral.rows("mlp.", "gate_proj", "up_proj", "down_proj"),
    **MLP_ROWS,
    **NORM_ROWS,
    "self_attention.linear_q_proj.weight": same("self_attn.q_proj.weight"),
    "self_attention.linear_q_down_proj.weight": same("self_attn.q_a_proj.weight"),
    "self_attention.q_layernorm.weight": same("self_attn.q_a_layernorm.weight"),
    "self_attention.linear_q_up_proj.weight": same("self_attn.q_b_proj.weight"),
    "self_attention.linear_kv_down_proj.weight": same("self_attn.kv_a_proj_with_mqa.weight"),
    "self_attention.kv_layernorm.weight": same("self_attn.kv_a_layernorm.weight"),
    "self_attention.linear_kv_up_proj.weight": same("self_attn.kv_b_proj.weight"),
    f"self_attention.{_FUSED['q_layernorm.weight']}": same("self_attn.q_a_layernorm.weight"),
    f"self_attention.{_FUSED['kv_layernorm.weight']}": same("self_attn.kv_a_layernorm.weight"),
    BIAS: same("mlp.gate.e_score_correction_bias"),
    f"{SHARED}linear_fc1.weight": gate_and_up("mlp.shared_experts."),
    f"{SHARED}linear_fc2.weight": same("mlp.shared_experts.down_proj.weight"),
    "enorm.weight": same("enorm.weight"),
    "hnorm.weight": same("hnorm.weight"),
    "eh_proj.weight": same("eh_proj.weight"),
    "final_layernorm.weight": same("shared_head.norm.weight"),
}
# Copies of the embedding and the head, which programs look for that predict with these layers.
_COPIES = {
    "embed_tokens.weight": "embedding.word_embeddings.weight",
    "shared_head.head.weight": "output_layer.weight",
}
_own_tensors = by_rows(table, _ROWS)


def tensors(sizes: DeepSeekSizes) -> dict[str, TensorPart]:
    """What each tensor of DeepseekV3ForCausalLM holds, and of the layers behind its own."""
    out = _own_tensors(sizes)
    for end, param in _COPIES.items() if sizes.predictions else ():
        rows = block(0, sizes.true_vocab, sizes.hidden)
        layout = Chunks(((rows,),) * (1 + sizes.predictions))
        out[TOP[param]] = TensorPart(param, layout)
        for number in range(sizes.predictions):
            out[f"model.layers.{sizes.layers + number}.{end}"] = TensorPart(
                param, layout, 1 + number
            )
    return out


def to_config(sizes: DeepSeekSizes, architecture: Architecture) -> dict[str, Any]:
    """config.json of DeepSeek-V3."""
    odd, rope = architecture.odd, _rope(architecture)
    return {
        **common(sizes, architecture),
        "attention_bias": False,
        "first_k_dense_replace": sizes.leading,
        "head_dim": sizes.rotary,
        "kv_lora_rank": sizes.rank,
        "moe_intermediate_size": sizes.width,
        "n_group": odd.get(GROUPS, 1),
        "n_routed_experts": sizes.experts,
        "n_shared_experts": sizes.shared_ffn // sizes.width,
        "norm_topk_prob": architecture.topk > 1,
        "num_experts_per_tok": architecture.topk,
        "num_nextn_predict_layers": sizes.predictions,
        "q_lora_rank": sizes.query_rank or None,
        "qk_nope_head_dim": sizes.plain,
        "qk_rope_head_dim": sizes.rotary,
        "rope_interleave": True,
        "rope_parameters": rope,
        "rope_scaling": None if rope["rope_type"] == "default" else rope,
        "routed_scaling_factor": odd.get(SCALING, 1.0),
        "scoring_func": "sigmoid",
        "topk_group": odd.get(GROUPS_OF_TOKEN, 1),
        "topk_method": "noaux_tc",
        "v_head_dim": sizes.value,
    }


# megatron-core's names of what scales the rotary embedding, with those of transformers
_YARN = {**{name: name for name in SCALED_LATENT}, "rotary_scaling_factor": "factor"}


def _rope(architecture: Architecture) -> dict[str, Any]:
    base = {"rope_theta": architecture.rotary_base}
    if architecture.odd.get("rope_type") != "yarn":
        return {**base, "rope_type": "default"}
    scaled = {theirs: architecture.odd[ours] for ours, theirs in _YARN.items()}
    return {**base, "rope_type": "yarn", **scaled}


def refuses(sizes: DeepSeekSizes, architecture: Architecture) -> list[str]:
    """What DeepseekV3ForCausalLM does not have."""
    odd = architecture.odd
    known = [LATENT, LATENT_NORMS, FREQUENCY, SHARED_WIDTH, SCORES, HAS_BIAS, SCALING, PREDICTIONS]
    known += [GROUPS, GROUPS_OF_TOKEN]
    yarn = odd.get("rope_type") == "yarn"
    out = llama.refuses(sizes, architecture, *known, *(["rope_type", *_YARN] if yarn else ()))
    if odd.get(SCORES) != "sigmoid":
        out.append("scores of routers that are no sigmoids")
    if architecture.rope_factor or architecture.interpolation:
        out.append("rotary positions that are scaled otherwise than by yarn")
    if yarn and not _is_concentrated_alike(odd["mscale"], odd["mscale_all_dim"]):
        out.append(f"mscale {odd['mscale']} with mscale_all_dim {odd['mscale_all_dim']}")
    if not sizes.shared_ffn or sizes.shared_ffn % sizes.width:
        out.append(f"a shared expert of the width {sizes.shared_ffn}, no multiple of an expert's")
    if sizes.tied and sizes.predictions:
        out.append("a tied head that further tokens are predicted with")
    of_token = odd.get(GROUPS_OF_TOKEN)
    if GROUPS in odd and (not of_token or architecture.topk // of_token != 2):
        out.append(f"groups of experts that are chosen by {architecture.topk}/{of_token} of theirs")
    return out


def _is_concentrated_alike(one: float, other: float) -> bool:
    """Whether both sides scale the rotary embedding alike. Where a number is 0, transformers takes
    neither."""
    return bool(one and other) or (one, other) == (1.0, 0.0)


def notes(_: DeepSeekSizes, architecture: Architecture) -> list[str]:
    """What transformers computes a little otherwise."""
    if architecture.norm_epsilon == _NORM_OF_LATENTS:
        return []
    return [
        f"the norms of latents have the epsilon {architecture.norm_epsilon} in megatron-core, and "
        f"{_NORM_OF_LATENTS} in transformers whatever config.json says: logits differ a little"
    ]


def from_config(config: Config) -> tuple[DeepSeekSizes, Architecture]:
    """What a DeepSeek-V3 is. Raises UnsupportedError for what is not computed here."""
    rope, topk = _rope_of(config), int(config["num_experts_per_tok"])
    check_config(
        config,
        {
            "norm_topk_prob": (topk > 1,),
            "num_key_value_heads": (config["num_attention_heads"],),
            "rope_interleave": (True,),
            "scoring_func": ("sigmoid",),
            "topk_method": ("noaux_tc",),
            "moe_layer_freq": (1,),
        },
    )
    sizes = _sizes_of(config)
    base = {"rope_theta": float(rope.get("rope_theta", config.get("rope_theta", 10000.0)))}
    plain_rope = {"rope_scaling": None, "rope_parameters": base}
    odd = _odd(config, sizes, rope)
    computed = read_architecture({**config, **plain_rope}, 1e-6, 10000.0, topk=topk, odd=odd)
    return sizes, _checked(sizes, computed)


def _sizes_of(config: Config) -> DeepSeekSizes:
    """The sizes that a config says."""
    heads, width = int(config["num_attention_heads"]), int(config["moe_intermediate_size"])
    plain, rotary = int(config["qk_nope_head_dim"]), int(config["qk_rope_head_dim"])
    own = {"groups": heads, "head_dim": plain + rotary, "qk_norms": True}
    return DeepSeekSizes(
        **read_common(config, int(config["vocab_size"]), **own),
        experts=int(config.get("n_routed_experts", config.get("num_local_experts", 0))),
        expert_ffn=width,
        shared_ffn=width * int(config["n_shared_experts"]),
        query_rank=int(config.get("q_lora_rank") or 0),
        rank=int(config["kv_lora_rank"]),
        plain=plain,
        rotary=rotary,
        value=int(config["v_head_dim"]),
        leading=_leading_of(config),
        predictions=int(config.get("num_nextn_predict_layers") or 0),
    )


def _rope_of(config: Config) -> dict[str, Any]:
    """What a config says of the rotary embedding. Raises UnsupportedError."""
    rope, settings = rope_of(config)
    kinds, factors, truncate = ("default", "yarn"), (None,), (True,)
    known = {**ROPE, "rope type": kinds, "attention_factor": factors, "truncate": truncate}
    check_config({**rope, **settings}, known)
    return rope


def _leading_of(config: Config) -> int:
    """How many layers have an MLP before those with experts; the kin's configs may list them.
    Raises UnsupportedError."""
    kinds, layers = config.get("mlp_layer_types"), int(config["num_hidden_layers"])
    if kinds is None:
        return min(int(config["first_k_dense_replace"]), layers)
    leading = [*kinds, "sparse"].index("sparse")
    if [*kinds] != ["dense"] * leading + ["sparse"] * (layers - leading):
        raise UnsupportedError(
            "layers with an MLP come after layers with experts, which is not supported",
            expected="dense, ..., sparse, ...",
            found=", ".join(map(str, kinds)),
            fix="train such a model with transformers under DeepSpeed, which needs no family",
        )
    return leading


def _odd(config: Config, sizes: DeepSeekSizes, rope: Config) -> dict[str, Any]:
    """The settings of megatron-core's that make such a model."""
    groups, scaling = int(config["n_group"]), float(config["routed_scaling_factor"])
    odd: dict[str, Any] = {LATENT: True, LATENT_NORMS: True, SCORES: "sigmoid", HAS_BIAS: True}
    odd[SHARED_WIDTH] = sizes.shared_ffn
    if sizes.leading:
        marks = [int(sizes.has_experts(number)) for number in range(sizes.layers)]
        odd[FREQUENCY] = str(marks)
    if scaling != 1.0:
        odd[SCALING] = scaling
    if groups > 1:
        odd |= {GROUPS: groups, GROUPS_OF_TOKEN: int(config["topk_group"])}
    if sizes.predictions:
        odd[PREDICTIONS] = sizes.predictions
    if rope["rope_type"] == "yarn":
        usual = {"beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 0.0}
        yarn = {**usual, **{key: value for key, value in rope.items() if value is not None}}
        odd |= {"rope_type": "yarn", **{ours: yarn[theirs] for ours, theirs in _YARN.items()}}
    return odd


def _checked(sizes: DeepSeekSizes, architecture: Architecture) -> Architecture:
    """Raises UnsupportedError for a config that megatron-core's modules don't compute as
    transformers does: what an export would refuse."""
    if wrong := refuses(sizes, architecture):
        raise UnsupportedError(
            "the config asks for what megatron-core's modules of this family do not compute",
            found="; ".join(wrong),
            fix="train such a model with transformers under DeepSpeed, which needs no family",
        )
    return architecture


FAMILY = Family(
    "deepseek_v3",
    table,
    "megatron_ucp/families/deepseek_v3.py",
    divided=divided,
    sizes=DeepSeekSizes,
    measure=measure,
    fitted=fitted,
    hugging_face=HuggingFace(
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        tensors,
        to_config,
        from_config,
        refuses,
        kin=("kimi_k2", "glm4_moe_lite"),
        notes=notes,
    ),
)
