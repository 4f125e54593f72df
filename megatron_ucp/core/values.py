"""Plain values that are no parameters, exactly: what stands in schedulers, parameter groups, client
state, counters and positions.

This is the one closed representation of them, with Python's own library alone. Python's values are
themselves. A value of numpy or torch is one of the inert classes here, with its type and bits; an
object of any other class is an `InertObject`, a function or class a `ClassName`: names, which
nothing imports. `VALUE_KINDS` has one row for each kind of value, from which JSON, the pickles that
are written and the calls that are read in pickles follow. `coded` writes a value as JSON, for
manifests, and `decoded` reads that; `same` compares type and bits, `alike` numbers and order alone.
"""

import base64
import datetime
import json
import math
import pathlib
import re
import reprlib
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, cast

# ------------------------------------------------ inert classes


class _Name(str):
    """A text that equals no text of another class, as a dtype equals no text: both may be keys of
    one dict."""

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


class InertObject:
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
        if not isinstance(other, InertObject):
            return NotImplemented
        return (self.qualname, self.args, self.state) == (other.qualname, other.args, other.state)

    def __hash__(self) -> int:
        return hash((self.qualname, self.args))

    def __repr__(self) -> str:  # one level only, see `shown`
        args = ", ".join(brief(item) for item in self.args[:6])
        state = ", ".join(f"{name}={brief(item)}" for name, item in list(self.state.items())[:12])
        return f"InertObject({self.qualname!r}, ({args}), {state})"


class ClassName:
    """A class or function that a pickle names, as a value: only its name."""

    __slots__ = ("qualname",)

    def __init__(self, qualname: str) -> None:
        self.qualname = qualname

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ClassName) and other.qualname == self.qualname

    def __hash__(self) -> int:
        return hash(self.qualname)

    def __repr__(self) -> str:
        return f"ClassName({self.qualname!r})"


ARRAY, DTYPE, TENSOR = "numpy.ndarray", "numpy.dtype", "torch.Tensor"  # of InertObjects
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
        *(type(None), bool, int, float, complex, str, bytes, ClassName),
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
        return repr(x)[:200] if isinstance(x, InertObject | ClassName) or _is_small(x) else brief(x)


def _is_small(x: object) -> bool:
    """Whether a value says itself that its text is short."""
    return bool(getattr(type(x), "IS_SHORT", False))


shown: Callable[[object], str] = _Short().repr
"""A text of bounded length in bounded time: a hostile value shares its parts so often that a full
text never ends."""


# ------------------------------------------------ what a value may say of itself

_MAX_DIMS = 64
_CLASS_NAME = re.compile(r"[\w<>-]+(\.[\w<>-]+)*")  # "<locals>" is part of some, dashes of modules
_NUMPY_DTYPE = re.compile(r"[<>|=][biufcSU](\d{1,9})", re.ASCII)
_TENSOR_DTYPE = re.compile(r"(?:(?:b?float|u?int|complex)(8|16|32|64|128)(?:_\w+)?|bool)", re.ASCII)
_TORCH_DTYPE = re.compile(r"torch\." + _TENSOR_DTYPE.pattern, re.ASCII)
_DEVICE = re.compile(r"[a-z]{1,20}(:\d{1,4})?", re.ASCII)


def is_name(qualname: str) -> bool:
    """Whether a text may be the module and name of a class or function."""
    return _CLASS_NAME.fullmatch(qualname) is not None


def is_device(text: str) -> bool:
    """Whether a text may be the name of a device ("cuda:0")."""
    return _DEVICE.fullmatch(text) is not None


def _match(pattern: re.Pattern[str], text: object, what: str) -> re.Match[str]:
    match = pattern.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise ValueError(f"{reprlib.repr(text)} is no {what}")
    return match


def bytes_of_numpy(dtype: object) -> int:
    """Bytes of one element. Raises ValueError for a dtype that is no plain number or text."""
    match = _match(_NUMPY_DTYPE, dtype, "dtype of numpy's numbers or text")
    return int(match[1]) * (4 if match[0][1] == "U" else 1)


