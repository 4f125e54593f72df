"""gpt-oss on megatron-core's modules: experts with biases in every layer, sinks of attention (a
softmax offset for each head), and windows in every other layer.

Somebody else builds it: megatron-core makes the mask of a window on a GPU. Files hold the experts
of a layer in one tensor, transposed, in which rows of gate and up take turns.
"""

import re
from dataclasses import replace
from typing import Any

from megatron_ucp.core.layout import Shard
from megatron_ucp.core.tensor_parts import Interleaved
from megatron_ucp.errors import UnsupportedError, UsageError
from megatron_ucp.families import mixtral
from megatron_ucp.families.family import (
    Config,
    Declared,
    Family,
    HuggingFace,
    no_such_sizes,
    transformer,
)
from megatron_ucp.families.mixtral import EXPERT, ROUTER, MixtralSizes
from megatron_ucp.families.settings import (
    FULL_EVERY,
    POSITION_KIND,
    WINDOW,
    Architecture,
    full_every,
)
from megatron_ucp.families.twin import (
    ATTENTION_ROWS,
    NORM_ROWS,
    ROPE,
    TRANSPOSED,
    Row,
    Rows,
    by_rows,
    check_config,
    common,
    read_architecture,
    read_common,
    refused_settings,
    refused_sizes,
    rope_of,
    same,
)

SINKS = "self_attention.core_attention.softmax_offset"
ACTIVATION, ALPHA = "quick_gelu", 1.702  # x sigmoid(1.702 x)
OFFSET, LIMIT, SOFTMAX = "glu_linear_offset", "activation_func_clamp_value", "softmax_type"
WINDOWED, FULL = "sliding_attention", "full_attention"


def table(sizes: MixtralSizes) -> dict[str, Declared]:
    """Every parameter of the model. Raises UsageError for sizes of none."""
    if sizes.experts < 1 or not (sizes.biases and sizes.gated) or sizes.shared_ffn:
        expected = "at least one expert, gated, with biases, and none for every token"
        raise no_such_sizes("gpt-oss", expected, sizes)
    return transformer(sizes, lambda number: layer(sizes, number))


def layer(sizes: MixtralSizes, number: int) -> dict[str, Declared]:
    """A transformer layer. (megatron-core gives the offsets no attributes, Transformer Engine
    does.)"""
    offsets = Declared((sizes.heads,), Shard("tp", 0), init="zeros")
    return {**mixtral.layer(sizes, number), SINKS: offsets}


def measure(module: Any) -> MixtralSizes:
    """From a megatron-core GPTModel. Raises UsageError for one that is no gpt-oss."""
    sizes, config = mixtral.measure(module), module.config
    kind = getattr(config, SOFTMAX, None), sizes.biases, sizes.every
    if kind != ("learnable", True, 1):
        raise UsageError(
            "the family gpt_oss describes a GPTModel with sinks, biases, and experts everywhere",
            expected=f"{SOFTMAX} learnable, add_bias_linear, moe_layer_freq 1",
            found=", ".join(map(str, kind)),
            fix="leave the family out: how a model is cut, it says itself",
        )
    return sizes


# ------------------------------------------------ gpt-oss of Hugging Face

_TURNS = Interleaved(0, 2)
_ONE, _STACKS = f"{EXPERT}{{expert}}.", "mlp.experts."
_ROWS: Rows = {
    **ATTENTION_ROWS,
    **NORM_ROWS,
    "self_attention.linear_proj.bias": same("self_attn.o_proj.bias"),
    SINKS: same("self_attn.sinks"),
    f"{ROUTER}weight": same("mlp.router.weight"),
    f"{ROUTER}bias": same("mlp.router.bias"),
    f"{_ONE}linear_fc1.weight": Row(
        (f"{_STACKS}gate_up_proj",), order=TRANSPOSED, layout=_TURNS, stacked=True
    ),
    f"{_ONE}linear_fc1.bias": Row((f"{_STACKS}gate_up_proj_bias",), layout=_TURNS, stacked=True),
    f"{_ONE}linear_fc2.weight": Row((f"{_STACKS}down_proj",), order=TRANSPOSED, stacked=True),
    f"{_ONE}linear_fc2.bias": Row((f"{_STACKS}down_proj_bias",), stacked=True),
}


def to_config(sizes: MixtralSizes, architecture: Architecture) -> dict[str, Any]:
    """config.json of gpt-oss."""
    odd = architecture.odd
    out = {
        **common(sizes, architecture),
        "attention_bias": True,
        "hidden_act": "silu",  # which its class does not look at
        "intermediate_size": sizes.width,
        "layer_types": _kinds(sizes.layers, architecture),
        "num_experts_per_tok": architecture.topk,
        "num_local_experts": sizes.experts,
        "output_router_logits": False,
        "sliding_window": _seen(odd.get(WINDOW)) if WINDOW in odd else architecture.positions,
        "swiglu_alpha": ALPHA,
        "swiglu_limit": odd[LIMIT],
    }
    if odd.get(POSITION_KIND) == "yarn":
        rope = {theirs: odd[ours] for ours, theirs in _YARN.items()}
        rope |= {"rope_type": "yarn", "rope_theta": architecture.rotary_base}
        out |= {"rope_parameters": rope, "rope_scaling": rope}
    return out


