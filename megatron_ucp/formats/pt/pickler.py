"""Pickles of the closed list of values, as torch writes them: protocol 2, tensors by storage,
foreign objects by name."""

import struct
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from io import BytesIO
from typing import Any

from megatron_ucp.core.value_bytes import is_name
from megatron_ucp.core.values import (
    ARRAY,
    DATES,
    DTYPE,
    NUMPY_SCALARS,
    PATHS,
    DeviceName,
    DtypeName,
    Global,
    NumpyScalar,
    Size,
    Stand,
    VersionName,
    factory_name,
)
from megatron_ucp.errors import UnsafePickleError, UnsupportedError
from megatron_ucp.formats.pt.known import STORAGE_DTYPES, is_call
from megatron_ucp.formats.pt.values import ITEMSIZE, StorageRef, TensorRef

_STORAGE = {
    dtype: name
    for name, dtype in STORAGE_DTYPES.items()
    if not name.startswith("torch.storage.") and name != "torch.UntypedStorage"
}
_MAX_DEPTH = 200


def dumps(value: object) -> bytes:
    """The pickle of a value that `safe_pickle.loads` gives back. Raises UnsupportedError for one
    that it could not hold."""
    out = BytesIO()
    out.write(b"\x80\x02")
    _write(out.write, value, 0)
    out.write(b".")
    return out.getvalue()


_Write = Callable[[bytes], object]


def _write(write: _Write, value: object, depth: int) -> None:
    if depth > _MAX_DEPTH:
        raise UnsupportedError(
            "a value is nested too deeply to be written",
            expected=f"at most {_MAX_DEPTH} levels",
            fix="nest it less deeply, or keep it in a file of your own",
            id="",
        )
    writer = _WRITERS.get(type(value))
    if writer is None:
        raise UnsupportedError(
            "a value of this type can't be written",
            found=type(value).__qualname__,
            expected=", ".join(sorted(kind.__name__ for kind in _WRITERS)),
            fix="keep it as one of these, or in a file of your own",
            id="",
        )
    writer(write, value, depth + 1)


def _bool(write: _Write, value: bool, _: int) -> None:
    write(b"\x88" if value else b"\x89")


def _int(write: _Write, value: int, _: int) -> None:
    if -(2**31) <= value < 2**31:
        write(b"J" + struct.pack("<i", value))
        return
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    if len(data) > 255:
        write(b"\x8b" + struct.pack("<i", len(data)) + data)
        return
    write(b"\x8a" + bytes([len(data)]) + data)


def _text(write: _Write, value: str, _: int) -> None:
    data = value.encode("utf-8", "surrogatepass")
    write(b"X" + struct.pack("<I", len(data)) + data)


def _bytes(write: _Write, value: bytes, depth: int) -> None:
    _call(
        write, "_codecs.encode", (value.decode("latin1"), "latin1"), depth
    )  # as protocol 2 has no bytes


def _list(write: _Write, value: list[object], depth: int) -> None:
    write(b"](")
    for item in value:
        _write(write, item, depth)
    write(b"e")


def _tuple(write: _Write, value: tuple[object, ...], depth: int) -> None:
    write(b"(")
    for item in value:
        _write(write, item, depth)
    write(b"t")


def _items(write: _Write, value: Mapping[object, object], depth: int) -> None:
    write(b"(")
    for key, item in value.items():
        _write(write, key, depth)
        _write(write, item, depth)
    write(b"u")


def _dict(write: _Write, value: dict[object, object], depth: int) -> None:
    write(b"}")
    _items(write, value, depth)


def _ordered(write: _Write, value: "OrderedDict[object, object]", depth: int) -> None:
    _call(write, "collections.OrderedDict", (), depth)
    _items(write, value, depth)


def _set(write: _Write, value: set[object] | frozenset[object], depth: int) -> None:
    _call(write, f"builtins.{type(value).__name__}", (list(value),), depth)


def _counter(write: _Write, value: "Counter[object]", depth: int) -> None:
    _call(write, "collections.Counter", (dict(value),), depth)


