"""Reads the pickle inside a torch `.pt` file without running any code that it names.

The pickle machine is our own, as Python's cannot be made safe: `pickle.Unpickler` sets attributes
on whatever a file names (BUILD), hashes nested tuples until the C stack overflows, and allocates as
much as an opcode claims. Here a class or function of the file is a `Global`, an inert name that
Python can't call. What a call of it means is a row of the closed list of `pickle_known`: a tensor
becomes a `TensorRef`, a plain value what `core/values` has for it, a DeepSpeed object a `Stand`. A
name that is not on the list is refused; where a caller wants to hear of it, it may stand as a name,
or as the class of an object that is made without a call. Protocols 2 to 5 are read, of which
torch.save writes 2.
"""

import struct
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable
from typing import Any

from megatron_ucp.core.values import (
    TENSOR,
    Global,
    Size,
    Stand,
    empty_like,
)
from megatron_ucp.errors import DamagedFileError
from megatron_ucp.formats.pt.known import KNOWN, STATES, STORAGE_DTYPES
from megatron_ucp.formats.pt.machine import AllowedClasses, Machine, Tables
from megatron_ucp.formats.pt.opcodes import HANDLERS
from megatron_ucp.formats.pt.strangers import Strangers
from megatron_ucp.formats.pt.values import ITEMSIZE, StorageRef, TensorRef

__all__ = [
    "ITEMSIZE",
    "MAX_OPERATIONS",
    "MAX_PICKLE_BYTES",
    "NOTHING_MORE",
    "AllowedClasses",
    "Global",
    "Stand",
    "StorageRef",
    "TensorRef",
    "loads",
    "with_tensors",
]

MAX_PICKLE_BYTES = 256 * 2**20
MAX_OPERATIONS = 20_000_000
# levels of containers; what Python hashes, compares and shows by recursion in C stays far from its
# limit
MAX_DEPTH = 100
_MAX_WRITTEN_OUT = (
    2**23
)  # values that shared ones may add up to where each is counted as often as it can be reached
_TABLES = Tables(HANDLERS, KNOWN, STATES, STORAGE_DTYPES)

NOTHING_MORE = AllowedClasses()

_CAUGHT = (
    EOFError,
    IndexError,
    KeyError,
    TypeError,
    ValueError,
    AttributeError,
    MemoryError,
    RecursionError,
    OverflowError,
    struct.error,
)  # UnicodeDecodeError is a ValueError


def loads(
    data: bytes,
    *,
    file: str,
    allow: AllowedClasses = NOTHING_MORE,
    strangers: Strangers | None = None,
) -> object:
    """The value in the pickle `data` of `file`, with a `TensorRef` for each tensor and a `Stand`
    for each known object.

    `allow` has further classes whose objects become `Stand`s; their code is not run either. With
    `strangers` others may stand as names, see there. Raises
    UnsafePickleError for any other global, DamagedFileError for a malformed pickle or an impossible
    tensor, and UnsupportedError for tensors and arrays whose bytes alone do not say their values.
    """
    if len(data) > MAX_PICKLE_BYTES:
        raise DamagedFileError(
            "the pickle is larger than any that this package reads",
            file=file,
            expected=f"at most {MAX_PICKLE_BYTES} bytes",
            found=f"{len(data)} bytes",
        )
    machine = Machine(data, file, _TABLES, allow, strangers)
    try:
        value = machine.run(MAX_OPERATIONS)
        _check_extent(value, machine)
        return value
    except _CAUGHT as error:
        raise DamagedFileError(
            f"the pickle is malformed at byte {machine.pos}",
            file=file,
            found=f"{type(error).__name__}: {str(error)[:200]}",
        ) from error


