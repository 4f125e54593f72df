"""The pickle of an index (`.metadata`), many chunks at a time.

torch pickles a chunk as some sixty opcodes, in two places: among the chunks of its tensor, and with
its file among the places of all. Objects of one class follow each other there and differ in numbers
and references alone. Where two or more follow each other, they are read together, as columns: the
second byte of each is at once compared with what it must be, then the third, and so on. Whatever
else stands in the pickle is read by `SafeUnpickler`, opcode by opcode.

An object that is taken so is what its opcodes say: each run of them ends exactly where the next
begins, and the first begins where an opcode does. Nothing that a pickle names is called or made.

Example: `... j <MetadataIndex> ) NEWOBJ } ( j <fqn> j <a key> j <index> N j <offset> j <a Size> u
BUILD j <_StorageInfo> ) NEWOBJ } ( ... u BUILD` is one place; a million of them are a run, with an
array of keys (numbers in pickle's memo), of first elements, of files, of offsets and of lengths.
"""

import pickle
import re
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

import numpy as np
from numpy.typing import NDArray

from megatron_ucp.core.box import Ints
from megatron_ucp.core.values import ClassName, InertObject, Size
from megatron_ucp.errors import DamagedFileError, UcpError, UnsupportedError
from megatron_ucp.formats import expect
from megatron_ucp.formats.megatron.arguments import OF_METADATA
from megatron_ucp.formats.megatron.distcp import ArchivePlace
from megatron_ucp.formats.pt.refs import ITEMSIZE
from megatron_ucp.formats.pt.unpickle import MALFORMED_PICKLE, SafeUnpickler, check_extent

IntArray = NDArray[np.integer[Any]]
MOST = 2**62  # of what arrays hold, with room for a sum

# ---- entries, one by one


class EntryReader:
    """Reads what stands in the unpickled index of one file. Raises DamagedFileError,
    UnsupportedError."""

    def __init__(self, path: str) -> None:
        self.path = path

    def is_tensor(self, key: Any, entry: Any) -> bool:
        """Whether an entry is a tensor's, and no object's."""
        if not isinstance(key, str):
            self.fail("a key is no text", None, type(key).__name__)
        name = expect.kind(entry, InertObject, key, self.path).qualname
        return name.endswith(".TensorStorageMetadata")

    def kind_of(self, key: str, entry: InertObject) -> tuple[str, Ints]:
        """The dtype and the shape of a tensor."""
        said = entry.state
        properties = expect.key(said, "properties", InertObject, self.path).state
        dtype, *_ = expect.key(properties, "__state__", tuple, self.path) or ("",)
        dtype = str(dtype).removeprefix("torch.")
        shape = self.ints(key, said.get("size"))
        if dtype not in ITEMSIZE:
            self.fail("a tensor has a dtype that is not known", key, dtype)
        return dtype, shape

    def box(self, key: str, chunk: InertObject) -> tuple[Ints, Ints]:
        """Where a chunk begins, and its shape."""
        start, size = (self.ints(key, chunk.get(name)) for name in ("offsets", "sizes"))
        return start, size

    def places(self, listed: Mapping[Any, Any]) -> dict[Any, ArchivePlace]:
        """Where things lie, by key and first element; of what is no tensor by its key and None."""
        out: dict[Any, ArchivePlace] = {}
        for index, info in listed.items():
            key, *start = expect.kind(index, InertObject, "a place", self.path).args or (None,)
            at = tuple(None if one is None else self.ints(str(key), one) for one in start[:1])
            out[(key, *at)] = self.place(expect.kind(info, InertObject, "a place", self.path))
        return out

    def place(self, info: Any) -> ArchivePlace:
        """The place that torch says of an entry."""
        name, offset, size = map(info.state.get, ("relative_path", "offset", "length"))
        if info.get("transform_descriptors"):
            raise UnsupportedError(
                "the checkpoint was written through a stream transformation (compressed or "
                "encrypted)",
                file=self.path,
                found=f"some for {str(name)[:80]}",
                fix="load it with the program that wrote it, and save it again without "
                "compression or encryption",
            )
        if not is_file_name(name):
            self.fail("the index names a file outside of its folder", None, repr(name)[:80])
        is_place = type(offset) is int and type(size) is int and offset >= 0 and size >= 1
        if not is_place or offset + size > MOST:
            self.fail("the index says an impossible place", None, f"{offset}, {size}"[:80])
        return ArchivePlace(name, offset, size)

    def taken(self, places: dict[Any, ArchivePlace], key: str, start: Ints | None) -> ArchivePlace:
        """The place of an entry, which nothing else may take then."""
        found = places.pop((key, start), None)
        if found is None:
            self.fail("an entry of the index lies nowhere", key, start)
        return found

    def ints(self, key: str, value: Any) -> Ints:
        """A shape, or where a chunk begins."""
        is_shape = isinstance(value, tuple) and all(type(n) is int and n >= 0 for n in value)
        if not is_shape or any(n > MOST for n in value):
            self.fail("a shape is none", key, repr(value)[:80])
        return tuple(value)

    def fail(self, problem: str, key: str | None, found: object) -> NoReturn:
        """Raises DamagedFileError."""
        raise DamagedFileError(problem, file=self.path, parameter=key, found=found)


