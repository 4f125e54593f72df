"""What the arguments of Megatron-DeepSpeed's program say of its models: which rules describe them;
and how the program's files name and nest their parameters.

The program puts its arguments into the client state of each save, under `args`.
"""

from collections.abc import Collection, Mapping
from typing import Any, cast

from megatron_ucp.core.layers import TIED, Layers
from megatron_ucp.core.mesh import Mesh
from megatron_ucp.core.rules import RuleSet
from megatron_ucp.core.values import InertObject
from megatron_ucp.formats.rule_file import read_rules

ARGUMENTS = "args"
# of the rows of query_key_value: by head, or in thirds of each rank
INTERLEAVED, SPLIT = "interleaved", "split"
_OF_SPLIT_CODE = "ds_sequence_parallel_fpdt"  # came with the change of the order
_OF_PROGRAM = "deepspeed_config"  # Megatron-LM has no such argument


def arguments_of(saved: Any) -> Mapping[str, Any]:
    """Arguments by name, of what files hold of a namespace; empty for anything else."""
    state = saved.state if isinstance(saved, InertObject) else None
    return cast("Mapping[str, Any]", state) if isinstance(state, Mapping) else {}


def kept_by_each_rank(client_state: Mapping[Any, Any]) -> frozenset[str]:
    """Keys of the client state of which each model-parallel rank of the program has its own value.
    The program's own universal load takes that of any rank on another mesh, and seeds anew."""
    is_program = _OF_PROGRAM in arguments_of(client_state.get(ARGUMENTS))
    return frozenset({ARGUMENTS, "rng_state"}) if is_program else frozenset()


def is_pipeline(client_state: Mapping[Any, Any]) -> bool:
    """Whether the program's model is DeepSpeed's PipelineModule, on one stage too."""
    arguments = arguments_of(client_state.get(ARGUMENTS))
    return _OF_PROGRAM in arguments and arguments.get("no_pipeline_parallel") is False


def on_mesh(client_state: Mapping[Any, Any], mesh: Mesh, pipeline: bool) -> Mapping[Any, Any]:
    """The client state of the program as it would be on another mesh: its load compares the degrees
    in the arguments. Of another program as it is."""
    if not kept_by_each_rank(client_state):
        return client_state
    saved: InertObject = client_state[ARGUMENTS]
    degrees = {
        "tensor_model_parallel_size": mesh.tp,
        "pipeline_model_parallel_size": mesh.pp,
        "data_parallel_size": mesh.dp,
        "world_size": mesh.world,
        "no_pipeline_parallel": not pipeline,
    }
    changed = InertObject(saved.qualname, saved.args, {**saved.state}, saved.made)
    changed.state |= {name: value for name, value in degrees.items() if name in saved.state}
    return {**client_state, ARGUMENTS: changed}


_MODEL, _EMBEDDING = "language_model", "embedding"
_LAYERS = f"{_MODEL}.encoder.layers."
_WORDS = f"{_MODEL}.{_EMBEDDING}."


def layers_of_program(params: Collection[str]) -> Layers | None:
    """The program's list of layers for a model with these parameters: a cast, the embedding, the
    layers, with experts a loss, the last norm, the head; None for another program's names.

    A tied head is the whole embedding, positions too, called through a function: it has no layer
    file.
    """
    if not any(name.startswith(_WORDS) for name in params):
        return None
    numbers = [int(name.split(".")[3]) for name in params if name.startswith(_LAYERS)]
    tied = f"{_MODEL}.output_layer.weight" not in params
    norm = 2 + max(numbers, default=-1) + 1 + any(".deepspeed_moe." in name for name in params)
    ends = {
        _WORDS: (1, ""),
        f"{_MODEL}.encoder.final_layernorm.": (norm, ""),
        f"{_MODEL}.output_layer.": (norm + 1, "lm_head."),
    }
    held: list[dict[str, str]] = [{} for _ in range(norm + 2)]
    names: dict[str, str] = {}
    for name in params:
        if name.startswith(_LAYERS):
            number, _, rest = name.removeprefix(_LAYERS).partition(".")
            position = int(number) + 2
        else:
            prefix = next((one for one in ends if name.startswith(one)), None)
            if prefix is None:
                continue
            position, before = ends[prefix]
            rest = before + name.removeprefix(prefix)
        pipe = f"{TIED}.embed.{rest}" if tied and position == 1 else f"{position}.{rest}"
        held[position][rest], names[pipe] = pipe, name
    if tied:
        held[-1] = dict(held[1])
    filed = frozenset(at for at in range(len(held) - tied) if held[at])
    return Layers(tuple(held), names, filed)


def nested(module: Mapping[str, Any]) -> dict[str, Any]:
    """Weights by dotted name as the program's model without pipeline saves and loads them: a
    dictionary for each of its parts, `language_model`, `embedding`, `word_embeddings`, or
    `encoder`, and in the last one the rest of the names."""
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


def order_of(arguments: Mapping[str, Any]) -> str:
    """The order of the rows of query_key_value where the arguments of the run decide it, "" where
    they don't. Fewer key-value heads than heads: the code with the split order can't train that."""
    heads, groups = arguments.get("num_attention_heads"), arguments.get("num_key_value_heads")
    if type(heads) is int and type(groups) is int and 0 < groups < heads:
        return INTERLEAVED
    return SPLIT if _OF_SPLIT_CODE in arguments else ""


def rules_of(arguments: Mapping[str, Any]) -> RuleSet | None:
    """The rules that come with the package for a run with these arguments; None where they don't
    decide it."""
    order = order_of(arguments)
    gated = "_swiglu" if arguments.get("swiglu") else ""
    return read_rules(f"megatron_deepspeed_{order}{gated}") if order else None
