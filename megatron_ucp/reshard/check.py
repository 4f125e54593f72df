"""Compares checkpoints, element by element: `verify` within one, `diff` between two."""

import ctypes
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from typing import Any, TypeVar

import torch
from isal.isal_zlib import crc32, crc32_combine

from megatron_ucp import say
from megatron_ucp.core.flat import FlatBuffer, Member, alone
from megatron_ucp.core.layout import Replicate
from megatron_ucp.core.manifest import FILE_NAME, FileEntry, Manifest, ParamSpec
from megatron_ucp.core.manifest_json import MAX_BYTES, from_json
from megatron_ucp.core.mesh import Coords, Mesh
from megatron_ucp.core.names import MASTER, VALUE, Keeper
from megatron_ucp.core.plan import Slot, make_plan, padding
from megatron_ucp.core.proof import prove
from megatron_ucp.core.values import alike, same, shown
from megatron_ucp.errors import (
    DamagedFileError,
    ForeignFileError,
    NotFoundError,
    StoreError,
    UcpError,
    UnsafePickleError,
    UsageError,
    some_of,
)
from megatron_ucp.formats.byte_files import ByteFile, Record
from megatron_ucp.formats.checkpoint import Checkpoint, apart_in
from megatron_ucp.formats.folder import Folder
from megatron_ucp.formats.hugging_face.safetensors_file import SafetensorsFile
from megatron_ucp.formats.megatron.arguments import one_spelling
from megatron_ucp.formats.per_rank import RankDifferences
from megatron_ucp.formats.pt.file import PtFile
from megatron_ucp.formats.pt.refs import ITEMSIZE
from megatron_ucp.formats.pt.unpickle import VouchedClasses
from megatron_ucp.formats.registry import (
    checkpoint_folder,
    find_checkpoint,
    is_hugging_face,
    open_checkpoint,
)
from megatron_ucp.formats.rule_file import read_rules
from megatron_ucp.formats.schedules import without_groups
from megatron_ucp.formats.store import Location, folder_at, location, look_once
from megatron_ucp.reshard.checksums import check_runs
from megatron_ucp.reshard.execute import TORCH_DTYPES, bytes_of, execute
from megatron_ucp.reshard.files import WINDOW_BYTES, FileSource, Memory, ThreadMemory, pool
from megatron_ucp.reshard.findings import Finding, Progress, finding_of, some
from megatron_ucp.reshard.fingerprint import is_kept, of_path, read_slot
from megatron_ucp.reshard.hugging_face.names import told_by
from megatron_ucp.reshard.transfer import SinkPart, WindowReader, proved

# ---- one parameter
#
# One parameter for itself, whole and once, whatever the mesh that holds it: what checkpoints are
# compared in.


def one_parameter(
    source: Manifest, name: str, states: Mapping[str, str], averaged: bool = False
) -> Manifest:
    """A target that holds some states (name -> dtype) of one whole parameter of a source. Of one of
    which every rank has a copy of its own it holds all copies, or their mean if they are to be
    `averaged`."""
    spec = source.by_name[name]
    mesh, axes, layout = Mesh(), (), Replicate()
    if spec.layout.mean_over and not averaged:
        axis, layout = spec.layout.mean_over, spec.layout
        mesh, axes = replace(mesh, **{axis: source.mesh.size(axis)}), (axis,)
    buffer = alone(name, spec.elems, tuple(states.items()), axes=axes)
    return Manifest(Keeper.PAPER, mesh, (replace(spec, layout=layout, order=None),), (buffer,))


def slots_of(target: Manifest, state: str) -> list[Slot]:
    """The places of a state of `one_parameter`: one, or one for each copy."""
    return [Slot(0, cut, 0, state) for cut in target.cuts_of(target.buffers[0])]


def read_state(checkpoint: Checkpoint, name: str, state: str) -> torch.Tensor:
    """One state of one logical parameter, flat, checked against the CRC-32 of the records that it
    fills. Of a parameter with several copies the first one."""
    source = checkpoint.manifest
    dtype = source.states_of(name)[state]
    target = one_parameter(source, name, {state: dtype})
    plan = make_plan(source, target, [(slots_of(target, state)[0], state)])
    prove(plan, source, target)
    out = torch.empty(target.buffers[0].length, dtype=TORCH_DTYPES[dtype])
    counts = execute(plan, checkpoint.where, lambda _: out)
    check_runs(counts.runs, counts.records, checkpoint.opened)
    return out


