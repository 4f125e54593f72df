"""Reads the pickle inside a torch `.pt` file without running any code that it names.

The pickle machine is our own, as Python's cannot be made safe: `pickle.Unpickler` sets attributes on whatever a file
names (BUILD), hashes nested tuples until the C stack overflows, and allocates as much as an opcode claims. Here a
class or function of the file is a `Global`, an inert name that Python can't call. What a call of it means is a row of
the closed list `_KNOWN`: a tensor becomes a `TensorRef`, a DeepSpeed or numpy object a `Stand`, all else is refused.
Protocols 2 to 5 are read, of which torch.save writes 2.
"""

import datetime
import pathlib
import re
import reprlib
import struct
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import prod
from typing import NoReturn

from megatron_ucp.errors import DamagedFileError, UnsafePickleError, UnsupportedError

MAX_PICKLE_BYTES = 256 * 2**20
MAX_OPERATIONS = 20_000_000
_MAX_INT_BYTES = 1024  # an int of more than 4300 digits can't even be shown in an error message
_MAX_DIMS = 64
_MAX_KEY_DEPTH, _MAX_KEY_ITEMS = 8, 1000

ITEMSIZE: dict[str, int] = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "int16": 2, "int8": 1,
    "uint64": 8, "uint32": 4, "uint16": 2, "uint8": 1, "bool": 1, "complex64": 8, "complex128": 16,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1,
}  # bytes of one element
_STORAGES = {"Float": "float32", "BFloat16": "bfloat16", "Half": "float16", "Double": "float64", "Long": "int64",
             "Int": "int32", "Short": "int16", "Char": "int8", "Byte": "uint8", "Bool": "bool",
             "ComplexFloat": "complex64", "ComplexDouble": "complex128", "Untyped": "uint8"}


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
    """A tensor as a view of a storage; offset and strides in elements. Its last element lies inside the storage."""

    storage: StorageRef
    offset_elems: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements lie in C order without gaps, as torch defines it (dims of size 1 do not count)."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and stride != expected:
                return self.numel == 0
            expected *= size
        return True


def _shown(value: object) -> str:
    return reprlib.repr(value) if type(value) in _SCALARS else type(value).__name__


class Stand:
    """Stands for an object of a known foreign class: the class's name, the arguments and the attributes, no behaviour.

    numpy arrays and scalars have the attributes `dtype` (such as "<f4"), `shape`, `fortran_order` and `data` (bytes).
    Of an `allow`ed subclass of list or dict, the content is under `__elements__` or `__items__`.
    """

    __slots__ = ("qualname", "args", "state")

    def __init__(self, qualname: str, args: tuple[object, ...] = (), state: dict[str, object] | None = None) -> None:
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

    def __repr__(self) -> str:  # one level only: a hostile value shares its parts so often that a full text never ends
        args = ", ".join(_shown(item) for item in self.args[:6])
        state = ", ".join(f"{name}={_shown(item)}" for name, item in list(self.state.items())[:12])
        return f"Stand({self.qualname!r}, ({args}), {state})"


class Global:
    """A class or function that a pickle names, as a value: only its name."""

    __slots__ = ("qualname",)

    def __init__(self, qualname: str) -> None:
        self.qualname = qualname

    def __repr__(self) -> str:
        return f"Global({self.qualname!r})"


_SCALARS = frozenset({type(None), bool, int, float, complex, str, bytes, Global, datetime.date, datetime.datetime,
                      datetime.time, datetime.timedelta, datetime.timezone})
_CAUGHT = (EOFError, IndexError, KeyError, TypeError, ValueError, AttributeError, MemoryError, RecursionError,
           OverflowError, struct.error)  # UnicodeDecodeError is a ValueError


def loads(data: bytes, *, file: str, allow: frozenset[str] = frozenset()) -> object:
    """The value in the pickle `data` of `file`, with a `TensorRef` for each tensor and a `Stand` for each known object.

    `allow` names further globals ("package.module.Class") whose objects become `Stand`s; their code is not run either.
    Raises UnsafePickleError for any other global, DamagedFileError for a malformed pickle or an impossible tensor, and
    UnsupportedError for tensors and arrays whose bytes alone do not say their values.
    """
    if len(data) > MAX_PICKLE_BYTES:
        raise DamagedFileError("the pickle is larger than any that this package reads", file=file,
                               expected=f"at most {MAX_PICKLE_BYTES} bytes", found=f"{len(data)} bytes")
    machine = _Machine(data, file, allow)
    try:
        return machine.run()
    except _CAUGHT as error:
        raise DamagedFileError(f"the pickle is malformed at byte {machine.pos}", file=file,
                               found=f"{type(error).__name__}: {str(error)[:200]}") from error


