"""Which family, sizes and architecture the arguments of a Megatron-LM run describe."""

from collections.abc import Mapping
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any, cast

from megatron_ucp.core.manifest import ARGUMENTS, RECORDED, Manifest
from megatron_ucp.families import model_as_built
from megatron_ucp.families.family import TRUE_VOCAB
from megatron_ucp.families.settings import POSITION_KIND, Architecture, architecture_of

_TOKENIZERS_WITH_END = ("NullTokenizer",)  # whose vocabulary has an end mark more than asked for


def with_model(manifest: Manifest) -> Manifest:
    """A manifest that says its model as this package's own do, where it has the arguments of
    Megatron-LM and a family is built as they say; else as it is."""
    said: object = manifest.run.get(ARGUMENTS)
    if manifest.family or not isinstance(said, dict):
        return manifest
    arguments = cast("Mapping[str, Any]", said)
    # a model with more than a family has (latent attention, multi-token prediction) is none of it
    params = [spec.name for spec in manifest.params if spec.kind != "buffer"]
    try:
        module = _module(arguments)
        model = model_as_built(module, params, arguments.get("model_family"))
        architecture = _with_scaling(architecture_of(module), arguments)
    except (KeyError, TypeError, ValueError, AttributeError):  # missing, or of other types
        return manifest
    if model is None:
        return manifest
    run = {key: value for key, value in manifest.run.items() if key != ARGUMENTS}
    run[RECORDED] = {"sizes": asdict(model.sizes), "architecture": asdict(architecture)}
    return replace(manifest, family=model.family.name, run=run)


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


def _tokens(said: Mapping[str, Any]) -> int:
    """How many rows of the vocabulary are tokens; 0 where the arguments say no number."""
    more = {"true_vocab_size": 0, "vocab_size": said.get("tokenizer_type") in _TOKENIZERS_WITH_END}
    found = [(said.get(name), own) for name, own in more.items()]
    return next((n + own for n, own in found if type(n) is int and n > 0), 0)


def _module(said: Mapping[str, Any]) -> Any:
    """A stand-in for the live model, with the attributes that families measure: the arguments, and
    under the names of megatron-core's config what these call otherwise. Raises KeyError, TypeError,
    ValueError."""
    if said.get(POSITION_KIND) not in ("rope", "learned_absolute"):
        raise ValueError("no family has such positions")
    heads, padded = int(said["num_attention_heads"]), int(said["padded_vocab_size"])
    groups = int(said["num_query_groups"]) if said.get("group_query_attention") else heads
    experts = int(said.get("num_experts") or 0)
    widths = ("moe_ffn_hidden_size", "moe_shared_expert_intermediate_size")
    renamed = {
        "num_query_groups": groups,
        "gated_linear_unit": bool(said.get("swiglu")),
        "vocab_size": padded,
        TRUE_VOCAB: min(_tokens(said), padded) or padded,
        "max_sequence_length": int(said["max_position_embeddings"]),
        "share_embeddings_and_output_weights": not said.get("untie_embeddings_and_output_weights"),
        "num_moe_experts": experts or None,
        **{name: int(said.get(name) or 0) for name in widths if experts},
        "activation_func": _activation(said),
        "bias_activation_fusion": False,
    }
    same = ("num_layers", "hidden_size", "num_attention_heads", "kv_channels", "ffn_hidden_size")
    module = SimpleNamespace(**{**said, **{name: int(said[name]) for name in same}, **renamed})
    module.config = module
    return module


def _with_scaling(found: Architecture | None, said: Mapping[str, Any]) -> Architecture:
    """With how rotary positions are scaled, which a module shows by its tables. Raises KeyError,
    ValueError."""
    if found is None:
        raise ValueError("the arguments say no architecture")
    if said[POSITION_KIND] != "rope":
        return found
    return replace(
        found,
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
