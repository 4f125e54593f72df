"""Writes a converted checkpoint: DeepSpeed's native and universal folders, Megatron's
torch_dist."""

import hashlib
import json
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from megatron_ucp.core.box import Ints
from megatron_ucp.core.experts import is_stacked
from megatron_ucp.core.flat import FlatBuffer, alone
from megatron_ucp.core.layout import Chunks
from megatron_ucp.core.manifest import (
    CONVERTED_FROM,
    FINGERPRINT,
    MOVED_LATEST,
    RUN,
    SAVED_ON,
    FileEntry,
    Manifest,
    ParamSpec,
)
from megatron_ucp.core.manifest_json import to_json
from megatron_ucp.core.mesh import Mesh
from megatron_ucp.core.names import MASTER, VALUE, Keeper
from megatron_ucp.core.plan import Slot, Want
from megatron_ucp.core.tensor_parts import state_in
from megatron_ucp.core.values import TENSOR
from megatron_ucp.errors import StateMismatchError, UnsupportedError, some_of
from megatron_ucp.families.megatron_deepspeed import is_of_program
from megatron_ucp.formats import output_folder
from megatron_ucp.formats.checkpoint import Checkpoint, Extras
from megatron_ucp.formats.deepspeed import optimizers
from megatron_ucp.formats.deepspeed.files import CLASSES, MEMBERS
from megatron_ucp.formats.deepspeed.universal import UniversalWriter
from megatron_ucp.formats.deepspeed.writer import NativeWriter, RunSettings
from megatron_ucp.formats.file_layout import Blob, ByKey, Crcs, FileLayout, FilePiece
from megatron_ucp.formats.megatron.arguments import mesh_of, plain_arguments
from megatron_ucp.formats.megatron.run_state import ARGUMENTS_KEY, CLIENT_KEYS
from megatron_ucp.formats.megatron.writer import (
    ADAM_STATES,
    WEIGHT,
    CommonFile,
    ModelKeys,
    PlannedChunk,
    WantedTensor,
    declared_keys,
    entries_of,
    finish_files,
    plan_torch_dist,
)
from megatron_ucp.formats.per_rank import PER_RANK, RankDifferences, file_name, text_of
from megatron_ucp.formats.pt.allowed_calls import ALLOWED_CALLS
from megatron_ucp.formats.pt.archive import ArchiveLayout, Output, Stored, Weight, archive_layout
from megatron_ucp.formats.pt.refs import storages_of
from megatron_ucp.formats.pt.unpickle import named_in
from megatron_ucp.formats.store import Location, StorePath
from megatron_ucp.reshard.execute import bytes_of, tensor_at
from megatron_ucp.reshard.fingerprint import recorded_in, true_shape
from megatron_ucp.reshard.folder import FolderOutput, require_free
from megatron_ucp.reshard.match import match_ties
from megatron_ucp.reshard.target import (
    Conversion,
    SourceSettings,
    check_experts,
    no_layers,
    notes_of_groups,
    notes_of_universal,
    target_manifest,
    universal_manifest,
    with_stages,
)
from megatron_ucp.reshard.transfer import NARROW, SinkPart

# ---- signature
#
# What lies beside the files of a conversion, and says which files they are.


# What a conversion takes over of a save's facts (`engines/run_state.RunState`); others stay behind.
CARRIED = ("seed", "data", RUN, CLASSES, MEMBERS)


def signed(
    manifest: Manifest, source: Checkpoint, files: tuple[FileEntry, ...], said: dict[str, Any]
) -> Manifest:
    """The manifest with what identifies the files, and what else is `said` of them. All of it comes
    from the source: whoever converts it again gets the same bytes."""
    recorded = source.recorded.run if source.recorded is not None else {}
    content = json.dumps([recorded.get("saved_at"), [asdict(entry) for entry in files]])
    run = {
        **{key: recorded[key] for key in CARRIED if key in recorded},
        **_fingerprint(manifest, source),
        **{key: value for key, value in manifest.run.items() if key not in (SAVED_ON, FINGERPRINT)},
        CONVERTED_FROM: str(source.manifest.written_on),
        "saved_at": recorded.get("saved_at") or max(map(source.folder.modified, source.file_names)),
        MOVED_LATEST: False,
        **said,
    }
    save_id = hashlib.sha256(content.encode()).hexdigest()[:32]
    return replace(manifest, files=files, save_id=save_id, run=run)


