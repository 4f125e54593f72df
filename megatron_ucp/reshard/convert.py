"""One checkpoint as another one on disk: native files of any mesh, or DeepSpeed's universal folder.

The output is planned and proved as a whole before its first byte, then written window by window
through a buffer of bounded size, whatever the model. It appears whole or not at all: everything is
written into a folder aside, brought to disk, and renamed. Every byte of the source that a copy used
is compared with its record's CRC-32 before that.
"""

import hashlib
import json
import math
import os
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron_ucp.core.flat import alone
from megatron_ucp.core.manifest import MOVED_LATEST, RUN, FileEntry, Manifest
from megatron_ucp.core.manifest_json import to_json
from megatron_ucp.core.mesh import Mesh
from megatron_ucp.core.plan import Slot
from megatron_ucp.core.shares import state_in
from megatron_ucp.core.states import MASTER
from megatron_ucp.errors import SaveError, UnsupportedError, UsageError
from megatron_ucp.formats import durable
from megatron_ucp.formats.base import Checkpoint
from megatron_ucp.formats.deepspeed import muon
from megatron_ucp.formats.deepspeed.doctor import refuse_lost_moments
from megatron_ucp.formats.deepspeed.experts import is_stacked
from megatron_ucp.formats.deepspeed.folder import CLASSES, MEMBERS
from megatron_ucp.formats.deepspeed.native_structure import RunSettings
from megatron_ucp.formats.deepspeed.native_writer import NativeWriter
from megatron_ucp.formats.deepspeed.target import Target
from megatron_ucp.formats.deepspeed.universal_writer import UniversalWriter
from megatron_ucp.formats.of_ranks import PER_RANK, Apart, file_name, text_of
from megatron_ucp.formats.pointers import (
    LATEST,
    MEGATRON_LATEST,
    iteration_name,
    iteration_of_name,
)
from megatron_ucp.formats.pt.output import Output, Stored, Weight
from megatron_ucp.formats.pt.unpickler import ITEMSIZE
from megatron_ucp.formats.pt.values import StorageRef
from megatron_ucp.formats.pt.writer import write_pt
from megatron_ucp.formats.registry import open_checkpoint
from megatron_ucp.formats.tags import LATEST_UNIVERSAL
from megatron_ucp.reshard.execute import TORCH_DTYPES, bytes_of, tensor_at
from megatron_ucp.reshard.expert_meshes import notes_of_groups, notes_of_universal
from megatron_ucp.reshard.findings import Progress
from megatron_ucp.reshard.origin import Origin
from megatron_ucp.reshard.output_folder import (
    FileRun,
    in_threads,
    require_free,
    require_outside,
    require_plain,
    sync_all,
    written_aside,
)
from megatron_ucp.reshard.overflows import Overflows, too_large
from megatron_ucp.reshard.placed import no_layers
from megatron_ucp.reshard.target import Wanted, target_manifest, universal_manifest
from megatron_ucp.reshard.to_torch_dist import TorchDistJob, written
from megatron_ucp.reshard.windows import WINDOW_BYTES, ThreadMemory, WindowReader, pool

NARROW = frozenset({"narrow"})  # training copies are casts of the masters
ALLOWED = NARROW | {"mean", "stale", "per_rank"}


@dataclass(frozen=True)
class Converted:
    """What a conversion did. `read_bytes` and `written_bytes` are of tensors; `notes` say what is
    not as in the source."""

    path: str
    source_mesh: str
    mesh: str
    files: int
    read_bytes: int
    written_bytes: int
    seconds: float
    notes: tuple[str, ...]


