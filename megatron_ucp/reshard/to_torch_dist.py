"""A checkpoint as a folder that Megatron loads on any mesh: planned and proved as a whole, then
written window by window."""

import math
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from isal.isal_zlib import crc32

from megatron_ucp.core.flat import FlatBuffer, alone
from megatron_ucp.core.keepers import Keeper
from megatron_ucp.core.layout import Chunks
from megatron_ucp.core.manifest import SAVED_ON, Manifest, ParamSpec
from megatron_ucp.core.manifest_json import to_json
from megatron_ucp.core.mesh import Mesh
from megatron_ucp.core.plan import Slot
from megatron_ucp.core.states import MASTER, VALUE
from megatron_ucp.core.values import TENSOR
from megatron_ucp.errors import SaveError, StateMismatchError, UnsupportedError, some_of
from megatron_ucp.formats import durable
from megatron_ucp.formats.base import Checkpoint
from megatron_ucp.formats.megatron.arguments import mesh_of, plain_arguments
from megatron_ucp.formats.megatron.common_file import CommonFile
from megatron_ucp.formats.megatron.extras import ARGUMENTS_KEY, CLIENT_KEYS
from megatron_ucp.formats.megatron.writer import (
    ADAM_STATES,
    WEIGHT,
    PlannedChunk,
    TorchDistPlan,
    Wish,
    entries_of,
    finish_files,
    make_files,
    plan_torch_dist,
    write_around,
)
from megatron_ucp.formats.pt.known import KNOWN
from megatron_ucp.formats.pt.output import Output
from megatron_ucp.formats.pt.strangers import named_in
from megatron_ucp.formats.pt.values import ITEMSIZE
from megatron_ucp.reshard.conversion_job import signed
from megatron_ucp.reshard.execute import bytes_of
from megatron_ucp.reshard.expert_meshes import check_experts
from megatron_ucp.reshard.findings import Progress
from megatron_ucp.reshard.match import match_ties
from megatron_ucp.reshard.output_folder import (
    FileRun,
    in_threads,
    require_free,
    sync_all,
    written_aside,
)
from megatron_ucp.reshard.rounding import RoundingReader
from megatron_ucp.reshard.target import Wanted
from megatron_ucp.reshard.windows import WINDOW_BYTES, ThreadMemory, pool

_FILES = 8  # not as many as there are cores: every machine writes the same folder
_NARROW = frozenset({"narrow"})  # training copies are casts of the masters


@dataclass(frozen=True)
class Written:
    """What is written: the target as chunks, the manifest of its training copies, the plan of the
    files, and `common.pt`; and the mesh that it is for."""

    states: Manifest
    weights: Manifest
    plan: TorchDistPlan
    common: Output
    mesh: Mesh

    @property
    def recorded(self) -> Manifest:
        """What lies beside the files as a manifest, without what identifies them. Where an element
        lies is said by the files' own index."""
        values = [one for one in self.weights.buffers if one.states[0][0] == VALUE]
        return replace(self.states, buffers=(*self.states.buffers, *values))

    @property
    def saved_on(self) -> str:
        """The mesh as a reader of the files finds it."""
        said = plain_arguments(self.common.tree.get("args"))
        return str(mesh_of(said) if said else self.mesh)


def written(wanted: Wanted, source: Checkpoint, mesh: Mesh, notes: list[str]) -> Written:
    """Everything about the folder but its tensors. `mesh` is the one that it is for: with expert
    parallelism Megatron keeps the groups of experts apart. Raises UnsupportedError,
    StateMismatchError, and as `check_experts`."""
    check_experts(wanted.source, wanted.target.mesh, wanted.file)
    match_ties(source.manifest, wanted.file)
    _check_states(source.manifest, wanted.file)
    _refuse_classes(source.manifest, wanted.file)
    params = {name: _chunked(spec) for name, spec in wanted.params.items()}
    states = _states(params, wanted.source)
    extras = source.extras
    said = extras.client_state.get(ARGUMENTS_KEY)
    apart = isinstance(said, Mapping) and isinstance(said.get("moe_layer_freq"), list | tuple)
    wishes = list(_wishes(params, states))
    plan = plan_torch_dist(wanted.params, wishes, _FILES, apart=apart)
    common = CommonFile(states, extras, mesh, wanted.file)
    out = Written(states, _weights(params), plan, common.output(), mesh)
    notes += common.notes
    if extras.modules:
        notes.append(f"left out: extra states of modules: {some_of(sorted(extras.modules))}")
    if own := sorted(repr(key) for key in extras.client_state if key not in CLIENT_KEYS):
        notes.append(f"left out: client state: {some_of(own)}")
    return out


