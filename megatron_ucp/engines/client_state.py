"""The user's own values in a checkpoint: what comes back as it was saved, and what is refused
before a save writes anything.

Files are read without running the code that a pickle names, so a value is built again only where
its class is one of these.
"""

import argparse
import datetime
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from megatron_ucp.errors import SaveError, UsageError
from megatron_ucp.formats.pt.values import ITEMSIZE, DtypeName, Size, Stand

_MAX_LEVELS = 90  # of nesting; files may have a few more around it
_PLAIN = frozenset(
    {
        *(type(None), bool, int, float, complex, str, bytes, bytearray, range, slice),
        *(datetime.date, datetime.timedelta, datetime.timezone, torch.dtype, torch.Size),
    }
)
_LISTS = frozenset({list, tuple, set, frozenset, deque})
_DICTS = frozenset({dict, OrderedDict, Counter, defaultdict})
_FACTORIES = (None, list, dict, int, float, set)
_SPACES: dict[str, type] = {
    "argparse.Namespace": argparse.Namespace,
    "types.SimpleNamespace": types.SimpleNamespace,
}

# ------------------------------------------------ before a save


def check_client_state(value: Any, reserved: Collection[str], file: object) -> None:
    """Raises SaveError for a value that no load could give back as it is, UsageError for what is no
    dict or has a key that DeepSpeed itself writes. `file` is the one that it would go into."""
    if not isinstance(value, Mapping):
        raise UsageError("client_state is a dictionary", found=type(value).__qualname__)
    taken = sorted(key for key in value if isinstance(key, str) and key in reserved)
    if taken:
        raise UsageError(
            "client_state has keys that DeepSpeed writes itself, and would replace their values",
            file=file,
            found=", ".join(taken),
            fix="give these values other names",
        )
    for key, item in value.items():
        for where, wrong in _changed(item, f"client_state[{key!r}]"):
            raise SaveError(
                "a file could not be written so that it can be read again: no load could give back "
                "a value of the client state as it is",
                file=file,
                expected="plain Python values and containers, tensors, numpy arrays and scalars, "
                "argparse.Namespace, torch.dtype, torch.Size",
                found=f"{where}: {wrong}",
                fix="give it as one of these (a path as str, a parameter as .detach()), or save it "
                "in a file of its own",
            )


def unkept(value: Any, where: str) -> str:
    """Place and class of the first thing in a value that would not come back, "" where all
    would."""
    return next((f"{place}: {wrong}" for place, wrong in _changed(value, where)), "")


def _changed(value: Any, where: str) -> Iterator[tuple[str, str]]:
    """Place and class of everything that would not come back."""
    seen: set[int] = set()
    left: list[tuple[Any, str, int]] = [(value, where, 0)]
    while left:
        item, place, level = left.pop()
        kind = type(item)
        if kind in _PLAIN or id(item) in seen:
            continue
        seen.add(id(item))
        if level > _MAX_LEVELS:
            yield place, f"more than {_MAX_LEVELS} levels"
        elif kind in _DICTS or kind in _SPACES.values():
            held = item if kind in _DICTS else vars(item)
            if kind is defaultdict and item.default_factory not in _FACTORIES:
                yield place, f"defaultdict of {item.default_factory!r}"
            left += [(key, f"a key of {place}", level + 1) for key in held]
            left += [(inner, f"{place}[{key!r}]", level + 1) for key, inner in held.items()]
        elif kind in _LISTS:
            left += [(inner, f"{place}[{n}]", level + 1) for n, inner in enumerate(item)]
        elif wrong := _wrong_leaf(item):
            yield place, wrong


def _wrong_leaf(item: Any) -> str:
    """The class of a value that would not come back, "" for one that does."""
    kind = type(item)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if kind is torch.Tensor:
        return _wrong_tensor(item)
    if kind in (datetime.datetime, datetime.time):
        return "" if type(item.tzinfo) in (type(None), datetime.timezone) else f"{name} with a zone"
    if kind is np.ndarray or isinstance(item, np.generic | np.dtype):
        dtype = item if isinstance(item, np.dtype) else item.dtype
        simple = dtype.kind in "biufcSU" and dtype.fields is None and dtype.subdtype is None
        return "" if simple else f"{name} of {dtype}"
    return name


def _wrong_tensor(item: torch.Tensor) -> str:
    said = str(item.dtype).removeprefix("torch.")
    if item.layout != torch.strided or said not in ITEMSIZE or item.is_meta:
        return f"a tensor with layout {item.layout}, dtype {said}, device {item.device}"
    if item.requires_grad:
        return "a tensor that requires grad"
    return "a lazy tensor" if item.is_conj() or item.is_neg() else ""


# ------------------------------------------------ after a load


def rebuilt(value: Any) -> Any:
    """A copy of what was read, with numpy arrays and scalars, Namespace, torch.dtype and torch.Size
    in the place of what stands for them. Shared values stay shared."""
    return _Builder().of(value)


class _Builder:
    def __init__(self) -> None:
        self.made: dict[int, Any] = {}

    def of(self, item: Any) -> Any:
        if id(item) not in self.made:
            build = self._BY_KIND.get(type(item))
            self.made[id(item)] = item
            if build is not None:
                self.made[id(item)] = build(self, item)
        return self.made[id(item)]

    def _dtype(self, item: DtypeName) -> Any:
        return getattr(torch, item.removeprefix("torch."), str(item))

    def _list(self, item: Any) -> Any:
        """In place: what was read belongs to nobody else, and it may hold itself."""
        inner = [self.of(one) for one in item]
        item.clear()
        (item.extend if isinstance(item, list | deque) else item.update)(inner)
        return item

    def _fixed(self, item: Any) -> Any:
        return type(item)([self.of(one) for one in item])

    def _dict(self, item: Any) -> Any:
        inner = [(self.of(key), self.of(one)) for key, one in item.items()]
        item.clear()
        for key, one in inner:
            item[key] = one
        return item

    def _stand(self, item: Stand) -> Any:
        if item.qualname in _SPACES and not item.args:
            made = self.made[id(item)] = _SPACES[item.qualname]()
            vars(made).update({name: self.of(one) for name, one in item.state.items()})
            return made
        if item.qualname == "numpy.dtype":
            return np.dtype(str(item.state["dtype"]))
        if item.qualname in ("numpy.ndarray", "numpy.scalar"):
            return _array(item)
        return item

    _BY_KIND: Mapping[type, Callable[[Any, Any], Any]] = {
        DtypeName: _dtype,
        Size: lambda _, item: torch.Size(item),
        Stand: _stand,
        tuple: _fixed,
        frozenset: _fixed,
        **dict.fromkeys((list, deque, set), _list),
        **dict.fromkeys(_DICTS, _dict),
    }


def _array(item: Stand) -> Any:
    dtype, shape, data = np.dtype(str(item.get("dtype"))), item.get("shape"), item.get("data")
    order: Any = "F" if item.get("fortran_order") else "C"
    found: Any = np.ndarray(shape, dtype, bytearray(data), order=order)  # type: ignore[arg-type]
    return found[()] if item.qualname == "numpy.scalar" else found
