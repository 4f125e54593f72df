"""Loads a checkpoint into a live engine: the elements, what is no element, and what all ranks
must agree on."""

import functools
import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol, Self

from megatron_ucp import say
from megatron_ucp.core.flat import FlatBuffer, Scalars
from megatron_ucp.core.manifest import ORIGIN, RUN, BufferPart, Manifest, ParamGroup
from megatron_ucp.core.mesh import Mesh
from megatron_ucp.core.names import MASTER, VALUE, Keeper
from megatron_ucp.core.plan import Cast, Mean, Op, Plan, Slot, Want, joined
from megatron_ucp.errors import DamagedFileError, StateMismatchError, UcpError, some_of
from megatron_ucp.formats.checkpoint import CallerModel, Checkpoint, differing, ranks_of
from megatron_ucp.formats.deepspeed.lost_states import refuse_lost_moments
from megatron_ucp.formats.deepspeed.megatron_deepspeed import kept_by_each_rank
from megatron_ucp.formats.folder import Look, SharedFolder
from megatron_ucp.formats.optimizers import kept_by, require_equal
from megatron_ucp.formats.per_rank import OwnValues, PerRank, refuse_unless
from megatron_ucp.formats.pt.refs import ITEMSIZE
from megatron_ucp.formats.registry import find_checkpoint, open_folder
from megatron_ucp.formats.store import folder_at, look_once
from megatron_ucp.formats.tags import FoundTag
from megatron_ucp.reshard import agree, read_once
from megatron_ucp.reshard.engine import (
    Engine,
    FingerprintCheck,
    Holder,
    LoadOptions,
    ReadyState,
    Report,
    Wants,
)
from megatron_ucp.reshard.execute import OfOp, TensorOf, tensor_of
from megatron_ucp.reshard.files import SharedFiles
from megatron_ucp.reshard.fingerprint import (
    JoinedSums,
    StateKey,
    Sums,
    Table,
    compared_with,
    is_held,
    joined_sums,
    recorded_in,
    require_alike,
    require_recorded,
    sums_of,
    table_of,
    true_shape,
)
from megatron_ucp.reshard.hybrid import for_model
from megatron_ucp.reshard.kept_moves import SharedMemories
from megatron_ucp.reshard.match import (
    Fit,
    check_not_lost,
    group_values,
    has_masters,
    match_optimizers,
    match_params,
    match_ties,
    one_value,
    replica_notes,
    require_alone,
    require_one_copy,
    source_states,
)
from megatron_ucp.reshard.messages import Ranks
from megatron_ucp.reshard.transfer import (
    Lost,
    Proved,
    SinkPart,
    Source,
    TransferRun,
    lost_in_weights,
    may_overflow,
    param_of,
    transfer,
)

# ---- per-rank values
#
# What a rank of a live engine gets of values that differ from rank to rank in a checkpoint.


def values_for(
    source: Checkpoint,
    bare: Manifest,
    what: PerRank,
    allow: Collection[str],
) -> tuple[OwnValues | None, list[str]]:
    """What this rank gets of all that differs (None: what all share), and notes. On another mesh
    the first rank's is taken where that is allowed.

    Raises StateMismatchError, DamagedFileError.
    """
    if not what:
        return None, []
    mesh, file = ranks_of(source), str(source.folder)
    if mesh.has_ranks_of(bare.mesh):
        own = source.of_rank(agree.world()[0]).only(what)
        _check_buffers(own, bare, file)
        return own, []
    usual = kept_by_each_rank(source.extras.client_state)
    note = refuse_unless("per_rank" in allow, what, file, str(bare.mesh), usual)
    return _like_this_rank(source, bare.mesh, what, usual), [note]


def _like_this_rank(
    source: Checkpoint, here: Mesh, what: PerRank, usual: Collection[Any]
) -> OwnValues | None:
    """The first rank's values; of keys that each model-parallel rank of a program keeps, those of
    the first rank with this one's tensor-parallel rank and stage, where the mesh has as many. None:
    what all share."""
    mesh, at = ranks_of(source), here.coord(agree.world()[0])
    if not usual or (mesh.tp, mesh.pp) != (here.tp, here.pp):
        return None
    like = mesh.partition_ranks_at(at.pp, at.tp)[0]
    first, own = (source.of_rank(rank).only(what) for rank in (0, like))
    kept = {key: value for key, value in own.client_state.items() if key in usual}
    return replace(first, client_state={**first.client_state, **kept})


