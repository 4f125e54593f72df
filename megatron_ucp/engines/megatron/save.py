"""`save` of megatron-core's stack: a distributed checkpoint that stock Megatron-LM and every
engine here load on any mesh.

All ranks make the same plan of the files from the manifest, and each takes the elements that it
has: nothing is gathered. Files are written aside, at once, or from a snapshot while training
goes on; the folder gets its name when all of them are on disk."""

import copy
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from megatron_ucp import say
from megatron_ucp.core.box import Box, Ints, flat_boxes
from megatron_ucp.core.flat import FlatBuffer, Scalars, States, alone
from megatron_ucp.core.layout import Chunks, Piece
from megatron_ucp.core.manifest import (
    MOVED_LATEST,
    RECORDED,
    RUN,
    TAG,
    BufferPart,
    FileEntry,
    Manifest,
    ParamSpec,
)
from megatron_ucp.core.mesh import Coords, Mesh
from megatron_ucp.core.names import MASTER, VALUE, Keeper
from megatron_ucp.core.plan import Slot, Want
from megatron_ucp.engines import resume_state
from megatron_ucp.engines.background import (
    Background,
    SaveTurn,
    background_of,
    begun_or_warned,
    skipped,
)
from megatron_ucp.engines.hold import HoldOptions, LentRun, RankValues, lent
from megatron_ucp.engines.live import flat_view, require_usable
from megatron_ucp.engines.megatron.live import LiveMegatron, describe
from megatron_ucp.engines.megatron.model import bare_model, keys_of_chunks
from megatron_ucp.engines.megatron.optimizer import inner_optimizers, kind_of
from megatron_ucp.engines.megatron.shard import MegatronStack
from megatron_ucp.engines.record import record_of, run_of
from megatron_ucp.engines.resume_state import ResumableLoader
from megatron_ucp.engines.save import (
    SaveOptions,
    SaveReport,
    SaveSink,
    as_rank_error,
    completed,
    ended,
    position_of,
    prune,
    publish,
    require_left,
    require_one_save,
    require_unstepped,
    under_way,
    where_to,
)
from megatron_ucp.engines.values import LiveValues, SavedValue, inert, refuse_strange, saved_values
from megatron_ucp.errors import PlanError, SaveError, UcpError, UnsupportedError, UsageError
from megatron_ucp.families.settings import recorded
from megatron_ucp.formats import per_rank
from megatron_ucp.formats.checkpoint import Extras
from megatron_ucp.formats.file_layout import FileLayout
from megatron_ucp.formats.loss_scale import LossScale
from megatron_ucp.formats.megatron.arguments import Kind
from megatron_ucp.formats.megatron.run_state import ARGUMENTS_KEY, OPERATIONS
from megatron_ucp.formats.megatron.torch_dist import BACKEND as TORCH_DIST
from megatron_ucp.formats.megatron.writer import (
    WEIGHT,
    CommonFile,
    ModelKeys,
    PlannedChunk,
    TorchDistPlan,
    Wish,
    entries_of,
    finish_files,
    plan_torch_dist,
)
from megatron_ucp.formats.output_folder import Syncs, retire
from megatron_ucp.formats.per_rank import PER_RANK, PerRank
from megatron_ucp.formats.tags import (
    MEGATRON_LATEST,
    iteration_name,
    iteration_of_name,
    newest_named,
)
from megatron_ucp.reshard import agree
from megatron_ucp.reshard.fingerprint import (
    Sums,
    diverged,
    recorded_as,
    sums_of,
    sums_of_rank,
    table_of,
)
from megatron_ucp.reshard.folder import FolderOutput
from megatron_ucp.reshard.memories import Memories
from megatron_ucp.reshard.options import absolute_path
from megatron_ucp.reshard.transfer import Moved, Proved, SinkPart, TransferRun, moved

# ---- flags
#
# The flags of Megatron-LM's running program, as a file may hold them.


_PLAIN = (bool, int, float, str, type(None))


def plain_flags(arguments: Mapping[str, Any] | Any) -> dict[str, Any]:
    """A Namespace or a mapping as plain values; dtypes become their names. What no file should hold
    (enums, functions) is left out: Megatron-LM takes its own."""
    out: dict[str, Any] = {}
    for name, value in _said(arguments).items():
        if isinstance(value, torch.dtype):
            out[str(name)] = str(value)
        elif _is_plain(value):
            out[str(name)] = value
    return out


def flags_of_model(stack: MegatronStack) -> dict[str, bool]:
    """The flag by which a reader knows that weights and masters were scaled apart, where the model
    says it: of a save that is given no flags."""
    return {"qk_clip": True} if getattr(bare_model(stack.chunks[0]).config, "qk_clip", None) else {}


