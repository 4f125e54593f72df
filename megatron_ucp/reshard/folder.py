"""A folder as a sink: its files are written aside, by one process or by all ranks, and it
appears whole or not at all."""

import os
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from tempfile import SpooledTemporaryFile
from typing import IO, Any, Self, cast

import torch
from isal.isal_zlib import crc32, crc32_combine

from megatron_ucp.core.grouping import grouped
from megatron_ucp.core.plan import Slot
from megatron_ucp.errors import PlanError, SaveError, StoreError, UsageError
from megatron_ucp.formats import output_folder
from megatron_ucp.formats.checkpoint import Checkpoint
from megatron_ucp.formats.deepspeed.files import MODEL, MODEL_PARTITION
from megatron_ucp.formats.file_layout import FileLayout, FilePiece, nothing_around
from megatron_ucp.formats.output_folder import OutFile, begin_sync, make_file, sync_all
from megatron_ucp.formats.pt.refs import ITEMSIZE
from megatron_ucp.formats.store import Location, StorePath, location, real, upload
from megatron_ucp.formats.tags import require_no_pointer
from megatron_ucp.reshard import agree
from megatron_ucp.reshard.checksums import KnownSums
from megatron_ucp.reshard.execute import TORCH_DTYPES, bytes_of
from megatron_ucp.reshard.files import WINDOW_BYTES, ThreadMemory, pool
from megatron_ucp.reshard.kept_moves import SharedMemories
from megatron_ucp.reshard.threads import Alongside
from megatron_ucp.reshard.transfer import Lost, Proved, Readers, SinkPart, TransferRun, WindowSource

# ---- folder sink
#
# A folder as a sink: its files are written aside, and it appears whole or not at all.


_JOB_BYTES = 16 * 2**20  # of one file that a thread writes before it takes the next job
FileRun = tuple[Location, int, int]  # file, first byte, how many bytes


@dataclass(frozen=True)
class FolderOutput:
    """A folder on paper: what each of its files holds of which part. `close` writes what holds
    nothing of a tensor into the folder aside, once all else is there; `publish` gives that its
    name, where the folder's sink does. `verb` says what for: to train, to export; `replaces`: an
    earlier output may have the name."""

    parts: tuple[SinkPart, ...]
    files: tuple[FileLayout, ...]
    close: Callable[[Location], None]
    publish: Callable[[Location], object] = bool
    verb: str = "train"
    replaces: bool = False

    @property
    def size_bytes(self) -> int:
        return sum(piece.size_bytes for file in self.files for piece in file.pieces)

    def prove(self) -> None:
        """Every piece is all of its slot, every wanted slot has a piece, and no two pieces of a
        file overlap. Raises PlanError."""
        wanted = {(number, s) for number, part in enumerate(self.parts) for s, _ in part.wants}
        for file in self.files:
            for piece in file.pieces:
                buffer = self.parts[piece.part].target.buffers[piece.slot.buffer]
                elems = buffer.of(piece.slot.state).elems(piece.slot.part)
                if elems != piece.elems or buffer.dtype_of(piece.slot.state) != piece.dtype:
                    raise PlanError(
                        "a piece of a file is not all of what it stands for",
                        file=file.name,
                        expected=f"{elems} elements",
                        found=piece,
                    )
                wanted.discard((piece.part, piece.slot))
            _prove_apart(file)
        if wanted:
            raise PlanError("no file holds what is wanted", found=min(wanted, key=str))


def _prove_apart(file: FileLayout) -> None:
    runs = sorted((piece.place, piece.size_bytes) for piece in file.pieces)
    end = 0
    for place, size in [*runs, (file.size_bytes, 0)]:
        if place < end:
            raise PlanError("pieces of a file overlap", file=file.name, found=f"byte {place}")
        end = place + size


