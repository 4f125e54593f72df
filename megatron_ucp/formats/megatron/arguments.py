"""The arguments of a run, as Megatron-LM saves them: a Namespace of some 650 values."""

from collections.abc import Mapping
from typing import Any

from megatron_ucp.core.mesh import Mesh
from megatron_ucp.errors import UsageError
from megatron_ucp.formats.deepspeed.plain_values import number
from megatron_ucp.formats.pt.values import DtypeName, Stand

# the arguments that say the sizes of a mesh, by the names of its axes
_SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "context_parallel_size",
    "data_parallel_size",
)


def plain_arguments(tree: Any) -> dict[str, Any]:
    """Every argument as a plain value: members of enums become their values, dtypes their names,
    what is neither a mark of its type. Empty for what is no Namespace."""
    if not isinstance(tree, Stand) or not tree.qualname.endswith("Namespace"):
        return {}
    return {str(name): _plain(value) for name, value in tree.state.items()}


def _plain(value: Any, depth: int = 0) -> Any:
    if isinstance(value, DtypeName):
        return str(value)
    if isinstance(value, Stand) and len(value.args) == 1 and not value.state:
        return number(value.args[0])
    if isinstance(value, list | tuple) and depth < 3 and len(value) <= 4096:
        return [_plain(item, depth + 1) for item in value]
    return number(value)


def size(arguments: Mapping[str, Any], name: str, default: int = 1) -> int:
    """A whole number of at least 1; `default` where the arguments say none."""
    value = arguments.get(name)
    return value if type(value) is int and value > 0 else default


def rate(arguments: Mapping[str, Any], name: str) -> float | None:
    """A number; None where the arguments say none."""
    value = arguments.get(name)
    return float(value) if isinstance(value, int | float) and value is not True else None


def mesh_of(arguments: Mapping[str, Any]) -> Mesh:
    """The mesh of the run; that of one rank where the arguments don't say any."""
    tp, pp, vpp, ep, etp, cp, dp = (size(arguments, name) for name in _SIZES)
    if type(arguments.get("expert_tensor_parallel_size")) is not int:
        etp = tp
    order = "pp-dp" if arguments.get("use_tp_pp_dp_mapping") else "dp-pp"
    try:
        return Mesh(tp=tp, pp=pp, vpp=vpp, ep=ep, etp=etp, cp=cp, dp=dp, order=order)
    except UsageError:
        return Mesh()
