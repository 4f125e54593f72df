"""Plain values of a live program: schedulers, hyper-parameters, client state.

A save takes the inert form of each (`core/values`, by `inert`), and refuses first what no load
could give back as it is (`strange`, `refuse_strange`). A load makes live values again (`Values`):
files are read without running the code that a pickle names, so a value is built only where its
class is in the closed table here, or where the live value in the same place has that class. Nothing
is imported because a file says so. What ranks have otherwise than each other is found and kept by
`LiveValues`.

Example: `{"lr": np.float32(0.5)}` has the inert form `{"lr": NumpyFloat}` with numpy's dtype and
bytes, and is built again as the same scalar of numpy.
"""

import argparse
import copyreg
import datetime
import enum
import hashlib
import io
import json
import pickle
import sys
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch.torch_version import TorchVersion

from megatron_ucp.core.grouping import grouped
from megatron_ucp.core.manifest_json import check_extent
from megatron_ucp.core.values import (
    ARRAY,
    DTYPE,
    FACTORIES,
    NAMED_TYPES,
    NOT_CODED,
    NUMPY_SCALARS,
    PATHS,
    SCALARS,
    TENSOR,
    ClassName,
    DeviceName,
    DtypeName,
    InertObject,
    NumpyScalar,
    Size,
    VersionName,
    alike,
    bytes_of_numpy,
    check_bytes,
    coded,
    empty_like,
    is_device,
    is_numpy_scalar,
    numpy_scalar,
    same,
)
from megatron_ucp.errors import (
    DamagedFileError,
    SaveError,
    UcpError,
    UnsafePickleError,
    UnsupportedError,
    some_of,
)
from megatron_ucp.formats.checkpoint import Checkpoint
from megatron_ucp.formats.deepspeed.files import OF_ARGUMENTS
from megatron_ucp.formats.per_rank import MAX_BYTES, MAX_VALUES, OwnValues, PerRank, text_of
from megatron_ucp.formats.pt.refs import ITEMSIZE, TensorRef, tensor_object
from megatron_ucp.formats.pt.unpickle import VouchedClasses, loads, with_tensors
from megatron_ucp.formats.store import Location
from megatron_ucp.reshard import agree
from megatron_ucp.reshard.execute import TORCH_DTYPES, bytes_of, tensor_at, tensor_of

# ---- the closed table

WHAT_TRAVELS = (
    "plain Python values and containers, numpy's scalars, arrays and dtypes, torch's tensors, "
    "dtypes, sizes and devices, paths, dates, argparse.Namespace"
)
_MAX_LEVELS = 90  # of nesting; files may have a few more around it
_MAX_INT_BITS = 8000  # of a whole number: a reader of pickles takes a few more
_LISTS = frozenset({list, tuple, set, frozenset, deque})
_DICTS = frozenset({dict, OrderedDict, Counter, defaultdict})
_NAMESPACES: dict[str, type] = {
    "argparse.Namespace": argparse.Namespace,
    "types.SimpleNamespace": types.SimpleNamespace,
}
_AS_THEY_ARE = frozenset(
    {
        *(type(None), bool, float, complex, str, bytes, bytearray),
        *(datetime.date, datetime.timedelta, datetime.timezone),
        *PATHS,
    }
)
_INERT: dict[type, Callable[[Any], Any]] = {
    torch.dtype: lambda item: DtypeName(str(item)),
    torch.Size: lambda item: Size(item),
    torch.device: lambda item: DeviceName(str(item)),
    TorchVersion: lambda item: VersionName(str(item)),
}
_NUMPY_KINDS = "biufcSU"  # of dtypes whose elements are numbers or text


def _qualname(kind: Any) -> str:
    """A class or function by module and name."""
    return f"{kind.__module__}.{kind.__qualname__}"


# ---- live to inert


def inert(value: Any, of_tensor: Callable[[torch.Tensor], InertObject] | None = None) -> Any:
    """A live value in its inert form, detached from what a program goes on changing. Anything
    `strange` in it becomes the name of its class. `of_tensor` makes something else of tensors than
    an object with their bytes."""
    return _Freezer(of_tensor or _of_tensor).of(value)


def strange(value: Any, where: str, live: bool) -> Iterator[tuple[str, str]]:
    """Place and description of everything in a value that no load could give back as it is.

    `live`: a running program will have a value in the same place, whose classes may be named:
    members of enums, named tuples, objects that are their attributes, functions of modules.
    """
    freezer = _look_through(value, where, live)
    if freezer.holds_itself:
        yield where, "a container that holds itself"
        return
    for place, problem in freezer.problems:
        yield _text(place), problem


