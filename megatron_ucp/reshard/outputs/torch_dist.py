"""A folder that Megatron loads on any mesh, and that is to be written."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from megatron_ucp.core.box import Ints
from megatron_ucp.core.flat import FlatBuffer, alone
from megatron_ucp.core.keepers import Keeper
from megatron_ucp.core.layout import Chunks
from megatron_ucp.core.manifest import SAVED_ON, Manifest, ParamSpec
from megatron_ucp.core.mesh import Mesh
from megatron_ucp.core.plan import Slot, Want
from megatron_ucp.core.states import MASTER, VALUE
from megatron_ucp.core.values import TENSOR
from megatron_ucp.errors import StateMismatchError, UnsupportedError, some_of
from megatron_ucp.formats.base import Extras
from megatron_ucp.formats.megatron.arguments import mesh_of, plain_arguments
from megatron_ucp.formats.megatron.common_file import CommonFile
from megatron_ucp.formats.megatron.extras import ARGUMENTS_KEY, CLIENT_KEYS
from megatron_ucp.formats.megatron.writer import (
    ADAM_STATES,
    WEIGHT,
    ModelKeys,
    PlannedChunk,
    Wish,
    declared_keys,
    entries_of,
    finish_files,
    plan_torch_dist,
)
from megatron_ucp.formats.pt.known import KNOWN
from megatron_ucp.formats.pt.strangers import named_in
from megatron_ucp.reshard.expert_meshes import check_experts
from megatron_ucp.reshard.folder_sink import FolderOutput
from megatron_ucp.reshard.match import match_ties
from megatron_ucp.reshard.outputs.deepspeed import refuse_muon
from megatron_ucp.reshard.outputs.signature import name_folder, signed
from megatron_ucp.reshard.source_settings import Origin
from megatron_ucp.reshard.transfer import NARROW, SinkPart
from megatron_ucp.reshard.wanted import Wanted

_FILES = 8  # not as many as there are cores: every machine writes the same folder
_STATES, _WEIGHTS = 0, 1  # the parts of an output


def torch_dist(
    origin: Origin, wanted: Wanted, config: Mapping[str, Any] | None, folder: Path
) -> FolderOutput:
    """Everything about the folder but its tensors, for the target's mesh: with expert parallelism
    Megatron keeps the groups of experts apart. Raises UnsupportedError, StateMismatchError, and as
    `check_experts`."""
    refuse_muon(wanted, "folder for Megatron")
    check_experts(wanted.source, wanted.target.mesh, wanted.file)
    held = origin.source.manifest
    match_ties(held, wanted.file)
    _check_states(held, wanted.file)
    _refuse_classes(held, wanted.file)
    found = _TorchDist(origin, wanted)
    origin.notes += [*found.common.notes, *_left_out(origin.extras)]
    return found.output(folder)


class _TorchDist:
    """A folder for Megatron: its states and its weights, where they lie, and `common.pt`."""

    def __init__(self, origin: Origin, wanted: Wanted) -> None:
        self.source, self.mesh, extras = origin.source, wanted.target.mesh, origin.extras
        said = extras.client_state.get(ARGUMENTS_KEY)
        apart = isinstance(said, Mapping) and isinstance(said.get("moe_layer_freq"), list | tuple)
        keys = declared_keys(wanted.params, apart)
        params = {name: _chunked(spec, keys) for name, spec in wanted.params.items()}
        self.states, self.weights = _states(params, wanted.source), _weights(params)
        self._numbers = [_numbers(manifest) for manifest in (self.states, self.weights)]
        wishes = list(_wishes(params, self.states))
        self.plan = plan_torch_dist(wanted.params, wishes, keys, _FILES)
        self.common = CommonFile(self.states, extras, self.mesh, wanted.file)
        self._beside = self.common.output()

    def output(self, folder: Path) -> FolderOutput:
        """The folder on paper."""
        weights = SinkPart(self.weights, _wants(self.weights), NARROW, as_trained=True)
        parts = SinkPart(self.states, _wants(self.states)), weights
        files = tuple(self.plan.layouts(self._slot_of))
        close = partial(finish_files, plan=self.plan, common=self._beside)
        return FolderOutput(parts, files, close, partial(self._publish, folder))

    def _slot_of(self, chunk: PlannedChunk) -> tuple[int, Slot]:
        wish = chunk.wish
        part = _WEIGHTS if wish.state == WEIGHT else _STATES
        number, state = self._numbers[part][wish.param]
        slot_state = state if part == _WEIGHTS else wish.state
        return part, Slot(number + chunk.number, (), 0, slot_state)

    def _publish(self, folder: Path, aside: Path) -> None:
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


def _left_out(extras: Extras) -> list[str]:
    """Notes about what Megatron has no place for."""
    notes: list[str] = []
    if extras.modules:
        notes.append(f"left out: extra states of modules: {some_of(sorted(extras.modules))}")
    if own := sorted(repr(key) for key in extras.client_state if key not in CLIENT_KEYS):
        notes.append(f"left out: client state: {some_of(own)}")
    return notes


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


def _wishes(params: Mapping[str, ParamSpec], states: Manifest) -> Iterator[Wish]:
    for name, spec in params.items():
        boxes = _boxes(spec)
        yield Wish(name, WEIGHT, spec.dtype, boxes)
        if spec.kind == "trainable":
            for state, dtype in states.states_of(name).items():
                yield Wish(name, state, dtype, boxes)