@dataclass(frozen=True, slots=True)
class HeldAt:
    """A place that holds a parameter: number of the buffer, of the member, and the place along the
    axes that cut it."""

    buffer: int
    member: int
    cut: Coords


def first_slot(manifest: Manifest, place: HeldAt, state: str) -> Slot:
    """The slot with the first element of what a place holds."""
    buffer = manifest.buffers[place.buffer].of(state)
    member = buffer.members[place.member]
    return Slot(place.buffer, place.cut, buffer.owners(member, 0, 1)[0], state)


def _read_copy(checkpoint: Checkpoint, place: HeldAt, state: str, low: int, high: int) -> bytes:
    """Elements [low, high) of what a place holds of a parameter."""
    buffer = checkpoint.manifest.buffers[place.buffer].of(state)
    member = buffer.members[place.member]
    out = bytearray()
    for part in buffer.owners(member, low, high) if low < high else ():
        first, last = buffer.owned(member, part)
        first, last = max(first, low), min(last, high)
        slot = Slot(place.buffer, place.cut, part, state)
        at = buffer.offset(member, part, first)
        out += bytes_of(read_slot(checkpoint, slot, at, at + last - first))
    return bytes(out)


# ---- each file
#
# Every file of a checkpoint that can't be opened as a whole, looked at for itself: whoever has to
# restore files wants to know all of them.


_FILE_BLOCK_BYTES = 2 * 2**20
_ANYTHING = VouchedClasses(lambda key: True, None, {})  # names alone: nothing is made of them


def damaged_files(folder: Location, deep: bool) -> tuple[list[Finding], int, int]:
    """What is wrong with each file, in the order of their names; with `deep` every record of those
    that can be opened is compared with its CRC-32. How many files were looked at, and the bytes of
    the records that were read."""
    opened = folder_at(folder)
    listed = _listed(opened)
    there = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    names = sorted({*listed, *(name for name in there if name.endswith((".pt", ".safetensors")))})
    found: list[Finding] = []
    read_bytes = 0
    for name in names:
        try:
            _open(opened, name, listed.get(name))
            if deep and name.endswith(".pt"):
                read_bytes += _compare(opened, name, found)
        except StoreError:
            raise
        except UcpError as error:
            found.append(finding_of(error))
    return found, len(names), read_bytes


def _listed(folder: Folder) -> dict[str, FileEntry]:
    """What the manifest lists; nothing where there is none that can be read."""
    try:
        text = folder.small(FILE_NAME, MAX_BYTES)
        return {one.name: one for one in from_json(text, folder / FILE_NAME).files}
    except StoreError:
        raise
    except (OSError, UcpError):
        return {}


def _compare(folder: Folder, name: str, found: list[Finding]) -> int:
    """Adds each record with a wrong checksum; returns the bytes of all records."""
    total = 0
    with PtFile(folder.open(name), vouched=_ANYTHING) as file:
        for record in file.records.values():
            total += record.size_bytes
            if _sum_of(file, record) != record.crc32:
                found.append(Finding("a record has a wrong checksum", folder / name, record.name))
    return total


def _sum_of(file: PtFile, record: Record) -> int:
    crc, block = 0, memoryview(bytearray(min(_FILE_BLOCK_BYTES, record.size_bytes)))
    for low in range(0, record.size_bytes, _FILE_BLOCK_BYTES):
        part = block[: min(_FILE_BLOCK_BYTES, record.size_bytes - low)]
        file.read_into(record, low, part)
        crc = crc32(part, crc)
    return crc


def _open(folder: Folder, name: str, entry: FileEntry | None) -> None:
    """Reads the structure of a file. Raises a UcpError for one that is missing or damaged."""
    if not folder.is_file(name):
        raise NotFoundError(
            "a file that the manifest lists is missing",
            file=folder / name,
            fix="restore the file, or load another tag",
        )
    if entry is not None:
        folder.check_size(entry)
    if name.endswith(".pt"):
        with PtFile(folder.open(name), vouched=_ANYTHING) as file:
            file.tree  # noqa: B018  reading it is the check
    elif name.endswith(".safetensors"):
        SafetensorsFile(folder.open(name)).close()


