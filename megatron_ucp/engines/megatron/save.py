"""`save` of megatron-core's stack: a distributed checkpoint that stock Megatron-LM and every
engine here load on any mesh.

All ranks make the same plan of the files from the manifest, and each takes the elements that it
has: nothing is gathered. Files are written aside, at once, or from a snapshot while training
goes on; the folder gets its name when all of them are on disk."""

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from megatron_ucp import say
from megatron_ucp.core.box import Box, Ints, flat_boxes
from megatron_ucp.core.layout import Piece
from megatron_ucp.core.manifest import BufferPart, FileEntry, Manifest, ParamSpec
from megatron_ucp.core.names import MASTER, VALUE
from megatron_ucp.core.plan import Slot
from megatron_ucp.engines.background import CopiedRuns, SnapshotMemory
from megatron_ucp.engines.live import flat_view
from megatron_ucp.engines.mcore_model import bare_model, keys_of_chunks
from megatron_ucp.engines.megatron.live import CurrentStates, LiveMegatron, present_to_save
from megatron_ucp.engines.megatron.optimizer import kind_of
from megatron_ucp.engines.megatron.shard import MegatronStack
from megatron_ucp.engines.megatron.state import read_extras, read_state
from megatron_ucp.engines.record import run_of
from megatron_ucp.engines.run_state import DrawnState, ResumableLoader
from megatron_ucp.engines.save import (
    SAVE_FAILED,
    PendingSave,
    SaveOptions,
    SaveReport,
    SaveRequest,
    Written,
    as_save_error,
    save_engine,
)
from megatron_ucp.errors import PlanError, SaveError, UcpError, UnsupportedError, UsageError
from megatron_ucp.formats import output_folder
from megatron_ucp.formats.file_layout import FileLayout
from megatron_ucp.formats.megatron.arguments import Kind
from megatron_ucp.formats.megatron.index_writer import file_of
from megatron_ucp.formats.megatron.run_state import ARGUMENTS_KEY, OPERATIONS
from megatron_ucp.formats.megatron.torch_dist import BACKEND as TORCH_DIST
from megatron_ucp.formats.megatron.torch_dist import METADATA_FILE
from megatron_ucp.formats.megatron.writer import (
    WEIGHT,
    CommonFile,
    ModelKeys,
    PlannedChunk,
    TorchDistPlan,
    WantedTensor,
    entry_in,
    finish_files,
    plan_torch_dist,
)
from megatron_ucp.formats.output_folder import Syncs, retire
from megatron_ucp.formats.pt.archive import Output
from megatron_ucp.formats.pt.refs import ITEMSIZE
from megatron_ucp.formats.store import Location, StorePath
from megatron_ucp.formats.tags import (
    MEGATRON_LATEST,
    iteration_name,
    iteration_of_name,
    newest_named,
)
from megatron_ucp.reshard import agree
from megatron_ucp.reshard.execute import Progress
from megatron_ucp.reshard.fingerprint import (
    HeldPart,
    Sums,
    known_sums,
    parts_of_rank,
    sums_of_parts,
)
from megatron_ucp.reshard.folder import FileRange, FolderOutput, RanksFolder, WrittenRange
from megatron_ucp.reshard.options import absolute_path

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


