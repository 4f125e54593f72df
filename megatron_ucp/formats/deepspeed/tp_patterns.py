"""What stock DeepSpeed's files say of tensor-parallel cuts: AutoTP's affine maps, and the
regular expressions of `universal_checkpoint_info`."""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron_ucp.core.box import Ints, strides
from megatron_ucp.core.layers import TIED
from megatron_ucp.core.layout import Cut, Cuts, Extent, Layout, Partial, Replicate, Shard, ShardNC
from megatron_ucp.core.manifest import ParamSpec
from megatron_ucp.core.mesh import DENSE_CUT, Mesh
from megatron_ucp.core.rules import LONGEST_NAME
from megatron_ucp.core.values import InertObject
from megatron_ucp.errors import DamagedFileError, LayoutError, RuleError, UcpError, UnsupportedError
from megatron_ucp.formats import expect
from megatron_ucp.formats.deepspeed.files import at_tp
from megatron_ucp.formats.deepspeed.megatron_deepspeed import SPLIT
from megatron_ucp.formats.rule_file import problem_of

# ---- autotp
#
# What DeepSpeed's AutoTP says of how it cut a parameter: an affine map, which lists the blocks of
# each rank with their addresses in the whole tensor and in the share.
#
# Source: `ParamAffineMap.to_dict` in DeepSpeed 0.19.8's `checkpoint/affine.py`, version 1. A
# block has `shape`, `source` and `dest`: the offset and strides in elements in the whole tensor
# and in the share, and a `scale` by which the share was multiplied.


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
    return None if found is None else expect.kind(found, dict, _MAP, file)


def _maps(info: Mapping[str, Any], file: str | None) -> Mapping[str, Any]:
    return expect.key_or(expect.key_or(info, _MAP, {}, file), "params", {}, file)


def version_of(info: Mapping[str, Any]) -> Any:
    """The version of the maps of an `info` that has one."""
    return info[_MAP].get("version")


def is_uneven(info: Any, file: str) -> bool:
    """Whether ranks have shares of different sizes of some parameter. Raises DamagedFileError for a
    map of another structure."""
    params = _maps(info, file) if isinstance(info, dict) else {}
    entries = (expect.kind(entry, dict, _MAP, file) for entry in params.values())
    return any(len({rank.shape for rank in _ranks(entry, file)}) > 1 for entry in entries)


def _ranks(entry: Mapping[str, Any], file: str | None) -> list[_RankShare]:
    """The share of each rank. Raises DamagedFileError."""
    said = expect.key(entry, "ranks", dict, file)
    if not all(str(rank).isdecimal() for rank in said):
        raise expect.other_structure("ranks: numbers", said, file)
    return [
        _share(expect.kind(said[rank], dict, "a rank", file), file)
        for rank in sorted(said, key=lambda rank: int(str(rank)))
    ]


def _share(said: Mapping[str, Any], file: str | None) -> _RankShare:
    blocks = [
        _Block(
            expect.sizes(one.get("shape"), "shape", file),
            _address(one.get("source"), file),
            _address(one.get("dest"), file),
            one.get("scale", 1.0),
        )
        for one in expect.each(said.get("pieces"), dict, "pieces", file)
    ]
    return _RankShare(expect.sizes(said.get("shard_shape"), "shard_shape", file), blocks)


def _address(said: Any, file: str | None) -> tuple[int, Ints]:
    """Offset and strides. Raises DamagedFileError."""
    if not isinstance(said, list | tuple) or len(said) != 2:
        raise expect.other_structure("an offset and strides", said, file)
    return expect.sizes([said[0]], "an offset", file)[0], expect.sizes(said[1], "strides", file)


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
    shape = expect.sizes(entry.get("logical_shape"), "logical_shape", file)
    ranks = _ranks(entry, file)
    dim = _dim_of(ranks, shape, name, file)
    if dim is None:
        return shape, Replicate()
    runs = tuple(tuple(_runs(rank, shape, dim, name, file)) for rank in ranks)
    return shape, _simplest(name, shape, Cut(_AXIS, dim, runs=runs))


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


def _simplest(name: str, shape: Ints, explicit: Cut) -> Layout:
    """Equal chunks, of the dim or of fused sub-tensors, where those are the runs."""
    dim, runs = explicit.dim, explicit.runs
    parts = tuple((stop - start) * len(runs) for start, stop in runs[0])
    fused, whole = ShardNC(_AXIS, dim, parts), Cuts((explicit,))
    for simple in (Shard(_AXIS, dim), *([fused] if len(runs[0]) > 1 else [])):
        if sum(parts) == shape[dim] and _alike(name, shape, simple, whole, len(runs)):
            return simple
    return whole


