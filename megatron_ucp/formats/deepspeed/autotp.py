"""What DeepSpeed's AutoTP says of how it cut a parameter: an affine map, which lists the blocks of
each rank with their addresses in the whole tensor and in the share.

Source: `ParamAffineMap.to_dict` in DeepSpeed 0.19.8's `checkpoint/affine.py`, version 1. A block
has `shape`, `source` and `dest`: the offset and strides in elements in the whole tensor and in the
share, and a `scale` by which the share was multiplied.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megatron_ucp.core.box import Ints, strides
from megatron_ucp.core.layout import Layout, Replicate, Shard, ShardNC, ShardRuns
from megatron_ucp.core.mesh import DENSE_CUT, Mesh
from megatron_ucp.errors import DamagedFileError, UcpError, UnsupportedError
from megatron_ucp.formats.deepspeed.paths import at_tp
from megatron_ucp.formats.foreign import at_key, at_key_or, of_kind, sizes

UNSUPPORTED = "autotp_unsupported_parameter_patterns"
_VERSION = 1
_FIX = "resume on the same mesh with DeepSpeed's own load"
(_AXIS,) = DENSE_CUT


def entry_of(info: Mapping[str, Any], name: str) -> Mapping[str, Any] | None:
    """The affine map of a parameter in a `universal_checkpoint_info`, None where it has none.
    AutoTP names each parameter in full, in the form of a pattern."""
    params = (info.get("affine_map") or {}).get("params") or {}
    forms = (f"^{re.escape(name)}$", f"{re.escape(name)}$")
    return next((params[form] for form in forms if form in params), None)


def is_uneven(info: Any, file: str) -> bool:
    """Whether ranks have shares of different sizes of some parameter. Raises DamagedFileError for a
    map of another structure."""
    said = info if isinstance(info, dict) else {}
    params = at_key_or(at_key_or(said, "affine_map", {}, file), "params", {}, file)
    return any(len({*_shares(entry, file)}) > 1 for entry in params.values())


def _shares(entry: Any, file: str) -> Iterator[Ints]:
    """The shape of each rank's share."""
    ranks = at_key(of_kind(entry, dict, "an affine map", file), "ranks", dict, file)
    for rank in ranks.values():
        found = of_kind(rank, dict, "a rank", file)
        yield sizes(found.get("shard_shape"), "shard_shape", file)


def affine_layout(
    entry: Mapping[str, Any], name: str, file: str | None, version: Any = _VERSION
) -> tuple[Ints, Layout]:
    """Whole shape and layout of a parameter, under the simplest name that puts the same elements
    at the same places.

    Raises UnsupportedError for scaled blocks, for blocks that are no runs of one dim, for a part
    that several ranks hold beside shares of their own (DeepSpeed lets such copies drift apart) and
    for another version of the map, DamagedFileError for a map of another structure.
    """
    try:
        if version != _VERSION:
            _refuse("a map of another version", name, file, f"version {_VERSION}", version)
        shape: Ints = tuple(map(int, entry["logical_shape"]))
        ranks = [entry["ranks"][rank] for rank in sorted(entry["ranks"], key=int)]
        dim = _dim_of(ranks, shape, name, file)
        if dim is None:
            return shape, Replicate()
        runs = tuple(tuple(_runs(rank, shape, dim, name, file)) for rank in ranks)
        return shape, _simplest(name, shape, ShardRuns(_AXIS, dim, runs))
    except (TypeError, KeyError, IndexError, ValueError, AttributeError) as error:
        raise DamagedFileError(
            "the affine map of a parameter has another structure than DeepSpeed's",
            file=file,
            parameter=name,
            found=f"{type(error).__name__}: {error}",
        ) from None


def _dim_of(ranks: Sequence[Any], shape: Ints, name: str, file: str | None) -> int | None:
    """The dim that the shares of all ranks cut, None where each has the whole parameter. Raises
    UnsupportedError for scaled blocks and for what is no cut of one dim."""
    scales = {piece.get("scale", 1.0) for rank in ranks for piece in rank["pieces"]}
    if scales - {1.0}:
        _refuse("scaled values", name, file, "scale 1", sorted(scales))
    shares: list[Ints] = [tuple(map(int, rank["shard_shape"])) for rank in ranks]
    dims = {d for held in shares for d, n in enumerate(held) if n != shape[d]}
    if any(len(held) != len(shape) for held in shares) or len(dims) > 1:
        _refuse("shares that are cut along several dims", name, file, shape, shares)
    if dims and sum(map(math.prod, shares)) > math.prod(shape):
        # GPT-BigCode's keys and values: their gradients are not reduced, the copies drift
        _refuse("a part that several ranks hold", name, file, shape, shares)
    return next(iter(dims), None)


def _runs(
    rank: Mapping[str, Any], shape: Ints, dim: int, name: str, file: str | None
) -> Iterator[tuple[int, int]]:
    """The runs of `dim` that a rank's share is made of, in the order of its memory. Raises
    UnsupportedError for a block that is none."""
    held: Ints = tuple(map(int, rank["shard_shape"]))
    whole, own = strides(shape), strides(held)
    at = 0
    for piece in sorted(rank["pieces"], key=lambda piece: piece["dest"][0]):
        block = tuple(map(int, piece["shape"]))
        width = block[dim]
        start, beside = divmod(int(piece["source"][0]), whole[dim])
        want = tuple(width if d == dim else n for d, n in enumerate(shape))
        fits = block == want and not beside and start + width <= shape[dim]
        addressed = (tuple(piece["source"][1]), tuple(piece["dest"][1])) == (whole, own)
        if not math.prod(block):
            continue
        if not fits or not addressed or piece["dest"][0] != at * own[dim]:
            _refuse("a block that is no run of one dim", name, file, want, dict(piece))
        yield start, start + width
        at += width
    if at != held[dim]:
        _refuse("blocks that are not all of a share", name, file, held, f"{at} of dim {dim}")


def _simplest(name: str, shape: Ints, explicit: ShardRuns) -> Layout:
    """Equal chunks, of the dim or of fused sub-tensors, where those are the runs."""
    dim, count = explicit.dim, len(explicit.held[0])
    widths = [stop - start for start, stop in explicit.held[0]]
    parts = tuple(width * len(explicit.held) for width in widths)
    fused = ShardNC(_AXIS, dim, parts)
    for simple in (Shard(_AXIS, dim), *([fused] if count > 1 else [])):
        if sum(parts) == shape[dim] and _alike(name, shape, simple, explicit):
            return simple
    return explicit


def _alike(name: str, shape: Ints, one: Layout, explicit: ShardRuns) -> bool:
    mesh = Mesh(tp=len(explicit.held))
    for rank in range(mesh.tp):
        place = mesh.place(at_tp(rank))
        try:
            same = one.pieces(name, shape, place) == explicit.pieces(name, shape, place)
        except UcpError:  # a size that does not divide
            return False
        if not same:
            return False
    return True


def _refuse(what: str, name: str, file: str | None, expected: Any, found: Any) -> None:
    raise UnsupportedError(
        f"a parameter that AutoTP cut has {what}, which this version does not take",
        file=file,
        parameter=name,
        expected=expected,
        found=str(found)[:200],
        fix=_FIX,
    )
