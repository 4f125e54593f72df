"""The comparison that a proof by content rests on."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from megatron_ucp.formats.base import Where
from megatron_ucp.formats.pt.values import ITEMSIZE

if TYPE_CHECKING:
    import torch

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