class OutputFolder:
    """One folder, from the making of the one aside to its name."""

    thorough = True
    rank = 0  # of those that write it; the first one makes the folder and names it
    what_failed = "the output could not be written; nothing is left of it"
    what_to_do = "free space or mend permissions, then try again"

    def __init__(
        self, folder: Location, output: FolderOutput, aside: Location | None = None
    ) -> None:
        self.folder, self.output = folder, output
        self.parts, self.verb = output.parts, output.verb
        absolute = folder.absolute()
        self.aside = aside or output_folder.aside_of(absolute.parent, absolute.name)
        self._held = ExitStack()
        self._lost: Lost = {}

    def __enter__(self) -> Self:
        """The folder beside it that files are written into, this process's alone. Raises UsageError
        where another process writes it, SaveError where the disk refuses."""
        with self._as_save_error():
            self._held.enter_context(self._life())
        return self

    @contextmanager
    def _life(self) -> Iterator[None]:
        """The folder aside, from its making to its end."""
        self.aside.parent.mkdir(parents=True, exist_ok=True)
        with ExitStack() as held:
            try:
                held.enter_context(output_folder.held(self.aside, replaces=self.output.replaces))
            except SaveError as error:
                what = "another conversion is writing this output"
                raise UsageError(
                    what if error.id else error.problem,
                    file=error.file,
                    expected=error.expected,
                    found=error.found,
                    fix=error.what_to_do,
                    id=error.id,
                ) from None
            yield

    def __exit__(self, *_: object) -> None:
        self._held.close()

    def compare(self) -> None:
        """Nothing was recorded of what a folder gets."""

    def _make_files(self) -> None:
        """Makes all files in their sizes, so that no machine has to learn of a new name. Undoes
        the folder where the disk refuses."""
        if isinstance(self.aside, StorePath):
            return
        with ExitStack() as undo, self._as_save_error():
            undo.callback(self._held.close)
            for file in self.output.files:
                path = self.aside / file.name
                path.parent.mkdir(parents=True, exist_ok=True)
                make_file(path, file.size_bytes)
            undo.pop_all()

    def lost(self) -> Lost:
        """What was looked at as it was written."""
        return self._lost

    def finish(self) -> None:
        """Writes what holds nothing of a tensor; all of it is on disk then."""
        with self._as_save_error():
            # an object is there whole or not at all, and others may still send theirs
            for file in () if isinstance(self.aside, StorePath) else self.output.files:
                _require_whole(self.aside / file.name, file.size_bytes)
            self.output.close(self.aside)
            self._bring_to_disk()

    def _bring_to_disk(self) -> None:
        sync_all(self.aside)

    @contextmanager
    def _as_save_error(self) -> Iterator[None]:
        """Inside, what the operating system refuses is a SaveError."""
        try:
            yield
        except OSError as error:
            raise SaveError(
                self.what_failed,
                file=error.filename or self.folder,
                found=f"{type(error).__name__}: {error}",
                fix=self.what_to_do,
            ) from error
        except StoreError as error:
            raise save_error_of(error, self.what_failed) from error

    def publish(self) -> None:
        """Rank 0 names the folder. Raises UsageError where a save took its name meanwhile."""
        if self.rank == 0:
            with self._as_save_error():
                self.output.publish(self.aside)


def save_error_of(error: StoreError, what_failed: str) -> SaveError:
    """What an object store refused, as a save or an output that failed."""
    return SaveError(
        what_failed,
        file=error.file,
        expected=error.expected,
        found=f"{error.problem}: {error.found}",
        fix=error.what_to_do,
        id=error.id,
    )


def _require_whole(path: Location, size_bytes: int) -> None:
    found = path.stat().st_size
    if found != size_bytes:
        what = "a file has another size than was planned"
        raise PlanError(what, file=path, expected=size_bytes, found=found)


# ------------------------------------------------ by the threads of one process, or of all ranks