def _said(arguments: Mapping[str, Any] | Any) -> Mapping[Any, Any]:
    return vars(arguments) if hasattr(arguments, "__dict__") else dict(arguments or {})


def _is_plain(value: Any) -> bool:
    """Whether a value is a number, a text, or made of such."""
    if isinstance(value, list | tuple):
        return all(_is_plain(item) for item in value)
    if isinstance(value, dict):
        return all(_is_plain(item) for pair in value.items() for item in pair)
    return isinstance(value, _PLAIN) and not isinstance(value, Enum)


# ---- retained
#
# Which older saves go, as Megatron-LM's `--save-retain-interval` asks.


def newest(folder: Path) -> int | None:
    """The iteration that a folder names as its newest one."""
    with suppress(UcpError, OSError):  # the save that follows says what is wrong with it
        named = newest_named(folder)
        return iteration_of_name(named.tag) if named is not None else None
    return None


def retired(
    folder: Path, before: int | None, iteration: int, run: str, interval: int | None, sync: Syncs
) -> list[str]:
    """Removes the save of iteration `before`, once that of `iteration`, of which `sync` is, is
    done: those that the interval divides stay. What can't be removed is said, and no error."""
    if not interval or not before or before == iteration or before % interval == 0:
        return []
    try:
        return [retire(folder / iteration_name(before), run, sync.right)]
    except (OSError, UcpError) as error:
        return [f"{iteration_name(before)} could not be removed: {error}"]


# ---- runs
#
# Which rank writes which elements: every element of every state once, as the manifest divides
# them.


@dataclass(frozen=True, slots=True)
class OwnedBox:
    """The box [start, stop) of a parameter, member number `member` of the buffer at `place`: the
    elements from `local` on of the parameter on a rank there, contiguous and row-major."""

    start: Ints
    stop: Ints
    place: BufferPart
    member: int
    local: int

    @property
    def elems(self) -> int:
        return math.prod(b - a for a, b in zip(self.start, self.stop, strict=True))


def runs_of(manifest: Manifest, param: str) -> list[OwnedBox]:
    """All elements of a parameter, of its first holder, copies along tensor-parallel ranks once.
    Raises PlanError where that is not the whole of it."""
    number, index = manifest.holders[param][0]
    buffer, member = manifest.buffers[number], manifest.member(number, index)
    out: list[OwnedBox] = []
    seen: set[tuple[Box, ...]] = set()
    for cut in manifest.cuts_of(buffer):
        pieces = manifest.pieces(member, cut)
        share = tuple(piece.full for piece in pieces)
        if share in seen:
            continue
        seen.add(share)
        for part in range(buffer.partitions):
            low, high = buffer.owned(member, part)
            if low < high:
                place = number, cut, part
                for piece in _contiguous(pieces, low, high):
                    full = piece.full
                    out.append(OwnedBox(full.start, full.stop, place, index, piece.flat_start))
    shape = manifest.by_name[param].shape
    if sum(one.elems for one in out) != math.prod(shape):
        raise PlanError(
            "the ranks do not hold a parameter once",
            parameter=param,
            expected=f"{math.prod(shape)} elements",
            found=sum(one.elems for one in out),
        )
    return out


def _contiguous(pieces: tuple[Piece, ...], low: int, high: int) -> Iterator[Piece]:
    """The flat range [low, high) of a rank's parameter as pieces."""
    for box in flat_boxes(pieces[0].view, low, high):
        for piece in pieces:
            if (part := piece.clip_local(box)) is not None:
                yield part


# ---- current states
#
# The states that the optimizers of megatron-core's stack have now.


@dataclass(frozen=True)
class CurrentStates:
    """What the ranks hold of masters and moments, and of values: the engine, as the `manifest` says
    with all `states` that its optimizers have now beside the masters (none before the first
    step). Their count of steps is in `scalars`."""

    manifest: Manifest
    live: LiveMegatron
    states: States
    scalars: Scalars

    def parts(self) -> list[BufferPart]:
        return self.live.parts()

    def read(self, slot: Slot, first: int, last: int) -> torch.Tensor:
        return self.live.read(slot, first, last)

    def give_up(self) -> None:
        self.live.give_up()

    def require_unstepped(self) -> None:
        """Raises SaveError where an optimizer has stepped since: what was read meanwhile may be of
        two steps. Sums of what was read can't show that: they fit it."""
        for _, scalars in self.live.own.present():
            require_unstepped(dict(self.scalars), dict(scalars))


