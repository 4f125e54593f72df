"""Tables for the Hugging Face twins of families: which tensor holds what, and config.json.

A fused parameter is cut into chunks, one for each tensor: `linear_qkv.weight` becomes q_proj,
k_proj and v_proj. A tensor that Hugging Face stores transposed, or in another order of rows, is
described in the same way. The config's names are those of transformers 5.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from megatron_ucp.core.box import Ints
from megatron_ucp.core.layout import Chunks, Layout, Replicate
from megatron_ucp.core.tensor_parts import Slice, TensorPart
from megatron_ucp.errors import UnsupportedError
from megatron_ucp.families.family import Config, Sizes
from megatron_ucp.families.settings import Architecture

TRANSPOSED = (1, 0)  # Conv1D of GPT-2 stores [in, out]
Block = tuple[Ints, Ints]


# ------------------------------------------------ tensors


def split_qkv(sizes: Sizes, *rest: int) -> tuple[list[Block], list[Block], list[Block]]:
    """The rows of linear_qkv that are queries, keys and values; `rest` are the other dims."""
    queries, keys, values = (
        [block(rows.start, rows.stop, *rest) for rows in found] for found in sizes.qkv_rows()
    )
    return queries, keys, values


def block(first: int, last: int, *rest: int) -> Block:
    """Rows [first, last) with all of the other dims."""
    return (first, *(0,) * len(rest)), (last, *rest)


Division = Callable[[Any, Ints], Iterable[Iterable[Block]]]


def qkv(sizes: Sizes, shape: Ints) -> tuple[list[Block], list[Block], list[Block]]:
    """linear_qkv, weight or bias, as a tensor each for queries, keys and values."""
    return split_qkv(sizes, *shape[1:])


def halves(_: Sizes, shape: Ints) -> list[list[Block]]:
    """Gate and up of linear_fc1, one above the other."""
    half = shape[0] // 2
    return [[block(at, at + half, *shape[1:])] for at in (0, half)]


@dataclass(frozen=True)
class Row:
    """The tensors of one parameter of a layer: `Row(("mlp.up.weight", "mlp.gate.weight"), halves)`.

    - `tensors` are the ends of their names, in which `{expert}` is the number of an expert.
    - `cut(sizes, shape)` gives the blocks of each tensor (None: one tensor holds all).
    - `order` are the parameter's dims as tensors store them: `TRANSPOSED`, say.
    - `layout` is the order of the rows in a tensor that holds all.
    - `stacked`: the tensor has this parameter of every expert, one after the other.
    """

    tensors: tuple[str, ...]
    cut: Division | None = None
    order: Ints | None = None
    layout: Layout = field(default_factory=Replicate)
    stacked: bool = False

    def named(self, sizes: Any, param: str, shape: Ints, prefix: str) -> dict[str, TensorPart]:
        """The parts by the names of their tensors, which begin with `prefix`. A part of a stack is
        called by the tensor and the number of the slice: `experts.down_proj[3]`."""
        number = "".join(_EXPERT.findall(param))
        names = [prefix + one.replace("{expert}", number) for one in self.tensors]
        shares = self.shares(sizes, param, shape)
        if not self.stacked:
            return dict(zip(names, shares, strict=True))
        (name,), (share,) = names, shares
        of = Slice(name, int(number), 0, int(sizes.experts))
        return {f"{name}[{number}]": replace(share, slice_of=of)}

    def shares(self, sizes: Any, param: str, shape: Ints) -> list[TensorPart]:
        """The part of the parameter that each tensor holds."""
        if self.cut is None:
            return [TensorPart(param, self.layout, order=self.order)]
        layout = Chunks(tuple(tuple(blocks) for blocks in self.cut(sizes, shape)))
        return [TensorPart(param, layout, at, self.order) for at in range(len(self.tensors))]


def same(tensor: str) -> Row:
    """A parameter that is a tensor."""
    return Row((tensor,))


def gate_and_up(prefix: str, gate: str = "gate_proj", up: str = "up_proj") -> Row:
    """Gate and up in a tensor each."""
    return Row((f"{prefix}{gate}.weight", f"{prefix}{up}.weight"), halves)


Rows = Mapping[str, Row]  # by the end of a parameter's name, behind the number of its layer

# of every model whose modules have the names of Llama's
TOP = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
}
NORM_ROWS: Rows = {
    "input_layernorm.weight": same("input_layernorm.weight"),
    "pre_mlp_layernorm.weight": same("post_attention_layernorm.weight"),
}
ATTENTION_ROWS: Rows = {
    "self_attention.linear_qkv.weight": Row(
        tuple(f"self_attn.{name}_proj.weight" for name in "qkv"), qkv
    ),
    "self_attention.linear_qkv.bias": Row(
        tuple(f"self_attn.{name}_proj.bias" for name in "qkv"), qkv
    ),
    "self_attention.q_layernorm.weight": same("self_attn.q_norm.weight"),
    "self_attention.k_layernorm.weight": same("self_attn.k_norm.weight"),
    "self_attention.linear_proj.weight": same("self_attn.o_proj.weight"),
}
MLP_ROWS: Rows = {
    "mlp.linear_fc1.weight": gate_and_up("mlp."),
    "mlp.linear_fc2.weight": same("mlp.down_proj.weight"),
}
# A layer for multi-token prediction has one like the decoder's in it, and its number comes after
# those of the decoder's.
_IN_LAYER = re.compile(
    r"(?P<list>decoder|mtp)\.layers\.(?P<number>\d+)\.(?:transformer_layer\.)?(?P<rest>.+)"
)
_EXPERT = re.compile(r"(?<=local_experts\.)\d+(?=\.)")


def by_rows(table: Callable[[Any], Mapping[str, Any]], rows: Rows) -> Callable[[Any], Any]:
    """What each tensor of a family holds: its `table` has a parameter or has it not, and `rows`
    say under which names those of a layer lie in files. A parameter without a row lies in none: the
    family `refuses` models that have one."""

    def tensors(sizes: Any) -> dict[str, TensorPart]:
        out: dict[str, TensorPart] = {}
        for name, declared in table(sizes).items():
            prefix, row = "", same(TOP[name]) if name in TOP else None
            if found := _IN_LAYER.fullmatch(name):
                first = sizes.layers if found["list"] == "mtp" else 0
                prefix = f"model.layers.{first + int(found['number'])}."
                row = rows.get(_EXPERT.sub("{expert}", found["rest"]))
            if row is not None:
                out |= row.named(sizes, name, declared.shape, prefix)
        return out

    return tensors


# ------------------------------------------------ config.json


def common(sizes: Sizes, architecture: Architecture) -> dict[str, Any]:
    """What the configs of Llama and of those after it have in common."""
    rope = rope_parameters(architecture)
    return {
        "attention_dropout": 0.0,
        "head_dim": sizes.head_dim,
        "hidden_act": architecture.activation,
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.ffn,
        "max_position_embeddings": architecture.positions,
        "num_attention_heads": sizes.heads,
        "num_hidden_layers": sizes.layers,
        "num_key_value_heads": sizes.groups,
        "rms_norm_eps": architecture.norm_epsilon,
        "rope_parameters": rope,
        # transformers 4 reads these two instead
        "rope_theta": architecture.rotary_base,
        "rope_scaling": None if rope["rope_type"] == "default" else rope,
    }


def rope_parameters(architecture: Architecture) -> dict[str, Any]:
    """The rotary embedding. megatron-core's scaling has its three other numbers fixed."""
    base = {"rope_type": "default", "rope_theta": architecture.rotary_base}
    if architecture.interpolation:
        return {**base, "rope_type": "linear", "factor": architecture.interpolation}
    if architecture.rope_factor:
        return {**base, "rope_type": "llama3", "factor": architecture.rope_factor, **LLAMA_3}
    return base


