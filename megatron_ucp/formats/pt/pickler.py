"""Pickles of the closed list of values, as torch writes them: protocol 2, tensors by storage,
foreign objects by name."""

import struct
from collections import OrderedDict
from collections.abc import Callable, Mapping
from io import BytesIO

from megatron_ucp.errors import UnsupportedError
from megatron_ucp.formats.pt.known import STORAGE_DTYPES
from megatron_ucp.formats.pt.values import DtypeName, Global, Size, Stand, StorageRef, TensorRef

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
            "a value is nested too deeply to be written", expected=f"at most {_MAX_DEPTH} levels"
        )
    writer = _WRITERS.get(type(value))
    if writer is None:
        raise UnsupportedError(
            "a value of this type can't be written",
            found=type(value).__qualname__,
            expected=", ".join(sorted(kind.__name__ for kind in _WRITERS)),
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
        raise UnsupportedError(
            "a number is too large to be written",
            expected="fewer than 2040 bits",
            found=f"{value.bit_length()} bits",
        )
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


def _set(write: _Write, value: set[object], depth: int) -> None:
    _call(write, "builtins.set", (list(value),), depth)


def _global(write: _Write, qualname: str) -> None:
    module, _, name = qualname.rpartition(".")
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


def _numpy(write: _Write, value: Stand, depth: int) -> None:
    """An array or a scalar, as numpy pickles them."""
    kind, data = str(value.state["dtype"]), value.state["data"]
    if value.qualname == "numpy.scalar":
        _global(write, "numpy._core.multiarray.scalar")
        write(b"(")
        _dtype(write, kind, depth)
        _write(write, data, depth)
        write(b"tR")
        return
    _call(
        write, "numpy._core.multiarray._reconstruct", (Global("numpy.ndarray"), (0,), b"b"), depth
    )
    write(b"(")
    for item in (1, value.state["shape"]):
        _write(write, item, depth)
    _dtype(write, kind, depth)
    for item in (value.state["fortran_order"], data):
        _write(write, item, depth)
    write(b"tb")


def _stand(write: _Write, value: Stand, depth: int) -> None:
    """An object of a known class, as Python pickles it: made from its arguments, or empty; then its
    attributes."""
    if value.qualname in ("numpy.ndarray", "numpy.scalar"):
        _numpy(write, value, depth)
        return
    _global(write, value.qualname)
    _tuple(write, value.args, depth)
    write(b"R" if value.args else b"\x81")
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
    DtypeName: lambda write, value, _: _global(write, value),  # type: ignore[dict-item]
    Size: lambda write, value, depth: _call(write, "torch.Size", (tuple(value),), depth),  # type: ignore[dict-item]
    Global: lambda write, value, _: _global(write, value.qualname),  # type: ignore[dict-item]
    StorageRef: _storage,
    TensorRef: _tensor,
    Stand: _stand,
}  # type: ignore[dict-item]