def _check_buffers(own: OwnValues, bare: Manifest, file: str) -> None:
    """Raises DamagedFileError where a rank's own buffer has another shape than the model's."""
    for name, value in own.buffers.items():
        spec = bare.by_name.get(name)
        if spec is not None and tuple(spec.shape) != tuple(value.get("shape")):
            raise DamagedFileError(
                "a rank's own buffer has another shape than the one of the model",
                file=file,
                parameter=name,
                expected=spec.shape,
                found=value.get("shape"),
            )


def set_buffers(engine: Engine, own: Mapping[str, Any]) -> None:
    """Gives the engine what this rank had otherwise than the first one."""
    for number, cut, part in engine.parts():
        buffer = engine.manifest.buffers[number]
        name = buffer.first_param
        if name in own and not buffer.stepped:
            whole = tensor_of(own[name])
            order = engine.manifest.by_name[name].order
            stored = whole if order is None else whole.permute(order)
            engine.tensor(Slot(number, cut, part, VALUE)).copy_(stored.reshape(-1))


# ---- engine sink
#
# A live engine as a sink: its memory is filled in place, in the order of the source.


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
    """What an engine gets besides elements: `states` (None: those of the optimizer stay) and
    `scalars` for each buffer of the manifest that this rank fills. `recorded` is what the save said
    of all elements (empty: nothing); the report gives the `client_state` back."""

    states: Mapping[int, tuple[str, ...]] | None
    scalars: Mapping[int, list[Scalars]]
    recorded: Table
    client_state: Mapping[str, Any]


class EngineSink:
    """What a load fills on this rank. `held` is the checkpoint's manifest; `notes` grow with what
    is done."""

    verb = "train"
    thorough = False  # what no rank needs is not read for a checksum: the report says how much

    def __init__(
        self,
        engine: Engine,
        held: Manifest,
        options: LoadOptions,
        parts: tuple[SinkPart, ...],
        filled: Filled,
        ready: ReadyState,
        notes: list[str],
    ) -> None:
        self.engine, self.held, self.options, self.parts = engine, held, options, parts
        self.filled, self.ready, self.notes = filled, ready, notes
        self._read: tuple[InPlaceSource, Plan] | None = None
        self._rounds = False  # on any rank
        self._target = parts[0].target  # of all parts
        self._states = {slot: state for part in parts for slot, state in part.wants}
        self._recorded = filled.recorded if options.checksums else {}
        self._sums: Sums = {}
        self._sizes: Counter[StateKey] = Counter()
        self._loaded_bytes = 0
        self.compared: FingerprintCheck | None = None
        self.publish: Callable[[], None]  # the engine may step, and be saved

    def __enter__(self) -> Self:
        """The first write. From here on a failure of any rank leaves the engine unusable on all."""
        self.publish = self.engine.broken(self.filled.states)
        return self

    def __exit__(self, *_: object) -> None:
        """What was filled in part stays unusable."""

    def move(self, source: InPlaceSource, parts: Sequence[Proved], run: TransferRun) -> None:
        """All bytes that this rank needs, straight into its memory."""
        plans = [one.plan for one in parts]
        self._read = source, joined(plans)
        into, own_sum = self.engine.tensor, lambda op: self._vouched_for(op) is None
        if isinstance(source, SharedFiles):
            read_once.fill(source, parts, into, run, own_sum, self.options.read)
        else:
            source.fill(parts, into, run, own_sum)
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

    def compare(self) -> None:
        """Notes of what all ranks rounded and averaged. Raises DamagedFileError where a record is
        not what its file says, else ForeignFileError where what ranks have now is not what was
        saved."""
        if self._read is None:
            return
        (source, plan), manifest = self._read, self.engine.manifest
        joined = joined_sums(self._sums)
        block = agree.merging(_Filled.join, partial(self._compared, joined))
        with block:
            block.value = _Filled(*_inexact(plan, manifest), self._sizes, self._loaded_bytes)
        found: _Comparison = block.result
        self._rounds = bool(found.rounded)
        self.notes[:0] = _of_all_ranks(manifest, found.rounded, found.averaged)
        self.compared = found.check
        with agree.together():
            unseen = set[Slot]()  # of the files: read without a checksum, and not as was saved
            for op in plan.ops if self._recorded else ():
                if self._vouched_for(op) in found.unlike:
                    unseen |= {side.slot for side in op.sources}
            source.check_records(unseen)  # that error says more
        with agree.together():
            require_alike([] if "replicas" in self.options.allow else found.apart, source.file)
            require_recorded(found.wrong, self._recorded, source.file)

    def _compared(self, sums: JoinedSums, filled: "_Filled") -> "_Comparison":
        """What all ranks are to know of what they filled together."""
        if not self._recorded:
            return _Comparison(filled.rounded, filled.averaged)
        table, apart = table_of(self._target, sums)
        same, wrong = compared_with(table, self._recorded)
        every = {(name, state) for name, states in self._recorded.items() for state in states}
        return _Comparison(
            filled.rounded,
            filled.averaged,
            FingerprintCheck(sum(filled.sizes[key] for key in same), filled.loaded_bytes),
            frozenset(every - same),
            {name: {state: table[name][state]} for name, state in wrong},
            apart,
        )

    def lost(self) -> Lost:
        """What this rank's memory, which was filled, lost of the checkpoint's values, and what
        weights will lose of the masters. Nothing where no rank rounds, and the dtype of the
        training is the same."""
        if self._read is None or not (
            self._rounds or may_overflow(self.held, self.engine.manifest)
        ):
            return {}
        source, plan = self._read
        return {**lost_in_weights(self.engine, plan), **source.lost(self.engine, plan)}

    def finish(self) -> None:
        """Copies the masters into the weights; sets steps, hyper-parameters and run state."""
        if self.options.own is not None:
            set_buffers(self.engine, self.options.own.buffers)
        self.notes += self.engine.filled(self.ready, self.filled.scalars)


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


