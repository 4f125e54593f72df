"""Values by a key that several of them share."""

from collections.abc import Iterable
from typing import TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


def grouped(pairs: Iterable[tuple[Key, Value]]) -> dict[Key, list[Value]]:
    """The values of each key, keys and values in the order in which they come."""
    out: dict[Key, list[Value]] = {}
    for key, value in pairs:
        out.setdefault(key, []).append(value)
    return out
