"""A file that is to be written, before any byte of a tensor is known: which piece of which tensor
lies at which byte, and what stands around the pieces.

Every format says its files in this one way, so whoever writes them needs to know no format.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from megatron_ucp.core.plan import Slot
from megatron_ucp.formats.pt.refs import ITEMSIZE

Blob = tuple[int, bytes]  # the byte of the file that it begins at, and its bytes
Crcs = Mapping[int, int]  # the CRC-32 of each piece of a file, by the byte that it begins at


class ByKey(Mapping[str, int]):
    """The CRC-32s of storages by their keys, each asked for when it is needed: whoever writes a
    file from its begin to its end makes them one by one."""

    def __init__(self, places: Mapping[str, int], crcs: Crcs) -> None:
        self._places, self._crcs = places, crcs

    def __getitem__(self, key: str) -> int:
        return self._crcs[self._places[key]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


@dataclass(frozen=True, slots=True)
class FilePiece:
    """All `elems` elements of `slot`, of part number `part` of an output: they lie from byte
    `place` of the file on."""

    part: int
    slot: Slot
    elems: int
    dtype: str
    place: int

    @property
    def size_bytes(self) -> int:
        return self.elems * ITEMSIZE[self.dtype]


def nothing_around(_: Crcs) -> Iterable[Blob]:
    """Of a file without checksums."""
    return ()


@dataclass(frozen=True)
class FileLayout:
    """One file: its name in the folder, and how long it is. `blobs` are all that is known before:
    the byte at which each begins, and what gives it. `around` gives the rest, once the CRC-32 of
    every piece is known: so a file with checksums is written by one rank, its `owner` (None: each
    piece by whoever can best)."""

    name: str
    size_bytes: int
    pieces: Sequence[FilePiece]
    blobs: Sequence[tuple[int, Callable[[], bytes]]] = ()
    around: Callable[[Crcs], Iterable[Blob]] = nothing_around
    owner: int | None = None