def _of_all_ranks(target: Manifest, rounded: int, averaged: int) -> list[str]:
    """Notes for what the plans of all ranks do: one rank's report speaks for the load."""
    names = [
        sorted(spec.name for number, spec in enumerate(target.params) if bits >> number & 1)
        for bits in (rounded, averaged)
    ]
    return named({"rounded to a narrower dtype": names[0], "averaged over its copies": names[1]})


@dataclass
class _Filled:
    """What some ranks filled: the parameters of which they rounded and averaged elements, as bits;
    the bytes of each state, and of all of it."""

    rounded: int
    averaged: int
    sizes: Counter[StateKey]
    loaded_bytes: int

    def join(self, other: "_Filled") -> "_Filled":
        self.sizes.update(other.sizes)
        return replace(
            self,
            rounded=self.rounded | other.rounded,
            averaged=self.averaged | other.averaged,
            loaded_bytes=self.loaded_bytes + other.loaded_bytes,
        )


@dataclass(frozen=True)
class _Comparison:
    """What became of it: the states that are not as they were recorded, or not there as a whole,
    are `unlike`; of those in `wrong` the CRC-32 is another one; of parameters that are `apart` the
    copies differ."""

    rounded: int
    averaged: int
    check: FingerprintCheck | None = None
    unlike: frozenset[StateKey] = frozenset()
    wrong: Table = field(default_factory=dict)
    apart: Sequence[str] = ()


def named(found: Mapping[str, Sequence[str]]) -> list[str]:
    """A note for each thing that some parameters have in common."""
    return [f"{what}: {some_of(names, _NAMED)}" for what, names in found.items() if names]


# ---- resume
#
# Fills a live engine from a checkpoint of any mesh: what every engine's load does.
#
# Order: everything that metadata can show is found on all ranks first; then the engine is marked
# unusable, filled, refreshed and marked usable again. No collective stands inside the arithmetic.


