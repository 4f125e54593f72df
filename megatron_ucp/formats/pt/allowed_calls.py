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
from typing import NoReturn, Protocol

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


# What calling a known global means: a function of (reader, name, args).
_Build = Callable[[Reader, str, tuple[object, ...]], object]


def inert_object(reader: Reader, name: str, args: tuple[object, ...]) -> object:
    return InertObject(name, args)


def _fragment(reader: Reader, name: str, args: tuple[object, ...]) -> object:
    if len(args) not in (0, 2):
        reader.fail(f"{name} is malformed", expected="numel and start", found=args)
    return InertObject(name, (), dict(zip(("numel", "start"), args, strict=False)))


def _counts(reader: Reader, value: object, what: str) -> tuple[int, ...]:
    """`value` as a tuple of sizes or strides."""
    if isinstance(value, tuple | list) and len(value) <= _MAX_DIMS:
        sizes = tuple([item for item in value if type(item) is int and 0 <= item < 2**63])
        if len(sizes) == len(value):
            return sizes
    reader.fail(
        f"a {what} is malformed", expected=f"at most {_MAX_DIMS} numbers of at least 0", found=value
    )


def _size(reader: Reader, name: str, args: tuple[object, ...]) -> object:
    sizes = _counts(reader, args[0] if len(args) == 1 else args, "torch.Size")
    return Size(sizes)


def _view(
    reader: Reader, storage: object, offset: object, size: object, stride: object
) -> TensorRef:
    shape, steps = (
        _counts(reader, size, "tensor's shape"),
        _counts(reader, stride, "tensor's stride"),
    )
    if (
        not isinstance(storage, StorageRef)
        or type(offset) is not int
        or offset < 0
        or len(shape) != len(steps)
    ):
        reader.fail(
            "a tensor is malformed",
            expected="a storage, an offset, a shape and a stride of equal length",
            found=(storage, offset, size, stride),
        )
    if 0 not in shape:
        last = offset + sum((size - 1) * step for size, step in zip(shape, steps, strict=True))
        if last >= storage.elems:
            reader.fail(
                "a tensor reaches past its storage",
                expected=f"at most {storage.elems} elements",
                found=f"element {last} of storage {storage.key}",
            )
        reader.spend(
            max(0, prod(shape) - storage.elems) * ITEMSIZE[storage.dtype]
        )  # strides of 0: few bytes, any size
    return TensorRef(storage, offset, shape, steps)


def _tensor(reader: Reader, name: str, args: tuple[object, ...]) -> object:
    """_rebuild_tensor(storage, offset, size, stride) and v2 (.., requires_grad, hooks[,
    metadata])."""
    if len(args) not in ((4,) if name.endswith("_tensor") else (6, 7)):
        reader.fail("a tensor is malformed", found=args)
    _check_metadata(reader, args[6:])
    return _view(reader, *args[:4])