def resolve(value: object, convert: Callable[[TensorRef], object], *, file: str | None = None,
            max_depth: int = 100) -> object:
    """A copy of `value` with `convert(ref)` in the place of each TensorRef, inside dicts, lists, tuples and Stands.

    Each shared object is copied once, so sharing and cycles stay as they are and `convert` sees each TensorRef object
    once. Raises DamagedFileError when the nesting is deeper than `max_depth`.
    """
    memo: dict[int, object] = {}

    def fill(copy: dict[object, object], items: Iterable[tuple[object, object]], depth: int) -> None:
        for key, item in items:
            copy[key] = walk(item, depth)

    def walk(item: object, depth: int) -> object:
        if id(item) in memo:
            return memo[id(item)]
        if depth > max_depth:
            raise DamagedFileError("the value is nested too deeply", file=file, expected=f"at most {max_depth} levels")
        copy: object = item
        if isinstance(item, TensorRef):
            copy = convert(item)
        elif isinstance(item, tuple):
            copy = tuple([walk(part, depth + 1) for part in item])
        elif isinstance(item, dict):
            kind = type(item)
            copy = memo[id(item)] = defaultdict(item.default_factory) if isinstance(item, defaultdict) else kind()
            fill(copy, item.items(), depth + 1)
        elif isinstance(item, list):
            copy = memo[id(item)] = []  # before its parts, as they may hold the list itself
            copy.extend(walk(part, depth + 1) for part in item)
        elif isinstance(item, Stand):
            copy = memo[id(item)] = Stand(item.qualname)
            copy.args = tuple([walk(part, depth + 1) for part in item.args])
            fill(copy.state, item.state.items(), depth + 1)  # type: ignore[arg-type]
        memo[id(item)] = copy
        return copy

    return walk(value, 0)