def named_in(value: Any) -> dict[str, Any]:
    """Every class and function that a live value has anywhere, by module and name."""
    return _look_through(value).names


def members_by_value(value: Any) -> list[tuple[str, Any, str]]:
    """Class, value and name of every member of an enum in a live value that Python pickles by its
    value (all of them from 3.12 on, those of IntEnum before it too)."""
    return _look_through(value).members


def _look_through(value: Any, where: str = "", live: bool = True) -> "_Freezer":
    freezer = _Freezer(lambda _: InertObject(TENSOR), live)
    freezer.of(value, where)
    return freezer


# A place in a value: a text, or a form, the place of the container and the key in it. Only the
# place of what is reported is made a text.
_Place = str | tuple[Any, ...]


def _text(place: _Place) -> str:
    return place if isinstance(place, str) else place[0].format(_text(place[1]), *place[2:])


class _Freezer:
    """Makes the inert form of one live value, and notes on the way what is strange in it
    (`problems`, by place), whether a container holds itself, which classes and functions it names,
    and which members of enums Python pickles by their values."""

    def __init__(self, of_tensor: Callable[[torch.Tensor], InertObject], live: bool = True) -> None:
        self._of_tensor, self._live = of_tensor, live
        self._frozen: dict[int, Any] = {}
        self._originals: list[Any] = []  # so that no other object gets their numbers
        self._open: set[int] = set()  # containers that are being frozen
        self.holds_itself = False
        self.problems: list[tuple[_Place, str]] = []
        self.names: dict[str, Any] = {}
        self.members: list[tuple[str, Any, str]] = []

    def of(self, item: Any, place: _Place = "", level: int = 0) -> Any:
        """The inert form; what is shared is frozen once."""
        kind, number = type(item), id(item)
        if kind in _AS_THEY_ARE and level <= _MAX_LEVELS:  # most values
            return item
        self.holds_itself |= number in self._open
        if number in self._frozen:
            return self._frozen[number]
        self._originals.append(item)
        if level > _MAX_LEVELS:
            self.problems.append((place, f"more than {_MAX_LEVELS} levels"))
            return ClassName(_qualname(kind))
        if kind in _LISTS or kind in _DICTS or kind in _NAMESPACES.values():
            self._open.add(number)
            frozen = self._container(item, kind, place, level + 1)
            self._open.remove(number)
        else:
            frozen = self._leaf(item, kind, place, level)
        self._frozen[number] = frozen
        return frozen

    def _container(self, item: Any, kind: type, place: _Place, level: int) -> Any:
        number = id(item)
        if kind in _NAMESPACES.values():
            space = self._frozen[number] = InertObject(_qualname(kind))
            space.state.update(self._attributes(vars(item), place, level))
            return space
        if kind in _DICTS:
            if kind is defaultdict and item.default_factory not in (None, *FACTORIES.values()):
                self.problems.append((place, f"defaultdict of {item.default_factory!r}"))
            out = self._frozen[number] = empty_like(item)
            for key, part in item.items():
                frozen = self.of(key, ("a key of {}", place), level)
                out[frozen] = self.of(part, ("{}[{!r}]", place, key), level)
            return out
        if kind in (tuple, frozenset):
            self._frozen[number] = ClassName(_qualname(kind))  # where it holds itself
            return kind(self._parts(item, place, level))
        out = self._frozen[number] = empty_like(item)
        (out.update if kind is set else out.extend)(self._parts(item, place, level))
        return out

    def _parts(self, parts: Iterable[Any], place: _Place, level: int) -> list[Any]:
        return [self.of(part, ("{}[{}]", place, n), level) for n, part in enumerate(parts)]

    def _attributes(self, state: Mapping[str, Any], place: _Place, level: int) -> dict[str, Any]:
        return {name: self.of(part, ("{}.{}", place, name), level) for name, part in state.items()}

    def _leaf(self, item: Any, kind: type, place: _Place, level: int) -> Any:
        frozen, problem = self._of_table(item, kind)
        if not problem:
            return frozen
        found = None
        if isinstance(item, enum.Enum) and reduced(item)[0] is kind:
            self.members.append((_qualname(kind), item.value, item.name))
        if self._live or _qualname(kind) in OF_ARGUMENTS:
            found = _object(item)
        if found is None:
            self.problems.append((place, problem))
            return frozen
        self.names[found.qualname] = item if isinstance(found, ClassName) else kind
        if isinstance(found, ClassName) or found.made == "member":
            return found
        args = self._parts(found.args, place, level + 1)
        state = self._attributes(found.state, place, level + 1)
        return InertObject(found.qualname, tuple(args), state, made="new")

    def _of_table(self, item: Any, kind: type) -> tuple[Any, str]:
        """The inert form of a value that holds no others, and a description of it where it would
        not come back: then the inert form is the name of its class, or is detached."""
        name = _qualname(kind)
        unknown = ClassName(name)
        if kind in _AS_THEY_ARE:
            return item, ""
        if kind is int:
            fits = item.bit_length() <= _MAX_INT_BITS
            return (item, "") if fits else (unknown, "a whole number of too many bits")
        if kind in (slice, range):
            bounds = [b for b in (item.start, item.stop, item.step) if b is not None]
            is_plain = all(type(b) is int and abs(b) < 2**63 for b in bounds)
            problem = f"a {name} of others than numbers below 2**63"
            return (item, "") if is_plain else (unknown, problem)
        if kind in _INERT:
            is_known = kind is not torch.dtype or str(item).removeprefix("torch.") in ITEMSIZE
            return _INERT[kind](item), "" if is_known else f"{name} {item}"
        if kind in (torch.Tensor, torch.nn.Parameter):
            problem = _problem_of_tensor(item) if kind is torch.Tensor else name
            return self._of_tensor(item.detach()), problem
        if kind in (datetime.datetime, datetime.time):
            problem = _problem_of_time(item, name)
            return (unknown if problem else item), problem
        if isinstance(item, np.dtype):
            problem = "" if _is_simple(item) else f"{name} of {item}"
            return InertObject(DTYPE, (), {"dtype": item.str}), problem
        if kind is np.ndarray:
            is_simple = _is_simple(item.dtype)
            return (_of_array(item), "") if is_simple else (unknown, f"{name} of {item.dtype}")
        if isinstance(item, np.generic):
            # of empty text numpy's own pickle says another dtype
            is_known = is_numpy_scalar(item.dtype.str) and item.dtype.itemsize > 0
            if is_known and _is_simple(item.dtype):
                return numpy_scalar(item.dtype.str, item.tobytes()), ""
            return unknown, f"{name} of {item.dtype}"
        if isinstance(item, type) and item in NAMED_TYPES.values():
            return ClassName(f"builtins.{item.__name__}"), ""
        is_name = isinstance(item, type | types.FunctionType)
        return unknown, _qualname(item) if is_name else name