def convert(
    src: str | Path,
    dst: str | Path,
    to: str = "native",
    target: Target | Mesh | None = None,
    *,
    tag: str | None = None,
    rules: str | Path | None = None,
    config: Mapping[str, Any] | None = None,
    allow: Collection[str] = (),
    progress: Progress | None = None,
) -> Converted:
    """Writes the checkpoint `src` as the new tag folder `dst`: files that DeepSpeed's own load
    takes on the target's mesh (`to="native"`), a universal folder, which needs no target
    (`to="universal"`), or a folder for Megatron (`to="torch_dist"`), for which the target's mesh
    says whether experts have an optimizer of their own.

    What the target does not say is as in the DeepSpeed config `config`, or in the source. `rules`
    is a file of rules, `allow` as in `load`; `progress(done, total)` counts bytes. The source is
    never touched. Raises a UcpError, SaveError where the output can't be written; nothing is left
    of it then.
    """
    started = time.perf_counter()
    folder = Path(dst)
    target = _check_arguments(folder, to, target, allow)
    with open_checkpoint(src, tag, rules) as source:
        require_outside(folder, source.folder)
        _check_files(source, allow)
        origin = Origin(source, rules is not None)
        wanted = origin.wanted(target, config)
        origin.take_values(wanted.target.mesh if to == "native" else None, allow)
        if to == TORCH_DIST:
            job, files = _to_torch_dist(origin, wanted, folder, frozenset(allow), progress)
        else:
            manifest, outputs = _WRITERS[to](origin, wanted, config)
            job = ConversionJob(source, manifest, frozenset(allow), progress)
            job.prove(outputs)
            write_tag(job, outputs, folder, origin.apart)
            files = len(outputs)
    notes = (*source.notes, *origin.notes, *point_at(folder, to))
    meshes = str(source.manifest.mesh), str(target.mesh) if to == "native" else to
    moved = files, job.reader.read_bytes, job.done
    return Converted(str(folder), *meshes, *moved, time.perf_counter() - started, notes)


def _to_torch_dist(
    origin: Origin,
    wanted: Wanted,
    folder: Path,
    allow: frozenset[str],
    progress: Progress | None,
) -> tuple[TorchDistJob, int]:
    """Writes a folder for Megatron; the job that did, and the number of files."""
    _refuse_muon(wanted, "folder for Megatron")
    out = written(wanted, origin.source, wanted.target.mesh, origin.notes)
    job = TorchDistJob(origin.source, out, allow, progress)
    job.prove()
    job.write(folder)
    return job, len(out.plan.sizes) + 1


def _check_files(source: Checkpoint, allow: Collection[str]) -> None:
    """Compares the files with each other, and refuses those that lack what was trained."""
    for name in source.file_names:
        source.check(name, allow)
    refuse_lost_moments(source.manifest, str(source.folder))


def _native(
    origin: Origin, wanted: Wanted, config: Mapping[str, Any] | None
) -> tuple[Manifest, list[Output]]:
    """The manifest and the files that DeepSpeed would have written on the target's mesh."""
    engine = wanted.target.engine(wanted.dtype)
    if engine == "zero0" and _stacked(wanted.source):
        raise _no_writer(wanted, "files of stage 0", "convert to ZeRO 1, 2 or 3")
    if wanted.target.mesh.zero > 1 and _stacked(wanted.source, "frozen"):
        raise _no_writer(wanted, "frozen parameters at ZeRO 2 and 3", "convert to ZeRO-1")
    manifest = target_manifest(wanted)
    settings = origin.settings(wanted, manifest, config)
    origin.notes += muon.other_steps(wanted.source, manifest)
    listed = wanted.target.groups is not None
    origin.notes += notes_of_groups(wanted.source, manifest.mesh, listed)
    if engine == "zero3" and muon.is_used(manifest):
        origin.notes.append(_AT_INIT)
    manifest = _versioned(manifest, settings)
    return manifest, list(NativeWriter(manifest, settings, wanted.layers).outputs())


def _universal(
    origin: Origin, wanted: Wanted, config: Mapping[str, Any] | None
) -> tuple[Manifest, list[Output]]:
    """The manifest and the files of a universal folder."""
    if _stacked(wanted.source):
        raise _no_writer(wanted, "universal folders", "convert to native, which loads on any mesh")
    _refuse_muon(wanted, "universal folder, whose momentum stock DeepSpeed would cut wrongly")
    manifest = universal_manifest(wanted)
    origin.notes += notes_of_universal(wanted.source)
    if wanted.target.mesh.pp > 1 and wanted.layers is None:
        raise no_layers(wanted.file)
    manifest = replace(manifest, names=dict(wanted.layers.names) if wanted.layers else {})
    settings = origin.settings(wanted, manifest, config)
    manifest = _versioned(manifest, settings)
    pipe = {name: pipe for pipe, name in manifest.names.items()}
    return manifest, list(UniversalWriter(manifest, settings, pipe).outputs())