def bytes_of_torch(dtype: object) -> int:
    """Bytes of one element of a tensor. Raises ValueError for what is no dtype."""
    return int(_match(_TENSOR_DTYPE, dtype, "dtype of a tensor")[1] or 8) // 8


def check_bytes(size: int, shape: object, data: object) -> None:
    """Raises ValueError where elements of `size` bytes in a shape are not as many bytes."""
    sizes = cast("tuple[Any, ...]", shape) if isinstance(shape, tuple) else (-1,)
    good = len(sizes) <= _MAX_DIMS and all(type(one) is int and one >= 0 for one in sizes)
    if not good or type(data) is not bytes or len(data) != prod(sizes) * size:
        raise ValueError("an array or tensor whose shape does not fit its bytes")


# ------------------------------------------------ one row for each kind

_FLOAT, _COMPLEX = struct.Struct("<d"), struct.Struct("<dd")
_Types = tuple[type, ...]
SEQUENCE: _Types = (list, tuple, Size)
MAPPING: _Types = (dict,)
_TEXT: _Types = (str,)
_BYTES: _Types = (bytes,)
_NUMBER: _Types = (int, type(None))
_DATE_PARTS: _Types = (int, bytes, str, datetime.timedelta, datetime.timezone)


@dataclass(frozen=True)
class ValueKind:
    """One kind of plain value.

    `parts` takes a value apart, `make` makes it of its parts, which have `types`. JSON calls the
    kind `name` and its parts `fields`; without fields all parts are one list, `args`. A pickle
    makes the value by a call of `call` with its parts, or else in a way of its own. Of a kind that
    is `variadic` any number of parts has the one entry of `types`.

    Example: `deque([1, 2], 5)` has the parts `[1, 2]` and 5; JSON has
    `{"$": "deque", "items": [1, 2], "maxlen": 5}`, a pickle `collections.deque([1, 2], 5)`.
    """

    name: str
    fields: tuple[str, ...]
    parts: Callable[[Any], tuple[Any, ...]]
    make: Callable[..., Any]
    types: tuple[_Types, ...]
    call: str = ""
    variadic: bool = False

    def takes(self, parts: "list[Any] | tuple[Any, ...]") -> bool:
        """Whether a value can be made of parts, by their types."""
        types = self.types * len(parts) if self.variadic else self.types
        return len(parts) == len(types) and all(
            type(part) in known for part, known in zip(parts, types, strict=True)
        )

    def made(self, parts: "list[Any] | tuple[Any, ...]") -> Any:
        """The value. Raises TypeError for parts of other types, and what `make` raises."""
        if not self.takes(parts):
            raise TypeError(f"a {self.name} of {brief(parts)}")
        return self.make(*parts)


def _bounds(value: Any) -> tuple[Any, ...]:
    return value.start, value.stop, value.step


def _class_name(qualname: str) -> ClassName:
    return ClassName(_match(_CLASS_NAME, qualname, "name of a class")[0])


def _inert_object(qualname: str, made: str, args: list[Any], state: dict[Any, Any]) -> InertObject:
    if made not in ("call", "new", "member"):
        raise ValueError(f"an object is made by {brief(made)}")
    if not all(type(name) is str for name in state):
        raise TypeError("an attribute whose name is no text")
    item = InertObject(_class_name(qualname).qualname, tuple(args), state, made)
    if item.qualname in (ARRAY, DTYPE, TENSOR):
        _check_array(item)
    return item


def _check_array(item: InertObject) -> None:
    """Raises ValueError for an array, a dtype or a tensor that is malformed."""
    dtype = item.get("dtype")
    size = bytes_of_torch(dtype) if item.qualname == TENSOR else bytes_of_numpy(dtype)
    if item.args or item.made != "call":
        raise ValueError(f"{item.qualname} with arguments")
    if item.qualname != DTYPE:
        check_bytes(size, item.get("shape"), item.get("data"))