def _is_simple(dtype: "np.dtype[Any]") -> bool:
    return dtype.kind in _NUMPY_KINDS and dtype.fields is None and dtype.subdtype is None


def _problem_of_time(item: Any, name: str) -> str:
    if type(item.tzinfo) not in (type(None), datetime.timezone):
        return f"{name} with a zone"
    # protocol 2, in which torch.save writes, has no place for it
    return f"{name} that is the second of its kind (fold)" if item.fold else ""


def _problem_of_tensor(item: torch.Tensor) -> str:
    dtype = str(item.dtype).removeprefix("torch.")
    if item.layout != torch.strided or dtype not in ITEMSIZE or item.is_meta:
        return f"a tensor with layout {item.layout}, dtype {dtype}, device {item.device}"
    if item.requires_grad:
        return "a tensor that requires grad"
    return "a lazy tensor" if item.is_conj() or item.is_neg() else ""


def _of_tensor(item: torch.Tensor) -> InertObject:
    dtype = str(item.dtype).removeprefix("torch.")
    data = bytes(bytes_of(item.cpu().contiguous())) if item.numel() else b""
    return tensor_object(dtype, tuple(item.shape), data)


def _of_array(item: np.ndarray[Any, Any]) -> InertObject:
    fortran = item.flags.f_contiguous and not item.flags.c_contiguous
    data = item.tobytes("F" if fortran else "C")
    state = {"dtype": item.dtype.str, "shape": item.shape, "fortran_order": fortran, "data": data}
    return InertObject(ARRAY, (), state)


# ---- objects of classes that are not in the table


