"""The `.pt` files of a save, written by this package in the place of `torch.save`: the same
records, so that whatever loads the one loads the other."""

import copyreg
import hashlib
import io
import os
import pickle
import socket
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch._utils import _rebuild_tensor_v2, get_tensor_metadata
from torch.serialization import location_tag

from megatron_ucp.core.grouping import grouped
from megatron_ucp.core.manifest import FileEntry
from megatron_ucp.engines.background import CopiedRuns, SnapshotMemory
from megatron_ucp.engines.save import Written
from megatron_ucp.formats import output_folder
from megatron_ucp.formats.file_layout import ByKey, FileLayout
from megatron_ucp.formats.output_folder import Syncs
from megatron_ucp.formats.pt.archive import ArchiveLayout, archive_of
from megatron_ucp.formats.store import Location, StorePath, location, upload
from megatron_ucp.reshard import agree
from megatron_ucp.reshard.fingerprint import HeldPart, known_sums, sums_of_parts
from megatron_ucp.reshard.folder import (
    FileRange,
    RangeWriter,
    WrittenRange,
    chunks_of,
    in_file_order,
    record_crcs,
)
from megatron_ucp.reshard.threads import Alongside, threads_of_rank

# ---- live archive
#
# A live value as a .pt file: the pickle that `torch.save` makes of it, and the memory that its
# records hold. Nothing is copied.


_PROTOCOL = 2  # as torch.save


@dataclass(frozen=True)
class LiveArchive:
    """The file `path`, in which the storage of a key lies from byte `layout.places[key]` on.
    `memory` has the bytes of each storage where they are now, flat, on any device."""

    path: Location
    layout: ArchiveLayout
    memory: Mapping[str, torch.Tensor]


def live_archive(value: object, path: Location) -> LiveArchive:
    """What `torch.save(value, path)` would write. Raises what `pickle` raises for a value that it
    can't take, RuntimeError for memory that is saved under two dtypes."""
    stream = io.BytesIO()
    pickler = _Pickler(stream)
    pickler.dump(value)
    storages = pickler.storages.by_key
    sizes = {key: storage.nbytes() for key, storage in storages.items()}
    layout = archive_of(path.stem, stream.getvalue(), sizes)
    memory = {key: storage_bytes(storage) for key, storage in storages.items()}
    return LiveArchive(path, layout, memory)


def storage_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """The memory of a storage, as flat bytes."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class _StorageId:
    """The id of a tensor's storage, as `persistent_id` returns it."""

    __slots__ = ("id",)

    def __init__(self, id: tuple[Any, ...]) -> None:
        self.id = id


class _Storages:
    """The storages that a pickle names, under the ids that `torch.load` knows. Source of the ids:
    the function `_save` of torch/serialization.py."""

    def __init__(self) -> None:
        self.by_key: dict[str, torch.UntypedStorage] = {}
        self._ids: dict[tuple[int, torch.dtype], tuple[Any, ...]] = {}
        self._keys: dict[int, str] = {}  # by the storage's place in memory of torch
        self._dtypes: dict[int, torch.dtype] = {}  # by the first byte

    def id_of(self, storage: torch.UntypedStorage, dtype: torch.dtype, kind: Any) -> Any:
        """The id of a storage with elements of a dtype, for which torch has the class `kind`: each
        time another tuple, as pickles name one tuple that comes twice by a shorter code. Raises
        RuntimeError where the storage was saved under another dtype before."""
        known = self._ids.get((storage._cdata, dtype))
        if known is None:
            place = storage.data_ptr()
            if place and self._dtypes.setdefault(place, dtype) != dtype:
                raise RuntimeError("two tensors of different dtypes share their memory")
            key = self._keys.setdefault(storage._cdata, str(len(self._keys)))
            self.by_key[key] = storage
            known = kind, key, location_tag(storage), storage.nbytes() // dtype.itemsize
            self._ids[storage._cdata, dtype] = known
        return "storage", *known

    def reduced(self, tensor: torch.Tensor) -> Any:
        """What `Tensor.__reduce_ex__` returns. Of a tensor that is nothing but dense elements, as
        most are, the same without the time that torch takes to find that out."""
        kind = _KINDS.get(tensor.dtype)
        is_plain = (
            kind is not None
            and tensor.layout is torch.strided
            and (tensor.is_cpu or tensor.is_cuda)
            and not tensor.is_nested
            and not tensor.__dict__
            and not tensor._backward_hooks
            and not get_tensor_metadata(tensor)
        )
        if not is_plain:
            return tensor.__reduce_ex__(_PROTOCOL)
        return _rebuild_tensor_v2, (
            _StorageId(self.id_of(tensor.untyped_storage(), tensor.dtype, kind)),
            tensor.storage_offset(),
            tuple(tensor.size()),
            tensor.stride(),
            tensor.requires_grad,
            OrderedDict(),  # of hooks, which torch does not save either
        )