def _fingerprint(manifest: Manifest, source: Checkpoint) -> dict[str, Any]:
    """What the save recorded of each parameter that still has the same elements."""
    table = {} if source.recorded is None else recorded_in(source.recorded.run)
    known, there = source.manifest.by_name, manifest.by_name
    same = {
        name: states
        for name, states in table.items()
        if name in known and name in there and true_shape(known[name]) == true_shape(there[name])
    }
    return {FINGERPRINT: same} if same else {}


def name_folder(folder: Location, manifest: Manifest, aside: Location) -> None:
    """Gives a folder its manifest and its name. Raises UsageError where a save took the name
    meanwhile, OSError."""
    if not isinstance(aside, StorePath):  # there the condition of the last write says it
        require_free(folder)
    output_folder.commit(aside, to_json(manifest), output_folder.Syncs())


# ---- deepspeed
#
# Folders of DeepSpeed's that are to be written: native files for a mesh, and the universal
# folder, which needs none.


_STATES, _WEIGHTS = 0, 1  # the parts of an output


def native(
    origin: SourceSettings, wanted: Conversion, config: Mapping[str, Any] | None, folder: Location
) -> FolderOutput:
    """The files that DeepSpeed would have written on the target's mesh. Raises a UcpError for what
    it has no place for."""
    keeper = wanted.target.keeper(wanted.dtype)
    if keeper == Keeper.ZERO_0 and _stacked(wanted.source):
        raise _no_writer(wanted, "files of stage 0", "convert to ZeRO 1, 2 or 3")
    if wanted.target.mesh.zero > 1 and _stacked(wanted.source, "frozen"):
        raise _no_writer(wanted, "frozen parameters at ZeRO 2 and 3", "convert to ZeRO-1")
    wanted, notes = with_stages(wanted)
    origin.notes += notes
    manifest = target_manifest(wanted)
    settings = origin.settings(wanted, manifest, config)
    origin.notes += optimizers.other_steps(wanted.source, manifest)
    listed = wanted.target.groups is not None
    origin.notes += notes_of_groups(wanted.source, manifest.mesh, listed)
    origin.notes += [] if listed else origin.notes_of_program(manifest.mesh.zero)
    if keeper == Keeper.ZERO_3 and optimizers.is_used(manifest):
        origin.notes.append(_AT_INIT)
    manifest = _versioned(manifest, settings)
    outputs = list(NativeWriter(manifest, settings, wanted.layers).outputs())
    return _output(origin.source, manifest, outputs, folder, origin.apart)


def universal(
    origin: SourceSettings, wanted: Conversion, config: Mapping[str, Any] | None, folder: Location
) -> FolderOutput:
    """A universal folder. Raises a UcpError for what it has no place for."""
    if _stacked(wanted.source):
        raise _no_writer(wanted, "universal folders", "convert to native, which loads on any mesh")
    refuse_muon(wanted, "universal folder, whose momentum stock DeepSpeed would cut wrongly")
    manifest = universal_manifest(wanted)
    origin.notes += notes_of_universal(wanted.source)
    origin.notes += [] if wanted.target.groups else origin.notes_of_program(None)
    if wanted.target.mesh.pp > 1 and wanted.layers is None:
        raise no_layers(wanted.file)
    manifest = replace(manifest, names=dict(wanted.layers.names) if wanted.layers else {})
    settings = origin.settings(wanted, manifest, config)
    manifest = _versioned(manifest, settings)
    pipe = {name: pipe for pipe, name in manifest.names.items()}
    outputs = list(UniversalWriter(manifest, settings, pipe).outputs())
    return _output(origin.source, manifest, outputs, folder, origin.apart)


def _versioned(manifest: Manifest, settings: RunSettings) -> Manifest:
    """The manifest of files in the form of a version of DeepSpeed, which the source's need not
    be."""
    return replace(manifest, run={"ds_version": settings.version, **manifest.run})


# ------------------------------------------------ what is refused


