"""The machine that runs a pickle: its stack, its memo, and what it refuses whatever the opcode.
What it knows, opcodes, functions and classes, comes to it in tables."""

import re
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NoReturn

from megatron_ucp.core.value_bytes import is_name
from megatron_ucp.core.values import SCALARS, DtypeName, Global, Stand, shown
from megatron_ucp.errors import DamagedFileError
from megatron_ucp.formats.pt.strangers import Strangers, not_listed
from megatron_ucp.formats.pt.values import ITEMSIZE, StorageRef

_MAX_KEY_DEPTH, _MAX_KEY_ITEMS = 8, 1000


@dataclass(frozen=True)
class AllowedClasses:
    """Classes that a pickle may name besides those of every `.pt` file: each object of them becomes
    an inert `Stand`, and none is imported.

    `names` are whole names ("package.module.Class"). Below the package `enums_below` every class
    whose name is a class's may be an enum: a pickle may hold its members, by value
    (`Class("full")`, `Class(3)`) or by name (`getattr(Class, "full")`), and nothing else of it. So
    an enum that a library adds makes no file unreadable.
    """

    names: frozenset[str] = frozenset()
    enums_below: str = ""

    def may_be_enum(self, module: str, name: str) -> bool:
        """Whether a name may be an enum's: a function's begins with a small letter, an attribute's
        has a dot."""
        is_below = module.startswith(f"{self.enums_below}.")
        return bool(self.enums_below) and is_below and _CLASS_NAME.fullmatch(name) is not None


_CLASS_NAME = re.compile(r"_?[A-Z]\w*", re.ASCII)
_NUMBERS = (bool, int, float)
_WORD = re.compile(r"[\w.+:-]{1,64}", re.ASCII)  # a text that an enum has as a value


@dataclass(frozen=True)
class Tables:
    """What a machine knows: opcodes (`opcodes`), the functions and classes that may be named with
    what calling one makes, what BUILD means for some, and the dtypes of storages (`known`)."""

    handlers: Mapping[int, Callable[["Machine"], None]]
    known: Mapping[str, Callable[["Machine", str, tuple[object, ...]], object] | None]
    states: Mapping[str, Callable[["Machine", Stand, object], None]]
    storages: Mapping[str, str]


class Machine:
    """One run over one pickle. Every value on the stack is plain data, a TensorRef, Stand or
    Global. `tables` say what it knows."""

    def __init__(
        self,
        data: bytes,
        file: str,
        tables: "Tables",
        allow: AllowedClasses,
        strangers: Strangers | None = None,
    ) -> None:
        self.tables, self.strangers = tables, strangers
        self.enums: set[str] = set()  # named in this pickle, and known by their package alone
        self.data, self.file, self.allow, self.pos = data, file, allow, 0
        self.stack: list[object] = []
        self.below: list[list[object]] = []  # the stacks under the open marks
        self.memo: dict[int, object] = {}
        self.globals: dict[str, object] = {}
        self.storages: dict[str, StorageRef] = {}
        self.budget_bytes = 2**24 + 8 * len(
            data
        )  # what calls may copy: a small pickle can ask for a large value often

    def run(self, most: int) -> object:
        """The value, after at most so many operations."""
        data, handlers = self.data, self.tables.handlers
        for _ in range(most):
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
                    if self.allow.may_be_enum(module, name):
                        self.enums.add(qualname)
                    elif self.strangers is None or not self.strangers.take(qualname):
                        raise not_listed(qualname, self.file)
                self.globals[qualname] = Global(qualname)
        self.stack.append(self.globals[qualname])

    def _is_strange(self, qualname: str) -> bool:
        return qualname not in self.tables.known and qualname not in self.allow.names

    def call(self, func: object, args: object) -> object:
        if not isinstance(func, Global) or not isinstance(args, tuple):
            self.fail("the pickle calls what is no function", found=func)
        if func.qualname in self.enums:
            return self._enum_member(func.qualname, args)
        if self._is_strange(func.qualname):
            return self._member(func.qualname, args)
        if func.qualname not in self.tables.known:  # allowed, and known to nobody here
            return Stand(func.qualname, args)
        build = self.tables.known[func.qualname]
        if build is None:
            self.fail(f"the pickle makes an object of {func.qualname}, which torch does not write")
        return build(self, func.qualname, args)

    def _enum_member(self, qualname: str, args: tuple[object, ...]) -> Stand:
        """The member of an enum that has a value. Raises UnsafePickleError for a call with
        anything that is no number, word, or tuple of such: that is another class."""
        values = args[0] if len(args) == 1 and type(args[0]) is tuple else args
        plain = [
            type(one) in _NUMBERS or type(one) is str and _WORD.fullmatch(one) for one in values
        ]
        if len(args) != 1 or not all(plain):
            raise not_listed(qualname, self.file)
        return Stand(qualname, args)

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
        if isinstance(kind, Global) and kind.qualname in self.enums:
            raise not_listed(kind.qualname, self.file)
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
        self._refuse_state_of_enum(target)
        special = self.tables.states.get(target.qualname)
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

    def _refuse_state_of_enum(self, target: object) -> None:
        """Raises UnsafePickleError where a member of an enum gets attributes or content: then it is
        an object of another class."""
        if self.enums and isinstance(target, Stand) and target.qualname in self.enums:
            raise not_listed(target.qualname, self.file)

    def persistent_load(self) -> None:
        pid = self.stack.pop()
        if not isinstance(pid, tuple) or len(pid) != 5 or pid[0] != "storage":
            self.fail(
                "a storage's id is malformed",
                expected="('storage', class, key, location, elements)",
                found=pid,
            )
        _, kind, key, location, elems = pid
        dtype = self.tables.storages.get(kind.qualname) if isinstance(kind, Global) else None
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
        self._refuse_state_of_enum(target)
        if isinstance(target, Stand):
            target = target.state.setdefault("__elements__", [])
        if not isinstance(target, list | deque):
            self.fail(f"the pickle appends to a {type(target).__name__}")
        target.extend(items)

    def set_items(self, flat: list[object]) -> None:
        target = self.stack[-1]
        self._refuse_state_of_enum(target)
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
