"""The proof by content: each fp32 master, rounded to the dtype of the stored weight, is that
weight, bit for bit. Masters that were read in a wrong order, or saved under wrong names, fail
it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from megatron_ucp.core.box import Ints, whole
from megatron_ucp.core.manifest import Manifest
from megatron_ucp.core.plan import Slot
from megatron_ucp.formats.byte_files import Where
from megatron_ucp.formats.pt.refs import ITEMSIZE

if TYPE_CHECKING:
    import torch


# ---- rounding
#
# The comparison that a proof by content rests on.


_WINDOW_ELEMS = 256 * 1024  # masters and weights of a window fit a core's cache together


@dataclass(frozen=True, slots=True)
class Run:
    """Elements that lie in one piece, from `offset_elems` of a place on."""

    where: Where
    offset_elems: int


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


def same_run(master: Run, weight: Run, elems: int, near: bool = False) -> bool:
    """Whether a run of masters, rounded, is a run of weights, or `near` it (see `is_rounded`).
    Raises DamagedFileError for files that end early."""
    import torch  # inspecting a checkpoint must not need it

    most = min(elems, _WINDOW_ELEMS)
    masters, weights = (torch.empty(most, dtype=dtype_of(run)) for run in (master, weight))
    for low in range(0, elems, _WINDOW_ELEMS):
        count = min(_WINDOW_ELEMS, elems - low)
        read_run(master, low, masters[:count])
        read_run(weight, low, weights[:count])
        if not is_rounded(masters[:count], weights[:count], near):
            return False
    return True


def read_run(run: Run, low: int, into: "torch.Tensor") -> None:
    """Fills `into` with the elements of a run from `low` on."""
    import torch

    where = run.where
    first = where.offset_bytes + (run.offset_elems + low) * ITEMSIZE[where.dtype]
    where.file.read_into(
        where.record, first, memoryview(cast("Any", into.view(torch.uint8).numpy()))
    )


def dtype_of(run: Run) -> "torch.dtype":
    import torch

    return getattr(torch, run.where.dtype)


# ---- proof
#
# The proof by content: each fp32 master, rounded to the dtype of the stored weight, is that
# weight, bit for bit. What is read in a wrong order, or was saved under wrong names, shows
# itself.


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
