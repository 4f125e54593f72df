"""The `.pt` files of a save, written by this package in the place of `torch.save`: the same
records, so that whatever loads the one loads the other."""

import io
import os
import pickle
import socket
import threading
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from isal.isal_zlib import crc32, crc32_combine
from torch.serialization import location_tag

from megatron_ucp.engines.background import Alongside
from megatron_ucp.engines.save import SnapshotMemory
from megatron_ucp.formats.output_folder import OutFile, Syncs
from megatron_ucp.formats.pt.writer import ArchiveLayout, archive_of
from megatron_ucp.reshard import agree
from megatron_ucp.reshard.folder import begin_sync

# ---- live archive
#
# A live value as a .pt file: the pickle that `torch.save` makes of it, and the memory that its
# records hold. Nothing is copied.


_PROTOCOL = 2  # as torch.save


@dataclass(frozen=True)
class LiveArchive:
    """The file `path`, in which the storage of a key lies from byte `layout.places[key]` on.
    `memory` has the bytes of each storage where they are now, flat, on any device."""

    path: Path
    layout: ArchiveLayout
    memory: Mapping[str, torch.Tensor]


def live_archive(value: object, path: Path) -> LiveArchive:
    """What `torch.save(value, path)` would write. Raises what `pickle` raises for a value that it
    can't take, RuntimeError for memory that is saved under two dtypes."""
    stream = io.BytesIO()
    pickler = _Pickler(stream)
    pickler.dump(value)
    sizes = {key: storage.nbytes() for key, storage in pickler.storages.items()}
    layout = archive_of(path.stem, stream.getvalue(), sizes)
    memory = {key: storage_bytes(storage) for key, storage in pickler.storages.items()}
    return LiveArchive(path, layout, memory)