def is_file_name(name: object) -> bool:
    """Whether a name is one of a file in the folder itself."""
    if not isinstance(name, str) or name in ("", ".."):
        return False
    return "/" not in name and "\0" not in name and not name.startswith(".")


# ---- columns


class _Columns:
    """As many places in a pickle as there are rows, which move on together. `ok` says of each row
    whether what was read there was what was asked for; `memos` counts what it put into pickle's
    memo."""

    _LENGTH = np.zeros(256, np.int64)  # of an int's opcode with its number
    _LENGTH[[pickle.BININT1[0], pickle.BININT2[0], pickle.BININT[0]]] = 2, 3, 5
    _MASK = np.zeros(256, np.uint64)
    _MASK[[pickle.BININT1[0], pickle.BININT2[0], pickle.BININT[0]]] = 0xFF, 0xFFFF, 0xFFFFFFFF
    _TUPLES = np.frombuffer(b")\x85\x86\x87", np.uint8)  # of 0 to 3 items; more have a mark

    def __init__(self, buffer: NDArray[np.uint8], at: IntArray) -> None:
        self.buffer, self.at = buffer, at.astype(np.int64)
        self.ok = np.ones(len(at), bool)
        self.memos = np.zeros(len(at), np.int64)

    def bytes_at(self, at: IntArray) -> NDArray[np.uint8]:
        """A byte for each place; behind the end of the pickle its last one."""
        return self.buffer.take(at, mode="clip")

    def words(self, at: IntArray, size_bytes: int) -> IntArray:
        """A number without a sign for each place."""
        held = self.buffer.take(at[:, None] + np.arange(size_bytes), mode="clip")
        return held.view(f"<u{size_bytes}")[:, 0]

    def literal(self, text: bytes) -> None:
        """Bytes that are the same in each row."""
        for place, byte in enumerate(text):
            self.ok &= self.bytes_at(self.at + place) == byte
        self.at += len(text)

    def reference(self) -> IntArray:
        """A number in the memo."""
        code = self.bytes_at(self.at)
        is_short, is_long = code == pickle.BINGET[0], code == pickle.LONG_BINGET[0]
        self.ok &= is_short | is_long
        word = self.words(self.at + 1, 4).astype(np.int64)
        self.at += np.where(is_short, 2, 5)
        return np.where(is_short, word & 0xFF, word)

    def integer(self) -> IntArray:
        """A whole number from 0 on, of at most seven bytes."""
        found, length = self._integers(self.at)
        self.ok &= length > 0
        self.at += length
        return found

    def _integers(self, at: IntArray) -> tuple[IntArray, IntArray]:
        """The numbers at some places, and the bytes that they take: 0 where there is none that is
        taken here."""
        code, word = self.bytes_at(at), self.words(at + 1, 8)
        length, value = self._LENGTH[code], word & self._MASK[code]
        count = (word & np.uint64(0xFF)).astype(np.int64)
        is_long = (code == pickle.LONG1[0]) & (count >= 1) & (count <= 7)
        if is_long.any():
            bits = np.where(is_long, 8 * count, 0).astype(np.uint64)
            low = (word >> np.uint64(8)) & ((np.uint64(1) << bits) - np.uint64(1))
            positive = (low >> np.maximum(bits, 1).astype(np.uint64) - np.uint64(1)) == 0
            value = np.where(is_long, low, value)
            length = np.where(is_long & positive, 2 + count, length)
        length = np.where((code == pickle.BININT[0]) & (value >= 2**31), 0, length)
        return value.astype(np.int64), length

    def memoize(self) -> None:
        """The top of the stack into the memo."""
        self.literal(pickle.MEMOIZE)
        self.memos += 1

    def size(self, size_class: int) -> "_Sizes":
        """A torch.Size, or a reference to one: `size_class` is the number of that class."""
        reference = self.reference()
        rows = np.flatnonzero(self.ok & (reference == size_class))
        none = np.full(len(self.at), -1, np.int64)
        out = _Sizes(reference, self.memos.copy(), none, np.zeros((len(self.at), 0), np.int64))
        if len(rows) == 0:
            return out
        part = _Columns(self.buffer, self.at[rows])
        marked = part.bytes_at(part.at) == pickle.MARK[0]
        part.at += marked
        numbers, count, goes_on = list[IntArray](), np.zeros(len(rows), np.int64), part.ok.copy()
        for _ in range(_MAX_DIMS + 1):
            value, length = part._integers(part.at)
            goes_on &= length > 0
            if not goes_on.any():
                break
            numbers.append(np.where(goes_on, value, 0))
            count += goes_on
            part.at += np.where(goes_on, length, 0)
        code = np.where(marked, pickle.TUPLE[0], self._TUPLES[np.minimum(count, 3)])
        part.ok &= (part.bytes_at(part.at) == code) & ((count <= 3) | marked)
        part.ok &= (count <= _MAX_DIMS) & ((count > 0) | ~marked)
        part.at += 1
        has_items = count > 0
        part.ok &= ~has_items | (part.bytes_at(part.at) == pickle.MEMOIZE[0])
        part.at += has_items
        part.literal(b"\x85\x94R\x94")  # a tuple of it, and the call
        out.number[rows] = self.memos[rows] + has_items + 1
        out.count[rows] = count
        out.reference[rows] = -1
        out.dims = np.zeros((len(self.at), len(numbers)), np.int64)
        for dim, values in enumerate(numbers):
            out.dims[rows, dim] = values
        self.ok[rows] &= part.ok
        self.at[rows] = part.at
        self.memos[rows] += has_items + 2
        return out

    def text(self) -> "_Texts":
        """A text, or a reference to one."""
        code = self.bytes_at(self.at)
        is_short, is_text = code == pickle.SHORT_BINUNICODE[0], code == pickle.BINUNICODE[0]
        is_new = is_short | is_text
        word = self.words(self.at + 1, 4).astype(np.int64)
        length = np.where(is_short, word & 0xFF, np.minimum(word, len(self.buffer)))
        first = self.at + np.where(is_short, 2, 5)
        reference = np.where(code == pickle.BINGET[0], word & 0xFF, word)
        self.ok &= is_new | (code == pickle.BINGET[0]) | (code == pickle.LONG_BINGET[0])
        at = np.where(is_new, first + length, self.at + np.where(code == pickle.BINGET[0], 2, 5))
        self.ok &= ~is_new | (self.bytes_at(at) == pickle.MEMOIZE[0])
        number = self.memos.copy()
        self.at = at + is_new
        self.memos += is_new
        return _Texts(np.where(is_new, -1, reference), number, first, np.where(is_new, length, 0))


