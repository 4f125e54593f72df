"""Which family, sizes and architecture the arguments of a Megatron-LM run describe."""

from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from typing import Any, cast

from megatron_ucp.core.manifest import ARGUMENTS, RECORDED, Manifest
from megatron_ucp.families import families
from megatron_ucp.families.family import Builder, Family, Model
from megatron_ucp.families.settings import FREQUENCY, Architecture, every_of, odd_settings

_TOKENIZERS_WITH_END = ("NullTokenizer",)  # whose vocabulary has an end mark more than asked for


def with_model(manifest: Manifest) -> Manifest:
    """A manifest that says its model as this package's own do, where it has the arguments of
    Megatron-LM and a family is built as they say; else as it is."""
    said: object = manifest.run.get(ARGUMENTS)
    if manifest.family or not isinstance(said, dict):
        return manifest
    arguments = cast("Mapping[str, Any]", said)
    built = [one for one in families().values() if _is_built_so(one, arguments)]
    built.sort(key=lambda one: one.name != arguments.get("model_family"))  # the one that is named
    family = next(iter(built), None)
    if family is None:
        return manifest
    try:
        sizes = family.sizes(**_sizes(family, arguments))
        architecture = _architecture(arguments)
    except (KeyError, TypeError, ValueError):  # arguments that are missing or of other types
        return manifest
    table = Model(family, sizes).table
    if any(spec.kind != "buffer" and spec.name not in table for spec in manifest.params):
        return manifest  # a model with more than that: latent attention, multi-token prediction
    run = {key: value for key, value in manifest.run.items() if key != ARGUMENTS}
    run[RECORDED] = {"sizes": asdict(sizes), "architecture": asdict(architecture)}
    return replace(manifest, family=family.name, run=run)


def unknown_padding(manifest: Manifest) -> list[str]:
    """A note, where arguments of Megatron-LM don't say how many rows of the vocabulary are tokens:
    its tokenizers of files know, and its flags don't."""
    said: object = manifest.run.get(ARGUMENTS)
    if manifest.family or not isinstance(said, dict):
        return []
    arguments = cast("Mapping[str, Any]", said)
    if _tokens(arguments):
        return []
    return [
        f"all {arguments.get('padded_vocab_size')} rows of the vocabulary were written: the "
        "arguments of the run don't say which are padding; --config DIR does"
    ]


def _is_built_so(family: Family, said: Mapping[str, Any]) -> bool:
    """Whether a family's builder makes the model of the arguments."""
    return family.builder == Builder(
        said.get("normalization"),  # pyright: ignore[reportArgumentType]  (no other is equal)
        bool(said.get("swiglu")),
        bool(said.get("add_bias_linear")),
        said.get("position_embedding_type"),  # pyright: ignore[reportArgumentType]
        bool(said.get("num_experts")),
        bool(said.get("add_qkv_bias")),
        bool(said.get("qk_layernorm")),
    )


def _tokens(said: Mapping[str, Any]) -> int:
    """How many rows of the vocabulary are tokens; 0 where the arguments say no number."""
    more = {"true_vocab_size": 0, "vocab_size": said.get("tokenizer_type") in _TOKENIZERS_WITH_END}
    found = [(said.get(name), own) for name, own in more.items()]
    return next((n + own for n, own in found if type(n) is int and n > 0), 0)


def _sizes(family: Family, said: Mapping[str, Any]) -> dict[str, Any]:
    """The sizes under the names of the family's class. Raises KeyError, TypeError."""
    heads, padded = int(said["num_attention_heads"]), int(said["padded_vocab_size"])
    groups = int(said["num_query_groups"]) if said.get("group_query_attention") else heads
    true = min(_tokens(said), padded)
    found: dict[str, Any] = {
        "layers": int(said["num_layers"]),
        "hidden": int(said["hidden_size"]),
        "heads": heads,
        "groups": groups,
        "head_dim": int(said["kv_channels"]),
        "ffn": int(said["ffn_hidden_size"]),
        "vocab": padded,
        "true_vocab": true or padded,
        "tied": not said.get("untie_embeddings_and_output_weights"),
        **(family.builder.flags if family.builder else {}),
    }
    if family.builder and family.builder.learned_positions:
        found["positions"] = int(said["max_position_embeddings"])
    if said.get("num_experts"):
        found["experts"] = int(said["num_experts"])
        found["expert_ffn"] = int(said.get("moe_ffn_hidden_size") or 0)
        found["shared_ffn"] = int(said.get("moe_shared_expert_intermediate_size") or 0)
        found["every"] = every_of(said[FREQUENCY])
    known = {one.name for one in fields(family.sizes)}
    return {name: value for name, value in found.items() if name in known}


def _architecture(said: Mapping[str, Any]) -> Architecture:
    """What shapes don't show. Raises KeyError, TypeError."""
    experts = bool(said.get("num_experts"))
    rotary = said.get("position_embedding_type") == "rope"
    found = Architecture(
        positions=int(said["max_position_embeddings"]),
        norm_epsilon=float(said["layernorm_epsilon"]),
        activation=_activation(said),
        topk=int(said["moe_router_topk"]) if experts else 0,
        odd=odd_settings(said.get, experts),
    )
    if not rotary:
        return found
    return replace(
        found,
        rotary_base=float(said["rotary_base"]),
        rope_factor=float(said["rope_scaling_factor"]) if said.get("use_rope_scaling") else 0.0,
        interpolation=float(said.get("rotary_seq_len_interpolation_factor") or 0.0),
    )


def _activation(said: Mapping[str, Any]) -> str:
    if isinstance(named := said.get("activation_func"), str):
        return named
    if said.get("swiglu"):
        return "silu"
    if said.get("squared_relu"):
        return "squared_relu"
    # megatron-core's fused kernel of bias and gelu computes the tanh form
    tanh = said.get("openai_gelu") or (said.get("bias_gelu_fusion") and said.get("add_bias_linear"))
    return "gelu_tanh" if tanh else "gelu"
