"""Which rank writes which elements: every element of every state once, as the manifest divides
them."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from megatron_ucp.core.box import Box, Ints, flat_boxes
from megatron_ucp.core.layout import Piece
from megatron_ucp.core.manifest import BufferPart, Manifest
from megatron_ucp.errors import PlanError


@dataclass(frozen=True, slots=True)
class OwnedBox:
    """The box [start, stop) of a parameter, member number `member` of the buffer at `place`: the
    elements from `local` on of the parameter on a rank there, contiguous and row-major."""

    start: Ints
    stop: Ints
    place: BufferPart
    member: int
    local: int

    @property
    def elems(self) -> int:
        return math.prod(b - a for a, b in zip(self.start, self.stop, strict=True))


def runs_of(manifest: Manifest, param: str) -> list[OwnedBox]:
    """All elements of a parameter, of its first holder, copies along tensor-parallel ranks once.
    Raises PlanError where that is not the whole of it."""
    number, index = manifest.holders[param][0]
    buffer, member = manifest.buffers[number], manifest.member(number, index)
    out: list[OwnedBox] = []
    seen: set[tuple[Box, ...]] = set()
    for cut in manifest.cuts_of(buffer):
        pieces = manifest.pieces(member, cut)
        share = tuple(piece.full for piece in pieces)
        if share in seen:
            continue
        seen.add(share)
        for part in range(buffer.partitions):
            low, high = buffer.owned(member, part)
            if low < high:
                place = number, cut, part
                for piece in _contiguous(pieces, low, high):
                    full = piece.full
                    out.append(OwnedBox(full.start, full.stop, place, index, piece.flat_start))
    shape = manifest.by_name[param].shape
    if sum(one.elems for one in out) != math.prod(shape):
        raise PlanError(
            "the ranks do not hold a parameter once",
            parameter=param,
            expected=f"{math.prod(shape)} elements",
            found=sum(one.elems for one in out),
        )
    return out


def _contiguous(pieces: tuple[Piece, ...], low: int, high: int) -> Iterator[Piece]:
    """The flat range [low, high) of a rank's parameter as pieces."""
    for box in flat_boxes(pieces[0].view, low, high):
        for piece in pieces:
            if (part := piece.clip_local(box)) is not None:
                yield part