def present_states(live: LiveMegatron) -> CurrentStates:
    """Collective; nothing is changed. Raises UsageError on every rank where states differ."""
    with agree.together() as told:
        told.value = live.own.present()
    with agree.together():
        states, scalars = _one_of([one for own in told.values for one in own])
    buffers = tuple(
        replace(
            buffer,
            states=(*buffer.states, *states),
            members=tuple(replace(member, scalars=scalars) for member in buffer.members),
        )
        if buffer.stepped
        else buffer
        for buffer in live.manifest.buffers
    )
    return CurrentStates(replace(live.manifest, buffers=buffers), live, states, scalars)


def _one_of(found: list[tuple[States, Scalars]]) -> tuple[States, Scalars]:
    """What all pieces of all ranks have. Raises UsageError where it is not the same."""
    first = found[0] if found else ((), {})
    for one in found:
        if one != first:
            raise UsageError(
                "the optimizer's states are not alike",
                expected="the same states and step of all parameters, on every rank",
                found=f"{first} and {one}",
                fix="step all parameters before",
            )
    return first


# ---- output
#
# A save of megatron-core's stack on paper: which chunk of which state lies where, and which rank
# writes it. The same on every rank.
#
# Chunks are cut as the ranks hold elements, each file is one rank's: so every rank writes what it
# has itself, and nothing is gathered.


_STATES, _WEIGHTS = 0, 1  # the parts of an output


class SavedWeights:
    """What the ranks hold of the weights that the model computes with: each of them whole ones,
    however masters are divided."""

    def __init__(self, present: CurrentStates) -> None:
        states = present.manifest
        self.use(present)
        self._held_as: dict[int, list[int]] = {}  # by the buffer that has the masters
        buffers: list[FlatBuffer] = []
        for at, spec in enumerate(states.params):
            number, index = states.holders[spec.name][0]
            held, member = states.buffers[number], states.member(number, index)
            self._held_as.setdefault(number, []).append(at)
            dtypes = ((VALUE, spec.dtype),)
            buffers.append(alone(spec.name, member.size, dtypes, at=held.at, axes=held.axes))
        mesh = replace(states.mesh, zero=0)
        self.manifest = Manifest(Keeper.PAPER, mesh, states.params, tuple(buffers))

    def use(self, present: CurrentStates) -> None:
        """From now on these weights, of the same structure."""
        self._live = present.live
        self._tensors = {name: tensor for tensor, name in present.live.own.names.items()}

    def parts(self) -> list[BufferPart]:
        places = {(number, cut) for number, cut, _ in self._live.parts()}
        return [(at, cut, 0) for number, cut in places for at in self._held_as.get(number, ())]

    def read(self, slot: Slot, first: int, last: int) -> torch.Tensor:
        name = self.manifest.params[slot.buffer].name
        return flat_view(self._tensors[name].detach())[first:last]