# ---- verify
#
# Whether a checkpoint is whole: every file, exact cover, and with `deep` every byte, every copy,
# every number.


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
    found = look_once(path, lambda: find_checkpoint(path, tag))
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
    for name in checkpoint.prefetching(names):
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
    except (UsageError, StoreError):
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
    for one in scanned:
        if one.file.has_checksums and one.crc != one.record.crc32:
            what = "a record has a wrong checksum"
            findings.append(Finding(what, one.file.path, one.record.name))
    # a run that diverged is no damage: the files hold what it had
    places = [f"{Path(one.file.path).name}: {one.record.name}" for one in scanned if one.has_nan]
    notes = [f"NaN, as a run has that diverged, in {some_of(places)}"] if places else []
    return total, notes


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


def _floating(dtype: str) -> str:
    """The dtype, if it can hold NaN, else ""."""
    return dtype if dtype in TORCH_DTYPES and TORCH_DTYPES[dtype].is_floating_point else ""


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
        for (state, _), cut in product(buffer.states, manifest.cuts_of(buffer)):
            if state in buffer.uncut:
                slots = [Slot(b, cut, part, state) for part in range(buffer.partitions)]
                lies = buffer.of(state)
                for slot in slots:
                    if lies.elems(slot.part):
                        checkpoint.where(slot)
                for member in buffer.members:
                    yield from _copies_of_member(checkpoint, lies, member, slots)


def _copies_of_member(
    checkpoint: Checkpoint, lies: FlatBuffer, member: Member, slots: list[Slot]
) -> Iterator[Finding]:
    parts = lies.copies(member)
    held: list[torch.Tensor] = []
    for part in parts if len(parts) > 1 else ():
        at = lies.offset(member, part, 0)
        held.append(read_slot(checkpoint, slots[part], at, at + member.size))
    if any(not _same_bits(one, held[0]) for one in held):
        last = slots[parts[-1]]
        yield Finding(
            f"two copies of the state {last.state} differ",
            checkpoint.where(last).file.path,
            member.param,
            "the same bits",
            f"partitions {parts[0]} and {parts[-1]}",
        )


def _differ(checkpoint: Checkpoint, one: HeldAt, other: HeldAt, state: str, dtype: str) -> bool:
    size = checkpoint.manifest.member(one.buffer, one.member).size
    step = _BLOCK_BYTES // ITEMSIZE[dtype]
    return any(
        _read_copy(checkpoint, one, state, low, min(low + step, size))
        != _read_copy(checkpoint, other, state, low, min(low + step, size))
        for low in range(0, size, step)
    )


def _pairs(manifest: Manifest, name: str) -> list[tuple[HeldAt, HeldAt]]:
    """Places that hold the same elements of a parameter, each with the next one."""
    alike = manifest.by_name[name].layout.is_whole
    same: dict[object, list[HeldAt]] = {}
    for b, m in manifest.holders[name]:
        for cut in manifest.cuts_of(manifest.buffers[b]) if manifest.is_copy(name, b) else ():
            key = () if alike else (cut, manifest.member(b, m).chunk)
            same.setdefault(key, []).append(HeldAt(b, m, cut))
    return [pair for places in same.values() for pair in pairwise(places)]


def _said(manifest: Manifest, place: HeldAt) -> str:
    at = (*manifest.buffers[place.buffer].at, *place.cut)
    return ", ".join(f"{axis} {index}" for axis, index in at) or "the first"


# ---- diff
#
# Two checkpoints of any meshes, compared bit by bit in their canonical state; of one that holds
# weights alone the weights.


_MEMCMP = ctypes.CDLL(None).memcmp  # bits, not numbers: NaN equals itself, and -0.0 is not 0.0


@dataclass(frozen=True)
class Difference:
    """One thing that differs: a parameter (or "" for the run), what of it, and both sides as
    text. `is_setting`: it is a hyper-parameter or a step, and no element of a tensor."""

    parameter: str
    what: str
    a: str
    b: str
    is_setting: bool = field(default=False, kw_only=True)