def storage_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """The memory of a storage, as flat bytes."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class _Pickler(pickle.Pickler):
    """Keeps storages apart, under the ids that `torch.load` knows. Source of the ids: the function
    `_save` of torch/serialization.py."""

    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream, protocol=_PROTOCOL)
        self.storages: dict[str, torch.UntypedStorage] = {}
        self._keys: dict[int, str] = {}  # by the storage's place in memory of torch
        self._dtypes: dict[int, torch.dtype] = {}  # by the first byte

    def persistent_id(self, obj: Any) -> Any:
        """Of a storage; None for all else, which is pickled."""
        if isinstance(obj, torch.storage.TypedStorage):
            storage, dtype = obj._untyped_storage, obj.dtype
            kind, elems = getattr(torch, obj._pickle_storage_type()), obj._size()
        elif isinstance(obj, torch.UntypedStorage):
            storage, dtype = obj, torch.uint8
            kind, elems = torch.UntypedStorage, obj.nbytes()
        else:
            return None
        if storage.data_ptr() and self._dtypes.setdefault(storage.data_ptr(), dtype) != dtype:
            raise RuntimeError("two tensors of different dtypes share their memory")
        key = self._keys.setdefault(storage._cdata, str(len(self._keys)))
        self.storages[key] = storage
        return "storage", kind, key, location_tag(storage), elems


# ---- rank files
#
# The .pt files of a save, written by this package in the place of `torch.save`: the same records,
# so that whatever loads the one loads the other.
#
# A rank writes the files that the engine's program gives it (`save`), at once, or from a snapshot
# once training goes on. What several ranks of a machine hold alike is written by all of them, a
# range each (`share`): the file's owner makes it, and writes what stands around the records when
# the checksums of all ranges are known (`finish`).


CHUNK_BYTES = 8 * 2**20  # that are summed and written at a time
_LEAST_SHARED_BYTES = 2**20  # smaller records are not worth a word between ranks
_ALIGNED_BYTES = 4096


@dataclass(frozen=True)
class RecordRange:
    """Bytes of a record of a file, those from `low` on: they lie in `memory`, and come to byte
    `place` of the file."""

    path: Path
    key: str
    low: int
    place: int
    memory: torch.Tensor


@dataclass(frozen=True)
class WrittenRange:
    """Bytes [low, low + size) of a record, which are written, and their CRC-32."""

    path: Path
    key: str
    low: int
    size: int
    crc: int


@dataclass(frozen=True)
class Replicas:
    """What this rank holds as others do: flat bytes of whole storages, by name. `ranks` are those
    that hold the same."""

    ranks: tuple[int, ...] = ()
    memory: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def _said(self) -> Any:
        """Equal on ranks that can write each other's bytes: those of one machine, which see the
        same pages of a file."""
        sizes = {name: len(memory) for name, memory in self.memory.items()}
        return socket.gethostname(), self.ranks, sizes

    def name_of(self, memory: torch.Tensor) -> str | None:
        """The name of these very bytes; None for others."""
        for name, own in self.memory.items():
            if own.data_ptr() == memory.data_ptr() and len(own) == len(memory):
                return name
        return None


@dataclass
class RankFiles:
    """The files of one save on this rank. `snapshot` holds what is written later; without one,
    everything is written as it comes."""

    replicas: Replicas
    sync: Syncs
    snapshot: SnapshotMemory | None = None
    archives: list[LiveArchive] = field(default_factory=list[LiveArchive])
    waiting: list[RecordRange] = field(default_factory=list[RecordRange])
    written: list[WrittenRange] = field(default_factory=list[WrittenRange])
    stopped: threading.Event = field(default_factory=threading.Event)
    around_bytes: int = 0
    # by the first byte of the engine's memory
    _copies: dict[int, torch.Tensor] = field(default_factory=dict[int, torch.Tensor])
    _begins: list[int] = field(default_factory=list[int])  # of copies, in order

    @property
    def for_others(self) -> list[WrittenRange]:
        """What this rank wrote of files that other ranks made."""
        own = {archive.path for archive in self.archives}
        return [one for one in self.written if one.path not in own]

    @property
    def written_bytes(self) -> int:
        """What this rank writes, of its own files and of others'."""
        return sum(one.size for one in self.written) + self.around_bytes

    def save(self, state_dict: object, path: str | Path, is_lasting: bool = False) -> None:
        """In the place of `torch.save`. Of memory that `is_lasting` no copy is taken: nothing of
        the engine's is in it. Raises what that raises, and OSError."""
        archive = live_archive(state_dict, Path(path))
        with open(archive.path, "wb") as file:
            file.truncate(archive.layout.size_bytes)
        self.archives.append(archive)
        places, memory = archive.layout.places, archive.memory
        self.around_bytes += archive.layout.size_bytes - sum(map(len, memory.values()))
        ranges = [
            RecordRange(archive.path, key, 0, places[key], memory[key])
            for key in memory
            if self._shared_name(memory[key]) is None
        ]
        if is_lasting and self.snapshot is not None:
            self.waiting += ranges
        else:
            self._take(ranges)

    def _shared_name(self, memory: torch.Tensor) -> str | None:
        if len(self.replicas.ranks) < 2 or len(memory) < _LEAST_SHARED_BYTES:
            return None
        return self.replicas.name_of(memory)

    def share(self) -> None:
        """Takes this rank's ranges of what several ranks hold, whoever makes the file; from then on
        no memory of the engine is needed. Collective. Raises OSError."""
        said = agree.gather((self.replicas._said(), self._shared()))
        alike = [rank for rank, (held, _) in enumerate(said) if held == said[_rank()][0]]
        turn = alike.index(_rank())
        self._take(
            _range(path, key, place, self.replicas.memory[name], turn, len(alike))
            for owner in alike
            for path, key, place, name in said[owner][1]
        )
        self.archives = [LiveArchive(one.path, one.layout, {}) for one in self.archives]
        self.replicas = Replicas()
        self._begins = sorted(self._copies)

    def _shared(self) -> list[tuple[Path, str, int, str]]:
        """Of each record of this rank's files that others hold too: file, key, place, name."""
        return [
            (archive.path, key, archive.layout.places[key], name)
            for archive in self.archives
            for key, memory in archive.memory.items()
            if (name := self._shared_name(memory)) is not None
        ]

    def _take(self, ranges: Iterable[RecordRange]) -> None:
        """Writes ranges, or keeps copies of them; what finds no room is written."""
        now: list[RecordRange] = []
        for one in ranges:
            copy = None if self.snapshot is None else self.snapshot.copy(one.memory)
            if copy is None:
                now.append(one)
            else:
                self._copies[one.memory.data_ptr()] = copy
                self.waiting.append(RecordRange(one.path, one.key, one.low, one.place, copy))
        if now:
            self.written += _written_by_threads(now, self.stopped)

    def kept(self, memory: torch.Tensor) -> torch.Tensor | None:
        """Memory of the engine as the snapshot has it; itself where nothing is to be written later;
        None where the snapshot has not got it."""
        if self.snapshot is None:
            return memory
        start, size = memory.data_ptr(), memory.numel() * memory.element_size()
        at = bisect_right(self._begins, start)
        if not at or not memory.is_contiguous():
            return None
        first = self._begins[at - 1]
        part = self._copies[first][start - first : start - first + size]
        return part.view(memory.dtype).view(memory.shape) if len(part) == size else None

    def write(self) -> None:
        """Writes what waits, in this thread. Raises OSError."""
        for one in self.waiting:
            for chunk in _chunks(one):
                with self.sync.right.changing(f"writes {one.path}"):
                    self.written.append(_written(chunk))
            if self.sync.durable:
                begin_sync(one.path, one.place, len(one.memory))
        self.waiting.clear()

    def to_disk(self) -> None:
        """Brings what this rank wrote to disk. Raises OSError."""
        for path in sorted({one.path for one in self.written}):
            self.sync(path)

    def finish(self, others: Iterable[WrittenRange]) -> list[Path]:
        """Writes what stands around the records of this rank's files, of which `others` wrote
        ranges too, all on disk by now; returns the files. Raises OSError."""
        ranges: dict[Path, list[WrittenRange]] = defaultdict(list)
        for one in (*self.written, *others):
            ranges[one.path].append(one)
        for archive in self.archives:
            crcs = {key: 0 for key in archive.layout.places}
            for one in sorted(ranges[archive.path], key=lambda one: one.low):
                crcs[one.key] = crc32_combine(crcs[one.key], one.crc, one.size)
            with (
                self.sync.right.changing(f"writes {archive.path}"),
                OutFile(archive.path) as out,
            ):
                for at, data in archive.layout.around(crcs):
                    out.write(data, at)
            self.sync(archive.path)
        return [archive.path for archive in self.archives]


