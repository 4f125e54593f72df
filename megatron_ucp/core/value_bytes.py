"""What plain values in a file may say of themselves: names of classes and dtypes, and how many
bytes a shape has. Whoever builds a value relies on it, and a file may say anything."""

import re
import reprlib
from math import prod
from typing import Any, cast

_MAX_DIMS = 64
_NAME = re.compile(r"[\w<>-]+(\.[\w<>-]+)*")  # "<locals>" is part of some, dashes of modules
_NUMPY_DTYPE = re.compile(r"[<>|=][biufcSU](\d{1,9})", re.ASCII)
_TENSOR_DTYPE = re.compile(r"(?:(?:b?float|u?int|complex)(8|16|32|64|128)(?:_\w+)?|bool)", re.ASCII)
_TEXTS = {
    "DtypeName": re.compile(r"torch\." + _TENSOR_DTYPE.pattern, re.ASCII),
    "DeviceName": re.compile(r"[a-z]{1,20}(:\d{1,4})?", re.ASCII),
}


def is_name(qualname: str) -> bool:
    """Whether a text may be the module and name of a class or function."""
    return _NAME.fullmatch(qualname) is not None


def check_text(kind: str, text: str) -> None:
    """Raises ValueError where a text is no "DtypeName" or "DeviceName"."""
    if kind in _TEXTS and not _TEXTS[kind].fullmatch(text):
        raise ValueError(f"{reprlib.repr(text)} is no {kind}")


def _matched(pattern: re.Pattern[str], dtype: object, what: str) -> re.Match[str]:
    found = pattern.fullmatch(dtype) if isinstance(dtype, str) else None
    if found is None:
        raise ValueError(f"{what} {reprlib.repr(dtype)}")
    return found


def bytes_of_numpy(dtype: object) -> int:
    """Bytes of one element. Raises ValueError for a dtype that is no plain number or text."""
    found = _matched(_NUMPY_DTYPE, dtype, "numpy's dtype")
    return int(found[1]) * (4 if found[0][1] == "U" else 1)


def bytes_of_torch(dtype: object) -> int:
    """Bytes of one element of a tensor. Raises ValueError for what is no dtype."""
    found = _matched(_TENSOR_DTYPE, dtype, "a tensor's dtype")
    return int(found[1] or 8) // 8


def check_bytes(size: int, shape: object, data: object) -> None:
    """Raises ValueError where elements of `size` bytes in a shape are not as many bytes."""
    sizes = cast("tuple[Any, ...]", shape) if isinstance(shape, tuple) else (-1,)
    good = len(sizes) <= _MAX_DIMS and all(type(one) is int and one >= 0 for one in sizes)
    if not good or type(data) is not bytes or len(data) != prod(sizes) * size:
        raise ValueError("an array or tensor whose shape does not fit its bytes")