class FolderSink(OutputFolder):
    """A folder that is written by the threads of one process; with `ranks` by those of all ranks,
    each its share of the bytes. Rank 0 makes the folder then and names it."""

    def __init__(self, folder: Location, output: FolderOutput, ranks: bool = False) -> None:
        output.prove()
        super().__init__(folder, output)
        self.rank, self.world = agree.world() if ranks else (0, 1)

    def __enter__(self) -> Self:
        if self.rank == 0:
            super().__enter__()
        if self.rank == 0 and self.world > 1:
            self._make_files()
        return self

    def move(self, source: WindowSource, parts: Sequence[Proved], run: TransferRun) -> None:
        """Several pieces at a time, each window by window: read, summed, written."""
        is_store = isinstance(self.aside, StorePath)
        files = share_of(self.output.files, self.rank, self.world, is_store)
        readers = Readers(source, parts)
        run.total = sum(piece.size_bytes for file in files for piece in file.pieces)
        places = {(self.aside / file.name).parent for file in files} - {self.aside}
        writer = _Threads(self.aside, readers, run)
        beside = int(os.environ.get("LOCAL_WORLD_SIZE", self.world)) if self.world > 1 else 1
        with self._as_save_error(), pool(beside) as threads:
            for place in places:
                place.mkdir(parents=True, exist_ok=True)
            (writer.upload if is_store else writer.write)(threads, files)
        self._lost = readers.overflows.found

    def finish(self) -> None:
        """Each rank brings what it wrote to disk: other machines can't do it for it."""
        if self.rank == 0:
            super().finish()
        else:
            with self._as_save_error():
                self._bring_to_disk()


def share_of(
    files: Sequence[FileLayout], rank: int, world: int, are_whole: bool = False
) -> list[FileLayout]:
    """What one of several ranks writes, so that each has about as many bytes: the largest things
    first, each to the rank that has least. A file with checksums, such as a .pt file, is written as
    a whole by one rank, as its end follows from all of it. Of one without, such as a .safetensors
    file, ranks write runs of pieces; not where files `are_whole`, as those in a store.

    Of files of 8, 4, 4 and 1 GB the first of two ranks writes that of 8, the other one 4 + 4, and
    the first one that of 1."""
    if world == 1:
        return [*files]
    runs = [
        (file, pieces)
        for file in files
        for pieces in (
            _jobs_of(file.pieces)
            if file.around is nothing_around and not are_whole
            else [file.pieces]
        )
    ]
    sizes = [(sum(piece.size_bytes for piece in pieces), set[int]()) for _, pieces in runs]
    own: dict[str, FileLayout] = {}
    for taker, (file, pieces) in zip(evenly(sizes, world), runs, strict=True):
        blobs = file.blobs if pieces[:1] == file.pieces[:1] else ()  # they go with the first run
        if taker == rank:
            held = own.get(file.name, replace(file, pieces=(), blobs=()))
            own[file.name] = replace(
                held, pieces=[*held.pieces, *pieces], blobs=[*held.blobs, *blobs]
            )
    return [*own.values()]


def evenly(sizes: Sequence[tuple[int, set[int]]], world: int) -> list[int]:
    """For each of some things, of (bytes, the ranks that have all of it), the rank that takes it:
    one that has it, where there is any; each rank as many bytes as the others, if it can be."""
    held = [0] * world
    takers = [0] * len(sizes)
    for number in sorted(range(len(sizes)), key=lambda number: -sizes[number][0]):
        size, have = sizes[number]
        takers[number] = min(have or range(world), key=lambda rank: (held[rank], rank))
        held[takers[number]] += size
    return takers


@dataclass
class FileOnItsWay:
    """A file of which threads write pieces; `crcs` are those of what is there, `left` jobs are not
    done."""

    path: Location
    layout: FileLayout
    left: int
    crcs: dict[int, int] = field(default_factory=dict[int, int])
    _lock: Any = field(default_factory=threading.Lock)

    def wrote(self, out: OutFile, crcs: dict[int, int]) -> None:
        """Says which pieces a job wrote. Behind the last one comes what stands around them."""
        with self._lock:
            self.crcs.update(crcs)
            self.left -= 1
            is_last = self.left == 0
        if is_last:
            write_around(out, self.layout, self.crcs)


def write_around(out: OutFile, layout: FileLayout, crcs: Mapping[int, int]) -> None:
    """Writes all of a file but its pieces, whose CRC-32s are known. Raises OSError."""
    sums = dict(crcs)
    for at, blob in layout.blobs:
        data = blob()
        sums[at] = crc32(data)
        out.write(data, at)
    for at, data in layout.around(sums):
        out.write(data, at)