def resume(
    engine: Engine, path: str | os.PathLike[str], tag: str | None, options: LoadOptions
) -> Report:
    """Fills an engine. Collective. Raises a UcpError on every rank; the engine is unchanged where
    metadata could show the reason, and refuses to step and to save where it could not."""
    started = time.perf_counter()
    with ExitStack() as opened:
        told = replace(engine.told(), weights="weights" in options.allow)
        if "values" in options.allow:
            told = replace(told, classes=None)
        read = open_together(path, tag, told, opened)
        with agree.gathering() as looked:
            source = for_model(read, engine.manifest, options.allow)
            looked.value = _check_files(source, options, engine)
        options = replace(options, apart=functools.reduce(PerRank.__or__, looked.values))
        values = SharedFiles(source, str(source.folder), options.checksums)
        return _filled_from(engine, source, values, options, started)


def open_together(
    path: str | os.PathLike[str], tag: str | None, told: CallerModel, opened: ExitStack
) -> Checkpoint:
    """A checkpoint that all ranks open. It is closed with `opened`. Collective. Raises a UcpError
    on every rank."""

    def find() -> tuple[FoundTag, SharedFolder]:
        found = find_checkpoint(path, tag)
        return found, SharedFolder(folder_at(found.folder))

    return open_found(path, find, told, opened)


def open_found(
    path: object,
    find: Callable[[], tuple[FoundTag, SharedFolder]],
    told: CallerModel,
    opened: ExitStack,
    ranks: Ranks | None = None,
) -> Checkpoint:
    """A checkpoint that `ranks` open: rank 0 finds it below `path`, and looks into it; the others
    are told what it saw, and open the files alone of which they read more. It is closed with
    `opened`. Collective. Raises a UcpError on every rank."""
    own: list[Checkpoint] = []

    def look() -> tuple[FoundTag, Look]:
        found, folder = find()
        own.append(opened.enter_context(open_folder(folder, found.notes, told)))
        with suppress(UcpError):  # all ranks read it next, and say what is wrong with it
            _ = own[0].extras
        seen, folder.look = folder.look, None
        return found, seen or Look()

    found, seen = agree.of_first(lambda: look_once(path, look), ranks)
    with agree.together(ranks):
        if not own:
            folder = SharedFolder(folder_at(found.folder), seen)
            own.append(opened.enter_context(open_folder(folder, found.notes, told)))
    return own[0]


def resume_from_memory(
    engine: Engine, source: Checkpoint, held: Holder, options: LoadOptions
) -> Report:
    """As `resume`, from the memories of all ranks: `source` says all that is no element of a
    tensor, and `held` has this rank's elements."""
    started = time.perf_counter()
    with agree.gathering() as looked:
        looked.value = _check_files(source, options, engine)
    options = replace(options, apart=functools.reduce(PerRank.__or__, looked.values))
    return _filled_from(engine, source, SharedMemories(str(source.folder), held), options, started)


def _filled_from(
    engine: Engine,
    source: Checkpoint,
    values: InPlaceSource,
    options: LoadOptions,
    started: float,
) -> Report:
    """Fills an engine with `values`, which are those of `source`. `started` is the clock when the
    load began. Collective."""
    with agree.together():
        sink = prepared(engine, source, options)
    with say.progress("load") as advance:
        transfer(values, sink, run=TransferRun(progress=advance))
    left_out = "the optimizer's states" if engine.has_optimizer and not options.optimizer else ""
    if options.module_only:
        left_out = "optimizer, scheduler and counters"
    steps = source.extras.counters.get("global_steps", 0)
    said = source.recorded.run if source.recorded is not None else {}
    return Report(
        str(source.folder),
        str(source.manifest.written_on),
        str(engine.manifest.mesh),
        *values.sums,
        time.perf_counter() - started,
        sink.filled.client_state,
        tuple(sink.notes),
        steps,
        str(said.get(RUN, "")),
        str(said.get(ORIGIN, "")),
        values.read_by_all,
        left_out,
        sink.compared,
    )


