"""Reads the pickle inside a torch `.pt` file without running any code that it names.

Python's own unpickler, the one that is written in Python, reads the opcodes that only push plain
data. The opcodes that name, call, make or fill something are read here: a class or function of the
file becomes a `ClassName`, an inert name that Python can't call. What a call of it means is a row
of `ALLOWED_CALLS`: a tensor becomes a `TensorRef`, a plain value what `core/values` has for it, an
object of DeepSpeed an `InertObject`. A name without a row is refused, unless the caller allows or
vouches for it: then it stands as a name, or as the class of an `InertObject`. Protocols 2 to 5 are
read, of which torch.save writes 2.

Opcodes that are not in the table are refused. Pickle's registry of numbered classes (EXT1 to EXT4)
and the opcodes that run code before protocol 2 (INST, OBJ) are left out on purpose.
"""

import io
import pickle
import re
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NoReturn

from megatron_ucp.core.values import (
    SCALARS,
    TENSOR,
    ClassName,
    DtypeName,
    InertObject,
    Size,
    empty_like,
    is_name,
    shown,
)
from megatron_ucp.errors import DamagedFileError, UnsafePickleError
from megatron_ucp.formats.pt.allowed_calls import (
    ALLOWED_CALLS,
    BUILD_STATES,
    MALFORMED,
    STORAGE_DTYPES,
)
from megatron_ucp.formats.pt.refs import ITEMSIZE, StorageRef, TensorRef

MAX_PICKLE_BYTES = 256 * 2**20
MAX_OPERATIONS = 20_000_000  # of a small pickle; a large one may have one for every two bytes
MAX_INT_BYTES = 1024  # an int of more than 4300 digits can't even be shown in an error message
# levels of containers; what Python hashes, compares and shows by recursion in C stays far from its
# limit
MAX_DEPTH = 100
# values that shared ones may add up to where each is counted as often as it can be reached
_MAX_WRITTEN_OUT = 2**23
_MAX_KEY_DEPTH, _MAX_KEY_ITEMS = 8, 1000


@dataclass(frozen=True)
class AllowedClasses:
    """Classes that a pickle may name besides those of every `.pt` file: each object of them becomes
    an inert `InertObject`, and none is imported.

    `names` are whole names ("package.module.Class"). Below the package `enums_below` every class
    whose name is a class's may be an enum: a pickle may hold its members, by value
    (`Class("full")`, `Class(3)`) or by name (`getattr(Class, "full")`), and nothing else of it. So
    an enum that a library adds makes no file unreadable.
    """

    names: frozenset[str] = frozenset()
    enums_below: str = ""

    def may_be_enum(self, qualname: str) -> bool:
        """Whether a name may be an enum's: a function's begins with a small letter."""
        module, _, name = qualname.rpartition(".")
        is_below = module.startswith(f"{self.enums_below}.")
        return bool(self.enums_below) and is_below and _CLASS_NAME.fullmatch(name) is not None


NOTHING_MORE = AllowedClasses()
_CLASS_NAME = re.compile(r"_?[A-Z]\w*", re.ASCII)
_NUMBERS = (bool, int, float)
_WORD = re.compile(r"[\w.+:-]{1,64}", re.ASCII)  # a text that an enum has as a value
_STORAGE_KEY = re.compile(r"[A-Za-z0-9_-]{1,100}", re.ASCII)
MALFORMED_PICKLE = (
    pickle.UnpicklingError,
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


@dataclass
class VouchedClasses:
    """Classes and functions that are not on the closed list, and that somebody vouches for: a
    pickle may name them, and objects of them become InertObjects. Nothing is made of them.

    `known` are their names (None: any name). They may be named in parameter groups, and below the
    keys of the tree that `is_value` says have a program's own values. `members` has the name of
    each member of an enum, by (class, value). `names` are those that a pickle named.
    """

    is_value: Callable[[str], bool]
    known: frozenset[str] | None = None
    members: Mapping[tuple[str, Any], str] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)

    def take(self, qualname: str) -> bool:
        """Whether a pickle may name it; the name is noted then."""
        if self.known is not None and qualname not in self.known:
            return False
        self.names.add(qualname)
        return True