class _Threads:
    """Writes the pieces of files."""

    def __init__(self, aside: Location, readers: Readers, run: TransferRun) -> None:
        self._aside, self._readers, self._run = aside, readers, run
        self._memory = ThreadMemory()

    def write(self, threads: ThreadPoolExecutor, files: Sequence[FileLayout]) -> None:
        """All files; the largest jobs first, so that the threads hardly wait in the end."""
        jobs: list[tuple[int, Callable[[], FileRun | None]]] = []
        for layout in files:
            runs = _jobs_of(layout.pieces)
            on_its_way = FileOnItsWay(self._aside / layout.name, layout, len(runs))
            for pieces in runs:
                size = sum(piece.size_bytes for piece in pieces)
                jobs.append((size, partial(self._pieces, on_its_way, pieces)))
        jobs.sort(key=lambda job: -job[0])
        in_threads(threads, [job for _, job in jobs], self._run.stopped)

    def upload(self, threads: ThreadPoolExecutor, files: Sequence[FileLayout]) -> None:
        """All files into a store, several at a time, each from its begin to its end."""
        ordered = sorted(files, key=lambda file: -file.size_bytes)
        in_threads(threads, [partial(self._object, file) for file in ordered], self._run.stopped)

    def _object(self, layout: FileLayout) -> FileRun | None:
        pieces = {piece.place: piece for piece in layout.pieces}
        read = {at: partial(self._windows, piece) for at, piece in pieces.items()}
        sizes = {at: piece.size_bytes for at, piece in pieces.items()}
        chunks = in_file_order(layout, sizes, read)
        upload(cast("StorePath", self._aside / layout.name), chunks, layout.size_bytes)
        return None

    def _windows(self, piece: FilePiece) -> Iterator[memoryview]:
        """The bytes of a piece; a window's are gone with the next one."""
        size = ITEMSIZE[piece.dtype]
        step = self._readers.window_bytes(piece.part, piece.slot) // size
        for low in range(0, piece.elems, step):
            window = self._memory.take(min(step, piece.elems - low), piece.dtype)
            self._readers.fill(piece.part, piece.slot, low, window)
            yield bytes_of(window)
            self._run.count(window.nbytes)

    def _pieces(self, file: FileOnItsWay, pieces: Sequence[FilePiece]) -> FileRun | None:
        """Some pieces of a file that follow each other. Runs in a thread of its own."""
        with OutFile(file.path) as out:
            crcs = {piece.place: self._piece(out, piece) for piece in pieces}
            file.wrote(out, crcs)
        size = sum(piece.size_bytes for piece in pieces)
        return (file.path, pieces[0].place, size) if size > WINDOW_BYTES else None

    def _piece(self, out: OutFile, piece: FilePiece) -> int:
        """One piece; its CRC-32."""
        at, crc = piece.place, 0
        for data in self._windows(piece):
            crc = crc32(data, crc)
            out.write(data, at)
            at += len(data)
        return crc


_IN_MEMORY_BYTES = 256 * 2**20  # of a record whose checksum is made before it is sent


def in_file_order(
    layout: FileLayout,
    sizes: Mapping[int, int],
    read: Mapping[int, Callable[[], Iterable[memoryview]]],
    is_lasting: bool = False,
) -> Iterator[bytes]:
    """The bytes of a file from its begin to its end, as a store takes them. `read` gives those of
    each piece, by its first byte, each chunk until the next one is asked for; `sizes` says how many
    they are. The header of a record has its checksum, so a record is read before it is sent. It is
    kept meanwhile, a large one in a temporary file; what is lasting is asked for twice."""
    blobs = dict(layout.blobs)
    known = _SummedWhenAsked(sizes, read, {**blobs}, is_lasting)
    around, pending, at = iter(layout.around(known)), None, 0
    there = {place for place, size in sizes.items() if size}
    starts = sorted({*there, *blobs})
    while at < layout.size_bytes:
        if at in there:
            yield from map(bytes, known.chunks(at))
            at += sizes[at]
        if at in blobs:
            data = blobs.pop(at)()  # once: one of no bytes leaves the place to what follows it
            yield data
            at += len(data)
        elif at not in there and at < layout.size_bytes:
            pending = pending or next(around, None)
            if pending is not None and pending[0] == at:
                yield pending[1]
                at, pending = at + len(pending[1]), None
            else:  # nothing is there
                later = [one for one in starts if one > at]
                ends = [layout.size_bytes, *later[:1], *(pending or ())[:1]]
                yield bytes(min(ends) - at)
                at = min(ends)