def _rank() -> int:
    return agree.world()[0]


def _range(
    path: Path, key: str, place: int, memory: torch.Tensor, turn: int, turns: int
) -> RecordRange:
    """The share of a record that one of several ranks writes."""
    step = -(-len(memory) // turns)
    step += -step % _ALIGNED_BYTES
    low = min(turn * step, len(memory))
    return RecordRange(path, key, low, place + low, memory[low : low + step])


def _chunks(one: RecordRange) -> list[RecordRange]:
    return [
        RecordRange(
            one.path, one.key, one.low + at, one.place + at, one.memory[at : at + CHUNK_BYTES]
        )
        for at in range(0, len(one.memory), CHUNK_BYTES)
    ]


def _written(one: RecordRange) -> WrittenRange:
    data = one.memory.cpu().numpy().data
    with OutFile(one.path) as out:
        out.write(data, one.place)
    return WrittenRange(one.path, one.key, one.low, len(data), crc32(data))


def _written_by_threads(
    ranges: Sequence[RecordRange], stopped: threading.Event
) -> list[WrittenRange]:
    """Writes ranges, several at a time; the disk begins meanwhile."""
    found: list[WrittenRange] = []
    chunks = deque(chunk for one in ranges for chunk in _chunks(one))

    def work() -> None:
        torch.set_num_threads(1)
        while not stopped.is_set():
            try:
                chunk = chunks.popleft()
            except IndexError:
                return
            found.append(_written(chunk))
            begin_sync(chunk.path, chunk.place, len(chunk.memory))

    threads = [Alongside(work) for _ in range(min(_threads(), len(chunks)))]
    try:
        for thread in threads:
            thread.result()
    finally:
        if any(thread.is_alive() for thread in threads):  # after a failure, and after Ctrl-C
            stopped.set()
    return found


def _threads() -> int:
    """The cores of this machine are for all of its ranks."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE") or agree.world()[1])
    return max(1, min(8, (os.cpu_count() or 1) // local))


# ---- replicas
#
# What each data-parallel rank of a DeepSpeed engine holds whole: the weights that ZeRO-1 and 2
# gather after every step.


_GATHERED = (1, 2)  # ZeRO stages at which every rank gets all weights from those that step them


def replicas_of(engine: Any) -> Replicas:
    """Storages of weights that are the same on all ranks of the data-parallel group, by the name of
    the first parameter in each. Experts are not: fewer ranks share them."""
    if engine.zero_optimization_stage() not in _GATHERED or not dist.is_initialized():
        return Replicas()
    found: dict[int, tuple[str, torch.UntypedStorage]] = {}
    apart: set[int] = set()
    for name, param in engine.module.named_parameters():
        storage = param.untyped_storage()
        found.setdefault(storage.data_ptr(), (name, storage))
        if not param.requires_grad or not getattr(param, "allreduce", True):
            apart.add(storage.data_ptr())
    memory = {
        name: storage_bytes(storage)
        for place, (name, storage) in found.items()
        if place not in apart
    }
    return Replicas(tuple(dist.get_process_group_ranks(engine.seq_data_parallel_group)), memory)
