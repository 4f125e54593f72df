"""The proof by content: each fp32 master, rounded to the dtype of the stored weight, is that
weight, bit for bit. What is read in a wrong order, or was saved under wrong names, shows itself."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from megatron_ucp.core.box import Ints, whole
from megatron_ucp.core.manifest import Manifest
from megatron_ucp.core.plan import Slot
from megatron_ucp.formats.rounding import Run, dtype_of, is_rounded, read_run, same_run

if TYPE_CHECKING:
    import torch

Bounds = tuple[Ints, Ints]


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


def is_same(masters: Runs, weights: Runs, shape: Ints, near: bool = False) -> bool:
    """Whether the masters of a parameter, rounded, are its weights, or `near` them (see
    `is_rounded`). Raises DamagedFileError for files that end early."""
    if masters.keys() == weights.keys():
        return all(same_run(masters[box], weights[box], _elems(box), near) for box in masters)
    one, other = _assembled(masters, shape), _assembled(weights, shape)
    return is_rounded(one, other, near)


def _elems(box: Bounds) -> int:
    count = 1
    for a, b in zip(*box, strict=True):
        count *= b - a
    return count


def _assembled(runs: Runs, shape: Ints) -> "torch.Tensor":
    """A whole parameter, for the rare one of which masters and weights are cut differently."""
    import torch

    first = next(iter(runs.values()))
    out = torch.empty(whole(shape).shape, dtype=dtype_of(first))
    for (start, stop), run in runs.items():
        at = tuple(slice(a, b) for a, b in zip(start, stop, strict=True))
        elems = _elems((start, stop))
        if elems:
            part = torch.empty(elems, dtype=dtype_of(run))
            read_run(run, 0, part)
            out[at] = part.view(out[at].shape)
    return out.reshape(-1)