def prepared(engine: Engine, source: Checkpoint, options: LoadOptions) -> EngineSink:
    """Everything that needs no tensor byte; raises before anything is written. Every rank looks at
    the whole engine, and prepares the parts that it has. Nothing is sent."""
    file, bare = str(source.folder), engine.manifest
    optimizer = options.optimizer and engine.has_optimizer
    fit = fit_for(source.manifest, bare, options.allow, optimizer, file)
    if optimizer:
        match_ties(source.manifest, file)
    require_alone(bare, fit, optimizer and engine.has_one_step, file)
    states = _states(bare, source.manifest, fit, optimizer, file)
    target = _with_states(engine, states)
    held, buffers = source.manifest, bare.buffers
    scalars = {  # none of members whose states begin afresh
        number: [
            held.scalars_of(one.param) if one.param in held.holders else {}
            for one in buffers[number].members
        ]
        for number, _, _ in engine.parts()
        if buffers[number].stepped
    }
    groups, settings = _groups(source, target, fit, options) if optimizer else ([], [])
    own, apart = values_for(source, bare, options.apart, options.allow)
    scheduler = options.scheduler and not options.module_only
    options = replace(options, optimizer=optimizer, scheduler=scheduler, own=own)
    theirs = {group.optimizer for group in source.manifest.groups}
    carried = theirs <= {"", *(group.optimizer for group in bare.groups)}
    origins = _origins(bare, source.manifest)
    ready = engine.ready(Wants(source, options, origins, groups, carried))
    if options.checksums:
        source.check_read()
    recorded = {} if source.recorded is None else recorded_in(source.recorded.run)
    filled = Filled(None, {}, recorded, ready.client_state)
    if optimizer:
        own_states = {number: states[number] for number in scalars}
        filled = replace(filled, states=own_states, scalars=scalars)
    kept = _kept_groups(groups, filled, options)
    parts = parts_for(engine, target, fit, options.allow)
    copies = require_one_copy(source, bare.by_name, options.allow)
    described = notes_of_fit(fit, source.manifest)
    notes = [*source.notes, *copies, *described, *settings, *apart, *ready.notes, *kept]
    return EngineSink(engine, source.manifest, options, parts, filled, ready, notes)


def _kept_groups(
    groups: Sequence[Mapping[str, Any]], filled: Filled, options: LoadOptions
) -> list[str]:
    """A note where the engine keeps its own hyper-parameters."""
    if filled.states is None or any(groups):
        return []
    if options.hyper == "config":
        return ["hyper-parameters kept from the engine's configuration, as asked"]
    fresh = "" if any(filled.states.values()) else "the optimizer's states begin afresh, "
    return [f"{fresh}hyper-parameters kept from the engine: the checkpoint holds none"]


def _check_files(source: Checkpoint, options: LoadOptions, engine: Engine) -> PerRank:
    """Compares the files with each other; the ranks share the work. Returns what differs from rank
    to rank in those of this one."""
    rank, world = agree.world()
    optimizer = options.optimizer and engine.has_optimizer
    own = source.file_names[rank::world]
    source.check_all(own, options.allow)
    if optimizer:
        refuse_lost_moments(source.manifest, str(source.folder))
    return differing(source, own)


def fit_for(
    source: Manifest, bare: Manifest, allow: frozenset[str], optimizer: bool, file: str
) -> Fit:
    """How the engine is filled: weights come from the masters, where the checkpoint has them.

    Raises ModelMismatchError; StateMismatchError for a checkpoint without an optimizer whose states
    are asked for.
    """
    fit = match_params(source, bare, allow, file)
    trainable = {spec.name for spec in bare.params if spec.kind == "trainable"} - fit.fresh
    if has_masters(source, trainable):
        return fit
    if optimizer and source.keeper != Keeper.WEIGHTS:
        raise StateMismatchError(
            "the checkpoint holds no optimizer",
            file=file,
            fix="load with load_optimizer_states=False",
            id="no-optimizer",
        )
    return replace(fit, master=VALUE)


def _states(
    bare: Manifest, source: Manifest, fit: Fit, optimizer: bool, file: str
) -> list[tuple[str, ...]]:
    """For each buffer of the engine the element-wise states that it gets besides the masters.
    Raises StateMismatchError where members disagree, or the engine's optimizer keeps others."""
    out: list[tuple[str, ...]] = []
    for buffer in bare.buffers:
        begins_afresh = any(member.param in fit.fresh for member in buffer.members)
        if not optimizer or not buffer.stepped or not buffer.members or begins_afresh:
            out.append(())
            continue
        out.append(_states_of(buffer, bare, source, file))
    return out


