"""What the arguments of Megatron-DeepSpeed's program say of its models: which rules describe them;
and how the program's files name and nest their parameters.

The program puts its arguments into the client state of each save, under `args`.
"""

import re
from collections.abc import Mapping
from typing import Any

from megatron_ucp.core.manifest import ORDER, OTHER_ANGLES
from megatron_ucp.core.mesh import Mesh
from megatron_ucp.core.rules import RuleSet
from megatron_ucp.core.values import InertObject
from megatron_ucp.formats import expect
from megatron_ucp.formats.deepspeed.weights import by_dotted_name, shapes_by_group
from megatron_ucp.formats.megatron.run_state import ARGUMENTS_KEY
from megatron_ucp.formats.rule_file import read_rules

# of the rows of query_key_value: by head, or in thirds of each rank
INTERLEAVED, SPLIT = "interleaved", "split"
_OF_SPLIT_CODE = "ds_sequence_parallel_fpdt"  # came with the change of the order
# Megatron-LM has no such argument as the first, other scripts under DeepSpeed none as the second.
_OF_PROGRAM = frozenset({"deepspeed_config", "padded_vocab_size"})


def arguments_of(saved: Any) -> Mapping[str, Any]:
    """Arguments by name, of what files hold of a namespace; empty for anything else."""
    return expect.section(saved.state if isinstance(saved, InertObject) else None)


def are_of_program(arguments: Mapping[str, Any]) -> bool:
    """Whether these are the arguments of Megatron-DeepSpeed's program."""
    return arguments.keys() >= _OF_PROGRAM


def kept_by_each_rank(client_state: Mapping[Any, Any]) -> frozenset[str]:
    """Keys of the client state of which each model-parallel rank of the program has its own value.
    The program's own universal load takes that of any rank on another mesh, and seeds anew."""
    is_program = are_of_program(arguments_of(client_state.get(ARGUMENTS_KEY)))
    return frozenset({ARGUMENTS_KEY, "rng_state"}) if is_program else frozenset()


def is_pipeline(client_state: Mapping[Any, Any]) -> bool:
    """Whether the program's model is DeepSpeed's PipelineModule, on one stage too."""
    arguments = arguments_of(client_state.get(ARGUMENTS_KEY))
    return are_of_program(arguments) and arguments.get("no_pipeline_parallel") is False


def on_mesh(client_state: Mapping[Any, Any], mesh: Mesh, pipeline: bool) -> Mapping[Any, Any]:
    """The client state of the program as it would be on another mesh: its load compares the degrees
    in the arguments. Of another program as it is."""
    if not kept_by_each_rank(client_state):
        return client_state
    saved: InertObject = client_state[ARGUMENTS_KEY]
    degrees = {
        "tensor_model_parallel_size": mesh.tp,
        "pipeline_model_parallel_size": mesh.pp,
        "data_parallel_size": mesh.dp,
        "world_size": mesh.world,
        "no_pipeline_parallel": not pipeline,
    }
    changed = InertObject(saved.qualname, saved.args, {**saved.state}, saved.made)
    changed.state |= {name: value for name, value in degrees.items() if name in saved.state}
    return {**client_state, ARGUMENTS_KEY: changed}


_MODEL, _EMBEDDING = "language_model", "embedding"


def nested(module: Mapping[str, Any]) -> dict[str, Any]:
    """Weights by dotted name as the program's model without pipeline saves and loads them: a
    dictionary for each of its parts, `language_model`, `embedding`, `word_embeddings`, or
    `encoder`, and in the last one the rest of the names. Those of another program as they are."""
    parts = (f"{_MODEL}.{_EMBEDDING}.", f"{_MODEL}.encoder.")  # LLaVA has a decoder there
    if not all(any(name.startswith(part) for name in module) for part in parts):
        return {**module}
    tree: dict[str, Any] = {}
    for name, value in module.items():
        place, rest = tree, name
        if name.startswith(f"{_MODEL}."):
            depth = 3 if name.startswith(f"{_MODEL}.{_EMBEDDING}.") else 2
            *parts, rest = name.split(".", depth)
            for part in parts:
                place = place.setdefault(part, {})
        place[rest] = value
    return tree


# The same in Megatron-LM's words.
_AS_IN_MEGATRON = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "kv_channels"),
    *("padded_vocab_size", "tokenizer_type", "max_position_embeddings"),
    *("untie_embeddings_and_output_weights", "swiglu", "add_bias_linear", "layernorm_epsilon"),
    *("rotary_percent", "apply_residual_connection_post_layernorm"),
)
_NORMS = {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}
_POSITIONS = {(True, False): "learned_absolute", (False, True): "rope"}