LLAMA_3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def refused_settings(
    architecture: Architecture, activations: Iterable[str], known: Iterable[str] = ()
) -> list[str]:
    """Settings that change what is computed, and that no config of transformers can say."""
    out = [f"{key}={value}" for key, value in architecture.odd.items() if key not in {*known}]
    if architecture.activation not in {*activations}:
        out.append(f"activation {architecture.activation}")
    if architecture.rope_factor and architecture.interpolation:
        out.append("scaled and interpolated rotary positions")
    return out


def refused_sizes(sizes: Sizes) -> list[str]:
    """Sizes that transformers' own check of a config refuses."""
    if sizes.hidden % sizes.heads:
        return [f"a hidden size of {sizes.hidden}, which {sizes.heads} heads do not divide"]
    return []


def read_common(config: Config, vocabulary: int, **more: Any) -> dict[str, Any]:
    """The fields of `Sizes` that every config has; `more` are a family's own."""
    heads = int(config["num_attention_heads"])
    return {
        "layers": int(config["num_hidden_layers"]),
        "hidden": int(config["hidden_size"]),
        "heads": heads,
        "groups": int(config.get("num_key_value_heads") or heads),
        "head_dim": int(config.get("head_dim") or config["hidden_size"] // heads),
        "ffn": int(config["intermediate_size"]),
        "vocab": vocabulary,
        "true_vocab": vocabulary,
        "tied": bool(config.get("tie_word_embeddings", False)),
        "gated": True,
        "biases": False,
        "norm_biases": False,
        **more,
    }


def read_architecture(config: Config, epsilon: float, base: float, **more: Any) -> Architecture:
    """What a config says besides sizes; `epsilon` and `base` are the class's defaults. Raises
    UnsupportedError for what megatron-core's modules do not compute."""
    rope, settings = rope_of(config)
    kind: object = rope["rope_type"]
    _check_computed(config, rope, settings)
    factor = 0.0 if kind == "default" else float(rope["factor"])
    return Architecture(
        positions=int(config["max_position_embeddings"]),
        norm_epsilon=float(config.get("rms_norm_eps", epsilon)),
        activation="silu",
        rotary_base=float(rope.get("rope_theta", config.get("rope_theta", base))),
        rope_factor=factor if kind == "llama3" else 0.0,
        interpolation=factor if kind == "linear" else 0.0,
        **more,
    )


_PLACES = "rope_scaling beside rope_parameters"
# What every family asks of the rotary embedding of a config.
ROPE: Mapping[str, tuple[object, ...]] = {_PLACES: ("the same",), "partial_rotary_factor": (1.0,)}


def rope_of(config: Config) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a config says of the rotary embedding; and the settings of that for `check_config`, by
    the names of `ROPE`, with the "rope type"."""
    rope: dict[str, Any] = {}
    keys = ("rope_scaling", "rope_parameters")  # of transformers 4 and 5, which read part each
    ropes = [dict[str, Any](config[key]) for key in keys if config.get(key)]
    for part in ropes:
        rope.update(part)
    rope["rope_type"] = rope.get("rope_type", rope.get("type", "default"))
    return rope, {
        "rope type": rope["rope_type"],
        _PLACES: "the same" if ropes[:1] == ropes[-1:] else "another",
        "partial_rotary_factor": rope.get(
            "partial_rotary_factor", config.get("partial_rotary_factor", 1.0)
        ),
    }


def _check_computed(config: Config, rope: Config, settings: Config) -> None:
    """Raises UnsupportedError for what megatron-core's modules do not compute; `rope` and
    `settings` are those of `rope_of`."""
    layers = {*(config.get("layer_types") or ())} - {"full_attention"}
    is_llama_3 = settings["rope type"] == "llama3"
    computed: dict[str, object] = {
        **settings,
        "rope parameters": {key: rope.get(key) for key in LLAMA_3} if is_llama_3 else LLAMA_3,
        "layer types": ", ".join(sorted(layers)),
    }
    check_config(
        {**config, **computed},
        {
            "hidden_act": ("silu", "swish"),
            "attention_bias": (False,),
            "mlp_bias": (False,),
            "sliding_window": (None,),
            "pretraining_tp": (1,),
            "rope type": ("default", "linear", "llama3"),
            "rope parameters": (LLAMA_3,),
            "layer types": ("",),
            **ROPE,
        },
    )


def check_config(config: Config, known: Mapping[str, tuple[object, ...]]) -> None:
    """Raises UnsupportedError that lists every setting whose value is none of the `known` ones."""
    values = {key: config.get(key, few[0]) for key, few in known.items()}
    wrong = {key: value for key, value in values.items() if value not in known[key]}
    if wrong:
        raise UnsupportedError(
            "the config asks for what megatron-core's modules of this family do not compute",
            expected="; ".join(f"{key} {' or '.join(map(str, known[key]))}" for key in wrong),
            found="; ".join(f"{key} {value}" for key, value in wrong.items()),
            fix="train such a model with transformers under DeepSpeed, which needs no family",
        )