_MAX_DIMS = 8


@dataclass
class _Sizes:
    """A torch.Size in each row: `count` numbers of `dims`, which get the `number` in the memo, or a
    `reference` to earlier ones (-1: none). `number` counts from the first row of the block, in
    `cut` from the beginning of the pickle; it is -1 for what was read one by one."""

    reference: IntArray
    number: IntArray
    count: IntArray
    dims: IntArray

    def cut(self, rows: slice, before: int) -> "_Sizes":
        """Some of the rows, where `before` stands in the memo before the first row of all."""
        number = self.number[rows] + before
        return _Sizes(self.reference[rows], number, self.count[rows], self.dims[rows])

    @classmethod
    def of(cls, values: Sequence[Ints]) -> "_Sizes":
        """Those of values that were read one by one."""
        width, none = max(map(len, values), default=0), np.full(len(values), -1)
        dims = [(*value, *(0,) * (width - len(value))) for value in values]
        rows = np.array(dims, np.int64).reshape(len(values), width)
        return cls(none, none, np.array([*map(len, values)], np.int64), rows)

    @classmethod
    def joined(cls, parts: Sequence["_Sizes"]) -> "_Sizes":
        """The rows of several, one below the other."""
        width = max((part.dims.shape[1] for part in parts), default=0)
        dims = np.zeros((sum(len(part.number) for part in parts), width), np.int64)
        at = 0
        for part in parts:
            dims[at : at + len(part.dims), : part.dims.shape[1]] = part.dims
            at += len(part.dims)
        reference, number, count = (
            _stacked([getattr(part, name) for part in parts])
            for name in ("reference", "number", "count")
        )
        return cls(reference, number, count, dims)

    def value(self, row: int) -> Size:
        """One row that is no reference."""
        return Size(self.dims[row, : self.count[row]].tolist())