def _versioned(manifest: Manifest, settings: RunSettings) -> Manifest:
    """The manifest of files in the form of a version of DeepSpeed, which the source's need not
    be."""
    return replace(manifest, run={"ds_version": settings.version, **manifest.run})


def _stacked(source: Manifest, *kinds: str) -> bool:
    """Whether the experts are slices of stacked parameters, of some kinds or of any."""
    return any(is_stacked(s.name) and (not kinds or s.kind in kinds) for s in source.params)


def _refuse_muon(wanted: Wanted, what: str) -> None:
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


_WRITERS = {"native": _native, "universal": _universal}
TORCH_DIST = "torch_dist"


def _check_arguments(
    folder: Path, to: str, target: Target | Mesh | None, allow: Collection[str]
) -> Target:
    if isinstance(allow, str) or set(allow) - ALLOWED:
        raise UsageError(
            "allow names what may happen",
            expected=" ".join(sorted(ALLOWED)),
            found=" ".join(sorted(allow)),
        )
    known = (*_WRITERS, TORCH_DIST)
    if to not in known:
        raise UsageError(
            "there is no such format to convert to", expected=" or ".join(known), found=to
        )
    if target is None and to == "native":
        raise UsageError(
            "a native checkpoint is for one mesh",
            expected="a mesh",
            found="none",
            fix="give --mesh (target=)",
        )
    require_plain(folder)
    if isinstance(target, Mesh) or target is None:
        return Target(target or Mesh())
    return target