@say.shown("diff")
def diff(
    a: str | Path,
    b: str | Path,
    *,
    progress: Progress | None = None,
    rules: str | Path | None = None,
    rules_b: str | Path | None = None,
    fingerprint: bool = False,
) -> list[Difference]:
    """Compares two checkpoints of any formats and meshes, bit by bit: parameters, shapes, fp32
    master weights, optimizer states, steps, hyper-parameters, counters, schedules.

    Training copies are not compared, as they are casts of the master weights; nor is the client
    state. Of a Hugging Face folder the weights are compared, with the other side's master weights
    rounded to its dtypes.

    Args:
        a: A tag folder, the folder above it, or a Hugging Face folder. Or a file with what
            `megatron-ucp inspect --fingerprint --json` printed of a checkpoint that lies elsewhere:
            then fingerprints are compared.
        b: The other one.
        progress: `progress(done, total)` counts bytes.
        rules: A file of rules (docs/reference/rules.md) for both.
        rules_b: Another one for `b`.
        fingerprint: Compares what the saves recorded of every parameter and state, and reads no
            tensor.

    Returns:
        Every difference; an empty list where there is none.

    Raises:
        UcpError: For a checkpoint that can't be read, or has no such record.

    Example:
        >>> import megatron_ucp as ucp
        >>> assert not ucp.diff("runs/llama", "dp3/global_step80")
    """
    if fingerprint or is_kept(a) or is_kept(b):
        sides = (a, rules), (b, rules_b or rules)
        first, second = (of_path(p, rules=r, recorded=fingerprint) for p, r in sides)
        return [Difference(*one) for one in first.compared(second)]
    with ExitStack() as opened:
        one, two = _opened(a, b, rules, rules_b or rules, opened)
        if Keeper.WEIGHTS in (one.manifest.keeper, two.manifest.keeper):
            return weight_differences(one, two, progress)
        return _differences(one, two, _run(one, two), _parameter, progress)


def weight_differences(
    one: Checkpoint,
    two: Checkpoint,
    progress: Progress | None = None,
    among: Mapping[str, ParamSpec] | None = None,
) -> list[Difference]:
    """Every difference in the weights of two checkpoints, of which at least one holds nothing else:
    the other one's masters are rounded to its dtypes. Rows of a vocabulary that are padding are not
    compared. `among` are the parameters that are looked at (None: all), without the padding that a
    checkpoint alone may not know. Raises a UcpError."""
    return _differences(one, two, (), partial(_weights, among or {}), progress, among)


def _opened(
    a: str | Path, b: str | Path, rules: Any, rules_b: Any, opened: ExitStack
) -> tuple[Checkpoint, Checkpoint]:
    """Both checkpoints. A Hugging Face folder is read under the names of the other one, where that
    is of a family."""
    twins = [is_hugging_face(checkpoint_folder(path)) for path in (a, b)]
    if twins[0] and not twins[1]:
        two = opened.enter_context(open_checkpoint(b, rules=rules_b))
        told = told_by(location(a), two.manifest)
        return opened.enter_context(open_checkpoint(a, told=told)), two
    one = opened.enter_context(open_checkpoint(a, rules=rules))
    told = told_by(location(b), one.manifest) if twins[1] else None
    return one, opened.enter_context(open_checkpoint(b, rules=rules_b, told=told))


def _differences(
    one: Checkpoint,
    two: Checkpoint,
    first: Iterable[Difference],
    compare: "Compare",
    progress: Progress | None,
    among: Collection[str] | None = None,
) -> list[Difference]:
    """What differs of the runs comes `first`, then what `compare` says of each parameter."""
    out: list[Difference | Compared] = [*first]
    with pool() as threads:  # they compare while the next parameter is planned
        job = _Job(FileSource(one), FileSource(two), threads)
        known = [manifest.by_name for manifest in job.manifests]
        if among is None and known[0].keys().isdisjoint(known[1]):
            sides = (some_of([*specs], 2) for specs in known)
            out.insert(0, Difference("", "no parameter is in both", *sides))
        try:
            for name in {**known[0], **known[1]} if among is None else among:
                if all(name in specs for specs in known):
                    out += compare(name, job)
                else:
                    here = ("present" if name in specs else "missing" for specs in known)
                    out.append(Difference(name, "parameter", *here))
            job.finish(progress)
        finally:  # also for Ctrl-C: what has not begun does not begin
            job.cancel()
    return [
        difference
        for one in out
        for difference in ([one] if isinstance(one, Difference) else one.result())
    ]