def _tensor_v3(reader: Reader, name: str, args: tuple[object, ...]) -> object:
    """v3: (untyped storage, offset, size, stride, requires_grad, hooks, dtype[, metadata]), for
    unsigned and 8-bit."""
    if (
        len(args) not in (7, 8)
        or not isinstance(args[0], StorageRef)
        or not isinstance(args[6], str)
    ):
        reader.fail("a tensor is malformed", found=args)
    _check_metadata(reader, args[7:])
    storage, dtype = args[0], args[6].removeprefix("torch.")
    if dtype not in ITEMSIZE or storage.size_bytes % ITEMSIZE[dtype]:
        reader.fail(
            "a tensor is malformed",
            expected="a dtype whose size divides the storage",
            found=args[6],
        )
    return _view(
        reader, StorageRef(storage.key, dtype, storage.size_bytes // ITEMSIZE[dtype]), *args[1:4]
    )


def _check_metadata(reader: Reader, rest: tuple[object, ...]) -> None:
    if rest and rest[0] and (not isinstance(rest[0], dict) or any(rest[0].values())):
        raise UnsupportedError(
            "a tensor is a lazy conjugate or negative: its stored bytes are not its values",
            file=reader.file,
            fix="save it again after resolve_conj() and resolve_neg()",
        )


def _parameter(reader: Reader, name: str, args: tuple[object, ...]) -> object:
    if len(args) not in (3, 4) or not isinstance(args[0], TensorRef):
        reader.fail("a parameter is malformed", found=args)
    return args[0]


def _from_type(reader: Reader, name: str, args: tuple[object, ...]) -> object:
    """A tensor that carries Python attributes (ZeRO-3 flats): (function, class, its arguments,
    attributes)."""
    if len(args) != 4 or not all(isinstance(item, ClassName) for item in args[:2]):
        reader.fail("a tensor is malformed", found=args)
    func, kind, inner, state = args
    if kind.qualname not in _TENSOR_CLASSES or not isinstance(state, dict | tuple | None):  # type: ignore[union-attr]
        reader.fail("a tensor's class or attributes are malformed", found=(kind, state))
    tensor = reader.call(func, inner)
    if not isinstance(tensor, TensorRef):
        reader.fail("a tensor is malformed", found=func)
    return tensor


def _zero_stage(reader: Reader, name: str, args: tuple[object, ...]) -> object:
    if len(args) != 1 or type(args[0]) is not int or not 0 <= args[0] <= 3:
        reader.fail("a ZeRO stage is malformed", expected="0 to 3", found=args)
    return args[0]


def _enum_member(reader: Reader, name: str, args: tuple[object, ...]) -> object:
    """`getattr(class, "member")`: how Python 3.11 pickles the members of an Enum. No attribute is
    looked up."""
    if len(args) != 2 or not isinstance(args[0], ClassName) or not isinstance(args[1], str):
        reader.fail("an enum member is malformed", found=args)
    kind, member = args[0].qualname, args[1]
    if ALLOWED_CALLS.get(kind, inert_object) is _zero_stage:
        stages = {
            "disabled": 0,
            "optimizer_states": 1,
            "gradients": 2,
            "weights": 3,
            "max_stage": 3,
        }
        return stages[member]
    is_name = member.isidentifier() and not member.startswith("__")
    if ALLOWED_CALLS.get(kind, inert_object) is not inert_object or not is_name:
        raise UnsafePickleError(
            f"the pickle asks for an attribute of {kind}", file=reader.file, found=member
        )
    return InertObject(kind, (member,), made="member")


def _ordered_dict(reader: Reader, name: str, args: tuple[object, ...]) -> object:
    if args:
        reader.fail(f"{name} is malformed", expected="no arguments", found=args)
    return OrderedDict()


def _default_dict(reader: Reader, name: str, args: tuple[object, ...]) -> object:
    factory = args[0] if args else None
    if len(args) > 1 or not (
        factory is None or isinstance(factory, ClassName) and factory.qualname in FACTORIES
    ):
        reader.fail(
            "a defaultdict's factory is none of the known ones",
            expected=", ".join(FACTORIES),
            found=args,
        )
    return defaultdict(FACTORIES[factory.qualname] if isinstance(factory, ClassName) else None)


def _plain(reader: Reader, name: str, args: tuple[object, ...]) -> object:
    """A plain value whose row says what it is called with."""
    kind = _KIND_OF_CALL[name]
    args += _DEFAULTS.get(name, ())[len(args) :]
    too_large = any(type(part) is int and abs(part) >= 2**63 for part in args)
    if too_large or not kind.takes(args):
        reader.fail(f"{name} is malformed", found=args)
    if kind.make in (set, frozenset):
        reader.check_keys(args[0])  # type: ignore[arg-type]
    size = sum(len(part) for part in args if isinstance(part, Sized))
    reader.spend(size * _BYTES_OF_ITEM.get(name, 1))
    return kind.make(*args)


_KIND_OF_CALL = {kind.call: kind for kind in VALUE_KINDS.values() if kind.call}
_KIND_OF_CALL["pathlib.WindowsPath"] = VALUE_KINDS[pathlib.PureWindowsPath]  # looks at no disk
_DEFAULTS: dict[str, tuple[object, ...]] = {
    "collections.Counter": ({},),
    "collections.deque": ((), None),
}
_BYTES_OF_ITEM = {  # of memory, that a call takes for each item which a pickle may name again
    "builtins.set": 32,
    "builtins.frozenset": 32,
    "collections.Counter": 64,
    "collections.deque": 16,
}


def _complex(reader: Reader, name: str, args: tuple[object, ...]) -> object:
    if [type(part) for part in args] != [float, float]:
        reader.fail("a complex number is malformed", found=args)
    return complex(*args)  # type: ignore[arg-type]


def _raw(reader: Reader, args: tuple[object, ...]) -> bytes:
    """Bytes, or the text that Python 2's protocol writes for them with the name of its encoding."""
    if len(args) == 2 and isinstance(args[0], str) and args[1] in ("latin1", "latin-1"):
        reader.spend(len(args[0]))
        return args[0].encode("latin-1")
    if len(args) == 1 and isinstance(args[0], bytes | bytearray):
        reader.spend(len(args[0]))
        return bytes(args[0])
    if args:
        reader.fail("bytes are malformed", found=args)
    return b""


def _bytes(reader: Reader, name: str, args: tuple[object, ...]) -> object:
    data = _raw(reader, args)
    return bytearray(data) if name == "builtins.bytearray" else data


def _parts(reader: Reader, name: str, args: tuple[object, ...]) -> list[str]:
    """Arguments that are texts."""
    parts = [part for part in args if isinstance(part, str)]
    reader.spend(sum(map(len, parts)))
    if len(parts) != len(args):
        reader.fail(f"{name} is malformed", found=args)
    return parts


def _device(reader: Reader, name: str, args: tuple[object, ...]) -> object:
    if len(args) == 2 and type(args[1]) is int:
        args = (args[0], str(args[1]))
    text = ":".join(_parts(reader, name, args))
    if not is_device(text):
        reader.fail(f"{name} is malformed", found=args)
    return DeviceName(text)


def _version(reader: Reader, name: str, args: tuple[object, ...]) -> object:
    return VersionName("".join(_parts(reader, name, args)))


# ---- numpy, without numpy: dtype text, shape and bytes ----


def _dtype(reader: Reader, name: str, args: tuple[object, ...]) -> object:
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


def _dtype_state(reader: Reader, target: InertObject, state: object) -> None:
    if not isinstance(state, tuple) or len(state) < 5 or state[1] not in ("<", ">", "|", "="):
        reader.fail("a numpy dtype is malformed", found=state)
    if any(item is not None for item in state[2:5]):
        raise UnsupportedError(
            "a numpy array has a structured dtype",
            file=reader.file,
            fix="keep its columns as plain lists or tensors, and save again",
        )
    target.state["dtype"] = f"{state[1]}{str(target.state['dtype'])[1:]}"


def _empty_array(reader: Reader, name: str, args: tuple[object, ...]) -> object:
    if not args or not isinstance(args[0], ClassName) or args[0].qualname != "numpy.ndarray":
        reader.fail("a numpy array is malformed", found=args)
    return InertObject(ARRAY)


def _array_state(reader: Reader, target: InertObject, state: object) -> None:
    if not isinstance(state, tuple) or len(state) != 5:
        reader.fail("a numpy array is malformed", found=state)
    _, shape, dtype, fortran_order, data = state
    target.state.update(_array(reader, dtype, shape, bool(fortran_order), data))


def _array(
    reader: Reader, dtype: object, shape: object, fortran_order: bool, data: object
) -> dict[str, object]:
    sizes = _counts(reader, shape, "numpy array's shape")
    if (
        not isinstance(dtype, InertObject)
        or dtype.qualname != "numpy.dtype"
        or not isinstance(data, bytes | bytearray)
    ):
        reader.fail("a numpy array is malformed", found=(dtype, shape))
    kind = str(dtype.state["dtype"])
    expected = prod(sizes) * int(kind[2:]) * (4 if kind[1] == "U" else 1)
    if len(data) != expected:
        reader.fail(
            "a numpy array has too few or too many bytes", expected=expected, found=len(data)
        )
    return {"dtype": kind, "shape": sizes, "fortran_order": fortran_order, "data": bytes(data)}


def _scalar(reader: Reader, name: str, args: tuple[object, ...]) -> object:
    if len(args) != 2:
        reader.fail("a numpy scalar is malformed", found=args)
    state = _array(reader, args[0], (), False, args[1])
    if not is_numpy_scalar(str(state["dtype"])):
        raise UnsupportedError(
            "a numpy scalar has a dtype that is not read",
            file=reader.file,
            found=state["dtype"],
            fix="keep it as a plain Python number, and save again",
        )
    return numpy_scalar(str(state["dtype"]), bytes(args[1]))  # type: ignore[arg-type]


def _from_buffer(reader: Reader, name: str, args: tuple[object, ...]) -> object:
    if len(args) != 4 or args[3] not in ("C", "F"):
        reader.fail("a numpy array is malformed", found=args)
    return InertObject(ARRAY, (), _array(reader, args[1], args[2], args[3] == "F", args[0]))


def _index_state(reader: Reader, target: InertObject, state: object) -> None:
    """The index of a stored chunk: name of the tensor, where the chunk begins in it (None: no
    tensor). In the arguments, as it is a dict key, which no longer changes then."""
    fields = state if isinstance(state, dict) else {}
    name, offset = fields.get("fqn"), fields.get("offset")
    good = isinstance(name, str) and (offset is None or isinstance(offset, tuple))
    if target.args or not good:
        reader.fail("the index of a chunk is malformed", found=state)
    place = None if offset is None else tuple(_counts(reader, offset, "chunk's offset"))
    target.args = (name, place)


# what BUILD means where it does not only set attributes
BUILD_STATES: dict[str, Callable[[Reader, InertObject, object], None]] = {
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
    return ALLOWED_CALLS.get(item.qualname) not in _OF_STANDS


_OF_STANDS = (
    inert_object,
    _fragment,
    _size,
    _zero_stage,
)  # of what they make or this package writes