def _alike(name: str, shape: Ints, one: Layout, explicit: Layout, ranks: int) -> bool:
    mesh = Mesh(tp=ranks)
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


# ---- stock info
#
# Stock DeepSpeed's `universal_checkpoint_info`: how parameters are cut, as regular expressions in
# the first model file.
#
# Semantics of `merge_tp_slices` in DeepSpeed 0.19.8's `ds_to_universal.py`: patterns match at the
# start of a name, and what no pattern matches is cut on dim 0. An affine map, which AutoTP
# writes, goes before patterns: it says more.


REPLICATED, AVERAGED = "tp_replicated_parameter_patterns", "parameter_to_average_patterns"
ROW, VOCABULARY = "parameter_with_row_parallelism_patterns", "vocabulary_parameter_patterns"
_ON_SEVERAL_STAGES = "pipeline_replicated_parameter_patterns"
HALVES, SUB_PARAMS = "parameter_with_2_sub_params_cat_dim_0", "parameter_with_sub_params"
_KINDS: Mapping[Layout, str] = {Replicate(): REPLICATED, Shard("tp", 0): "", Shard("tp", 1): ROW}


_FUSED = re.compile(r"(?:.+\.)?query_key_value\.(?:weight|bias)")


def is_fused(name: str) -> bool:
    """Whether a parameter is a query_key_value."""
    return bool(_FUSED.fullmatch(name))


def contradicts(spec: ParamSpec, order: str) -> bool:
    """Whether a layout has the rows of query_key_value in another order than the arguments say."""
    cut = spec.layout.only_cut
    thirds = cut is not None and cut.is_fused
    known = order and is_fused(spec.name) and cut is not None and not cut.runs
    return bool(known) and thirds != (order == SPLIT)


_OTHERWISE = "give --rules FILE (Python: rules=), or load with a family"


