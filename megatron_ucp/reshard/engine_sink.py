"""A live engine as a sink: its memory is filled in place, in the order of the source."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, Protocol, Self

from megatron_ucp.core.flat import Scalars
from megatron_ucp.core.manifest import Manifest
from megatron_ucp.core.plan import Cast, Mean, Op, Plan, Slot, joined
from megatron_ucp.errors import some_of
from megatron_ucp.formats.pt.values import ITEMSIZE
from megatron_ucp.reshard import agree
from megatron_ucp.reshard.engine import Engine, How, TakenExtras
from megatron_ucp.reshard.execute import OfOp, TensorOf
from megatron_ucp.reshard.fingerprint import (
    StateKey,
    Sums,
    Table,
    compared_with,
    is_held,
    require_alike,
    require_recorded,
    sums_of,
    table_of,
    true_shape,
)
from megatron_ucp.reshard.overflows import Lost, lost_in_weights, may_overflow, param_of
from megatron_ucp.reshard.own_values import set_buffers
from megatron_ucp.reshard.report import FingerprintCheck
from megatron_ucp.reshard.transfer import Proved, SinkPart, Source, TransferRun

_NAMED = 5  # parameters that a note lists by name


class InPlaceSource(Source, Protocol):
    """A source that fills memory where it lies. `sums` are bytes: what this rank took, what all of
    them compared with checksums and what they did not; `read_by_all` what all ranks took."""

    sums: tuple[int, int, int]
    read_by_all: int

    def fill(
        self, parts: Sequence[Proved], into: TensorOf, run: TransferRun, is_summed: OfOp
    ) -> None:
        """Fills what this rank has of some parts. Checksums are taken of records of which an
        operation `is_summed`, where the source has any."""
        ...

    def check_records(self, slots: Iterable[Slot]) -> None:
        """Looks again at what holds some slots. Raises DamagedFileError."""
        ...

    def lost(self, engine: Engine, plan: Plan) -> Lost:
        """What of a plan's values was lost as they were rounded."""
        ...


@dataclass(frozen=True)
class Filled:
    """What an engine gets besides elements: `states` and `scalars` for each buffer of the manifest
    that this rank fills, `groups` for each of its groups. `recorded` is what the save said of all
    elements (empty: nothing)."""

    states: Mapping[int, tuple[str, ...]]
    scalars: Mapping[int, list[Scalars]]
    groups: list[Mapping[str, Any]]
    recorded: Table


