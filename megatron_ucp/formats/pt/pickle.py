"""Pickles of plain values (`core/values`), as torch writes them: protocol 2, tensors by storage,
objects of other classes by name."""

import pickle
import struct
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from megatron_ucp.core.values import (
    ARRAY,
    DTYPE,
    NUMPY_SCALARS,
    VALUE_KINDS,
    ClassName,
    DeviceName,
    DtypeName,
    InertObject,
    NumpyScalar,
    VersionName,
    factory_name,
    is_name,
)
from megatron_ucp.errors import UnsafePickleError, UnsupportedError
from megatron_ucp.formats.pt.allowed_calls import STORAGE_DTYPES, is_call
from megatron_ucp.formats.pt.refs import ITEMSIZE, StorageRef, TensorRef

_STORAGE = {
    dtype: name
    for name, dtype in STORAGE_DTYPES.items()
    if not name.startswith("torch.storage.") and name != "torch.UntypedStorage"
}
_MAX_DEPTH = 200


def dumps(value: object) -> bytes:
    """The pickle of a value that `loads` gives back. Raises UnsupportedError for one that it could
    not hold, UnsafePickleError for one that only a call of somebody's function makes."""
    pickled = _Pickle()
    pickled.write(value)
    return pickle.PROTO + b"\x02" + bytes(pickled.out) + pickle.STOP


class _Pickle:
    """A pickle on its way; `out` has the opcodes so far."""

    def __init__(self) -> None:
        self.out = bytearray()
        self._depth = 0

    def write(self, value: object) -> None:
        """A value of any kind."""
        if self._depth > _MAX_DEPTH:
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
        self._depth += 1
        writer(self, value)
        self._depth -= 1

    def several(self, values: Iterable[object], end: bytes) -> None:
        """Values between a mark and the opcode that takes them."""
        self.out += pickle.MARK
        for value in values:
            self.write(value)
        self.out += end

    def items(self, mapping: Mapping[Any, Any]) -> None:
        """Sets the items of the dictionary on the stack."""
        flat = (part for item in mapping.items() for part in item)
        self.several(flat, pickle.SETITEMS)

    def name(self, qualname: str) -> None:
        """A class or function."""
        module, _, name = qualname.rpartition(".")
        if not module or not is_name(qualname):
            raise UnsafePickleError(
                "a value names what is no class or function",
                found=ascii(qualname[:200]),
                expected="a module and a name in it",
            )
        self.out += pickle.GLOBAL + module.encode() + b"\n" + name.encode() + b"\n"

    def call(self, qualname: str, args: Iterable[object]) -> None:
        """What a call of a class or function makes."""
        self.name(qualname)
        self.several(args, pickle.TUPLE)
        self.out += pickle.REDUCE

    # ---- one for each kind

    def none(self, value: None) -> None:
        self.out += pickle.NONE

    def truth(self, value: bool) -> None:
        self.out += pickle.NEWTRUE if value else pickle.NEWFALSE

    def real_number(self, value: float) -> None:
        self.out += pickle.BINFLOAT + struct.pack(">d", value)

    def complex_number(self, value: complex) -> None:
        self.call("builtins.complex", (value.real, value.imag))

    def bytes(self, value: "bytes") -> None:
        """Protocol 2 has no bytes."""
        self.call("_codecs.encode", (value.decode("latin1"), "latin1"))

    def list(self, value: "list[Any]") -> None:
        self.out += pickle.EMPTY_LIST
        self.several(value, pickle.APPENDS)

    def tuple(self, value: "tuple[Any, ...]") -> None:
        self.several(value, pickle.TUPLE)

    def dict(self, value: "dict[Any, Any]") -> None:
        self.out += pickle.EMPTY_DICT
        self.items(value)

    def whole_number(self, value: int) -> None:
        if -(2**31) <= value < 2**31:
            self.out += pickle.BININT + struct.pack("<i", value)
            return
        data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
        is_long = len(data) > 255
        size = struct.pack("<i" if is_long else "<B", len(data))
        self.out += (pickle.LONG4 if is_long else pickle.LONG1) + size + data

    def text(self, value: str) -> None:
        data = value.encode("utf-8", "surrogatepass")
        self.out += pickle.BINUNICODE + struct.pack("<I", len(data)) + data

    def default_dict(self, value: "defaultdict[Any, Any]") -> None:
        factory = factory_name(value)
        self.call("collections.defaultdict", () if factory is None else (ClassName(factory),))
        self.items(value)

    def ordered_dict(self, value: "OrderedDict[Any, Any]") -> None:
        self.call("collections.OrderedDict", ())
        self.items(value)

    def named(self, value: ClassName) -> None:
        self.name(value.qualname)

    def dtype_name(self, value: DtypeName) -> None:
        if value.removeprefix("torch.") not in ITEMSIZE:
            raise _no_dtype("a dtype that can't be written", ascii(value[:100]), ITEMSIZE)
        self.name(value)

    def device_name(self, value: DeviceName) -> None:
        kind, _, index = str(value).partition(":")
        self.call("torch.device", (kind, int(index)) if index else (kind,))

    def version_name(self, value: VersionName) -> None:
        self.name("torch.torch_version.TorchVersion")
        self.several((str(value),), pickle.TUPLE)
        self.out += pickle.NEWOBJ

    def storage(self, value: StorageRef) -> None:
        if value.dtype not in _STORAGE:
            raise _no_dtype("tensors of this dtype can't be written", value.dtype, _STORAGE)
        kind = ClassName(_STORAGE[value.dtype])
        self.several(("storage", kind, value.key, "cpu", value.elems), pickle.TUPLE)
        self.out += pickle.BINPERSID

    def tensor(self, value: TensorRef) -> None:
        place = value.storage, value.offset_elems, value.shape, value.stride
        self.call("torch._utils._rebuild_tensor_v2", (*place, False, OrderedDict()))

    def numpy_scalar(self, value: NumpyScalar) -> None:
        self.call("numpy._core.multiarray.scalar", (_dtype_of(value.dtype), value.data))

    def numpy_dtype(self, dtype: str) -> None:
        """Such as "<f4": its order of bytes is part of its state."""
        self.call("numpy.dtype", (dtype[1:], False, True))
        unit = {"U": 4, "S": 1}.get(dtype[1])  # bytes of a character; a number has no such size
        sizes = (unit * int(dtype[2:]), unit) if unit else (-1, -1)
        self.several((3, dtype[0], None, None, None, *sizes, 0), pickle.TUPLE)
        self.out += pickle.BUILD

    def numpy_array(self, state: Mapping[str, Any]) -> None:
        """As numpy pickles it."""
        self.call("numpy._core.multiarray._reconstruct", (ClassName(ARRAY), (0,), b"b"))
        dtype = _dtype_of(str(state["dtype"]))
        self.several(
            (1, state["shape"], dtype, state["fortran_order"], state["data"]), pickle.TUPLE
        )
        self.out += pickle.BUILD

    def object(self, value: InertObject) -> None:
        """As Python pickles it: made by a call, as a new object, or as the member of an enum; then
        its attributes."""
        if value.qualname == ARRAY:
            return self.numpy_array(value.state)
        if value.qualname == DTYPE:
            return self.numpy_dtype(str(value.state["dtype"]))
        check_object(value)
        if value.made == "member":
            return self.call("builtins.getattr", (ClassName(value.qualname), *value.args))
        self.name(value.qualname)
        self.several(value.args, pickle.TUPLE)
        self.out += pickle.REDUCE if value.args and value.made == "call" else pickle.NEWOBJ
        if value.state:
            self.dict(value.state)
            self.out += pickle.BUILD
        return None