class _Pickler(pickle.Pickler):
    """Keeps the storages of what it pickles apart."""

    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream, protocol=_PROTOCOL)
        self.storages = _Storages()
        self.dispatch_table = {**copyreg.dispatch_table, torch.Tensor: self.storages.reduced}

    def persistent_id(self, obj: Any) -> Any:
        """Of a storage; None for all else, which is pickled."""
        cls = type(obj)  # nothing slower: this is asked for every value in the tree
        if cls is _StorageId:
            return obj.id
        if cls not in _STORAGES:
            return None
        if cls is torch.UntypedStorage:
            return self.storages.id_of(obj, torch.uint8, torch.UntypedStorage)
        kind = getattr(torch, obj._pickle_storage_type())
        return self.storages.id_of(obj._untyped_storage, obj.dtype, kind)


_STORAGES = frozenset({torch.storage.TypedStorage, torch.UntypedStorage})
# torch's class of storages for each dtype whose tensors have no more than a storage in a pickle
_KINDS = {
    torch.float64: torch.DoubleStorage,
    torch.float32: torch.FloatStorage,
    torch.float16: torch.HalfStorage,
    torch.bfloat16: torch.BFloat16Storage,
    torch.int64: torch.LongStorage,
    torch.int32: torch.IntStorage,
    torch.int16: torch.ShortStorage,
    torch.int8: torch.CharStorage,
    torch.uint8: torch.ByteStorage,
    torch.bool: torch.BoolStorage,
}


# ---- the files that stock DeepSpeed wrote


def entries_in(aside: Location, paths: Iterable[Location], sync: Syncs) -> list[FileEntry]:
    """The manifest's lines about files in a folder aside, which are on disk; folders in it that
    hold them come to disk too. Raises OSError."""
    for folder in sorted({path.parent for path in paths} - {aside}):
        sync(folder)
    return output_folder.entries_of(aside, [one.relative_to(aside).as_posix() for one in paths])


@dataclass(frozen=True)
class StockFiles:
    """The files that DeepSpeed's own code wrote on this rank into the folder `aside`. The
    fingerprint sums `parts`."""

    aside: Location
    paths: Sequence[Location]
    sync: Syncs
    parts: Callable[[], Sequence[HeldPart]]

    def write(self) -> Written:
        """Brings them to disk, and sums meanwhile: both let go of the interpreter. Raises
        OSError."""
        summing = Alongside(lambda: sums_of_parts(self.parts()))
        for path in self.paths:
            self.sync(path)
        size_bytes = sum(path.stat().st_size for path in self.paths)
        return Written(size_bytes, summing.result())

    def close(self, others: Sequence[WrittenRange]) -> list[FileEntry]:
        """Each of them is whole already. Raises OSError."""
        return entries_in(self.aside, self.paths, self.sync)


# ---- files that this package writes
#
# A rank writes the files that the engine's program gives it (`save`), at once, or from a snapshot
# once training goes on. What several ranks of a machine hold alike is written by all of them, a
# range each (`share`): the file's owner makes it, and writes what stands around the records when
# the checksums of all ranges are known (`close`).


_LEAST_SHARED_BYTES = 2**20  # smaller records are not worth a word between ranks
_ALIGNED_BYTES = 4096


@dataclass(frozen=True)
class Replicas:
    """What this rank holds as others do: flat bytes of whole storages, by name. `ranks` are those
    that hold the same."""

    ranks: tuple[int, ...] = ()
    memory: Mapping[str, torch.Tensor] = field(default_factory=dict)

    @property
    def identity(self) -> str:
        """Equal on ranks that can write each other's bytes: those of one machine, which see the
        same pages of a file."""
        sizes = {name: len(memory) for name, memory in self.memory.items()}
        text = repr((socket.gethostname(), self.ranks, sizes))
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def name_of(self, memory: torch.Tensor) -> str | None:
        """The name of these very bytes; None for others."""
        for name, own in self.memory.items():
            if own.data_ptr() == memory.data_ptr() and len(own) == len(memory):
                return name
        return None


# what a rank holds as others do, and the records of it in its own files: path, place, name
SharedRecords = tuple[str, list[tuple[Location, int, str]]]


