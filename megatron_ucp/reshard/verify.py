"""Whether a checkpoint is whole: every file, exact cover, and with `deep` every byte, every copy,
every number."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path

import torch
from isal.isal_zlib import crc32, crc32_combine

from megatron_ucp.core.flat import Member
from megatron_ucp.core.layout import Replicate
from megatron_ucp.core.manifest import Manifest
from megatron_ucp.core.plan import Cut, Slot, cuts_of, make_plan, padding, prove
from megatron_ucp.errors import (
    DamagedFileError,
    NotFoundError,
    UcpError,
    UnsafePickleError,
    UsageError,
)
from megatron_ucp.formats.deepspeed.paths import resolve
from megatron_ucp.formats.deepspeed.whole import check_file
from megatron_ucp.formats.pt.reader import PtFile, Record
from megatron_ucp.formats.pt.values import ITEMSIZE, storages_of
from megatron_ucp.formats.registry import Checkpoint, open_checkpoint
from megatron_ucp.reshard.diff import one_parameter
from megatron_ucp.reshard.execute import DTYPES
from megatron_ucp.reshard.windows import pool

_BLOCK_BYTES = 2 * 2**20  # fits a core's cache
_PIECE_BYTES = (
    64 * 2**20
)  # what one thread takes of a record: a checkpoint may have a single large one
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong."""

    what: str
    file: str = ""
    parameter: str = ""
    expected: str = ""
    found: str = ""


@dataclass(frozen=True)
class Verified:
    """What was looked at, and what is wrong. `notes` say what could not be checked."""

    path: str
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]
    files: int
    read_bytes: int


def verify(
    path: str | Path,
    tag: str | None = None,
    deep: bool = False,
    allow_nan: bool = False,
    progress: Progress | None = None,
    rules: str | Path | None = None,
) -> Verified:
    """Checks that every file is there and belongs to the save, and that every parameter is covered
    exactly.

    `deep` also compares every record with its CRC-32, copies of one parameter (tied ones, and those
    that tensor-parallel ranks each have) with each other, and looks for NaN unless `allow_nan`.
    `progress(done, total)` counts bytes. `rules` is a file of rules (docs/rules.md). Raises
    NotFoundError where there is no checkpoint, UnsupportedError for one that this version does not
    read, RuleError.
    """
    folder = resolve(path, tag)
    findings: list[Finding] = []
    try:
        with open_checkpoint(folder, rules=rules) as checkpoint:
            names = checkpoint.file_names
            for name in names:
                _note(findings, lambda name=name: check_file(checkpoint, name))
            for name in set(checkpoint.recorded.files) - set(names):
                _note(findings, lambda name=name: checkpoint.recorded.read(name))
            notes = [
                *checkpoint.notes,
                *(
                    f"{name} has no checksums"
                    for name in names
                    if not checkpoint.file(name).has_checksums
                ),
            ]
            read = 0
            if deep:
                read = _check_records(checkpoint, names, allow_nan, findings, progress)
                findings += _copies(checkpoint)
            else:
                _note(findings, lambda: _check_cover(checkpoint.manifest))
            return Verified(
                str(folder), tuple(dict.fromkeys(findings)), tuple(notes), len(names), read
            )
    except (DamagedFileError, UnsafePickleError, NotFoundError) as error:
        return Verified(str(folder), (*findings, finding_of(error)), (), 0, 0)


def finding_of(error: UcpError) -> Finding:
    shown = [
        str(value) if value is not None else ""
        for value in (error.file, error.parameter, error.expected, error.found)
    ]
    return Finding(error.problem, *shown)


def _note(findings: list[Finding], check: Callable[[], object]) -> None:
    try:
        check()
    except UsageError:
        raise
    except UcpError as error:
        findings.append(finding_of(error))