def refuse_outside(tree: object, vouched: VouchedClasses, file: str) -> None:
    """Raises UnsafePickleError for a name that is not on the closed list in any other place."""
    outside = [
        value
        for key, value in (tree.items() if isinstance(tree, dict) else [(None, tree)])
        if not (isinstance(key, str) and (key == PARAM_GROUPS or vouched.is_value(key)))
    ]
    for item in named_in(outside, without=PARAM_GROUPS):
        if item.qualname in vouched.names:
            raise not_listed(item.qualname, file)


PARAM_GROUPS = "param_groups"  # of every optimizer's state dict


def not_listed(qualname: str, file: str | None) -> UnsafePickleError:
    """A name in a pickle that nothing here knows."""
    shown = ascii(qualname[:200])
    return UnsafePickleError(
        f"the pickle asks for {shown}, which is not on the closed list",
        file=file,
        found=shown,
        expected="tensors, plain Python values and DeepSpeed's own records",
        fix=UnsafePickleError.fix + '; in Python a load with allow={"values"} leaves such a '
        "value of a scheduler, a group or the client state out",
    )


def named_in(value: object, without: str | None = None) -> Iterator[ClassName | InertObject]:
    """Every name of a class or function in a value, and every object of one; not what dictionaries
    have under the key `without`."""
    seen = set[int]()
    left = [value]
    while left:
        item = left.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, InertObject | ClassName):
            yield item
        if isinstance(item, InertObject):
            left += [*item.args, *item.state.values()]
        elif isinstance(item, Mapping):
            left += [
                *item,
                *(part for key, part in item.items() if without is None or key != without),
            ]
        elif isinstance(item, list | tuple | set | frozenset | deque):
            left += item


def loads(
    data: bytes,
    *,
    file: str,
    allow: AllowedClasses = NOTHING_MORE,
    vouched: VouchedClasses | None = None,
    max_bytes: int | None = None,
) -> object:
    """The value in the pickle `data` of `file`: a `TensorRef` for each tensor, an `InertObject` for
    each object of an allowed class.

    A pickle may have `max_bytes` (None: `MAX_PICKLE_BYTES`).

    Raises UnsafePickleError for a name that is neither in the table nor in `allow` nor `vouched`,
    DamagedFileError for a malformed pickle or an impossible tensor, and UnsupportedError for
    tensors and arrays whose bytes alone do not say their values.
    """
    most = MAX_PICKLE_BYTES if max_bytes is None else max_bytes
    if len(data) > most:
        raise DamagedFileError(
            "the pickle is larger than any that this package reads",
            file=file,
            expected=f"at most {most} bytes",
            found=f"{len(data)} bytes",
        )
    unpickler = SafeUnpickler(data, file, allow, vouched)
    try:
        value = unpickler.load()
        check_extent(value, unpickler)
        return value
    except MALFORMED_PICKLE as error:
        raise DamagedFileError(
            f"the pickle is malformed at byte {unpickler.source.tell()}",
            file=file,
            found=f"{type(error).__name__}: {str(error)[:200]}",
        ) from error


