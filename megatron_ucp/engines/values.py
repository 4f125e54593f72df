"""Plain values of a live program: the closed table, what is not in it and so refused before a save
writes anything, and their inert form (`core/values`). `built` makes live values again."""

import argparse
import copyreg
import datetime
import enum
import sys
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.torch_version import TorchVersion

from megatron_ucp.core.values import (
    ARRAY,
    DTYPE,
    FACTORIES,
    NAMED_TYPES,
    PATHS,
    SCALARS,
    DeviceName,
    DtypeName,
    Global,
    Size,
    Stand,
    VersionName,
    empty_like,
    is_numpy_scalar,
    numpy_scalar,
)
from megatron_ucp.formats.deepspeed.files import OF_ARGUMENTS
from megatron_ucp.formats.pt.values import ITEMSIZE, tensor_stand
from megatron_ucp.reshard.execute import bytes_of

WHAT_TRAVELS = (
    "plain Python values and containers, numpy's scalars, arrays and dtypes, torch's tensors, "
    "dtypes, sizes and devices, paths, dates, argparse.Namespace"
)

_MAX_LEVELS = 90  # of nesting; files may have a few more around it
_MAX_INT_BITS = 8000  # of a whole number: a reader of pickles takes a few more
_SCALARS = frozenset(
    {
        *(type(None), bool, int, float, complex, str, bytes, bytearray, range, slice),
        *(datetime.date, datetime.timedelta, datetime.timezone),
        *(torch.Size, torch.device, TorchVersion),
        *PATHS,
    }
)
LISTS = frozenset({list, tuple, set, frozenset, deque})
DICTS = frozenset({dict, OrderedDict, Counter, defaultdict})
SPACES: dict[str, type] = {
    "argparse.Namespace": argparse.Namespace,
    "types.SimpleNamespace": types.SimpleNamespace,
}
_NUMPY_KINDS = "biufcSU"  # of dtypes whose elements are numbers or text


def _qualname(kind: Any) -> str:
    """A class or function by module and name."""
    return f"{kind.__module__}.{kind.__qualname__}"


# ------------------------------------------------ before a save


def strange(value: Any, where: str, live: bool) -> Iterator[tuple[str, str]]:
    """Place and description of everything in a value that no load could give back as it is.

    `live`: a running program will have a value in the same place, whose classes may be named:
    members of enums, named tuples, objects that are their attributes, functions of modules.
    """
    if _holds_itself(value, set(), set()):
        yield where, "a container that holds itself"
        return
    for _, place, level, wrong in _walk(value, where, live):
        if level > _MAX_LEVELS:
            yield place, f"more than {_MAX_LEVELS} levels"
        elif wrong:
            yield place, wrong


def _walk(value: Any, where: str, live: bool) -> Iterator[tuple[Any, str, int, str]]:
    """Everything in a value once, with its place, its level and what is `strange` about it:
    containers, what is in them, and with `live` in objects of other classes."""
    seen: dict[int, Any] = {}  # kept, that no other object gets the number
    left: list[tuple[Any, str, int]] = [(value, where, 0)]
    while left:
        item, place, level = left.pop()
        if id(item) in seen:
            continue
        seen[id(item)] = item
        found = _inside(item, place)
        wrong = _wrong_leaf(item) if found is None else ""
        named = live or _qualname(type(item)) in OF_ARGUMENTS
        if wrong and named and (stand := _object(item)) is not None:
            found, wrong = _parts_of(stand, place), ""
        yield item, place, level, wrong
        if level <= _MAX_LEVELS:
            left += [(inner, name, level + 1) for name, inner in found or ()]


def _holds_itself(item: Any, above: set[int], done: set[int]) -> bool:
    """Whether a container is somewhere in itself; `above` are those that it is in."""
    if id(item) in done or len(above) > _MAX_LEVELS:
        return False
    if id(item) in above:
        return True
    inner = [part for _, part in _inside(item, "") or () if _inside(part, "") is not None]
    found = any(_holds_itself(part, above | {id(item)}, done) for part in inner)
    done.add(id(item))
    return found


def _inside(item: Any, place: str) -> list[tuple[str, Any]] | None:
    """The values in a container of the table, with their places; None for what is none."""
    kind = type(item)
    if kind in LISTS:
        return [(f"{place}[{number}]", inner) for number, inner in enumerate(item)]
    if kind in SPACES.values():
        return [(f"{place}.{name}", inner) for name, inner in vars(item).items()]
    factories = (None, *FACTORIES.values())
    if kind not in DICTS or (kind is defaultdict and item.default_factory not in factories):
        return None
    keys = [(f"a key of {place}", key) for key in item]
    return keys + [(f"{place}[{key!r}]", inner) for key, inner in item.items()]


