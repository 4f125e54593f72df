"""Hand-made pickles and zip files, valid and hostile, and a watch over what the reader does to the
process."""

import contextlib
import pathlib
import random
import struct
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from unittest import mock

WATCHED = (
    "import",
    "exec",
    "compile",
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.fork",
    "subprocess.Popen",
    "open",
    "pickle.find_class",
    "code.__new__",
    "ctypes.dlopen",
    "socket.connect",
    "object.__setattr__",
)
_log: list[str] | None = None


@contextlib.contextmanager
def names_of_python_3_13() -> Iterator[None]:
    """Inside, a pickle names the class of a path as Python 3.13 does."""
    with (
        mock.patch.dict(sys.modules, {"pathlib._local": pathlib}),
        mock.patch.object(pathlib.PosixPath, "__module__", "pathlib._local"),
    ):
        yield


def _hook(event: str, args: tuple[object, ...]) -> None:
    if _log is not None and event in WATCHED:
        _log.append(f"{event} {args!r}"[:200])


sys.addaudithook(_hook)  # can't be removed: it only listens inside of `watch`


@contextlib.contextmanager
def watch() -> Iterator[list[str]]:
    """Lists the audit events (imports, executions, opened files) of the block."""
    global _log
    _log = []
    try:
        yield _log
    finally:
        _log = None


def text(value: str) -> bytes:
    raw = value.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(raw)) + raw


def named(qualname: str) -> bytes:
    """GLOBAL opcode."""
    module, _, name = qualname.rpartition(".")
    return f"c{module}\n{name}\n".encode()


def call(qualname: str, args: bytes = b")") -> bytes:
    return named(qualname) + args + b"R"


def tuple_of(*items: bytes) -> bytes:
    return b"(" + b"".join(items) + b"t"


def dict_of(*flat: bytes) -> bytes:
    return b"}(" + b"".join(flat) + b"u"


def number(value: int) -> bytes:
    raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(raw)]) + raw


def numbers(*values: int) -> bytes:
    return tuple_of(*(number(value) for value in values))


def storage(key: str = "0", elems: int = 10, kind: str = "torch.FloatStorage") -> bytes:
    return tuple_of(text("storage"), named(kind), text(key), text("cpu"), number(elems)) + b"Q"


def tensor(store: bytes, offset: int, shape: bytes, stride: bytes) -> bytes:
    hooks = call("collections.OrderedDict")
    return call(
        "torch._utils._rebuild_tensor_v2",
        tuple_of(store, number(offset), shape, stride, b"\x89", hooks),
    )


def pickle_of(body: bytes) -> bytes:
    return b"\x80\x02" + body + b"."


def mutated(data: bytes, seed: int) -> bytes:
    """`data` with 1 to 6 random edits: bytes set, runs removed, doubled or moved, ends cut."""
    rng, out = random.Random(seed), bytearray(data)
    for _ in range(rng.randint(1, 6)):
        at, size = rng.randrange(len(out) + 1), rng.randint(1, 12)
        match rng.randrange(7):
            case 0 | 1 if at < len(out):
                out[at] = rng.randrange(256)
            case 2 if at < len(out):
                out[at] ^= 1 << rng.randrange(8)
            case 3:
                del out[at : at + size]
            case 4:
                out[at:at] = out[at : at + size]
            case 5:
                out[at:at] = rng.randbytes(size)
            case 6 if rng.random() < 0.3:
                del out[at:]
    return bytes(out)


@dataclass
class Entry:
    """One record of `zip_of`; what is None is what a right writer would put."""

    name: str | bytes
    data: bytes = b""
    method: int = 0
    flags: int = 0
    crc: int | None = None
    local_name: bytes | None = None
    local_extra: bytes = b""
    size: int | None = None
    header: int | None = None
    zip64: bool = False
    extra: bytes | None = None
    disk: int = 0

    @property
    def raw(self) -> bytes:
        return self.name if isinstance(self.name, bytes) else self.name.encode()


def zip_of(entries: list[Entry], *, end64: bool = False, **end: int) -> bytes:
    """A zip file. `end` overrides fields of the end record: here, count, length, start, comment;
    end64_*: ZIP64's."""
    body, directory = bytearray(), bytearray()
    for e in entries:
        directory += in_directory(e, len(body))
        body += with_header(e)
    last = zip_end(len(entries), len(directory), len(body), end64=end64, **end)
    return bytes(body) + bytes(directory) + last


def said_of(e: Entry) -> tuple[int, int]:
    """The checksum and the size that an entry claims."""
    crc = zlib.crc32(e.data) if e.crc is None else e.crc
    return crc, len(e.data) if e.size is None else e.size


def with_header(e: Entry) -> bytes:
    """The record, behind its own header."""
    crc, size = said_of(e)
    name = e.raw if e.local_name is None else e.local_name
    shown = min(size, 2**32 - 1)
    fields = 0, e.flags, e.method, 0, 0, crc, shown, shown, len(name), len(e.local_extra)
    return struct.pack("<4s5H3L2H", b"PK\3\4", *fields) + name + e.local_extra + e.data


def in_directory(e: Entry, at: int) -> bytes:
    """The entry of a record that begins at a byte."""
    crc, size = said_of(e)
    header = at if e.header is None else e.header
    extra, shown, place = b"", size, header
    if e.zip64:
        extra = struct.pack("<2H3Q", 1, 24, size, size, header)
        shown = place = 2**32 - 1
    extra = extra if e.extra is None else e.extra
    about = 0, 0, e.flags, e.method, 0, 0, crc, shown, shown, len(e.raw), len(extra)
    fields = *about, 0, e.disk, 0, 0, place
    return struct.pack("<4s6H3L5H2L", b"PK\1\2", *fields) + e.raw + extra


def zip_end(n: int, directory_bytes: int, at: int, *, end64: bool = False, **end: int) -> bytes:
    out = b""
    if end64:
        count = end.get("end64_count", n)
        out += struct.pack(
            "<4sQ2H2L4Q",
            b"PK\6\6",
            44,
            0,
            0,
            0,
            0,
            count,
            count,
            end.get("end64_length", directory_bytes),
            end.get("end64_start", at),
        )
        out += struct.pack(
            "<4sLQL", b"PK\6\7", 0, end.get("end64_at", at + directory_bytes), end.get("disks", 1)
        )
    return out + struct.pack(
        "<4s4H2LH",
        b"PK\5\6",
        end.get("disk", 0),
        0,
        min(end.get("here", n), 65535),
        min(end.get("count", n), 65535),
        min(end.get("length", directory_bytes), 2**32 - 1),
        min(end.get("start", at), 2**32 - 1),
        end.get("comment", 0),
    )