@dataclass
class _Texts:
    """A text in each row, by its bytes in the pickle; `reference` and `number` as of `_Sizes`."""

    reference: IntArray
    number: IntArray
    first: IntArray
    length: IntArray

    def cut(self, rows: slice, before: int) -> "_Texts":
        """As of `_Sizes`."""
        number = self.number[rows] + before
        return _Texts(self.reference[rows], number, self.first[rows], self.length[rows])

    @classmethod
    def joined(cls, parts: Sequence["_Texts"]) -> "_Texts":
        """As of `_Sizes`."""
        return cls(
            *(
                _stacked([getattr(part, name) for part in parts])
                for name in ("reference", "number", "first", "length")
            )
        )


def _stacked(parts: Sequence[IntArray]) -> IntArray:
    return np.concatenate([np.zeros(0, np.int64), *parts])


# ---- runs of objects

_METADATA = "torch.distributed.checkpoint.metadata"
_CHUNK, _PLACE_OF = f"{_METADATA}.ChunkStorageMetadata", f"{_METADATA}.MetadataIndex"
_PLACE = "torch.distributed.checkpoint.filesystem._StorageInfo"
_SIZE = "torch.Size"
_NAMES = ("offsets", "sizes", "fqn", "index", "offset", "relative_path", "length")
_NAMED = frozenset({*_NAMES, _SIZE, _PLACE})
_BEGIN, _END = b")\x81\x94}\x94(", b"ub"  # of an object with attributes
_AT_ONCE = 2**16  # rows


class _NotTakenError(Exception):
    """The pickle holds something in another way than torch writes it."""


@dataclass
class _Block:
    """Rows that were read together. `ends` says where each ends; a run of those that follow each
    other ends before the next one of `stops`. `memos` are what stands in the memo before each row,
    and in the end, counted from the first one."""

    ends: IntArray
    stops: IntArray
    memos: IntArray
    columns: Mapping[str, Any]


@dataclass(eq=False)
class _Run:
    """Rows [first, last) of a block, of which the memo begins at `number`: chunks of a tensor, or
    places with what lies there."""

    kind: str
    block: _Block
    first: int
    last: int
    number: int

    @property
    def before(self) -> int:
        """What stands in the memo before the first row of the block, if all of it were in order."""
        return self.number - int(self.block.memos[self.first])

    def cut(self, name: str) -> Any:
        """A column."""
        held, rows = self.block.columns[name], slice(self.first, self.last)
        return held.cut(rows, self.before) if isinstance(held, _Sizes | _Texts) else held[rows]


class _Memo(dict[int, Any]):
    """Pickle's memo. What is in runs is made where somebody asks for it."""

    def __init__(self, data: bytes) -> None:
        super().__init__()
        self._data, self._left_out = data, 0
        self._runs: list[_Run] = []

    def __len__(self) -> int:
        return super().__len__() + self._left_out

    def leave_out(self, run: _Run) -> None:
        """Counts what a run puts into it."""
        memos = run.block.memos
        self._runs.append(run)
        self._left_out += int(memos[run.last] - memos[run.first])

    def __missing__(self, number: int) -> Any:
        at = bisect_right(self._runs, number, key=lambda run: run.number) - 1
        if at < 0 or number >= len(self):
            raise KeyError(number)
        run = self._runs[at]
        inner = number - run.before
        row = int(np.searchsorted(run.block.memos, inner, side="right")) - 1
        if row >= run.last:
            raise _NotTakenError
        columns, is_object = run.block.columns, inner == int(run.block.memos[row])
        if is_object and run.kind == _CHUNK:
            state = {
                "offsets": self._value(run, "starts", row),
                "sizes": self._value(run, "sizes", row),
            }
            return InertObject(_CHUNK, (), state)
        if is_object:
            return InertObject(
                _PLACE_OF, (self._value(run, "keys", row), self._value(run, "starts", row))
            )
        if "place" in columns and inner == int(columns["place"][row]):
            state = {
                "relative_path": self._value(run, "files", row),
                "offset": int(columns["at"][row]),
                "length": int(columns["size"][row]),
            }
            return InertObject(_PLACE, (), state)
        for name, column in columns.items():
            if isinstance(column, _Sizes | _Texts) and column.reference[row] < 0:
                if inner == int(column.number[row]):
                    return self._value(run, name, row)
        raise _NotTakenError

    def _value(self, run: _Run, name: str, row: int) -> Any:
        """A text or a torch.Size in a row."""
        column: _Sizes | _Texts = run.block.columns[name]
        if (reference := int(column.reference[row])) >= 0:
            return self[reference]
        return column.value(row) if isinstance(column, _Sizes) else self.text(column, row)

    def text(self, texts: _Texts, row: int) -> str:
        """One row that is no reference."""
        first = int(texts.first[row])
        return self._data[first : first + int(texts.length[row])].decode("utf-8", "surrogatepass")


