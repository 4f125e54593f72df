"""Whether a checkpoint is whole: every file, exact cover, and with `deep` every byte, every copy,
every number."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path
from typing import TypeVar

import torch
from isal.isal_zlib import crc32, crc32_combine

from megatron_ucp import say
from megatron_ucp.core.flat import FlatBuffer, Member
from megatron_ucp.core.layout import Replicate
from megatron_ucp.core.manifest import Manifest
from megatron_ucp.core.plan import Slot, make_plan, padding
from megatron_ucp.core.proof import prove
from megatron_ucp.errors import (
    DamagedFileError,
    ForeignFileError,
    NotFoundError,
    UcpError,
    UnsafePickleError,
    UsageError,
    some_of,
)
from megatron_ucp.formats.base import ByteFile, Checkpoint, Record
from megatron_ucp.formats.pt.values import ITEMSIZE
from megatron_ucp.formats.registry import find_checkpoint, open_checkpoint
from megatron_ucp.formats.rule_file import read_rules
from megatron_ucp.reshard.each_file import damaged_files
from megatron_ucp.reshard.execute import TORCH_DTYPES
from megatron_ucp.reshard.file_source import pool
from megatron_ucp.reshard.findings import Finding, Progress, finding_of, some
from megatron_ucp.reshard.one_parameter import (
    HeldAt,
    first_slot,
    one_parameter,
    read_copy,
    slots_of,
)

_T = TypeVar("_T")
_BLOCK_BYTES = 2 * 2**20  # fits a core's cache
_PIECE_BYTES = (
    64 * 2**20
)  # what one thread takes of a record: a checkpoint may have a single large one


@dataclass(frozen=True)
class Verified:
    """What was looked at, and what is wrong. True where nothing is. `notes` say what could not be
    checked, `deep` whether every byte was read."""

    path: str
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]
    files: int
    read_bytes: int
    deep: bool = False

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.findings

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        read = "tensors were not read: --deep does that"
        if self.deep:
            read = f"{say.amount(self.read_bytes)} read"
        files = f"{self.files} file{'s' if self.files != 1 else ''}"
        if self.ok:
            return f"{self.path}: no damage found in {files}, {read}"
        return f"{self.path}: {some(len(self.findings), 'fault')} found in {files}, {read}"

    def raise_if_damaged(self) -> None:
        """Raises DamagedFileError that lists every fault; returns where there is none."""
        if self.ok:
            return
        shown = [": ".join(filter(None, (one.file, one.what))) for one in self.findings]
        raise DamagedFileError(
            "the checkpoint is damaged",
            file=self.path,
            expected="a whole checkpoint",
            found=some_of(shown, between="; "),
            fix="restore these files, or load another tag: `megatron-ucp ls` lists them",
        )


@say.shown("verify")
def verify(
    path: str | Path,
    *,
    tag: str | None = None,
    deep: bool = False,
    allow_nan: bool = False,
    progress: Progress | None = None,
    rules: str | Path | None = None,
) -> Verified:
    """Checks that a checkpoint is whole: that every file is there and belongs to the save, and that
    every parameter is covered exactly.

    Args:
        path: A tag folder, or the folder above it.
        tag: The tag in `path`, where it is not the newest.
        deep: Whether to read everything: every record is compared with its CRC-32, and copies of
            one parameter with each other; a note says where NaN is, as a run that diverged is no
            damage.
        allow_nan: Whether to leave out the search for NaN.
        progress: `progress(done, total)` counts bytes.
        rules: A file of rules (docs/reference/rules.md), where no family knows the layouts.

    Returns:
        What was found: true where nothing is wrong, else `findings` with every fault.

    Raises:
        NotFoundError: Where there is no checkpoint, or no such file of rules.
        UnsupportedError: For a checkpoint that this version does not read.
        RuleError: For rules that don't fit it.

    Example:
        >>> import megatron_ucp as ucp
        >>> ucp.verify("runs/llama", deep=True).raise_if_damaged()
    """
    known = read_rules(rules) if rules is not None else None
    found = find_checkpoint(path, tag)
    findings: list[Finding] = []
    try:
        with open_checkpoint(found.folder, rules=known) as checkpoint:
            notes, read_bytes = _look(checkpoint, deep, allow_nan, findings, progress)
            listed = checkpoint.recorded.files if checkpoint.recorded is not None else ()
            files = len({*checkpoint.file_names, *(entry.name for entry in listed)})
        notes = [*found.notes, *notes]
    except (DamagedFileError, ForeignFileError, UnsafePickleError, NotFoundError) as error:
        more, files, read_bytes = damaged_files(found.folder, deep)
        seen = {one.file for one in more}
        findings = [one for one in (*findings, finding_of(error)) if one.file not in seen] + more
        notes = [*found.notes]
    once = tuple(dict.fromkeys(findings))
    said = tuple(dict.fromkeys(notes))
    return Verified(str(found.folder), once, said, files, read_bytes, deep)


def _look(
    checkpoint: Checkpoint,
    deep: bool,
    allow_nan: bool,
    findings: list[Finding],
    progress: Progress | None,
) -> tuple[list[str], int]:
    """Adds what is wrong with a checkpoint that could be opened; returns notes, and the bytes that
    were read."""
    names = checkpoint.file_names
    for name in names:
        _noted(findings, lambda name=name: checkpoint.check(name))
    _noted(findings, checkpoint.check_beside)
    bare = [name for name in names if not checkpoint.file(name).has_checksums]
    notes = [*checkpoint.notes, *(f"{name} has no checksums" for name in bare)]
    if not deep:
        _noted(findings, lambda: _check_cover(checkpoint.manifest))
        return notes, 0
    read_bytes, more = _check_records(checkpoint, names, allow_nan, findings, progress)
    findings += _copies(checkpoint)
    _noted(findings, lambda: findings.extend(_copies_of_partitions(checkpoint)))
    return notes + more, read_bytes


def _noted(findings: list[Finding], check: Callable[[], _T]) -> _T | None:
    """What a check returns. What it raises is a finding."""
    try:
        return check()
    except UsageError:
        raise
    except UcpError as error:
        findings.append(finding_of(error))


def _check_cover(manifest: Manifest) -> None:
    """Every element of every state of every parameter lies somewhere: a plan for the whole of it
    exists, and is proved."""
    for spec in manifest.params:
        held = manifest.states_of(spec.name)
        # all other states are cut alike
        for state in dict.fromkeys([next(iter(held)), *(held.keys() & manifest.uncut)]):
            target = one_parameter(manifest, spec.name, {state: held[state]})
            wants = [(slot, state) for slot in slots_of(target, state)]
            prove(make_plan(manifest, target, wants), manifest, target)


# ------------------------------------------------ every byte


def _check_records(
    checkpoint: Checkpoint,
    names: list[str],
    allow_nan: bool,
    findings: list[Finding],
    progress: Progress | None,
) -> tuple[int, list[str]]:
    """Compares every record of every file with its CRC-32, on all cores, and looks at the cover
    meanwhile; returns the bytes that were read, and a note about NaN."""
    scanned = [
        _Scanned(checkpoint.file(name), record, "" if allow_nan else _floating(dtype))
        for name in names
        for record, dtype in checkpoint.records(name)
    ]
    unused = {} if allow_nan else _noted(findings, lambda: _padding(checkpoint)) or {}
    pieces = [piece for one in scanned for piece in one.pieces(unused)]
    total, done = sum(piece.size for piece in pieces), 0
    with pool() as threads:
        scans = threads.map(_scan, pieces)
        _noted(findings, lambda: _check_cover(checkpoint.manifest))
        for piece, (crc, has_nan) in zip(pieces, scans, strict=True):
            piece.of.add(crc, piece.size, has_nan)
            done += piece.size
            if progress is not None:
                progress(done, total)
    findings += _wrong_records(scanned)
    return total, _nan_note(scanned)


@dataclass
class _Scanned:
    """A record, and what was found of it so far: the CRC-32, and whether NaN is in it. None is
    looked for without a `dtype`."""

    file: ByteFile
    record: Record
    dtype: str
    crc: int = 0
    has_nan: bool = False

    def pieces(self, unused: Mapping[tuple[str, str], list[tuple[int, int]]]) -> Iterator["_Piece"]:
        """What the threads take of it, in order."""
        not_owned = unused.get((self.file.path, self.record.name), [])
        for low in range(0, self.record.size_bytes, _PIECE_BYTES):
            size = min(_PIECE_BYTES, self.record.size_bytes - low)
            yield _Piece(self, low, size, not_owned)

    def add(self, crc: int, size: int, has_nan: bool) -> None:
        """Says what is found in the next piece."""
        self.crc = crc32_combine(self.crc, crc, size)
        self.has_nan |= has_nan


@dataclass(frozen=True)
class _Piece:
    """Bytes [low, low + size) of a record. `unused` are those of all of it that no parameter
    owns."""

    of: _Scanned
    low: int
    size: int
    unused: list[tuple[int, int]]


def _nan_note(scanned: list[_Scanned]) -> list[str]:
    """A run that diverged is no damage: the files hold what it had."""
    places = [f"{Path(one.file.path).name}: {one.record.name}" for one in scanned if one.has_nan]
    return [f"NaN, as a run has that diverged, in {some_of(places)}"] if places else []


def _floating(dtype: str) -> str:
    """The dtype, if it can hold NaN, else ""."""
    return dtype if dtype in TORCH_DTYPES and TORCH_DTYPES[dtype].is_floating_point else ""


def _wrong_records(scanned: list[_Scanned]) -> Iterator[Finding]:
    for one in scanned:
        if one.file.has_checksums and one.crc != one.record.crc32:
            yield Finding("a record has a wrong checksum", one.file.path, one.record.name)


def _padding(checkpoint: Checkpoint) -> dict[tuple[str, str], list[tuple[int, int]]]:
    """Bytes [start, stop) of records that no parameter owns. ZeRO-3 never sets them: what was in
    the memory gets saved."""
    manifest = checkpoint.manifest
    out: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for b, buffer in enumerate(manifest.buffers):
        for cut, part, (state, dtype) in product(
            manifest.cuts_of(buffer), range(buffer.partitions), buffer.states
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


def _scan(piece: _Piece) -> tuple[int, bool]:
    """CRC-32 of a piece, and whether it holds NaN."""
    one, end = piece.of, piece.low + piece.size
    buffer, crc, nan = bytearray(min(_BLOCK_BYTES, piece.size)), 0, False
    for start in range(piece.low, end, _BLOCK_BYTES):
        block = memoryview(buffer)[: min(_BLOCK_BYTES, end - start)]
        one.file.read_into(one.record, start, block)
        crc = crc32(block, crc)
        if one.dtype and not nan and _has_nan(block, one.dtype):
            for first, stop in piece.unused:
                first, stop = (min(max(at - start, 0), len(block)) for at in (first, stop))
                block[first:stop] = bytes(stop - first)
            nan = _has_nan(block, one.dtype)
    return crc, nan


def _has_nan(block: memoryview, dtype: str) -> bool:
    """A finite sum has no NaN in it, and takes a tenth of the time of looking at every number."""
    values = torch.frombuffer(block, dtype=TORCH_DTYPES[dtype])
    if dtype in ("float32", "bfloat16", "float64") and bool(values.sum().isfinite()):
        return False
    return bool((values.float() if values.element_size() == 1 else values).isnan().any())


# ------------------------------------------------ every copy


def _copies(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Parameters of which several places hold a copy, and the copies differ."""
    manifest = checkpoint.manifest
    for name in manifest.holders:
        for (one, other), (state, dtype) in product(
            _pairs(manifest, name), manifest.states_of(name).items()
        ):
            if _differ(checkpoint, one, other, state, dtype):
                file = checkpoint.where(first_slot(manifest, other, state)).file
                yield Finding(
                    f"two copies of the state {state} differ",
                    file.path,
                    name,
                    "the same bits",
                    f"{_said(manifest, one)} and {_said(manifest, other)}",
                )


