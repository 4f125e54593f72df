"""`save` of megatron-core's stack: a distributed checkpoint that stock Megatron-LM and every
engine here load on any mesh.

All ranks make the same plan of the files from the manifest, and each takes the elements that it
has: nothing is gathered. Files are written aside, at once, or from a snapshot while training
goes on; the folder gets its name when all of them are on disk."""

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from megatron_ucp import say
from megatron_ucp.core.box import Box, Ints, flat_boxes
from megatron_ucp.core.flat import FlatBuffer, alone
from megatron_ucp.core.layout import Chunks, Piece
from megatron_ucp.core.manifest import BufferPart, FileEntry, Manifest, ParamSpec
from megatron_ucp.core.mesh import Coords, Mesh
from megatron_ucp.core.names import MASTER, VALUE, Keeper
from megatron_ucp.core.plan import Slot, Want
from megatron_ucp.engines.live import flat_view
from megatron_ucp.engines.megatron.live import CurrentStates, LiveMegatron, present_to_save
from megatron_ucp.engines.megatron.model import bare_model, keys_of_chunks
from megatron_ucp.engines.megatron.optimizer import kind_of
from megatron_ucp.engines.megatron.shard import MegatronStack
from megatron_ucp.engines.megatron.state import read_extras, read_state
from megatron_ucp.engines.record import record_of, run_of
from megatron_ucp.engines.run_state import DrawnState, ResumableLoader
from megatron_ucp.engines.save import (
    OTHER_TENSORS,
    SAVE_FAILED,
    PendingSave,
    SaveOptions,
    SaveReport,
    SaveRequest,
    Written,
    save_engine,
)
from megatron_ucp.errors import PlanError, SaveError, UcpError, UnsupportedError, UsageError
from megatron_ucp.formats import output_folder
from megatron_ucp.formats.file_layout import FileLayout, FilePiece
from megatron_ucp.formats.megatron.arguments import Kind
from megatron_ucp.formats.megatron.run_state import ARGUMENTS_KEY, OPERATIONS
from megatron_ucp.formats.megatron.torch_dist import BACKEND as TORCH_DIST
from megatron_ucp.formats.megatron.torch_dist import METADATA_FILE
from megatron_ucp.formats.megatron.writer import (
    WEIGHT,
    CommonFile,
    ModelKeys,
    PlannedChunk,
    TorchDistPlan,
    Wish,
    entry_in,
    finish_files,
    plan_torch_dist,
)
from megatron_ucp.formats.output_folder import Syncs, retire
from megatron_ucp.formats.pt.archive import Output
from megatron_ucp.formats.store import Location, StorePath
from megatron_ucp.formats.tags import (
    MEGATRON_LATEST,
    iteration_name,
    iteration_of_name,
    newest_named,
)
from megatron_ucp.reshard import agree
from megatron_ucp.reshard.checksums import KnownSums
from megatron_ucp.reshard.execute import TORCH_DTYPES
from megatron_ucp.reshard.fingerprint import Sums, sums_of, sums_of_rank
from megatron_ucp.reshard.folder import (
    FileRange,
    FolderOutput,
    RanksFolderSink,
    Snapshot,
    WrittenRange,
)
from megatron_ucp.reshard.memories import Memories
from megatron_ucp.reshard.options import absolute_path
from megatron_ucp.reshard.transfer import (
    Moved,
    Proved,
    SinkPart,
    TransferRun,
    moved,
    refuse_lost,
)

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


def runs_of_rank(
    manifest: Manifest, param: str, held: Mapping[int, BufferPart], rank: int
) -> list[OwnedBox]:
    """Those of `runs_of` of which a rank is the first that has them; `held` are its parts by the
    number of their buffer. What other ranks have is not looked at."""
    number, index = manifest.holders[param][0]
    if number not in held:
        return []
    buffer, member = manifest.buffers[number], manifest.member(number, index)
    _, cut, part = place = held[number]
    low, high = buffer.owned(member, part)
    if low >= high or rank != first_rank(manifest, place):
        return []
    pieces = manifest.pieces(member, cut)
    share = tuple(piece.full for piece in pieces)
    for other in manifest.cuts_of(buffer):
        if other == cut:
            break
        if tuple(piece.full for piece in manifest.pieces(member, other)) == share:
            return []
    return [
        OwnedBox(piece.full.start, piece.full.stop, place, index, piece.flat_start)
        for piece in _contiguous(pieces, low, high)
    ]


def first_rank(manifest: Manifest, place: BufferPart) -> int:
    """The first rank that has a part of a buffer: it writes it."""
    number, cut, part = place
    return manifest.mesh.rank_of((*manifest.buffers[number].at, *cut), part)