def _parts_of(stand: Stand | Global, place: str) -> list[tuple[str, Any]]:
    if isinstance(stand, Global) or stand.made == "member":
        return []
    parts = [(f"{place}[{number}]", inner) for number, inner in enumerate(stand.args)]
    return parts + [(f"{place}.{name}", inner) for name, inner in stand.state.items()]


def _wrong_leaf(item: Any) -> str:
    """A description of a value that would not come back, "" for one that does."""
    kind = type(item)
    name = _qualname(kind)
    if kind is int:
        return "" if item.bit_length() <= _MAX_INT_BITS else "a whole number of too many bits"
    if kind in (slice, range):
        bounds = [b for b in (item.start, item.stop, item.step) if b is not None]
        plain = all(type(b) is int and abs(b) < 2**63 for b in bounds)
        return "" if plain else f"a {name} of others than numbers below 2**63"
    if kind in _SCALARS:
        return ""
    if kind is torch.dtype:
        return "" if str(item).removeprefix("torch.") in ITEMSIZE else f"{name} {item}"
    if kind is torch.Tensor:
        return _wrong_tensor(item)
    if kind in (datetime.datetime, datetime.time):
        return _wrong_time(item, name)
    if kind is np.ndarray or isinstance(item, np.generic | np.dtype):
        return _wrong_of_numpy(item, name)
    if isinstance(item, type) and item in NAMED_TYPES.values():
        return ""
    if kind is defaultdict:
        return f"defaultdict of {item.default_factory!r}"
    return _qualname(item) if isinstance(item, type | types.FunctionType) else name


def _wrong_of_numpy(item: Any, name: str) -> str:
    dtype = item if isinstance(item, np.dtype) else item.dtype
    simple = dtype.kind in _NUMPY_KINDS and dtype.fields is None and dtype.subdtype is None
    if isinstance(item, np.generic):
        simple = simple and _is_kept(item)
    return "" if simple else f"{name} of {dtype}"


def _is_kept(item: np.generic) -> bool:
    """Whether a scalar of numpy can be represented; of empty text its pickle says another
    dtype."""
    return is_numpy_scalar(item.dtype.str) and item.dtype.itemsize > 0


def _wrong_time(item: Any, name: str) -> str:
    if type(item.tzinfo) not in (type(None), datetime.timezone):
        return f"{name} with a zone"
    # protocol 2, in which torch.save writes, has no place for it
    return f"{name} that is the second of its kind (fold)" if item.fold else ""


def _wrong_tensor(item: torch.Tensor) -> str:
    said = str(item.dtype).removeprefix("torch.")
    if item.layout != torch.strided or said not in ITEMSIZE or item.is_meta:
        return f"a tensor with layout {item.layout}, dtype {said}, device {item.device}"
    if item.requires_grad:
        return "a tensor that requires grad"
    return "a lazy tensor" if item.is_conj() or item.is_neg() else ""


# ------------------------------------------------ objects of other classes


def _object(item: Any) -> Stand | Global | None:
    """An object of a class that is not in the table, as its name and parts, where these are all
    that a pickle of it says; None for any other."""
    if isinstance(item, types.FunctionType | types.BuiltinFunctionType | type):
        return Global(_qualname(item)) if _is_found(item) else None
    kind = type(item)
    if not _is_found(kind):
        return None
    if isinstance(item, enum.Enum):
        known = kind.__members__.get(item.name) is item  # no combination of flags
        readable = reduced(item)[0] is not kind or type(item.value) in SCALARS
        return Stand(_qualname(kind), (item.name,), made="member") if known and readable else None
    return _plain_object(item, kind)


def _plain_object(item: Any, kind: type) -> Stand | None:
    """Of an object that Python pickles as its class and attributes, or as a named tuple."""
    own = ("__reduce__", "__reduce_ex__", "__setstate__", "__getnewargs_ex__")
    named = isinstance(item, tuple) and hasattr(kind, "_fields")
    if not (named or is_bare(kind)) or any(_overrides(kind, name) for name in own):
        return None
    parts: Any = (*reduced(item), None)[:5]
    make, args, state, *more = parts
    bare = all(part is None for part in more) and make is copyreg.__newobj__  # type: ignore[attr-defined]
    if not bare or not isinstance(state, dict | None) or (named and state):
        return None
    return Stand(_qualname(kind), tuple(args[1:]), dict(state or {}), made="new")


def reduced(item: Any) -> tuple[Any, ...]:
    """What a pickle of an object says: what makes it, with which arguments, and its state."""
    found: Any = item.__reduce_ex__(2)
    return found


def _overrides(kind: type, name: str) -> bool:
    return getattr(kind, name, None) is not getattr(object, name, None)


_MADE_BY_PYTHON = 1 << 9  # Py_TPFLAGS_HEAPTYPE


def is_bare(kind: type) -> bool:
    """Whether objects of a class have no data but attributes: none of its bases is written in
    C."""
    return all(base is object or base.__flags__ & _MADE_BY_PYTHON for base in kind.__mro__)