def _run(one: Checkpoint, two: Checkpoint) -> Iterator[Difference]:
    for key in ("global_steps", "global_samples", "skipped_steps"):
        a, b = one.extras.counters.get(key), two.extras.counters.get(key)
        if a != b:
            yield Difference("", key, repr(a), repr(b))
    apart = [apart_in(checkpoint) for checkpoint in (one, two)]
    if not _same_apart(*apart):
        shown_apart = (str(replace(each.what, client_state=frozenset())) for each in apart)
        yield Difference("", "values that differ from rank to rank", *shown_apart)
    a, b = one.extras.scheduler, two.extras.scheduler
    staged = max(c.manifest.mesh.pp for c in (one, two)) > 1
    if staged or len(one.manifest.groups) != len(two.manifest.groups):
        # the stages of a pipeline, and experts that other ranks share, have groups of their own;
        # their rates are compared with the parameters' hyper-parameters
        a, b = without_groups(a), without_groups(b)
    if not alike(one_spelling(a), one_spelling(b)):
        yield Difference("", "lr_scheduler", shown(a), shown(b))


def _same_apart(a: RankDifferences, b: RankDifferences) -> bool:
    """Of buffers and schedulers: the client state is the caller's, and is not compared."""
    sides = [replace(each.what, client_state=frozenset()) for each in (a, b)]
    if not any(sides):
        return True
    pairs = zip(a.ranks, b.ranks, strict=False)
    return (
        sides[0] == sides[1]
        and len(a.ranks) == len(b.ranks)
        and all(
            same(dict(one.buffers), dict(other.buffers)) and same(one.scheduler, other.scheduler)
            for one, other in pairs
        )
    )


def _parameter(name: str, job: "_Job") -> "Iterator[Difference | Compared]":
    a, b = job.specs(name)
    for what in ("shape", "kind"):
        if getattr(a, what) != getattr(b, what):
            yield Difference(name, what, str(getattr(a, what)), str(getattr(b, what)))
    if a.shape != b.shape:
        return
    yield from _states(name, job)
    for what in ("scalars_of", "group_of"):
        yield from _settings(name, *(getattr(one, what)(name) for one in job.manifests))


def _weights(
    known: Mapping[str, ParamSpec], name: str, job: "_Job"
) -> "Iterator[Difference | Compared]":
    """The weights of a parameter, in the dtype of the side that holds nothing else; `known` are
    parameters without padding."""
    a, b = job.specs(name)
    alike = a.shape == b.shape or _padded(a, b) or _padded(b, a)
    if not alike and not (name in known and known[name].shape == b.shape):
        yield Difference(name, "shape", str(a.shape), str(b.shape))
        return
    one, two = job.manifests
    sides = [weight_of(manifest, name) for manifest in job.manifests]
    if one.keeper == two.keeper and sides[0] != sides[1]:
        yield Difference(name, "dtype", *(f"torch.{dtype}" for _, dtype in sides))
        return
    alone = two if two.keeper == Keeper.WEIGHTS else one
    target = one_parameter(alone, name, {VALUE: alone.states_of(name)[VALUE]})
    first, second = ({VALUE: state} for state, _ in sides)
    yield job.compare(name, target, (first, second), frozenset({"narrow"}))[VALUE]


def _padded(larger: ParamSpec, smaller: ParamSpec) -> bool:
    """Whether one vocabulary has the rows of the other, and padding."""
    extent = larger.extent
    return extent is not None and smaller.shape == (extent.true, *larger.shape[1:])


def weight_of(manifest: Manifest, name: str) -> tuple[str, str]:
    """The state that has a parameter's weights, and its dtype: the masters, where there are any."""
    states = manifest.states_of(name)
    state = MASTER if MASTER in states else VALUE
    return state, states[state]


def _states(name: str, job: "_Job") -> "Iterator[Difference | Compared]":
    """States that one side lacks or has in another dtype; those of both are compared."""
    states = [manifest.states_of(name) for manifest in job.manifests]
    both = {state: dtype for state, dtype in states[0].items() if states[1].get(state) == dtype}
    compared = job.want(name, both) if both else {}
    for state in dict.fromkeys([*states[0], *states[1]]):
        if state not in states[0] or state not in states[1]:
            yield Difference(name, state, *("present" if state in s else "missing" for s in states))
        elif state not in both:
            yield Difference(name, f"{state} dtype", *(f"torch.{s[state]}" for s in states))
        else:
            yield compared[state]