def _as_python_does(kind: type[Any], types: _Types) -> ValueKind:
    """A row of a date or a path: by the arguments with which Python pickles it."""
    call = f"{kind.__module__.partition('._')[0]}.{kind.__name__}"
    return ValueKind(
        kind.__name__,
        (),
        lambda v: tuple(v.__reduce_ex__(2)[1]),
        kind,
        (types,),
        call,
        variadic=True,
    )


def _text_kind(kind: type[str], checked: Callable[[str], str]) -> ValueKind:
    def make(text: str) -> str:
        return kind(checked(text))

    return ValueKind(kind.__name__, ("text",), lambda v: (str(v),), make, (_TEXT,))


def _default_dict(items: Any, factory: str | None) -> Any:
    return defaultdict[Any, Any](None if factory is None else FACTORIES[factory], items)


def _float(data: bytes) -> float:
    return _FLOAT.unpack(data)[0]


def _complex(data: bytes) -> complex:
    return complex(*_COMPLEX.unpack(data))


_ITEMS, _DATA = ("items",), ("data",)
_NUMPY_SCALAR = ValueKind(
    "numpy.scalar", ("dtype", "data"), lambda v: (v.dtype, v.data), numpy_scalar, (_TEXT, _BYTES)
)
VALUE_KINDS: dict[type, ValueKind] = {
    tuple: ValueKind("tuple", _ITEMS, lambda v: (v,), tuple, (SEQUENCE,)),
    set: ValueKind("set", _ITEMS, lambda v: ([*v],), set, (SEQUENCE,), "builtins.set"),
    frozenset: ValueKind(
        "frozenset", _ITEMS, lambda v: ([*v],), frozenset, (SEQUENCE,), "builtins.frozenset"
    ),
    Size: ValueKind("Size", _ITEMS, lambda v: (tuple(v),), Size, (SEQUENCE,), "torch.Size"),
    dict: ValueKind("dict", _ITEMS, lambda v: (v,), dict, (MAPPING,)),
    OrderedDict: ValueKind("OrderedDict", _ITEMS, lambda v: (dict(v),), OrderedDict, (MAPPING,)),
    Counter: ValueKind(
        "Counter", _ITEMS, lambda v: (dict(v),), Counter, (MAPPING,), "collections.Counter"
    ),
    defaultdict: ValueKind(
        "defaultdict",
        ("items", "factory"),
        lambda v: (dict(v), factory_name(v)),
        _default_dict,
        (MAPPING, (str, type(None))),
    ),
    deque: ValueKind(
        "deque",
        ("items", "maxlen"),
        lambda v: ([*v], v.maxlen),
        deque,
        (SEQUENCE, _NUMBER),
        "collections.deque",
    ),
    int: ValueKind("int", ("hex",), lambda v: (hex(v),), partial(int, base=16), (_TEXT,)),
    float: ValueKind("float", _DATA, lambda v: (_FLOAT.pack(v),), _float, (_BYTES,)),
    complex: ValueKind(
        "complex", _DATA, lambda v: (_COMPLEX.pack(v.real, v.imag),), _complex, (_BYTES,)
    ),
    bytes: ValueKind("bytes", _DATA, lambda v: (v,), bytes, (_BYTES,)),
    bytearray: ValueKind(
        "bytearray", _DATA, lambda v: (bytes(v),), bytearray, (_BYTES,), "builtins.bytearray"
    ),
    range: ValueKind("range", (), _bounds, range, (_NUMBER,) * 3, "builtins.range"),
    slice: ValueKind("slice", (), _bounds, slice, (_NUMBER,) * 3, "builtins.slice"),
    **dict.fromkeys(NUMPY_SCALARS, _NUMPY_SCALAR),
    DtypeName: _text_kind(DtypeName, lambda v: _match(_TORCH_DTYPE, v, "dtype of torch")[0]),
    DeviceName: _text_kind(DeviceName, lambda v: _match(_DEVICE, v, "device")[0]),
    VersionName: _text_kind(VersionName, lambda v: v),
    **{kind: _as_python_does(kind, _DATE_PARTS) for kind in DATES},
    **{kind: _as_python_does(kind, _TEXT) for kind in PATHS},
    ClassName: ValueKind("name", ("name",), lambda v: (v.qualname,), _class_name, (_TEXT,)),
    InertObject: ValueKind(
        "object",
        ("name", "made", "args", "state"),
        lambda v: (v.qualname, v.made, v.args, v.state),
        _inert_object,
        (_TEXT, _TEXT, SEQUENCE, MAPPING),
    ),
}
_KIND_OF_NAME = {kind.name: kind for kind in VALUE_KINDS.values()}