def _object(item: Any) -> InertObject | ClassName | None:
    """The name and parts of an object, live, where these are all that a pickle of it says; None for
    any other. A class or function is a name alone."""
    if isinstance(item, types.FunctionType | types.BuiltinFunctionType | type):
        return ClassName(_qualname(item)) if _is_in_module(item) else None
    kind = type(item)
    if not _is_in_module(kind):
        return None
    if isinstance(item, enum.Enum):
        is_member = kind.__members__.get(item.name) is item  # no combination of flags
        readable = reduced(item)[0] is not kind or type(item.value) in SCALARS
        return (
            InertObject(_qualname(kind), (item.name,), made="member")
            if is_member and readable
            else None
        )
    # an object that Python pickles as its class and attributes, or as a named tuple
    methods = ("__reduce__", "__reduce_ex__", "__setstate__", "__getnewargs_ex__")
    is_named_tuple = isinstance(item, tuple) and hasattr(kind, "_fields")
    overrides = any(getattr(kind, m, None) is not getattr(object, m, None) for m in methods)
    if overrides or not (is_named_tuple or _is_bare(kind)):
        return None
    parts: Any = (*reduced(item), None)[:5]
    make, args, state, *more = parts
    is_plain = make is copyreg.__newobj__ and all(part is None for part in more)  # type: ignore[attr-defined]
    if not is_plain or not isinstance(state, dict | None) or (is_named_tuple and state):
        return None
    return InertObject(_qualname(kind), tuple(args[1:]), dict(state or {}), made="new")


def reduced(item: Any) -> tuple[Any, ...]:
    """What a pickle of an object says: what makes it, with which arguments, and its state."""
    return item.__reduce_ex__(2)


_MADE_BY_PYTHON = 1 << 9  # Py_TPFLAGS_HEAPTYPE


def _is_bare(kind: type) -> bool:
    """Whether objects of a class have no data but attributes: none of its bases is written in
    C."""
    return all(base is object or base.__flags__ & _MADE_BY_PYTHON for base in kind.__mro__)


def _is_in_module(kind: Any) -> bool:
    """Whether a class or function is what its module has under its name, which is all that a
    pickle says of it."""
    module = sys.modules.get(getattr(kind, "__module__", None) or "")
    return module is not None and getattr(module, kind.__qualname__, None) is kind


# ---- inert to live


class Values:
    """Makes live values of the inert ones in a `file`; `tensor` reads a tensor of the file (None:
    it stays what it is). With `allow` a value that can't be built is as in the live value, or left
    out, and `left` names it."""

    def __init__(
        self,
        file: str,
        allow: bool = False,
        tensor: Callable[[TensorRef], torch.Tensor] | None = None,
    ) -> None:
        self.file, self.allow, self.tensor = file, allow, tensor
        self.left: list[str] = []

    @classmethod
    def of(cls, source: Checkpoint, allow: bool) -> "Values":
        return cls(source.main_file, allow, lambda ref: tensor_at(source.place_of(ref), ref))

    def built(self, value: Any, place: str, like: Any = None) -> Any:
        """The live value of an inert one, in memory of its own. Shared values stay shared. `place`
        is what messages call its place, `like` the live value there (None: there is none).

        Raises UnsafePickleError for an object of a class that the live value has not,
        DamagedFileError for a value that no value of its class can be.
        """
        try:
            return _Builder(self, like).of(value, like, place)
        except NOT_CODED as error:
            raise DamagedFileError(
                "a value of the checkpoint is malformed",
                file=self.file,
                found=f"{place}: {type(error).__name__}: {str(error)[:200]}",
                fix='a load with allow={"values"} keeps the engine\'s own scheduler and groups; '
                "else restore the file, or load another tag",
            ) from error

    @property
    def notes(self) -> list[str]:
        return [f"left out, or as the engine has it: {item}" for item in self.left]


_NOTHING: Any = object()  # in the place of a value that is left out