def _refuse_classes(source: Manifest, file: str) -> None:
    """Raises UnsupportedError where a group's values name classes of the program that wrote them:
    nothing in a folder for Megatron vouches for them, so no load would take it."""
    found = named_in([group.settings for group in source.groups])
    names = {item.qualname for item in found} - {*KNOWN, TENSOR}
    if names:
        raise UnsupportedError(
            "a parameter group holds values of the program's own classes, which a folder for "
            "Megatron has no place for",
            file=file,
            found=some_of(sorted(names)),
            fix="convert to native, which loads on any mesh",
        )


def _states(params: Mapping[str, ParamSpec], source: Manifest) -> Manifest:
    """The target without its training copies: each trainable parameter whole."""
    buffers: list[FlatBuffer] = []
    for spec in params.values():
        if spec.kind == "trainable":
            found, number = source.states_of(spec.name), source.group_number(spec.name)
            held = tuple((state, found[state]) for state in ADAM_STATES)
            scalars = source.scalars_of(spec.name)
            elems = math.prod(spec.shape)
            buffers.append(alone(spec.name, elems, held, number, scalars, axes=(), chunk=0))
    listed = tuple(params.values())
    return Manifest(
        Keeper.TORCH_DIST,
        Mesh(),
        listed,
        tuple(buffers),
        source.groups,
        family=source.family,
        run=source.run,
    )


def _weights(params: Mapping[str, ParamSpec]) -> Manifest:
    """The training copies: the masters in the dtype of the training, and what no optimizer
    steps."""
    buffers: list[FlatBuffer] = []
    for spec in params.values():
        states = ((MASTER if spec.kind == "trainable" else VALUE, spec.dtype),)
        buffers.append(alone(spec.name, math.prod(spec.shape), states, axes=(), chunk=0))
    return Manifest(Keeper.WEIGHTS, Mesh(), tuple(params.values()), tuple(buffers))


def _chunked(spec: ParamSpec) -> ParamSpec:
    whole = ((0,) * len(spec.shape), spec.shape)
    return replace(spec, layout=Chunks(((whole,),)), on_mesh=spec.layout, order=None)


def _check_states(source: Manifest, file: str) -> None:
    """Raises StateMismatchError for a source without Adam's states, UnsupportedError for one with
    other states, which Megatron does not load."""
    trained = [spec for spec in source.params if spec.kind == "trainable"]
    if not trained or not source.groups:
        raise StateMismatchError(
            "the checkpoint holds no optimizer",
            file=file,
            expected="parameter groups",
            found="none",
            fix="convert a checkpoint that was saved with its optimizer",
            id="no-optimizer",
        )
    for spec in trained:
        found = source.states_of(spec.name)
        if {*found} - {*ADAM_STATES} - {VALUE}:
            raise UnsupportedError(
                "Megatron-LM loads the states of Adam alone",
                file=file,
                parameter=spec.name,
                expected=", ".join(ADAM_STATES),
                found=", ".join(found),
                fix='convert to native or universal (--to native; Python: to="native")',
            )
        if {*ADAM_STATES} - {*found} or set(found.values()) != {"float32"}:
            raise StateMismatchError(
                "the checkpoint does not hold all states in fp32 that Megatron-LM asks for",
                file=file,
                parameter=spec.name,
                expected=", ".join(ADAM_STATES),
                found=", ".join(f"{state} in {dtype}" for state, dtype in found.items()),
                fix="convert a checkpoint that was saved after its first step",
            )