def refuse_muon(wanted: Conversion, what: str) -> None:
    """Raises UnsupportedError where Muon steps a group, of whose momentum a format knows
    nothing."""
    if optimizers.is_used(wanted.source):
        raise UnsupportedError(
            f"there is no {what}, of a run with Muon",
            file=wanted.file,
            expected="native files",
            found="a group that Muon steps",
            fix="convert to native, which loads on any mesh",
        )


def _stacked(source: Manifest, *kinds: str) -> bool:
    """Whether the experts are slices of stacked parameters, of some kinds or of any."""
    return any(is_stacked(s.name) and (not kinds or s.kind in kinds) for s in source.params)


_AT_INIT = (
    "Muon at ZeRO-3: parameters are in the order of the source's optimizer; for a job that builds "
    "its model under zero.Init, or without it where the source did, list the groups in its order"
)


def _no_writer(wanted: Conversion, what: str, fix: str) -> UnsupportedError:
    return UnsupportedError(
        f"{what} with AutoEP's stacked experts are not written",
        file=wanted.file,
        expected="native files at ZeRO 1, 2 or 3",
        found=str(wanted.target.mesh),
        fix=fix,
    )


# ------------------------------------------------ files


def _output(
    source: Checkpoint,
    manifest: Manifest,
    outputs: Sequence[Output],
    folder: Location,
    apart: RankDifferences,
) -> FolderOutput:
    """The states, which the manifest describes, and the weights of training, which follow from the
    masters."""
    slots, copies = _slots(outputs, Slot), _slots(outputs, Weight)
    numbers = {name: at for at, name in enumerate(dict.fromkeys(one.param for one in copies))}
    weights = {one: Slot(numbers[one.param], one.cut, 0, MASTER) for one in copies}
    master = state_in(source.manifest, MASTER)
    wants = tuple((slot, state_in(source.manifest, slot.state)) for slot in slots)
    wanted_weights = tuple((slot, master) for slot in weights.values())
    parts = (
        SinkPart(manifest, wants),
        SinkPart(_training_copies(manifest, numbers), wanted_weights, NARROW, as_trained=True),
    )
    slot_of: dict[Any, tuple[int, Slot]] = {slot: (_STATES, slot) for slot in slots}
    slot_of |= {copy: (_WEIGHTS, slot) for copy, slot in weights.items()}
    files = tuple(_layout(output, slot_of, source) for output in outputs)
    names = [file.name for file in files]
    publish = partial(_publish, folder, manifest, source, names, apart)
    return FolderOutput(parts, files, partial(_close, apart=apart), publish)


def _close(aside: Location, apart: RankDifferences) -> None:
    for number, own in enumerate(apart.ranks):
        (aside / file_name(number)).write_text(text_of(own), encoding="utf-8")


def _publish(
    folder: Location,
    manifest: Manifest,
    source: Checkpoint,
    names: Sequence[str],
    apart: RankDifferences,
    aside: Location,
) -> None:
    listed = [*names, *map(file_name, range(len(apart.ranks)))]
    entries = tuple(output_folder.entries_of(aside, listed))
    said = {PER_RANK: apart.what.as_value() if apart.what else {}}
    name_folder(folder, signed(manifest, source, entries, said), aside)


def _slots(outputs: Sequence[Output], kind: Any) -> list[Any]:
    """What fills storages, of one kind, each once."""
    payloads = (payload for output in outputs for payload in output.payloads.values())
    return list(dict.fromkeys(payload for payload in payloads if isinstance(payload, kind)))


def _training_copies(manifest: Manifest, names: Mapping[str, int]) -> Manifest:
    """A target that holds the weights of training of some parameters, each in a buffer of its
    own."""
    specs = [manifest.by_name[name] for name in names]
    buffers = tuple(
        alone(
            spec.name,
            math.prod(manifest.local_shape(spec.name)),
            ((MASTER, spec.dtype),),
            axes=manifest.first_holder(spec.name)[0].axes,
        )
        for spec in specs
    )
    mesh = replace(manifest.mesh, zero=0)
    return Manifest(Keeper.PAPER, mesh, tuple(specs), buffers)