class StackOutput:
    """The files of a save. `kind` is the optimizer's; `keys` are those of the model."""

    def __init__(self, states: Manifest, kind: Kind, keys: ModelKeys) -> None:
        self.states, self._kind = states, kind
        self._runs = {
            spec.name: [
                part for run in runs_of(states, spec.name) for part in _cut(run, spec, keys)
            ]
            for spec in states.params
        }
        params, wishes = states.by_name, list(self._wishes())
        self.plan: TorchDistPlan = plan_torch_dist(params, wishes, keys, kind=kind)
        self._slots: dict[tuple[int, str], list[int]] = {}  # buffers of (part, parameter)
        self.parts = self._part(_STATES), self._part(_WEIGHTS)

    @cached_property
    def files(self) -> tuple[FileLayout, ...]:
        """All of them."""
        return tuple(self.plan.layouts(self._slot))

    def _wishes(self) -> Iterator[Wish]:
        for spec in self.states.params:
            runs = self._runs[spec.name]
            boxes = tuple((run.start, run.stop) for run in runs)
            owners = tuple(self.first_rank(run.place) for run in runs)
            yield Wish(spec.name, WEIGHT, spec.dtype, boxes, owners)
            for state, dtype in self._stored(spec):
                yield Wish(spec.name, state, dtype, boxes, owners)

    def _stored(self, spec: ParamSpec) -> list[tuple[str, str]]:
        """The states that the files hold beside the weights."""
        is_master = spec.dtype == "float32" and self._kind is not Kind.DISTRIBUTED
        found = self.states.states_of(spec.name).items()
        return [(s, d) for s, d in found if s != VALUE and not (s == MASTER and is_master)]

    def first_rank(self, place: BufferPart) -> int:
        """The first rank that has a part of a buffer: it writes it."""
        number, cut, part = place
        return self.states.mesh.rank_of((*self.states.buffers[number].at, *cut), part)

    @cached_property
    def written(self) -> set[tuple[str, BufferPart]]:
        """What is read of each parameter: of copies one."""
        return {(name, run.place) for name, runs in self._runs.items() for run in runs}

    def stands_for(self, part: int, slot: Slot) -> str | None:
        """The state of which the elements of a slot are the only ones in the files; None for
        weights that are the masters, rounded."""
        if part == _STATES:
            return slot.state
        spec = self.states.by_name[self.parts[part].target.buffers[slot.buffer].first_param]
        left = self.states.states_of(spec.name).keys() - dict(self._stored(spec)).keys()
        return next(iter(left), None)

    def home(self, part: int, buffer: int) -> tuple[Box, tuple[int, Coords], int]:
        """Where the elements of a buffer of a part come from: the share of a parameter that they
        are of, its holder, the partition."""
        member = self.parts[part].target.member(buffer, 0)
        run = self._runs[member.param][member.chunk or 0]
        number, cut, partition = run.place
        own = Box(run.start, run.stop)
        pieces = self.states.pieces(self.states.member(number, run.member), cut)
        share = next(piece.full for piece in pieces if piece.full.meet(own) == own)
        return share, (number, cut), partition

    def _part(self, part: int) -> SinkPart:
        """Each box in a buffer of its own."""
        specs: list[ParamSpec] = []
        buffers: list[FlatBuffer] = []
        wants: list[Want] = []
        for spec in self.states.params:
            held = ((VALUE, spec.dtype),) if part == _WEIGHTS else tuple(self._stored(spec))
            if not held:
                continue
            runs = self._runs[spec.name]
            blocks = Chunks(tuple(((run.start, run.stop),) for run in runs))
            specs.append(replace(spec, layout=blocks, on_mesh=None, order=None))
            numbers = range(len(buffers), len(buffers) + len(runs))
            self._slots[part, spec.name] = [*numbers]
            for chunk, run in enumerate(runs):
                buffers.append(alone(spec.name, run.elems, held, axes=(), chunk=chunk))
            slots = (Slot(number, (), 0, state) for number in numbers for state, _ in held)
            wants += [(slot, slot.state) for slot in slots]
        target = Manifest(Keeper.PAPER, Mesh(), tuple(specs), tuple(buffers))
        return SinkPart(target, tuple(wants))

    def _slot(self, chunk: PlannedChunk) -> tuple[int, Slot]:
        """What a chunk is read into: the part, and its slot."""
        wish = chunk.wish
        part, state = (_WEIGHTS, VALUE) if wish.state == WEIGHT else (_STATES, wish.state)
        return part, Slot(self._slots[part, wish.param][chunk.number], (), 0, state)


def _cut(run: OwnedBox, spec: ParamSpec, keys: ModelKeys) -> Iterator[OwnedBox]:
    """What a rank has of a parameter, in boxes that lie under one key each."""
    local = run.local
    for start, stop in keys.cut(spec.name, (run.start, run.stop)):
        part = replace(run, start=start, stop=stop, local=local)
        local += part.elems
        yield part


# ---- summed
#
# The fingerprint of a save of megatron-core's stack: of what its files hold.


class FingerprintWriter:
    """Each rank sums what it writes, as it writes it, and before that its copies of what others
    write: so that copies which differ are seen. Nothing of the engine's memory is needed once it
    is made."""

    def __init__(self, present: CurrentStates, output: StackOutput) -> None:
        self._manifest, self._output = present.manifest, output
        self._copies = _copies(present, output)
        self._windows: dict[tuple[int, Slot, int], Sums] = {}
        self._ranks: Sequence[Sums] = ()

    def wrote(self, part: int, slot: Slot, low: int, memory: torch.Tensor) -> None:
        """Elements of a part of the output."""
        state = self._output.stands_for(part, slot)
        if state is None:
            return
        target, window = self._output.parts[part].target, (low, low + len(memory))
        found = sums_of(
            target, [(slot, state)], lambda _, a, b: memory[a - low : b - low], within=window
        )
        # some weights are written twice, under two keys
        self._windows[part, slot, low] = {
            (name, kept, dtype, *self._output.home(part, slot.buffer)): sum_
            for (name, kept, dtype, *_), sum_ in found.items()
        }

    def of_rank(self) -> Sums:
        out = dict(self._copies)
        for window in self._windows.values():
            for key, sum_ in window.items():
                out[key] = out.get(key, 0) ^ sum_
        return out

    def of_all(self, ranks: Sequence[Sums]) -> None:
        self._ranks = ranks

    def table(self) -> tuple[dict[str, dict[str, str]], list[str]]:
        """As `table_of`, once all ranks have written."""
        return table_of(self._manifest, self._ranks)


