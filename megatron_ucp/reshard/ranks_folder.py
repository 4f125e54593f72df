"""A folder as a sink of all ranks: each writes its share of the files, all of them at once.

With a snapshot it takes windows into that while the source lasts, and writes them in the end: then
another thread may do that, and the source may change meanwhile."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

import torch
from isal.isal_zlib import crc32, crc32_combine

from megatron_ucp.formats import durable
from megatron_ucp.formats.durable import OutFile
from megatron_ucp.formats.file_layout import FileLayout, FilePiece
from megatron_ucp.formats.pt.values import ITEMSIZE
from megatron_ucp.reshard import agree
from megatron_ucp.reshard.execute import bytes_of
from megatron_ucp.reshard.folder_sink import (
    FolderOutput,
    OutputFolder,
    begin_sync,
    write_around,
)
from megatron_ucp.reshard.memories import MESSAGE_BYTES, Memories, Window, evenly
from megatron_ucp.reshard.transfer import Proved, Rounding, TransferRun

_BEGIN_SYNC_BYTES = 1 << 20  # of a piece after which the disk begins, while the next one is summed


class Snapshot(Protocol):
    """Memory for what is written later."""

    def room(self, size_bytes: int) -> torch.Tensor | None:
        """So many bytes, of whatever value; None where there is no room for them."""
        ...


@dataclass(frozen=True)
class _Place:
    """Where a window goes: the file, and its piece."""

    file: FileLayout
    piece: FilePiece


@dataclass(frozen=True)
class PieceRun:
    """Flat bytes of a piece, which come to byte `at` of its file."""

    place: _Place
    at: int
    memory: torch.Tensor


@dataclass(frozen=True, order=True)
class _Sum:
    """The CRC-32 of bytes [at, at + size) of a file."""

    at: int
    size: int
    crc: int


class RanksFolderSink(OutputFolder):
    """Rank 0 makes the folder and names it. A file without an owner is written by all, each piece
    by the rank that can best. `sync` brings files to disk; `snapshot` holds what is written
    later."""

    what_to_do = "free space or mend permissions on every rank, then try again"

    def __init__(
        self,
        folder: Path,
        output: FolderOutput,
        sync: durable.Syncs | None = None,
        snapshot: Snapshot | None = None,
    ) -> None:
        super().__init__(folder, output)
        self.rank, self.world = agree.world()
        self.sync = sync or durable.Syncs()
        self._snapshot = snapshot
        self._waiting: list[PieceRun] = []
        self._given: torch.Tensor | None = None  # of the snapshot, for the window that comes next
        self._sums: dict[tuple[str, int], list[_Sum]] = {}  # by file, and place of the piece
        self._files: dict[str, OutFile] = {}

    def __enter__(self) -> Self:
        if self.rank == 0:
            super().__enter__()
            with ExitStack() as undo, self._as_save_error():
                undo.callback(self._held.close)
                for file in self.output.files:  # so that no machine has to learn of a new name
                    with open(self.aside / file.name, "wb") as out:
                        out.truncate(file.size_bytes)
                undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        for out in self._files.values():
            out.close()
        self._files.clear()
        super().__exit__()

    def move(self, source: Memories, parts: Sequence[Proved], run: TransferRun) -> None:
        """Every rank writes what it has itself; what others have comes in rounds."""
        rounding, queue = Rounding(source, parts), [*self._queue(source)]
        run.total = sum(one.elems * ITEMSIZE[one.goal.piece.dtype] for one in queue)

        def put(window: Window, exact: torch.Tensor) -> None:
            place: _Place = window.goal
            memory = rounding.rounded(window.part, window.slot, window.low, exact)
            self._take(place, window.low, memory)
            run.count(memory.nbytes)

        with self._as_save_error():
            source.move(queue, put, self._room)
        self._given = None
        self._lost = rounding.overflows.found

    def finish(self) -> Any:
        """Each rank brings what it wrote to disk: other machines can't do it for it."""
        with self._as_save_error():
            self._write_all()
            with self.sync.right.changing(f"writes what rank {self.rank} has of its own"):
                beside = self.output.each(self.aside, self.rank)
            for path in [*(self.aside / name for name in sorted(self._files)), *beside]:
                self.sync(path)
        if self.rank == 0:
            super().finish()

    def _write_all(self) -> None:
        """What waits, then what stands around the pieces of this rank's files, whose CRC-32s are
        known by then. Raises OSError."""
        for one in self._waiting:
            self.sync.right.says(f"writes {self.aside / one.place.file.name}")
            self._write(one)
        self._waiting.clear()
        for file in self.output.files:
            if self.rank == (file.owner or 0):
                sums = {
                    one.place: self._sums.get((file.name, one.place), ()) for one in file.pieces
                }
                crcs = {place: _joined(found) for place, found in sums.items()}
                with self._writing(file.name) as out:
                    write_around(out, file, crcs)

    def _bring_to_disk(self) -> None:
        held = {self.aside / file.name for file in self.output.files}  # by those who wrote them
        for path in [*sorted({*self.aside.iterdir()} - held), self.aside]:
            self.sync(path)

    def publish(self, told: Sequence[Any]) -> None:
        if self.rank == 0:
            super().publish(told)

    def _queue(self, source: Memories) -> Iterator[Window]:
        """The windows that this rank takes, in the order of the files' bytes."""
        places = [_Place(file, piece) for file in self.output.files for piece in file.pieces]
        takers = self._takers(places, source)
        for place, taker in zip(places, takers, strict=True):
            piece = place.piece
            step = MESSAGE_BYTES // ITEMSIZE[piece.dtype]
            for low in range(0, piece.elems if taker == self.rank else 0, step):
                elems = min(step, piece.elems - low)
                yield Window(piece.part, piece.slot, low, elems, place)

    def _takers(self, places: Sequence[_Place], source: Memories) -> list[int]:
        """The rank that writes each piece."""
        owners = [place.file.owner for place in places]
        free = [place.piece for place in places if place.file.owner is None]
        sizes = [(one.size_bytes, source.holders_of(one.part, one.slot)) for one in free]
        others = iter(evenly(sizes, self.world))
        return [next(others) if owner is None else owner for owner in owners]

    def _room(self, window: Window, size_bytes: int) -> torch.Tensor | None:
        """Where the next window is put together, so that it need not be copied once more."""
        self._given = None if self._snapshot is None else self._snapshot.room(size_bytes)
        return self._given

    def _take(self, place: _Place, low: int, memory: torch.Tensor) -> None:
        """Keeps elements of a piece from `low` on; what finds no room is written."""
        at, flat = place.piece.place + low * memory.element_size(), memory.view(torch.uint8)
        given = self._given
        if given is None or len(given) < len(flat):
            self._write(PieceRun(place, at, flat))
            return
        kept = given[: len(flat)]
        if kept.data_ptr() != flat.data_ptr():  # it was rounded
            kept.copy_(flat)
        self._waiting.append(PieceRun(place, at, kept))

    def _write(self, one: PieceRun) -> None:
        data, file, piece = bytes_of(one.memory), one.place.file, one.place.piece
        with self._writing(file.name) as out:
            out.write(data, one.at)
        if file.owner is not None:
            sums = self._sums.setdefault((file.name, piece.place), [])
            sums.append(_Sum(one.at, len(data), crc32(data)))
        is_whole = one.at + len(data) == piece.place + piece.size_bytes
        if is_whole and self.sync.durable and piece.size_bytes >= _BEGIN_SYNC_BYTES:
            begin_sync(self.aside / file.name, piece.place, piece.size_bytes)

    @contextmanager
    def _writing(self, name: str) -> Iterator[OutFile]:
        """A file, as long as the save has its right."""
        with self.sync.right.changing(f"writes {self.aside / name}"):
            if name not in self._files:
                self._files[name] = OutFile(self.aside / name)
            yield self._files[name]


def _joined(sums: Iterable[_Sum]) -> int:
    """The CRC-32 of a piece from those of its windows, in whatever order they were written."""
    crc = 0
    for one in sorted(sums):
        crc = crc32_combine(crc, one.crc, one.size)
    return crc
