"""What a pickle of torch can hold, as values without behaviour: tensors and storages by place,
objects by name."""

import datetime
import reprlib
from collections.abc import Callable
from dataclasses import dataclass
from math import prod

from megatron_ucp.core.box import dims_in_memory

ITEMSIZE: dict[str, int] = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint64": 8,
    "uint32": 4,
    "uint16": 2,
    "uint8": 1,
    "bool": 1,
    "complex64": 8,
    "complex128": 16,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
}  # bytes of one element


@dataclass(frozen=True, slots=True)
class StorageRef:
    """One storage record, `<archive>/data/<key>`, of `elems` elements of `dtype`."""

    key: str
    dtype: str
    elems: int

    @property
    def size_bytes(self) -> int:
        return self.elems * ITEMSIZE[self.dtype]


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A tensor as a view of a storage; offset and strides in elements. Its last element lies inside
    the storage."""

    storage: StorageRef
    offset_elems: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements lie in C order without gaps, as torch defines it (dims of size 1 do
        not count)."""
        return self.order == tuple(range(len(self.shape)))

    @property
    def order(self) -> tuple[int, ...] | None:
        """See `dims_in_memory`."""
        return dims_in_memory(self.shape, self.stride)

    def lies_in(self, order: tuple[int, ...] | None) -> bool:
        """Whether the elements lie without gaps, the dims in an order (None: their own)."""
        return self.is_contiguous if order is None else self.order == order


def storages_of(tree: object) -> list[StorageRef]:
    """Every storage of a tree, once, in the order of first use."""
    found: dict[str, StorageRef] = {}

    def walk(value: object) -> None:
        if isinstance(value, TensorRef):
            found.setdefault(value.storage.key, value.storage)
        elif isinstance(value, dict):
            for item in value.values():  # pyright: ignore[reportUnknownVariableType]
                walk(item)  # pyright: ignore[reportUnknownArgumentType]
        elif isinstance(value, list | tuple):
            for item in value:  # pyright: ignore[reportUnknownVariableType]
                walk(item)  # pyright: ignore[reportUnknownArgumentType]

    walk(tree)
    return list(found.values())


def _brief(value: object) -> str:
    return reprlib.repr(value) if type(value) in SCALARS else type(value).__name__


class _Short(reprlib.Repr):
    def repr_instance(self, x: object, level: int) -> str:
        """What `reprlib` does not cut itself (an OrderedDict, a Counter, a bytearray) it would show
        in full."""
        return (
            repr(x)[:200] if isinstance(x, Stand | Global | StorageRef | TensorRef) else _brief(x)
        )


shown: Callable[[object], str] = _Short().repr
"""A text of bounded length in bounded time: a hostile value shares its parts so often that a full
text never ends."""


class Stand:
    """Stands for an object of a known foreign class: the class's name, the arguments and the
    attributes, no behaviour.

    numpy arrays and scalars have the attributes `dtype` (such as "<f4"), `shape`, `fortran_order`
    and `data` (bytes). Of an `allow`ed subclass of list or dict, the content is under
    `__elements__` or `__items__`.
    """

    __slots__ = ("qualname", "args", "state")

    def __init__(
        self, qualname: str, args: tuple[object, ...] = (), state: dict[str, object] | None = None
    ) -> None:
        self.qualname = qualname
        self.args = args
        self.state: dict[str, object] = {} if state is None else state

    def get(self, name: str, default: object = None) -> object:
        """The attribute `name` that was pickled, or `default`."""
        return self.state.get(name, default)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Stand):
            return NotImplemented
        return (self.qualname, self.args, self.state) == (other.qualname, other.args, other.state)

    def __hash__(self) -> int:
        return hash((self.qualname, self.args))

    def __repr__(self) -> str:  # one level only, see `shown`
        args = ", ".join(_brief(item) for item in self.args[:6])
        state = ", ".join(f"{name}={_brief(item)}" for name, item in list(self.state.items())[:12])
        return f"Stand({self.qualname!r}, ({args}), {state})"


class DtypeName(str):
    """A torch.dtype, as its name ("torch.float32")."""

    __slots__ = ()


class Size(tuple[int, ...]):
    """A torch.Size, as a tuple of numbers."""

    __slots__ = ()


class Global:
    """A class or function that a pickle names, as a value: only its name."""

    __slots__ = ("qualname",)

    def __init__(self, qualname: str) -> None:
        self.qualname = qualname

    def __repr__(self) -> str:
        return f"Global({self.qualname!r})"


SCALARS = frozenset(
    {
        type(None),
        bool,
        int,
        float,
        complex,
        str,
        bytes,
        Global,
        DtypeName,
        datetime.date,
        datetime.datetime,
        datetime.time,
        datetime.timedelta,
        datetime.timezone,
    }
)