class _RunUnpickler(SafeUnpickler):
    """Reads an index; runs of chunks and of places become a `_Run` each."""

    memo: _Memo

    def __init__(self, data: bytes, file: str) -> None:
        super().__init__(data, file, OF_METADATA)
        self.memo = _Memo(data)
        self.data, self.buffer = data, np.frombuffer(data, np.uint8)
        self.runs: list[_Run] = []
        self.stored: dict[int, list[_Run]] = {}  # by the identity of the dict that holds them
        self._seen: set[int] = set()  # classes of which one object was read
        self._begins: dict[int, IntArray] = {}
        self._blocks: dict[tuple[int, int], _Block] = {}
        self._number_of: dict[str, int] = {}

    # ---- opcodes

    def load_memoize(self) -> None:
        value = self.stack[-1]
        name = value.qualname if type(value) is ClassName else value
        if type(name) is str and name in _NAMED:
            self._number_of.setdefault(name, len(self.memo))
        self.memo[len(self.memo)] = value

    def load_binget(self) -> None:
        self._get(self.read(1)[0], 2)

    def load_long_binget(self) -> None:
        self._get(int.from_bytes(self.read(4), "little"), 5)

    def _get(self, number: int, opcode_bytes: int) -> None:
        value = self.memo[number]
        if type(value) is ClassName and value.qualname in (_CHUNK, _PLACE_OF):
            run = self._run(value.qualname, number, self.source.tell() - opcode_bytes)
            if run is not None:
                self.append(run)
                return
        self.append(value)

    def _set_items(self, flat: list[object]) -> None:
        runs = [one for one in flat if type(one) is _Run]
        if runs:
            target = self.stack[-1]
            if type(target) is not dict or any(run.kind != _PLACE_OF for run in runs):
                raise _NotTakenError
            self.stored.setdefault(id(target), []).extend(runs)
            flat = [one for one in flat if type(one) is not _Run]
        super()._set_items(flat)

    OPCODES: ClassVar[dict[bytes, Callable[[Any], None]]] = {
        **{
            code: handler
            for code, handler in SafeUnpickler.OPCODES.items()
            # what asks for a place in the memo, or copies and takes off the stack
            if code not in (pickle.BINPUT, pickle.LONG_BINPUT, pickle.POP, pickle.POP_MARK)
            and code != pickle.DUP
        },
        pickle.MEMOIZE: load_memoize,
        pickle.BINGET: load_binget,
        pickle.LONG_BINGET: load_long_binget,
    }

    # ---- runs

    def _run(self, kind: str, number: int, at: int) -> _Run | None:
        """The run that begins at a byte, which is passed over; None where two objects don't follow
        each other there."""
        if number not in self._seen:  # the first one names the attributes
            self._seen.add(number)
            return None
        if number not in self._begins:
            found = re.finditer(re.escape(code_of(number) + _BEGIN), self.data)
            self._begins[number] = np.fromiter((one.start() for one in found), np.int64)
        begins = self._begins[number]
        row = int(np.searchsorted(begins, at))
        if row >= len(begins) or begins[row] != at:
            return None
        block_number, row = divmod(row, _AT_ONCE)
        block = self._blocks.get((number, block_number))
        if block is None:
            rows = begins[block_number * _AT_ONCE : (block_number + 1) * _AT_ONCE]
            block = self._block(kind, rows, len(code_of(number)))
            if block is None:
                return None
            self._blocks[number, block_number] = block
        last = int(block.stops[np.searchsorted(block.stops, row, side="right")])
        if last - row < 2:
            return None
        run = _Run(kind, block, row, last, len(self.memo))
        self.memo.leave_out(run)
        self.source.seek(int(block.ends[last - 1]))
        self.runs.append(run)
        return run

    def _block(self, kind: str, begins: IntArray, opcode_bytes: int) -> _Block | None:
        """The objects that begin at some bytes; None while a name that they have is not known."""
        needed = ("offsets", "sizes", _SIZE) if kind == _CHUNK else (*_NAMES[2:], _SIZE, _PLACE)
        if any(name not in self._number_of for name in needed):
            return None
        rows = _Columns(self.buffer, begins + opcode_bytes)
        rows.literal(_BEGIN)
        rows.memos += 2
        columns = self._chunks(rows) if kind == _CHUNK else self._places(rows)
        rows.ok &= rows.at < len(self.buffer)
        memos = np.concatenate(([0], np.cumsum(rows.memos)))
        for column in columns.values():
            if isinstance(column, _Sizes | _Texts):
                column.number += memos[:-1]
        if "place" in columns:
            columns["place"] += memos[:-1]
        follows = np.append(rows.ok[:-1] & (rows.at[:-1] == begins[1:]) & rows.ok[1:], False)
        # the run of a row goes to the first one that nothing follows; none where that row is wrong
        stops = np.flatnonzero(~follows) + 1
        return _Block(rows.at, stops, memos, columns)

    def _named(self, rows: _Columns, name: str) -> None:
        """An attribute's name."""
        rows.ok &= rows.reference() == self._number_of[name]

    def _chunks(self, rows: _Columns) -> dict[str, Any]:
        self._named(rows, "offsets")
        starts = rows.size(self._number_of[_SIZE])
        self._named(rows, "sizes")
        sizes = rows.size(self._number_of[_SIZE])
        rows.literal(_END)
        return {"starts": starts, "sizes": sizes}

    def _places(self, rows: _Columns) -> dict[str, Any]:
        self._named(rows, "fqn")
        keys = rows.text()
        self._named(rows, "index")
        has_none = rows.bytes_at(rows.at) == pickle.NONE[0]
        _, length = rows._integers(rows.at)  # pyright: ignore[reportPrivateUsage]
        rows.ok &= has_none | (length > 0)
        rows.at += np.where(has_none, 1, length)
        self._named(rows, "offset")
        starts = rows.size(self._number_of[_SIZE])
        rows.literal(_END)
        self._named(rows, _PLACE)
        rows.literal(_BEGIN)
        place = rows.memos.copy()
        rows.memos += 2
        self._named(rows, "relative_path")
        files = rows.text()
        self._named(rows, "offset")
        at = rows.integer()
        self._named(rows, "length")
        size = rows.integer()
        rows.literal(_END)
        found = {"keys": keys, "starts": starts, "files": files, "at": at, "size": size}
        return {**found, "place": place}