class _Machine:
    """One run over one pickle: the opcodes. Every value on the stack is plain data, a TensorRef, Stand or Global."""

    def __init__(self, data: bytes, file: str, allow: frozenset[str]) -> None:
        self.data, self.file, self.allow, self.pos = data, file, allow, 0
        self.stack: list[object] = []
        self.below: list[list[object]] = []  # the stacks under the open marks
        self.memo: dict[int, object] = {}
        self.globals: dict[str, object] = {}
        self.storages: dict[str, StorageRef] = {}
        self.budget_bytes = 2**24 + 8 * len(data)  # what calls may copy: a small pickle can ask for a large value often

    def run(self) -> object:
        data, handlers = self.data, _HANDLERS
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
        raise DamagedFileError(f"{problem} (pickle byte {self.pos})", file=self.file, expected=expected,
                               found=None if found is None else reprlib.repr(found))

    def spend(self, size_bytes: int) -> None:
        self.budget_bytes -= size_bytes
        if self.budget_bytes < 0:
            self.fail("the pickle builds larger values than a file of its kind holds")

    def take(self, size_bytes: int) -> bytes:
        end = self.pos + size_bytes
        if not self.pos <= end <= len(self.data):
            self.fail("the pickle is truncated", expected=f"{size_bytes} more bytes")
        chunk, self.pos = self.data[self.pos:end], end
        return chunk

    def line(self) -> str:
        end = self.data.index(b"\n", self.pos)
        text, self.pos = self.data[self.pos:end].decode("utf-8"), end + 1
        return text

    def unmark(self) -> list[object]:
        items, self.stack = self.stack, self.below.pop()
        return items

    def check_keys(self, keys: Iterable[object]) -> None:
        """Refuses what hashing could recurse into, or take forever on."""
        for key in keys:
            if type(key) not in _SCALARS:
                self._check_nested_key(key)

    def _check_nested_key(self, key: object) -> None:
        level, seen = [key], 0
        for _ in range(_MAX_KEY_DEPTH):
            below: list[object] = []
            for item in level:
                if isinstance(item, Stand) and item.state and item.qualname != "numpy.scalar":
                    self.fail(f"an object of {item.qualname} is used as a dict key or set member")
                parts = item.args if isinstance(item, Stand) else item
                if isinstance(parts, tuple | frozenset):
                    seen += len(parts)
                    if seen > _MAX_KEY_ITEMS:
                        self.fail("a dict key or set member is too large")
                    below.extend(parts)
                elif type(parts) not in _SCALARS:
                    self.fail(f"a {type(parts).__name__} is used as a dict key or set member")
            if not below:
                return
            level = below
        self.fail("a dict key or set member is nested too deeply")

    def find(self, module: str, name: str) -> None:
        """Pushes the stand-in of a global, or refuses it."""
        if module == "__builtin__":  # protocol 2 writes Python 2's names
            module, name = "builtins", {"xrange": "range", "long": "int", "unicode": "str"}.get(name, name)
        qualname = f"{module}.{name}".replace("numpy.core.", "numpy._core.", 1)
        if qualname not in self.globals:
            if qualname.startswith("torch.") and qualname[6:] in ITEMSIZE:
                self.globals[qualname] = qualname  # a torch.dtype
            elif qualname in _KNOWN or qualname in self.allow:
                self.globals[qualname] = Global(qualname)
            else:
                shown = ascii(qualname[:200])
                raise UnsafePickleError(
                    f"the pickle asks for {shown}, which is not on the closed list", file=self.file, found=shown,
                    expected="tensors, plain Python values and DeepSpeed's own records",
                    fix=UnsafePickleError.fix + f"; or allow {shown} by name, which reads it as an inert stand-in")
        self.stack.append(self.globals[qualname])

    def call(self, func: object, args: object) -> object:
        if not isinstance(func, Global) or not isinstance(args, tuple):
            self.fail("the pickle calls what is no function", found=func)
        build = _KNOWN.get(func.qualname, _stand)
        if build is None:
            self.fail(f"the pickle makes an object of {func.qualname}, which torch does not write")
        return build(self, func.qualname, args)

    def build(self) -> None:
        state, target = self.stack.pop(), self.stack[-1]
        if isinstance(target, OrderedDict) and type(state) is dict:
            return  # the `_metadata` of a state_dict: the versions of the modules' classes, nothing of the model
        if not isinstance(target, Stand):
            self.fail(f"the pickle sets attributes of a {type(target).__name__}")
        special = _NUMPY_STATES.get(target.qualname)
        if special is not None:
            special(self, target, state)
            return
        parts = state if isinstance(state, tuple) and len(state) == 2 else (state,)
        if not all(part is None or isinstance(part, dict) for part in parts):
            target.state["__state__"] = state
            return
        for part in parts:
            for name, value in (part.items() if isinstance(part, dict) else ()):
                if not isinstance(name, str):
                    self.fail("an attribute's name is no string", found=name)
                target.state[name] = value

    def persistent_load(self) -> None:
        pid = self.stack.pop()
        if not isinstance(pid, tuple) or len(pid) != 5 or pid[0] != "storage":
            self.fail("a storage's id is malformed", expected="('storage', class, key, location, elements)", found=pid)
        _, kind, key, location, elems = pid
        dtype = _STORAGE_DTYPES.get(kind.qualname) if isinstance(kind, Global) else None
        if (dtype is None or not isinstance(location, str) or type(elems) is not int or not 0 <= elems < 2**60
                or not isinstance(key, str) or not re.fullmatch(r"[A-Za-z0-9_-]{1,100}", key, re.ASCII)):
            self.fail("a storage's id is malformed", expected="class, plain name, location, number of elements",
                      found=pid[1:])
        storage = StorageRef(key, dtype, elems)
        if self.storages.setdefault(key, storage) != storage:
            self.fail(f"storage {key} is described in two ways", expected=self.storages[key], found=storage)
        self.stack.append(self.storages[key])

    def append(self, items: list[object]) -> None:
        target = self.stack[-1]
        if isinstance(target, Stand):
            target = target.state.setdefault("__elements__", [])
        if not isinstance(target, list):
            self.fail(f"the pickle appends to a {type(target).__name__}")
        target.extend(items)

    def set_items(self, flat: list[object]) -> None:
        target = self.stack[-1]
        if isinstance(target, Stand):
            target = target.state.setdefault("__items__", {})
        if not isinstance(target, dict) or len(flat) % 2:
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


