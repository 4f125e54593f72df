"""The closed list: the classes and functions that a `.pt` file may name, and what a call makes.

A row's function gets plain values, TensorRefs, InertObjects and ClassNames, checks them, and
returns one of these. No row imports what it names, and none allocates more than the pickle's size
allows (`Reader.spend`).
"""

import pathlib
import re
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Sized
from math import prod
from typing import Any, NoReturn, Protocol

from megatron_ucp.core.values import (
    ARRAY,
    DTYPE,
    FACTORIES,
    NAMED_TYPES,
    TENSOR,
    VALUE_KINDS,
    ClassName,
    DeviceName,
    InertObject,
    Size,
    VersionName,
    is_device,
    is_numpy_scalar,
    numpy_scalar,
    shown,
)
from megatron_ucp.errors import UnsafePickleError, UnsupportedError
from megatron_ucp.formats.pt.refs import ITEMSIZE, StorageRef, TensorRef

_MAX_DIMS = 64
_STORAGES = {
    "Float": "float32",
    "BFloat16": "bfloat16",
    "Half": "float16",
    "Double": "float64",
    "Long": "int64",
    "Int": "int32",
    "Short": "int16",
    "Char": "int8",
    "Byte": "uint8",
    "Bool": "bool",
    "ComplexFloat": "complex64",
    "ComplexDouble": "complex128",
    "Untyped": "uint8",
}


class Reader(Protocol):
    """The unpickler, as a row's function sees it."""

    file: str

    def fail(self, problem: str, *, expected: object = None, found: object = None) -> NoReturn: ...
    def spend(self, size_bytes: int) -> None: ...
    def check_keys(self, keys: Iterable[object]) -> None: ...
    def call(self, function: object, args: object) -> object: ...


# What a call means: a function of (reader, name, args). NotImplemented: not with these arguments.
_Build = Callable[[Reader, str, tuple[Any, ...]], object]
MALFORMED = NotImplemented


def inert_object(reader: Reader, name: str, args: tuple[Any, ...]) -> object:
    return InertObject(name, args)


def _fragment(reader: Reader, name: str, args: tuple[Any, ...]) -> object:
    """numel and start."""
    if len(args) not in (0, 2):
        return MALFORMED
    return InertObject(name, (), dict(zip(("numel", "start"), args, strict=False)))


# ---- tensors


def _sizes(value: object) -> tuple[int, ...] | None:
    """Sizes or strides: at most 64 numbers from 0; None for anything else."""
    if not isinstance(value, tuple | list) or len(value) > _MAX_DIMS:
        return None
    is_good = all(type(size) is int and 0 <= size < 2**63 for size in value)
    return tuple(value) if is_good else None


def _size(reader: Reader, name: str, args: tuple[Any, ...]) -> object:
    sizes = _sizes(args[0] if len(args) == 1 else args)
    return MALFORMED if sizes is None else Size(sizes)


def _view(reader: Reader, storage: Any, offset: Any, size: object, stride: object) -> object:
    shape, strides = _sizes(size), _sizes(stride)
    if shape is None or strides is None or len(shape) != len(strides):
        return MALFORMED
    if not isinstance(storage, StorageRef) or type(offset) is not int or offset < 0:
        return MALFORMED
    if 0 not in shape:
        last = offset + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
        if last >= storage.elems:
            reader.fail(
                "a tensor reaches past its storage",
                expected=f"at most {storage.elems} elements",
                found=f"element {last} of storage {storage.key}",
            )
        # strides of 0: few bytes, any size
        reader.spend(max(0, prod(shape) - storage.elems) * ITEMSIZE[storage.dtype])
    return TensorRef(storage, offset, shape, strides)


def _tensor(reader: Reader, name: str, args: tuple[Any, ...]) -> object:
    """Storage, offset, size, stride; of version 2 also requires_grad, hooks[, metadata]."""
    if len(args) not in ((4,) if name.endswith("_tensor") else (6, 7)):
        return MALFORMED
    _check_metadata(reader, args[6:])
    return _view(reader, *args[:4])