def code_of(number: int) -> bytes:
    """The opcode that takes a number of the memo, as Python writes it."""
    if number < 256:
        return pickle.BINGET + bytes([number])
    return pickle.LONG_BINGET + number.to_bytes(4, "little")


# ---- what an index lists


@dataclass(frozen=True)
class ListedChunks:
    """The entries of an index: objects by place, tensors as the pickle has them, and the chunks of
    all tensors as arrays (see `Index`). `dims` are those of each chunk."""

    tensors: Mapping[str, InertObject]
    objects: Mapping[str, ArchivePlace]
    firsts: IntArray
    starts: IntArray
    sizes: IntArray
    dims: IntArray
    file_numbers: IntArray
    offsets_bytes: IntArray
    sizes_bytes: IntArray
    files: tuple[str, ...]


def listed_chunks(data: bytes, path: str) -> ListedChunks | None:
    """What the bytes of an index list; None where anything is wrong or written in another way than
    torch does: then `SafeUnpickler` says what."""
    unpickler = _RunUnpickler(data, path)
    try:
        tree = unpickler.load()
        check_extent(tree, unpickler)
    except (_NotTakenError, UcpError, *MALFORMED_PICKLE):
        return None
    try:
        return _Lister(unpickler, path).listed(tree)
    except (_NotTakenError, UcpError):
        return None