class _Builder:
    """Builds one value. Each method gets an inert item, the live value in its place, and the
    place."""

    def __init__(self, values: Values, like: Any) -> None:
        self._values, self._like = values, like
        self._built: dict[int, Any] = {}

    @cached_property
    def _names(self) -> dict[str, Any]:
        """The classes and functions that the live value has."""
        return named_in(self._like)

    def of(self, item: Any, like: Any, place: str) -> Any:
        if id(item) not in self._built:
            build = self._BY_KIND.get(type(item))
            self._built[id(item)] = item if build is None else build(self, item, like, place)
        return self._built[id(item)]

    def _list(self, item: Any, like: Any, place: str) -> Any:
        out = self._built[id(item)] = empty_like(item)
        parts = self._parts(item, like, place)
        (out.update if isinstance(item, set) else out.extend)(parts)
        return out

    def _tuple(self, item: Any, like: Any, place: str) -> Any:
        return type(item)(self._parts(item, like, place))

    def _parts(self, items: Any, like: Any, place: str) -> list[Any]:
        likes = list(like) if isinstance(like, list | tuple | deque) else []
        likes += [None] * (len(items) - len(likes))
        pairs = enumerate(zip(items, likes, strict=False))
        parts = [self.of(item, one, f"{place}[{number}]") for number, (item, one) in pairs]
        return [None if part is _NOTHING else part for part in parts]

    def _dict(self, item: Any, like: Any, place: str) -> Any:
        out = self._built[id(item)] = empty_like(item)
        likes = like if isinstance(like, Mapping) else {}
        for inert_key, inert_part in item.items():
            key = self.of(inert_key, None, f"a key of {place}")
            part = self.of(inert_part, likes.get(key), f"{place}[{key!r}]")
            if part is not _NOTHING and key is not _NOTHING:
                out[key] = part
        return out

    def _attributes(self, live: Any, item: InertObject, like: Any, place: str) -> Any:
        self._built[id(item)] = live
        likes = getattr(like, "__dict__", {})
        for name, inert_part in item.state.items():
            part = self.of(inert_part, likes.get(name), f"{place}.{name}")
            if part is not _NOTHING:
                vars(live)[name] = part
        return live

    def _object(self, item: InertObject, like: Any, place: str) -> Any:
        if item.qualname in _NAMESPACES and not item.args:
            return self._attributes(_NAMESPACES[item.qualname](), item, like, place)
        if item.qualname in _OF_OBJECTS:
            return _OF_OBJECTS[item.qualname](item)
        kind = self._live(item.qualname)
        if isinstance(kind, enum.EnumMeta):
            if item.made == "member" and item.args[0] in kind.__members__:
                return kind[str(item.args[0])]
            if item.made == "call" and not item.state:
                members: list[Any] = list(kind)
                equal = [member for member in members if alike(member.value, item.args[0])]
                if equal:
                    return equal[0]
        elif item.made == "new" and isinstance(kind, type) and issubclass(kind, tuple):
            parts = self._parts(item.args, like, place)
            if len(parts) == len(getattr(kind, "_fields", ())):
                return tuple.__new__(kind, parts)
        elif item.made == "new" and isinstance(kind, type) and _is_bare(kind) and not item.args:
            return self._attributes(object.__new__(kind), item, like, place)
        return self._strange(item.qualname, like, place)

    def _class(self, item: ClassName, like: Any, place: str) -> Any:
        kind = NAMED_TYPES.get(item.qualname) or self._live(item.qualname)
        return self._strange(item.qualname, like, place) if kind is None else kind

    def _live(self, name: str) -> Any:
        """The class or function of that name that the live value has, or one of the arguments of a
        run whose module the program has imported."""
        module, _, kind = name.rpartition(".")
        of_arguments = name in OF_ARGUMENTS and getattr(sys.modules.get(module), kind, None)
        return self._names.get(name) or of_arguments or None

    def _strange(self, name: str, like: Any, place: str) -> Any:
        if not self._values.allow:
            raise UnsafePickleError(
                "a value of the checkpoint is of a class that nothing in this program has in its "
                "place",
                file=self._values.file,
                found=f"{place}: {name[:200]!a}",
                expected=WHAT_TRAVELS,
                fix="build the scheduler and the groups as the run did; or leave such values out "
                'with allow={"values"}, which keeps the engine\'s own',
            )
        self._values.left.append(f"{place} ({name[:100]})")
        return _NOTHING if like is None else like

    def _tensor(self, item: Any, like: Any, place: str) -> Any:
        return item if self._values.tensor is None else self._values.tensor(item)

    _BY_KIND: Mapping[type, Callable[[Any, Any, Any, str], Any]] = {
        DtypeName: lambda _, item, *__: TORCH_DTYPES[item.removeprefix("torch.")],
        DeviceName: lambda _, item, *__: _device_of(item),
        VersionName: lambda _, item, *__: TorchVersion(item),
        Size: lambda _, item, *__: torch.Size(item),
        bytearray: lambda _, item, *__: bytearray(item),
        **dict.fromkeys(NUMPY_SCALARS, lambda _, item, *__: _numpy_of(item)),
        **dict.fromkeys((tuple, frozenset), _tuple),
        **dict.fromkeys((list, deque, set), _list),
        **dict.fromkeys(_DICTS, _dict),
        InertObject: _object,
        ClassName: _class,
        TensorRef: _tensor,
    }