def _check_cover(manifest: Manifest) -> None:
    """Every element of every state of every parameter lies somewhere: a plan for the whole of it
    exists, and is proved."""
    for spec in manifest.params:
        state, dtype = manifest.buffers[manifest.holders[spec.name][0][0]].states[
            0
        ]  # all states of a buffer are cut alike
        target = one_parameter(spec, {state: dtype})
        prove(
            make_plan(manifest, target, [(Slot(0, (("tp", 0),), 0, state), state)]),
            manifest,
            target,
        )


# ------------------------------------------------ every byte


def _check_records(
    checkpoint: Checkpoint,
    names: list[str],
    allow_nan: bool,
    findings: list[Finding],
    progress: Progress | None,
) -> int:
    """Compares every record of every file with its CRC-32, on all cores, and looks at the cover
    meanwhile; returns the bytes that were read."""
    records = [
        (file, record, dtype)
        for file in map(checkpoint.file, names)
        for record, dtype in _records(file)
    ]
    total, done = sum(record.size_bytes for _, record, _ in records), 0
    unused: dict[tuple[str, str], list[tuple[int, int]]] = {}
    if not allow_nan:
        _note(findings, lambda: unused.update(_padding(checkpoint)))

    def scan(place: tuple[int, int]) -> tuple[int, bool]:
        file, record, dtype = records[place[0]]
        looks = not allow_nan and dtype in DTYPES and DTYPES[dtype].is_floating_point
        return _scan(
            file, record, place[1], dtype if looks else "", unused.get((file.path, record.name), [])
        )

    pieces = [
        (number, low)
        for number, (_, record, _) in enumerate(records)
        for low in range(0, record.size_bytes, _PIECE_BYTES)
    ]
    sums, nans = [0] * len(records), set[int]()
    with pool() as threads:
        scans = threads.map(scan, pieces)
        _note(findings, lambda: _check_cover(checkpoint.manifest))
        for (number, low), (crc, nan) in zip(pieces, scans, strict=True):
            size = min(_PIECE_BYTES, records[number][1].size_bytes - low)
            sums[number], done = crc32_combine(sums[number], crc, size), done + size
            nans |= {number} if nan else set()
            if progress is not None:
                progress(done, total)
    for number, (file, record, _) in enumerate(records):
        wrong = file.has_checksums and sums[number] != record.crc32
        findings += [
            Finding(what, file.path, record.name)
            for what, found in (
                ("a record has a wrong checksum", wrong),
                ("a record holds NaN", number in nans),
            )
            if found
        ]
    return total


def _records(file: PtFile) -> Iterator[tuple[Record, str]]:
    """Every record with the dtype of the tensors in it; "" where it holds none."""
    dtypes = {
        f"{file.root}/data/{storage.key}": storage.dtype for storage in storages_of(file.tree)
    }
    for name in file.records:
        yield file.records[name], dtypes.get(name, "")


def _padding(checkpoint: Checkpoint) -> dict[tuple[str, str], list[tuple[int, int]]]:
    """Bytes [start, stop) of records that no parameter owns. ZeRO-3 never sets them: what was in
    the memory gets saved."""
    manifest = checkpoint.manifest
    out: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for b, buffer in enumerate(manifest.buffers):
        for cut, part, (state, dtype) in product(
            cuts_of(manifest, buffer), range(buffer.partitions), buffer.states
        ):
            slot = Slot(b, cut, part, state)
            for fill in padding(buffer, slot):
                where = checkpoint.where(slot)
                first, stop = (
                    where.offset_bytes + min(at, where.elems) * ITEMSIZE[dtype]
                    for at in (fill.start, fill.stop)
                )
                out.setdefault((where.file.path, where.record.name), []).append((first, stop))
    return out