class _Lister:
    """Puts together what one pickle lists."""

    def __init__(self, unpickler: _RunUnpickler, path: str) -> None:
        self._pickle, self._read = unpickler, EntryReader(path)

    def listed(self, tree: Any) -> ListedChunks:
        path, read = self._read.path, self._read
        said = expect.kind(tree, InertObject, "the index", path).state
        entries = expect.key(said, "state_dict_metadata", dict, path)
        stored = expect.key(said, "storage_data", dict, path)
        runs = self._pickle.stored.get(id(stored), [])
        places = read.places(stored)
        tensors: dict[str, InertObject] = {}
        objects: dict[str, ArchivePlace] = {}
        for key, entry in entries.items():
            if read.is_tensor(key, entry):
                tensors[key] = entry
            else:
                objects[key] = read.taken(places, key, None)
        firsts, starts, sizes, used = self._chunks(tensors)
        if {*map(id, self._pickle.runs)} != used | {*map(id, runs)}:
            raise _NotTakenError  # one stands where nothing asks for it
        of_key = {key.encode("utf-8", "surrogatepass"): n for n, key in enumerate(tensors)}
        keys, at, files, names = self._places(runs, places, of_key)
        self._resolve(starts, sizes, at)
        if (starts.count != sizes.count).any() or len(keys) != len(starts.count):
            raise _NotTakenError
        owner = np.repeat(np.arange(len(tensors)), np.diff(firsts))
        rows = _matched((owner, starts), (keys, at))
        sizes.dims[np.arange(sizes.dims.shape[1]) >= sizes.count[:, None]] = 1
        width = max(starts.dims.shape[1], sizes.dims.shape[1])
        return ListedChunks(
            tensors,
            objects,
            firsts,
            _wide(starts.dims, width, 0),
            _wide(sizes.dims, width, 1),
            starts.count,
            files[0][rows],
            files[1][rows],
            files[2][rows],
            names,
        )

    def _chunks(
        self, tensors: Mapping[str, InertObject]
    ) -> tuple[IntArray, _Sizes, _Sizes, set[int]]:
        """Where the chunks of each tensor begin, their first elements and shapes, and the runs that
        they stand in."""
        counts, used = list[int](), set[int]()
        parts: list[tuple[_Sizes, _Sizes]] = []
        single: list[tuple[Ints, Ints]] = []  # that were read one by one, since the last run

        def end_single() -> None:
            if single:
                starts, sizes = zip(*single, strict=True)
                parts.append((_Sizes.of(starts), _Sizes.of(sizes)))
                single.clear()

        for key, entry in tensors.items():
            count = 0
            for one in expect.kind(entry.state.get("chunks"), list, key, self._read.path):
                if isinstance(one, _Run):
                    if one.kind != _CHUNK:
                        raise _NotTakenError
                    end_single()
                    parts.append((one.cut("starts"), one.cut("sizes")))
                    used.add(id(one))
                    count += one.last - one.first
                else:
                    chunk = expect.kind(one, InertObject, key, self._read.path)
                    single.append(self._read.box(key, chunk))
                    count += 1
            counts.append(count)
        end_single()
        starts, sizes = (_Sizes.joined([part[side] for part in parts]) for side in (0, 1))
        return np.cumsum([0, *counts]), starts, sizes, used

    def _places(
        self, runs: Sequence[_Run], single: dict[Any, ArchivePlace], of_key: Mapping[bytes, int]
    ) -> tuple[IntArray, _Sizes, tuple[IntArray, IntArray, IntArray], tuple[str, ...]]:
        """The number of the tensor of each place, its first element, its file, byte and size; and
        the names of the files."""
        files: dict[bytes, int] = {}

        def key_number(key: bytes) -> int:
            if key not in of_key:
                raise _NotTakenError
            return of_key[key]

        def file_number(name: bytes) -> int:
            return files.setdefault(name, len(files))

        keys = self._numbers(_Texts.joined([run.cut("keys") for run in runs]), key_number)
        file = self._numbers(_Texts.joined([run.cut("files") for run in runs]), file_number)
        starts = [run.cut("starts") for run in runs]
        if any(start is None for _, start in single):
            raise _NotTakenError
        starts.append(_Sizes.of([start for _, start in single]))
        more = [
            [key_number(str(key).encode("utf-8", "surrogatepass")) for key, _ in single],
            [file_number(place.file.encode("utf-8", "surrogatepass")) for place in single.values()],
            [place.offset_bytes for place in single.values()],
            [place.size_bytes for place in single.values()],
        ]
        columns = [
            [keys],
            [file],
            [run.cut("at") for run in runs],
            [run.cut("size") for run in runs],
        ]
        keys, file, at, size = (
            _stacked([*held, np.array(added, np.int64)])
            for held, added in zip(columns, more, strict=True)
        )
        names = tuple(name.decode("utf-8", "surrogatepass") for name in files)
        return keys, _Sizes.joined(starts), (file, at, size), names

    def _numbers(self, texts: _Texts, number_of: Callable[[bytes], int]) -> IntArray:
        """A number for the text of each row."""
        out = np.empty(len(texts.number), np.int64)
        new = np.flatnonzero(texts.reference < 0)
        data, first = self._pickle.data, texts.first[new]
        spans = zip(first.tolist(), (first + texts.length[new]).tolist(), strict=True)
        out[new] = [number_of(data[a:b]) for a, b in spans]
        rows = np.flatnonzero(texts.reference >= 0)
        known, at = texts.number[new], texts.reference[rows]
        if (at >= texts.number[rows]).any():
            raise _NotTakenError
        found, inside = _looked_up(known, at)
        out[rows[inside]] = out[new][found[inside]]
        others, back = np.unique(at[~inside], return_inverse=True)
        values = [self._memo(number) for number in others.tolist()]
        if not all(type(value) is str for value in values):
            raise _NotTakenError
        numbers = [number_of(value.encode("utf-8", "surrogatepass")) for value in values]
        out[rows[~inside]] = np.array(numbers, np.int64)[back]
        return out

    def _resolve(self, *columns: _Sizes) -> None:
        """Gives each row that is a reference the numbers that it refers to."""
        new = [np.flatnonzero((one.reference < 0) & (one.number >= 0)) for one in columns]
        known = _Sizes.joined(
            [
                _Sizes(one.reference[rows], one.number[rows], one.count[rows], one.dims[rows])
                for one, rows in zip(columns, new, strict=True)
            ]
        )
        order = np.argsort(known.number, kind="stable")
        for one in columns:
            rows = np.flatnonzero(one.reference >= 0)
            at = one.reference[rows]
            if (at >= one.number[rows]).any():
                raise _NotTakenError
            found, inside = _looked_up(known.number[order], at)
            others, back = np.unique(at[~inside], return_inverse=True)
            read = _Sizes.of([self._size(number) for number in others.tolist()])
            width = max(one.dims.shape[1], known.dims.shape[1], read.dims.shape[1])
            one.dims = _wide(one.dims, width, 0)
            for held, mine, theirs in (
                (known, rows[inside], order[found[inside]]),
                (read, rows[~inside], back),
            ):
                one.dims[mine, : held.dims.shape[1]] = held.dims[theirs]
                one.count[mine] = held.count[theirs]

    def _size(self, number: int) -> Ints:
        value = self._memo(number)
        if not isinstance(value, Size) or len(value) > _MAX_DIMS:
            raise _NotTakenError
        return self._read.ints("", value)

    def _memo(self, number: int) -> Any:
        if not dict.__contains__(self._pickle.memo, number):
            raise _NotTakenError
        return self._pickle.memo[number]


