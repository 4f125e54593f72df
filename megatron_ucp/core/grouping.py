"""Values by a key that several of them share."""

from collections.abc import Iterable
from typing import TypeVar

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


def grouped(pairs: Iterable[tuple[_Key, _Value]]) -> dict[_Key, list[_Value]]:
    """The values of each key, keys and values in the order in which they come."""
    out: dict[_Key, list[_Value]] = {}
    for key, value in pairs:
        out.setdefault(key, []).append(value)
    return out
