"""The proof by content: each fp32 master, rounded to the dtype of the stored weight, is that
weight, bit for bit. What is read in a wrong order, or was saved under wrong names, shows itself."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from megatron_ucp.core.box import Ints, whole
from megatron_ucp.core.manifest import Manifest
from megatron_ucp.core.plan import Slot
from megatron_ucp.formats.base import Where
from megatron_ucp.formats.pt.values import ITEMSIZE
from megatron_ucp.formats.rounding import is_rounded

if TYPE_CHECKING:
    import torch

Bounds = tuple[Ints, Ints]
_WINDOW_ELEMS = 256 * 1024  # masters and weights of a window fit a core's cache together


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
    return is_rounded(one, other)


def _elems(box: Bounds) -> int:
    count = 1
    for a, b in zip(*box, strict=True):
        count *= b - a
    return count


def same_run(master: Run, weight: Run, elems: int) -> bool:
    """Whether a run of masters, rounded, is a run of weights. Raises as `is_same`."""
    import torch  # inspecting a checkpoint must not need it

    most = min(elems, _WINDOW_ELEMS)
    masters, weights = (torch.empty(most, dtype=_dtype(run)) for run in (master, weight))
    for low in range(0, elems, _WINDOW_ELEMS):
        count = min(_WINDOW_ELEMS, elems - low)
        _read(master, low, masters[:count])
        _read(weight, low, weights[:count])
        if not is_rounded(masters[:count], weights[:count]):
            return False
    return True


def _read(run: Run, low: int, into: "torch.Tensor") -> None:
    """Fills `into` with the elements of a run from `low` on."""
    import torch

    where = run.where
    first = where.offset_bytes + (run.offset_elems + low) * ITEMSIZE[where.dtype]
    where.file.read_into(
        where.record, first, memoryview(cast("Any", into.view(torch.uint8).numpy()))
    )


def _dtype(run: Run) -> "torch.dtype":
    import torch

    return getattr(torch, run.where.dtype)


def _assembled(runs: Runs, shape: Ints) -> "torch.Tensor":
    """A whole parameter, for the rare one of which masters and weights are cut differently."""
    import torch

    first = next(iter(runs.values()))
    out = torch.empty(whole(shape).shape, dtype=_dtype(first))
    for (start, stop), run in runs.items():
        at = tuple(slice(a, b) for a, b in zip(start, stop, strict=True))
        elems = _elems((start, stop))
        if elems:
            part = torch.empty(elems, dtype=_dtype(run))
            _read(run, 0, part)
            out[at] = part.view(out[at].shape)
    return out.reshape(-1)
