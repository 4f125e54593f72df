"""What DeepSpeed's AutoTP says of how it cut a parameter: an affine map, which lists the blocks of
each rank with their addresses in the whole tensor and in the share.

Source: `ParamAffineMap.to_dict` in DeepSpeed 0.19.8's `checkpoint/affine.py`, version 1. A block
has `shape`, `source` and `dest`: the offset and strides in elements in the whole tensor and in the
share, and a `scale` by which the share was multiplied.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_ucp.core.box import Ints, strides
from megatron_ucp.core.layout import Layout, Replicate, Shard, ShardNC, ShardRuns
from megatron_ucp.core.mesh import DENSE_CUT, Mesh
from megatron_ucp.errors import UcpError, UnsupportedError
from megatron_ucp.formats.deepspeed.paths import at_tp
from megatron_ucp.formats.foreign import at_key, at_key_or, each, no_such, of_kind, sizes

UNSUPPORTED = "autotp_unsupported_parameter_patterns"
_MAP, _VERSION = "affine_map", 1
_FIX = "resume on the same mesh with DeepSpeed's own load"
(_AXIS,) = DENSE_CUT


@dataclass(frozen=True)
class _Block:
    """One block of a rank's share: where it begins in the whole tensor and in the share, with the
    strides there."""

    shape: Ints
    source: tuple[int, Ints]
    dest: tuple[int, Ints]
    scale: Any


@dataclass(frozen=True)
class _RankShare:
    """What a rank has of a parameter."""

    shape: Ints
    blocks: Sequence[_Block]


def entry_of(info: Mapping[str, Any], name: str, file: str | None) -> Mapping[str, Any] | None:
    """The affine map of a parameter in a `universal_checkpoint_info`, None where it has none.
    AutoTP names each parameter in full, in the form of a pattern. Raises DamagedFileError."""
    params, form = _maps(info, file), f"{re.escape(name)}$"
    found = params.get(f"^{form}", params.get(form))
    return None if found is None else of_kind(found, dict, _MAP, file)


def _maps(info: Mapping[str, Any], file: str | None) -> Mapping[str, Any]:
    return at_key_or(at_key_or(info, _MAP, {}, file), "params", {}, file)


def version_of(info: Mapping[str, Any]) -> Any:
    """The version of the maps of an `info` that has one."""
    return info[_MAP].get("version")


def is_uneven(info: Any, file: str) -> bool:
    """Whether ranks have shares of different sizes of some parameter. Raises DamagedFileError for a
    map of another structure."""
    params = _maps(info, file) if isinstance(info, dict) else {}
    entries = (of_kind(entry, dict, _MAP, file) for entry in params.values())
    return any(len({rank.shape for rank in _ranks(entry, file)}) > 1 for entry in entries)


def _ranks(entry: Mapping[str, Any], file: str | None) -> list[_RankShare]:
    """The share of each rank. Raises DamagedFileError."""
    said = at_key(entry, "ranks", dict, file)
    if not all(str(rank).isdecimal() for rank in said):
        raise no_such("ranks: numbers", said, file)
    return [
        _share(of_kind(said[rank], dict, "a rank", file), file)
        for rank in sorted(said, key=lambda rank: int(str(rank)))
    ]


def _share(said: Mapping[str, Any], file: str | None) -> _RankShare:
    blocks = [
        _Block(
            sizes(one.get("shape"), "shape", file),
            _address(one.get("source"), file),
            _address(one.get("dest"), file),
            one.get("scale", 1.0),
        )
        for one in each(said.get("pieces"), dict, "pieces", file)
    ]
    return _RankShare(sizes(said.get("shard_shape"), "shard_shape", file), blocks)


def _address(said: Any, file: str | None) -> tuple[int, Ints]:
    """Offset and strides. Raises DamagedFileError."""
    if not isinstance(said, list | tuple) or len(said) != 2:
        raise no_such("an offset and strides", said, file)
    return sizes([said[0]], "an offset", file)[0], sizes(said[1], "strides", file)


def affine_layout(
    entry: Mapping[str, Any], name: str, file: str | None, version: Any = _VERSION
) -> tuple[Ints, Layout]:
    """Whole shape and layout of a parameter, under the simplest name that puts the same elements
    at the same places.

    Raises UnsupportedError for scaled blocks, for blocks that are no runs of one dim, for a part
    that several ranks hold beside shares of their own (DeepSpeed lets such copies drift apart) and
    for another version of the map, DamagedFileError for a map of another structure.
    """
    if version != _VERSION:
        _refuse("a map of another version", name, file, f"version {_VERSION}", version)
    shape = sizes(entry.get("logical_shape"), "logical_shape", file)
    ranks = _ranks(entry, file)
    dim = _dim_of(ranks, shape, name, file)
    if dim is None:
        return shape, Replicate()
    runs = tuple(tuple(_runs(rank, shape, dim, name, file)) for rank in ranks)
    return shape, _simplest(name, shape, ShardRuns(_AXIS, dim, runs))


def _dim_of(ranks: Sequence[_RankShare], shape: Ints, name: str, file: str | None) -> int | None:
    """The dim that the shares of all ranks cut, None where each has the whole parameter. Raises
    UnsupportedError for scaled blocks and for what is no cut of one dim."""
    scales = [block.scale for rank in ranks for block in rank.blocks if block.scale != 1.0]
    if scales:
        _refuse("scaled values", name, file, "scale 1", scales)
    shares = [rank.shape for rank in ranks]
    same = all(len(held) == len(shape) for held in shares)
    dims = {d for held in shares if same for d, n in enumerate(held) if n != shape[d]}
    if not same or len(dims) > 1:
        _refuse("shares that are cut along several dims", name, file, shape, shares)
    if dims and sum(map(math.prod, shares)) > math.prod(shape):
        # GPT-BigCode's keys and values: their gradients are not reduced, the copies drift
        _refuse("a part that several ranks hold", name, file, shape, shares)
    return next(iter(dims), None)


def _runs(
    rank: _RankShare, shape: Ints, dim: int, name: str, file: str | None
) -> Iterator[tuple[int, int]]:
    """The runs of `dim` that a rank's share is made of, in the order of its memory. Raises
    UnsupportedError for a block that is none."""
    whole, own = strides(shape), strides(rank.shape)
    at = 0
    for block in sorted(rank.blocks, key=lambda block: block.dest[0]):
        if not math.prod(block.shape):
            continue
        width = block.shape[dim] if dim < len(block.shape) else 0
        start, beside = divmod(block.source[0], whole[dim])
        want = tuple(width if d == dim else n for d, n in enumerate(shape))
        fits = block.shape == want and not beside and start + width <= shape[dim]
        addressed = (block.source[1], block.dest[1]) == (whole, own)
        if not fits or not addressed or block.dest[0] != at * own[dim]:
            _refuse("a block that is no run of one dim", name, file, want, block)
        yield start, start + width
        at += width
    if at != rank.shape[dim]:
        _refuse("blocks that are not all of a share", name, file, rank.shape, f"{at} of dim {dim}")


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
