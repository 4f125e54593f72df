"""What a training state is, whatever mesh, format or engine holds it: for every parameter and state
the CRC-32 of its logical bytes (row-major, without vocabulary padding), and one SHA-256 over that
table, the steps and the hyper-parameters."""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import torch

from megatron_ucp.core.box import Box, Ints, flat_boxes, flat_index, span, strides, whole
from megatron_ucp.core.flat import Member
from megatron_ucp.core.layout import Piece
from megatron_ucp.core.manifest import DIVERGED, FINGERPRINT, BufferPart, Manifest, ParamSpec
from megatron_ucp.core.plan import Slot
from megatron_ucp.errors import ForeignFileError, UsageError, some_of
from megatron_ucp.formats.checkpoint import Checkpoint
from megatron_ucp.formats.optimizers import rule_of
from megatron_ucp.formats.pt.refs import ITEMSIZE
from megatron_ucp.formats.registry import open_checkpoint
from megatron_ucp.formats.store import location
from megatron_ucp.reshard import agree
from megatron_ucp.reshard.checksums import KnownSums, linear, of_runs, shifted, standard
from megatron_ucp.reshard.engine import Holder
from megatron_ucp.reshard.execute import TORCH_DTYPES, bytes_of
from megatron_ucp.reshard.messages import Ranks
from megatron_ucp.reshard.options import read_json
from megatron_ucp.reshard.threads import in_own_threads

RULE = "stepped as"  # among the settings of a parameter: what its optimizer computes, such as AdamW
# Switches of how torch computes a step, on which no value depends.
_NOT_OF_STEPS = frozenset({"foreach", "fused", "capturable", "differentiable"})
PARTS = ("table", "settings")  # of a fingerprint, as JSON names them
Table = Mapping[str, Mapping[str, str]]  # parameter -> state -> dtype and CRC-32
# parameter, state, dtype, share, its holder, partition
ShareKey = tuple[str, str, str, Box, tuple[int, Any], int]
Sums = dict[ShareKey, int]  # what one rank's memory adds to the whole
StateKey = tuple[str, str]  # parameter, state
# elements [first, last) of a slot, flat: of one parameter, as they lie
ReadRun = Callable[[Slot, int, int], torch.Tensor]
Only = Callable[[Slot, str], bool]  # whether a parameter in a slot counts


