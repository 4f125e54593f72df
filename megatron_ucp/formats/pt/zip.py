"""The directory of a zip archive: every number in it is checked against the file's size and against
the other records before it is used."""

import re
import struct
from collections.abc import Callable, Iterator
from typing import NamedTuple

from megatron_ucp.formats.byte_files import damaged

MAX_RECORDS = 4_000_000
MAX_DIRECTORY_BYTES = 512 * 2**20
_CAP16, _CAP32 = 0xFFFF, 0xFFFFFFFF  # "the value stands in the ZIP64 field"

_MALFORMED = "the zip directory is malformed"

END = struct.Struct("<4s4H2LH")  # end of central directory
END64_LOCATOR = struct.Struct("<4sLQL")
END64 = struct.Struct("<4sQ2H2L4Q")
# signature, flags, method, CRC-32, stored size, size, lengths of name, extra field and comment,
# disk, offset of the local header
_CENTRAL = struct.Struct("<4s4x2H4x3L4H6xL")
LOCAL = struct.Struct("<4s5H3L2H")
# how a torch file of before 1.6 begins
_LEGACY_TORCH = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
REFUSED_FLAGS = 0x0001 | 0x0020 | 0x0040 | 0x2000  # encrypted, patched, strongly encrypted, masked


class ZipEntry(NamedTuple):
    """A record as the central directory knows it: the payload's place needs its local header."""

    header_bytes: int  # offset of the local header
    size_bytes: int
    crc32: int
    limit_bytes: int  # where the next record, or the directory, begins


def find_directory(
    size_bytes: int, read: Callable[[int, int], bytes], path: str
) -> tuple[int, bytes]:
    """Offset and bytes of the central directory of a file of `size_bytes`, whose place is checked
    against that size; `read(offset, size)` gives its bytes. Raises DamagedFileError."""
    _check_head(read(0, min(size_bytes, len(_LEGACY_TORCH))), path)
    tail = read(size_bytes - min(size_bytes, 98), min(size_bytes, 98))
    count, length, start = _bounds(tail, size_bytes, path)
    if count > MAX_RECORDS or length > MAX_DIRECTORY_BYTES or count * _CENTRAL.size > length:
        damaged(
            path,
            "the zip directory is of an impossible size",
            f"at most {MAX_RECORDS} records",
            f"{count} records in {length} bytes",
        )
    return start, read(start, length)


def _bounds(tail: bytes, size_bytes: int, path: str) -> tuple[int, int, int]:
    """Records of the directory, its bytes and its offset, as the `tail` of the file says them."""
    if len(tail) < END.size or not tail[-END.size :].startswith(b"PK\5\6"):
        damaged(path, "the file is truncated", "a zip directory at its end", f"{size_bytes} bytes")
    _, disk, first_disk, here, count, length, start, comment = END.unpack(tail[-END.size :])
    end = size_bytes - END.size
    if start + length != end:  # torch always writes ZIP64 records, between directory and end
        end = size_bytes - 98
        short = here, count, length, start
        here, count, length, start = _zip64_end(tail, short, end, path)
    if disk or first_disk or comment or here != count or start + length != end:
        damaged(path, _MALFORMED, f"it ends at byte {end}", f"{length} bytes from byte {start}")
    return count, length, start


def _zip64_end(tail: bytes, short: tuple[int, ...], end: int, path: str) -> list[int]:
    """Records here, records, directory bytes and its offset of the ZIP64 end record, which begins
    at byte `end` and agrees with the `short` one."""
    if len(tail) == 98 and tail.startswith(b"PK\6\6") and tail.startswith(b"PK\6\7", 56):
        locator = END64_LOCATOR.unpack_from(tail, 56)[1:]
        _, length, _, _, disk, first_disk, *found = END64.unpack_from(tail)
        caps = _CAP16, _CAP16, _CAP32, _CAP32
        agree = all(few in (many, cap) for few, many, cap in zip(short, found, caps, strict=True))
        one_disk = locator == (0, end, 1) and not (disk or first_disk)
        if agree and one_disk and length == END64.size - 12:
            return found
    damaged(path, _MALFORMED, "an end record that agrees with the file's size", None)