class RankFiles:
    """The files of one save on this rank, in the folder `aside`. `snapshot` holds what is written
    later; without one, everything is written as it comes."""

    def __init__(
        self,
        aside: Location,
        replicas: Replicas,
        sync: Syncs,
        snapshot: SnapshotMemory | None = None,
    ) -> None:
        self.aside, self.replicas, self.sync, self.snapshot = aside, replicas, sync, snapshot
        self.parts: Callable[[], Sequence[HeldPart]] = tuple  # which the fingerprint sums
        self._summed: Sequence[HeldPart] = ()
        self._writer = RangeWriter(sync)
        self._archives: list[LiveArchive] = []
        self._around_bytes = 0
        self._copies = CopiedRuns()
        self._owners: dict[Location, int] = {}  # ranks that end files in which others write

    def save(self, state_dict: object, path: str | os.PathLike[str]) -> None:
        """In the place of `torch.save`. Raises what that raises, and OSError."""
        archive = live_archive(state_dict, location(path))
        output_folder.make_file(archive.path, archive.layout.size_bytes)
        self._archives.append(archive)
        places, memory = archive.layout.places, archive.memory
        self._around_bytes += archive.layout.size_bytes - sum(map(len, memory.values()))
        self._take(
            FileRange(archive.path, places[key], places[key], memory[key])
            for key in memory
            if self._shared_name(memory[key]) is None
        )

    def _shared_name(self, memory: torch.Tensor) -> str | None:
        if len(self.replicas.ranks) < 2 or len(memory) < _LEAST_SHARED_BYTES:
            return None
        return self.replicas.name_of(memory)

    def sum_parts(self) -> None:
        """What is written from here on is summed for the fingerprint too."""
        self._summed = self.parts()
        self._writer.known = known_sums(self._summed)

    def shared(self) -> SharedRecords:
        """The records of this rank's files that other ranks hold too."""
        records = [
            (archive.path, archive.layout.places[key], name)
            for archive in self._archives
            for key, memory in archive.memory.items()
            if (name := self._shared_name(memory)) is not None
        ]
        return self.replicas.identity, records

    def share(self, ranks: Sequence[SharedRecords]) -> None:
        """Takes this rank's ranges of what several ranks hold, whoever makes the file: `ranks` is
        what each has of `shared`. From then on no memory of the engine is needed. Raises
        OSError."""
        own = agree.world()[0]
        alike = [rank for rank, (identity, _) in enumerate(ranks) if identity == ranks[own][0]]
        for owner in alike:
            self._owners |= {path: owner for path, _, _ in ranks[owner][1]}
        self._take(
            _range(path, place, self.replicas.memory[name], alike.index(own), len(alike))
            for owner in alike
            for path, place, name in ranks[owner][1]
        )
        self._archives = [LiveArchive(one.path, one.layout, {}) for one in self._archives]
        self.replicas = Replicas()

    def _take(self, ranges: Iterable[FileRange]) -> None:
        """Writes ranges, or keeps copies of them; what finds no room is written."""
        now: list[FileRange] = []
        for one in ranges:
            copy = None if self.snapshot is None else self.snapshot.copy(one.memory)
            if copy is None:
                now.append(one)
            else:
                self._copies.add(one.memory, copy)
                self._writer.later(replace(one, memory=copy))
        self._writer.now(now, threads_of_rank())

    def kept(self, memory: torch.Tensor) -> torch.Tensor | None:
        """Memory of the engine as the snapshot has it; itself where nothing is to be written later;
        None where the snapshot has not got it."""
        return memory if self.snapshot is None else self._copies.find(memory)

    def write(self) -> Written:
        """Writes what waits, in this thread; on disk when it returns. What it did not write of the
        fingerprint's parts is summed meanwhile. Raises OSError."""
        if self.snapshot is not None:
            self.sum_parts()
        self._writer.write_waiting()
        parts, known = self._summed, self._writer.known
        summing = Alongside(lambda: sums_of_parts(parts, known), self.snapshot is not None)
        for path in self._writer.paths:
            self.sync(path)
        sums = summing.result()
        own = {archive.path for archive in self._archives}
        others = [one for one in self._writer.written if one.path not in own]
        of_owners = grouped((self._owners[one.path], one) for one in others)
        return Written(self._writer.size_bytes + self._around_bytes, sums, of_owners)

    def close(self, others: Sequence[WrittenRange]) -> list[FileEntry]:
        """Writes what stands around the records of this rank's files. Raises OSError."""
        ranges = grouped((one.path, one) for one in (*self._writer.written, *others))
        for archive in self._archives:
            found = record_crcs(ranges.get(archive.path, ()))
            crcs = {key: found.get(place, 0) for key, place in archive.layout.places.items()}
            with self.sync.right.changing(f"writes {archive.path}"):
                out = self._writer.file(archive.path)
                for at, data in archive.layout.around(crcs):
                    out.write(data, at)
            self.sync(archive.path)
        return entries_in(self.aside, [archive.path for archive in self._archives], self.sync)

    def release(self) -> None:
        self._writer.close()


