"""Every kind of plain value, and those of classes that only a live value in the same place
vouches for; compared in type and bits without the package."""

import argparse
import datetime
import enum
import pathlib
import struct
import types
from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any, NamedTuple

import numpy as np
import torch

NAN = struct.unpack("<d", struct.pack("<Q", 0x7FF80000DEADBEEF))[0]


class Mode(enum.Enum):
    COLD = "cold"
    HOT = "hot"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Range(NamedTuple):
    low: float
    high: float


class Plain:
    """An object that is its attributes."""

    def __init__(self, values: list[Any]) -> None:
        self.values = values


def of_a_module() -> None:
    """A function that a value may name."""


UTC = datetime.UTC
# kind -> a value of it, and another one; each is made anew, as some are written to
KINDS: dict[str, Any] = {
    "None": lambda: (None, 1),
    "bool": lambda: (True, False),
    "int": lambda: ([3, -(2**40), 2**3000], [0]),
    "float": lambda: ([0.1, -0.0, float("inf"), float("-inf"), NAN, 5e-324], [1.0]),
    "complex": lambda: (complex(-0.0, NAN), 1j),
    "str": lambda: ("aß\u2028\n", "b"),
    "bytes, bytearray": lambda: ([b"\0\xff", bytearray(b"x")], [b""]),
    "tuple, list": lambda: ((1, [2, (3,)], []), ([], ())),
    "dict with any key": lambda: ({1: "a", (2, "b"): {None: 3}, 2.5: 4, b"k": 5}, {1: 0}),
    "set, frozenset": lambda: ([{1, "a"}, frozenset({(1, 2)})], [set(), frozenset()]),
    "Counter": lambda: (Counter({3: 2, "x": -1}), Counter()),
    "OrderedDict": lambda: (OrderedDict(b=1, a=2), OrderedDict()),
    "defaultdict": lambda: (defaultdict(list, {1: [2]}), defaultdict(list)),
    "deque": lambda: (deque([1, (2,)], 7), deque(maxlen=7)),
    "range, slice": lambda: ([range(1, 9, 2), slice(None, 3)], [range(1)]),
    "type": lambda: (float, int),
    "numpy scalar": lambda: (
        [
            *(np.float64(0.1), np.float32(0.1), np.float16(-0.0), np.int8(-3), np.uint64(2**63)),
            *(np.bool_(True), np.complex64(1 + 2j), np.str_("ab"), np.bytes_(b"ab")),
            np.array([NAN]).astype(">f8")[0],
        ],
        [np.float64(1.0)],
    ),
    "numpy scalars as keys": lambda: (Counter({np.int64(3): 1, np.int64(5): 1}), Counter()),
    "numpy array": lambda: (
        [
            *(np.arange(6, dtype="<f4").reshape(2, 3), np.arange(6).reshape(3, 2).T),
            *(np.zeros((0, 2)), np.array(3.5), np.array(["a", "bcd"]), np.array([NAN, -0.0])),
        ],
        [np.zeros(1)],
    ),
    "numpy dtype": lambda: ([np.dtype("<f4"), np.dtype(">i8"), np.dtype("S3")], [np.dtype("i4")]),
    "tensor": lambda: (
        [
            *(torch.arange(6).view(2, 3).t(), torch.tensor(0.5), torch.zeros(0, 3)),
            *(torch.tensor([True, False]), torch.ones(3, dtype=torch.bfloat16)),
        ],
        [torch.zeros(1)],
    ),
    "torch dtype": lambda: ([torch.bfloat16, torch.int64], [torch.float32]),
    "torch.Size": lambda: (torch.Size([2, 3]), torch.Size([])),
    "torch.device": lambda: ([torch.device("cpu"), torch.device("cuda", 1)], [torch.device("cpu")]),
    "torch version": lambda: (torch.__version__, ""),
    "path": lambda: (
        [pathlib.Path("/a/b"), pathlib.PurePosixPath("c"), pathlib.PureWindowsPath("c:/d")],
        [pathlib.Path(".")],
    ),
    "date, time": lambda: (
        [
            *(datetime.date(2026, 2, 28), datetime.time(1, 2, 3, 4)),
            *(datetime.datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=UTC), datetime.timedelta(1, 2, 3)),
            datetime.timezone(datetime.timedelta(hours=-3), "here"),
        ],
        [datetime.date(1, 1, 1)],
    ),
    "Namespace": lambda: (
        [argparse.Namespace(a=[np.float32(1)], b=None), types.SimpleNamespace(c=(1,))],
        [argparse.Namespace()],
    ),
}
# of these a live value in the same place has to be of the same class
LIVE_KINDS: dict[str, Any] = {
    "enum": lambda: ([Mode.HOT, Level.HIGH], [Mode.COLD, Level.LOW]),
    "namedtuple": lambda: (Range(0.5, np.float64(2.0)), Range(0.0, 1.0)),
    "object of attributes": lambda: (Plain([1, (2.5,)]), Plain([])),
    "function of a module": lambda: ([of_a_module], [of_a_module]),
}