def _states_of(buffer: FlatBuffer, bare: Manifest, source: Manifest, file: str) -> tuple[str, ...]:
    def names_of(param: str) -> Mapping[str, bool]:
        return dict.fromkeys(source_states(source, param), True)

    params = [member.param for member in buffer.members]
    found = one_value(params, names_of, "states", file)
    scalars = one_value(params, source.scalars_of, "steps", file)
    group = ParamGroup({}) if buffer.group is None else bare.groups[buffer.group]
    keeps = kept_by(group.optimizer, group.settings)
    if found or scalars:
        require_equal(keeps.element, found, params[0], file)
        require_equal(keeps.scalar, scalars, params[0], file)
    elif keeps.element or keeps.scalar:  # from before the first step, or never saved
        check_not_lost(source, source.group_of(params[0]), group.optimizer, file)
    return tuple(found)


def _with_states(engine: Engine, states: list[tuple[str, ...]]) -> Manifest:
    """The engine with the states that it will have."""
    buffers: list[FlatBuffer] = []
    for number, (buffer, found) in enumerate(zip(engine.manifest.buffers, states, strict=True)):
        if found:
            added = tuple((state, engine.state_dtype(number, state)) for state in found)
            buffer = replace(buffer, states=(*buffer.states, *added))
        buffers.append(buffer)
    return replace(engine.manifest, buffers=tuple(buffers))


def _wants(target: Manifest, fit: Fit, taken: Sequence[BufferPart]) -> list[Want]:
    """Every slot that is taken, and the source state that fills it."""
    wants: list[Want] = []
    for number, cut, part in taken:
        buffer = target.buffers[number]
        first = buffer.first_param
        if first in fit.new or (not buffer.stepped and first in fit.skipped):
            continue
        trained = first in target.by_name and target.by_name[first].kind == "trainable"
        origin = VALUE if first in fit.unfrozen else fit.master
        for state, _ in buffer.states:
            weights = state == MASTER or (state == VALUE and (trained or first in fit.frozen))
            wants.append((Slot(number, cut, part, state), origin if weights else state))
    return wants


def _groups(
    source: Checkpoint, target: Manifest, fit: Fit, options: LoadOptions
) -> tuple[list[Mapping[str, Any]], list[str]]:
    """The hyper-parameters of each group, and notes; none for a group whose parameters all begin
    afresh, and none at all where the engine keeps its own. Raises StateMismatchError."""
    file = str(source.folder)
    notes = match_optimizers(source.manifest, target, fit.fresh, options.allow, file)
    if options.hyper == "config":  # of a group that has parameters of several, none is asked for
        return [], notes
    return group_values(target, source.manifest.group_of, file, fit.fresh), notes


def parts_for(
    engine: Engine, target: Manifest, fit: Fit, allow: frozenset[str]
) -> tuple[SinkPart, ...]:
    """What is filled on this rank. What is frozen from here on is rounded to its
    training copy, as the run did, and so are the weights of an engine without an optimizer; nothing
    else without `allow`."""
    allow = allow if engine.has_optimizer else allow | {"narrow"}
    wants = _wants(target, fit, engine.parts())
    frozen = [want for want in wants if target.buffers[want[0].buffer].first_param in fit.frozen]
    apart = {slot for slot, _ in frozen}
    others = [want for want in wants if want[0] not in apart]
    parts = [SinkPart(target, tuple(others), allow, as_trained=True)]
    if frozen:
        parts.append(SinkPart(target, tuple(frozen), allow | {"narrow"}, as_trained=True))
    return tuple(parts)


def _origins(bare: Manifest, source: Manifest) -> list[int | None]:
    """For each group of the engine the group of the checkpoint that its parameters come from, the
    first one that comes from any."""
    found: dict[int, int | None] = {}
    for _, member, group in bare.stepped():
        if found.get(group) is None:
            found[group] = source.group_number(member.param)
    return [found.get(number) for number in range(len(bare.groups))]


def notes_of_fit(fit: Fit, source: Manifest) -> list[str]:
    """Notes for what metadata already shows to be not carried over."""
    found: dict[str, Sequence[str]] = {
        "kept from the engine: not in the checkpoint": fit.skipped,
        "dropped: not in the model": fit.dropped,
        "vocabulary resized": fit.resized,
        "trained from here on, their states begin afresh: they were frozen": fit.unfrozen,
        "new, with the engine's values, their states begin afresh": fit.new,
        "frozen from here on, their states dropped": fit.frozen,
    }
    return replica_notes(source) + named(found)