def _looked_up(known: IntArray, wanted: IntArray) -> tuple[IntArray, NDArray[np.bool_]]:
    """Where each of some numbers is in an ascending list, and whether it is."""
    found = np.searchsorted(known, wanted)
    inside = np.zeros(len(wanted), bool)
    if len(known):
        found = np.minimum(found, len(known) - 1)
        inside = known[found] == wanted
    return found, inside


def _wide(values: IntArray, width: int, filling: int) -> IntArray:
    """Rows of `width` numbers."""
    more = width - values.shape[1]
    return np.pad(values, ((0, 0), (0, more)), constant_values=filling) if more else values


def _matched(wanted: tuple[IntArray, _Sizes], have: tuple[IntArray, _Sizes]) -> IntArray:
    """The row of `have` with the same key and first element, for each row of `wanted`. Raises
    _NotTakenError where there is not exactly one."""
    width = max(wanted[1].dims.shape[1], have[1].dims.shape[1])
    sides: list[tuple[IntArray, list[IntArray]]] = []
    for keys, starts in (wanted, have):
        dims = _wide(starts.dims, width, 0)
        columns = [keys, starts.count, *(dims[:, dim] for dim in range(width))]
        sides.append((np.lexsort(columns[::-1]), columns))
    (order, columns), (their_order, theirs) = sides
    same = np.ones(max(len(order) - 1, 0), bool)
    for mine, their in zip(columns, theirs, strict=True):
        mine = mine[order]
        if (mine != their[their_order]).any():
            raise _NotTakenError
        same &= mine[1:] == mine[:-1]
    if same.any():
        raise _NotTakenError
    rows = np.empty(len(order), np.int64)
    rows[order] = their_order
    return rows