class _SummedWhenAsked(Mapping[int, int]):
    """The CRC-32 of each piece of a file, made of its bytes when it is asked for; see
    `in_file_order`."""

    def __init__(
        self,
        sizes: Mapping[int, int],
        read: Mapping[int, Callable[[], Iterable[memoryview]]],
        blobs: Mapping[int, Callable[[], bytes]],
        is_lasting: bool,
    ) -> None:
        self._sizes, self._read, self._blobs, self._is_lasting = sizes, read, blobs, is_lasting
        self._sums: dict[int, int] = {}
        self._kept: dict[int, IO[bytes]] = {}  # copies of what can't be asked for twice

    def __getitem__(self, at: int) -> int:
        if at not in self._sums:
            self._sums[at] = crc32(self._blobs[at]()) if at in self._blobs else self._summed(at)
        return self._sums[at]

    def __iter__(self) -> Iterator[int]:
        return iter((*self._sizes, *self._blobs))

    def __len__(self) -> int:
        return len(self._sizes) + len(self._blobs)

    def chunks(self, at: int) -> Iterator[bytes | memoryview]:
        """The bytes of a piece, as much at once as is written at a time."""
        kept = self._kept.pop(at, None)
        if kept is None:
            yield from self._read[at]()
            return
        kept.seek(0)
        with kept:
            while chunk := kept.read(CHUNK_BYTES):
                yield chunk

    def _summed(self, at: int) -> int:
        crc = 0
        if not self._is_lasting:
            self._kept[at] = cast("IO[bytes]", SpooledTemporaryFile(_IN_MEMORY_BYTES))  # noqa: SIM115
        for chunk in self._read[at]():
            crc = crc32(chunk, crc)
            if at in self._kept:
                self._kept[at].write(chunk)
        return crc


def _jobs_of(pieces: Sequence[FilePiece]) -> list[list[FilePiece]]:
    """Runs of pieces, each of about _JOB_BYTES; one without any for a file that has none."""
    jobs: list[list[FilePiece]] = [[]]
    size = 0
    for piece in pieces:
        if size >= _JOB_BYTES:
            jobs.append([])
            size = 0
        jobs[-1].append(piece)
        size += piece.size_bytes
    return jobs


def in_threads(
    threads: ThreadPoolExecutor,
    jobs: Iterable[Callable[[], FileRun | None]],
    stopped: threading.Event,
) -> None:
    """Runs all jobs, several at a time. The disk begins with what one has written while the others
    go on. After a failure, and after Ctrl-C, `stopped` is set, and those that have not begun don't
    begin."""
    waiting: list[Future[FileRun | None]] = []
    try:
        waiting.extend(threads.submit(job) for job in jobs)
        for done in as_completed(waiting):
            if written := done.result():
                begin_sync(*written)
    finally:
        if not all(one.done() for one in waiting):
            stopped.set()
        for one in waiting:
            one.cancel()


# ------------------------------------------------ before anything is written


def require_plain(folder: Location, may_replace: Callable[[], object] | None = None) -> None:
    """Raises UsageError for an output that exists, unless `may_replace` says that it may be
    replaced, or that has no plain name, or a pointer's."""
    require_no_pointer(folder.absolute())
    if may_replace is None or not may_replace():
        require_free(folder, "" if may_replace is None else REPLACES)
    if folder.absolute().name.startswith(".") or not folder.name:
        raise UsageError(
            "the output is the plain name of a new folder",
            file=folder,
            expected="converted/global_step100",
            found=str(folder),
            fix="give such a name",
        )


REPLACES = "; an earlier export is replaced with --force (Python: force=True)"


def require_free(folder: Location, also: str = "") -> None:
    """Raises UsageError for an output that exists; `also` says what else may be done."""
    if folder.exists() or folder.is_symlink():
        raise UsageError(
            "the output exists",
            file=folder,
            expected="a folder that does not exist yet",
            found="one that does",
            fix=f"give another name, or remove it{also}",
        )