def _scan(
    file: PtFile, record: Record, low: int, dtype: str, unused: list[tuple[int, int]]
) -> tuple[int, bool]:
    """CRC-32 of a piece of a record that begins at byte `low`, and whether it holds NaN (never with
    dtype "")."""
    size = min(_PIECE_BYTES, record.size_bytes - low)
    buffer, crc, nan = bytearray(min(_BLOCK_BYTES, size)), 0, False
    for start in range(low, low + size, _BLOCK_BYTES):
        block = memoryview(buffer)[: min(_BLOCK_BYTES, low + size - start)]
        file.read_into(record, start, block)
        crc = crc32(block, crc)
        if dtype and not nan and _has_nan(block, dtype):
            for first, stop in unused:
                first, stop = (min(max(at - start, 0), len(block)) for at in (first, stop))
                block[first:stop] = bytes(stop - first)
            nan = _has_nan(block, dtype)
    return crc, nan


def _has_nan(block: memoryview, dtype: str) -> bool:
    """A finite sum has no NaN in it, and takes a tenth of the time of looking at every number."""
    values = torch.frombuffer(block, dtype=DTYPES[dtype])
    if dtype in ("float32", "bfloat16", "float64") and bool(values.sum().isfinite()):
        return False
    return bool((values.float() if values.element_size() == 1 else values).isnan().any())


# ------------------------------------------------ every copy


def _copies(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Parameters of which several places hold a copy, and the copies differ."""
    manifest = checkpoint.manifest
    for name, holders in manifest.holders.items():
        for (one, other), (state, dtype) in product(
            _pairs(manifest, name), manifest.buffers[holders[0][0]].states
        ):
            size = manifest.buffers[one[0]].members[one[1]].size
            step = _BLOCK_BYTES // ITEMSIZE[dtype]
            if any(
                read_copy(checkpoint, one, state, dtype, low, min(low + step, size))
                != read_copy(checkpoint, other, state, dtype, low, min(low + step, size))
                for low in range(0, size, step)
            ):
                file = checkpoint.where(_slot(checkpoint, other, state, 0)).file
                yield Finding(
                    f"two copies of the state {state} differ",
                    file.path,
                    name,
                    "the same bits",
                    f"{_said(manifest, one)} and {_said(manifest, other)}",
                )


def _pairs(manifest: Manifest, name: str) -> list[tuple["Place", "Place"]]:
    """Places that hold the same elements of a parameter, each with the next one."""
    same: dict[Cut, list[Place]] = {}
    for b, m in manifest.holders[name]:
        for cut in cuts_of(manifest, manifest.buffers[b]):
            same.setdefault(
                () if isinstance(manifest.by_name[name].layout, Replicate) else cut, []
            ).append((b, m, cut))
    return [pair for places in same.values() for pair in pairwise(places)]


Place = tuple[int, int, Cut]  # buffer, member, place along the axes that cut it


def _slot(checkpoint: Checkpoint, place: Place, state: str, low: int) -> Slot:
    buffer = checkpoint.manifest.buffers[place[0]]
    member: Member = buffer.members[place[1]]
    return Slot(place[0], place[2], buffer.owners(member, low, low + 1)[0], state)


def read_copy(
    checkpoint: Checkpoint, place: Place, state: str, dtype: str, low: int, high: int
) -> bytes:
    """Elements [low, high) of what a place holds of a parameter."""
    b, m, cut = place[0], place[1], place[2]
    buffer = checkpoint.manifest.buffers[b]
    member: Member = buffer.members[m]
    size, out = ITEMSIZE[dtype], bytearray()
    for part in buffer.owners(member, low, high) if low < high else ():
        first, last = buffer.owned(member, part)
        first, last = max(first, low), min(last, high)
        where = checkpoint.where(Slot(b, cut, part, state))
        block = bytearray((last - first) * size)
        where.file.read_into(
            where.record,
            where.offset_bytes + buffer.offset(member, part, first) * size,
            memoryview(block),
        )
        out += block
    return bytes(out)


def _said(manifest: Manifest, place: Place) -> str:
    return (
        ", ".join(f"{axis} {index}" for axis, index in (*manifest.buffers[place[0]].at, *place[2]))
        or "the first"
    )