@dataclass(frozen=True, slots=True)
class WrittenRun:
    """What this rank writes of a state of a parameter, from element `first` to `last` of its part
    of the parameter there: the `chunks` of it lie one after the other."""

    param: str
    state: str
    place: BufferPart
    first: int
    last: int
    chunks: Sequence[PlannedChunk]

    def follows(self, other: "WrittenRun") -> bool:
        """Whether it lies right behind another one in memory."""
        of = self.param, self.state, self.place, self.first
        return of == (other.param, other.state, other.place, other.last)


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
        params, tensors = states.by_name, list(self._tensors(every))
        self.plan: TorchDistPlan = plan_torch_dist(params, tensors, keys, kind=kind)

    @cached_property
    def files(self) -> tuple[FileLayout, ...]:
        """This rank's, and on the first one all others, of which their ranks alone know what is in
        them."""
        return tuple(self.plan.layouts(lambda chunk: _NOT_READ, self._rank))

    @cached_property
    def own(self) -> list[WrittenRun]:
        """What this rank writes, each run of memory once, in the order of its file."""
        name = file_of(self._rank)
        runs = {
            (param, (run.start, run.stop)): run
            for param, found in self._runs.items()
            for run in found
        }
        out: list[WrittenRun] = []
        for chunk in self.plan.chunks:
            if chunk.file != name:
                continue
            tensor, run = chunk.tensor, runs[chunk.tensor.param, chunk.box]
            state = VALUE if tensor.state == WEIGHT else tensor.state
            ends = run.local, run.local + run.elems
            found = WrittenRun(tensor.param, state, run.place, *ends, [chunk])
            if out and found.follows(out[-1]):
                out[-1] = replace(out[-1], last=found.last, chunks=[*out[-1].chunks, chunk])
            else:
                out.append(found)
        return out

    def _cut(
        self, runs: Mapping[str, Sequence[OwnedBox]], keys: ModelKeys
    ) -> dict[str, list[OwnedBox]]:
        """The runs of each parameter in boxes that lie under one key each."""
        return {
            name: [part for run in found for part in _cut(run, self.states.by_name[name], keys)]
            for name, found in runs.items()
        }

    def _tensors(self, every: Mapping[str, Sequence[OwnedBox]]) -> Iterator[WantedTensor]:
        for spec in self.states.params:
            runs = every[spec.name]
            if not runs:
                continue
            boxes = tuple((run.start, run.stop) for run in runs)
            owners = tuple(first_rank(self.states, run.place) for run in runs)
            yield WantedTensor(spec.name, WEIGHT, spec.dtype, boxes, owners)
            for state, dtype in self._stored(spec):
                yield WantedTensor(spec.name, state, dtype, boxes, owners)

    def _stored(self, spec: ParamSpec) -> list[tuple[str, str]]:
        """The states that the files hold beside the weights."""
        is_master = spec.dtype == "float32" and self._kind is not Kind.DISTRIBUTED
        found = self.states.states_of(spec.name).items()
        return [(s, d) for s, d in found if s != VALUE and not (s == MASTER and is_master)]

    @cached_property
    def written(self) -> set[tuple[str, BufferPart]]:
        """What is read of each parameter, of what this rank has: of copies one."""
        return {(name, run.place) for name, runs in self._runs.items() for run in runs}


_NOT_READ = 0, Slot(0, (), 0, "")  # each rank takes its own memory: nobody plans a chunk


def _cut(run: OwnedBox, spec: ParamSpec, keys: ModelKeys) -> Iterator[OwnedBox]:
    """What a rank has of a parameter, in boxes that lie under one key each."""
    local = run.local
    for start, stop in keys.cut(spec.name, (run.start, run.stop)):
        part = replace(run, start=start, stop=stop, local=local)
        local += part.elems
        yield part


# ---- taken
#
# What a rank writes is its own memory: it is copied while training stands still, or written at
# once.