def _default_dict(write: _Write, value: "defaultdict[object, object]", depth: int) -> None:
    factory = factory_name(value)
    args = () if factory is None else (Global(factory),)
    _call(write, "collections.defaultdict", args, depth)
    _items(write, value, depth)


def _deque(write: _Write, value: "deque[object]", depth: int) -> None:
    _call(write, "collections.deque", (list(value), value.maxlen), depth)


def _complex(write: _Write, value: complex, depth: int) -> None:
    _call(write, "builtins.complex", (value.real, value.imag), depth)


def _byte_array(write: _Write, value: bytearray, depth: int) -> None:
    _call(write, "builtins.bytearray", (bytes(value),), depth)


def _span(write: _Write, value: range | slice, depth: int) -> None:
    args = (value.start, value.stop, value.step)
    _call(write, f"builtins.{type(value).__name__}", args, depth)


def _as_python_does(write: _Write, value: Any, depth: int) -> None:
    """Dates and paths: a call of the class with plain arguments."""
    kind, args = value.__reduce_ex__(2)[:2]
    _call(write, f"{kind.__module__.partition('._')[0]}.{kind.__qualname__}", args, depth)


def _dtype_name(write: _Write, value: DtypeName, _: int) -> None:
    if value.removeprefix("torch.") not in ITEMSIZE:
        raise UnsupportedError(
            "a dtype that can't be written",
            found=ascii(value[:100]),
            expected=", ".join(sorted(ITEMSIZE)),
            fix="convert it to one of these dtypes",
            id="",
        )
    _global(write, value)


def _device_name(write: _Write, value: DeviceName, depth: int) -> None:
    kind, _, index = str(value).partition(":")
    _call(write, "torch.device", (kind, int(index)) if index else (kind,), depth)


def _version_name(write: _Write, value: VersionName, depth: int) -> None:
    _global(write, "torch.torch_version.TorchVersion")
    _tuple(write, (str(value),), depth)
    write(b"\x81")


def _global(write: _Write, qualname: str) -> None:
    module, _, name = qualname.rpartition(".")
    if not module or not is_name(qualname):
        raise UnsafePickleError(
            "a value names what is no class or function",
            found=ascii(qualname[:200]),
            expected="a module and a name in it",
        )
    write(b"c" + module.encode() + b"\n" + name.encode() + b"\n")


def _call(write: _Write, qualname: str, args: tuple[object, ...], depth: int) -> None:
    _global(write, qualname)
    _tuple(write, args, depth)
    write(b"R")


def _storage(write: _Write, value: StorageRef, depth: int) -> None:
    write(b"(")
    _text(write, "storage", depth)
    if value.dtype not in _STORAGE:
        raise UnsupportedError(
            "tensors of this dtype can't be written",
            found=value.dtype,
            expected=", ".join(sorted(_STORAGE)),
            fix="convert it to one of these dtypes",
            id="",
        )
    _global(write, _STORAGE[value.dtype])
    for item in (value.key, "cpu", value.elems):
        _write(write, item, depth)
    write(b"tQ")


def _tensor(write: _Write, value: TensorRef, depth: int) -> None:
    _global(write, "torch._utils._rebuild_tensor_v2")
    write(b"(")
    for item in (
        value.storage,
        value.offset_elems,
        value.shape,
        value.stride,
        False,
        OrderedDict(),
    ):
        _write(write, item, depth)
    write(b"tR")


def _dtype(write: _Write, kind: str, depth: int) -> None:
    """Of numpy, such as "<f4": its order of bytes is part of its state."""
    unit = {"U": 4, "S": 1}.get(kind[1])  # bytes of a character; numbers have no sizes of their own
    _call(write, "numpy.dtype", (kind[1:], False, True), depth)
    _tuple(
        write,
        (3, kind[0], None, None, None, *((unit * int(kind[2:]), unit) if unit else (-1, -1)), 0),
        depth,
    )
    write(b"b")


