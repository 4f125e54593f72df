"""GPT and LLaMA as Megatron-DeepSpeed's own modules name and cut them: its names, its rows of
query_key_value, its list of a pipeline's layers.

The order of those rows changed with #441 of December 2024: by head before, and since then the
queries of all heads, their keys, their values, each cut for itself.
"""

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any

from megatron_ucp.core.layers import Layers
from megatron_ucp.core.layout import ShardNC
from megatron_ucp.core.manifest import ParamSpec
from megatron_ucp.core.tensor_parts import TensorPart
from megatron_ucp.families import gpt, llama, pipe
from megatron_ucp.families.family import (
    Config,
    Declared,
    Family,
    HuggingFace,
    Model,
    Sizes,
    measured,
)
from megatron_ucp.families.settings import Architecture

_QKV = "self_attention.query_key_value"
_RENAMED = {
    "embedding.": "language_model.embedding.",
    "decoder.": "language_model.encoder.",
    "output_layer.": "language_model.output_layer.",
    "self_attention.linear_qkv": _QKV,
    "self_attention.linear_proj": "self_attention.dense",
    "pre_mlp_layernorm": "post_attention_layernorm",
    "linear_fc1": "dense_h_to_4h",
    "linear_fc2": "dense_4h_to_h",
}
_OTHER_NAMES = re.compile("|".join(rf"\b{re.escape(name)}" for name in _RENAMED))


def program_name(name: str) -> str:
    """What the program calls a parameter of megatron-core's model."""
    return _OTHER_NAMES.sub(lambda found: _RENAMED[found[0]], name)


def order_of_rows(params: Iterable[ParamSpec], said: object) -> str:
    """The order of the rows of query_key_value, "split" or "interleaved": as a layout cuts them,
    else as the arguments of the run `said`; empty where neither does."""
    found = next((spec for spec in params if f".{_QKV}." in spec.name), None)
    cut = None if found is None else found.layout.only_cut
    if cut is not None:
        return "split" if cut.is_fused else "interleaved"
    return str(said) if said in _ORDERS else ""


# ------------------------------------------------ a pipeline


_LAYERS = "language_model.encoder.layers."
_WORDS = "language_model.embedding."


def is_of_program(params: Collection[str]) -> bool:
    """Whether parameters have the program's names; LLaVA has a decoder where it has an encoder."""
    parts = _WORDS, "language_model.encoder."
    return all(any(name.startswith(part) for name in params) for part in parts)


def layers_of_program(params: Collection[str]) -> Layers:
    """The program's list of layers for a model with these parameters: a cast, the embedding, the
    layers, with experts a loss, the last norm, the head.

    A tied head is the whole embedding, positions too, called through a function: it has no layer
    file.
    """
    tied = "language_model.output_layer.weight" not in params
    has_loss = any(".deepspeed_moe." in name for name in params)
    norm = 2 + pipe.layer_count(params, _LAYERS) + has_loss
    ends = {
        _WORDS: (1, ""),
        "language_model.encoder.final_layernorm.": (norm, ""),
        "language_model.output_layer.": (norm + 1, "lm_head."),
    }
    held, names = pipe.by_position(params, _LAYERS, 2, ends, tied)
    if tied:
        held[-1] = dict(held[1])
    filed = frozenset(at for at in range(len(held) - tied) if held[at])
    return Layers(tuple(held), names, filed)


# ------------------------------------------------ families


@dataclass(frozen=True)
class SizesInThirds(Sizes):
    """Sizes of a model whose query_key_value has all queries, then all keys, then all values."""

    def qkv_rows(self) -> tuple[list[range], list[range], list[range]]:
        queries, groups = self.heads * self.head_dim, self.groups * self.head_dim
        keys, end = queries + groups, queries + 2 * groups
        return [range(queries)], [range(queries, keys)], [range(keys, end)]


def _as_program(name: str, found: Declared, sizes: Sizes) -> Declared:
    """A parameter of megatron-core's table as the program has it; its rules say what its live
    parameters carry."""
    layout = found.layout
    if f".{_QKV}." in name and isinstance(sizes, SizesInThirds):
        layout = ShardNC("tp", 0, tuple(len(rows) for (rows,) in sizes.qkv_rows()))
    first = name == f"{_WORDS}position_embeddings.weight"
    return replace(found, layout=layout, attributes={}, first_counts=first)


def _family(base: Family, twin: HuggingFace, name: str, sizes_class: type[Sizes]) -> Family:
    """The program's models that are those of a family of megatron-core's, but for names and
    rows."""

    def table(sizes: Sizes) -> dict[str, Declared]:
        named = {program_name(one): found for one, found in base.table(sizes).items()}
        return {one: _as_program(one, found, sizes) for one, found in named.items()}

    def tensors(sizes: Sizes) -> dict[str, TensorPart]:
        parts = twin.tensors(sizes)
        return {one: replace(part, param=program_name(part.param)) for one, part in parts.items()}

    def read(config: Config) -> tuple[Sizes, Architecture]:
        sizes, architecture = twin.read(config)
        return sizes_class(**vars(sizes)), architecture

    return Family(
        name,
        table,
        "megatron_ucp/families/megatron_deepspeed.py",
        lambda sizes: dict(layers_of_program(table(sizes)).names),
        layers_of_program,
        sizes=sizes_class,
        hugging_face=replace(twin, tensors=tensors, read=read),
        # of an older version the program's load reorders query_key_value
        client_state={"iteration": 0, "checkpoint_version": 3.0},
    )


_BASES = {"gpt": gpt.FAMILY, "llama": llama.LLAMA}
_ORDERS = {"split": SizesInThirds, "interleaved": Sizes}
_FAMILIES = {
    (like, order): _family(base, twin, f"megatron_deepspeed_{order}_{like}", _ORDERS[order])
    for like, base in _BASES.items()
    if (twin := base.hugging_face) is not None
    for order in _ORDERS
}
FAMILIES = tuple(_FAMILIES.values())


def model_of_program(module: Any, params: Collection[str], order: str) -> Model | None:
    """The program's model with these measures and parameters, and rows in this order; None where
    no family has it, or nobody says the order."""
    if order not in _ORDERS or module.num_layers > len(params):
        return None
    sizes = _ORDERS[order](**vars(measured(module)))
    for like, base in _BASES.items():
        model = Model(_FAMILIES[like, order], sizes)
        is_built = base.builder is not None and base.builder.makes(sizes)
        if is_built and {*params} == model.table.keys():
            return model
    return None