def _copies(present: CurrentStates, output: StackOutput) -> Sums:
    """Of what this rank does not write. Of data-parallel ranks that have the same the first one
    looks; of buffers of modules, which may differ, all."""
    manifest, rank = present.manifest, agree.world()[0]
    written = output.written

    def is_copy(slot: Slot, param: str) -> bool:
        place = slot.place
        if rank == output.first_rank(place):
            return (param, place) not in written
        return manifest.by_name[param].kind == "buffer"

    return sums_of_rank(present, is_copy)


# ---- the plan that is kept
#
# What a save of megatron-core's stack plans and proves, kept for the next one: a save in the
# background has to do nothing but copy while training stands still.


def structure_of(stack: MegatronStack, present: CurrentStates) -> tuple[Any, ...]:
    """Everything that the plan of a save depends on: equal where the plan is. Values, steps and
    hyper-parameters are no part of it; of the ranks all that matters is in the mesh."""
    bare = present.live.manifest  # whose members have no steps yet
    held = (bare.mesh, bare.params, bare.buffers, present.states)
    return (kind_of(stack.optimizer), *held, agree.world())


class UnsteppedMemories(Memories):
    """Those of a stack, whose optimizers may not step while they are read."""

    def __init__(self, file: str, present: CurrentStates, weights: SavedWeights) -> None:
        super().__init__(file, present, weights, keeps=True)
        self.present = present

    def check(self, thorough: bool) -> None:
        """Raises SaveError where one did."""
        self.present.require_unstepped()


class PlannedSave:
    """The files of a save on paper, what they are made of, and the proof. Making one is
    collective."""

    def __init__(
        self, stack: MegatronStack, structure: tuple[Any, ...], present: CurrentStates, file: str
    ) -> None:
        self.structure = structure
        keys = keys_of_chunks(stack.chunks, present.manifest.by_name)
        self.output = StackOutput(present.manifest, kind_of(stack.optimizer), keys)
        self._weights = SavedWeights(present)
        self._source = UnsteppedMemories(file, present, self._weights)
        self._parts: Sequence[Proved] = ()

    def moved(self, present: CurrentStates, sink: SaveSink, run: TransferRun) -> Moved:
        """Takes the values that there are now. Collective. Raises a UcpError on every rank."""
        self._weights.use(present)
        self._source.present = present
        self._source.use(str(sink.folder), present, self._weights)
        found = moved(self._source, sink, run=run, known=self._parts)
        self._parts = found.parts
        return found


def knows(stack: MegatronStack, structure: tuple[Any, ...]) -> bool:
    """Whether this rank has the plan of a save of this structure."""
    kept: PlannedSave | None = record_of(stack).plan
    return kept is not None and kept.structure == structure


def planned(
    stack: MegatronStack,
    structure: tuple[Any, ...],
    present: CurrentStates,
    file: str,
    known: bool,
) -> PlannedSave:
    """The plan of a save, which every rank has (`known`), or makes. Collective."""
    if not known:
        record_of(stack).plan = None  # its memory goes before the next one is made
        record_of(stack).plan = PlannedSave(stack, structure, present, file)
    return record_of(stack).plan


# ---- the run, apart from elements
#
# What megatron-core's stack is, found on all ranks: the states that it has now, and all besides.


def described(stack: MegatronStack, error: type[UcpError]) -> CurrentStates:
    """The engine with the states that its optimizers have now. Collective. Raises an `error` of
    that class for a value that no load could give back."""
    with agree.together():
        refuse_strange(_kept(stack), error)
        require_usable(stack.optimizer)
    live = describe(stack)
    live.finish_gathers()
    found = present_states(live)
    run = {
        resume_state.STEPS: stack.iteration,
        resume_state.SEED: torch.initial_seed(),
        "skipped_steps": stack.skipped_iterations,
        RECORDED: recorded(stack.model.sizes, bare_model(stack.chunks[0])),
        RUN: run_of(stack).id,
    }
    return replace(found, manifest=replace(found.manifest, run=run))


def _kept(stack: MegatronStack) -> Iterator[SavedValue]:
    """Plain values that are taken along."""
    for inner in inner_optimizers(stack.optimizer):
        groups = inner.optimizer.param_groups
        yield from saved_values("scheduler", stack.scheduler, groups, live=False)


def values_of(live: LiveMegatron) -> LiveValues:
    """What this rank has for itself: a stack has no client state, and one schedule."""
    buffers = {value.name: value.tensor for value in live.own.values if value.kind == "buffer"}
    return LiveValues(buffers, {}, None, False, {})


def extras_of(live: LiveMegatron, client_state: Mapping[str, Any]) -> Extras:
    """Schedule, counters and loss scale, as they are; and a client state."""
    stack = live.stack
    counters = {
        "global_steps": stack.iteration,
        "global_samples": stack.consumed_samples,
        "skipped_steps": stack.skipped_iterations,
    }
    schedule = None if stack.scheduler is None else stack.scheduler.state_dict()
    return Extras(counters, schedule, _scaler(live), None, client_state)