def _device_of(item: DeviceName) -> torch.device:
    if not is_device(item):
        raise ValueError(f"{item!r:.100} is no device")
    try:
        return torch.device(item)
    except RuntimeError as error:
        raise ValueError(str(error)) from error


def _numpy_of(item: NumpyScalar) -> Any:
    return np.ndarray((), np.dtype(item.dtype), item.data)[()]


def _array_of(item: InertObject) -> Any:
    """Of numbers or text whose bytes are all there: numpy itself follows what it takes for
    addresses of objects."""
    dtype, shape, data = _dtype_of(item), item.get("shape"), item.get("data")
    check_bytes(dtype.itemsize, shape, data)
    order: Any = "F" if item.get("fortran_order") else "C"
    return np.ndarray(shape, dtype, bytearray(data), order=order)  # type: ignore[arg-type]


def _dtype_of(item: InertObject) -> "np.dtype[Any]":
    bytes_of_numpy(item.get("dtype"))
    return np.dtype(str(item.get("dtype")))


def _tensor_of(item: InertObject) -> torch.Tensor:
    check_bytes(ITEMSIZE[str(item.get("dtype"))], item.get("shape"), item.get("data"))
    return tensor_of(item)


_OF_OBJECTS: dict[str, Callable[[InertObject], Any]] = {
    ARRAY: _array_of,
    DTYPE: _dtype_of,
    TENSOR: _tensor_of,
}


# ---- refused before a save


@dataclass(frozen=True)
class SavedValue:
    """A value that goes into a save: what messages call it, and whether a running program will have
    one in the same place (`live`). Of one `in_manifest` the manifest has a second copy."""

    name: str
    value: Any
    live: bool = True
    in_manifest: bool = False


def saved_values(
    name: str, scheduler: Any, groups: Sequence[Mapping[str, Any]], **how: bool
) -> Iterator[SavedValue]:
    """The state of a scheduler, which is called `name`, and the hyper-parameters of every group;
    `how` as in `SavedValue`."""
    if scheduler is not None:
        yield SavedValue(name, scheduler.state_dict(), how.get("live", True))
    for number, group in enumerate(groups):
        settings = {key: value for key, value in group.items() if key != "params"}
        yield SavedValue(f"param_groups[{number}]", settings, **how)


_LEAVE = '; or leave it to the engine that loads, with allow={"values"}'
_LIVE = ", objects of classes that are found in their modules and are their attributes alone"
_MAX_TEXT = 2**22  # of a group, of which a manifest may hold several


_PLAIN_LEVELS, _PLAIN_VALUES, _PLAIN_TEXT = 8, 1000, 1000


def is_plain(value: Any) -> bool:
    """Whether a value is nothing but numbers and short texts, in a few lists, tuples and
    dictionaries, as most schedules and hyper-parameters are. Every load gives such a value back,
    and no pickle of it has to be made and read to know that."""
    level = [value]
    for _ in range(_PLAIN_LEVELS):
        deeper: list[Any] = []
        for item in level:
            kind = type(item)
            if kind is dict:
                deeper += [*item, *item.values()]
            elif kind is list or kind is tuple:
                deeper += item
            elif kind is str:
                if len(item) > _PLAIN_TEXT or not item.isascii():
                    return False
            elif kind is int:
                if item.bit_length() > 63:
                    return False
            elif kind is not float and kind is not bool and item is not None:
                return False
        if not deeper:
            return True
        if len(deeper) > _PLAIN_VALUES:
            return False
        level = deeper
    return False


def refuse_strange(
    saved: Iterable[SavedValue],
    error: type[UcpError] = UnsupportedError,
    file: object = None,
    left: bool = False,
) -> None:
    """Raises an error of that class for a value that no load could give back as it is; `file` is
    the one that it would go into. What is strange may be `left` to the engine that loads."""
    for item in saved:
        if is_plain(item.value):
            continue
        problems = () if left else strange(item.value, item.name, item.live)
        problem = next((f"{place}: {text}" for place, text in problems), "")
        if not problem and (why := unreadable(item.value, left)):
            problem = f"{item.name}: {why}"
        if (
            not problem
            and item.in_manifest
            and len(json.dumps(coded(inert(item.value)))) > _MAX_TEXT
        ):
            problem = f"{item.name}: more than {_MAX_TEXT} bytes as text"
        if problem:
            raise error(
                "no load could give back a value as it is",
                file=file,
                expected=WHAT_TRAVELS + _LIVE if item.live else WHAT_TRAVELS,
                found=problem,
                fix="give it as one of these (a parameter as .detach()), or keep it in a file of "
                "its own" + ("" if left or not item.live else _LEAVE),
            )


