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

import re
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable
from typing import Any, NoReturn

from megatron_ucp.core.value_bytes import is_name
from megatron_ucp.core.values import (
    SCALARS,
    TENSOR,
    DtypeName,
    Global,
    Size,
    Stand,
    shown,
)
from megatron_ucp.errors import DamagedFileError
from megatron_ucp.formats.pt.known import KNOWN, STATES, STORAGE_DTYPES, stand
from megatron_ucp.formats.pt.opcodes import HANDLERS
from megatron_ucp.formats.pt.strangers import Strangers, not_listed
from megatron_ucp.formats.pt.values import ITEMSIZE, StorageRef, TensorRef

__all__ = [
    "ITEMSIZE",
    "MAX_OPERATIONS",
    "MAX_PICKLE_BYTES",
    "Global",
    "Machine",
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
_MAX_KEY_DEPTH, _MAX_KEY_ITEMS = 8, 1000

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
    allow: frozenset[str] = frozenset(),
    strangers: "Strangers | None" = None,
) -> object:
    """The value in the pickle `data` of `file`, with a `TensorRef` for each tensor and a `Stand`
    for each known object.

    `allow` names further globals ("package.module.Class") whose objects become `Stand`s; their code
    is not run either. With `strangers` others may stand as names, see there. Raises
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
    machine = Machine(data, file, allow, strangers)
    try:
        value = machine.run()
        _check_extent(value, machine)
        return value
    except _CAUGHT as error:
        raise DamagedFileError(
            f"the pickle is malformed at byte {machine.pos}",
            file=file,
            found=f"{type(error).__name__}: {str(error)[:200]}",
        ) from error


def _check_extent(value: object, machine: "Machine") -> None:
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
            size, depth = own, 1
            for part in parts:
                written, levels = found[id(part)]
                size, depth = size + written, max(depth, 1 + levels)
            found[id(item)] = size, depth
            # deep by a part that was seen elsewhere
            level = depth if depth > MAX_DEPTH else level - 1
            if size > limit:
                machine.fail(
                    "the value shares its parts too often to be written out",
                    expected=f"at most {limit} values",
                )
    if level > MAX_DEPTH:
        machine.fail("the value is nested too deeply", expected=f"at most {MAX_DEPTH} levels")


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
            kind = type(item)
            plain = not isinstance(item, defaultdict)
            made: dict[object, object] = kind() if plain else defaultdict(item.default_factory)
            self._memo[id(item)] = made
            self._fill(made, item.items(), depth)
            return made
        if isinstance(item, Stand):
            stand = self._memo[id(item)] = Stand(item.qualname, made=item.made)
            stand.args = tuple([self.walk(part, depth + 1) for part in item.args])
            self._fill(stand.state, item.state.items(), depth)  # type: ignore[arg-type]
            return stand
        parts: list[object] | deque[object] = []
        if isinstance(item, deque):
            parts = deque(maxlen=item.maxlen)
        self._memo[id(item)] = parts
        parts.extend(self.walk(part, depth + 1) for part in item)  # type: ignore[attr-defined]
        return parts

    def _fill(
        self, copy: dict[object, object], items: Iterable[tuple[object, object]], depth: int
    ) -> None:
        for key, item in items:
            copy[key] = self.walk(item, depth + 1)


class Machine:
    """One run over one pickle: the opcodes. Every value on the stack is plain data, a TensorRef,
    Stand or Global."""

    def __init__(
        self, data: bytes, file: str, allow: frozenset[str], strangers: "Strangers | None" = None
    ) -> None:
        self.strangers = strangers
        self.data, self.file, self.allow, self.pos = data, file, allow, 0
        self.stack: list[object] = []
        self.below: list[list[object]] = []  # the stacks under the open marks
        self.memo: dict[int, object] = {}
        self.globals: dict[str, object] = {}
        self.storages: dict[str, StorageRef] = {}
        self.budget_bytes = 2**24 + 8 * len(
            data
        )  # what calls may copy: a small pickle can ask for a large value often

    def run(self) -> object:
        data, handlers = self.data, HANDLERS
        for _ in range(MAX_OPERATIONS):
            code = data[self.pos]
            self.pos += 1
            if code == 0x2E:  # STOP
                break
            handler = handlers.get(code)
            if handler is None:
                self.fail(f"the pickle holds opcode 0x{code:02x}, which torch does not write")
            handler(self)
        else:
            self.fail("the pickle has more operations than any that this package reads")
        value = self.stack.pop()
        if self.stack or self.below or self.pos != len(data):
            self.fail("the pickle goes on after its end")
        return value

    def fail(self, problem: str, *, expected: object = None, found: object = None) -> NoReturn:
        raise DamagedFileError(
            f"{problem} (pickle byte {self.pos})",
            file=self.file,
            expected=expected,
            found=None if found is None else shown(found),
        )

    def spend(self, size_bytes: int) -> None:
        self.budget_bytes -= size_bytes
        if self.budget_bytes < 0:
            self.fail("the pickle builds larger values than a file of its kind holds")

    def take(self, size_bytes: int) -> bytes:
        end = self.pos + size_bytes
        if not self.pos <= end <= len(self.data):
            self.fail("the pickle is truncated", expected=f"{size_bytes} more bytes")
        chunk, self.pos = self.data[self.pos : end], end
        return chunk

    def line(self) -> str:
        end = self.data.index(b"\n", self.pos)
        text, self.pos = self.data[self.pos : end].decode("utf-8"), end + 1
        return text

    def unmark(self) -> list[object]:
        items, self.stack = self.stack, self.below.pop()
        return items

    def check_keys(self, keys: Iterable[object]) -> None:
        """Refuses what hashing could recurse into, or take forever on."""
        for key in keys:
            if type(key) not in SCALARS:
                self._check_nested_key(key)

    def _check_nested_key(self, key: object) -> None:
        level, seen = [key], 0
        for _ in range(_MAX_KEY_DEPTH):
            below: list[object] = []
            for item in level:
                if isinstance(item, Stand) and item.state:
                    self.fail(f"an object of {item.qualname} is used as a dict key or set member")
                parts = item.args if isinstance(item, Stand) else item
                if isinstance(parts, tuple | frozenset):
                    seen += len(parts)
                    if seen > _MAX_KEY_ITEMS:
                        self.fail("a dict key or set member is too large")
                    below.extend(parts)
                elif type(parts) not in SCALARS:
                    self.fail(f"a {type(parts).__name__} is used as a dict key or set member")
            if not below:
                return
            level = below
        self.fail("a dict key or set member is nested too deeply")

    def find(self, module: str, name: str) -> None:
        """Pushes the stand-in of a global, or refuses it."""
        if module == "__builtin__":  # protocol 2 writes Python 2's names
            module, name = (
                "builtins",
                {"xrange": "range", "long": "int", "unicode": "str"}.get(name, name),
            )
        qualname = f"{module}.{name}".replace("numpy.core.", "numpy._core.", 1)
        if qualname not in self.globals:
            if not is_name(qualname):  # a line break in it would be code in files written of it
                raise not_listed(qualname, self.file)
            if qualname.startswith("torch.") and qualname[6:] in ITEMSIZE:
                self.globals[qualname] = DtypeName(qualname)
            else:
                if self._is_strange(qualname):
                    if self.strangers is None or not self.strangers.take(qualname):
                        raise not_listed(qualname, self.file)
                self.globals[qualname] = Global(qualname)
        self.stack.append(self.globals[qualname])

    def _is_strange(self, qualname: str) -> bool:
        return qualname not in KNOWN and qualname not in self.allow

    def call(self, func: object, args: object) -> object:
        if not isinstance(func, Global) or not isinstance(args, tuple):
            self.fail("the pickle calls what is no function", found=func)
        if self._is_strange(func.qualname):
            return self._member(func.qualname, args)
        build = KNOWN.get(func.qualname, stand)
        if build is None:
            self.fail(f"the pickle makes an object of {func.qualname}, which torch does not write")
        return build(self, func.qualname, args)

    def _member(self, qualname: str, args: tuple[object, ...]) -> Stand:
        """A call of a name that somebody vouches for, as what it is: nothing is called. It may be
        the member of an enum by its value."""
        if self.strangers is None:
            raise not_listed(qualname, self.file)
        plain = len(args) == 1 and type(args[0]) in SCALARS
        name = self.strangers.members.get((qualname, args[0])) if plain else None
        return Stand(qualname, args) if name is None else Stand(qualname, (name,), made="member")

    def new(self, kind: object, args: object) -> object:
        """An object without a call of its class's `__init__`."""
        if not isinstance(kind, Global) or not self._is_strange(kind.qualname):
            return self.call(kind, args)
        if not isinstance(args, tuple):
            self.fail("the pickle makes an object of no arguments", found=args)
        return Stand(kind.qualname, args, made="new")

    def build(self) -> None:
        state, target = self.stack.pop(), self.stack[-1]
        if isinstance(target, OrderedDict) and type(state) is dict:
            # the `_metadata` of a state_dict: the versions of the modules' classes, nothing of the
            # model
            return
        if not isinstance(target, Stand):
            self.fail(f"the pickle sets attributes of a {type(target).__name__}")
        special = STATES.get(target.qualname)
        if special is not None:
            special(self, target, state)
            return
        parts = state if isinstance(state, tuple) and len(state) == 2 else (state,)
        if not all(part is None or isinstance(part, dict) for part in parts):
            target.state["__state__"] = state
            return
        for part in parts:
            for name, value in part.items() if isinstance(part, dict) else ():
                if not isinstance(name, str):
                    self.fail("an attribute's name is no string", found=name)
                target.state[name] = value

    def persistent_load(self) -> None:
        pid = self.stack.pop()
        if not isinstance(pid, tuple) or len(pid) != 5 or pid[0] != "storage":
            self.fail(
                "a storage's id is malformed",
                expected="('storage', class, key, location, elements)",
                found=pid,
            )
        _, kind, key, location, elems = pid
        dtype = STORAGE_DTYPES.get(kind.qualname) if isinstance(kind, Global) else None
        if (
            dtype is None
            or not isinstance(location, str)
            or type(elems) is not int
            or not 0 <= elems < 2**60
            or not isinstance(key, str)
            or not re.fullmatch(r"[A-Za-z0-9_-]{1,100}", key, re.ASCII)
        ):
            self.fail(
                "a storage's id is malformed",
                expected="class, plain name, location, number of elements",
                found=pid[1:],
            )
        storage = StorageRef(key, dtype, elems)
        if self.storages.setdefault(key, storage) != storage:
            self.fail(
                f"storage {key} is described in two ways",
                expected=self.storages[key],
                found=storage,
            )
        self.stack.append(self.storages[key])

    def append(self, items: list[object]) -> None:
        target = self.stack[-1]
        if isinstance(target, Stand):
            target = target.state.setdefault("__elements__", [])
        if not isinstance(target, list | deque):
            self.fail(f"the pickle appends to a {type(target).__name__}")
        target.extend(items)

    def set_items(self, flat: list[object]) -> None:
        target = self.stack[-1]
        if isinstance(target, Stand):
            target = target.state.setdefault("__items__", {})
        # Counter.update would count the pairs; it is pickled with its dict and gets no items
        # afterwards
        if not isinstance(target, dict) or isinstance(target, Counter) or len(flat) % 2:
            self.fail(f"the pickle sets items of a {type(target).__name__}")
        self.check_keys(flat[::2])
        target.update(zip(flat[::2], flat[1::2], strict=True))

    def add_items(self) -> None:
        items = self.unmark()
        target = self.stack[-1]
        if not isinstance(target, set):
            self.fail(f"the pickle adds members to a {type(target).__name__}")
        self.check_keys(items)
        target.update(items)