def _scaler(live: LiveMegatron) -> LossScale:
    """The loss scale, where it changes."""
    scaler = next((getattr(one, "grad_scaler", None) for one in live.own.inner), None)
    if scaler is None or not hasattr(scaler, "_growth_tracker"):
        return LossScale()
    return LossScale.of_megatron(
        float(scaler.scale),
        scaler._growth_tracker,
        live.stack.iteration,
        scaler.growth_interval,
        (scaler.hysteresis, scaler._hysteresis_tracker),
    )


# ---- save request
#
# A save of megatron-core's stack as it was asked for, in whatever format.


TORCH = "torch"  # as Megatron-LM calls its older files: they are read, and written by itself


@dataclass(frozen=True)
class StackSaveRequest:
    """What is saved, and how. `retain_interval`: the save before this one goes, unless its
    iteration is a multiple (None: it stays)."""

    stack: MegatronStack
    folder: Path
    arguments: Any
    how: SaveOptions
    retain_interval: int | None = None

    @cached_property
    def tag(self) -> str:
        """The name of the folder that it gets, of the iteration when it is first asked for."""
        return iteration_name(self.stack.iteration)

    @property
    def background(self) -> Background | None:
        """What goes on with the save while the stack trains; None where that waits."""
        return background_of(self.stack)


def require_written(ckpt_format: object) -> None:
    """Raises UnsupportedError for another format than torch_dist, the one that is written."""
    if ckpt_format != TORCH_DIST:
        raise UnsupportedError(
            "this format of Megatron-LM's is loaded here, but not written",
            expected=f"--ckpt-format {TORCH_DIST}",
            found=f"--ckpt-format {ckpt_format}",
            fix="leave it out (Python: ckpt_format=): Megatron-LM and every engine here load "
            "torch_dist on any mesh; or call Megatron-LM's own save_checkpoint",
        )


def described_to_save(stack: MegatronStack) -> CurrentStates:
    """The engine with the states that its optimizers have now. Collective."""
    found = described(stack, SaveError)
    with agree.together():
        _require_loadable(found.states)
    return found


def _require_loadable(states: States) -> None:
    """Raises UsageError where the optimizer has no states, UnsupportedError for some that are not
    in fp32."""
    if not states:
        raise UsageError(
            "there is nothing that Megatron-LM could load as the state of an optimizer",
            expected="its states",
            found="none, before the first step",
            fix="save after the first step",
        )
    if odd := [f"{state} in {dtype}" for state, dtype in states if dtype != "float32"]:
        raise UnsupportedError(
            "the optimizer keeps a state in another dtype than megatron-core's files have",
            expected="float32",
            found=", ".join(odd),
            fix="keep the optimizer's states in fp32: leave --exp-avg-dtype and "
            "--exp-avg-sq-dtype out",
        )


# ---- the run that a resize moves from
#
# megatron-core's stack as a run that a resize moves from.


def taken(stack: MegatronStack, how: HoldOptions) -> LentRun:
    """Takes a stack as it is; nothing in it is changed. Collective. Raises a UcpError on every
    rank."""
    present = described(stack, UnsupportedError)
    live = present.live
    with agree.together() as told:
        own = values_of(live)
        client = {OPERATIONS: stack.floating_point_operations, **how.client_state}
        found = extras_of(live, {inert(key): inert(value) for key, value in client.items()})
        extras = replace(found, scheduler=inert(found.scheduler))
        told.value = own.digest()
    apart = own.differing(told.values)
    values = RankValues(own, apart, tuple(live.own.taken_as))
    return lent(present, present.manifest.run, extras, values, how)


# ---- save
#
# `save` of megatron-core's stack: a distributed checkpoint that stock Megatron-LM and every
# engine here load on any mesh.
#
# All ranks make the same plan of the files from the manifest, and each takes the elements that it
# has: nothing is gathered. Files are written aside, at once, or from a snapshot while training
# goes on; the folder gets its name when all of them are on disk.