def require_outside(folder: Location, source: Location) -> None:
    """A `latest` in a tag folder would lead every load of that tag astray. Raises UsageError."""
    parent = real(folder).parent
    beside = [path.name for path in parent.iterdir()] if parent.is_dir() else []
    if real(source) in (parent, *parent.parents) or any(
        MODEL.fullmatch(n) or MODEL_PARTITION.fullmatch(n) for n in beside
    ):
        raise UsageError(
            "the output lies inside of a checkpoint",
            file=folder,
            expected="a place beside it",
            found=parent,
            fix="name the output in another folder",
        )


def check_source(source: Checkpoint, folder: Location, allow: Collection[str]) -> None:
    """Compares the files of a checkpoint with each other, all of them; the output lies elsewhere.
    Raises a UcpError."""
    require_outside(folder, location(str(source.folder)))
    source.check_all(source.file_names, allow)


# ---- ranks folder
#
# A folder as a sink of all ranks: each writes its share of the files, all of them at once.
#
_BEGIN_SYNC_BYTES = 1 << 20  # of a range after which the disk begins with it
CHUNK_BYTES = 8 * 2**20  # that are summed and written at a time


@dataclass(frozen=True)
class FileRange:
    """Flat bytes in `memory`, which come to byte `at` of a file. They are of the record that begins
    at byte `record` (None: nobody asks for its checksum)."""

    path: Location
    record: int | None
    at: int
    memory: torch.Tensor

    @property
    def chunks(self) -> "list[FileRange]":
        """The same bytes, as much at once as is written at a time."""
        lows = range(0, len(self.memory), CHUNK_BYTES)
        return [
            FileRange(self.path, self.record, self.at + low, self.memory[low : low + CHUNK_BYTES])
            for low in lows
        ]


@dataclass(frozen=True, order=True)
class WrittenRange:
    """Bytes [at, at + size) of a file, which are written, and their CRC-32."""

    path: Location
    record: int
    at: int
    size: int
    crc: int


def record_crcs(ranges: Iterable[WrittenRange]) -> dict[int, int]:
    """The CRC-32 of each record of a file from those of its ranges, in whatever order they were
    written."""
    out: dict[int, int] = {}
    for one in sorted(ranges):
        out[one.record] = crc32_combine(out.get(one.record, 0), one.crc, one.size)
    return out


class RangeWriter:
    """Writes ranges of files on this rank: `now`, or `later` from memory that nobody changes until
    then, such as a snapshot. `wrote` is told of each range; `known` takes the sums of their
    memory."""

    def __init__(
        self, sync: output_folder.Syncs, wrote: Callable[[FileRange], None] | None = None
    ) -> None:
        self.sync, self._wrote = sync, wrote
        self.waiting: list[FileRange] = []
        self.written: list[WrittenRange] = []
        self.known = KnownSums()
        self._files: dict[Location, OutFile] = {}

    @property
    def size_bytes(self) -> int:
        return sum(one.size for one in self.written)

    @property
    def paths(self) -> list[Location]:
        return sorted(self._files)

    def later(self, one: FileRange) -> None:
        """Keeps a range until `write_waiting`."""
        self.waiting.append(one)

    def now(self, ranges: Iterable[FileRange], threads: int = 1) -> None:
        """Writes ranges, in several threads where that is asked for. Raises OSError."""
        chunks = deque(chunk for one in ranges for chunk in one.chunks)
        for path in {chunk.path for chunk in chunks}:
            self.file(path)
        if threads == 1:
            for chunk in chunks:
                self.write(chunk)
            return
        stopped = threading.Event()

        def work() -> None:
            torch.set_num_threads(1)
            while not stopped.is_set():
                try:
                    chunk = chunks.popleft()
                except IndexError:
                    return
                self.write(chunk)

        workers = [Alongside(work) for _ in range(min(threads, len(chunks)))]
        try:
            for worker in workers:
                worker.result()
        finally:  # after a failure, and after Ctrl-C
            stopped.set()
            for worker in workers:  # who closes the files next may: nobody writes any more
                worker.join()

    def write_waiting(self) -> None:
        """Writes what waits, as long as the save has its right. Raises OSError, SaveError."""
        for one in self.waiting:
            for chunk in one.chunks:
                with self.sync.right.changing(f"writes {chunk.path}"):
                    self.write(chunk)
        self.waiting.clear()

    def write(self, one: FileRange) -> None:
        """Writes one range. Raises OSError."""
        data = bytes_of(one.memory.cpu())
        self.file(one.path).write(data, one.at)
        if one.record is not None:
            crc = self.known.crc32(data, one.memory.data_ptr())
            self.written.append(WrittenRange(one.path, one.record, one.at, len(data), crc))
        if self.sync.durable and len(data) >= _BEGIN_SYNC_BYTES:
            begin_sync(one.path, one.at, len(data))
        if self._wrote is not None:
            self._wrote(one)

    def file(self, path: Location) -> OutFile:
        """A file, which stays open until `close`. Raises OSError."""
        if path not in self._files:
            self._files[path] = OutFile(path)
        return self._files[path]

    def close(self) -> None:
        for out in self._files.values():
            out.close()
        self._files.clear()