# megatron-core's names of what scales the rotary embedding, with those of transformers
_YARN = {
    "yarn_rotary_scaling_factor": "factor",
    "yarn_original_max_position_embeddings": "original_max_position_embeddings",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
    "yarn_correction_range_round_to_int": "truncate",
}
_USUAL_YARN = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True}
_CLASS_YARN = {  # of a config that says nothing
    **{"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0},
    **{"truncate": False, "original_max_position_embeddings": 4096},
}


def _kinds(layers: int, architecture: Architecture) -> list[str] | None:
    """What each layer attends to; None where nothing says it for as many layers."""
    odd = architecture.odd
    windows_of: object = odd.get(FULL_EVERY) if WINDOW in odd else 1
    if isinstance(windows_of, int) and windows_of > 0:
        windows = [number % windows_of != 0 for number in range(1, layers + 1)]
    elif isinstance(windows_of, str):
        windows = [mark == "1" for mark in re.findall(r"[01]", windows_of)]
    else:
        windows = [True] * layers if windows_of is None else []
    kinds = [WINDOWED if window else FULL for window in windows]
    return kinds if len(kinds) == layers else None


def _seen(window: object) -> int:
    """How many positions a window has, that of the token itself among them; 0 for one that ends
    elsewhere than at the token, or begins nowhere."""
    before = re.fullmatch(r"\((\d{1,9}), 0\)", str(window))
    return int(before[1]) + 1 if before else 0


def refuses(sizes: MixtralSizes, architecture: Architecture) -> list[str]:
    """What GptOssForCausalLM does not have."""
    odd = architecture.odd
    known = [SOFTMAX, OFFSET, LIMIT, WINDOW, FULL_EVERY]
    if odd.get(POSITION_KIND) == "yarn":
        known += [POSITION_KIND, *_YARN]
    out = refused_settings(architecture, (ACTIVATION,), known) + refused_sizes(sizes)
    for name, wanted in {SOFTMAX: "learnable", OFFSET: 1.0}.items():
        if odd.get(name) != wanted:
            out.append(f"{name} other than {wanted}")
    if not isinstance(odd.get(LIMIT), int | float):
        out.append(f"no {LIMIT}")
    if WINDOW in odd and not _seen(odd[WINDOW]):
        out.append(f"a window of {odd[WINDOW]}")
    if _kinds(sizes.layers, architecture) is None:
        out.append(f"{FULL_EVERY} {odd.get(FULL_EVERY)}")
    return out


def from_config(config: Config) -> tuple[MixtralSizes, Architecture]:
    """What a gpt-oss is. Raises UnsupportedError for what is not computed here."""
    if not (config.get("rope_parameters") or config.get("rope_scaling")):
        config = {**config, "rope_parameters": _CLASS_YARN}
    known: dict[str, tuple[object, ...]] = {
        "attention_bias": (True,),
        "hidden_act": ("silu", "swish"),
        "swiglu_alpha": (ALPHA,),
    }
    check_config(config, known)
    sizes = MixtralSizes(
        **read_common(config, int(config["vocab_size"]), biases=True),
        experts=int(config["num_local_experts"]),
    )
    rope, odd = _rope_of(config)
    odd |= {SOFTMAX: "learnable", OFFSET: 1.0, LIMIT: float(config.get("swiglu_limit", 7.0))}
    odd |= _windows(config, sizes.layers)
    plain = {"attention_bias": False, "sliding_window": None, "layer_types": None}
    topk = int(config.get("num_experts_per_tok", config.get("experts_per_token", 4)))
    architecture = read_architecture(
        {**config, **plain, **rope}, 1e-5, 150000.0, topk=topk, odd=odd
    )
    return sizes, replace(architecture, activation=ACTIVATION)


def _rope_of(config: Config) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a config says of the rotary embedding without yarn, and megatron-core's settings of
    that. Raises UnsupportedError."""
    rope, settings = rope_of(config)
    if rope["rope_type"] != "yarn":
        return {}, {}
    lacking = ("attention_factor", "mscale", "mscale_all_dim")
    check_config({**rope, **settings}, {**ROPE, **dict.fromkeys(lacking, (None,))})
    yarn = {**_USUAL_YARN, **{key: value for key, value in rope.items() if value is not None}}
    odd = {ours: yarn[theirs] for ours, theirs in _YARN.items()}
    base = {"rope_theta": float(rope.get("rope_theta", config.get("rope_theta", 150000.0)))}
    return {"rope_scaling": None, "rope_parameters": base}, {POSITION_KIND: "yarn", **odd}


def _windows(config: Config, layers: int) -> dict[str, Any]:
    """megatron-core's settings of the layers with a window. Raises UnsupportedError."""
    usual = [FULL if number % 2 else WINDOWED for number in range(layers)]
    types: list[str] = config.get("layer_types") or usual
    kinds = list(map(str, types))
    if len(kinds) != layers or {*kinds} - {WINDOWED, FULL}:
        raise UnsupportedError(
            "the config asks for attention of another kind",
            expected=f"{layers} times {WINDOWED} or {FULL}",
            found=", ".join(kinds),
            fix="train such a model with transformers under DeepSpeed, which needs no family",
        )
    if WINDOWED not in kinds:
        return {}
    every = full_every([kind == WINDOWED for kind in kinds])
    out: dict[str, Any] = {WINDOW: str((int(config.get("sliding_window", 128)) - 1, 0))}
    if every is not None:
        out[FULL_EVERY] = every if isinstance(every, int) else str(every)
    return out


FAMILY = Family(
    "gpt_oss",
    table,
    "megatron_ucp/families/gpt_oss.py",
    divided=mixtral.divided,
    sizes=MixtralSizes,
    measure=measure,
    hugging_face=HuggingFace(
        "gpt_oss", "GptOssForCausalLM", by_rows(table, _ROWS), to_config, from_config, refuses
    ),
)