@agree.door("the save")
def save(
    stack: MegatronStack,
    save_dir: str | Path,
    *,
    arguments: Mapping[str, Any] | Any = None,
    durable: bool = True,
    keep_latest: int | None = None,
    rng: bool = True,
    loader: ResumableLoader | None = None,
    ckpt_format: str = TORCH_DIST,
) -> SaveReport:
    """Saves megatron-core's own stack, as stock Megatron-LM and every engine here load it. Atomic
    and collective. A DeepSpeed engine saves by its own `save_checkpoint`.

    Args:
        stack: What `attach_megatron` returned. Its `iteration` names the tag (`iter_0000100`).
        save_dir: The folder above the tags; its pointer then names the new one.
        arguments: Megatron-LM's flags (a Namespace or a mapping), which its own load asks for.
            Default: those that the model shows.
        durable: Whether files are on disk before they count.
        keep_latest: How many whole tags of this run are left. Default: all.
        rng: Whether random states are kept.
        loader: A `ResumableLoader`, whose position is kept.
        ckpt_format: "torch_dist", the one format of Megatron-LM's that is written.

    Returns:
        What was done: path, mesh, step, bytes, seconds, notes. Of a stack that is saved in the
        background (see `attach_megatron`) that it goes on: `ucp.wait` waits, and `ucp.report` then
        says what was done.

    Raises:
        SaveError: Where a file can't be written, on every rank; older tags are as they were. In
            the background that is raised by what the program next asks for.
        UsageError: Before the first step, and for another engine.
        UnsupportedError: For another `ckpt_format`.

    Example:
        >>> stack = ucp.attach_megatron(model, optimizer, opt_param_scheduler)
        >>> saved = ucp.save(stack, "megatron")
    """
    with agree.together():
        _refuse_other(stack)
        require_written(ckpt_format)
        folder = absolute_path(save_dir)
        how = SaveOptions(durable, keep_latest, rng, loader)
        asked = StackSaveRequest(stack, folder, arguments, how)
    return save_as(asked)


def save_as(asked: StackSaveRequest) -> SaveReport:
    """As `save`."""
    stack, background = asked.stack, asked.background
    if (other := skipped(stack, stack.iteration)) is not None:
        return other
    begin = partial(_begun, asked)
    where = asked.folder / asked.tag
    report = begun_or_warned(stack, where, stack.iteration, begin)
    return report if background is not None else ended(stack, report)


def _begun(asked: StackSaveRequest) -> SaveReport:
    """Saves, or begins to."""
    stack, background = asked.stack, asked.background
    tag, values = _taken(asked)
    if background is None:
        return _settled(tag, values, None)
    begun = under_way(tag.path, str(stack.mesh), tag.steps, tag.seconds)
    rest = partial(_in_background, tag, values, begun.blocked_seconds)
    background.start(begun.path, rest, tag.sync.right)
    return begun


def _in_background(tag: "_Tag", values: Moved, blocked_seconds: float, turn: SaveTurn) -> None:
    """The rest of a save, in a thread of its own."""
    tag.turn = turn
    with as_rank_error(tag.asked.folder, tag.name):
        ended(tag.asked.stack, _settled(tag, values, blocked_seconds))


def _taken(asked: StackSaveRequest) -> "tuple[_Tag, Moved]":
    """Takes everything: from here on the stack may train. Collective. Raises as `save`."""
    tag = _Tag(asked)
    present = described_to_save(asked.stack)
    with agree.together() as block:
        require_left(tag.sync)
        structure = structure_of(asked.stack, present)
        block.value = (
            (where_to(asked.folder, tag.name), asked.how.asked()),
            knows(asked.stack, structure),
        )
    require_one_save([said for said, _ in block.values])
    known = all(is_known for _, is_known in block.values)
    plan = planned(asked.stack, structure, present, str(tag.path), known)
    job = _Job(asked.stack, present, plan.output)
    tag.take(job, job.own.differing(agree.collect(job.own.digest)))
    background, later = asked.background, ()
    if background is not None:
        background.ready()
        later = (background.snapshot,)
    with agree.together():
        output = tag.output(job)
        sink = SaveSink(tag.path, output, tag.sync, tag.sums, *later)
    with say.progress("save") as advance:
        return tag, plan.moved(present, sink, TransferRun(progress=advance))


def _settled(tag: "_Tag", values: Moved, blocked_seconds: float | None) -> SaveReport:
    """Writes what was taken; then the files get their names. Collective, in the background among
    its ranks."""
    together = agree.together if tag.turn is None else partial(agree.together, tag.turn)
    values.finish(together)
    with together() as block:
        block.value = tag.notes, tag.bytes_by_rank
    notes, bytes_by_rank = block.values[0]
    seconds = tag.seconds
    return SaveReport(
        str(tag.path),
        str(tag.manifest.mesh),
        tag.steps,
        sum(bytes_by_rank),
        seconds,
        tag.sync.seconds,
        durable=tag.asked.how.durable,
        notes=tuple(notes),
        blocked_seconds=seconds if blocked_seconds is None else blocked_seconds,
        bytes_by_rank=bytes_by_rank,
    )