class SafeUnpickler(pickle._Unpickler):
    """Reads one pickle. Every value on its stack is plain data, a TensorRef, an InertObject or a
    ClassName."""

    stack: list[Any]
    metastack: list[list[Any]]
    append: Callable[[Any], None]
    read: Callable[[int], bytes]
    readline: Callable[[], bytes]
    pop_mark: Callable[[], list[Any]]

    def __init__(
        self,
        data: bytes,
        file: str,
        allow: AllowedClasses = NOTHING_MORE,
        vouched: VouchedClasses | None = None,
    ) -> None:
        self.source = io.BytesIO(data)
        super().__init__(self.source)
        self.file, self._allow, self._vouched = file, allow, vouched
        self.size_bytes = len(data)
        # of copies that calls make: a small pickle can ask for a large value often
        self._budget_bytes = 2**24 + 8 * len(data)
        self._names: dict[str, DtypeName | ClassName] = {}
        self._enums: set[str] = set()  # named in this pickle, and known by their package alone
        self._storages: dict[str, StorageRef] = {}

    def load(self) -> object:
        """The value. A pickle of torch takes 2.4 bytes for each opcode: one that takes fewer than 2
        for each of many millions asks for more memory than its size tells."""
        read, opcodes = self.source.read, self.OPCODES
        self.read, self.readline = read, self.source.readline
        self.metastack, self.stack = [], []
        self.append = self.stack.append
        for _ in range(max(MAX_OPERATIONS, self.size_bytes // 2)):
            code = read(1)
            if code == b".":
                break
            handler = opcodes.get(code)
            if not code:
                self.fail(f"the pickle is {'truncated' if self.size_bytes else 'malformed: empty'}")
            if handler is None:
                self.fail(f"the pickle holds opcode 0x{code.hex()}, which torch does not write")
            handler(self)
        else:
            self.fail("the pickle has more operations than any that this package reads")
        value = self.stack.pop()
        if self.stack or self.metastack or self.source.tell() != self.size_bytes:
            self.fail("the pickle goes on after its end")
        return value

    # ---- what it refuses

    def fail(self, problem: str, *, expected: object = None, found: object = None) -> NoReturn:
        """Raises DamagedFileError with the byte that was reached."""
        raise DamagedFileError(
            f"{problem} (pickle byte {self.source.tell()})",
            file=self.file,
            expected=expected,
            found=None if found is None else shown(found),
        )

    def spend(self, size_bytes: int) -> None:
        """Counts bytes that a call copies. Raises DamagedFileError for too many."""
        self._budget_bytes -= size_bytes
        if self._budget_bytes < 0:
            self.fail("the pickle builds larger values than a file of its kind holds")

    def check_keys(self, keys: Iterable[object]) -> None:
        """Refuses what hashing could recurse into, or take forever on."""
        for key in keys:
            if type(key) not in SCALARS:
                self._check_nested_key(key)

    def _check_nested_key(self, key: object) -> None:
        level, count = [key], 0
        for _ in range(_MAX_KEY_DEPTH):
            below: list[object] = []
            for item in level:
                if isinstance(item, InertObject) and item.state:
                    self.fail(f"an object of {item.qualname} is used as a dict key or set member")
                parts = item.args if isinstance(item, InertObject) else item
                if isinstance(parts, tuple | frozenset):
                    count += len(parts)
                    if count > _MAX_KEY_ITEMS:
                        self.fail("a dict key or set member is too large")
                    below.extend(parts)
                elif type(parts) not in SCALARS:
                    self.fail(f"a {type(parts).__name__} is used as a dict key or set member")
            if not below:
                return
            level = below
        self.fail("a dict key or set member is nested too deeply")

    # ---- names, and what is made of them

    def find_class(self, module: str, name: str) -> DtypeName | ClassName:
        """The inert name of a class or function. Raises UnsafePickleError for one that may not be
        named."""
        if module == "__builtin__":  # protocol 2 writes Python 2's names
            module = "builtins"
            name = {"xrange": "range", "long": "int", "unicode": "str"}.get(name, name)
        if module == "pathlib._local":  # where Python 3.13 keeps its classes
            module = "pathlib"
        qualname = f"{module}.{name}".replace("numpy.core.", "numpy._core.", 1)
        if qualname not in self._names:
            if not is_name(qualname):  # a line break in it would be code in files written of it
                raise not_listed(qualname, self.file)
            is_dtype = qualname.startswith("torch.") and qualname[6:] in ITEMSIZE
            if not is_dtype and not self._is_listed(qualname):
                if "." not in name and self._allow.may_be_enum(qualname):
                    self._enums.add(qualname)
                elif self._vouched is None or not self._vouched.take(qualname):
                    raise not_listed(qualname, self.file)
            self._names[qualname] = DtypeName(qualname) if is_dtype else ClassName(qualname)
        return self._names[qualname]

    def _is_listed(self, qualname: str) -> bool:
        return qualname in ALLOWED_CALLS or qualname in self._allow.names

    def call(self, function: object, args: object) -> object:
        """What a call means; nothing is called."""
        if not isinstance(function, ClassName) or not isinstance(args, tuple):
            self.fail("the pickle calls what is no function", found=function)
        name = function.qualname
        if name in self._enums:
            return self._enum_member(name, args)
        if name in ALLOWED_CALLS:
            build = ALLOWED_CALLS[name]
            if build is None:
                self.fail(f"the pickle makes an object of {name}, which torch does not write")
            made = build(self, name, args)
            if made is MALFORMED:
                self.fail(f"a call of {name} is malformed", found=args)
            return made
        if name in self._allow.names:
            return InertObject(name, args)
        if self._vouched is None:
            raise not_listed(name, self.file)
        has_name = len(args) == 1 and type(args[0]) in SCALARS
        member = self._vouched.members.get((name, args[0])) if has_name else None
        return (
            InertObject(name, args)
            if member is None
            else InertObject(name, (member,), made="member")
        )

    def _enum_member(self, qualname: str, args: tuple[object, ...]) -> InertObject:
        """The member of an enum that has a value. Raises UnsafePickleError for a call with
        anything that is no number, word, or tuple of such: that is another class."""
        values = args[0] if len(args) == 1 and type(args[0]) is tuple else args
        plain = [
            type(one) in _NUMBERS or type(one) is str and _WORD.fullmatch(one) for one in values
        ]
        if len(args) != 1 or not all(plain):
            raise not_listed(qualname, self.file)
        return InertObject(qualname, args)

    def _new(self, kind: object, args: object) -> object:
        """An object without a call of its class's `__init__`."""
        if isinstance(kind, ClassName) and kind.qualname in self._enums:
            raise not_listed(kind.qualname, self.file)
        if not isinstance(kind, ClassName) or self._is_listed(kind.qualname):
            return self.call(kind, args)
        if not isinstance(args, tuple):
            self.fail("the pickle makes an object of no arguments", found=args)
        return InertObject(kind.qualname, args, made="new")

    def persistent_load(self, pid: Any) -> StorageRef:
        """The storage that torch names by ("storage", class, key, location, elements)."""
        match pid:
            case ("storage", ClassName() as kind, str() as key, str(), int() as elems) if (
                kind.qualname in STORAGE_DTYPES
                and type(pid) is tuple
                and type(elems) is int
                and 0 <= elems < 2**60
                and _STORAGE_KEY.fullmatch(key)
            ):
                storage = StorageRef(key, STORAGE_DTYPES[kind.qualname], elems)
            case _:
                self.fail(
                    "a storage's id is malformed",
                    expected='("storage", class, plain name, location, number of elements)',
                    found=pid,
                )
        first = self._storages.setdefault(key, storage)
        if first != storage:
            self.fail(
                f"storage {key} is described in two ways",
                expected=first,
                found=storage,
            )
        return first

    def _target(self) -> Any:
        """The value that the next opcode fills. Raises UnsafePickleError where a member of an enum
        would get attributes or content: then it is an object of another class."""
        target = self.stack[-1]
        if self._enums and isinstance(target, InertObject) and target.qualname in self._enums:
            raise not_listed(target.qualname, self.file)
        return target

    def _extend(self, items: list[object]) -> None:
        target = self._target()
        if isinstance(target, InertObject):
            target = target.state.setdefault("__elements__", [])
        if not isinstance(target, list | deque):
            self.fail(f"the pickle appends to a {type(target).__name__}")
        target.extend(items)

    def _set_items(self, flat: list[object]) -> None:
        target = self._target()
        if isinstance(target, InertObject):
            target = target.state.setdefault("__items__", {})
        # Counter.update would count the pairs; it is pickled with its dict and gets no items
        # afterwards
        if not isinstance(target, dict) or isinstance(target, Counter) or len(flat) % 2:
            self.fail(f"the pickle sets items of a {type(target).__name__}")
        self.check_keys(flat[::2])
        target.update(zip(flat[::2], flat[1::2], strict=True))

    # ---- opcodes, each in place of Python's own

    def load_proto(self) -> None:
        """Protocols 0 and 1 have other opcodes."""
        if not 2 <= self.read(1)[0] <= 5:
            self.fail("the pickle has an unknown protocol", expected="2 to 5")

    def load_frame(self) -> None:
        """A frame only says how much to read ahead, and all bytes are there."""
        self._take(8)

    def load_long4(self) -> None:
        """A whole number by its number of bytes."""
        (size_bytes,) = struct.unpack("<i", self.read(4))
        if size_bytes > MAX_INT_BYTES:
            self.fail(f"an integer of {size_bytes} bytes", expected=f"at most {MAX_INT_BYTES}")
        self.append(int.from_bytes(self._take(size_bytes), "little", signed=True))

    def load_binunicode8(self) -> None:
        self.append(str(self._take_long(), "utf-8", "surrogatepass"))

    def load_binbytes8(self) -> None:
        self.append(self._take_long())

    def load_bytearray8(self) -> None:
        self.append(bytearray(self._take_long()))

    def _take_long(self) -> bytes:
        return self._take(struct.unpack("<Q", self.read(8))[0])

    def _take(self, size_bytes: int) -> bytes:
        """So many bytes, where there are as many: an opcode may claim any number."""
        if not 0 <= size_bytes <= self.size_bytes - self.source.tell():
            self.fail("the pickle is truncated", expected=f"{size_bytes} more bytes")
        return self.read(size_bytes)

    def load_global(self) -> None:
        """Python's own takes the end of a file for the end of a line."""
        module, name = self.readline(), self.readline()
        if not name.endswith(b"\n"):
            self.fail("the pickle is truncated", expected="a line with a name")
        self.append(self.find_class(module[:-1].decode("utf-8"), name[:-1].decode("utf-8")))

    def load_frozenset(self) -> None:
        items = self.pop_mark()
        self.check_keys(items)
        self.append(frozenset(items))

    def load_dict(self) -> None:
        flat = self.pop_mark()
        self.append({})
        self._set_items(flat)

    def load_append(self) -> None:
        self._extend([self.stack.pop()])

    def load_appends(self) -> None:
        self._extend(self.pop_mark())

    def load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set_items([key, value])

    def load_setitems(self) -> None:
        self._set_items(self.pop_mark())

    def load_additems(self) -> None:
        items, target = self.pop_mark(), self.stack[-1]
        if not isinstance(target, set):
            self.fail(f"the pickle adds members to a {type(target).__name__}")
        self.check_keys(items)
        target.update(items)

    def load_reduce(self) -> None:
        args = self.stack.pop()
        self.stack[-1] = self.call(self.stack[-1], args)

    def load_newobj(self) -> None:
        args = self.stack.pop()
        self.stack[-1] = self._new(self.stack[-1], args)

    def load_newobj_ex(self) -> None:
        keywords = self.stack.pop()
        if type(keywords) is not dict or keywords:
            self.fail("the pickle makes an object with keyword arguments")
        self.load_newobj()

    def load_build(self) -> None:
        """Sets attributes, of objects that are InertObjects alone."""
        state = self.stack.pop()
        target = self._target()
        if isinstance(target, OrderedDict) and type(state) is dict:
            # the `_metadata` of a state_dict: the versions of the modules' classes, nothing of the
            # model
            return
        if not isinstance(target, InertObject):
            self.fail(f"the pickle sets attributes of a {type(target).__name__}")
        if target.qualname in BUILD_STATES:
            if BUILD_STATES[target.qualname](self, target, state) is MALFORMED:
                self.fail(f"the state of a {target.qualname} is malformed", found=state)
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

    OPCODES: ClassVar[dict[bytes, Callable[[Any], None]]] = {
        **{
            name: pickle._Unpickler.dispatch[name[0]]
            for name in (
                *(pickle.MARK, pickle.POP, pickle.POP_MARK, pickle.DUP),
                *(pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE),
                *(pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.LONG1, pickle.BINFLOAT),
                *(pickle.SHORT_BINUNICODE, pickle.BINUNICODE),
                *(pickle.SHORT_BINBYTES, pickle.BINBYTES),
                *(pickle.EMPTY_TUPLE, pickle.EMPTY_LIST, pickle.EMPTY_DICT, pickle.EMPTY_SET),
                *(pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3, pickle.LIST),
                *(pickle.BINPUT, pickle.LONG_BINPUT, pickle.MEMOIZE),
                *(pickle.BINGET, pickle.LONG_BINGET),
                # these two ask `find_class` and `persistent_load`
                *(pickle.STACK_GLOBAL, pickle.BINPERSID),
            )
        },
        pickle.PROTO: load_proto,
        pickle.FRAME: load_frame,
        pickle.LONG4: load_long4,
        pickle.BINUNICODE8: load_binunicode8,
        pickle.BINBYTES8: load_binbytes8,
        pickle.BYTEARRAY8: load_bytearray8,
        pickle.GLOBAL: load_global,
        pickle.FROZENSET: load_frozenset,
        pickle.DICT: load_dict,
        pickle.APPEND: load_append,
        pickle.APPENDS: load_appends,
        pickle.SETITEM: load_setitem,
        pickle.SETITEMS: load_setitems,
        pickle.ADDITEMS: load_additems,
        pickle.REDUCE: load_reduce,
        pickle.NEWOBJ: load_newobj,
        pickle.NEWOBJ_EX: load_newobj_ex,
        pickle.BUILD: load_build,
    }
    """The opcodes that torch writes, by their byte; every other one is refused."""


# ---- how large a value is, and copies of it

_CONTAINERS = (list, tuple, set, frozenset, deque)
# all containers that a pickle can make
_HOLDERS = frozenset({*_CONTAINERS, dict, OrderedDict, defaultdict, Counter, InertObject})


def check_extent(value: object, unpickler: SafeUnpickler) -> None:
    """Refuses what no reader could walk, hash, compare or show in bounded time: nested deeply, or
    shared again and again.

    Sizes are those of the value written out as a tree, so that a part counts once for each way to
    it; a cycle counts once. Example: `x = [1]` has 2 values, `[x, x]` has 5 and 2 levels.
    """
    limit = _MAX_WRITTEN_OUT + 4 * unpickler.size_bytes
    # container -> (values written out, levels); (0, 0) while it is open
    extents: dict[int, tuple[int, int]] = {}

    def measured(item: object, above: int) -> tuple[int, int]:
        size, containers = _parts(item)
        levels = 0
        if containers:
            extents[id(item)] = (0, 0)
        for part in containers:
            extent = extents.get(id(part))
            if above + 1 + (1 if extent is None else extent[1]) > MAX_DEPTH:
                unpickler.fail(
                    "the value is nested too deeply", expected=f"at most {MAX_DEPTH} levels"
                )
            part_size, part_levels = extent or measured(part, above + 1)
            size, levels = size + part_size, max(levels, part_levels)
        if size > limit:
            unpickler.fail(
                "the value shares its parts too often to be written out",
                expected=f"at most {limit} values",
            )
        extents[id(item)] = size, levels + 1
        return size, levels + 1

    measured(value, 0)


def _parts(item: object) -> tuple[int, list[object]]:
    """How many values a container holds, long texts counted as several, and which of them are
    containers."""
    if isinstance(item, InertObject):
        return 3, [part for part in (item.args, item.state) if part]
    inside: Collection[object] = ()
    if isinstance(item, dict):
        inside = [*item, *item.values()]
    elif isinstance(item, _CONTAINERS):
        inside = item
    count, containers = 1 + len(inside), list[object]()
    for part in inside:
        kind = type(part)
        if kind in _HOLDERS:
            containers.append(part)
        elif kind is str or kind is bytes:
            count += len(part) // 100
    return count, containers


def with_tensors(value: object, convert: Callable[[Any], object]) -> object:
    """A copy of `value` with `convert(ref)` in the place of each TensorRef, and of each InertObject
    of a tensor, inside containers and other InertObjects.

    Each shared object is copied once, so sharing and cycles stay as they are and `convert` sees
    each TensorRef object once. Raises DamagedFileError when the nesting is too deep.
    """
    copies: dict[int, Any] = {}  # by the identity of the original

    def copied(item: Any, depth: int) -> Any:
        if id(item) in copies:
            return copies[id(item)]
        if depth > MAX_DEPTH:
            problem = "the value is nested too deeply"
            raise DamagedFileError(problem, expected=f"at most {MAX_DEPTH} levels")
        copy = item
        if isinstance(item, TensorRef) or (
            isinstance(item, InertObject) and item.qualname == TENSOR
        ):
            copy = convert(item)
        elif isinstance(item, tuple) and type(item) is not Size:
            copy = tuple([copied(part, depth + 1) for part in item])
        elif isinstance(item, InertObject):
            # a copy is noted before its parts are copied, as they may hold it
            copy = copies[id(item)] = InertObject(item.qualname, made=item.made)
            copy.args = tuple([copied(part, depth + 1) for part in item.args])
            for name, part in item.state.items():
                copy.state[name] = copied(part, depth + 1)
        elif isinstance(item, dict):
            copy = copies[id(item)] = empty_like(item)
            for key, part in item.items():
                copy[key] = copied(part, depth + 1)
        elif isinstance(item, list | deque):
            copy = copies[id(item)] = empty_like(item)
            copy.extend(copied(part, depth + 1) for part in item)
        copies[id(item)] = copy
        return copy

    return copied(value, 0)
