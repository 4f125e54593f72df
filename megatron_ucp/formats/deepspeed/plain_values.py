"""What optimizer files say in plain values: hyper-parameters of groups, and the loss scale."""

import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatron_ucp.core.manifest import ParamGroup
from megatron_ucp.formats.deepspeed.model_file import Tree
from megatron_ucp.formats.pt.unpickler import Stand, TensorRef

Scalar = Callable[[TensorRef], float]

MEGATRON = "megatron"  # a mark of a group: what Megatron's optimizers keep there beside torch's
# Keys of a param group that say how an optimizer is built up, not how it steps.
GROUP_MARKS = frozenset(
    {
        *("params", "name", "moe", "param_names", "_ds_source_param_group_id", "step"),
        MEGATRON,
    }
)
_NUMPY = {
    "f2": "e",
    "f4": "f",
    "f8": "d",
    "i1": "b",
    "i2": "h",
    "i4": "i",
    "i8": "q",
    "u1": "B",
    "u2": "H",
    "u4": "I",
    "u8": "Q",
    "b1": "?",
}  # numpy's codes and those of struct
SCALER = (
    "dynamic",
    "cur_scale",
    "cur_iter",
    "last_overflow_iter",
    "scale_factor",
    "scale_window",
    "min_scale",
    "delayed_shift",
    "cur_hysteresis",
    "consecutive_hysteresis",
    "raise_error_at_min_scale",
)


def param_groups(groups: Sequence[Tree], scalar: Scalar) -> tuple[ParamGroup, ...]:
    """Each group's hyper-parameters, apart from what marks the group; lists become tuples, 0-d
    tensors numbers."""

    def plain(value: Any, depth: int = 0) -> Any:
        if isinstance(value, TensorRef):
            return scalar(value)
        if isinstance(value, list | tuple) and depth < 2 and len(value) <= 64:
            return tuple(plain(v, depth + 1) for v in value)
        return number(value)

    out: list[ParamGroup] = []
    for group in groups:
        settings = {str(k): plain(v) for k, v in group.items() if k not in GROUP_MARKS}
        marks = {k: v for k, v in group.items() if k in GROUP_MARKS and k != "params"}
        out.append(ParamGroup(settings, marks=marks))
    return tuple(out)


def number(value: Any) -> Any:
    """A plain value, which is cheap to compare and to show; anything else as a mark of its type.

    Values of a hostile file can share parts so often that comparing or printing them never ends. A
    scalar of numpy, as a schedule that uses numpy leaves in `lr`, is the number that it holds.
    """
    if isinstance(value, Stand) and value.qualname == "numpy.scalar":
        kind = str(value.get("dtype"))
        if kind[1:] in _NUMPY:
            order = kind[0].replace("|", "=")
            data: Any = value.state["data"]
            return struct.unpack(order + _NUMPY[kind[1:]], data)[0]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return f"<{type(value).__name__}>"


def loss_scaler(value: Any) -> Mapping[str, Any]:
    """The canonical form of a pickled loss scaler; empty without one."""
    fields = value.state if isinstance(value, Stand) else {}
    return {name: number(fields[name]) for name in SCALER if name in fields}