def _dtype_of(dtype: str) -> InertObject:
    return InertObject(DTYPE, (), {"dtype": dtype})


def _no_dtype(problem: str, dtype: str, known: Iterable[str]) -> UnsupportedError:
    return UnsupportedError(
        problem,
        found=dtype,
        expected=", ".join(sorted(known)),
        fix="convert it to one of these dtypes",
        id="",
    )


def check_object(value: InertObject) -> None:
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


def _is_member(value: InertObject) -> bool:
    """Whether arguments are a name that a member of an enum can have."""
    name = value.args[0] if len(value.args) == 1 else None
    return isinstance(name, str) and name.isidentifier() and not name.startswith("__")


def _by_call(pickled: _Pickle, value: Any) -> None:
    row = VALUE_KINDS[type(value)]
    pickled.call(row.call, row.parts(value))


_WRITERS: dict[type, Callable[[_Pickle, Any], None]] = {
    **{kind: _by_call for kind, row in VALUE_KINDS.items() if row.call},
    **dict.fromkeys(NUMPY_SCALARS, _Pickle.numpy_scalar),
    type(None): _Pickle.none,
    bool: _Pickle.truth,
    int: _Pickle.whole_number,
    float: _Pickle.real_number,
    complex: _Pickle.complex_number,
    str: _Pickle.text,
    bytes: _Pickle.bytes,
    list: _Pickle.list,
    tuple: _Pickle.tuple,
    dict: _Pickle.dict,
    OrderedDict: _Pickle.ordered_dict,
    defaultdict: _Pickle.default_dict,
    DtypeName: _Pickle.dtype_name,
    DeviceName: _Pickle.device_name,
    VersionName: _Pickle.version_name,
    ClassName: _Pickle.named,
    StorageRef: _Pickle.storage,
    TensorRef: _Pickle.tensor,
    InertObject: _Pickle.object,
}