def flags_of_model(arguments: Mapping[str, Any], info: object = None) -> dict[str, Any]:
    """What the arguments of the program say of its model, in the words of Megatron-LM's; `info` is
    what its files say of its vocabulary. Empty of another program's.

    Code with the split order takes the cosines of the rotary angles for the angles (its rotary
    embedding gives cosines and sines, its attention wants angles), but where DeepSpeed's Ulysses
    applies them in flash attention.
    """
    if not are_of_program(arguments):
        return {}
    out = {name: arguments.get(name) for name in _AS_IN_MEGATRON}
    said = expect.section(info)
    kinds = "add_position_embedding", "use_rotary_position_embeddings"
    learned, rotary = (arguments.get(name) is True for name in kinds)
    heads, groups = arguments.get("num_attention_heads"), arguments.get("num_key_value_heads")
    is_null = arguments.get("tokenizer_type") == "NullTokenizer"  # no other goes by vocab_size
    out |= {
        "vocab_size": arguments.get("vocab_size") if is_null else None,
        "true_vocab_size": said.get("original_vocab_size"),
        ORDER: order_of(arguments),
        "normalization": _NORMS.get(str(arguments.get("normalization"))),
        "layernorm_zero_centered_gamma": bool(arguments.get("apply_layernorm_1p")),
        "position_embedding_type": _POSITIONS.get((learned, rotary), "none"),
        "rotary_base": arguments.get("rope_theta", 10000),
        "group_query_attention": groups not in (None, heads),
        "num_query_groups": groups,
        "activation_func": _activation(arguments),
        OTHER_ANGLES: rotary and _rotates_otherwise(arguments),
    }
    return {name: value for name, value in out.items() if isinstance(value, _PLAIN)}


_PLAIN = (bool, int, float, str)


def _rotates_otherwise(arguments: Mapping[str, Any]) -> bool:
    """Whether queries and keys are rotated by other angles than rotary positions have: in older
    code under Ulysses, where each rank counts positions from 0, and since then as `flags_of_model`
    says."""
    sizes, forced = arguments.get("ds_sequence_parallel_size"), "force_ds_sequence_parallel"
    flash = ("use_flash_attn_v1", "use_flash_attn_v2", "use_flash_attn_builder")
    is_ulysses = bool(arguments.get(forced)) or (type(sizes) is int and sizes > 1)
    if _OF_SPLIT_CODE not in arguments:
        return is_ulysses
    return not (is_ulysses and any(arguments.get(name) for name in flash))


def _activation(arguments: Mapping[str, Any]) -> str:
    """What its MLP computes; the fused kernel of bias and gelu has the tanh form."""
    kinds = {
        "openai_gelu": "gelu_tanh",
        "onnx_safe": "gelu",
        "swiglu": "silu",
        "squared_relu": "squared_relu",
        "bias_gelu_fusion": "gelu_tanh",
    }
    return next((kind for flag, kind in kinds.items() if arguments.get(flag)), "gelu")


def order_of(arguments: Mapping[str, Any]) -> str:
    """The order of the rows of query_key_value where the arguments of the run decide it, "" where
    they don't. Fewer key-value heads than heads: the code with the split order can't train that."""
    heads, groups = arguments.get("num_attention_heads"), arguments.get("num_key_value_heads")
    if type(heads) is int and type(groups) is int and 0 < groups < heads:
        return INTERLEAVED
    return SPLIT if _OF_SPLIT_CODE in arguments else ""


def rules_for(meta: Mapping[str, Any], file: str) -> RuleSet | None:
    """`rules_of` the arguments in a model file; None where they have no rule for a parameter that
    it lists by a canonical name, as of BERT."""
    rules = rules_of(arguments_of(meta.get(ARGUMENTS_KEY)))
    if rules is None:
        return None
    listed = shapes_by_group(meta, file) or [by_dotted_name(meta.get("module") or {})]
    names = [str(name) for named in listed for name in named]
    canonical = [name for name in names if not _IN_PIPE.match(name)]
    return rules if all(map(rules.matching, canonical)) else None


_IN_PIPE = re.compile(r"(?:tied_modules|\d+)\.")


def rules_of(arguments: Mapping[str, Any]) -> RuleSet | None:
    """The rules that come with the package for a run with these arguments; None where they don't
    decide it, and for another program's."""
    order = order_of(arguments) if are_of_program(arguments) else ""
    gated = "_swiglu" if arguments.get("swiglu") else ""
    return read_rules(f"megatron_deepspeed_{order}{gated}") if order else None