def _settings(name: str, a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[Difference]:
    for key in sorted({*a, *b}):
        if not alike(a.get(key), b.get(key)):
            yield Difference(name, key, shown(a.get(key)), shown(b.get(key)), is_setting=True)


Compared = Future[list[Difference]]  # of one state of one parameter
Compare = Callable[[str, "_Job"], "Iterator[Difference | Compared]"]


class _Job:
    """What is read and compared, window by window."""

    def __init__(self, one: FileSource, two: FileSource, threads: ThreadPoolExecutor) -> None:
        self.sources, self.threads, self.memory = (one, two), threads, ThreadMemory()
        self.manifests = one.manifest, two.manifest
        self._waiting: list[tuple[int, Compared]] = []  # bytes, and what differs in them

    def specs(self, name: str) -> list[ParamSpec]:
        """A parameter as each side has it."""
        return [manifest.by_name[name] for manifest in self.manifests]

    def want(self, name: str, states: Mapping[str, str]) -> dict[str, Compared]:
        """Plans the comparison of some states (name -> dtype) of a parameter, and starts it. Copies
        of which every rank has its own are compared one by one, or as their mean where the sides
        have other numbers of them. Raises a UcpError."""
        layouts = [spec.layout for spec in self.specs(name)]
        copies = {
            manifest.mesh.size(layout.mean_over) if layout.mean_over else 1
            for manifest, layout in zip(self.manifests, layouts, strict=True)
        }
        averaged = len(copies) > 1
        target = one_parameter(self.manifests[0], name, states, averaged)
        allow = frozenset({"mean"}) if averaged else frozenset[str]()
        same = {state: state for state in states}
        return self.compare(name, target, (same, same), allow)

    def compare(
        self,
        name: str,
        target: Manifest,
        states: tuple[Mapping[str, str], Mapping[str, str]],
        allow: frozenset[str],
    ) -> dict[str, Compared]:
        """Starts the comparison of a parameter in the states of a target, one by one; `states` say
        which state each side has for them. Raises a UcpError."""
        sides: list[WindowReader] = []
        for source, named in zip(self.sources, states, strict=True):
            wants = tuple((s, own) for state, own in named.items() for s in slots_of(target, state))
            sides.append(source.windows(proved(source, SinkPart(target, wants), allow)))
        compared = {
            state: self.threads.submit(self._compare, name, target, state, sides)
            for state in states[0]
        }
        for state, one in compared.items():
            buffer = target.buffers[0]
            self._waiting.append((buffer.length * ITEMSIZE[buffer.dtype_of(state)], one))
        return compared

    def finish(self, progress: Progress | None) -> None:
        """Waits until all is compared, and was read as it is saved. Raises DamagedFileError."""
        total, done = sum(size for size, _ in self._waiting), 0
        for size, one in self._waiting:
            one.result()
            done += size
            if progress is not None:
                progress(done, total)
        for source in self.sources:
            source.check(thorough=False)

    def cancel(self) -> None:
        for _, one in self._waiting:
            one.cancel()

    def _compare(
        self, name: str, target: Manifest, state: str, sides: Sequence[WindowReader]
    ) -> list[Difference]:
        elems, wrong, first = target.buffers[0].length, 0, None
        for slot in slots_of(target, state):
            count, found = unequal(target, slot, sides, self.memory)
            wrong, first = wrong + count, first or found
        if first is None:
            return []
        what = f"{state}, {wrong} of {elems} elements, the first is {first[0]}"
        return [Difference(name, what, *first[1:])]


def unequal(
    target: Manifest, slot: Slot, sides: Sequence[WindowReader], memory: Memory
) -> tuple[int, tuple[int, str, str] | None]:
    """How many elements of a slot differ between two sides, and the first one: its position, and
    both values."""
    buffer = target.buffers[slot.buffer]
    dtype = buffer.dtype_of(slot.state)
    size, wrong, first = ITEMSIZE[dtype], 0, None
    step = WINDOW_BYTES // size
    for low in range(0, buffer.length, step):
        count = min(step, buffer.length - low)
        held = [memory.take(count, dtype, which) for which in range(2)]
        for side, window in zip(sides, held, strict=True):
            side.fill(slot, low, window)
        if _same_bits(*held):
            continue
        a, b = (window.view(torch.uint8).view(-1, size) for window in held)
        places = (a != b).any(1).nonzero().reshape(-1)
        at = int(places[0])
        first = first or (low + at, repr(held[0][at].item()), repr(held[1][at].item()))
        wrong += len(places)
    return wrong, first


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    pointers = (ctypes.c_void_p(memory.data_ptr()) for memory in (a, b))
    return not _MEMCMP(*pointers, ctypes.c_size_t(a.nbytes))
