"""Pickles of plain values (`core/values`), as torch writes them: protocol 2, tensors by storage,
objects of other classes by name."""

import io
import pickle
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

from megatron_ucp.core.values import (
    ARRAY,
    DTYPE,
    NUMPY_SCALARS,
    VALUE_KINDS,
    ClassName,
    DeviceName,
    DtypeName,
    InertObject,
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
_OF_PYTHON = (type(None), bool, int, float, str, list, tuple, dict)  # written as Python does


def _by_call(pickler: "_Pickler", value: Any) -> None:
    row = VALUE_KINDS[type(value)]
    pickler.save_call(row.call, *row.parts(value))


def dumps(value: object) -> bytes:
    """The pickle of a value that `loads` gives back. Raises UnsupportedError for one that it could
    not hold, UnsafePickleError for one that only a call of somebody's function makes."""
    out = io.BytesIO()
    _Pickler(out).dump(value)
    return out.getvalue()


class _Pickler(pickle._Pickler):
    """Python's own, with the kinds of `core/values` in place of live objects. It has no memo: what
    values share is written each time."""

    write: Callable[[bytes], object]
    _batch_setitems: Callable[[Iterable[tuple[Any, Any]]], None]

    def __init__(self, out: io.BytesIO) -> None:
        super().__init__(out, 2)
        self.fast = True
        self._depth = 0

    def save(self, obj: object, save_persistent_id: bool = True) -> None:
        """A value of any kind."""
        if self._depth > _MAX_DEPTH:
            raise UnsupportedError(
                "a value is nested too deeply to be written",
                expected=f"at most {_MAX_DEPTH} levels",
                fix="nest it less deeply, or keep it in a file of your own",
                id="",
            )
        if type(obj) not in self.dispatch:
            raise UnsupportedError(
                "a value of this type can't be written",
                found=type(obj).__qualname__,
                expected=", ".join(sorted(kind.__name__ for kind in self.dispatch)),
                fix="keep it as one of these, or in a file of your own",
                id="",
            )
        self._depth += 1
        super().save(obj)  # type: ignore[misc]
        self._depth -= 1

    def save_name(self, value: str) -> None:
        """A class or function."""
        module, _, name = value.rpartition(".")
        if not module or not is_name(value):
            raise UnsafePickleError(
                "a value names what is no class or function",
                found=ascii(value[:200]),
                expected="a module and a name in it",
            )
        self.write(pickle.GLOBAL + module.encode() + b"\n" + name.encode() + b"\n")

    def save_call(
        self, qualname: str, *args: object, state: object = None, made: bytes = pickle.REDUCE
    ) -> None:
        """What a call of a class or function makes, and its state."""
        self.save_name(qualname)
        self.save(args)
        self.write(made)
        if state:
            self.save(state)
            self.write(pickle.BUILD)

    def save_ordered_dict(self, value: "OrderedDict[Any, Any]") -> None:
        self.save_call("collections.OrderedDict")
        self._batch_setitems(value.items())

    def save_default_dict(self, value: "defaultdict[Any, Any]") -> None:
        factory = factory_name(value)
        self.save_call(
            "collections.defaultdict", *(() if factory is None else (ClassName(factory),))
        )
        self._batch_setitems(value.items())

    def save_dtype_name(self, value: DtypeName) -> None:
        if value.removeprefix("torch.") not in ITEMSIZE:
            raise _no_dtype("a dtype that can't be written", ascii(value[:100]), ITEMSIZE)
        self.save_name(value)

    def save_device_name(self, value: DeviceName) -> None:
        kind, _, index = str(value).partition(":")
        self.save_call("torch.device", kind, *([int(index)] if index else []))

    def save_storage(self, value: StorageRef) -> None:
        if value.dtype not in _STORAGE:
            raise _no_dtype("tensors of this dtype can't be written", value.dtype, _STORAGE)
        self.save(("storage", ClassName(_STORAGE[value.dtype]), value.key, "cpu", value.elems))
        self.write(pickle.BINPERSID)

    def save_tensor(self, value: TensorRef) -> None:
        place = value.storage, value.offset_elems, value.shape, value.stride
        self.save_call("torch._utils._rebuild_tensor_v2", *place, False, OrderedDict())

    def save_numpy_dtype(self, dtype: str) -> None:
        """Such as "<f4": its order of bytes is part of its state."""
        unit = {"U": 4, "S": 1}.get(dtype[1])  # bytes of a character; a number has no such size
        sizes = (unit * int(dtype[2:]), unit) if unit else (-1, -1)
        state = 3, dtype[0], None, None, None, *sizes, 0
        self.save_call("numpy.dtype", dtype[1:], False, True, state=state)

    def save_numpy_array(self, state: Mapping[str, Any]) -> None:
        """As numpy pickles it."""
        dtype = _dtype_of(str(state["dtype"]))
        parts = 1, state["shape"], dtype, state["fortran_order"], state["data"]
        made = ClassName(ARRAY), (0,), b"b"
        self.save_call("numpy._core.multiarray._reconstruct", *made, state=parts)

    def save_object(self, value: InertObject) -> None:
        """As Python pickles it: made by a call, as a new object, or as the member of an enum; then
        its attributes."""
        if value.qualname == ARRAY:
            return self.save_numpy_array(value.state)
        if value.qualname == DTYPE:
            return self.save_numpy_dtype(str(value.state["dtype"]))
        check_object(value)
        if value.made == "member":
            return self.save_call("builtins.getattr", ClassName(value.qualname), *value.args)
        made = pickle.REDUCE if value.args and value.made == "call" else pickle.NEWOBJ
        return self.save_call(value.qualname, *value.args, state=value.state, made=made)

    dispatch: ClassVar[dict[type, Callable[..., None]]] = {
        **{kind: pickle._Pickler.dispatch[kind] for kind in _OF_PYTHON},
        **{kind: _by_call for kind, row in VALUE_KINDS.items() if row.call},
        **dict.fromkeys(
            NUMPY_SCALARS,
            lambda self, v: self.save_call(
                "numpy._core.multiarray.scalar", _dtype_of(v.dtype), v.data
            ),
        ),
        complex: lambda self, v: self.save_call("builtins.complex", v.real, v.imag),
        # protocol 2 has no bytes
        bytes: lambda self, v: self.save_call("_codecs.encode", v.decode("latin1"), "latin1"),
        OrderedDict: save_ordered_dict,
        defaultdict: save_default_dict,
        DtypeName: save_dtype_name,
        DeviceName: save_device_name,
        VersionName: lambda self, v: self.save_call(
            "torch.torch_version.TorchVersion", str(v), made=pickle.NEWOBJ
        ),
        ClassName: lambda self, v: self.save_name(v.qualname),
        StorageRef: save_storage,
        TensorRef: save_tensor,
        InertObject: save_object,
    }


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