class RanksFolder(OutputFolder):
    """Rank 0 makes the folder and names it; each rank writes ranges of files by its `writer`, and
    ends the files that it owns. `sync` brings files to disk."""

    what_to_do = "free space or mend permissions on every rank, then try again"

    def __init__(
        self,
        folder: Location,
        output: FolderOutput,
        sync: output_folder.Syncs | None = None,
        aside: Location | None = None,
    ) -> None:
        self.rank, self.world = agree.world()
        super().__init__(folder, output, aside)
        self.sync = sync or output_folder.Syncs()
        self.writer = RangeWriter(self.sync)

    def __enter__(self) -> Self:
        if self.rank == 0:
            super().__enter__()
            self._make_files()
        return self

    def __exit__(self, *_: object) -> None:
        self.writer.close()
        super().__exit__()

    def finish(self) -> None:
        """Each rank brings what it wrote to disk: other machines can't do it for it."""
        with self._as_save_error():
            self._write_all()
            for path in self.writer.paths:
                self.sync(path)
        if self.rank == 0:
            super().finish()

    @property
    def own_files(self) -> list[FileLayout]:
        """The files that this rank ends."""
        return [file for file in self.output.files if self.rank == (file.owner or 0)]

    def _write_all(self) -> None:
        """What waits, then what stands around the pieces of this rank's files, whose CRC-32s are
        known by then. Raises OSError, StoreError."""
        if isinstance(self.aside, StorePath):
            self._upload_all(self.aside)
            return
        self.writer.write_waiting()
        ranges = grouped((one.path, one) for one in self.writer.written)
        for file in self.own_files:
            path = self.aside / file.name
            crcs = record_crcs(ranges.get(path, ()))
            with self.sync.right.changing(f"writes {path}"):
                around = {piece.place: crcs.get(piece.place, 0) for piece in file.pieces}
                write_around(self.writer.file(path), file, around)

    def _upload_all(self, aside: StorePath) -> None:
        """This rank's files, each from its begin to its end; all bytes wait in memory."""
        waiting = grouped((one.path, one) for one in self.writer.waiting)
        for file in self.own_files:
            path = aside / file.name
            ranges = grouped((one.record, one) for one in waiting.get(path, ()))
            sizes = {piece.place: piece.size_bytes for piece in file.pieces}
            read = {at: partial(_memory_of, ranges.get(at, [])) for at in sizes}
            with self.sync.right.changing(f"writes {path}"):
                upload(path, in_file_order(file, sizes, read, is_lasting=True), file.size_bytes)
        self.writer.waiting.clear()

    def _bring_to_disk(self) -> None:
        if isinstance(self.aside, StorePath):
            return
        held = {self.aside / file.name for file in self.output.files}  # by those who wrote them
        for path in [*sorted({*self.aside.rglob("*")} - held), self.aside]:
            self.sync(path)


# ---- gathered folder
#
# The memories of all ranks as a folder: each rank gathers the pieces that it writes, some at a
# time.


GROUP_BYTES = 2**30  # of pieces that a rank gathers before it writes them


