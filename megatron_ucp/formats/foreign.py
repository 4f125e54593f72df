"""Takes trees apart that somebody else wrote: what they hold otherwise than their keys promise is
damage, and nothing else is. A reader that asks here needs no `except`, which would hide its own
faults."""

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from megatron_ucp.errors import DamagedFileError

Expected = TypeVar("Expected")
OTHER_STRUCTURE = "a file has another structure than its keys promise"


def of_kind(value: Any, kind: type[Expected], what: str, file: object) -> Expected:
    """A value that must be of a kind. Raises DamagedFileError."""
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise no_such(f"{what}: {kind.__name__}", value, file)
    return value


def no_such(expected: str, value: object, file: object) -> DamagedFileError:
    """The error for a value that is not what was expected."""
    return DamagedFileError(
        OTHER_STRUCTURE, file=file, expected=expected, found=type(value).__name__
    )


def at_key(tree: Mapping[Any, Any], key: str, kind: type[Expected], file: object) -> Expected:
    """What a dictionary must have under a key. Raises DamagedFileError."""
    return of_kind(tree.get(key), kind, key, file)


def at_key_or(tree: Mapping[Any, Any], key: str, default: Expected, file: object) -> Expected:
    """What a dictionary may have under a key, of the kind of the default, which stands for nothing
    as well. Raises DamagedFileError."""
    value = tree.get(key)
    return default if value is None else of_kind(value, type(default), key, file)


def each(value: Any, kind: type[Expected], what: str, file: object) -> list[Expected]:
    """A list of one kind. Raises DamagedFileError."""
    return [of_kind(one, kind, what, file) for one in of_kind(value, list, what, file)]


def texts(value: Any, what: str, file: object) -> list[str]:
    """Names, in a list or a set, or none. Raises DamagedFileError."""
    if value is not None and not isinstance(value, Iterable):
        raise no_such(f"{what}: names", value, file)
    return [of_kind(one, str, what, file) for one in value or ()]


def sizes(value: Any, what: str, file: object) -> tuple[int, ...]:
    """Whole numbers from 0, such as a shape. Raises DamagedFileError."""
    good = isinstance(value, list | tuple)
    if not good or not all(type(n) is int and 0 <= n < 2**63 for n in value):
        raise no_such(f"{what}: sizes", value, file)
    return tuple(value)


def as_float(value: Any, what: str, file: object) -> float:
    """A number. Raises DamagedFileError."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise no_such(f"{what}: a number", value, file) from None