@dataclass(frozen=True)
class Fingerprint:
    """`table` has the CRC-32 of every parameter and state; `settings` what each parameter is
    stepped with."""

    table: Table
    settings: Mapping[str, Any]

    @cached_property
    def digest(self) -> str:
        """The SHA-256 of all of it."""
        text = json.dumps([self.table, self.settings], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def __str__(self) -> str:
        return self.digest

    def differences(self, other: "Fingerprint") -> list[str]:
        """What differs, by name; empty where both are of one state."""
        return [f"{name} ({what})" for name, what, _, _ in self.compared(other)]

    def compared(self, other: "Fingerprint") -> Iterator[tuple[str, str, str, str]]:
        """Each parameter that differs, what of it, and both sides as text."""
        for name in sorted({*self.table, *other.table}):
            a, b = self.table.get(name, {}), other.table.get(name, {})
            for state in sorted({*a, *b}):
                if a.get(state) != b.get(state):
                    yield name, state, a.get(state, "missing"), b.get(state, "missing")
        for name in sorted({*self.settings, *other.settings}):
            a, b = self.settings.get(name, {}), other.settings.get(name, {})
            if a != b:
                yield name, "steps or hyper-parameters", _without(a, b), _without(b, a)


# ------------------------------------------------ what one rank holds


@dataclass(frozen=True)
class HeldPart:
    """A box of a parameter that lies in a rank's `memory`, from its begin on: `held` says where it
    is in a tensor of `shape`, which is the parameter without padding, or all of that as one dim."""

    key: ShareKey
    shape: Ints
    memory: torch.Tensor
    held: Piece

    @property
    def size_bytes(self) -> int:
        return self.held.full.numel * self.memory.element_size()

    @property
    def place(self) -> tuple[int, int]:
        """Where the memory begins, and how many bytes there are."""
        return self.memory.data_ptr(), self.memory.nbytes


def sums_of(
    manifest: Manifest,
    wants: Iterable[tuple[Slot, str]],
    read: ReadRun,
    only: Only = lambda slot, param: True,
    sizes: Counter[StateKey] | None = None,
    copies: bool = False,
) -> Sums:
    """What a rank's memory of some slots adds to the CRC-32s of their parameters; see `held_parts`.
    `sizes` grows by the bytes of each."""
    parts = [*held_parts(manifest, wants, read, only, copies)]
    if sizes is not None:
        for part in parts:
            sizes[part.key[:2]] += part.size_bytes
    return sums_of_parts(parts)


def sums_of_parts(parts: Sequence[HeldPart], known: KnownSums | None = None) -> Sums:
    """What parts of a rank's memory add to the CRC-32s of their parameters. Memory whose sum is
    `known` is not looked at."""
    size_bytes = sum(part.size_bytes for part in parts)
    sums = in_own_threads(lambda part: _sum(part, known or KnownSums()), parts, size_bytes)
    out: Sums = {}
    for part, sum_ in zip(parts, sums, strict=True):
        out[part.key] = out.get(part.key, 0) ^ sum_
    return out


def known_sums(parts: Iterable[HeldPart]) -> KnownSums:
    """Takes the sums of what is written from now on, each part apart."""
    places = [part.place for part in parts]
    return KnownSums(edge for first, size in places for edge in (first, first + size))


def held_parts(
    manifest: Manifest,
    wants: Iterable[tuple[Slot, str]],
    read: ReadRun,
    only: Only = lambda slot, param: True,
    copies: bool = False,
) -> Iterator[HeldPart]:
    """What a rank's memory of some slots has of parameters; each slot holds the state that is named
    with it. `only` some parameters are looked at. `copies`: what several partitions keep whole is
    in all of them (a load put it there), and not in the first one alone."""
    placed: dict[tuple[BufferPart, bool], list[_Placed]] = {}  # most states of a buffer lie alike
    for slot, state in wants:
        buffer = manifest.buffers[slot.buffer]
        dtype, is_uncut = buffer.dtype_of(slot.state), buffer.of(slot.state).rule == "uncut"
        holder = slot.buffer, (slot.cut, slot.part) if copies and is_uncut else slot.cut
        if (slot.place, is_uncut) not in placed:
            placed[slot.place, is_uncut] = [*_held(manifest, slot, copies)]
        for name, share, shape, offset, held in placed[slot.place, is_uncut]:
            if only(slot, name):
                memory = read(slot, offset, offset + span(held.full.shape, held.strides))
                yield HeldPart((name, state, dtype, share, holder, slot.part), shape, memory, held)


# the parameter, the whole share that it is of, the shape of the tensor, where it begins in the
# slot, and the box
_Placed = tuple[str, Box, Ints, int, Piece]


def _held(manifest: Manifest, slot: Slot, copies: bool) -> Iterator[_Placed]:
    """What a slot holds. Nothing of padding, of parameters of which every rank has a copy of its
    own, and, without `copies`, of what another partition has as well."""
    buffer = manifest.buffers[slot.buffer].of(slot.state)
    for fragment in buffer.fragments(slot.part):
        member = buffer.members[fragment.member]
        if not is_held(manifest, slot, member, copies):
            continue
        true = true_shape(manifest.by_name[member.param])
        for piece in manifest.pieces(member, slot.cut):
            shape, one = _as_run(true, piece.clip_full(whole(true)))
            for held in _clipped(one, fragment.low, fragment.high):
                offset = buffer.offset(member, slot.part, held.flat_start)
                yield member.param, piece.full, shape, offset, held


def _as_run(shape: Ints, piece: Piece | None) -> tuple[Ints, Piece | None]:
    """The shape of a tensor, and a piece of it. What is one run both there and in memory, such as
    whole rows, has one dim: a range of it is one run too, and not a box for each end."""
    if piece is None or len(shape) < 2 or piece.perm != tuple(range(len(shape))):
        return shape, piece
    if piece.full.shape[1:] != shape[1:] or piece.local.shape[1:] != piece.view[1:]:
        return shape, piece
    first = flat_index(piece.full.start, shape)
    full = Box((first,), (first + piece.full.numel,))
    local = Box((piece.flat_start,), (piece.flat_stop,))
    return (prod(shape),), Piece(local, full, (prod(piece.view),), (0,))


def is_held(manifest: Manifest, slot: Slot, member: Member, copies: bool) -> bool:
    """Whether a slot counts for the fingerprint of a member: of what several partitions keep whole
    the first one's does, with `copies` every one's, and of copies that every rank has for itself,
    or that nobody uses, none."""
    if not manifest.is_copy(member.param, slot.buffer):
        return False
    buffer = manifest.buffers[slot.buffer].of(slot.state)
    is_first = copies or buffer.rule != "uncut" or buffer.owners(member, 0, 1)[0] == slot.part
    return is_first and not manifest.by_name[member.param].layout.mean_over


def _clipped(piece: Piece | None, first: int, last: int) -> Iterator[Piece]:
    """The flat range [first, last) of a piece's memory, as boxes."""
    for box in flat_boxes(piece.view, first, last) if piece else ():
        held = piece.clip_local(box) if piece else None
        if held is not None and held.full.numel:
            yield held


def true_shape(spec: ParamSpec) -> Ints:
    """The shape of a parameter without vocabulary padding."""
    return spec.shape if spec.extent is None else (spec.extent.true, *spec.shape[1:])


def _sum(part: HeldPart, known: KnownSums) -> int:
    """What a part of a parameter adds to the CRC-32 of all of it."""
    shape, held, steps = part.held.full.shape, part.held, strides(part.shape)
    size = part.memory.element_size()
    runs, places, elems = _runs(shape, steps)
    is_run = not runs and held.strides == strides(shape)  # there, and in memory
    found = known.linear(*part.place) if is_run else None
    if found is None and is_run:
        found = linear(bytes_of(part.memory.cpu()))
    elif found is None:
        at = part.memory.storage_offset()
        values = torch.as_strided(part.memory, shape, held.strides, at).contiguous().cpu()
        rows = values.view(-1).view(torch.uint8).numpy().reshape(-1, elems * size)
        found = of_runs(rows, runs, [step * size for step in places])
    last = sum((stop - 1) * step for stop, step in zip(held.full.stop, steps, strict=True))
    return shifted(found, (prod(part.shape) - last - 1) * size)


def _runs(shape: Ints, steps: Ints) -> tuple[list[int], list[int], int]:
    """A box of a row-major tensor as runs of elements that follow each other: how many there are
    along each dim that is left, their strides, and the elements of one."""
    runs, places, elems = list(shape), list(steps), 1
    while runs and (places[-1] == elems or runs[-1] == 1):
        elems *= runs.pop()
        places.pop()
    return runs, places, elems


# ------------------------------------------------ all ranks together


# parameter, state, dtype, the share as (start, stop), its holder: of plain values, which are sent
_CopyKey = tuple[str, str, str, tuple[Ints, Ints], tuple[int, Any]]
_Partitions = tuple[tuple[int, int], ...]  # ranges [first, last) of them, in order


class JoinedSums:
    """The sums of several ranks as one, which does not grow with the number of ranks: of each copy
    of a share the sum of the partitions that were summed.

    Example: rank 0 has partition 0 of a weight and rank 1 has partition 1. Joined there is one sum,
    of the partitions [0, 2). If rank 2 has partition 1 as well, its sum must be that of rank 1;
    else the weight is in `apart`.
    """

    def __init__(self, own: Sums | None = None) -> None:
        self.copies: dict[_CopyKey, dict[_Partitions, int]] = {}
        self.apart: set[str] = set()
        for (name, state, dtype, box, holder, part), sum_ in (own or {}).items():
            key = name, state, dtype, (box.start, box.stop), holder
            self._add(key, {((part, part + 1),): sum_})

    def join(self, other: "JoinedSums") -> "JoinedSums":
        """This one, with what others have too."""
        self.apart |= other.apart
        for key, sums in other.copies.items():
            self._add(key, sums)
        return self

    def _add(self, key: _CopyKey, sums: Mapping[_Partitions, int]) -> None:
        own = self.copies.setdefault(key, {})
        for parts, sum_ in sums.items():
            if own.setdefault(parts, sum_) != sum_:
                self.apart.add(key[0])
            while len(own) > 1:  # else it is the one set of partitions that is known
                near = next((one for one in own if one != parts and _both(one, parts)), None)
                if near is None:
                    break
                sum_, parts = own.pop(near) ^ own.pop(parts), _both(near, parts) or parts
                if own.setdefault(parts, sum_) != sum_:
                    self.apart.add(key[0])

    def shares(self) -> dict[tuple[str, str, str, Box], int]:
        """The sum of each share that is there as a whole; of copies that differ one, and the
        parameter is in `apart`."""
        out: dict[tuple[str, str, str, Box], int] = {}
        for (name, state, dtype, share, _), sums in self.copies.items():
            box = Box(*share)
            for sum_ in sums.values():
                if out.setdefault((name, state, dtype, box), sum_) != sum_:
                    self.apart.add(name)
        return out

    @property
    def overlaps(self) -> bool:
        """Whether sums of partitions that overlap are left, which nobody can add up."""
        return any(len(sums) > 1 for sums in self.copies.values())


def joined_sums(own: Sums, ranks: Ranks | None = None) -> JoinedSums:
    """The sums of all ranks, on rank 0; elsewhere of some of them. Collective.

    Where several ranks hold one partition, sums may meet that overlap: rank 0 and 1 have the
    partitions 0 and 1 together, rank 2 and 3 have 1 and 2. Then the sums of all partitions go to
    rank 0 one by one.
    """
    block = agree.merging(JoinedSums.join, lambda joined: joined.overlaps, ranks)
    with block:
        block.value = JoinedSums(own)
    found: JoinedSums = block.merged
    if block.result:
        every = agree.merging(_every_one, ranks=ranks, to_all=False)
        with every:
            every.value = {**own}, set[str]()
        sums, apart = every.merged
        found = JoinedSums(sums)
        found.apart |= apart
    return found


def _every_one(one: tuple[Sums, set[str]], other: tuple[Sums, set[str]]) -> Any:
    """The sums of all partitions, and the parameters of which two are not alike."""
    sums, apart = one[0], one[1] | other[1]
    for key, sum_ in other[0].items():
        if sums.setdefault(key, sum_) != sum_:
            apart.add(key[0])
    return sums, apart


def _both(one: _Partitions, other: _Partitions) -> _Partitions | None:
    """Two sets of partitions as one; None where they have a partition in common."""
    out: list[tuple[int, int]] = []
    for first, last in sorted((*one, *other)):
        if out and first < out[-1][1]:
            return None
        if out and first == out[-1][1]:
            out[-1] = out[-1][0], last
        else:
            out.append((first, last))
    return tuple(out)


def table_of(manifest: Manifest, joined: JoinedSums) -> tuple[dict[str, dict[str, str]], list[str]]:
    """The CRC-32s of all that ranks hold whole together; and the parameters of which copies differ,
    which are not among them. Of buffers each rank may have its own: such have no CRC-32."""
    shares, apart = joined.shares(), joined.apart
    found: dict[tuple[str, str, str], tuple[int, int]] = {}  # sum, elements
    trues = {name: whole(true_shape(manifest.by_name[name])) for name, *_ in shares}
    for (name, state, dtype, box), sum_ in shares.items():
        true = box.meet(trues[name])
        before = found.get((name, state, dtype), (0, 0))
        elems = before[1] + (true.numel if true else 0)
        found[name, state, dtype] = before[0] ^ sum_, elems
    out: dict[str, dict[str, str]] = {}
    for (name, state, dtype), (sum_, elems) in sorted(found.items()):
        if name not in apart and elems == trues[name].numel:
            crc = standard(sum_, elems * ITEMSIZE[dtype])
            out.setdefault(name, {})[state] = f"{dtype} {crc:08x}"
    return out, sorted(name for name in apart if manifest.by_name[name].kind != "buffer")


# ------------------------------------------------ beside tensors


def settings_of(manifest: Manifest) -> dict[str, Any]:
    """Steps and hyper-parameters of every parameter that is stepped, and the rule by which: what is
    a number, a switch or text, or some of them."""
    out: dict[str, Any] = {}
    for _, member, group in manifest.stepped():
        settings = manifest.groups[group].settings
        plain = {key: _plain(value) for key, value in settings.items() if key not in _NOT_OF_STEPS}
        known = {key: value for key, value in plain.items() if value is not None}
        if rule := rule_of(manifest.groups[group]):
            known[RULE] = rule
        out[member.param] = {**known, **{key: float(v) for key, v in member.scalars.items()}}
    return out


def _without(settings: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """What of some settings is not in others."""
    own = {key: value for key, value in settings.items() if other.get(key) != value}
    return ", ".join(f"{key}={value}" for key, value in sorted(own.items())) or "missing"


def _plain(value: Any) -> Any:
    if isinstance(value, bool | str):
        return value
    if isinstance(value, int | float):
        return float(value)
    if isinstance(value, list | tuple):
        found = [_plain(one) for one in value]
        return None if None in found else found
    return None


# ------------------------------------------------ memory


def of_memories(held: Holder) -> Fingerprint:
    """The fingerprint of what all ranks hold. Collective; nothing is moved but sums. Raises
    ForeignFileError where copies differ."""
    manifest = held.manifest
    with agree.together():
        own = sums_of_rank(held)
    joined = joined_sums(own)
    table, apart = agree.of_first(lambda: table_of(manifest, joined))
    require_alike(apart, "the live engine")
    return Fingerprint(table, settings_of(manifest))


def sums_of_rank(held: Holder) -> Sums:
    """What this rank's memory adds to the fingerprint of all."""
    return sums_of_parts([*parts_of_rank(held)])


def parts_of_rank(held: Holder, only: Only = lambda slot, param: True) -> Iterator[HeldPart]:
    """What this rank's memory has of parameters, `only` of some."""
    slots = [
        Slot(*part, state)
        for part in held.parts()
        for state, _ in held.manifest.buffers[part[0]].states
    ]
    wants = [(slot, slot.state) for slot in slots]
    return held_parts(held.manifest, wants, held.read, only)


def parts_of_memory(manifest: Manifest, held: Mapping[Slot, torch.Tensor]) -> list[HeldPart]:
    """What the memory of whole slots has of parameters."""
    wants = [(slot, slot.state) for slot in held]
    return [*held_parts(manifest, wants, lambda slot, first, last: held[slot][first:last])]


def sums_of_memory(manifest: Manifest, held: Mapping[Slot, torch.Tensor]) -> Sums:
    """What the memory of whole slots adds to the fingerprint."""
    return sums_of_parts(parts_of_memory(manifest, held))


def recorded_as(table: Table, apart: Sequence[str]) -> dict[str, Any]:
    """What a manifest says of elements: the table, and the parameters of which copies differ."""
    return {FINGERPRINT: table, **({DIVERGED: [*apart]} if apart else {})}


def diverged(apart: Sequence[str]) -> list[str]:
    """A note about parameters of which ranks have different copies."""
    if not apart:
        return []
    return [f"copies of one parameter differ between ranks, and one is saved: {some_of(apart)}"]


# ------------------------------------------------ files


def of_files(checkpoint: Checkpoint) -> Fingerprint:
    """The fingerprint of a checkpoint, from all of its bytes. Raises a UcpError."""
    manifest = checkpoint.manifest
    sums: Sums = {}
    for number, buffer in enumerate(manifest.buffers):
        for part in range(buffer.partitions):
            for cut in manifest.cuts_of(buffer):
                slots = (Slot(number, cut, part, state) for state, _ in buffer.states)
                for slot in slots:
                    sums |= sums_of_memory(manifest, {slot: read_slot(checkpoint, slot)})
    table, apart = table_of(manifest, JoinedSums(sums))
    require_alike(apart, str(checkpoint.folder))
    return Fingerprint(table, settings_of(manifest))


def require_alike(apart: Sequence[str], file: str) -> None:
    """Raises ForeignFileError where copies of one parameter differ."""
    if apart:
        raise ForeignFileError(
            "copies of a parameter hold different values",
            file=file,
            parameter=some_of(apart),
            fix="the replicas of the run have diverged: load an older tag",
        )


def read_slot(
    checkpoint: Checkpoint, slot: Slot, low: int = 0, high: int | None = None
) -> torch.Tensor:
    """Elements [low, high) of a slot from its file; without `high` all from `low` on."""
    where = checkpoint.where(slot)
    if high is None:
        high = checkpoint.manifest.buffers[slot.buffer].of(slot.state).elems(slot.part)
    out = torch.empty(high - low, dtype=TORCH_DTYPES[where.dtype])
    data: Any = out.view(torch.uint8).numpy().data
    where.file.read_into(where.record, where.offset_bytes + low * out.itemsize, data)
    return out


def of_path(
    path: str | os.PathLike[str],
    tag: str | None = None,
    rules: str | Path | None = None,
    *,
    recorded: bool = False,
) -> Fingerprint:
    """The fingerprint of a checkpoint's files, compared with what the save recorded; or one that
    lies in a JSON file. `recorded`: what the save recorded is taken, and no tensor is read. Raises
    a UcpError."""
    if is_kept(path):
        return _kept_in(str(path))
    with open_checkpoint(location(path), tag, rules=rules) as source:
        table = {} if source.recorded is None else recorded_in(source.recorded.run)
        if recorded:
            return Fingerprint(_required(table, str(source.folder)), settings_of(source.manifest))
        source.check_all(source.file_names)
        found = of_files(source)
        require_recorded(found.table, table, str(source.folder))
        return found


def is_kept(path: Any) -> bool:
    """Whether a path is that of a fingerprint in a file, and no checkpoint's."""
    return (
        isinstance(path, str | os.PathLike)
        and Path(path).suffix == ".json"
        and location(path).is_file()
    )


def _kept_in(path: str) -> Fingerprint:
    """What `megatron-ucp inspect --fingerprint --json` printed. Raises UsageError."""
    kept = _objects(_objects(read_json(path)).get(FINGERPRINT))
    table, settings = (_objects(kept.get(key)) for key in PARTS)
    rows = (*table.values(), *settings.values())
    if not table or not all(isinstance(row, dict) for row in rows):
        raise UsageError(
            "the file holds no fingerprint",
            file=path,
            expected="what `megatron-ucp inspect PATH --fingerprint --json` prints",
            fix="write it again, or give the folder of a checkpoint",
        )
    found = Fingerprint(table, settings)
    if kept.get("digest", found.digest) != found.digest:
        raise UsageError(
            "the fingerprint in the file is not what its digest was made of",
            file=path,
            expected=str(kept["digest"])[:64],
            found=found.digest,
            fix="write it again with `megatron-ucp inspect PATH --fingerprint --json`",
        )
    return found


def _objects(value: Any) -> dict[str, Any]:
    """A JSON object; empty for another value."""
    return value if isinstance(value, dict) else {}


def _required(table: Table, file: str) -> Table:
    """Raises UsageError where a save recorded nothing."""
    if not table:
        raise UsageError(
            "no fingerprint was saved with this checkpoint",
            file=file,
            expected="a save of an attached engine, or a conversion of one",
            fix="read all of its bytes: leave --fingerprint out, or compare with what "
            "`megatron-ucp inspect PATH --fingerprint --json` prints of it",
        )
    return table


# ------------------------------------------------ as a manifest keeps it


def recorded_in(run: Mapping[str, Any]) -> Table:
    """The table that a manifest's `run` keeps; empty where it has none."""
    found = run.get(FINGERPRINT)
    if not isinstance(found, Mapping):
        return {}
    return {
        str(name): {str(state): str(crc) for state, crc in states.items()}
        for name, states in found.items()
        if isinstance(states, Mapping)
    }


def compared_with(table: Table, recorded: Table) -> tuple[set[StateKey], list[StateKey]]:
    """The states that were recorded in the same dtype: those that are as they were, and those that
    are not."""
    same, wrong = set[StateKey](), list[StateKey]()
    for name, states in table.items():
        for state, crc in states.items():
            saved = recorded.get(name, {}).get(state, "")
            if saved == crc:
                same.add((name, state))
            elif saved.partition(" ")[0] == crc.partition(" ")[0]:
                wrong.append((name, state))
    return same, wrong


def require_recorded(table: Table, recorded: Table, file: str) -> None:
    """Raises ForeignFileError where a state is not the recorded one."""
    _, wrong = compared_with(table, recorded)
    if wrong:
        name, state = wrong[0]
        raise ForeignFileError(
            f"the {state} of a parameter is not what was saved",
            file=file,
            parameter=some_of([f"{one} ({what})" for one, what in wrong]),
            expected=f"CRC-32 of {recorded[name][state]}",
            found=table[name][state],
            fix="what holds it was changed or damaged, or this package has a defect: load an older "
            "tag, and report it",
        )
