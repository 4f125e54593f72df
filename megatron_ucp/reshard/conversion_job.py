"""Files of DeepSpeed's, native or universal, written window by window through a buffer of bounded
size, after all of it is planned and proved."""

import hashlib
import json
import math
import os
import threading
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from megatron_ucp.core.flat import alone
from megatron_ucp.core.keepers import Keeper
from megatron_ucp.core.manifest import (
    CONVERTED_FROM,
    MOVED_LATEST,
    RUN,
    SAVED_ON,
    FileEntry,
    Manifest,
)
from megatron_ucp.core.manifest_json import to_json
from megatron_ucp.core.plan import Slot
from megatron_ucp.core.shares import state_in
from megatron_ucp.core.states import MASTER
from megatron_ucp.errors import SaveError
from megatron_ucp.formats import durable
from megatron_ucp.formats.base import Checkpoint
from megatron_ucp.formats.deepspeed.tag_folder import CLASSES, MEMBERS
from megatron_ucp.formats.of_ranks import PER_RANK, Apart, file_name, text_of
from megatron_ucp.formats.pt.output import Output, Stored, Weight
from megatron_ucp.formats.pt.unpickler import ITEMSIZE
from megatron_ucp.formats.pt.values import StorageRef
from megatron_ucp.formats.pt.writer import write_pt
from megatron_ucp.reshard.execute import bytes_of, tensor_at
from megatron_ucp.reshard.findings import Progress
from megatron_ucp.reshard.output_folder import (
    FileRun,
    in_threads,
    require_free,
    sync_all,
    written_aside,
)
from megatron_ucp.reshard.rounding import RoundingReader
from megatron_ucp.reshard.windows import WINDOW_BYTES, ThreadMemory, pool

NARROW = frozenset({"narrow"})  # training copies are casts of the masters


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
        self.reader, self.memory = RoundingReader(source, allow), ThreadMemory()
        self.total = self.done = 0
        self.stopped = threading.Event()
        self._lock = threading.Lock()
        self._weights: dict[str, Manifest] = {}

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
                self.reader.prove(one, [(slot, self._source_state(slot)) for slot in slots], NARROW)
        self.total = sum(self._size(output, key) for output in outputs for key in output.payloads)

    def _source_state(self, slot: Slot) -> str:
        return state_in(self.source.manifest, slot.state)

    def _training_copy(self, name: str) -> Manifest:
        """A target that holds the training copies of one parameter."""
        spec, mesh = self.manifest.by_name[name], self.manifest.mesh
        size = math.prod(self.manifest.local_shape(name))
        axes = self.manifest.first_holder(name)[0].axes
        buffer = alone(name, size, ((MASTER, spec.dtype),), axes=axes)
        return Manifest(Keeper.PAPER, replace(mesh, zero=0), (spec,), (buffer,))

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
            self._count(memory.nbytes)
            yield bytes_of(memory)

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
            raise SaveError("the conversion was stopped", fix="start it again", id="")
        with self._lock:
            self.done += written
            if self.progress is not None:
                self.progress(self.done, self.total)


# ------------------------------------------------ the output on disk


def write_tag(
    job: ConversionJob, outputs: list[Output], folder: Path, apart: Apart | None = None
) -> int:
    """Proves the plan of all outputs, then writes the folder, whole or not at all; returns how many
    files there are. `apart` are values of single ranks. Raises SaveError, UsageError,
    DamagedFileError, and what `prove` raises."""
    job.prove(outputs)
    apart = apart or Apart()
    with written_aside(folder) as aside:
        for place in {(aside / output.name).parent for output in outputs} - {aside}:
            place.mkdir(parents=True, exist_ok=True)
        files = [partial(job.write, output, aside / output.name) for output in outputs]
        with pool() as threads:
            in_threads(threads, files, job.stopped)
        job.reader.check(thorough=True)
        job.reader.check_overflows(str(job.source.folder))
        of_ranks = [file_name(rank) for rank in range(len(apart.ranks))]
        for name, own in zip(of_ranks, apart.ranks, strict=True):
            (aside / name).write_text(text_of(own), encoding="utf-8")
        sync_all(aside)
        names = [*(output.name for output in outputs), *of_ranks]
        entries = tuple(durable.entry_of(aside / name, name) for name in names)
        manifest = signed(job.manifest, job.source, entries)
        run = {**manifest.run, PER_RANK: apart.what.as_value() if apart.what else {}}
        manifest = replace(manifest, run=run)
        require_free(folder)  # a save may have taken the name meanwhile
        durable.commit(aside, to_json(manifest), durable.Syncs())
    return len(outputs)


def signed(manifest: Manifest, source: Checkpoint, files: tuple[FileEntry, ...]) -> Manifest:
    """The manifest with what identifies the files. All of it comes from the source: whoever
    converts it again gets the same bytes."""
    recorded = source.recorded
    said = recorded.run if recorded is not None else {}
    newest = max(os.stat(source.folder / name).st_mtime for name in source.file_names)
    content = json.dumps([said.get("saved_at"), [asdict(entry) for entry in files]])
    run = {
        **{key: said[key] for key in ("seed", "data", RUN, CLASSES, MEMBERS) if key in said},
        **{key: value for key, value in manifest.run.items() if key != SAVED_ON},
        CONVERTED_FROM: str(source.manifest.written_on),
        "saved_at": said.get("saved_at", newest),
        MOVED_LATEST: False,
    }
    save_id = hashlib.sha256(content.encode()).hexdigest()[:32]
    return replace(manifest, files=files, save_id=save_id, run=run)
