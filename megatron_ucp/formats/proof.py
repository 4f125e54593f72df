"""The proof by content: each fp32 master, rounded to the dtype of the stored weight, is that
weight, bit for bit. Masters that were read in a wrong order, or saved under wrong names, fail
it."""

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast

from megatron_ucp.core.box import Bounds, Ints
from megatron_ucp.core.manifest import Manifest
from megatron_ucp.core.plan import Slot
from megatron_ucp.formats.byte_files import Where

if TYPE_CHECKING:
    import torch

_WINDOW_ELEMS = 256 * 1024  # masters and weights of a window fit a core's cache together
Runs = Mapping[Bounds, Where]  # the boxes of a parameter, and where each lies in one piece


def is_rounded(masters: "torch.Tensor", weights: "torch.Tensor", near: bool = False) -> bool:
    """Whether masters, rounded to the dtype of the weights, are these, bit for bit. Both are
    one-dimensional and contiguous. `near`: up to two units in the last place, for weights that were
    rounded once more than their masters.

    Bits and not values are compared: zeros have signs, and what is no number is no less damaged.
    Eight bytes at a time, as torch compares single bytes three times slower than it rounds.
    """
    import torch  # inspecting a checkpoint must not need it

    if near and len(masters) == len(weights):
        unit = torch.finfo(weights.dtype)
        most: dict[str, float] = {"rtol": 2 * unit.eps, "atol": 2 * unit.eps * unit.smallest_normal}
        return torch.allclose(masters, weights.to(masters.dtype), **most, equal_nan=True)
    ours, theirs = (one.view(torch.uint8) for one in (masters.to(weights.dtype), weights))
    wide = len(theirs) // 8 * 8 if len(ours) == len(theirs) else 0
    heads = (one[:wide].view(torch.int64) for one in (ours, theirs))
    return torch.equal(*heads) and torch.equal(ours[wide:], theirs[wide:])


def are_masters(masters: Where, weights: Where, near: bool = False) -> bool:
    """Whether the masters at a place, rounded, are as many weights at another one, or `near` them
    (see `is_rounded`). Raises DamagedFileError for files that end early."""
    for first in range(0, masters.elems, _WINDOW_ELEMS):
        count = min(_WINDOW_ELEMS, masters.elems - first)
        ours, theirs = (_tensor(where.run(first, count)) for where in (masters, weights))
        if not is_rounded(ours, theirs, near):
            return False
    return True


def are_masters_of(masters: Runs, weights: Runs, shape: Ints, near: bool = False) -> bool:
    """Whether the masters of a parameter of a `shape`, rounded, are its weights, or `near` them.
    Raises as `are_masters`."""
    if masters.keys() == weights.keys():
        return all(are_masters(masters[box], weights[box], near) for box in masters)
    return is_rounded(_assembled(masters, shape), _assembled(weights, shape), near)


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


def elems_in(box: Bounds) -> int:
    return math.prod(b - a for a, b in zip(*box, strict=True))


def _tensor(where: Where) -> "torch.Tensor":
    import torch

    out = torch.empty(where.elems, dtype=getattr(torch, where.dtype))
    where.read_into(memoryview(cast("Any", out.view(torch.uint8).numpy())))
    return out


def _assembled(runs: Runs, shape: Ints) -> "torch.Tensor":
    """A whole parameter, for the rare one of which masters and weights are cut differently."""
    import torch

    out = torch.empty(shape, dtype=getattr(torch, next(iter(runs.values())).dtype))
    for (start, stop), where in runs.items():
        at = tuple(slice(a, b) for a, b in zip(start, stop, strict=True))
        if where.elems:
            out[at] = _tensor(where).view(out[at].shape)
    return out.reshape(-1)
