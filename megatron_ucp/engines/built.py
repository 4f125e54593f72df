"""Live values of the inert ones that files hold (`core/values`).

Files are read without running the code that a pickle names. So a value is built again only where
its class is in the closed table, or where the live value in the same place has that class: nothing
is imported because a file says so.
"""

import enum
import sys
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.torch_version import TorchVersion

from megatron_ucp.core.value_bytes import bytes_of_numpy, check_bytes, check_text
from megatron_ucp.core.values import (
    ARRAY,
    DTYPE,
    NAMED_TYPES,
    NOT_CODED,
    NUMPY_SCALARS,
    TENSOR,
    DeviceName,
    DtypeName,
    Global,
    NumpyScalar,
    Size,
    Stand,
    VersionName,
    alike,
    empty_like,
)
from megatron_ucp.engines.values import (
    DICTS,
    SPACES,
    WHAT_TRAVELS,
    inert,
    is_bare,
    named_in,
)
from megatron_ucp.errors import DamagedFileError, UnsafePickleError
from megatron_ucp.formats.checkpoint import Checkpoint
from megatron_ucp.formats.deepspeed.files import OF_ARGUMENTS
from megatron_ucp.formats.pt.values import ITEMSIZE, TensorRef
from megatron_ucp.reshard.execute import TORCH_DTYPES, tensor_at, tensor_of


@dataclass
class Building:
    """How values are built that go to one place of a program. `like` is the live value there (None:
    there is none), `place` what messages call it, `tensor` what reads a tensor of the `file`. With
    `allow` what can't be built is as in the live value, or left out, and `left` names it."""

    file: str
    place: str
    like: Any = None
    tensor: Callable[[Any], torch.Tensor] | None = None
    allow: bool = False
    left: list[str] = field(default_factory=list[str])


def built(value: Any, how: Building) -> Any:
    """The live value of an inert one, in memory of its own. Shared values stay shared. Raises
    UnsafePickleError for an object of a class that the live value has not, DamagedFileError for
    what no value of its class says."""
    try:
        return _Builder(how).of(value, how.like, how.place)
    except NOT_CODED as error:
        raise DamagedFileError(
            "a value of the checkpoint is malformed",
            file=how.file,
            found=f"{how.place}: {type(error).__name__}: {str(error)[:200]}",
            fix='a load with allow={"values"} keeps the engine\'s own scheduler and groups; else '
            "restore the file, or load another tag",
        ) from error


def reducing(function: Callable[[str, list[Any]], Any]) -> Callable[[str, list[Any]], Any]:
    """A function of a program, which makes one live value of several, as one of inert values."""

    def reduced(name: str, values: list[Any]) -> Any:
        return inert(function(name, [built(value, Building("", name)) for value in values]))

    return reduced


class Values:
    """Plain values of a checkpoint as live ones. With `allow`, values of classes that the program
    has not are left out, or as the live value in their place."""

    def __init__(self, source: Checkpoint, allow: bool) -> None:
        self._source, self._allow = source, allow
        self._left: list[str] = []

    def built(self, value: Any, place: str, like: Any = None) -> Any:
        """See `built`; `place` is what messages call the place."""
        how = Building(self._source.main_file, place, like, self._tensor, self._allow, self._left)
        return built(value, how)

    def _tensor(self, ref: TensorRef) -> torch.Tensor:
        return tensor_at(self._source.place_of(ref), ref)

    @property
    def notes(self) -> list[str]:
        return [f"left out, or as the engine has it: {one}" for one in self._left]


_NOTHING: Any = object()  # in the place of what is left out