class StackFiles:
    """The files of one save on this rank. `others` are the names of the files that hold nothing of
    a tensor, which rank 0 writes."""

    def __init__(
        self, present: CurrentStates, output: StackOutput, sink: RanksFolder, others: Sequence[str]
    ) -> None:
        self._present, self._output, self.sink, self._others = present, output, sink, others
        names = present.live.shard.names.items()
        self._weights = {name: tensor for tensor, name in names}
        self._copies = CopiedRuns()
        self._sums: Sums = {}
        self._waiting: list[HeldPart] = []

    def take(self, snapshot: SnapshotMemory | None, advance: Progress) -> None:
        """Copies what is written later, and writes what finds no room. Raises OSError."""
        own, writer = self._output.own, self.sink.writer
        total, done = sum(run.last - run.first for run in own), 0
        now: list[FileRange] = []
        for run in own:
            memory = self._memory(run).view(torch.uint8)
            copy = self._copy(snapshot, memory)
            at, ranges = 0, list[FileRange]()
            for chunk in run.chunks:
                size = math.prod(chunk.shape) * ITEMSIZE[chunk.tensor.dtype]
                path, place = self.sink.aside / chunk.file, chunk.data_offset
                part = (memory if copy is None else copy)[at : at + size]
                ranges.append(FileRange(path, place, place, part))
                at += size
            if copy is None:
                now += ranges
            else:
                self._copies.add(memory, copy)
                writer.waiting += ranges
            done += run.last - run.first
            advance(done, total)
        live: list[HeldPart] = []
        for part in self._parts():
            kept = self._copies.find(part.memory)
            if kept is None:
                live.append(part)
            else:
                self._waiting.append(replace(part, memory=kept))
        writer.known = known_sums(live)
        writer.now(now)
        self._sums = sums_of_parts(live, writer.known)
        self._present.require_unstepped()
        writer.known = known_sums(self._waiting)

    def _copy(self, snapshot: SnapshotMemory | None, memory: torch.Tensor) -> torch.Tensor | None:
        copy = None if snapshot is None else snapshot.copy(memory)
        if copy is None and isinstance(self.sink.aside, StorePath):
            return memory.cpu().clone()  # it is sent in the order of the file
        return copy

    def _memory(self, run: WrittenRun) -> torch.Tensor:
        """The engine's own: of weights those that the model computes with."""
        if run.state == VALUE:
            return flat_view(self._weights[run.param].detach())[run.first : run.last]
        number, _, part = run.place
        states = self._present.manifest
        _, index = states.holders[run.param][0]
        buffer, member = states.buffers[number], states.member(number, index)
        first = buffer.of(run.state).offset(member, part, run.first)
        return self._present.read(Slot(*run.place, run.state), first, first + run.last - run.first)

    def _parts(self) -> Iterator[HeldPart]:
        """What counts for the fingerprint of this rank's memory: what it writes; and its copies of
        what others write, so that copies which differ are seen. Of data-parallel ranks that have
        the same the first one looks; of buffers of modules, which may differ, all."""
        manifest, written = self._present.manifest, self._output.written

        def counts(slot: Slot, param: str) -> bool:
            is_first = self.sink.rank == first_rank(manifest, slot.place)
            is_seen = is_first or manifest.by_name[param].kind == "buffer"
            return is_seen or (param, slot.place) in written

        return parts_of_rank(self._present, counts)

    def write(self) -> Written:
        """Raises SaveError."""
        self.sink.finish()
        size_bytes = sum((self.sink.aside / name).stat().st_size for name in self._own)
        sums = dict(self._sums)
        for key, sum_ in sums_of_parts(self._waiting, self.sink.writer.known).items():
            sums[key] = sums.get(key, 0) ^ sum_
        return Written(size_bytes, sums)

    def close(self, others: Sequence[WrittenRange]) -> list[FileEntry]:
        return [entry_in(self.sink.aside / name) for name in self._own]

    @property
    def _own(self) -> list[str]:
        """The names of the files that this rank writes."""
        own = [file.name for file in self.sink.own_files]
        return own if self.sink.rank else [*own, *self._others]


# ---- save


TORCH = "torch"  # as Megatron-LM calls its older files: they are read, and written by itself


class StackFolder(RanksFolder):
    """The folder of a save. An older tag of that name is replaced."""

    what_failed = SAVE_FAILED

    def _make_aside(self) -> None:
        if not isinstance(self.aside, StorePath):  # that is claimed
            parent, name = self.folder.parent, self.folder.name
            self._held.enter_context(output_folder.begin(parent, name, self.sync.right))


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
        drawn_now = partial(DrawnState.now, self.options.loader, self.options.rng)
        state = read_state(stack, present.live.shard, drawn_now, self.path)
        manifest = replace(present.manifest, run=state.facts)
        with agree.together():
            keys = keys_of_chunks(stack.chunks, present.manifest.by_name)
            rank, _ = agree.world()
            output = StackOutput(present.manifest, kind_of(stack.optimizer), keys, rank)
            common = self._common(present.live, manifest)
            # a live scheduler, and a program's own flags, may be in it
            values = copy.deepcopy(common.output())
            close = partial(_finish, sync, output.plan, values)
            folder = FolderOutput((), output.files, close, verb="save")
            sink = StackFolder(self.path, folder, sync, self.claimed)
            files = StackFiles(present, output, sink, (values.name, METADATA_FILE))
            older = self._older() if rank == 0 else None
        with agree.together():
            left.enter_context(sink)
        snapshot = None if background is None else background.snapshot
        with as_save_error(), agree.together(), say.progress("save") as advance:
            files.take(snapshot, advance)
        return PendingSave(
            manifest.mesh,
            lambda: manifest,
            lambda: manifest,
            replace(state, notes=(*state.notes, *common.notes)),
            files,
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