def _contiguous(pieces: tuple[Piece, ...], low: int, high: int) -> Iterator[Piece]:
    """The flat range [low, high) of a rank's parameter as pieces."""
    for box in flat_boxes(pieces[0].view, low, high):
        for piece in pieces:
            if (part := piece.clip_local(box)) is not None:
                yield part


# ---- output
#
# A save of megatron-core's stack on paper: which chunk of which state lies where, and which rank
# writes it.
#
# Chunks are cut as the ranks hold elements, each file is one rank's: so every rank writes what it
# has itself, and nothing is gathered. What it has is all that a rank plans; the first one, who
# writes the index, plans where the chunks of all others lie too.


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
        self._tensors = {name: tensor for tensor, name in present.live.shard.names.items()}

    def parts(self) -> list[BufferPart]:
        places = {(number, cut) for number, cut, _ in self._live.parts()}
        return [(at, cut, 0) for number, cut in places for at in self._held_as.get(number, ())]

    def read(self, slot: Slot, first: int, last: int) -> torch.Tensor:
        name = self.manifest.params[slot.buffer].name
        return flat_view(self._tensors[name].detach())[first:last]


class StackOutput:
    """The files of a save, as one rank plans it. `kind` is the optimizer's; `keys` are those of the
    model."""

    def __init__(self, states: Manifest, kind: Kind, keys: ModelKeys, rank: int) -> None:
        self.states, self._kind, self._rank = states, kind, rank
        held = {part[0]: part for part in states.parts_of(rank)}
        own = {s.name: runs_of_rank(states, s.name, held, rank) for s in states.params}
        self._runs = self._cut(own, keys)
        every = self._runs
        if rank == 0:
            every = self._cut({s.name: runs_of(states, s.name) for s in states.params}, keys)
        else:
            keys = replace(keys, extra_states=())
        params, wishes = states.by_name, list(self._wishes(every))
        self.plan: TorchDistPlan = plan_torch_dist(params, wishes, keys, kind=kind)
        self._slots: dict[tuple[int, str, tuple[Ints, Ints]], int] = {}  # the buffer of a box
        self.parts = self._part(_STATES), self._part(_WEIGHTS)

    @cached_property
    def files(self) -> tuple[FileLayout, ...]:
        """This rank's, and on the first one all others, of which their ranks alone know what is in
        them."""
        return tuple(self.plan.layouts(self._slot, self._rank))

    def _cut(
        self, runs: Mapping[str, Sequence[OwnedBox]], keys: ModelKeys
    ) -> dict[str, list[OwnedBox]]:
        """The runs of each parameter in boxes that lie under one key each."""
        return {
            name: [part for run in found for part in _cut(run, self.states.by_name[name], keys)]
            for name, found in runs.items()
        }

    def _wishes(self, every: Mapping[str, Sequence[OwnedBox]]) -> Iterator[Wish]:
        for spec in self.states.params:
            runs = every[spec.name]
            if not runs:
                continue
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
        """As the function."""
        return first_rank(self.states, place)

    @cached_property
    def written(self) -> set[tuple[str, BufferPart]]:
        """What is read of each parameter, of what this rank has: of copies one."""
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
            runs = self._runs[spec.name]
            if not held or not runs:
                continue
            blocks = Chunks(tuple(((run.start, run.stop),) for run in runs))
            specs.append(replace(spec, layout=blocks, on_mesh=None, order=None))
            numbers = range(len(buffers), len(buffers) + len(runs))
            for chunk, run in enumerate(runs):
                self._slots[part, spec.name, (run.start, run.stop)] = len(buffers)
                buffers.append(alone(spec.name, run.elems, held, axes=(), chunk=chunk))
            slots = (Slot(number, (), 0, state) for number in numbers for state, _ in held)
            wants += [(slot, slot.state) for slot in slots]
        target = Manifest(Keeper.PAPER, Mesh(), tuple(specs), tuple(buffers))
        return SinkPart(target, tuple(wants))

    def _slot(self, chunk: PlannedChunk) -> tuple[int, Slot]:
        """What a chunk is read into: the part, and its slot."""
        wish = chunk.wish
        part, state = (_WEIGHTS, VALUE) if wish.state == WEIGHT else (_STATES, wish.state)
        return part, Slot(self._slots[part, wish.param, chunk.box], (), 0, state)


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
        self._output = output
        self._copies = _copies(present, output)
        self._windows: dict[tuple[int, Slot, int], Sums] = {}

    def wrote(
        self, part: int, slot: Slot, low: int, memory: torch.Tensor, known: KnownSums
    ) -> None:
        """Elements of a part of the output. Those of one run were summed as they were written."""
        state = self._output.stands_for(part, slot)
        if state is None:
            return
        target, window = self._output.parts[part].target, (low, low + len(memory))
        wants, read = [(slot, state)], lambda _, a, b: memory[a - low : b - low]
        found = sums_of(target, wants, read, within=window, known=known)
        # some weights are written twice, under two keys
        self._windows[part, slot, low] = {
            (name, kept, dtype, *self._output.home(part, slot.buffer)): sum_
            for (name, kept, dtype, *_), sum_ in found.items()
        }

    def of_rank(self) -> Sums:
        """All that this rank wrote."""
        out = dict(self._copies)
        for window in self._windows.values():
            for key, sum_ in window.items():
                out[key] = out.get(key, 0) ^ sum_
        return out


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
        rank, _ = agree.world()
        self.output = StackOutput(present.manifest, kind_of(stack.optimizer), keys, rank)
        self._weights = SavedWeights(present)
        self._source = UnsteppedMemories(file, present, self._weights)
        self._parts: Sequence[Proved] = ()

    def moved(self, present: CurrentStates, sink: RanksFolderSink, run: TransferRun) -> Moved:
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


