"""Takes trees apart that somebody else wrote: a value of another type than its key promises is a
damaged file, and nothing else is. A reader that asks here needs no `except`, which would hide its
own faults.

Example: `expect.key(tree, "step", int, file)` is `tree["step"]`, or raises DamagedFileError.
"""

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from megatron_ucp.errors import DamagedFileError

Expected = TypeVar("Expected")
OTHER_STRUCTURE = "a file has another structure than its keys promise"


def kind(value: Any, expected: type[Expected], what: str, file: object) -> Expected:
    """A value of a type; True is no int."""
    if not isinstance(value, expected) or (expected is int and isinstance(value, bool)):
        raise other_structure(f"{what}: {expected.__name__}", value, file)
    return value


def other_structure(expected: str, value: object, file: object) -> DamagedFileError:
    """The error for a value of another type."""
    return DamagedFileError(
        OTHER_STRUCTURE, file=file, expected=expected, found=type(value).__name__
    )


def key(tree: Mapping[Any, Any], name: str, expected: type[Expected], file: object) -> Expected:
    """The value that a dictionary must have under a key."""
    return kind(tree.get(name), expected, name, file)


def key_or(tree: Mapping[Any, Any], name: str, default: Expected, file: object) -> Expected:
    """The value that a dictionary may have under a key, of the type of the default. None is the
    default too."""
    value = tree.get(name)
    return default if value is None else kind(value, type(default), name, file)


def section(tree: object, *keys: Any) -> Mapping[Any, Any]:
    """What lies below some keys of dictionaries that may be anybody's: what is no dictionary says
    nothing, and is empty."""
    for key in keys:
        tree = section(tree).get(key)
    return tree if isinstance(tree, Mapping) else {}


def each(value: Any, expected: type[Expected], what: str, file: object) -> list[Expected]:
    """A list of values of one type."""
    return [kind(item, expected, what, file) for item in kind(value, list, what, file)]


def texts(value: Any, what: str, file: object) -> list[str]:
    """Names in a list or a set; None is none of them."""
    if value is not None and not isinstance(value, Iterable):
        raise other_structure(f"{what}: names", value, file)
    return [kind(item, str, what, file) for item in value or ()]


def sizes(value: Any, what: str, file: object) -> tuple[int, ...]:
    """Whole numbers from 0, such as a shape."""
    is_list = isinstance(value, list | tuple)
    if not is_list or not all(type(size) is int and 0 <= size < 2**63 for size in value):
        raise other_structure(f"{what}: sizes", value, file)
    return tuple(value)


def number(value: Any, what: str, file: object) -> float:
    """A number, as a float."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise other_structure(f"{what}: a number", value, file) from None