class StoreRankFiles(RankFiles):
    """The files of one save on this rank, in an object store: each is sent by the rank that has
    it, from its begin to its end, at once or from a snapshot."""

    def __init__(
        self,
        aside: Location,
        replicas: Replicas,
        sync: Syncs,
        snapshot: SnapshotMemory | None = None,
    ) -> None:
        super().__init__(aside, replicas, sync, snapshot)
        self._waiting: list[LiveArchive] = []
        self._size_bytes = 0

    def save(self, state_dict: object, path: str | os.PathLike[str]) -> None:
        archive = live_archive(state_dict, location(path))
        copies: dict[str, torch.Tensor] = {}
        for key, memory in archive.memory.items():
            copy = None if self.snapshot is None else self.snapshot.copy(memory)
            if copy is not None:
                copies[key] = copy
                self._copies.add(memory, copy)
        self._archives.append(replace(archive, memory={}))
        if self.snapshot is not None and len(copies) == len(archive.memory):
            self._waiting.append(replace(archive, memory=copies))
        else:
            self._send(replace(archive, memory={**archive.memory, **copies}))

    def _send(self, archive: LiveArchive) -> None:
        layout, memory = archive.layout, archive.memory
        at = layout.places
        sizes = {at[key]: len(one) for key, one in memory.items()}
        read = {at[key]: partial(chunks_of, one) for key, one in memory.items()}
        whole = FileLayout(
            archive.path.name,
            layout.size_bytes,
            (),
            around=lambda crcs: layout.around(ByKey(at, crcs)),
        )
        upload(
            cast("StorePath", archive.path),
            in_file_order(whole, sizes, read, is_lasting=True),
            layout.size_bytes,
        )
        self._size_bytes += layout.size_bytes

    def shared(self) -> SharedRecords:
        """Nothing: an object has one owner."""
        return self.replicas.identity, []

    def share(self, ranks: Sequence[SharedRecords]) -> None:
        """From then on no memory of the engine is needed."""
        self.replicas = Replicas()

    def write(self) -> Written:
        """Sends what waits, in this thread, and sums meanwhile. Raises StoreError."""
        summing = Alongside(lambda: sums_of_parts(self.parts()), self.snapshot is not None)
        for archive in self._waiting:
            with self.sync.right.changing(f"writes {archive.path}"):
                self._send(archive)
        self._waiting.clear()
        return Written(self._size_bytes, summing.result(), {})

    def close(self, others: Sequence[WrittenRange]) -> list[FileEntry]:
        """Each file is whole already. Raises StoreError."""
        return entries_in(self.aside, [archive.path for archive in self._archives], self.sync)


def _range(path: Location, record: int, memory: torch.Tensor, turn: int, turns: int) -> FileRange:
    """The share of a record that one of several ranks writes."""
    step = -(-len(memory) // turns)
    step += -step % _ALIGNED_BYTES
    low = min(turn * step, len(memory))
    return FileRange(path, record, record + low, memory[low : low + step])


# ---- replicas
#
# What each data-parallel rank of a DeepSpeed engine holds whole: the weights that ZeRO-1 and 2
# gather after every step.


_GATHERED = (1, 2)  # ZeRO stages at which every rank gets all weights from those that step them


def replicated_params(engine: Any) -> dict[str, torch.nn.Parameter]:
    """Of each storage of weights that is the same on all ranks of the data-parallel group the first
    parameter, by its name. Experts are not: fewer ranks share them."""
    if engine.zero_optimization_stage() not in _GATHERED or not dist.is_initialized():
        return {}
    found: dict[int, tuple[str, torch.nn.Parameter]] = {}
    apart: set[int] = set()
    for name, param in engine.module.named_parameters():
        place = param.untyped_storage().data_ptr()
        found.setdefault(place, (name, param))
        if not param.requires_grad or not getattr(param, "allreduce", True):
            apart.add(place)
    return dict(first for place, first in found.items() if place not in apart)


def replicas_of(engine: Any, params: Mapping[str, torch.nn.Parameter]) -> Replicas:
    """The storages of `replicated_params`."""
    if not params:
        return Replicas()
    memory = {name: storage_bytes(param.untyped_storage()) for name, param in params.items()}
    return Replicas(tuple(dist.get_process_group_ranks(engine.seq_data_parallel_group)), memory)
