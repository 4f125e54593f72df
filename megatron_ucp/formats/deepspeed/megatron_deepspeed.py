"""What the arguments of Megatron-DeepSpeed's program say of its models: which rules describe them.

The program puts its arguments into the client state of each save, under `args`.
"""

from collections.abc import Mapping
from typing import Any, cast

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