@dataclass(frozen=True)
class StockInfo:
    """What the `universal_checkpoint_info` of a model file says; it names parameters as a pipeline
    does. `order` is that of the rows of query_key_value, of which Megatron-DeepSpeed's patterns say
    nothing: "" where nobody knows it.

    Its methods raise RuleError for a pattern that can't be used, DamagedFileError for what is no
    dict of patterns.
    """

    info: Mapping[str, Any]
    file: str
    order: str = ""

    def declared(self, name: str, local: Ints, tp: int) -> ParamSpec:
        """Whole shape and layout of the parameter of which a rank holds `local`.

        Raises RuleError where two patterns match its name, or where its order is not known,
        UnsupportedError for uneven sub-parameters and for what AutoTP can't describe, LayoutError
        for a dim that the parameter lacks.
        """
        self._refuse_unsupported(name)
        if (entry := entry_of(self.info, name, self.file)) is not None:
            shape, layout = affine_layout(entry, name, self.file, version_of(self.info))
            return self._with_vocabulary(ParamSpec(name, shape, "", layout=layout))
        if is_fused(name) and not self._matches(name):
            return self._fused_spec(name, local, tp)
        layout = self._layout(name, local, tp)
        if any(cut.dim >= len(local) for cut in layout.cuts()):
            raise LayoutError(
                "universal_checkpoint_info cuts a dim that the parameter does not have",
                file=self.file,
                parameter=name,
                expected=layout,
                found=f"shape {local}",
                fix=_OTHERWISE,
            )
        dims = {cut.dim for cut in layout.cuts()}
        shape = tuple(n * tp if dim in dims else n for dim, n in enumerate(local))
        return self._with_vocabulary(ParamSpec(name, shape, "", layout=layout))

    def _with_vocabulary(self, spec: ParamSpec) -> ParamSpec:
        return replace(spec, extent=self.vocabulary_of(spec.name, spec.shape))

    def _fused_spec(self, name: str, local: Ints, tp: int) -> ParamSpec:
        """Of query_key_value. Raises RuleError, LayoutError."""
        if not self.order:
            raise RuleError(
                "the checkpoint does not say in which order the rows of query_key_value are",
                file=self.file,
                parameter=name,
                expected="a pattern, or arguments of Megatron-DeepSpeed that decide it",
                found="neither",
                fix="give rules: --rules megatron_deepspeed_split (Python: rules=) for files of "
                "code since December 2024 (#441), --rules megatron_deepspeed_interleaved for older "
                "ones; with --swiglu the same names and _swiglu behind",
                id="layout-unknown",
            )
        rows = local[0] * tp if local else 0
        if self.order == SPLIT and (not rows or local[0] % 3):
            raise LayoutError(
                "query_key_value has no three equal parts",
                file=self.file,
                parameter=name,
                expected="a multiple of 3 rows",
                found=local,
                fix="give --rules FILE (Python: rules=)",
            )
        layout = ShardNC("tp", 0, (rows // 3,) * 3) if self.order == SPLIT else Shard("tp", 0)
        return ParamSpec(name, (rows, *local[1:]), "", layout=layout)

    def is_matched(self, name: str) -> bool:
        """Whether a map or a pattern says how a parameter is cut; without one it is cut on dim 0 by
        stock's convention alone."""
        return entry_of(self.info, name, self.file) is not None or bool(self._matches(name))

    def is_open(self, name: str) -> bool:
        """Whether nothing says how the rows of query_key_value are cut."""
        return not self.order and is_fused(name) and not self.is_matched(name)

    def unused(self, names: Iterable[str]) -> str | None:
        """The first pattern that says how a parameter is not cut on dim 0, and that matches none of
        these names."""
        named = list(names)
        for kind in (REPLICATED, AVERAGED, ROW):
            for pattern in self._usable(self.info.get(kind), kind):
                if not any(re.match(pattern, name) for name in named):
                    return pattern
        return None

    def vocabulary_of(self, name: str, shape: Ints) -> Extent | None:
        """The rows of a padded vocabulary that are data; None for other parameters."""
        original: Any = self.info.get("original_vocab_size")
        if not any(kind == VOCABULARY for kind, _ in self._matches(name)):
            return None
        is_known = isinstance(original, int) and shape and 0 < original <= shape[0]
        return Extent(original, shape[0]) if is_known else None

    def _refuse_unsupported(self, name: str) -> None:
        """Raises UnsupportedError for a parameter of which AutoTP says that nothing describes
        it."""
        reasons = expect.key_or(self.info, UNSUPPORTED, {}, self.file)
        for pattern in self._usable(list(reasons), UNSUPPORTED):
            if re.match(pattern, name):
                raise UnsupportedError(
                    "DeepSpeed marks a parameter that AutoTP cut as one that can't be put together",
                    file=self.file,
                    parameter=name,
                    expected="a layout that is described",
                    found=str(reasons[pattern])[:200],
                    fix=_FIX,
                )

    def _matches(self, name: str) -> list[tuple[str, Any]]:
        if len(name) > LONGEST_NAME:
            raise RuleError(
                "a name is too long for patterns",
                file=self.file,
                parameter=f"{name[:80]}...",
                expected=f"at most {LONGEST_NAME} characters",
                found=len(name),
                fix="give a family",
            )
        lists: list[tuple[str, Any, Any]] = [
            (kind, None, self.info.get(kind))
            for kind in (REPLICATED, AVERAGED, ROW, VOCABULARY, HALVES)
        ]
        for entry in self._listed(self.info.get(SUB_PARAMS), SUB_PARAMS):
            fields: Any = entry.state if isinstance(entry, InertObject) else entry
            patterns = fields.get("patterns") if isinstance(fields, Mapping) else fields
            lists.append((SUB_PARAMS, fields, patterns))
        return [
            (kind, fields)
            for kind, fields, patterns in lists
            for pattern in self._usable(patterns, kind)
            if re.match(pattern, name)
        ]

    def _listed(self, value: Any, kind: str) -> Sequence[Any]:
        if value is not None and not isinstance(value, list | tuple):
            raise DamagedFileError(
                "universal_checkpoint_info has another structure than DeepSpeed's",
                file=self.file,
                expected=f"{kind}: a list",
                found=type(value).__name__,
            )
        return value or ()

    def _usable(self, patterns: Any, kind: str) -> Sequence[str]:
        """A list of patterns that can be matched in bounded time: whoever wrote the checkpoint
        wrote them."""
        found = self._listed(patterns, kind)
        for pattern in found:
            problem = problem_of(pattern) if isinstance(pattern, str) else "no text"
            if problem:
                raise RuleError(
                    "a pattern of universal_checkpoint_info can't be used",
                    file=self.file,
                    expected=f"a pattern in {kind}",
                    found=f"{problem} ({str(pattern)[:80]})",
                    fix=_OTHERWISE,
                )
        return found

    def _layout(self, name: str, local: Ints, tp: int) -> Layout:
        found = self._matches(name)
        if len(found) > 1:
            raise RuleError(
                "two patterns of universal_checkpoint_info match one parameter",
                file=self.file,
                parameter=name,
                expected="one pattern",
                found=" and ".join(kind for kind, _ in found),
                fix=_OTHERWISE,
            )
        kind, entry = found[0] if found else ("", None)
        if kind == REPLICATED or not local:
            return Replicate()
        if kind == AVERAGED:
            return Partial("tp")
        if kind == ROW:
            return Shard("tp", 1)
        if kind == HALVES:
            return ShardNC("tp", 0, (local[0] * tp // 2,) * 2)
        if kind != SUB_PARAMS:
            return Shard("tp", 0)
        dim, parts = _sub_params(entry, local, self.file)
        if sum(parts) != local[dim] * tp or any(size % tp for size in parts):
            raise UnsupportedError(
                "sub-parameters that are not cut evenly are not supported",
                file=self.file,
                parameter=name,
                expected=f"sizes that add up to {local[dim] * tp}, each a multiple of {tp}",
                found=parts,
                fix=_OTHERWISE,
            )
        return ShardNC("tp", dim, parts)


def patterns_of(specs: Iterable[ParamSpec], named: Callable[[str], str]) -> dict[str, Any]:
    """What stock's converter asks for of a native folder with these parameters, under the names
    that `named` gives them; empty where its patterns can't say how one of them is cut, so that it
    stops and does not cut that one on dim 0."""
    cut = [
        (named(spec.name), spec, kind_of(spec.layout))
        for spec in sorted(specs, key=lambda spec: spec.name)
        if spec.kind != "buffer"
    ]
    if any(kind is None for _, _, kind in cut):
        return {}
    kinds = {(_of_layers(name), kind) for name, _, kind in cut}
    alike = len(kinds) == len({pattern for pattern, _ in kinds})
    out: dict[str, Any] = {"universal_checkpoint_version": 0.4}
    for name, spec, kind in cut:
        pattern = (_of_layers(name) if alike and kind != SUB_PARAMS else re.escape(name)) + "$"
        if kind == SUB_PARAMS and spec.layout.fused is not None:
            _add(out, kind, fused([pattern], sub_shape(spec.layout.fused, spec.shape)))
        elif kind:
            _add(out, kind, pattern)
        if name.startswith(f"{TIED}."):
            _add(out, _ON_SEVERAL_STAGES, pattern)
    return out


def _add(lists: dict[str, Any], kind: str, entry: object) -> None:
    """Adds an entry to one of the lists, once."""
    if entry not in lists.setdefault(kind, []):
        lists[kind].append(entry)


def fused(patterns: list[str], cut: tuple[tuple[Any, ...], int]) -> dict[str, Any]:
    """An entry for fused parameters that are cut like `sub_shape` says."""
    shape, dim = cut
    return {"patterns": patterns, "shape": shape, "partition_dim": dim}


def _of_layers(name: str) -> str:
    """One pattern for a parameter of every layer."""
    return r"\.".join(r"\d+" if part.isdigit() else re.escape(part) for part in name.split("."))


def sub_shape(cut: Cut, shape: Ints) -> tuple[tuple[Any, ...], int]:
    """`shape` and `partition_dim` of a fused parameter in stock's words: the dim that is cut is a
    tuple of its parts."""
    return tuple(cut.parts if dim == cut.dim else n for dim, n in enumerate(shape)), cut.dim


def kind_of(layout: Layout) -> str | None:
    """Which list a parameter stands in; "" for stock's default, dim 0, None where it has no list
    for it."""
    cut = layout.fused
    if cut is not None and cut.axis == "tp" and cut.unit == 1:
        halves = cut.dim == 0 and len(cut.parts) == 2 and len({*cut.parts}) == 1
        return HALVES if halves else SUB_PARAMS
    if layout.mean_over:
        return AVERAGED
    return _KINDS.get(layout)


def _sub_params(entry: Any, local: Ints, file: str) -> tuple[int, Ints]:
    """The dim that is cut of a fused parameter, and the sizes of its parts along it. Raises
    DamagedFileError."""
    said = expect.kind(entry, dict, SUB_PARAMS, file)
    dim, shape = expect.key(said, "partition_dim", int, file), said.get("shape")
    if not isinstance(shape, list | tuple) or not 0 <= dim < min(len(shape), len(local)):
        raise expect.other_structure(f"shape: a tuple with dim {dim}", shape, file)
    return dim, expect.sizes(shape[dim], "shape", file)
