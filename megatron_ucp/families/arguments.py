"""Which family, sizes and architecture the arguments of a Megatron-LM run describe."""

from collections.abc import Mapping
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any, cast

from megatron_ucp.core.manifest import ARGUMENTS, ORDER, OTHER_ANGLES, RECORDED, Manifest
from megatron_ucp.families import model_as_built
from megatron_ucp.families.family import TRUE_VOCAB, Model
from megatron_ucp.families.megatron_deepspeed import is_of_program, model_of_program, order_of_rows
from megatron_ucp.families.settings import POSITION_KIND, Architecture, architecture_of

_TOKENIZERS_WITH_END = ("NullTokenizer",)  # whose vocabulary has an end mark more than asked for


def with_model(manifest: Manifest) -> Manifest:
    """A manifest that says its model as this package's own do, where it has the arguments of
    Megatron-LM and a family is built as they say; else as it is."""
    arguments = _arguments_of(manifest)
    if arguments is None:
        return manifest
    # a model with more than a family has (latent attention, multi-token prediction) is none of it
    shapes = {spec.name: spec.shape for spec in manifest.params if spec.kind != "buffer"}
    try:
        module = _module(arguments)
        if is_of_program(shapes):
            order = order_of_rows(manifest.params, arguments.get(ORDER))
            model = model_of_program(module, shapes, order)
        else:
            model = model_as_built(module, shapes, arguments.get("model_family"))
        architecture = _with_scaling(architecture_of(module), arguments)
    except (KeyError, TypeError, ValueError, AttributeError):  # missing, or of other types
        return manifest
    if model is None:
        return manifest
    run = {key: value for key, value in manifest.run.items() if key != ARGUMENTS}
    run[RECORDED] = {"sizes": asdict(model.sizes), "architecture": asdict(architecture)}
    if arguments.get(OTHER_ANGLES):
        run[RECORDED] = {"sizes": asdict(model.sizes), OTHER_ANGLES: True}
    manifest = replace(manifest, family=model.family.name, run=run)
    return _with_layouts(manifest, model) if is_of_program(shapes) else manifest


def _with_layouts(manifest: Manifest, model: Model) -> Manifest:
    """With the family's layouts where a run at tp=1 knew parameters as whole only."""
    specs = [
        replace(spec, layout=model.table[spec.name].layout)
        if spec.layout.is_whole and spec.name in model.table
        else spec
        for spec in manifest.params
    ]
    return replace(manifest, params=tuple(specs))


def _arguments_of(manifest: Manifest) -> Mapping[str, Any] | None:
    """The arguments of Megatron-LM in a manifest that names no family."""
    arguments: object = manifest.run.get(ARGUMENTS)
    is_named = bool(manifest.family) or not isinstance(arguments, dict)
    return None if is_named else cast("Mapping[str, Any]", arguments)


def unknown_padding(manifest: Manifest) -> list[str]:
    """A note, where arguments of Megatron-LM don't say how many rows of the vocabulary are tokens:
    its tokenizers of files know, and its flags don't."""
    arguments = _arguments_of(manifest)
    if arguments is None or _tokens(arguments):
        return []
    return [
        f"all {arguments.get('padded_vocab_size')} rows of the vocabulary were written: the "
        "arguments of the run don't say which are padding; --config DIR does"
    ]


def _tokens(arguments: Mapping[str, Any]) -> int:
    """How many rows of the vocabulary are tokens; 0 where the arguments say no number."""
    more = {
        "true_vocab_size": 0,
        "vocab_size": arguments.get("tokenizer_type") in _TOKENIZERS_WITH_END,
    }
    counts = [(arguments.get(name), end_mark) for name, end_mark in more.items()]
    return next((n + end_mark for n, end_mark in counts if type(n) is int and n > 0), 0)


def _module(arguments: Mapping[str, Any]) -> Any:
    """A stand-in for the live model, with the attributes that families measure: the arguments, and
    under the names of megatron-core's config what these call otherwise. Raises KeyError, TypeError,
    ValueError."""
    if arguments.get(POSITION_KIND) not in ("rope", "learned_absolute"):
        raise ValueError("no family has such positions")
    heads, padded = int(arguments["num_attention_heads"]), int(arguments["padded_vocab_size"])
    groups = int(arguments["num_query_groups"]) if arguments.get("group_query_attention") else heads
    experts = int(arguments.get("num_experts") or 0)
    widths = ("moe_ffn_hidden_size", "moe_shared_expert_intermediate_size")
    renamed = {
        "num_query_groups": groups,
        "gated_linear_unit": bool(arguments.get("swiglu")),
        "vocab_size": padded,
        TRUE_VOCAB: min(_tokens(arguments), padded) or padded,
        "max_sequence_length": int(arguments["max_position_embeddings"]),
        "share_embeddings_and_output_weights": not arguments.get(
            "untie_embeddings_and_output_weights"
        ),
        "num_moe_experts": experts or None,
        **{name: int(arguments.get(name) or 0) for name in widths if experts},
        "activation_func": _activation(arguments),
        "bias_activation_fusion": False,
    }
    same = ("num_layers", "hidden_size", "num_attention_heads", "kv_channels", "ffn_hidden_size")
    module = SimpleNamespace(
        **{**arguments, **{name: int(arguments[name]) for name in same}, **renamed}
    )
    module.config = module
    return module


def _with_scaling(architecture: Architecture | None, arguments: Mapping[str, Any]) -> Architecture:
    """With how rotary positions are scaled, which a module shows by its tables. Raises KeyError,
    ValueError."""
    if architecture is None:
        raise ValueError("the arguments say no architecture")
    if arguments[POSITION_KIND] != "rope":
        return architecture
    return replace(
        architecture,
        rope_factor=float(arguments["rope_scaling_factor"])
        if arguments.get("use_rope_scaling")
        else 0.0,
        interpolation=float(arguments.get("rotary_seq_len_interpolation_factor") or 0.0),
    )


def _activation(arguments: Mapping[str, Any]) -> str:
    if isinstance(name := arguments.get("activation_func"), str):
        return name
    if arguments.get("swiglu"):
        return "silu"
    if arguments.get("squared_relu"):
        return "squared_relu"
    # megatron-core's fused kernel of bias and gelu computes the tanh form
    tanh = arguments.get("openai_gelu") or (
        arguments.get("bias_gelu_fusion") and arguments.get("add_bias_linear")
    )
    return "gelu_tanh" if tanh else "gelu"
