"""Plain values that are no parameters, exactly: what stands in schedulers, parameter groups, client
state, counters and positions.

This is the one closed representation of them, with Python's own library alone. Python's values are
themselves. A value of numpy or torch is one of the inert classes here, with its type and bits; an
object of any other class is a `Stand`, a function or class a `Global`: names, which nothing
imports. `coded` writes all of them as JSON, for manifests, and `decoded` reads that; `same`
compares type and bits, `alike` numbers and order alone.
"""

import base64
import datetime
import json
import math
import pathlib
import reprlib
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from typing import Any, cast

from megatron_ucp.core.value_bytes import (
    bytes_of_numpy,
    bytes_of_torch,
    check_bytes,
    check_text,
    is_name,
)

# ------------------------------------------------ inert classes


class _Name(str):
    """A text that equals no text of another class, as what it stands for equals none: both may be
    keys of one dict."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and str.__eq__(self, cast("str", other))

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash((type(self).__name__, str(self)))


class DtypeName(_Name):
    """A torch.dtype, as its name ("torch.float32")."""

    __slots__ = ()


class DeviceName(_Name):
    """A torch.device, as its text ("cuda:0")."""

    __slots__ = ()


class VersionName(str):
    """A version of torch (`torch.__version__`), which is a text of a class of its own."""

    __slots__ = ()


class Size(tuple[int, ...]):
    """A torch.Size, as a tuple of numbers."""

    __slots__ = ()


class NumpyScalar:
    """A scalar of numpy: an equal value of Python, with the dtype ("<f4") and the bytes of it."""

    dtype: str
    data: bytes


class NumpyInt(NumpyScalar, int):
    """Of whole numbers, and truth values."""


class NumpyFloat(NumpyScalar, float):
    """Of floating point numbers."""


class NumpyComplex(NumpyScalar, complex):
    """Of complex numbers."""


class NumpyText(NumpyScalar, str):
    """Of text."""


class NumpyBytes(NumpyScalar, bytes):
    """Of bytes."""


# numpy's codes of dtypes, and those of struct
_CODES = {
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
    "c8": "ff",
    "c16": "dd",
}


def is_numpy_scalar(dtype: str) -> bool:
    """Whether scalars of a dtype ("<f4") can be represented: numbers of the usual sizes, text."""
    return dtype[1:] in _CODES or dtype[1:2] in ("U", "S")


def numpy_scalar(dtype: str, data: bytes) -> NumpyScalar:
    """A scalar of numpy by its dtype and bytes. Raises ValueError for a dtype that has none here,
    or bytes that are no such value."""
    if not is_numpy_scalar(dtype):
        raise ValueError(f"a scalar of numpy's dtype {dtype}")
    kind, made = _python_value(dtype, data)
    scalar = kind.__new__(kind, made)
    scalar.dtype, scalar.data = dtype, data
    return scalar


def _python_value(dtype: str, data: bytes) -> tuple[Any, Any]:
    order = "<" if dtype[0] in "|=" else dtype[0]
    if dtype[0] not in "<>|=" or len(data) != bytes_of_numpy(dtype):
        raise ValueError(f"{len(data)} bytes of numpy's dtype {dtype}")
    if dtype[1] == "U":
        text = data.decode("utf-32-be" if order == ">" else "utf-32-le", "surrogatepass")
        return NumpyText, text.rstrip("\0")
    if dtype[1] == "S":
        return NumpyBytes, data.rstrip(b"\0")
    parts = struct.unpack(order + _CODES[dtype[1:]], data)
    if dtype[1] == "c":
        return NumpyComplex, complex(*parts)
    return (NumpyFloat if dtype[1] == "f" else NumpyInt), parts[0]


class Stand:
    """Stands for an object: the name of its class, the arguments and the attributes, no behaviour.

    `made` says how a pickle makes it: by a "call" of the class, as a "new" object of it (without
    its `__init__`), or as the "member" of an enum that the argument names. numpy arrays have the
    attributes `dtype` (such as "<f4"), `shape`, `fortran_order` and `data` (bytes), tensors
    `dtype`, `shape` and `data`. Of an allowed subclass of list or dict, the content is under
    `__elements__` or `__items__`.
    """

    __slots__ = ("qualname", "args", "state", "made")

    def __init__(
        self,
        qualname: str,
        args: tuple[object, ...] = (),
        state: dict[str, object] | None = None,
        made: str = "call",
    ) -> None:
        self.qualname = qualname
        self.args = args
        self.state: dict[str, object] = {} if state is None else state
        self.made = made

    def get(self, name: str, default: object = None) -> object:
        """The attribute `name` that was pickled, or `default`."""
        return self.state.get(name, default)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Stand):
            return NotImplemented
        return (self.qualname, self.args, self.state) == (other.qualname, other.args, other.state)

    def __hash__(self) -> int:
        return hash((self.qualname, self.args))

    def __repr__(self) -> str:  # one level only, see `shown`
        args = ", ".join(brief(item) for item in self.args[:6])
        state = ", ".join(f"{name}={brief(item)}" for name, item in list(self.state.items())[:12])
        return f"Stand({self.qualname!r}, ({args}), {state})"


class Global:
    """A class or function that a pickle names, as a value: only its name."""

    __slots__ = ("qualname",)

    def __init__(self, qualname: str) -> None:
        self.qualname = qualname

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Global) and other.qualname == self.qualname

    def __hash__(self) -> int:
        return hash(self.qualname)

    def __repr__(self) -> str:
        return f"Global({self.qualname!r})"


ARRAY, DTYPE, TENSOR = "numpy.ndarray", "numpy.dtype", "torch.Tensor"  # names of Stands
NUMPY_SCALARS = (NumpyInt, NumpyFloat, NumpyComplex, NumpyText, NumpyBytes)
DATES = (
    datetime.date,
    datetime.datetime,
    datetime.time,
    datetime.timedelta,
    datetime.timezone,
)
PATHS = (pathlib.PosixPath, pathlib.PurePosixPath, pathlib.PureWindowsPath)
_NAMES: tuple[Any, ...] = (DtypeName, DeviceName, VersionName)
SCALARS = frozenset(
    {
        *(type(None), bool, int, float, complex, str, bytes, Global),
        *_NAMES,
        *NUMPY_SCALARS,
        *DATES,
        *PATHS,
    }
)
"""Classes whose values Python hashes and compares without looking into others."""
FACTORIES: dict[str, Any] = {
    f"builtins.{kind.__name__}": kind for kind in (list, dict, int, float, set)
}
"""What a defaultdict may make."""
NAMED_TYPES: dict[str, type] = {
    f"builtins.{kind.__name__}": kind for kind in (list, dict, int, float, str, bool, tuple)
}
"""Classes of Python that are values themselves: what a flag is parsed as, say."""


def factory_name(value: "defaultdict[Any, Any]") -> str | None:
    """What a defaultdict makes; None for one that makes nothing, and for what is in no table."""
    made = value.default_factory
    return next((name for name, kind in FACTORIES.items() if kind is made), None)


def empty_like(item: Any) -> Any:
    """A container of the same class and settings without anything in it."""
    if isinstance(item, deque):
        return deque[Any](maxlen=cast("deque[Any]", item).maxlen)
    if isinstance(item, defaultdict):
        return defaultdict[Any, Any](cast("defaultdict[Any, Any]", item).default_factory)
    return type(item)()


# ------------------------------------------------ shown


def brief(value: object) -> str:
    """A text of bounded length: of what holds others the name of its class."""
    return reprlib.repr(value) if type(value) in SCALARS else type(value).__name__


class _Short(reprlib.Repr):
    def repr_instance(self, x: object, level: int) -> str:
        """What `reprlib` does not cut itself (an OrderedDict, a Counter, a bytearray) it would show
        in full."""
        return repr(x)[:200] if isinstance(x, Stand | Global) or _is_small(x) else brief(x)


def _is_small(x: object) -> bool:
    """Whether a value says itself that its text is short."""
    return bool(getattr(type(x), "IS_SHORT", False))


shown: Callable[[object], str] = _Short().repr
"""A text of bounded length in bounded time: a hostile value shares its parts so often that a full
text never ends."""


# ------------------------------------------------ as JSON

_MARK = "$"  # the key that tells a coded value from a dict
_PLAIN_BITS = 2**12  # of a whole number that JSON may write in digits
_SEQUENCES: dict[str, Any] = {"tuple": tuple, "set": set, "frozenset": frozenset, "Size": Size}
_MAPPINGS: dict[str, Any] = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}
_TEXTS: dict[str, Any] = {kind.__name__: kind for kind in _NAMES}
_CALLED: dict[str, Any] = {kind.__name__: kind for kind in (*DATES, *PATHS)}


def coded(value: Any) -> Any:
    """A value as JSON has it. Raises TypeError for one that is none of these."""
    kind = cast("type[Any]", type(value))
    if value is None or kind in (bool, str):
        return value
    if kind is list:
        return [coded(item) for item in value]
    if kind is dict and all(type(key) is str and key != _MARK for key in value):
        return {key: coded(item) for key, item in value.items()}
    if kind is int and value.bit_length() < _PLAIN_BITS:
        return value
    if kind is float and math.isfinite(value):
        return value
    return _marked(value, kind)


def _marked(value: Any, kind: type[Any]) -> dict[str, Any]:
    name = kind.__name__
    if name in _SEQUENCES and kind is _SEQUENCES[name]:
        items = [coded(item) for item in value]
        if kind in (set, frozenset):  # the same text whatever order the process has them in
            items.sort(key=lambda item: json.dumps(item, sort_keys=True))
        return {_MARK: name, "items": items}
    if kind in (dict, OrderedDict, Counter, defaultdict, deque):
        return _marked_container(value, name)
    if isinstance(value, NumpyScalar):
        return {_MARK: "numpy.scalar", "dtype": value.dtype, "data": _base64(value.data)}
    if kind in _NAMES:
        return {_MARK: name, "text": str(value)}
    if name in _CALLED and kind is _CALLED[name]:
        return {_MARK: name, "args": [coded(part) for part in value.__reduce_ex__(2)[1]]}
    if kind is Stand:
        return {
            _MARK: "object",
            "name": value.qualname,
            "made": value.made,
            "args": [coded(part) for part in value.args],
            "state": [[part, coded(item)] for part, item in value.state.items()],
        }
    if kind is Global:
        return {_MARK: "name", "name": value.qualname}
    return _marked_scalar(value, kind)


def _marked_container(value: Any, name: str) -> dict[str, Any]:
    if isinstance(value, deque):
        items = [coded(item) for item in cast("deque[Any]", value)]
        return {_MARK: name, "items": items, "maxlen": value.maxlen}
    pairs = [[coded(key), coded(item)] for key, item in value.items()]
    if not isinstance(value, defaultdict):
        return {_MARK: name, "items": pairs}
    factory = factory_name(cast("defaultdict[Any, Any]", value))
    return {_MARK: name, "items": pairs, "factory": factory}


def _marked_scalar(value: Any, kind: type[Any]) -> dict[str, Any]:
    if kind is int:
        return {_MARK: "int", "hex": hex(value)}
    if kind is float:
        return {_MARK: "float", "data": _base64(struct.pack("<d", value))}
    if kind is complex:
        return {_MARK: "complex", "data": _base64(struct.pack("<dd", value.real, value.imag))}
    if kind in (bytes, bytearray):
        return {_MARK: kind.__name__, "data": _base64(value)}
    if kind in (range, slice):
        return {_MARK: kind.__name__, "args": [value.start, value.stop, value.step]}
    raise TypeError(f"a value of class {kind.__module__}.{kind.__qualname__} has no JSON form")


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


NOT_CODED = (
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    IndexError,
    RecursionError,
    OverflowError,
    struct.error,
)
"""What `decoded` raises."""


def decoded(data: Any) -> Any:
    """The value that `coded` wrote. Raises one of `NOT_CODED` for what it did not write."""
    if isinstance(data, list):
        return [decoded(item) for item in cast("list[Any]", data)]
    if not isinstance(data, dict):
        return data
    found = cast("dict[str, Any]", data)
    if _MARK not in found:
        return {key: decoded(item) for key, item in found.items()}
    kind = found[_MARK]
    if kind in _SEQUENCES:
        return _SEQUENCES[kind]([decoded(item) for item in found["items"]])
    if kind in _TEXTS:
        check_text(kind, _text(found["text"]))
        return _TEXTS[kind](_text(found["text"]))
    if kind in _CALLED:
        return _CALLED[kind](*[decoded(part) for part in found["args"]])
    return _DECODERS[kind](found)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value


def _pairs(found: Mapping[str, Any]) -> list[tuple[Any, Any]]:
    return [(decoded(key), decoded(item)) for key, item in found["items"]]


def _name(value: Any) -> str:
    if not is_name(_text(value)):
        raise ValueError(f"{brief(value)} is no name of a class")
    return value


def _object(found: Mapping[str, Any]) -> Stand:
    args = tuple(decoded(part) for part in found["args"])
    state = {_text(name): decoded(item) for name, item in found["state"]}
    made = _text(found["made"])
    if made not in ("call", "new", "member"):
        raise ValueError(f"an object is made by {brief(made)}")
    stand = Stand(_name(found["name"]), args, state, made)
    if stand.qualname in (ARRAY, DTYPE, TENSOR):
        _check_bytes(stand)
    return stand


def _check_bytes(stand: Stand) -> None:
    """Raises ValueError for an array, a dtype or a tensor that is malformed."""
    dtype = stand.get("dtype")
    size = bytes_of_torch(dtype) if stand.qualname == TENSOR else bytes_of_numpy(dtype)
    if stand.args or stand.made != "call":
        raise ValueError(f"{stand.qualname} with arguments")
    if stand.qualname != DTYPE:
        check_bytes(size, stand.get("shape"), stand.get("data"))


def _bounds(found: Mapping[str, Any]) -> list[Any]:
    bounds: list[Any] = found["args"]
    if not all(bound is None or type(bound) is int for bound in bounds):
        raise ValueError("a range or slice of what is no number")
    return bounds


def _bytes(found: Mapping[str, Any]) -> bytes:
    return base64.b64decode(_text(found["data"]), validate=True)


_DECODERS: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    **{name: lambda f, kind=kind: kind(dict(_pairs(f))) for name, kind in _MAPPINGS.items()},
    "defaultdict": lambda f: defaultdict(
        None if f["factory"] is None else FACTORIES[f["factory"]], _pairs(f)
    ),
    "deque": lambda f: deque([decoded(item) for item in f["items"]], f["maxlen"]),
    "numpy.scalar": lambda f: numpy_scalar(_text(f["dtype"]), _bytes(f)),
    "object": _object,
    "name": lambda f: Global(_name(f["name"])),
    "int": lambda f: int(_text(f["hex"]), 16),
    "float": lambda f: struct.unpack("<d", _bytes(f))[0],
    "complex": lambda f: complex(*struct.unpack("<dd", _bytes(f))),
    "bytes": _bytes,
    "bytearray": lambda f: bytearray(_bytes(f)),
    "range": lambda f: range(*_bounds(f)),
    "slice": lambda f: slice(*_bounds(f)),
}


# ------------------------------------------------ compared


def same(one: Any, other: Any) -> bool:
    """Whether two values are the same in type and bits, in containers of any order that has no
    meaning. Raises TypeError as `coded`."""
    return _exact(one) == _exact(other)


def _exact(value: Any) -> str:
    return json.dumps(coded(value), sort_keys=True)


def alike(one: Any, other: Any) -> bool:
    """Whether two values are the same but for the types of numbers, and of lists and tuples."""
    return one is other or loose(one) == loose(other)  # most are: groups share their settings


def loose(value: Any) -> Any:
    """A value to compare with `==`: lists as tuples, mappings as sets of pairs by the text of their
    keys, a NaN as one that equals itself."""
    if isinstance(value, float | complex) and value != value:
        return repr(value)
    if isinstance(value, list | tuple | deque):
        return tuple([loose(item) for item in cast("list[Any]", value)])
    if isinstance(value, Mapping):
        pairs = cast("Mapping[Any, Any]", value).items()
        return tuple(sorted([(repr(key), loose(item)) for key, item in pairs], key=lambda p: p[0]))
    if isinstance(value, set | frozenset):
        return frozenset([loose(item) for item in cast("set[Any]", value)])
    if isinstance(value, Stand):
        return value.qualname, loose(value.args), loose(value.state)
    if isinstance(value, _Name):  # manifests of version 2 have texts
        return str(value)
    return value