def _copies_of_partitions(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Uncut members of which several partitions keep a copy, and the copies differ. Raises
    ForeignFileError for a partition that keeps other members than it has to."""
    manifest = checkpoint.manifest
    for b, buffer in enumerate(manifest.buffers):
        for (state, dtype), cut in product(buffer.states, manifest.cuts_of(buffer)):
            if state in buffer.uncut:
                slots = [Slot(b, cut, part, state) for part in range(buffer.partitions)]
                lies = buffer.of(state)
                for slot in slots:
                    if lies.elems(slot.part):
                        checkpoint.where(slot)
                for member in buffer.members:
                    yield from _copies_of_member(checkpoint, lies, member, slots, dtype)


def _copies_of_member(
    checkpoint: Checkpoint, lies: FlatBuffer, member: Member, slots: list[Slot], dtype: str
) -> Iterator[Finding]:
    parts = lies.copies(member)
    bits = [
        _read(checkpoint, slots[part], lies.offset(member, part, 0), member.size, dtype)
        for part in (parts if len(parts) > 1 else ())
    ]
    if any(one != bits[0] for one in bits):
        last = slots[parts[-1]]
        yield Finding(
            f"two copies of the state {last.state} differ",
            checkpoint.where(last).file.path,
            member.param,
            "the same bits",
            f"partitions {parts[0]} and {parts[-1]}",
        )


def _read(checkpoint: Checkpoint, slot: Slot, low: int, elems: int, dtype: str) -> bytearray:
    """Elements of a slot, from `low` on."""
    where, out = checkpoint.where(slot), bytearray(elems * ITEMSIZE[dtype])
    at = where.offset_bytes + low * ITEMSIZE[dtype]
    where.file.read_into(where.record, at, memoryview(out))
    return out


def _differ(checkpoint: Checkpoint, one: HeldAt, other: HeldAt, state: str, dtype: str) -> bool:
    size = checkpoint.manifest.member(one.buffer, one.member).size
    step = _BLOCK_BYTES // ITEMSIZE[dtype]
    return any(
        read_copy(checkpoint, one, state, dtype, low, min(low + step, size))
        != read_copy(checkpoint, other, state, dtype, low, min(low + step, size))
        for low in range(0, size, step)
    )


def _pairs(manifest: Manifest, name: str) -> list[tuple[HeldAt, HeldAt]]:
    """Places that hold the same elements of a parameter, each with the next one."""
    alike = isinstance(manifest.by_name[name].layout, Replicate)
    same: dict[object, list[HeldAt]] = {}
    for b, m in manifest.holders[name]:
        for cut in manifest.cuts_of(manifest.buffers[b]):
            key = () if alike else (cut, manifest.member(b, m).chunk)
            same.setdefault(key, []).append(HeldAt(b, m, cut))
    return [pair for places in same.values() for pair in pairwise(places)]


def _said(manifest: Manifest, place: HeldAt) -> str:
    at = (*manifest.buffers[place.buffer].at, *place.cut)
    return ", ".join(f"{axis} {index}" for axis, index in at) or "the first"