def _layout(
    output: Output, slot_of: Mapping[Any, tuple[int, Slot]], source: Checkpoint
) -> FileLayout:
    archive = archive_layout(Path(output.name).stem, output.tree)
    pieces: list[FilePiece] = []
    blobs: list[tuple[int, Callable[[], bytes]]] = []
    for storage in storages_of(output.tree):
        payload, place = output.payloads[storage.key], archive.places[storage.key]
        if isinstance(payload, bytes):
            blobs.append((place, partial(bytes, payload)))
        elif isinstance(payload, Stored):
            blobs.append((place, partial(_stored, payload, source)))
        else:
            part, slot = slot_of[payload]
            pieces.append(FilePiece(part, slot, storage.elems, storage.dtype, place))
    around = partial(_around, archive)
    return FileLayout(output.name, archive.size_bytes, pieces, blobs, around)


def _stored(payload: Stored, source: Checkpoint) -> bytes:
    """A tensor that is no parameter's: of client state, of the scheduler."""
    return bytes(bytes_of(tensor_at(source.place_of(payload.ref), payload.ref).contiguous()))


def _around(archive: ArchiveLayout, crcs: Crcs) -> Iterator[Blob]:
    return archive.around(ByKey(archive.places, crcs))


# ---- torch dist
#
# A folder that Megatron loads on any mesh, and that is to be written.


_FILES = 8  # not as many as there are cores: every machine writes the same folder
_ADAM_STATES, _MODEL_WEIGHTS = 0, 1  # the parts of an output


def torch_dist(
    origin: SourceSettings, wanted: Conversion, config: Mapping[str, Any] | None, folder: Location
) -> FolderOutput:
    """Everything about the folder but its tensors, for the target's mesh: with expert parallelism
    Megatron keeps the groups of experts apart. Raises UnsupportedError, StateMismatchError, and as
    `check_experts`."""
    refuse_muon(wanted, "folder for Megatron")
    check_experts(wanted.source, wanted.target.mesh, wanted.file)
    held = origin.source.manifest
    match_ties(held, wanted.file)
    _check_states(held, wanted.file)
    _refuse_names(wanted)
    _refuse_classes(held, wanted.file)
    found = _TorchDist(origin, wanted)
    origin.notes += [*found.common.notes, *left_out(origin.extras, CLIENT_KEYS)]
    return found.output(folder)


# in names of transformers' classes, and in none of megatron-core's
_OF_TRANSFORMERS = re.compile(r"(^|\.)(self_attn|embed_tokens|attn\.c_attn|wte)\.")


def _refuse_names(wanted: Conversion) -> None:
    """Raises UnsupportedError for names that no model of Megatron-LM's has."""
    whose = "Megatron-DeepSpeed's program" if is_of_program(wanted.params) else ""
    if any(map(_OF_TRANSFORMERS.search, wanted.params)):
        whose = "a class of transformers"
    if whose:
        raise UnsupportedError(
            f"Megatron-LM's models have other names than {whose}",
            file=wanted.file,
            parameter=next(iter(wanted.params)),
            expected="the names of megatron-core",
            found=f"those of {whose}",
            fix="export the model (megatron-ucp export-hf), and give that folder to Megatron-LM's "
            "--load (docs/megatron.md)",
        )


class _TorchDist:
    """A folder for Megatron: its states and its weights, where they lie, and `common.pt`."""

    def __init__(self, origin: SourceSettings, wanted: Conversion) -> None:
        self.source, self.mesh, extras = origin.source, wanted.target.mesh, origin.extras
        said = extras.client_state.get(ARGUMENTS_KEY)
        apart = isinstance(said, Mapping) and isinstance(said.get("moe_layer_freq"), list | tuple)
        keys = declared_keys(wanted.params, apart)
        params = {name: _chunked(spec, keys) for name, spec in wanted.params.items()}
        self.states, self.weights = _states(params, wanted.source), _weights(params)
        self._numbers = [_numbers(manifest) for manifest in (self.states, self.weights)]
        tensors = list(_tensors(params, self.states))
        self.plan = plan_torch_dist(wanted.params, tensors, keys, _FILES)
        self.common = CommonFile(self.states, extras, self.mesh, wanted.file)
        self._beside = self.common.output()

    def output(self, folder: Location) -> FolderOutput:
        weights = SinkPart(self.weights, _wants(self.weights), NARROW, as_trained=True)
        parts = SinkPart(self.states, _wants(self.states)), weights
        files = tuple(self.plan.layouts(self._slot_of))
        close = partial(finish_files, plan=self.plan, common=self._beside)
        return FolderOutput(parts, files, close, partial(self._publish, folder))

    def _slot_of(self, chunk: PlannedChunk) -> tuple[int, Slot]:
        tensor = chunk.tensor
        part = _MODEL_WEIGHTS if tensor.state == WEIGHT else _ADAM_STATES
        number, state = self._numbers[part][tensor.param]
        slot_state = state if part == _MODEL_WEIGHTS else tensor.state
        return part, Slot(number + chunk.number, (), 0, slot_state)

    def _publish(self, folder: Location, aside: Location) -> None:
        """Where an element lies is said by the files' own index; the manifest says the rest."""
        values = [one for one in self.weights.buffers if one.states[0][0] == VALUE]
        manifest = replace(self.states, buffers=(*self.states.buffers, *values))
        arguments = plain_arguments(self._beside.tree.get("args"))
        on = {SAVED_ON: str(mesh_of(arguments) if arguments else self.mesh)}
        name_folder(folder, signed(manifest, self.source, tuple(entries_of(aside)), on), aside)