class ConversionJob:
    """One conversion: plans, windows and counts. Files are written by several threads."""

    def __init__(
        self,
        source: Checkpoint,
        manifest: Manifest,
        allow: frozenset[str],
        progress: Progress | None,
    ) -> None:
        self.source, self.manifest, self.progress = source, manifest, progress
        self.reader, self.memory = WindowReader(source, allow), ThreadMemory()
        self.total = self.done = 0
        self.stopped = threading.Event()
        self._lock = threading.Lock()
        self._weights: dict[str, Manifest] = {}
        self._unrounded: dict[str, Manifest] = {}  # of weights that get another dtype
        self._overflows = Overflows()

    def prove(self, outputs: list[Output]) -> None:
        """Plans everything that will be written, proves it and looks every source up; raises before
        a byte is written."""
        payloads = [payload for output in outputs for payload in output.payloads.values()]
        slots = dict.fromkeys(payload for payload in payloads if isinstance(payload, Slot))
        self.reader.prove(self.manifest, [(slot, self._source_state(slot)) for slot in slots])
        for payload in payloads:
            if isinstance(payload, Weight) and payload.param not in self._weights:
                self._weights[payload.param] = one = self._training_copy(payload.param)
                slots = [Slot(0, cut, 0, MASTER) for cut in one.cuts_of(one.buffers[0])]
                wants = [(slot, self._source_state(slot)) for slot in slots]
                self.reader.prove(one, wants, NARROW)
                if one.params[0].dtype != self.source.manifest.by_name[payload.param].dtype:
                    self._unrounded[payload.param] = exact = self._exact(one, wants[0][1])
                    self.reader.prove(exact, wants)
        self.total = sum(self._size(output, key) for output in outputs for key in output.payloads)

    def _source_state(self, slot: Slot) -> str:
        return state_in(self.source.manifest, slot.state)

    def _training_copy(self, name: str) -> Manifest:
        """A target that holds the training copies of one parameter."""
        spec, mesh = self.manifest.by_name[name], self.manifest.mesh
        size = math.prod(self.manifest.local_shape(name))
        axes = self.manifest.first_holder(name)[0].axes
        buffer = alone(name, size, ((MASTER, spec.dtype),), axes=axes)
        return Manifest("weight", replace(mesh, zero=0), (spec,), (buffer,))

    def _exact(self, copy: Manifest, state: str) -> Manifest:
        """A target that holds one parameter's masters as they are saved."""
        dtype = self.source.manifest.states_of(copy.params[0].name)[state]
        return replace(copy, buffers=(replace(copy.buffers[0], states=((MASTER, dtype),)),))

    def _storage(self, output: Output, key: str) -> tuple[int, str]:
        """Elements and dtype of a storage."""
        payload = output.payloads[key]
        if isinstance(payload, Slot):
            buffer = self.manifest.buffers[payload.buffer]
            elems = buffer.of(payload.state).elems(payload.part)
            return elems, dict(buffer.states)[payload.state]
        if isinstance(payload, Weight):
            buffer = self._weights[payload.param].buffers[0]
            return buffer.length, buffer.states[0][1]
        if isinstance(payload, Stored):
            return payload.ref.numel, payload.ref.storage.dtype
        return len(payload), "uint8"

    def _size(self, output: Output, key: str) -> int:
        elems, dtype = self._storage(output, key)
        return elems * ITEMSIZE[dtype]

    # ---------------------------------------------------------------- bytes

    def write(self, output: Output, path: Path) -> FileRun:
        """One file. Runs in a thread of its own."""
        write_pt(path, output.tree, lambda storage: self._chunks(output, storage), durable=False)
        return path, 0, 0

    def _chunks(self, output: Output, storage: StorageRef) -> Iterator[memoryview | bytes]:
        payload = output.payloads[storage.key]
        if isinstance(payload, bytes):
            yield payload
        elif isinstance(payload, Stored):
            yield from self._stored(payload)
        else:
            elems, dtype = self._storage(output, storage.key)
            yield from self._windows(payload, elems, dtype)

    def _windows(self, payload: Slot | Weight, elems: int, dtype: str) -> Iterator[memoryview]:
        if isinstance(payload, Weight):
            target, slot = self._weights[payload.param], Slot(0, payload.cut, 0, MASTER)
        else:
            target, slot = self.manifest, payload
        step = WINDOW_BYTES // ITEMSIZE[dtype]
        for low in range(0, elems, step):
            memory = self.memory.take(min(step, elems - low), dtype)
            self.reader.fill(target, slot, self._source_state(slot), low, memory)
            if isinstance(payload, Weight) and payload.param in self._unrounded:
                exact = partial(self._unrounded_values, payload.param, slot, low, len(memory))
                self._overflows.look(payload.param, memory, exact)
            self._count(memory.nbytes)
            yield bytes_of(memory)

    def _unrounded_values(self, name: str, slot: Slot, low: int, elems: int) -> torch.Tensor:
        """Masters of a weight that gets another dtype than in the source, as they are saved."""
        exact = self._unrounded[name]
        out = torch.empty(elems, dtype=TORCH_DTYPES[exact.buffers[0].states[0][1]])
        self.reader.fill(exact, slot, self._source_state(slot), low, out)
        return out

    def check_overflows(self) -> None:
        """Raises InexactError that lists every parameter with values which its dtype can't hold."""
        if found := self._overflows.found:
            dtype = self.manifest.by_name[min(found)].dtype
            raise too_large(found, dtype, str(self.source.folder), "train")

    def _stored(self, payload: Stored) -> Iterator[memoryview]:
        """A tensor that is no parameter's: of client state, of the scheduler."""
        ref, where = payload.ref, self.source.place_of(payload.ref)
        size = ITEMSIZE[where.dtype]
        if ref.is_contiguous:
            for low in range(0, ref.numel * size, WINDOW_BYTES):
                memory = self.memory.take(min(WINDOW_BYTES, ref.numel * size - low), "uint8")
                where.file.read_into(where.record, where.offset_bytes + low, bytes_of(memory))
                self._count(memory.nbytes)
                yield bytes_of(memory)
            return
        whole = tensor_at(where, ref).contiguous()
        self._count(whole.nbytes)
        yield bytes_of(whole)

    def _count(self, written: int) -> None:
        if self.stopped.is_set():
            raise SaveError("the conversion was stopped")
        with self._lock:
            self.done += written
            if self.progress is not None:
                self.progress(self.done, self.total)