_FILE = "the file of the save"
_MAX_WRITTEN_OUT = 2**21  # values that a value has where shared parts count each time
_REFUSALS = (pickle.PicklingError, AttributeError, TypeError, ValueError, RecursionError)


def unreadable(value: Any, left: bool = False) -> str:
    """Why no load could read a value back as it is, "" where every load can: the value is pickled
    as torch does, without the bytes of its tensors, and read as every load reads it. Where what is
    `strange` in it is `left` to the engine that loads, why none could read the rest."""
    if _written_out(value, {}) > _MAX_WRITTEN_OUT:
        return f"more than {_MAX_WRITTEN_OUT} values, shared ones counted each time"
    try:
        copy, _ = _read_again(value, None if left else frozenset(named_in(value)))
        if left:
            return ""
        want = inert(value, lambda tensor: _outline(str(tensor.dtype), tuple(tensor.shape)))
        have = with_tensors(copy, lambda ref: _outline(f"torch.{ref.storage.dtype}", ref.shape))
        return "" if same(want, have) else "it is read as something else"
    except UcpError as error:
        return f"{error.problem} ({error.found})" if error.found else error.problem
    except _REFUSALS as error:
        return f"{type(error).__name__}: {str(error)[:200]}"


def names_of(value: Any) -> list[str]:
    """All classes and functions that a pickle of a value names and that are not on the closed
    list; none where it can't be pickled."""
    try:
        return sorted(_read_again(value, None)[1])
    except (UcpError, *_REFUSALS):
        return []


def _read_again(value: Any, known: frozenset[str] | None) -> tuple[Any, set[str]]:
    """A pickle of a value, read; and the names in it that are not on the closed list."""
    members = {(kind, member): name for kind, member, name in members_by_value(value)}
    vouched = VouchedClasses(lambda _: True, known, members)
    out = io.BytesIO()
    _Pickler(out, 2).dump(value)  # torch.save's protocol
    return loads(out.getvalue(), file=_FILE, vouched=vouched), vouched.names


class _Pickler(pickle.Pickler):
    """Names storages as torch.save does, and writes no bytes of them."""

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, torch.storage.TypedStorage):
            kind = getattr(torch, obj._pickle_storage_type())
            return "storage", kind, str(id(obj)), "cpu", obj._size()
        if isinstance(obj, torch.UntypedStorage):
            return "storage", torch.UntypedStorage, str(id(obj)), "cpu", obj.nbytes()
        return None


def _written_out(item: Any, counts: dict[int, int]) -> int:
    """Values in a value, those of shared parts each time; a cycle counts once."""
    parts: Any = ()
    if isinstance(item, dict):
        parts = [*item, *item.values()]
    elif isinstance(item, list | tuple | set | frozenset):
        parts = item
    if not parts or len(counts) > _MAX_WRITTEN_OUT:
        return 1
    if id(item) not in counts:
        counts[id(item)] = 1
        counts[id(item)] = 1 + sum(_written_out(part, counts) for part in parts)
    return counts[id(item)]


def _outline(dtype: str, shape: tuple[int, ...]) -> InertObject:
    return InertObject(TENSOR, (dtype, tuple(shape)))


# ---- values that differ from rank to rank


# digests of a rank's values by kind and name, and whether its client state is compared
DigestsOfRank = tuple[Mapping[tuple[str, Any], str], bool]