def _wants(target: Manifest) -> tuple[Want, ...]:
    """All of it, each state from the one of that name."""
    slots = [
        Slot(number, (), 0, state)
        for number, buffer in enumerate(target.buffers)
        for state, _ in buffer.states
    ]
    return tuple((slot, slot.state) for slot in slots)


def _numbers(target: Manifest) -> dict[str, tuple[int, str]]:
    """The first buffer of each parameter, and its first state."""
    out: dict[str, tuple[int, str]] = {}
    for number, buffer in enumerate(target.buffers):
        out.setdefault(buffer.members[0].param, (number, buffer.states[0][0]))
    return out


def left_out(extras: Extras, kept: Collection[str] = ()) -> list[str]:
    """Notes about what a folder has no place for; of the client state it has the keys `kept`."""
    names = {
        "extra states of modules": extras.modules,
        "client state": [repr(key) for key in extras.client_state if key not in kept],
        "states of DeepSpeed's helpers": extras.helpers,
    }
    return [f"left out: {what}: {some_of(sorted(held))}" for what, held in names.items() if held]


def _refuse_classes(source: Manifest, file: str) -> None:
    """Raises UnsupportedError where a group's values name classes of the program that wrote them:
    nothing in a folder for Megatron vouches for them, so no load would take it."""
    found = named_in([group.settings for group in source.groups])
    names = {item.qualname for item in found} - {*ALLOWED_CALLS, TENSOR}
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
            for chunk, elems in enumerate(_chunk_elems(spec)):
                one = alone(spec.name, elems, held, number, scalars, axes=(), chunk=chunk)
                buffers.append(one)
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
        for chunk, elems in enumerate(_chunk_elems(spec)):
            buffers.append(alone(spec.name, elems, states, axes=(), chunk=chunk))
    return Manifest(Keeper.WEIGHTS, Mesh(), tuple(params.values()), tuple(buffers))


def _chunked(spec: ParamSpec, keys: ModelKeys) -> ParamSpec:
    """A parameter in one chunk for each of its keys."""
    boxes = keys.cut(spec.name, ((0,) * len(spec.shape), spec.shape))
    layout = Chunks(tuple((box,) for box in boxes))
    return replace(spec, layout=layout, on_mesh=spec.layout, order=None)


def _boxes(spec: ParamSpec) -> tuple[tuple[Ints, Ints], ...]:
    """The chunks of a parameter: start and stop of each."""
    return tuple(box for (box,) in cast(Chunks, spec.layout).held)


def _chunk_elems(spec: ParamSpec) -> Iterator[int]:
    for start, stop in _boxes(spec):
        yield math.prod(b - a for a, b in zip(start, stop, strict=True))


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


def _tensors(params: Mapping[str, ParamSpec], states: Manifest) -> Iterator[WantedTensor]:
    for name, spec in params.items():
        boxes = _boxes(spec)
        yield WantedTensor(name, WEIGHT, spec.dtype, boxes)
        if spec.kind == "trainable":
            for state, dtype in states.states_of(name).items():
                yield WantedTensor(name, state, dtype, boxes)