# ---- save


TORCH = "torch"  # as Megatron-LM calls its older files: they are read, and written by itself


class StackSink(RanksFolderSink):
    """The files of a save, which all ranks write. An older tag of that name is replaced. `sums` are
    told of every byte as it is written."""

    what_failed = SAVE_FAILED

    def __init__(
        self,
        path: Location,
        output: FolderOutput,
        sync: Syncs,
        sums: FingerprintWriter,
        snapshot: Snapshot | None,
        claimed: Location | None = None,
    ) -> None:
        super().__init__(path, output, sync, snapshot, claimed)
        self._tag, self._sums = path.name, sums

    @cached_property
    def _pieces(self) -> dict[tuple[Location, int], FilePiece]:
        """Those of this rank's files, by file and first byte."""
        return {
            (self.aside / file.name, piece.place): piece
            for file in self.own_files
            for piece in file.pieces
        }

    def wrote(self, one: FileRange) -> None:
        piece = self._pieces[one.path, one.record or 0]
        memory = one.memory.view(TORCH_DTYPES[piece.dtype])
        low = (one.at - piece.place) // memory.element_size()
        self._sums.wrote(piece.part, piece.slot, low, memory, self.writer.known)

    @contextmanager
    def _life(self) -> Iterator[None]:
        if isinstance(self.aside, StorePath):  # it is claimed
            yield
            return
        with output_folder.begin(self.folder.parent, self._tag, self.sync.right):
            yield


@dataclass(frozen=True)
class StackFiles:
    """The files of one save on this rank: what was `moved` out of the stack, and the sums of it.
    `others` are the names of the files that hold nothing of a tensor, which rank 0 writes."""

    moved: Moved
    sink: StackSink
    sums: FingerprintWriter
    others: Sequence[str]

    def write(self) -> Written:
        """Raises InexactError for values that the files can't hold, SaveError."""
        refuse_lost(self.moved.lost, self.moved.file, self.sink.verb)
        self.sink.finish()
        size_bytes = sum((self.sink.aside / name).stat().st_size for name in self._own)
        return Written(size_bytes, self.sums.of_rank())

    def close(self, others: Sequence[WrittenRange]) -> list[FileEntry]:
        """Every file is whole already. Raises OSError."""
        return [entry_in(self.sink.aside / name) for name in self._own]

    @property
    def _own(self) -> list[str]:
        """The names of the files that this rank writes."""
        own = [file.name for file in self.sink.own_files]
        return own if self.sink.rank else [*own, *self.others]


