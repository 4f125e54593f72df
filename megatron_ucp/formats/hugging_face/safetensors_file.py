"""A safetensors file: eight bytes that give the size of a JSON header, the header, the bytes of all
tensors without a gap (https://github.com/huggingface/safetensors, "Format").

The header is read here and not by the library, as only the header is read, and every number in it
is checked against the file's size and against the other tensors before it is used.
"""

import json
import math
import os
import struct
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from megatron_ucp.core.box import Ints
from megatron_ucp.formats.byte_files import OpenFile, Record, Where, damaged
from megatron_ucp.formats.folder import StoredFile
from megatron_ucp.formats.pt.refs import ITEMSIZE

DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
}
CODES = {dtype: code for code, dtype in DTYPES.items()}
# The library writes tensors by this order of their dtypes, then by name.
_ORDER = (
    *("U64", "I64", "F64", "C64", "F32", "U32", "I32", "BF16", "F16", "U16", "I16"),
    *("F8_E8M0", "F8_E4M3", "F8_E5M2", "I8", "U8", "BOOL"),
)
_SIZE = struct.Struct("<Q")
_MAX_HEADER_BYTES = 100_000_000  # the library's own limit
_METADATA = "__metadata__"


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor: `size_bytes` from byte `offset_bytes` of the data on."""

    dtype: str
    shape: Ints
    offset_bytes: int

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * ITEMSIZE[self.dtype]


class SafetensorsFile(OpenFile):
    """An open safetensors file, of which the header was read. Raises NotFoundError, and
    DamagedFileError for a header that is none, or that does not fit the file."""

    def __init__(self, file: StoredFile | str | os.PathLike[str]) -> None:
        super().__init__(file)
        with ExitStack() as on_failure:
            on_failure.callback(self.close)
            self.data_bytes, self.tensors = self._header()
            on_failure.pop_all()

    def record(self, name: str) -> Record:
        """The bytes of a tensor. The format has no checksums."""
        entry = self.tensors[name]
        return Record(name, self.data_bytes + entry.offset_bytes, entry.size_bytes, 0)

    def all_records(self) -> list[tuple[Record, str]]:
        """Every tensor, with its dtype."""
        return [(self.record(name), entry.dtype) for name, entry in self.tensors.items()]

    def place(self, name: str) -> Where:
        """Place of a tensor."""
        entry = self.tensors[name]
        return Where(self, self.record(name), 0, math.prod(entry.shape), entry.dtype)

    def _header(self) -> tuple[int, Mapping[str, Entry]]:
        """Where the data begins, and every tensor in the order of its bytes."""
        if self.size_bytes < _SIZE.size:
            damaged(self.path, "the file is truncated", "a header", f"{self.size_bytes} bytes")
        (size,) = _SIZE.unpack(self.stored.bytes_at(0, _SIZE.size))
        first = _SIZE.size + size
        if size > _MAX_HEADER_BYTES or first > self.size_bytes:
            limit = min(_MAX_HEADER_BYTES, self.size_bytes - _SIZE.size)
            what = "the file says a header that does not lie in it"
            damaged(self.path, what, f"at most {limit} bytes", f"{size} bytes")
        found = parse_header(self.stored.bytes_at(_SIZE.size, size), self.path)
        at = 0
        for name, entry in found.items():
            if entry.offset_bytes != at:
                what = f"the bytes of {name} overlap those of another tensor, or leave a gap"
                damaged(self.path, what, f"from byte {at} on", f"from byte {entry.offset_bytes} on")
            at += entry.size_bytes
        if first + at != self.size_bytes:
            what = "the tensors do not fill the file"
            damaged(self.path, what, f"{first + at} bytes", f"{self.size_bytes} bytes")
        return first, found


def parse_header(data: bytes, path: str) -> dict[str, Entry]:
    """Every tensor, in the order of its bytes. Raises DamagedFileError."""
    try:
        tree = json.loads(data.decode(), object_pairs_hook=_without_repeats)
    except (ValueError, RecursionError) as error:
        damaged(path, "the header is no JSON", None, f"{type(error).__name__}: {str(error)[:200]}")
    if not isinstance(tree, dict):
        damaged(path, "the header is no JSON object", None, type(tree).__name__)
    metadata = tree.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        damaged(
            path, "the metadata of the header is no mapping of texts", None, repr(metadata)[:80]
        )
    entries = {name: _entry(name, value, path) for name, value in tree.items()}
    # an empty tensor lies before the one that begins at its place
    order = sorted(entries, key=lambda name: (entries[name].offset_bytes, entries[name].size_bytes))
    return {name: entries[name] for name in order}


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) < len(pairs):
        raise ValueError("a name stands there twice")
    return out


def _entry(name: str, value: Any, path: str) -> Entry:
    """One tensor of the header, whose bytes are as many as dtype and shape say."""
    if not isinstance(value, dict) or {*value} != {"dtype", "shape", "data_offsets"}:
        what = f"the header does not say dtype, shape and offsets of {name}"
        damaged(path, what, None, repr(value)[:80])
    dtype = DTYPES.get(value["dtype"]) if isinstance(value["dtype"], str) else None
    shape, offsets = _counts(value["shape"]), _counts(value["data_offsets"])
    if dtype is None:
        damaged(path, f"the dtype of {name} is not known", ", ".join(DTYPES), value["dtype"])
    if shape is None or offsets is None or len(offsets) != 2:
        what = f"shape or offsets of {name} are no sizes"
        damaged(path, what, "whole numbers", f"{value['shape']} and {value['data_offsets']}"[:80])
    entry = Entry(dtype, shape, offsets[0])
    if offsets[1] - offsets[0] != entry.size_bytes:
        what = f"{name} has another number of bytes than its shape says"
        damaged(path, what, f"{entry.size_bytes} for {list(shape)} of {dtype}", list(offsets))
    return entry


def _counts(value: Any) -> Ints | None:
    good = isinstance(value, list) and all(type(n) is int and 0 <= n < 2**63 for n in value)
    return tuple(value) if good else None


# ------------------------------------------------ writing


def header_of(tensors: Iterable[tuple[str, str, Ints]]) -> tuple[bytes, dict[str, int]]:
    """The first bytes of a file of (name, dtype, shape), and the byte of the file where each tensor
    begins: the same, byte for byte, as the library writes for these tensors from torch."""
    rows = sorted(tensors, key=lambda row: (_ORDER.index(CODES[row[1]]), row[0]))
    tree: dict[str, Any] = {_METADATA: {"format": "pt"}}
    places: dict[str, int] = {}
    at = 0
    for name, dtype, shape in rows:
        places[name] = at
        last = at + Entry(dtype, shape, at).size_bytes
        tree[name] = {"dtype": CODES[dtype], "shape": list(shape), "data_offsets": [at, last]}
        at = last
    text = json.dumps(tree, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    first = _SIZE.size + len(text)
    return _SIZE.pack(len(text)) + text, {name: first + at for name, at in places.items()}