class GatheredFolder(RanksFolder):
    """A folder whose pieces are made of what all ranks hold, each written by the rank that has most
    of it."""

    def __init__(self, folder: Location, output: FolderOutput) -> None:
        output.prove()
        _, world = agree.world()
        files = _owned(output.files, world, isinstance(folder, StorePath))
        super().__init__(folder, replace(output, files=files))

    def move(self, source: SharedMemories, parts: Sequence[Proved], run: TransferRun) -> None:
        """One group of pieces after the other. Collective."""
        own = self._own_pieces(source, parts)
        run.total = sum(piece.size_bytes for _, piece in own)
        groups = [*_groups(own)]
        for number in range(agree.most(len(groups))):
            self._gather(source, parts, groups[number] if number < len(groups) else [], run)

    def _gather(
        self,
        source: SharedMemories,
        parts: Sequence[Proved],
        pieces: Sequence[tuple[FileLayout, FilePiece]],
        run: TransferRun,
    ) -> None:
        memory: dict[tuple[int, Slot], torch.Tensor] = {}
        with agree.together():
            for _, piece in pieces:
                dtype = TORCH_DTYPES[piece.dtype]
                memory[piece.part, piece.slot] = torch.empty(piece.elems, dtype=dtype)
        for one in parts:
            own = {slot: flat for (part, slot), flat in memory.items() if part == one.number}
            with agree.together():  # what fails here alone is known before the next messages
                source.fill([one.only(own)], own.__getitem__, TransferRun(), lambda _: False)
            more = source.lost_values
            every = {**self._lost, **more}
            self._lost = {what: self._lost.get(what, 0) + more.get(what, 0) for what in every}
        with agree.together(), self._as_save_error():
            for file, piece in pieces:
                flat = memory[piece.part, piece.slot].view(torch.uint8)
                record = None if file.owner is None else piece.place
                one = FileRange(self.aside / file.name, record, piece.place, flat)
                if isinstance(self.aside, StorePath):  # it is sent in the order of the file
                    self.writer.later(replace(one, record=piece.place))
                else:
                    self.writer.now([one])
                run.count(piece.size_bytes)

    def _own_pieces(
        self, source: SharedMemories, parts: Sequence[Proved]
    ) -> list[tuple[FileLayout, FilePiece]]:
        """The pieces that this rank writes, in the order of the files' bytes."""
        pieces = [(file, piece) for file in self.output.files for piece in file.pieces]
        holders = [source.holders_of(one) for one in parts]
        free = [piece for file, piece in pieces if file.owner is None]
        sizes = [(one.size_bytes, holders[one.part].get(one.slot, set[int]())) for one in free]
        others = iter(evenly(sizes, self.world))
        takers = [next(others) if file.owner is None else file.owner for file, _ in pieces]
        return [one for one, taker in zip(pieces, takers, strict=True) if taker == self.rank]


def _groups(
    pieces: Sequence[tuple[FileLayout, FilePiece]],
) -> Iterator[list[tuple[FileLayout, FilePiece]]]:
    """Pieces of up to `GROUP_BYTES` together; a larger one by itself."""
    group: list[tuple[FileLayout, FilePiece]] = []
    size = 0
    for one in pieces:
        if group and size + one[1].size_bytes > GROUP_BYTES:
            yield group
            group, size = [], 0
        group.append(one)
        size += one[1].size_bytes
    if group:
        yield group


def _owned(files: Sequence[FileLayout], world: int, are_objects: bool) -> tuple[FileLayout, ...]:
    """The files, of which each that one rank has to write has an owner, so that each rank has about
    as many bytes: an object of a store, and a file whose end follows from the checksums of it."""
    free = [
        file.owner is None and (are_objects or file.around is not nothing_around) for file in files
    ]
    sizes = [file.size_bytes for file, is_free in zip(files, free, strict=True) if is_free]
    takers = iter(evenly([(size, set[int]()) for size in sizes], world))
    return tuple(
        replace(file, owner=next(takers)) if is_free else file
        for file, is_free in zip(files, free, strict=True)
    )


def _memory_of(ranges: Sequence[FileRange]) -> Iterator[memoryview]:
    """The bytes of a piece, of which ranges are in memory."""
    for one in sorted(ranges, key=lambda one: one.at):
        yield from chunks_of(one.memory)


def chunks_of(memory: torch.Tensor) -> Iterator[memoryview]:
    """Flat bytes on any device, as much at once as is written at a time."""
    for low in range(0, len(memory), CHUNK_BYTES):
        yield bytes_of(memory[low : low + CHUNK_BYTES].cpu())