def _wishes(params: Mapping[str, ParamSpec], states: Manifest) -> Iterator[Wish]:
    for name, spec in params.items():
        boxes = ((((0,) * len(spec.shape)), spec.shape),)
        yield Wish(name, WEIGHT, spec.dtype, boxes)
        if spec.kind == "trainable":
            for state, dtype in states.states_of(name).items():
                yield Wish(name, state, dtype, boxes)


class TorchDistJob:
    """One conversion: plans, windows and counts. Chunks are written by several threads."""

    def __init__(
        self,
        source: Checkpoint,
        out: Written,
        allow: frozenset[str],
        progress: Progress | None,
    ) -> None:
        self.source, self.out, self.progress = source, out, progress
        self.reader, self.memory = RoundingReader(source, allow), ThreadMemory()
        self.done = 0
        self.total = sum(chunk.archive.size_bytes for chunk in out.plan.chunks)
        self.stopped = threading.Event()
        self._lock = threading.Lock()
        self._numbers = [
            {buffer.members[0].param: number for number, buffer in enumerate(manifest.buffers)}
            for manifest in (out.states, out.weights)
        ]

    def prove(self) -> None:
        """Plans everything that will be written, proves it, and looks every source up."""
        states, weights = self.out.states, self.out.weights
        slots = [
            Slot(number, (), 0, state)
            for number, buffer in enumerate(states.buffers)
            for state, _ in buffer.states
        ]
        self.reader.prove(states, [(slot, slot.state) for slot in slots])
        copies = [
            Slot(number, (), 0, state)
            for number, buffer in enumerate(weights.buffers)
            for state, _ in buffer.states
        ]
        self.reader.prove(weights, [(slot, slot.state) for slot in copies], _NARROW)

    def write(self, folder: Path) -> None:
        """The folder, whole or not at all. Raises SaveError, UsageError, DamagedFileError, and
        InexactError for values that their dtype can't hold."""
        with written_aside(folder) as aside:
            make_files(aside, self.out.plan)
            jobs = [partial(self._chunk, aside, chunk) for chunk in self.out.plan.chunks]
            with pool() as threads:
                in_threads(threads, jobs, self.stopped)
            self.reader.check(thorough=True)
            self.reader.check_overflows(str(self.source.folder))
            finish_files(aside, self.out.plan, self.out.common)
            sync_all(aside)
            require_free(folder)  # a save may have taken the name meanwhile
            manifest = signed(self.out.recorded, self.source, tuple(entries_of(aside)))
            run = {**manifest.run, SAVED_ON: self.out.saved_on}
            durable.commit(aside, to_json(replace(manifest, run=run)), durable.Syncs())

    def _chunk(self, aside: Path, chunk: PlannedChunk) -> FileRun | None:
        """One chunk. Runs in a thread of its own."""
        wish, crc = chunk.wish, 0
        is_weight = wish.state == WEIGHT
        target = self.out.weights if is_weight else self.out.states
        number = self._numbers[is_weight][wish.param]
        state = target.buffers[number].states[0][0] if is_weight else wish.state
        size, path = ITEMSIZE[wish.dtype], aside / chunk.file
        elems, step = chunk.archive.size_bytes // size, WINDOW_BYTES // size
        with open(path, "r+b", buffering=0) as file:
            for low in range(0, elems, step):
                memory = self.memory.take(min(step, elems - low), wish.dtype)
                self.reader.fill(target, Slot(number, (), 0, state), state, low, memory)
                data = bytes_of(memory)
                crc = crc32(data, crc)
                durable.write_at(file.fileno(), data, chunk.data_offset + low * size)
                self._count(memory.nbytes)
        write_around(aside, chunk, crc)
        return (path, 0, 0) if elems * size > WINDOW_BYTES else None

    def _count(self, written: int) -> None:
        if self.stopped.is_set():
            raise SaveError("the conversion was stopped", fix="start it again", id="")
        with self._lock:
            self.done += written
            if self.progress is not None:
                self.progress(self.done, self.total)