class _Builder:
    def __init__(self, how: Building) -> None:
        self.how = how
        self._made: dict[int, Any] = {}
        self._named: dict[str, Any] | None = None

    def of(self, item: Any, like: Any, place: str) -> Any:
        if id(item) not in self._made:
            build = self._BY_KIND.get(type(item))
            made = item if build is None else build(self, item, like, place)
            self._made[id(item)] = made
        return self._made[id(item)]

    def _numpy(self, item: NumpyScalar, like: Any, place: str) -> Any:
        return np.ndarray((), np.dtype(item.dtype), item.data)[()]

    def _list(self, item: Any, like: Any, place: str) -> Any:
        out = self._made[id(item)] = empty_like(item)
        (out.extend if isinstance(item, list | deque) else out.update)(
            self._parts(item, like, place)
        )
        return out

    def _fixed(self, item: Any, like: Any, place: str) -> Any:
        return type(item)(self._parts(item, like, place))

    def _parts(self, items: Any, like: Any, place: str) -> list[Any]:
        beside = list(like) if isinstance(like, list | tuple | deque) else []
        beside += [None] * (len(items) - len(beside))
        parts = [
            self.of(one, here, f"{place}[{number}]")
            for number, (one, here) in enumerate(zip(items, beside, strict=False))
        ]
        return [None if part is _NOTHING else part for part in parts]

    def _dict(self, item: Any, like: Any, place: str) -> Any:
        out = self._made[id(item)] = empty_like(item)
        beside = like if isinstance(like, Mapping) else {}
        for key, one in item.items():
            made = self.of(key, None, f"a key of {place}")
            part = self.of(one, beside.get(made), f"{place}[{made!r}]")
            if part is not _NOTHING and made is not _NOTHING:
                out[made] = part
        return out

    def _stand(self, item: Stand, like: Any, place: str) -> Any:
        if item.qualname in SPACES and not item.args:
            space = self._made[id(item)] = SPACES[item.qualname]()
            self._attributes(space, item, like, place)
            return space
        if item.qualname in _OF_STANDS:
            return _OF_STANDS[item.qualname](item)
        return self._object(item, like, place)

    def _attributes(self, space: Any, item: Stand, like: Any, place: str) -> None:
        beside = getattr(like, "__dict__", {})
        for name, one in item.state.items():
            part = self.of(one, beside.get(name), f"{place}.{name}")
            if part is not _NOTHING:
                vars(space)[name] = part

    def _object(self, item: Stand, like: Any, place: str) -> Any:
        kind = self._live(item.qualname)
        if item.made == "member" and isinstance(kind, enum.EnumMeta):
            if (name := item.args[0]) in kind.__members__:
                return kind[str(name)]
        elif item.made == "call" and isinstance(kind, enum.EnumMeta) and not item.state:
            members: list[Any] = list(kind)
            found = [one for one in members if alike(one.value, item.args[0])]
            if found:
                return found[0]
        elif item.made == "new" and isinstance(kind, type) and issubclass(kind, tuple):
            parts = self._parts(item.args, like, place)
            if len(parts) == len(getattr(kind, "_fields", ())):
                return tuple.__new__(kind, parts)
        elif item.made == "new" and isinstance(kind, type) and is_bare(kind) and not item.args:
            made = self._made[id(item)] = object.__new__(kind)
            self._attributes(made, item, like, place)
            return made
        return self._strange(item.qualname, like, place)

    def _global(self, item: Global, like: Any, place: str) -> Any:
        found = NAMED_TYPES.get(item.qualname) or self._live(item.qualname)
        return self._strange(item.qualname, like, place) if found is None else found

    def _live(self, name: str) -> Any:
        """The class or function of that name that the live value has."""
        if self._named is None:
            self._named = named_in(self.how.like)
        return self._named.get(name) or _of_arguments(name)

    def _strange(self, name: str, like: Any, place: str) -> Any:
        if not self.how.allow:
            raise UnsafePickleError(
                "a value of the checkpoint is of a class that nothing in this program has in its "
                "place",
                file=self.how.file,
                found=f"{place}: {name[:200]!a}",
                expected=WHAT_TRAVELS,
                fix="build the scheduler and the groups as the run did; or leave such values out "
                'with allow={"values"}, which keeps the engine\'s own',
            )
        self.how.left.append(f"{place} ({name[:100]})")
        return _NOTHING if like is None else like

    def _tensor(self, item: Any, like: Any, place: str) -> Any:
        return item if self.how.tensor is None else self.how.tensor(item)

    _BY_KIND: Mapping[type, Callable[[Any, Any, Any, str], Any]] = {
        DtypeName: lambda _, item, *__: TORCH_DTYPES[item.removeprefix("torch.")],
        DeviceName: lambda _, item, *__: _device_of(item),
        VersionName: lambda _, item, *__: TorchVersion(item),
        Size: lambda _, item, *__: torch.Size(item),
        Stand: _stand,
        Global: _global,
        TensorRef: _tensor,
        bytearray: lambda _, item, *__: bytearray(item),
        **dict.fromkeys(NUMPY_SCALARS, _numpy),
        **dict.fromkeys((tuple, frozenset), _fixed),
        **dict.fromkeys((list, deque, set), _list),
        **dict.fromkeys(DICTS, _dict),
    }


def _of_arguments(name: str) -> Any:
    """A class of the closed list, where the program has imported its module."""
    module, _, kind = name.rpartition(".")
    return getattr(sys.modules.get(module), kind, None) if name in OF_ARGUMENTS else None


def _device_of(item: DeviceName) -> torch.device:
    check_text("DeviceName", item)
    try:
        return torch.device(item)
    except RuntimeError as error:
        raise ValueError(str(error)) from error


def _array_of(item: Stand) -> Any:
    """Of numbers or text whose bytes are all there: numpy itself follows what it takes for
    addresses of objects."""
    dtype, shape, data = _dtype_of(item), item.get("shape"), item.get("data")
    check_bytes(dtype.itemsize, shape, data)
    order: Any = "F" if item.get("fortran_order") else "C"
    return np.ndarray(shape, dtype, bytearray(data), order=order)  # type: ignore[arg-type]


def _dtype_of(item: Stand) -> "np.dtype[Any]":
    bytes_of_numpy(item.get("dtype"))
    return np.dtype(str(item.get("dtype")))


def _tensor_of(item: Stand) -> torch.Tensor:
    check_bytes(ITEMSIZE[str(item.get("dtype"))], item.get("shape"), item.get("data"))
    return tensor_of(item)


_OF_STANDS: dict[str, Callable[[Stand], Any]] = {
    ARRAY: _array_of,
    DTYPE: _dtype_of,
    TENSOR: _tensor_of,
}