class EngineSink:
    """What a load fills on this rank. `held` is the checkpoint's manifest; `notes` grow with what
    is done."""

    verb = "train"
    thorough = False  # what no rank needs is not read for a checksum: the report says how much

    def __init__(
        self,
        engine: Engine,
        held: Manifest,
        how: How,
        parts: tuple[SinkPart, ...],
        filled: Filled,
        extras: TakenExtras,
        notes: list[str],
    ) -> None:
        self.engine, self.held, self.how, self.parts = engine, held, how, parts
        self.filled, self.extras, self.notes = filled, extras, notes
        self._read: tuple[InPlaceSource, Plan] | None = None
        self._target = parts[0].target  # of all parts
        self._states = {slot: state for part in parts for slot, state in part.wants}
        self._recorded = filled.recorded if how.checksums else {}
        self._sums: Sums = {}
        self._sizes: Counter[StateKey] = Counter()
        self._loaded_bytes = 0
        self.compared: FingerprintCheck | None = None

    def __enter__(self) -> Self:
        """The first write. From here on a failure of any rank leaves the engine unusable on all."""
        self.engine.mark_unusable()
        if self.how.optimizer:
            self.engine.allocate(self.filled.states)
        return self

    def __exit__(self, *_: object) -> None:
        """What was filled in part stays unusable."""

    def move(self, source: InPlaceSource, parts: Sequence[Proved], run: TransferRun) -> None:
        """All bytes that this rank needs, straight into its memory."""
        plans = [one.plan for one in parts]
        self._read = source, joined(plans)
        source.fill(parts, self.engine.tensor, run, lambda op: self._vouched_for(op) is None)
        for plan in plans if self._recorded else ():
            self._loaded_bytes += _bytes_of(plan, self._target)
            self._sums |= sums_of(
                self._target,
                plan.wants,
                self.engine.read,
                only=self._is_compared,
                sizes=self._sizes,
                copies=True,
            )

    def _vouched_for(self, op: Op) -> StateKey | None:
        """The state whose recorded fingerprint will be compared with what an operation fills: a
        checksum of the bytes that it reads would sum them twice. None where nothing will."""
        target, slot = self._target, op.target.slot
        member = target.member(slot.buffer, op.member)
        name, state = member.param, self._states[slot]
        crc = self._recorded.get(name, {}).get(state, "")
        same_dtype = crc.startswith(target.buffers[slot.buffer].dtype_of(slot.state) + " ")
        if not same_dtype or not self._is_compared(slot, name) or self._has_padding(name):
            return None
        return (name, state) if is_held(target, slot, member, copies=True) else None

    def _has_padding(self, name: str) -> bool:
        """Whether rows of a vocabulary's padding are in the files: a fingerprint says nothing of
        these, and the losses depend on them."""
        held = self.held.by_name.get(name)
        return held is not None and true_shape(held) != held.shape

    def _is_compared(self, slot: Slot, name: str) -> bool:
        """Whether a parameter in a slot gets what the checkpoint has, element by element."""
        held = self.held.by_name.get(name)
        dtype = self._target.buffers[slot.buffer].dtype_of(slot.state)
        return (
            held is not None
            and true_shape(held) == true_shape(self.engine.manifest.by_name[name])
            and self.held.states_of(name).get(self._states[slot]) == dtype
        )

    def lost(self) -> Lost:
        """Collective. What this rank's memory, which was filled, lost of the checkpoint's values,
        and what weights will lose of the masters. Nothing where no rank rounds, and the dtype of
        the training is the same."""
        if self._read is None:
            return {}
        (source, plan), manifest = self._read, self.engine.manifest
        own = _inexact(plan, manifest), self._sums, self._sizes, self._loaded_bytes
        found, sums, sizes, loaded = zip(*agree.gather(own), strict=True)
        self.notes[:0] = _of_all_ranks(manifest, found)
        if self._recorded:
            same = self._compare(source, plan, sums)
            self.compared = FingerprintCheck(
                sum(own[key] for own in sizes for key in same), sum(loaded)
            )
        rounds = any(rounded for rounded, _ in found) or may_overflow(self.held, manifest)
        if not rounds:
            return {}
        return {**lost_in_weights(self.engine, plan), **source.lost(self.engine, plan)}

    def _compare(self, source: InPlaceSource, plan: Plan, ranks: Sequence[Sums]) -> set[StateKey]:
        """Which states were compared. Raises DamagedFileError where a record is not what its file
        says, else ForeignFileError where what ranks have now is not what was saved."""
        table, apart = table_of(self._target, ranks)
        same, wrong = compared_with(table, self._recorded)
        unseen = set[Slot]()  # of the files: read without a checksum, and not as was saved
        for op in plan.ops:
            key = self._vouched_for(op)
            if key is not None and key not in same:
                unseen |= {side.slot for side in op.sources}
        if not wrong and not apart:
            source.check_records(unseen)
            return same
        agree.collect(lambda: source.check_records(unseen))  # that error says more
        require_alike([] if "replicas" in self.how.allow else apart, source.file)
        require_recorded(table, self._recorded, source.file)
        return same

    def finish(self) -> None:
        """Copies the masters into the weights; sets steps, hyper-parameters and extras."""
        self.engine.refresh()
        self.notes += self.engine.drop_gradients()
        if self.how.own is not None:
            set_buffers(self.engine, self.how.own.buffers)
        if self.how.optimizer:
            for number, scalars in self.filled.scalars.items():
                self.engine.set_scalars(number, scalars)
            self.notes += self._set_groups()
        self.notes += self.extras.restore()

    def publish(self, told: Sequence[None]) -> None:
        """The engine may step, and be saved."""
        self.engine.mark_usable()

    def _set_groups(self) -> list[str]:
        if self.how.hyper == "config":
            return ["hyper-parameters kept from the engine's configuration, as asked"]
        if not any(self.filled.groups):
            fresh = "the optimizer's states begin afresh, "
            return [
                f"{fresh if not any(self.filled.states.values()) else ''}hyper-parameters kept "
                "from the engine: the checkpoint holds none"
            ]
        own = {group.optimizer for group in self.engine.manifest.groups}
        theirs = {group.optimizer for group in self.held.groups}
        return self.engine.set_groups(self.filled.groups, carried=theirs <= {*own, ""})


def _bytes_of(plan: Plan, target: Manifest) -> int:
    """What a plan puts into the memory of a rank, padding apart."""
    return sum(
        op.box.numel
        * ITEMSIZE[target.buffers[op.target.slot.buffer].dtype_of(op.target.slot.state)]
        for op in plan.ops
    )


def _inexact(plan: Plan, target: Manifest) -> tuple[int, int]:
    """Parameters of which a plan rounds some elements, and of which it averages some: a bit for
    each parameter of the manifest, as every rank sends it to every other one."""
    number = {spec.name: 1 << n for n, spec in enumerate(target.params)}
    rounded = averaged = 0
    for op in plan.ops:
        if isinstance(op, Mean):
            averaged |= number[param_of(op, target)]
        elif isinstance(op, Cast) and not op.lossless:
            rounded |= number[param_of(op, target)]
    return rounded, averaged


def _of_all_ranks(target: Manifest, found: Sequence[tuple[int, int]]) -> list[str]:
    """Notes for what the plans of all ranks do: one rank's report speaks for the load."""
    names: list[list[str]] = [[], []]
    for listed, masks in zip(names, zip(*found, strict=True), strict=True):
        every = reduce(int.__or__, masks)
        listed += sorted(spec.name for n, spec in enumerate(target.params) if every >> n & 1)
    return named({"rounded to a narrower dtype": names[0], "averaged over its copies": names[1]})


def named(found: Mapping[str, Sequence[str]]) -> list[str]:
    """A note for each thing that some parameters have in common."""
    return [f"{what}: {some_of(names, _NAMED)}" for what, names in found.items() if names]
