"""Folders of DeepSpeed's that are to be written: native files for a mesh, and the universal
folder, which needs none."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from megatron_ucp.core.experts import is_stacked
from megatron_ucp.core.flat import alone
from megatron_ucp.core.keepers import Keeper
from megatron_ucp.core.manifest import Manifest
from megatron_ucp.core.plan import Slot
from megatron_ucp.core.shares import state_in
from megatron_ucp.core.states import MASTER
from megatron_ucp.errors import UnsupportedError
from megatron_ucp.formats import durable
from megatron_ucp.formats.base import Checkpoint
from megatron_ucp.formats.deepspeed import muon
from megatron_ucp.formats.deepspeed.native_structure import RunSettings
from megatron_ucp.formats.deepspeed.native_writer import NativeWriter
from megatron_ucp.formats.deepspeed.universal_writer import UniversalWriter
from megatron_ucp.formats.file_layout import Blob, Crcs, FileLayout, FilePiece
from megatron_ucp.formats.of_ranks import PER_RANK, Apart, file_name, text_of
from megatron_ucp.formats.pt.output import Output, Stored, Weight
from megatron_ucp.formats.pt.values import storages_of
from megatron_ucp.formats.pt.writer import ArchiveLayout, archive_layout
from megatron_ucp.reshard.execute import bytes_of, tensor_at
from megatron_ucp.reshard.expert_meshes import notes_of_groups, notes_of_universal
from megatron_ucp.reshard.folder_sink import FolderOutput
from megatron_ucp.reshard.outputs.signature import name_folder, signed
from megatron_ucp.reshard.source_settings import Origin
from megatron_ucp.reshard.stage_division import no_layers, with_stages
from megatron_ucp.reshard.target import target_manifest, universal_manifest
from megatron_ucp.reshard.transfer import NARROW, SinkPart
from megatron_ucp.reshard.wanted import Wanted

_STATES, _WEIGHTS = 0, 1  # the parts of an output


def native(
    origin: Origin, wanted: Wanted, config: Mapping[str, Any] | None, folder: Path
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
    origin.notes += muon.other_steps(wanted.source, manifest)
    listed = wanted.target.groups is not None
    origin.notes += notes_of_groups(wanted.source, manifest.mesh, listed)
    if keeper == Keeper.ZERO_3 and muon.is_used(manifest):
        origin.notes.append(_AT_INIT)
    return native_output(origin.source, manifest, settings, wanted, folder, origin.apart)


def native_output(
    source: Checkpoint,
    manifest: Manifest,
    settings: RunSettings,
    wanted: Wanted,
    folder: Path,
    apart: Apart | None = None,
) -> FolderOutput:
    """The files of a manifest; `apart` are values of single ranks."""
    manifest = _versioned(manifest, settings)
    outputs = list(NativeWriter(manifest, settings, wanted.layers).outputs())
    return _output(source, manifest, outputs, folder, apart or Apart())


def universal(
    origin: Origin, wanted: Wanted, config: Mapping[str, Any] | None, folder: Path
) -> FolderOutput:
    """A universal folder. Raises a UcpError for what it has no place for."""
    if _stacked(wanted.source):
        raise _no_writer(wanted, "universal folders", "convert to native, which loads on any mesh")
    refuse_muon(wanted, "universal folder, whose momentum stock DeepSpeed would cut wrongly")
    manifest = universal_manifest(wanted)
    origin.notes += notes_of_universal(wanted.source)
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


def refuse_muon(wanted: Wanted, what: str) -> None:
    """Raises UnsupportedError where Muon steps a group, of whose momentum a format knows
    nothing."""
    if muon.is_used(wanted.source):
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


def _no_writer(wanted: Wanted, what: str, fix: str) -> UnsupportedError:
    return UnsupportedError(
        f"{what} with AutoEP's stacked experts are not written",
        file=wanted.file,
        expected="native files at ZeRO 1, 2 or 3",
        found=str(wanted.target.mesh),
        fix=fix,
    )


# ------------------------------------------------ files


def _output(
    source: Checkpoint, manifest: Manifest, outputs: Sequence[Output], folder: Path, apart: Apart
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


def _close(aside: Path, apart: Apart) -> None:
    for number, own in enumerate(apart.ranks):
        (aside / file_name(number)).write_text(text_of(own), encoding="utf-8")


def _publish(
    folder: Path,
    manifest: Manifest,
    source: Checkpoint,
    names: Sequence[str],
    apart: Apart,
    aside: Path,
) -> None:
    listed = [*names, *map(file_name, range(len(apart.ranks)))]
    entries = tuple(durable.entry_of(aside / name, name) for name in listed)
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
    """One .pt file."""
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
    return archive.around({key: crcs[place] for key, place in archive.places.items()})