def _numpy_scalar(write: _Write, value: NumpyScalar, depth: int) -> None:
    _global(write, "numpy._core.multiarray.scalar")
    write(b"(")
    _dtype(write, value.dtype, depth)
    _write(write, value.data, depth)
    write(b"tR")


def _array(write: _Write, value: Stand, depth: int) -> None:
    """An array, as numpy pickles it."""
    _call(write, "numpy._core.multiarray._reconstruct", (Global(ARRAY), (0,), b"b"), depth)
    write(b"(")
    for item in (1, value.state["shape"]):
        _write(write, item, depth)
    _dtype(write, str(value.state["dtype"]), depth)
    for item in (value.state["fortran_order"], value.state["data"]):
        _write(write, item, depth)
    write(b"tb")


def check_stand(value: Stand) -> None:
    """Raises UnsafePickleError for what only a call of somebody's function makes, UnsupportedError
    for an object of which its attributes alone can't be written."""
    if is_call(value) or (value.made == "member" and not _is_member(value)):
        raise UnsafePickleError(
            "a value is made by a call that nobody here can vouch for",
            found=ascii(value.qualname[:200]),
            fix="load the checkpoint into an engine of its program, attach it and save: members of "
            "enums are known by name then",
        )
    if more := _NOT_ATTRIBUTES & value.state.keys():
        raise UnsupportedError(
            "an object holds more than attributes, which only its own class can take",
            found=f"{value.qualname[:200]!a}: {', '.join(sorted(more))}",
            expected="a list or dict itself, or an object that is its attributes",
            fix="keep it as a plain list or dict, and save again",
        )


_NOT_ATTRIBUTES = {"__elements__", "__items__", "__state__"}  # as the reader calls what is none


def _is_member(value: Stand) -> bool:
    """Whether arguments are a name that a member of an enum can have."""
    name = value.args[0] if len(value.args) == 1 else None
    return isinstance(name, str) and name.isidentifier() and not name.startswith("__")


def _stand(write: _Write, value: Stand, depth: int) -> None:
    """An object, as Python pickles it: made by a call, as a new one, or as the member of an enum;
    then its attributes."""
    if value.qualname == ARRAY:
        _array(write, value, depth)
        return
    if value.qualname == DTYPE:
        _dtype(write, str(value.state["dtype"]), depth)
        return
    check_stand(value)
    if value.made == "member":
        _call(write, "builtins.getattr", (Global(value.qualname), *value.args), depth)
        return
    _global(write, value.qualname)
    _tuple(write, value.args, depth)
    write(b"R" if value.args and value.made == "call" else b"\x81")
    if value.state:
        _write(write, dict(value.state), depth)
        write(b"b")


_WRITERS: dict[type, Callable[[_Write, "object", int], None]] = {
    type(None): lambda write, _, __: write(b"N") and None,
    float: lambda write, value, _: write(b"G" + struct.pack(">d", value)) and None,
    bool: _bool,
    int: _int,
    str: _text,
    bytes: _bytes,
    list: _list,
    tuple: _tuple,
    dict: _dict,  # type: ignore[dict-item]
    OrderedDict: _ordered,
    set: _set,
    frozenset: _set,
    Counter: _counter,
    defaultdict: _default_dict,
    deque: _deque,
    complex: _complex,
    bytearray: _byte_array,
    range: _span,
    slice: _span,
    **dict.fromkeys((*DATES, *PATHS), _as_python_does),
    **dict.fromkeys(NUMPY_SCALARS, _numpy_scalar),
    DeviceName: _device_name,
    VersionName: _version_name,
    DtypeName: _dtype_name,
    Size: lambda write, value, depth: _call(write, "torch.Size", (tuple(value),), depth),  # type: ignore[dict-item]
    Global: lambda write, value, _: _global(write, value.qualname),  # type: ignore[dict-item]
    StorageRef: _storage,
    TensorRef: _tensor,
    Stand: _stand,
}  # type: ignore[dict-item]