def exactly(a: Any, b: Any) -> bool:
    """Whether two values are the same in type and bits, at every depth."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return np.float64(a).tobytes() == np.float64(b).tobytes() and (
            not isinstance(a, np.generic) or a.tobytes() == b.tobytes()
        )
    if isinstance(a, complex | np.generic):
        return np.asarray(a).dtype == np.asarray(b).dtype and (
            np.asarray(a).tobytes() == np.asarray(b).tobytes()
        )
    if isinstance(a, np.ndarray):
        layout = [(x.dtype, x.shape, x.flags.f_contiguous, x.tobytes()) for x in (a, b)]
        return layout[0] == layout[1]
    if isinstance(a, torch.Tensor):
        bits = [x.contiguous().reshape(-1).view(torch.uint8).tolist() for x in (a, b)]
        return (a.dtype, a.shape, bits[0]) == (b.dtype, b.shape, bits[1])
    return _contents_exactly(a, b)


def _contents_exactly(a: Any, b: Any) -> bool:
    if isinstance(a, argparse.Namespace | types.SimpleNamespace | Plain):
        return exactly(vars(a), vars(b))
    if isinstance(a, defaultdict) and a.default_factory is not b.default_factory:
        return False
    if isinstance(a, deque) and a.maxlen != b.maxlen:
        return False
    if isinstance(a, dict):
        pairs = zip(a.items(), b.items(), strict=True)
        return len(a) == len(b) and all(exactly(k, m) and exactly(v, w) for (k, v), (m, w) in pairs)
    if isinstance(a, set | frozenset):
        a, b = (sorted(x, key=repr) for x in (a, b))
    if isinstance(a, list | tuple | deque):
        return len(a) == len(b) and all(map(exactly, a, b))
    return bool(a == b)


def strangers(value: Any) -> list[str]:
    """Classes of this package among all that a live value holds."""
    found: set[str] = set()
    seen: dict[int, Any] = {}
    left = [value]
    while left:
        item = left.pop()
        if id(item) in seen:
            continue
        seen[id(item)] = item
        kind = type(item)
        if kind.__module__.startswith("megatron_ucp"):
            found.add(kind.__qualname__)
        if isinstance(item, dict):
            left += [*item, *item.values()]
        elif isinstance(item, list | tuple | set | frozenset | deque):
            left += list(item)
        elif not isinstance(item, type | types.ModuleType | types.FunctionType | torch.Tensor):
            left += list(getattr(item, "__dict__", {}).values())
    return sorted(found)


def table(back: dict[str, dict[str, list[str]]]) -> str:
    """The table of the documents, from what came back by every way: by way and place the kinds
    that did not. Kinds that behave alike are one row."""
    lost = {
        way: {kind: [place for place in places if kind in places[place]] for kind in _ALL}
        for way, places in back.items()
    }
    lines = [f"| {' | '.join(_HEADS)} |", f"|{' --- |' * len(_HEADS)}"]
    alike: dict[tuple[str, ...], list[str]] = {}
    for kind in _ALL:
        own = kind in LIVE_KINDS
        said = "where the engine has the class" if own else "yes"
        attached = [p for way in lost if way.startswith("attached") for p in lost[way][kind]]
        stock = [p for way in ("same mesh", "another") for p in lost[f"stock, {way}"][kind]]
        ways = ("converted", "converted back")
        converted = [p for way in ways for p in lost[f"attached, {way}"][kind]]
        cells = (
            *("NO" if place in attached else said for place in ("scheduler", "group")),
            "NO" if "client state" in attached else "refused at the save" if own else "yes",
            "NO" if stock else said,
            "NO" if converted else "yes",
        )
        alike.setdefault(cells, []).append(kind)
    lines += [f"| {' | '.join([', '.join(kinds), *cells])} |" for cells, kinds in alike.items()]
    return "\n".join(lines)


_ALL = [*KINDS, *LIVE_KINDS]
_HEADS = ["kind", "scheduler", "parameter group", "client state", "stock files", "`convert`"]