class LiveValues:
    """Values of this rank, to be compared with those of the other ranks: buffers and modules' extra
    states by canonical name, the client state, the scheduler's state (None: without one).

    `has_client_state` says whether the rank takes part where client states are compared: below
    ZeRO-3 DeepSpeed writes the first rank's alone, and others may give none. `alike` are values of
    which a checkpoint has one for all ranks, by names that say whose they are. The schedulers of
    pipeline stages count other groups: those of one `stage` are compared.
    """

    def __init__(
        self,
        buffers: Mapping[str, Any],
        client_state: Mapping[Any, Any],
        scheduler: Any,
        has_client_state: bool,
        alike: Mapping[str, Any],
        stage: int = 0,
    ) -> None:
        self._buffers, self._scheduler, self._stage = buffers, scheduler, stage
        self._alike, self._has_client_state = alike, has_client_state
        client = client_state if has_client_state else {}
        self._client = {inert(key): value for key, value in client.items()}

    @cached_property
    def _digests(self) -> dict[tuple[str, Any], str]:
        values = {
            "buffer": self._buffers,
            "client": self._client,
            "schedule": {self._stage: self._scheduler},
            "alike": self._alike,
        }
        return {
            (kind, name): _digest(value)
            for kind, by_name in values.items()
            for name, value in by_name.items()
        }

    def digest(self) -> str:
        """Of all of them. Raises what a value may raise."""
        renamed = {("schedule", self._stage): "schedule"}  # of whichever stage
        pairs = [(renamed.get(name, name), digest) for name, digest in self._digests.items()]
        return hashlib.sha256(repr(sorted(map(repr, pairs))).encode()).hexdigest()

    def by_name(self) -> DigestsOfRank:
        """Of each of them, by kind and name; and whether the rank takes part where client states
        are compared. Raises what a value may raise."""
        return self._digests, self._has_client_state

    def differing(self, digests: Sequence[str]) -> PerRank:
        """What differs among the ranks that have it; `digests` are those of all ranks. Collective
        where they differ. Raises SaveError on all ranks where a value must be alike."""
        return PerRank() if len({*digests}) == 1 else differing(agree.gather(self.by_name()))

    def text(self, path: Location, what: PerRank) -> str:
        """The file with this rank's values of all that differs. Raises SaveError where no load
        would take as much."""
        text = text_of(
            OwnValues(
                {name: inert(v) for name, v in self._buffers.items() if name in what.buffers},
                {key: inert(v) for key, v in self._client.items() if key in what.client_state},
                inert(self._scheduler) if what.scheduler else None,
            )
        )
        try:
            check_extent(text, MAX_BYTES, MAX_VALUES)  # as a load does
        except ValueError as error:
            raise SaveError(
                "what differs from rank to rank is too large to be kept for each rank",
                file=path,
                found=f"{what}: {error}",
                fix="keep it in files of your own",
                id="",
            ) from error
        return text


def differing(ranks: Sequence[DigestsOfRank]) -> PerRank:
    """What differs among the ranks that have it. Raises SaveError where a value must be alike."""
    by_name = grouped(pair for digests, _ in ranks for pair in digests.items())
    clients = sum(takes_part for _, takes_part in ranks)  # all of them have the same keys
    names: dict[str, set[Any]] = {"buffer": set(), "client": set(), "schedule": set()}
    for (kind, name), sums in by_name.items():
        if len({*sums}) > 1 or (kind == "client" and len(sums) < clients):
            names.setdefault(kind, set()).add(name)
    _require_alike(names.get("alike", ()))
    return PerRank(frozenset(names["buffer"]), frozenset(names["client"]), bool(names["schedule"]))


def _require_alike(names: Collection[str]) -> None:
    if names:
        raise SaveError(
            "ranks have different values where a checkpoint has one, and no load would take it",
            expected="the same value on every rank",
            found=some_of(sorted(names)),
            fix="give the groups the same settings on every rank; keep what is a rank's own in "
            "client_state",
            id="",
        )


_ATOMS = frozenset({type(None), bool, int, float})


def _digest(value: Any) -> str:
    """Of type and bits of a plain value. Tensors are read where they lie."""
    if type(value) in _ATOMS and value == value:  # of what is no number the text has no bits
        return hashlib.sha256(f"{type(value).__name__} {value!r}".encode()).hexdigest()
    text = json.dumps(_unordered(coded(inert(value, _sum))), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _unordered(data: Any) -> Any:
    """A coded value in which entries of mappings stand in the order of their text: ranks may have
    filled them in other orders."""
    if isinstance(data, list):
        return [_unordered(item) for item in data]
    if not isinstance(data, dict):
        return data
    out = {key: _unordered(item) for key, item in data.items()}
    if out.get("$") in ("dict", "Counter", "defaultdict"):
        out["items"] = sorted(out["items"], key=lambda pair: json.dumps(pair, sort_keys=True))
    return out


def _sum(tensor: torch.Tensor) -> InertObject:
    data = bytes_of(tensor.cpu().contiguous()) if tensor.numel() else b""
    text = f"{tensor.dtype} {tuple(tensor.shape)} {hashlib.sha256(data).hexdigest()}"
    return InertObject(TENSOR, (text,))
