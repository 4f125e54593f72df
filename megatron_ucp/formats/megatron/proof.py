"""The proof by content: each fp32 master, rounded to the dtype of the stored weight, is that
weight, bit for bit. What is read in a wrong order, or was saved under wrong names, shows itself."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_ucp.core.box import Ints, whole
from megatron_ucp.core.manifest import Manifest
from megatron_ucp.core.plan import Slot
from megatron_ucp.formats.base import Where
from megatron_ucp.formats.pt.values import ITEMSIZE

if TYPE_CHECKING:
    import torch

Bounds = tuple[Ints, Ints]
_WINDOW_ELEMS = 512 * 1024


@dataclass(frozen=True, slots=True)
class Run:
    """Elements that lie in one piece, from `offset_elems` of a place on."""

    where: Where
    offset_elems: int


Runs = Mapping[Bounds, Run]  # the boxes of a parameter, and where each lies


def boxes_of(manifest: Manifest, name: str, state: str) -> Iterator[tuple[Bounds, Slot, int]]:
    """Every box that a checkpoint without partitions holds of a parameter, with its slot and its
    first element there; of copies the first one."""
    for b, m in manifest.read_from(name):
        buffer, seen = manifest.buffers[b], set[Bounds]()
        for cut in manifest.cuts_of(buffer):
            for piece in manifest.pieces(buffer.members[m], cut):
                box = piece.full.start, piece.full.stop
                if box not in seen:
                    seen.add(box)
                    at = buffer.offset(buffer.members[m], 0, piece.flat_start)
                    yield box, Slot(b, cut, 0, state), at


def is_same(masters: Runs, weights: Runs, shape: Ints) -> bool:
    """Whether the masters of a parameter, rounded, are its weights. Raises DamagedFileError for
    files that end early."""
    if masters.keys() == weights.keys():
        return all(same_run(masters[box], weights[box], _elems(box)) for box in masters)
    one, other = _assembled(masters, shape), _assembled(weights, shape)
    return _same_bits(one, other)


def _elems(box: Bounds) -> int:
    count = 1
    for a, b in zip(*box, strict=True):
        count *= b - a
    return count


def same_run(master: Run, weight: Run, elems: int) -> bool:
    """Whether a run of masters, rounded, is a run of weights. Raises as `is_same`."""
    for low in range(0, elems, _WINDOW_ELEMS):
        count = min(_WINDOW_ELEMS, elems - low)
        if not _same_bits(_read(master, low, count), _read(weight, low, count)):
            return False
    return True


def _same_bits(master: "torch.Tensor", weight: "torch.Tensor") -> bool:
    import torch  # inspecting a checkpoint must not need it

    rounded = master.to(weight.dtype)
    return torch.equal(rounded.view(torch.uint8), weight.view(torch.uint8))


def _read(run: Run, low: int, count: int) -> "torch.Tensor":
    import torch

    where, size = run.where, ITEMSIZE[run.where.dtype]
    data = bytearray(count * size)
    first = where.offset_bytes + (run.offset_elems + low) * size
    where.file.read_into(where.record, first, memoryview(data))
    return torch.frombuffer(data, dtype=getattr(torch, where.dtype))


def _assembled(runs: Runs, shape: Ints) -> "torch.Tensor":
    """A whole parameter, for the rare one of which masters and weights are cut differently."""
    import torch

    first = next(iter(runs.values()))
    out = torch.empty(whole(shape).shape, dtype=getattr(torch, first.where.dtype))
    for (start, stop), run in runs.items():
        at = tuple(slice(a, b) for a, b in zip(start, stop, strict=True))
        elems = _elems((start, stop))
        if elems:
            out[at] = _read(run, 0, elems).view(out[at].shape)
    return out.reshape(-1)
