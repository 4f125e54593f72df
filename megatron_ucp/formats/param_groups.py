"""Parameter groups of optimizer files: their hyper-parameters, as plain values."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePath
from typing import Any

from megatron_ucp.core.manifest import ParamGroup
from megatron_ucp.core.values import InertObject, NumpyInt
from megatron_ucp.formats.pt.refs import TensorRef
from megatron_ucp.formats.pt.unpickle import with_tensors

Tensors = Callable[[TensorRef], InertObject]  # reads a small tensor of a file

MEGATRON = "megatron"  # a mark of a group: what Megatron's optimizers keep there beside torch's
# Keys of a param group that say how an optimizer is built up, not how it steps.
GROUP_MARKS = frozenset(
    {
        *("params", "name", "moe", "param_names", "_ds_source_param_group_id", "step"),
        MEGATRON,
    }
)


def param_groups(groups: Sequence[Mapping[str, Any]], tensors: Tensors) -> tuple[ParamGroup, ...]:
    """Each group's hyper-parameters as they are, without the keys that mark it. Raises
    UnsupportedError for a large tensor among them."""
    out: list[ParamGroup] = []
    for group in groups:
        own = {str(k): v for k, v in group.items() if k not in GROUP_MARKS}
        settings: Any = with_tensors(own, tensors)
        marks = {k: v for k, v in group.items() if k in GROUP_MARKS and k != "params"}
        out.append(ParamGroup(settings, marks=marks))
    return tuple(out)


def number(value: Any) -> Any:
    """A number, text or truth value of Python's own type, which is cheap to compare and to show and
    can be set in a live object; anything else as a mark of its type.

    Values of a hostile file can share parts so often that comparing or printing them never ends.
    """
    if isinstance(value, NumpyInt) and value.dtype.endswith("b1"):
        return bool(value)
    if value is None or isinstance(value, bool):
        return value
    for kind in (int, float, str):
        if isinstance(value, kind):
            return kind(value)
    return str(value) if isinstance(value, PurePath) else f"<{type(value).__name__}>"
