"""Parameter groups of optimizer files: their hyper-parameters, as plain values."""

from collections.abc import Callable, Mapping, Sequence
from math import inf
from pathlib import PurePath
from typing import Any

from megatron_ucp.core.manifest import ParamGroup
from megatron_ucp.core.values import InertObject, NumpyInt
from megatron_ucp.errors import DamagedFileError
from megatron_ucp.formats.pt.refs import TensorRef, number_in
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


# What every optimizer takes as numbers that are not below zero, or as None.
_AMOUNTS = ("lr", "initial_lr", "weight_decay")


def param_groups(
    groups: Sequence[Mapping[str, Any]], tensors: Tensors, file: str
) -> tuple[ParamGroup, ...]:
    """Each group's hyper-parameters as they are, without the keys that mark it. Raises
    UnsupportedError for a large tensor among them, DamagedFileError for a rate that no optimizer
    takes."""
    out: list[ParamGroup] = []
    for group in groups:
        own = {str(k): v for k, v in group.items() if k not in GROUP_MARKS}
        settings: Any = with_tensors(own, tensors)
        for key in _AMOUNTS:
            _check_amount(key, settings.get(key), file)
        marks = {k: v for k, v in group.items() if k in GROUP_MARKS and k != "params"}
        out.append(ParamGroup(settings, marks=marks))
    return tuple(out)


def _check_amount(key: str, value: Any, file: str) -> None:
    if isinstance(value, InertObject):
        value = number_in(value, file)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is not None and not (is_number and 0 <= value < inf):
        raise DamagedFileError(
            f"a parameter group has a {key} that no optimizer takes",
            file=file,
            expected="a number of at least 0",
            found=repr(number(value))[:80],
        )


def step_of(value: float, file: str, parameter: str | None = None) -> float:
    """A count of steps. Raises DamagedFileError for a number that counts nothing."""
    if not (value >= 0 and float(value).is_integer()):
        raise DamagedFileError(
            "a count of steps is none",
            file=file,
            parameter=parameter,
            expected="a whole number of at least 0",
            found=value,
        )
    return value


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