def _is_found(kind: Any) -> bool:
    """Whether a class or function is what its module has under its name, which is all that a
    pickle says of it."""
    module = sys.modules.get(getattr(kind, "__module__", None) or "")
    return module is not None and getattr(module, kind.__qualname__, None) is kind


def named_in(value: Any) -> dict[str, Any]:
    """Every class and function that a live value has anywhere, by module and name."""
    out: dict[str, Any] = {}
    for item in _all_in(value):
        odd = _inside(item, "") is None and bool(_wrong_leaf(item))
        if odd and (stand := _object(item)) is not None:
            out[stand.qualname] = item if isinstance(stand, Global) else type(item)
    return out


def _all_in(value: Any) -> Iterator[Any]:
    """Everything in a live value, once."""
    return (item for item, *_ in _walk(value, "", live=True))


# ------------------------------------------------ live to inert


def inert(value: Any, of_tensor: Callable[[torch.Tensor], Stand] | None = None) -> Any:
    """A live value in its inert form, detached from what a program goes on changing. Of one in
    which nothing is `strange`; what is becomes the name of its class. `of_tensor` makes something
    else of tensors than what holds their bytes."""
    return _Inert(of_tensor or _of_tensor).of(value)


class _Inert:
    def __init__(self, of_tensor: Callable[[torch.Tensor], Stand]) -> None:
        self._of_tensor = of_tensor
        self._made: dict[int, Any] = {}
        self._kept: list[Any] = []  # that no other object gets their numbers

    def of(self, item: Any) -> Any:
        if id(item) in self._made:
            return self._made[id(item)]
        self._kept.append(item)
        kind = type(item)
        if kind in LISTS or kind in DICTS or kind in SPACES.values():
            return self._container(item, kind)
        if isinstance(item, np.generic) and _is_kept(item):
            return numpy_scalar(item.dtype.str, item.tobytes())
        return self._leaf(item, kind)

    def _leaf(self, item: Any, kind: type) -> Any:
        if kind is torch.Tensor or kind is torch.nn.Parameter:
            return self._of_tensor(item.detach())
        if kind is np.ndarray and not _wrong_leaf(item):
            return _of_array(item)
        if isinstance(item, np.dtype):
            return Stand(DTYPE, (), {"dtype": item.str})
        if kind in _RENAMED:
            return _RENAMED[kind](item)
        if isinstance(item, type) and item in NAMED_TYPES.values():
            return Global(f"builtins.{item.__name__}")
        if not _wrong_leaf(item):
            return item
        found = _object(item)
        if isinstance(found, Stand) and found.made == "new":
            args = tuple(self.of(part) for part in found.args)
            state = {name: self.of(part) for name, part in found.state.items()}
            return Stand(found.qualname, args, state, made="new")
        return Global(_qualname(kind)) if found is None else found

    def _container(self, item: Any, kind: type) -> Any:
        if kind in (tuple, frozenset):
            return kind([self.of(part) for part in item])
        if kind in SPACES.values():
            space = self._made[id(item)] = Stand(_qualname(kind))
            space.state.update({name: self.of(part) for name, part in vars(item).items()})
            return space
        out = self._made[id(item)] = empty_like(item)
        if kind in DICTS:
            out.update({self.of(key): self.of(part) for key, part in item.items()})
        else:
            (out.update if kind is set else out.extend)([self.of(part) for part in item])
        return out


_RENAMED: dict[type, Callable[[Any], Any]] = {
    torch.dtype: lambda item: DtypeName(str(item)),
    torch.Size: lambda item: Size(item),
    torch.device: lambda item: DeviceName(str(item)),
    TorchVersion: lambda item: VersionName(str(item)),
}


def _of_tensor(item: torch.Tensor) -> Stand:
    dtype = str(item.dtype).removeprefix("torch.")
    data = bytes(bytes_of(item.cpu().contiguous())) if item.numel() else b""
    return tensor_stand(dtype, tuple(item.shape), data)


def _of_array(item: np.ndarray[Any, Any]) -> Stand:
    fortran = item.flags.f_contiguous and not item.flags.c_contiguous
    data = item.tobytes("F" if fortran else "C")
    state = {"dtype": item.dtype.str, "shape": item.shape, "fortran_order": fortran, "data": data}
    return Stand(ARRAY, (), state)


def members_by_value(value: Any) -> list[tuple[str, Any, str]]:
    """Class, value and name of every member of an enum in a live value that Python pickles by its
    value (all of them from 3.12 on, those of IntEnum before it too)."""
    found = [item for item in _all_in(value) if isinstance(item, enum.Enum)]
    by_value = [item for item in found if reduced(item)[0] is type(item)]
    return [(_qualname(type(item)), item.value, item.name) for item in by_value]