# ------------------------------------------------ the output on disk


def write_tag(
    job: ConversionJob, outputs: list[Output], folder: Path, apart: Apart | None = None
) -> None:
    """The folder, whole or not at all; `apart` are values of single ranks. Raises SaveError,
    UsageError, DamagedFileError."""
    apart = apart or Apart()
    with written_aside(folder) as aside:
        for place in {(aside / output.name).parent for output in outputs} - {aside}:
            place.mkdir(parents=True, exist_ok=True)
        files = [partial(job.write, output, aside / output.name) for output in outputs]
        with pool() as threads:
            in_threads(threads, files, job.stopped)
        job.reader.check(thorough=True)
        job.check_overflows()
        of_ranks = [file_name(rank) for rank in range(len(apart.ranks))]
        for name, own in zip(of_ranks, apart.ranks, strict=True):
            (aside / name).write_text(text_of(own), encoding="utf-8")
        sync_all(aside)
        names = [*(output.name for output in outputs), *of_ranks]
        entries = tuple(durable.entry_of(aside / name, name) for name in names)
        manifest = _signed(job.manifest, job.source, entries)
        run = {**manifest.run, PER_RANK: apart.what.as_value() if apart.what else {}}
        manifest = replace(manifest, run=run)
        require_free(folder)  # a save may have taken the name meanwhile
        durable.commit(aside, to_json(manifest), durable.Syncs())


def _signed(manifest: Manifest, source: Checkpoint, files: tuple[FileEntry, ...]) -> Manifest:
    """The manifest with what identifies the files. All of it comes from the source: whoever
    converts it again gets the same bytes."""
    recorded = source.recorded
    said = recorded.run if recorded is not None else {}
    newest = max(os.stat(source.folder / name).st_mtime for name in source.file_names)
    content = json.dumps([said.get("saved_at"), [asdict(entry) for entry in files]])
    run = {
        **{key: said[key] for key in ("seed", "data", RUN, CLASSES, MEMBERS) if key in said},
        **manifest.run,
        "converted_from": str(source.manifest.mesh),
        "saved_at": said.get("saved_at", newest),
        MOVED_LATEST: False,
    }
    save_id = hashlib.sha256(content.encode()).hexdigest()[:32]
    return replace(manifest, files=files, save_id=save_id, run=run)


_POINTERS = {"native": LATEST, "universal": LATEST_UNIVERSAL, TORCH_DIST: MEGATRON_LATEST}


def point_at(folder: Path, to: str) -> list[str]:
    """Names the new folder where nothing would load it otherwise, and never takes a native pointer
    from its owner."""
    parent, name = folder.absolute().parent, folder.absolute().name
    if to == TORCH_DIST:
        if (iteration := iteration_of_name(name)) is None:
            return [f"Megatron looks for folders such as {iteration_name(100)}: rename {name}"]
        name = str(iteration)
    pointer = parent / _POINTERS[to]
    if to != "universal" and pointer.exists():
        return [
            f"{pointer} still names {pointer.read_text(errors='replace').strip()}: load with "
            f"tag={name}"
        ]
    try:
        durable.replace_text(pointer, name, durable.Syncs())
        return _behind_others(pointer, folder) if to != "universal" else []
    except OSError as error:  # the output is whole all the same
        return [f"{pointer} could not be written ({type(error).__name__}): load with tag={name}"]


def _behind_others(pointer: Path, folder: Path) -> list[str]:
    """Makes a pointer older than that of the run itself, where there is one: of two the one that
    was written last is followed. Raises OSError."""
    others = (pointer.with_name(name) for name in (LATEST, MEGATRON_LATEST))
    for other in others:
        if other.name != pointer.name and other.is_file():
            before = other.stat().st_mtime_ns - 10**9
            os.utime(pointer, ns=(before, before))
            return [f"{other} is still followed, as it is the run's: load with tag={folder.name}"]
    return []