def _check_extent(value: object, machine: Machine) -> None:
    """Refuses what no reader could walk, hash, compare or show in bounded time: nested deeply, or
    shared again and again.

    Sizes are those of the value written out as a tree, so that a part counts once for each way to
    it; a cycle counts once.
    """
    limit = _MAX_WRITTEN_OUT + 4 * len(machine.data)
    # container -> (values written out, levels); (0, 0) while it is open
    found: dict[int, tuple[int, int]] = {}
    left, level = [(value, *_parts(value))], 0
    while left and level <= MAX_DEPTH:
        item, own, parts = left[-1]
        if id(item) not in found:
            found[id(item)], level = (0, 0), level + 1
            for part in parts:
                if id(part) not in found:
                    count, inner = _parts(part)
                    if inner:
                        left.append((part, count, inner))
                    else:
                        found[id(part)] = count, 1
            continue
        left.pop()
        if found[id(item)] == (0, 0):  # else it is here a second time
            found[id(item)] = size, depth = _extent_of(own, parts, found)
            # deep by a part that was seen elsewhere
            level = depth if depth > MAX_DEPTH else level - 1
            if size > limit:
                machine.fail(
                    "the value shares its parts too often to be written out",
                    expected=f"at most {limit} values",
                )
    if level > MAX_DEPTH:
        machine.fail("the value is nested too deeply", expected=f"at most {MAX_DEPTH} levels")


def _extent_of(own: int, parts: list[object], found: dict[int, tuple[int, int]]) -> tuple[int, int]:
    """Values written out and levels of a container, from those of its parts."""
    size, depth = own, 1
    for part in parts:
        written, levels = found[id(part)]
        size, depth = size + written, max(depth, 1 + levels)
    return size, depth


def _parts(item: object) -> tuple[int, list[object]]:
    """How many values a container holds, long texts counted as several, and which of them are
    containers."""
    if isinstance(item, Stand):
        return 3, [part for part in (item.args, item.state) if part]
    inside: Collection[object] = ()
    if isinstance(item, dict):
        inside = [*item, *item.values()]
    elif isinstance(item, _CONTAINERS):
        inside = item
    own, parts = 1 + len(inside), list[object]()
    for part in inside:
        kind = type(part)
        if kind in _HOLDERS:
            parts.append(part)
        elif kind is str or kind is bytes:
            own += len(part) // 100
    return own, parts


_CONTAINERS = (list, tuple, set, frozenset, deque)
_HOLDERS = frozenset(
    {*_CONTAINERS, dict, OrderedDict, defaultdict, Counter, Stand}
)  # all that the machine makes


def with_tensors(
    value: object,
    convert: Callable[[Any], object],
    *,
    file: str | None = None,
    max_depth: int = 100,
) -> object:
    """A copy of `value` with `convert(ref)` in the place of each TensorRef, and of each Stand of a
    tensor, inside containers and other Stands.

    Each shared object is copied once, so sharing and cycles stay as they are and `convert` sees
    each TensorRef object once. Raises DamagedFileError when the nesting is deeper than `max_depth`.
    """
    return _Copier(convert, file, max_depth).walk(value, 0)


class _Copier:
    """One copy on its way; `memo` has what was copied by the identity of its original."""

    def __init__(self, convert: Callable[[Any], object], file: str | None, max_depth: int) -> None:
        self._convert, self._file, self._max_depth = convert, file, max_depth
        self._memo: dict[int, object] = {}

    def walk(self, item: object, depth: int) -> object:
        if id(item) in self._memo:
            return self._memo[id(item)]
        if depth > self._max_depth:
            raise DamagedFileError(
                "the value is nested too deeply",
                file=self._file,
                expected=f"at most {self._max_depth} levels",
            )
        copy: object = item
        if isinstance(item, TensorRef) or (isinstance(item, Stand) and item.qualname == TENSOR):
            copy = self._convert(item)
        elif isinstance(item, tuple) and type(item) is not Size:
            copy = tuple([self.walk(part, depth + 1) for part in item])
        elif isinstance(item, dict | list | deque | Stand):
            copy = self._container(item, depth)
        self._memo[id(item)] = copy
        return copy

    def _container(self, item: object, depth: int) -> object:
        """A copy that is known before its parts, as they may hold it."""
        if isinstance(item, dict):
            made = self._memo[id(item)] = empty_like(item)
            self._fill(made, item.items(), depth)
            return made
        if isinstance(item, Stand):
            stand = self._memo[id(item)] = Stand(item.qualname, made=item.made)
            stand.args = tuple([self.walk(part, depth + 1) for part in item.args])
            self._fill(stand.state, item.state.items(), depth)  # type: ignore[arg-type]
            return stand
        parts = self._memo[id(item)] = empty_like(item)
        parts.extend(self.walk(part, depth + 1) for part in item)  # type: ignore[attr-defined]
        return parts

    def _fill(
        self, copy: dict[object, object], items: Iterable[tuple[object, object]], depth: int
    ) -> None:
        for key, item in items:
            copy[key] = self.walk(item, depth + 1)