class _Tag:
    """A save on its way to its name: everything of it that is no element of a tensor, as it was
    when the save was asked for. `bytes_by_rank` are what each rank wrote, on rank 0 and once the
    files have their names."""

    def __init__(self, asked: StackSaveRequest) -> None:
        self.asked, self.steps = asked, asked.stack.iteration
        self.name = asked.tag
        self.path = asked.folder / self.name
        self.sync = asked.how.syncs(asked.folder, self.name)
        self.notes: list[str] = []
        self.bytes_by_rank: tuple[int, ...] = ()
        self.turn: SaveTurn | None = None  # in the background
        self._started = time.perf_counter()
        # in the background the program's process groups may be gone
        self._rank, self._world = agree.world()

    @property
    def seconds(self) -> float:
        """Since the save began."""
        return time.perf_counter() - self._started

    def take(self, job: "_Job", apart: PerRank) -> None:
        """What changes with a step. `apart` is what differs from rank to rank. Collective."""
        how, rank = self.asked.how, self._rank
        self.manifest = job.manifest
        with agree.together():
            self.sums = FingerprintWriter(job.states, job.output)
            common = job.common(self.asked.arguments, str(self.path))
            # a live scheduler, and a program's own flags, may be in it
            self._common = copy.deepcopy(common.output())
            said = {TAG: self.name, MOVED_LATEST: True}
            said |= {PER_RANK: apart.as_value()} if apart else {}
            self._said = copy.deepcopy(said | position_of(how.loader))
            self._beside: dict[str, bytes] = {}
            if how.rng:
                self._beside[resume_state.file_name(rank)] = resume_state.file_bytes()
            if apart:
                own = per_rank.file_name(rank)
                self._beside[own] = job.own.text(self.path / own, apart).encode()
        self.notes += [*job.notes, *common.notes]

    def output(self, job: "_Job") -> FolderOutput:
        """The folder on paper."""
        plan, files = job.output.plan, job.output.files
        self._owners = {file.name: file.owner or 0 for file in files}
        finish = partial(finish_files, plan=plan, common=self._common)

        def close(aside: Path) -> None:
            with self.sync.right.changing(f"writes the index of {aside}"):
                finish(aside)

        return FolderOutput(job.output.parts, files, close, self._publish, "save", self._each)

    def _each(self, aside: Path, rank: int) -> list[Path]:
        """Writes what a rank has for itself."""
        for name, data in self._beside.items():
            (aside / name).write_bytes(data)
        return [aside / name for name in self._beside]

    def _publish(self, aside: Path) -> None:
        """The manifest, the name, the pointers; then older tags go."""
        asked = self.asked
        folder, interval = asked.folder, asked.retain_interval
        before = newest(folder) if interval else None
        entries = entries_of(aside)
        table, apart = self.sums.table()
        whole = completed(self.manifest, entries, self._said | recorded_as(table, apart), folder)
        self.notes += diverged(apart)
        self.notes += publish(aside, folder, whole, MEGATRON_LATEST, self.sync)
        self.notes += prune(folder, asked.how.keep_latest, asked.stack, self.sync)
        run = self.manifest.run[RUN]
        self.notes += retired(folder, before, self.steps, run, interval, self.sync)
        self.bytes_by_rank = self._sizes(entries)

    def _sizes(self, entries: list[FileEntry]) -> tuple[int, ...]:
        """What each rank wrote: the files that all ranks have one of, and those of the plan; the
        first one all else."""
        owners = dict(self._owners)
        for rank in range(self._world):
            owners |= {resume_state.file_name(rank): rank, per_rank.file_name(rank): rank}
        sizes = [0] * self._world
        for entry in entries:
            sizes[owners.get(entry.name, 0)] += entry.size_bytes
        return tuple(sizes)


def _refuse_other(stack: Any) -> None:
    if not isinstance(stack, MegatronStack):
        raise UsageError(
            "ucp.save is for megatron-core's own stack",
            expected="what ucp.attach_megatron returned",
            found=type(stack).__name__,
            fix="an engine of DeepSpeed saves by its own engine.save_checkpoint",
        )


class _Job:
    """One save on its way: what is written, the same on every rank, and what this rank has."""

    def __init__(self, stack: MegatronStack, states: CurrentStates, output: StackOutput) -> None:
        self.stack, self.states, self.output = stack, states, output
        self.live, self.manifest = states.live, states.manifest
        self.own = values_of(self.live)
        self.notes = list(self.live.own.taken_as)
        self.kind = kind_of(stack.optimizer)

    def common(self, arguments: Any, file: str) -> CommonFile:
        """What stands in `common.pt`."""
        stack = self.stack
        client = {
            ARGUMENTS_KEY: {**flags_of_model(stack), **plain_flags(arguments)},
            OPERATIONS: stack.floating_point_operations,
        }
        extras = extras_of(self.live, client)
        mesh, apart = stack.mesh, stack.mesh.experts_apart
        return CommonFile(self.manifest, extras, mesh, file, self.kind, apart)