@dataclass(frozen=True)
class StackSave(SaveRequest):
    """A save of a stack with Megatron-LM's flags (`arguments`). `retain_interval`: the save before
    this one goes, unless its iteration is a multiple (None: it stays)."""

    arguments: Any = None
    retain_interval: int | None = None

    @classmethod
    def of(
        cls,
        stack: MegatronStack,
        folder: Location,
        arguments: Any,
        options: SaveOptions,
        retain_interval: int | None = None,
    ) -> "StackSave":
        """Under the name of the stack's iteration."""
        steps = stack.iteration
        where = folder, iteration_name(steps), steps
        return cls(stack, *where, options, MEGATRON_LATEST, arguments, retain_interval)

    def take(self, sync: Syncs, left: ExitStack) -> PendingSave:
        """Takes everything. Collective. Raises as `save`."""
        stack, background = self.engine, self.background
        present = _present(stack)
        with agree.together(numbers=[0]) as block:
            structure = structure_of(stack, present)
            block.numbers = [int(knows(stack, structure))]
        known = bool(block.lowest[0])
        is_other = not known and record_of(stack).plan is not None
        plan = planned(stack, structure, present, str(self.path), known)
        drawn_now = partial(DrawnState.now, self.options.loader, self.options.rng)
        state = read_state(stack, present.live.shard, drawn_now, self.path)
        manifest = replace(present.manifest, run=state.facts)
        with agree.together():
            sums = FingerprintWriter(present, plan.output)
            common = self._common(present.live, manifest)
            # a live scheduler, and a program's own flags, may be in it
            values = copy.deepcopy(common.output())
            close = partial(_finish, sync, plan.output.plan, values)
            output = FolderOutput(plan.output.parts, plan.output.files, close, verb="save")
            snapshot = None if background is None else background.snapshot
            sink = StackSink(self.path, output, sync, sums, snapshot, self.claimed)
            older = self._older() if sink.rank == 0 else None
        with say.progress("save") as advance:
            taken = plan.moved(present, sink, TransferRun(progress=advance))
        left.enter_context(taken.held)
        return PendingSave(
            manifest.mesh,
            lambda: manifest,
            lambda: manifest,
            replace(state, notes=(*state.notes, *common.notes, *[OTHER_TENSORS] * is_other)),
            StackFiles(taken, sink, sums, (values.name, METADATA_FILE)),
            planned=not known,
            retire=partial(self._retire, older, sync),
        )

    def _common(self, live: LiveMegatron, manifest: Manifest) -> CommonFile:
        """What stands in `common.pt`."""
        stack = self.engine
        client = {
            ARGUMENTS_KEY: {**flags_of_model(stack), **plain_flags(self.arguments)},
            OPERATIONS: stack.floating_point_operations,
        }
        extras, mesh = read_extras(stack, live.shard, client), stack.mesh
        kind, apart = kind_of(stack.optimizer), mesh.experts_apart
        return CommonFile(manifest, extras, mesh, str(self.path), kind, apart)

    def _older(self) -> int | None:
        """The iteration that goes once this save counts, as `--save-retain-interval` asks."""
        interval = self.retain_interval
        if not interval:
            return None
        with suppress(UcpError, OSError):  # the save itself says what is wrong with its folder
            named = newest_named(self.folder)
            before = None if named is None else iteration_of_name(named.tag)
            if before and before != self.steps and before % interval:
                return before
        return None

    def _retire(self, iteration: int | None, sync: Syncs) -> list[str]:
        """Removes the save of an iteration. What can't be removed is said, and no error."""
        if iteration is None:
            return []
        name = iteration_name(iteration)
        try:
            return [retire(self.folder / name, run_of(self.engine).id, sync.right)]
        except (OSError, UcpError) as error:
            return [f"{name} could not be removed: {error}"]


def _finish(sync: Syncs, plan: TorchDistPlan, common: Output, aside: Location) -> None:
    """Writes what holds nothing of a tensor."""
    with sync.right.changing(f"writes the index of {aside}"):
        finish_files(aside, plan, common)


def _present(stack: MegatronStack) -> CurrentStates:
    """The stack with the states that its optimizers have now. Collective. Raises UsageError where
    they have none, UnsupportedError for some that are not in fp32."""
    present = present_to_save(stack, SaveError)
    with agree.together():
        if not present.states:
            raise UsageError(
                "there is nothing that Megatron-LM could load as the state of an optimizer",
                expected="its states",
                found="none, before the first step",
                fix="save after the first step",
            )
        odd = [f"{state} in {dtype}" for state, dtype in present.states if dtype != "float32"]
        if odd:
            raise UnsupportedError(
                "the optimizer keeps a state in another dtype than megatron-core's files have",
                expected="float32",
                found=", ".join(odd),
                fix="keep the optimizer's states in fp32: leave --exp-avg-dtype and "
                "--exp-avg-sq-dtype out",
            )
    return present


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


@agree.door("the save")
def save(
    engine: MegatronStack,
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
    and collective. An engine of DeepSpeed saves by its own `save_checkpoint`.

    Args:
        engine: What `attach_megatron` returned. Its `iteration` names the tag (`iter_0000100`).
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
        if not isinstance(engine, MegatronStack):
            raise UsageError(
                "ucp.save is for megatron-core's own stack",
                expected="what ucp.attach_megatron returned",
                found=type(engine).__name__,
                fix="an engine of DeepSpeed saves by its own engine.save_checkpoint; "
                "`megatron-ucp convert --to dcp` makes a folder for FSDP2 of that",
            )
        require_written(ckpt_format)
        options = SaveOptions(durable, keep_latest, rng, loader)
        request = StackSave.of(engine, absolute_path(save_dir), arguments, options)
    return save_engine(request)