def _check_head(head: bytes, path: str) -> None:
    """Raises DamagedFileError for the first bytes of what is no archive."""
    if head == _LEGACY_TORCH:
        damaged(
            path,
            "the file is a legacy torch file of before version 1.6",
            "a zip archive",
            None,
            "load and save it again with torch",
        )
    if not head.startswith(b"PK\3\4"):
        damaged(
            path, "the file is no torch .pt file", "a zip archive", f"it begins with {head[:8]!r}"
        )


_PLAIN_NAME = re.compile(r"((?!\.\.?/)[^/\\\x00-\x1f\x7f]+/)+(?!\.\.?\Z)[^/\\\x00-\x1f\x7f]+")


def parse_directory(directory: bytes, start: int, path: str) -> dict[str, ZipEntry]:
    """All records of the central directory, which starts at byte `start`, none reaching into
    another."""
    found: list[tuple[int, int, int, str]] = []  # header offset, size, CRC-32, name
    at = 0
    while at < len(directory):
        if at + _CENTRAL.size > len(directory):
            left = len(directory) - at
            damaged(path, _MALFORMED, "whole entries", f"{left} bytes left over")
        (
            mark,
            flags,
            method,
            crc32,
            stored,
            size_bytes,
            name_bytes,
            extra_bytes,
            comment_bytes,
            disk,
            header,
        ) = _CENTRAL.unpack_from(directory, at)
        name_at = at + _CENTRAL.size
        extra_at = name_at + name_bytes
        at = extra_at + extra_bytes + comment_bytes
        if mark != b"PK\1\2" or disk or at > len(directory):
            damaged(path, _MALFORMED, "an entry", f"entry {len(found)}")
        if _CAP32 in (stored, size_bytes, header):
            extra = directory[extra_at : extra_at + extra_bytes]
            size_bytes, stored, header = _zip64(extra, (size_bytes, stored, header), path)
        if flags & REFUSED_FLAGS or method or stored != size_bytes:
            damaged(
                path,
                "a record is compressed or encrypted",
                "stored records, as torch writes them",
                f"entry {len(found)}, method {method}, flags {flags:#x}",
            )
        found.append((header, size_bytes, crc32, _name(directory[name_at:extra_at], path)))
    return _bound(found, start, path)


def _name(raw: bytes, path: str) -> str:
    try:
        name = raw.decode("utf-8")
    except UnicodeDecodeError:
        name = ""
    if not _PLAIN_NAME.fullmatch(name):
        damaged(path, "a record's name is not plain", "<archive>/<name>", ascii(raw[:100]))
    return name


def _zip64(extra: bytes, values: tuple[int, int, int], path: str) -> Iterator[int]:
    """The values (size, stored size, header offset), those at their cap from the ZIP64 field."""
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, at)
        at += 4
        if kind == 1 and 8 * values.count(_CAP32) <= length <= len(extra) - at:
            large = iter(struct.unpack_from(f"<{length // 8}Q", extra, at))
            return (next(large) if value == _CAP32 else value for value in values)
        at += len(extra) if kind == 1 else length
    damaged(path, _MALFORMED, "a ZIP64 field for each large value", None)


def _bound(found: list[tuple[int, int, int, str]], start: int, path: str) -> dict[str, ZipEntry]:
    """Gives each record the place where the next one begins as its limit, and checks that it ends
    before that."""
    limits: dict[str, int] = {}
    limit = start
    for header, size_bytes, _, name in sorted(found, reverse=True):
        if header + LOCAL.size + len(name) + size_bytes > limit:
            damaged(
                path,
                f"record {name} reaches into another or past the end",
                f"an end before byte {limit}",
                f"{size_bytes} bytes from byte {header}",
            )
        if name in limits:
            damaged(path, "a record's name is there twice", None, name)
        limits[name], limit = limit, header
    return {
        name: ZipEntry(header, size_bytes, crc32, limits[name])
        for header, size_bytes, crc32, name in found
    }


def root_of(entries: dict[str, ZipEntry], path: str) -> str:
    roots = {name.partition("/")[0] for name in entries}
    if len(roots) != 1 or f"{next(iter(roots))}/data.pkl" not in entries:
        damaged(
            path,
            "the archive was not written by torch",
            "one folder with a data.pkl",
            f"{len(entries)} records in {len(roots)} folders",
        )
    return roots.pop()