# ------------------------------------------------ as JSON

_MARK = "$"  # the key that tells a coded value from a dict
_PLAIN_BITS = 2**12  # of a whole number that JSON may write in digits
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


def coded(value: Any) -> Any:
    """A value as JSON has it. Raises TypeError for one that is of no kind."""
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
    if kind not in VALUE_KINDS:
        raise TypeError(f"a value of class {kind.__module__}.{kind.__qualname__} has no JSON form")
    row = VALUE_KINDS[kind]
    parts = row.parts(value)
    if not row.fields:
        return {_MARK: row.name, "args": [coded(part) for part in parts]}
    fields = dict(zip(row.fields, map(_coded_part, parts), strict=True))
    if kind in (set, frozenset):  # the same text whatever order the process has them in
        fields["items"].sort(key=_text_of)
    return {_MARK: row.name, **fields}


def _coded_part(part: Any) -> Any:
    """Of a list a list, of a mapping a list of pairs, of bytes their text in base64."""
    if type(part) is bytes:
        return base64.b64encode(part).decode("ascii")
    if type(part) in SEQUENCE:
        return [coded(item) for item in part]
    if type(part) in MAPPING:
        return [[coded(key), coded(item)] for key, item in part.items()]
    return coded(part)


def decoded(data: Any) -> Any:
    """The value that `coded` wrote. Raises one of `NOT_CODED` for what it did not write."""
    if isinstance(data, list):
        return [decoded(item) for item in cast("list[Any]", data)]
    if not isinstance(data, dict):
        return data
    entry = cast("dict[str, Any]", data)
    if _MARK not in entry:
        return {key: decoded(item) for key, item in entry.items()}
    row = _KIND_OF_NAME[entry[_MARK]]
    if not row.fields:
        return row.made([decoded(part) for part in entry["args"]])
    pairs = zip(row.fields, row.types, strict=True)
    return row.made([_decoded_part(entry[field], types) for field, types in pairs])


def _decoded_part(data: Any, types: _Types) -> Any:
    if types is _BYTES:
        return base64.b64decode(data, validate=True)
    if types is SEQUENCE:
        return [decoded(item) for item in data]
    if types is MAPPING:
        return {decoded(key): decoded(item) for key, item in data}
    return data


# ------------------------------------------------ compared


def same(one: Any, other: Any) -> bool:
    """Whether two values are the same in type and bits, in containers of any order that has no
    meaning. Raises TypeError as `coded`."""
    return _text_of(_unordered(coded(one))) == _text_of(_unordered(coded(other)))


def _unordered(code: Any) -> Any:
    """The code of a value with the pairs of its mappings in one order, where that says nothing."""
    if isinstance(code, list):
        return [_unordered(item) for item in cast("list[Any]", code)]
    if not isinstance(code, dict):
        return code
    entry = {key: _unordered(item) for key, item in cast("dict[str, Any]", code).items()}
    if entry.get(_MARK) in ("dict", "Counter", "defaultdict"):
        entry["items"].sort(key=_text_of)
    return entry


def _text_of(coded_value: Any) -> str:
    return json.dumps(coded_value, sort_keys=True)


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
    if isinstance(value, InertObject):
        return value.qualname, loose(value.args), loose(value.state)
    if isinstance(value, _Name):
        return str(value)
    return value