# ---- what calling a known global means: functions of (machine, name, args) ----

_Build = Callable[[_Machine, str, tuple[object, ...]], object]


def _stand(machine: _Machine, name: str, args: tuple[object, ...]) -> object:
    return Stand(name, args)


def _fragment(machine: _Machine, name: str, args: tuple[object, ...]) -> object:
    if len(args) not in (0, 2):
        machine.fail(f"{name} is malformed", expected="numel and start", found=args)
    return Stand(name, (), dict(zip(("numel", "start"), args, strict=False)))


def _counts(machine: _Machine, value: object, what: str) -> tuple[int, ...]:
    """`value` as a tuple of sizes or strides."""
    if isinstance(value, tuple | list) and len(value) <= _MAX_DIMS:
        sizes = tuple([item for item in value if type(item) is int and 0 <= item < 2**63])
        if len(sizes) == len(value):
            return sizes
    machine.fail(f"a {what} is malformed", expected=f"at most {_MAX_DIMS} numbers of at least 0", found=value)


def _size(machine: _Machine, name: str, args: tuple[object, ...]) -> object:
    return _counts(machine, args[0] if len(args) == 1 else args, "torch.Size")


def _view(machine: _Machine, storage: object, offset: object, size: object, stride: object) -> TensorRef:
    shape, steps = _counts(machine, size, "tensor's shape"), _counts(machine, stride, "tensor's stride")
    if not isinstance(storage, StorageRef) or type(offset) is not int or offset < 0 or len(shape) != len(steps):
        machine.fail("a tensor is malformed", expected="a storage, an offset, a shape and a stride of equal length",
                     found=(storage, offset, size, stride))
    if 0 not in shape:
        last = offset + sum((size - 1) * step for size, step in zip(shape, steps, strict=True))
        if last >= storage.elems:
            machine.fail("a tensor reaches past its storage", expected=f"at most {storage.elems} elements",
                         found=f"element {last} of storage {storage.key}")
    return TensorRef(storage, offset, shape, steps)


def _tensor(machine: _Machine, name: str, args: tuple[object, ...]) -> object:
    """_rebuild_tensor(storage, offset, size, stride) and v2 (.., requires_grad, hooks[, metadata])."""
    if len(args) not in ((4,) if name.endswith("_tensor") else (6, 7)):
        machine.fail("a tensor is malformed", found=args)
    _check_metadata(machine, args[6:])
    return _view(machine, *args[:4])