def _tensor_v3(reader: Reader, name: str, args: tuple[Any, ...]) -> object:
    """Untyped storage, offset, size, stride, requires_grad, hooks, dtype[, metadata]: of unsigned
    and 8-bit numbers."""
    if len(args) not in (7, 8) or not isinstance(args[0], StorageRef):
        return MALFORMED
    _check_metadata(reader, args[7:])
    storage, dtype = args[0], str(args[6]).removeprefix("torch.")
    if dtype not in ITEMSIZE or storage.size_bytes % ITEMSIZE[dtype]:
        return MALFORMED
    storage = StorageRef(storage.key, dtype, storage.size_bytes // ITEMSIZE[dtype])
    return _view(reader, storage, *args[1:4])


def _check_metadata(reader: Reader, rest: tuple[Any, ...]) -> None:
    if rest and rest[0] and (not isinstance(rest[0], dict) or any(rest[0].values())):
        raise UnsupportedError(
            "a tensor is a lazy conjugate or negative: its stored bytes are not its values",
            file=reader.file,
            fix="save it again after resolve_conj() and resolve_neg()",
        )


def _parameter(reader: Reader, name: str, args: tuple[Any, ...]) -> object:
    return args[0] if len(args) in (3, 4) and isinstance(args[0], TensorRef) else MALFORMED


def _from_type(reader: Reader, name: str, args: tuple[Any, ...]) -> object:
    """A tensor that carries Python attributes (ZeRO-3 flats): function, class, arguments of the
    function, attributes."""
    match args:
        case (
            ClassName() as function,
            ClassName(qualname=kind),
            arguments,
            dict() | tuple() | None,
        ):
            tensor = reader.call(function, arguments) if kind in _TENSOR_CLASSES else None
            return tensor if isinstance(tensor, TensorRef) else MALFORMED
    return MALFORMED


# ---- members of enums

_ZERO_STAGES = {
    "disabled": 0,
    "optimizer_states": 1,
    "gradients": 2,
    "weights": 3,
    "max_stage": 3,
}


def _zero_stage(reader: Reader, name: str, args: tuple[Any, ...]) -> object:
    is_stage = len(args) == 1 and type(args[0]) is int and 0 <= args[0] <= 3
    return args[0] if is_stage else MALFORMED


def _enum_member(reader: Reader, name: str, args: tuple[Any, ...]) -> object:
    """`getattr(class, "member")`: how Python 3.11 pickles the members of an Enum. No attribute is
    looked up."""
    match args:
        case (ClassName(qualname=kind), str() as member):
            meaning = ALLOWED_CALLS.get(kind, inert_object)
            if meaning is _zero_stage:
                return _ZERO_STAGES.get(member, MALFORMED)
            if meaning is inert_object and member.isidentifier() and not member.startswith("__"):
                return InertObject(kind, (member,), made="member")
            raise UnsafePickleError(
                f"the pickle asks for an attribute of {kind}", file=reader.file, found=member
            )
    return MALFORMED


# ---- plain values


def _plain(reader: Reader, name: str, args: tuple[Any, ...]) -> object:
    """A plain value whose row says what it is called with."""
    kind = _KIND_OF_CALL[name]
    args += _DEFAULTS.get(name, ())[len(args) :]
    too_large = any(type(part) is int and abs(part) >= 2**63 for part in args)
    if too_large or not kind.takes(args):
        return MALFORMED
    if kind.make in (set, frozenset):
        reader.check_keys(args[0])
    size = sum(len(part) for part in args if isinstance(part, Sized))
    reader.spend(size * _BYTES_OF_ITEM.get(name, 1))
    return kind.make(*args)


_KIND_OF_CALL = {kind.call: kind for kind in VALUE_KINDS.values() if kind.call}
_KIND_OF_CALL["pathlib.WindowsPath"] = VALUE_KINDS[pathlib.PureWindowsPath]  # looks at no disk
_DEFAULTS: dict[str, tuple[object, ...]] = {
    "collections.Counter": ({},),
    "collections.deque": ((), None),
}
# of memory, that a call takes for each item; a pickle may name the items again and again
_BYTES_OF_ITEM = {
    "builtins.set": 32,
    "builtins.frozenset": 32,
    "collections.Counter": 64,
    "collections.deque": 16,
}


def _ordered_dict(reader: Reader, name: str, args: tuple[Any, ...]) -> object:
    return MALFORMED if args else OrderedDict()


def _default_dict(reader: Reader, name: str, args: tuple[Any, ...]) -> object:
    match args:
        case () | (None,):
            return defaultdict(None)
        case (ClassName(qualname=factory),) if factory in FACTORIES:
            return defaultdict(FACTORIES[factory])
    return MALFORMED


def _complex(reader: Reader, name: str, args: tuple[Any, ...]) -> object:
    return complex(*args) if [*map(type, args)] == [float, float] else MALFORMED


def _bytes(reader: Reader, name: str, args: tuple[Any, ...]) -> object:
    """Bytes, or the text that Python 2's protocol writes for them with the name of its encoding."""
    match args:
        case ():
            data = b""
        case (bytes() | bytearray() as data,):
            pass
        case (str() as text, "latin1" | "latin-1"):
            data = text.encode("latin-1")
        case _:
            return MALFORMED
    reader.spend(len(data))
    return bytearray(data) if name == "builtins.bytearray" else bytes(data)


def _device(reader: Reader, name: str, args: tuple[Any, ...]) -> object:
    """Kind and index, or the text of both."""
    if not all(isinstance(part, str) or type(part) is int for part in args):
        return MALFORMED
    text = ":".join(map(str, args))
    return DeviceName(text) if is_device(text) else MALFORMED


def _version(reader: Reader, name: str, args: tuple[Any, ...]) -> object:
    reader.spend(sum(len(part) for part in args))
    return VersionName("".join(args))


# ---- numpy, without numpy: dtype, shape and bytes


def _dtype(reader: Reader, name: str, args: tuple[Any, ...]) -> object:
    text = args[0] if args else None
    if isinstance(text, str) and text.lstrip("|<>=").startswith("O"):
        raise UnsafePickleError("a numpy array holds pickled objects", file=reader.file, found=text)
    if not isinstance(text, str) or not re.fullmatch(r"[biufcSU]\d{1,6}", text, re.ASCII):
        raise UnsupportedError(
            "a numpy array has a dtype that is no plain number or text",
            file=reader.file,
            found=shown(text),
            fix="keep it as a plain list or a tensor, and save again",
        )
    return InertObject(DTYPE, (), {"dtype": "|" + text})


def _dtype_state(reader: Reader, target: InertObject, state: Any) -> object:
    if not isinstance(state, tuple) or len(state) < 5 or state[1] not in ("<", ">", "|", "="):
        return MALFORMED
    if any(item is not None for item in state[2:5]):
        raise UnsupportedError(
            "a numpy array has a structured dtype",
            file=reader.file,
            fix="keep its columns as plain lists or tensors, and save again",
        )
    target.state["dtype"] = f"{state[1]}{str(target.state['dtype'])[1:]}"
    return target


def _empty_array(reader: Reader, name: str, args: tuple[Any, ...]) -> object:
    is_array = bool(args) and args[0] == ClassName(ARRAY)
    return InertObject(ARRAY) if is_array else MALFORMED


def _array_state(reader: Reader, target: InertObject, state: Any) -> object:
    """Version, shape, dtype, whether in Fortran's order, bytes."""
    if not isinstance(state, tuple) or len(state) != 5:
        return MALFORMED
    _, shape, dtype, fortran_order, data = state
    array = _array(dtype, shape, bool(fortran_order), data)
    if array is not MALFORMED:
        target.state.update(array.state)
    return array


def _array(dtype: object, shape: object, fortran_order: bool, data: Any) -> Any:
    sizes = _sizes(shape)
    if sizes is None or not isinstance(dtype, InertObject) or dtype.qualname != DTYPE:
        return MALFORMED
    kind = str(dtype.state["dtype"])
    size = prod(sizes) * int(kind[2:]) * (4 if kind[1] == "U" else 1)
    if not isinstance(data, bytes | bytearray) or len(data) != size:
        return MALFORMED
    state = {"dtype": kind, "shape": sizes, "fortran_order": fortran_order, "data": bytes(data)}
    return InertObject(ARRAY, (), state)


def _from_buffer(reader: Reader, name: str, args: tuple[Any, ...]) -> object:
    """Bytes, dtype, shape, order."""
    if len(args) != 4 or args[3] not in ("C", "F"):
        return MALFORMED
    return _array(args[1], args[2], args[3] == "F", args[0])


def _scalar(reader: Reader, name: str, args: tuple[Any, ...]) -> object:
    """dtype and bytes."""
    array = _array(args[0], (), False, args[1]) if len(args) == 2 else MALFORMED
    if array is MALFORMED:
        return MALFORMED
    dtype = str(array.state["dtype"])
    if not is_numpy_scalar(dtype):
        raise UnsupportedError(
            "a numpy scalar has a dtype that is not read",
            file=reader.file,
            found=dtype,
            fix="keep it as a plain Python number, and save again",
        )
    return numpy_scalar(dtype, bytes(args[1]))


# ---- torch's index of chunks


def _index_state(reader: Reader, target: InertObject, state: Any) -> object:
    """The index of a stored chunk: name of the tensor, where the chunk begins in it (None: no
    tensor). In the arguments, as it is a dict key, which no longer changes then."""
    fields = state if isinstance(state, dict) else {}
    name, offset = fields.get("fqn"), fields.get("offset")
    place = _sizes(offset) if isinstance(offset, tuple) else None
    if target.args or not isinstance(name, str) or (place is None and offset is not None):
        return MALFORMED
    target.args = (name, place)
    return target


# ---- the list

# what BUILD means where it does not only set attributes
BUILD_STATES: dict[str, Callable[[Reader, InertObject, Any], object]] = {
    "numpy.dtype": _dtype_state,
    "numpy.ndarray": _array_state,
    "torch.distributed.checkpoint.metadata.MetadataIndex": _index_state,
}
_TENSOR_CLASSES = frozenset(
    {"torch.Tensor", "torch._tensor.Tensor", "torch.nn.parameter.Parameter"}
)
STORAGE_DTYPES = {
    f"{module}.{kind}Storage": dtype
    for kind, dtype in _STORAGES.items()
    for module in ("torch", "torch.storage")
}

# A row is a class or function that may be named, and what calling it makes; None: it may be named
# but not called.
ALLOWED_CALLS: dict[str, _Build | None] = {
    **dict.fromkeys(
        [
            *STORAGE_DTYPES,
            *_TENSOR_CLASSES,
            "torch.storage.TypedStorage",
            "numpy.ndarray",
            *NAMED_TYPES,
        ]
    ),
    **dict.fromkeys(_KIND_OF_CALL, _plain),
    **dict.fromkeys(("builtins.bytes", "builtins.bytearray", "_codecs.encode"), _bytes),
    "builtins.complex": _complex,
    "torch.device": _device,
    "torch.torch_version.TorchVersion": _version,
    "builtins.getattr": _enum_member,
    "torch.Size": _size,
    "collections.OrderedDict": _ordered_dict,
    "collections.defaultdict": _default_dict,
    "argparse.Namespace": inert_object,
    "types.SimpleNamespace": inert_object,
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor_v3,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch._tensor._rebuild_from_type_v2": _from_type,
    "numpy.dtype": _dtype,
    "numpy._core.multiarray._reconstruct": _empty_array,
    "numpy._core.multiarray.scalar": _scalar,
    "numpy._core.numeric._frombuffer": _from_buffer,
    "deepspeed.runtime.zero.config.ZeroStageEnum": _zero_stage,
    "deepspeed.utils.tensor_fragment.fragment_address": _fragment,
    **dict.fromkeys(
        [
            "deepspeed.runtime.fp16.loss_scaler.LossScaler",
            "deepspeed.runtime.config.DtypeEnum",
            "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
            "deepspeed.checkpoint.universal_checkpoint.SubparamShape",
            "deepspeed.runtime.zero.offload_config.OffloadDeviceEnum",
            "deepspeed.runtime.zero.offload_config.OffloadStateTypeEnum",
        ],
        inert_object,
    ),
}


def is_call(item: InertObject) -> bool:
    """Whether only a call makes an object that nobody here knows: not one of the table's."""
    if item.made != "call" or item.qualname in (ARRAY, DTYPE, TENSOR):
        return False
    return ALLOWED_CALLS.get(item.qualname) not in _OF_OBJECTS


_OF_OBJECTS = (
    inert_object,
    _fragment,
    _size,
    _zero_stage,
)  # of what they make or this package writes