def _tensor_v3(machine: _Machine, name: str, args: tuple[object, ...]) -> object:
    """v3: (untyped storage, offset, size, stride, requires_grad, hooks, dtype[, metadata]), for unsigned and 8-bit."""
    if len(args) not in (7, 8) or not isinstance(args[0], StorageRef) or not isinstance(args[6], str):
        machine.fail("a tensor is malformed", found=args)
    _check_metadata(machine, args[7:])
    storage, dtype = args[0], args[6].removeprefix("torch.")
    if dtype not in ITEMSIZE or storage.size_bytes % ITEMSIZE[dtype]:
        machine.fail("a tensor is malformed", expected="a dtype whose size divides the storage", found=args[6])
    return _view(machine, StorageRef(storage.key, dtype, storage.size_bytes // ITEMSIZE[dtype]), *args[1:4])


def _check_metadata(machine: _Machine, rest: tuple[object, ...]) -> None:
    if rest and rest[0] and (not isinstance(rest[0], dict) or any(rest[0].values())):
        raise UnsupportedError("a tensor is a lazy conjugate or negative: its stored bytes are not its values",
                               file=machine.file, fix="save it again after resolve_conj() and resolve_neg()")


def _parameter(machine: _Machine, name: str, args: tuple[object, ...]) -> object:
    if len(args) not in (3, 4) or not isinstance(args[0], TensorRef):
        machine.fail("a parameter is malformed", found=args)
    return args[0]


def _from_type(machine: _Machine, name: str, args: tuple[object, ...]) -> object:
    """A tensor that carries Python attributes (ZeRO-3 flats): (function, class, its arguments, attributes)."""
    if len(args) != 4 or not all(isinstance(item, Global) for item in args[:2]):
        machine.fail("a tensor is malformed", found=args)
    func, kind, inner, state = args
    if kind.qualname not in _TENSOR_CLASSES or not isinstance(state, dict | tuple | None):  # type: ignore[union-attr]
        machine.fail("a tensor's class or attributes are malformed", found=(kind, state))
    tensor = machine.call(func, inner)
    if not isinstance(tensor, TensorRef):
        machine.fail("a tensor is malformed", found=func)
    return tensor


def _zero_stage(machine: _Machine, name: str, args: tuple[object, ...]) -> object:
    if len(args) != 1 or type(args[0]) is not int or not 0 <= args[0] <= 3:
        machine.fail("a ZeRO stage is malformed", expected="0 to 3", found=args)
    return args[0]


def _enum_member(machine: _Machine, name: str, args: tuple[object, ...]) -> object:
    """`getattr(class, "member")`: how Python 3.11 pickles the members of an Enum. No attribute is looked up."""
    if len(args) != 2 or not isinstance(args[0], Global) or not isinstance(args[1], str):
        machine.fail("an enum member is malformed", found=args)
    kind, member = args[0].qualname, args[1]
    if _KNOWN.get(kind, _stand) is _zero_stage:
        stages = {"disabled": 0, "optimizer_states": 1, "gradients": 2, "weights": 3, "max_stage": 3}
        return stages[member]
    if _KNOWN.get(kind, _stand) is not _stand:
        raise UnsafePickleError(f"the pickle asks for an attribute of {kind}", file=machine.file, found=member)
    return Stand(kind, (member,))


def _ordered_dict(machine: _Machine, name: str, args: tuple[object, ...]) -> object:
    if args:
        machine.fail(f"{name} is malformed", expected="no arguments", found=args)
    return OrderedDict()


def _default_dict(machine: _Machine, name: str, args: tuple[object, ...]) -> object:
    kinds = {"builtins.list": list, "builtins.dict": dict, "builtins.int": int, "builtins.float": float,
             "builtins.set": set}
    factory = args[0] if args else None
    if len(args) > 1 or not (factory is None or isinstance(factory, Global) and factory.qualname in kinds):
        machine.fail("a defaultdict's factory is none of the known ones", expected=", ".join(kinds), found=args)
    return defaultdict(kinds[factory.qualname] if isinstance(factory, Global) else None)


def _builtin(machine: _Machine, name: str, args: tuple[object, ...]) -> object:
    """Plain values that have no opcode of their own in some protocol."""
    if name in ("builtins.set", "builtins.frozenset") and len(args) == 1 and isinstance(args[0], list):
        machine.check_keys(args[0])
        machine.spend(32 * len(args[0]))
        return (set if name == "builtins.set" else frozenset)(args[0])
    if name in ("builtins.bytearray", "builtins.bytes"):
        return (bytearray if name == "builtins.bytearray" else bytes)(_raw(machine, args))
    if name == "builtins.complex" and [type(item) for item in args] == [float, float]:
        return complex(*args)  # type: ignore[arg-type]
    if name in ("builtins.range", "builtins.slice") and len(args) == 3:
        if all(item is None or type(item) is int and abs(item) < 2**63 for item in args):
            return (range if name == "builtins.range" else slice)(*args)  # type: ignore[arg-type]
    machine.fail(f"{name} is malformed", found=args)


def _raw(machine: _Machine, args: tuple[object, ...]) -> bytes:
    """Bytes, or the text that Python 2's protocol writes for them with the name of its encoding."""
    if len(args) == 2 and isinstance(args[0], str) and args[1] in ("latin1", "latin-1"):
        machine.spend(len(args[0]))
        return args[0].encode("latin-1")
    if len(args) == 1 and isinstance(args[0], bytes | bytearray):
        machine.spend(len(args[0]))
        return bytes(args[0])
    if args:
        machine.fail("bytes are malformed", found=args)
    return b""


def _encode(machine: _Machine, name: str, args: tuple[object, ...]) -> object:
    return _raw(machine, args)


def _text(machine: _Machine, name: str, args: tuple[object, ...]) -> object:
    """Paths, devices and versions, as plain text."""
    if name == "torch.device" and len(args) == 2 and type(args[1]) is int:
        args = (args[0], str(args[1]))
    parts = [part for part in args if isinstance(part, str)]
    machine.spend(sum(map(len, parts)))
    if len(parts) != len(args) or not (parts or name.startswith("pathlib")):
        machine.fail(f"{name} is malformed", found=args)
    if name.startswith("pathlib."):
        windows = "Windows" in name
        return str((pathlib.PureWindowsPath if windows else pathlib.PurePosixPath)(*parts))
    return ":".join(parts)


def _time(machine: _Machine, name: str, args: tuple[object, ...]) -> object:
    """The real class: its constructors do nothing but check numbers."""
    if not all(type(item) in (int, bytes, str, datetime.timedelta, datetime.timezone) for item in args):
        machine.fail(f"{name} is malformed", found=args)
    return getattr(datetime, name.removeprefix("datetime."))(*args)


# ---- numpy, without numpy: dtype text, shape and bytes ----

def _dtype(machine: _Machine, name: str, args: tuple[object, ...]) -> object:
    text = args[0] if args else None
    if isinstance(text, str) and text.lstrip("|<>=").startswith("O"):
        raise UnsafePickleError("a numpy array holds pickled objects", file=machine.file, found=text)
    if not isinstance(text, str) or not re.fullmatch(r"[biufcSU]\d{1,6}", text, re.ASCII):
        raise UnsupportedError("a numpy array has a dtype that is no plain number or text", file=machine.file,
                               found=reprlib.repr(text))
    return Stand(name, (), {"dtype": "|" + text})


def _dtype_state(machine: _Machine, target: Stand, state: object) -> None:
    if not isinstance(state, tuple) or len(state) < 5 or state[1] not in ("<", ">", "|", "="):
        machine.fail("a numpy dtype is malformed", found=state)
    if any(item is not None for item in state[2:5]):
        raise UnsupportedError("a numpy array has a structured dtype", file=machine.file)
    target.state["dtype"] = f"{state[1]}{str(target.state['dtype'])[1:]}"


def _empty_array(machine: _Machine, name: str, args: tuple[object, ...]) -> object:
    if not args or not isinstance(args[0], Global) or args[0].qualname != "numpy.ndarray":
        machine.fail("a numpy array is malformed", found=args)
    return Stand("numpy.ndarray")


def _array_state(machine: _Machine, target: Stand, state: object) -> None:
    if not isinstance(state, tuple) or len(state) != 5:
        machine.fail("a numpy array is malformed", found=state)
    _, shape, dtype, fortran_order, data = state
    target.state.update(_array(machine, dtype, shape, bool(fortran_order), data))


def _array(machine: _Machine, dtype: object, shape: object, fortran_order: bool, data: object) -> dict[str, object]:
    sizes = _counts(machine, shape, "numpy array's shape")
    if not isinstance(dtype, Stand) or dtype.qualname != "numpy.dtype" or not isinstance(data, bytes | bytearray):
        machine.fail("a numpy array is malformed", found=(dtype, shape))
    kind = str(dtype.state["dtype"])
    expected = prod(sizes) * int(kind[2:]) * (4 if kind[1] == "U" else 1)
    if len(data) != expected:
        machine.fail("a numpy array has too few or too many bytes", expected=expected, found=len(data))
    return {"dtype": kind, "shape": sizes, "fortran_order": fortran_order, "data": bytes(data)}


def _scalar(machine: _Machine, name: str, args: tuple[object, ...]) -> object:
    if len(args) != 2:
        machine.fail("a numpy scalar is malformed", found=args)
    state = _array(machine, args[0], (), False, args[1])
    return Stand("numpy.scalar", (state["dtype"], state["data"]), state)  # in args too: it may be a dict key


def _scalar_state(machine: _Machine, target: Stand, state: object) -> None:
    machine.fail("the pickle sets attributes of a numpy scalar")


def _from_buffer(machine: _Machine, name: str, args: tuple[object, ...]) -> object:
    if len(args) != 4 or args[3] not in ("C", "F"):
        machine.fail("a numpy array is malformed", found=args)
    return Stand("numpy.ndarray", (), _array(machine, args[1], args[2], args[3] == "F", args[0]))


_NUMPY_STATES = {"numpy.dtype": _dtype_state, "numpy.ndarray": _array_state, "numpy.scalar": _scalar_state}
_TENSOR_CLASSES = frozenset({"torch.Tensor", "torch._tensor.Tensor", "torch.nn.parameter.Parameter"})
_STORAGE_DTYPES = {f"{module}.{kind}Storage": dtype for kind, dtype in _STORAGES.items()
                   for module in ("torch", "torch.storage")}

# A row is a class or function that may be named, and what calling it makes; None: it may be named but not called.
_KNOWN: dict[str, _Build | None] = {
    **dict.fromkeys([*_STORAGE_DTYPES, *_TENSOR_CLASSES, "torch.storage.TypedStorage", "numpy.ndarray",
                     *(f"builtins.{kind}" for kind in ("list", "dict", "int", "float", "str", "bool", "tuple"))]),
    **{f"builtins.{kind}": _builtin
       for kind in ("set", "frozenset", "complex", "bytearray", "bytes", "slice", "range")},
    **{f"datetime.{kind}": _time for kind in ("date", "datetime", "time", "timedelta", "timezone")},
    **{f"pathlib.{kind}Path": _text for kind in ("Posix", "PurePosix", "Windows", "PureWindows")},
    "torch.device": _text, "torch.torch_version.TorchVersion": _text, "_codecs.encode": _encode,
    "builtins.getattr": _enum_member, "torch.Size": _size, "collections.OrderedDict": _ordered_dict,
    "collections.defaultdict": _default_dict, "argparse.Namespace": _stand, "types.SimpleNamespace": _stand,
    "torch._utils._rebuild_tensor": _tensor, "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor_v3, "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter, "torch._tensor._rebuild_from_type_v2": _from_type,
    "numpy.dtype": _dtype, "numpy._core.multiarray._reconstruct": _empty_array,
    "numpy._core.multiarray.scalar": _scalar, "numpy._core.numeric._frombuffer": _from_buffer,
    "deepspeed.runtime.zero.config.ZeroStageEnum": _zero_stage,
    "deepspeed.utils.tensor_fragment.fragment_address": _fragment,
    **dict.fromkeys(["deepspeed.runtime.fp16.loss_scaler.LossScaler", "deepspeed.runtime.config.DtypeEnum",
                     "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
                     "deepspeed.checkpoint.universal_checkpoint.SubparamShape",
                     "deepspeed.runtime.zero.offload_config.OffloadDeviceEnum",
                     "deepspeed.runtime.zero.offload_config.OffloadStateTypeEnum"], _stand),
}


# ---- the opcodes ----

_Handler = Callable[[_Machine], None]


def _number(layout: str) -> _Handler:
    unpack_from, size_bytes = struct.Struct(layout).unpack_from, struct.calcsize(layout)

    def handler(machine: _Machine) -> None:
        machine.stack.append(unpack_from(machine.data, machine.pos)[0])
        machine.pos += size_bytes
    return handler


def _sized(layout: str, convert: Callable[[bytes], object]) -> _Handler:
    unpack_from, prefix_bytes = struct.Struct(layout).unpack_from, struct.calcsize(layout)

    def handler(machine: _Machine) -> None:
        size_bytes = unpack_from(machine.data, machine.pos)[0]
        machine.pos += prefix_bytes
        machine.stack.append(convert(machine.take(size_bytes)))
    return handler


def _put(layout: str) -> _Handler:
    unpack_from, size_bytes = struct.Struct(layout).unpack_from, struct.calcsize(layout)

    def handler(machine: _Machine) -> None:
        machine.memo[unpack_from(machine.data, machine.pos)[0]] = machine.stack[-1]
        machine.pos += size_bytes
    return handler


def _get(layout: str) -> _Handler:
    unpack_from, size_bytes = struct.Struct(layout).unpack_from, struct.calcsize(layout)

    def handler(machine: _Machine) -> None:
        machine.stack.append(machine.memo[unpack_from(machine.data, machine.pos)[0]])
        machine.pos += size_bytes
    return handler


def _push(make: Callable[[], object]) -> _Handler:
    return lambda machine: machine.stack.append(make())


def _integer(raw: bytes) -> int:
    if len(raw) > _MAX_INT_BYTES:
        raise ValueError(f"an integer of {len(raw)} bytes")
    return int.from_bytes(raw, "little", signed=True)


def _utf8(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogatepass")


def _skip(size_bytes: int) -> _Handler:
    return lambda machine: (machine.take(size_bytes), None)[1]


def _protocol(machine: _Machine) -> None:
    if not 2 <= machine.take(1)[0] <= 5:
        machine.fail("the pickle has an unknown protocol", expected="2 to 5")


def _mark(machine: _Machine) -> None:
    machine.below.append(machine.stack)
    machine.stack = []


def _tuple(machine: _Machine, size: int) -> None:
    if len(machine.stack) < size:
        machine.fail("the pickle takes more values than there are")
    machine.stack[-size:] = [tuple(machine.stack[-size:])]


def _marked_frozenset(machine: _Machine) -> None:
    items = machine.unmark()
    machine.check_keys(items)
    machine.stack.append(frozenset(items))


def _marked_dict(machine: _Machine) -> None:
    flat = machine.unmark()
    machine.stack.append({})
    machine.set_items(flat)


def _reduce(machine: _Machine) -> None:  # REDUCE and NEWOBJ: here a class is called like a function
    args = machine.stack.pop()
    machine.stack[-1] = machine.call(machine.stack[-1], args)


def _new_object_ex(machine: _Machine) -> None:
    keywords = machine.stack.pop()
    if type(keywords) is not dict or keywords:
        machine.fail("the pickle makes an object with keyword arguments")
    _reduce(machine)


def _stack_global(machine: _Machine) -> None:
    name, module = machine.stack.pop(), machine.stack.pop()
    if not isinstance(name, str) or not isinstance(module, str):
        machine.fail("the name of a global is no text", found=(module, name))
    machine.find(module, name)


def _marked(machine: _Machine, kind: type[tuple[object, ...]] | type[list[object]]) -> None:
    items = machine.unmark()
    machine.stack.append(kind(items))


def _set_item(machine: _Machine) -> None:
    value, key = machine.stack.pop(), machine.stack.pop()
    machine.set_items([key, value])


def _memoize(machine: _Machine) -> None:
    machine.memo[len(machine.memo)] = machine.stack[-1]


def _pop(machine: _Machine) -> None:
    if machine.stack:
        machine.stack.pop()
    else:
        machine.unmark()


_HANDLERS: dict[int, _Handler] = {
    0x80: _protocol, 0x95: _skip(8), 0x28: _mark, 0x30: _pop,  # PROTO, FRAME, MARK, POP
    0x31: lambda m: (m.unmark(), None)[1], 0x32: lambda m: m.stack.append(m.stack[-1]),  # POP_MARK, DUP
    0x4E: _push(lambda: None), 0x88: _push(lambda: True), 0x89: _push(lambda: False),
    0x4A: _number("<i"), 0x4B: _number("<B"), 0x4D: _number("<H"), 0x47: _number(">d"),  # BININT, 1, 2, BINFLOAT
    0x8A: _sized("<B", _integer), 0x8B: _sized("<i", _integer),  # LONG1, LONG4
    # texts, bytes, and empty containers
    0x8C: _sized("<B", _utf8), 0x58: _sized("<I", _utf8), 0x8D: _sized("<Q", _utf8),
    0x43: _sized("<B", bytes), 0x42: _sized("<I", bytes), 0x8E: _sized("<Q", bytes), 0x96: _sized("<Q", bytearray),
    0x29: _push(tuple), 0x5D: _push(list), 0x7D: _push(dict), 0x8F: _push(set),
    0x85: lambda m: _tuple(m, 1), 0x86: lambda m: _tuple(m, 2), 0x87: lambda m: _tuple(m, 3),
    0x74: lambda m: _marked(m, tuple), 0x6C: lambda m: _marked(m, list), 0x91: _marked_frozenset, 0x64: _marked_dict,
    0x61: lambda m: m.append([m.stack.pop()]), 0x65: lambda m: m.append(m.unmark()),  # APPEND, APPENDS
    0x73: _set_item, 0x75: lambda m: m.set_items(m.unmark()), 0x90: _Machine.add_items,  # SETITEM, SETITEMS, ADDITEMS
    0x71: _put("<B"), 0x72: _put("<I"), 0x94: _memoize,  # BINPUT, LONG_BINPUT, MEMOIZE
    0x68: _get("<B"), 0x6A: _get("<I"),  # BINGET, LONG_BINGET
    # GLOBAL, STACK_GLOBAL, BINPERSID
    0x63: lambda m: m.find(m.line(), m.line()), 0x93: _stack_global, 0x51: _Machine.persistent_load,
    0x52: _reduce, 0x81: _reduce, 0x92: _new_object_ex, 0x62: _Machine.build,  # REDUCE, NEWOBJ, NEWOBJ_EX, BUILD
}
