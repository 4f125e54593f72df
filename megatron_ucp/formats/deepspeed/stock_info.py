"""Stock DeepSpeed's `universal_checkpoint_info`: how parameters are cut, as regular expressions in
the first model file.

Semantics of `merge_tp_slices` in DeepSpeed 0.19.8's `ds_to_universal.py`: patterns match at the
start of a name, and what no pattern matches is cut on dim 0. An affine map, which AutoTP writes,
goes before patterns: it says more.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from megatron_ucp.core.box import Ints
from megatron_ucp.core.layers import TIED
from megatron_ucp.core.layout import Extent, Layout, Partial, Replicate, Shard, ShardNC
from megatron_ucp.core.manifest import ParamSpec
from megatron_ucp.core.rules import LONGEST_NAME
from megatron_ucp.core.values import Stand
from megatron_ucp.errors import DamagedFileError, LayoutError, RuleError, UnsupportedError
from megatron_ucp.formats.deepspeed.autotp import UNSUPPORTED, affine_layout, entry_of, version_of
from megatron_ucp.formats.foreign import at_key, at_key_or, no_such, of_kind, sizes
from megatron_ucp.formats.patterns import problem_of

REPLICATED, AVERAGED = "tp_replicated_parameter_patterns", "parameter_to_average_patterns"
ROW, VOCABULARY = "parameter_with_row_parallelism_patterns", "vocabulary_parameter_patterns"
_ON_SEVERAL_STAGES = "pipeline_replicated_parameter_patterns"
HALVES, SUB_PARAMS = "parameter_with_2_sub_params_cat_dim_0", "parameter_with_sub_params"
_KINDS: Mapping[Layout, str] = {Replicate(): REPLICATED, Shard("tp", 0): "", Shard("tp", 1): ROW}


_FUSED = re.compile(r"(?:.+\.)?query_key_value\.(?:weight|bias)")
# of the rows of query_key_value, as Megatron-DeepSpeed has them: by head, or in thirds of each rank
INTERLEAVED, SPLIT = "interleaved", "split"
_OF_SPLIT_CODE = "ds_sequence_parallel_fpdt"  # came with the change of the order


def order_of(arguments: Any) -> str:
    """The order of the rows of query_key_value where the arguments of the run decide it, "" where
    they don't. Fewer key-value heads than heads: the code with the split order can't train that."""
    said = arguments.state if isinstance(arguments, Stand) else {}
    heads, groups = said.get("num_attention_heads"), said.get("num_key_value_heads")
    if type(heads) is int and type(groups) is int and 0 < groups < heads:
        return INTERLEAVED
    return SPLIT if _OF_SPLIT_CODE in said else ""


def is_fused(name: str) -> bool:
    """Whether a parameter is a query_key_value."""
    return bool(_FUSED.fullmatch(name))


def is_open(info: Mapping[str, Any], name: str, file: str, order: str) -> bool:
    """Whether nothing says how the rows of query_key_value are cut. Raises as `is_matched`."""
    return not order and is_fused(name) and not is_matched(info, name, file)


def contradicts(spec: ParamSpec, order: str) -> bool:
    """Whether a layout has the rows of query_key_value in another order than the arguments say."""
    thirds = isinstance(spec.layout, ShardNC)
    known = order and is_fused(spec.name) and (thirds or isinstance(spec.layout, Shard))
    return bool(known) and thirds != (order == SPLIT)


def declared(
    info: Mapping[str, Any], name: str, local: Ints, tp: int, file: str, order: str = ""
) -> ParamSpec:
    """Whole shape and layout of the parameter of which a rank holds `local`. `order` is that of
    query_key_value, of which Megatron-DeepSpeed's patterns say nothing.

    Raises RuleError where two patterns match its name or one can't be used, or where its order is
    not known, UnsupportedError for uneven sub-parameters and for what AutoTP can't describe,
    LayoutError for a dim that the parameter lacks, DamagedFileError for what is no dict of
    patterns.
    """
    _refuse_unsupported(name, info, file)
    if (entry := entry_of(info, name, file)) is not None:
        shape, layout = affine_layout(entry, name, file, version_of(info))
        kinds = [kind for kind, _ in _matches(name, info, file)]
        return ParamSpec(name, shape, "", layout=layout, extent=_extent(kinds, shape, info))
    if is_fused(name) and not _matches(name, info, file):
        return _fused_spec(name, local, tp, file, order)
    return _spec(name, local, info, tp, file)


def _fused_spec(name: str, local: Ints, tp: int, file: str, order: str) -> ParamSpec:
    """Of query_key_value. Raises RuleError, LayoutError."""
    if not order:
        raise RuleError(
            "the checkpoint does not say in which order the rows of query_key_value are",
            file=file,
            parameter=name,
            expected="a pattern, or arguments of Megatron-DeepSpeed that decide it",
            found="neither",
            fix="give rules: --rules megatron_deepspeed_split (Python: rules=) for files of code "
            "since December 2024 (#441), --rules megatron_deepspeed_interleaved for older ones; "
            "with --swiglu the same names and _swiglu behind",
            id="layout-unknown",
        )
    rows = local[0] * tp if local else 0
    if order == SPLIT and (not rows or local[0] % 3):
        raise LayoutError(
            "query_key_value has no three equal parts",
            file=file,
            parameter=name,
            expected="a multiple of 3 rows",
            found=local,
            fix="give --rules FILE (Python: rules=)",
        )
    layout = ShardNC("tp", 0, (rows // 3,) * 3) if order == SPLIT else Shard("tp", 0)
    return ParamSpec(name, (rows, *local[1:]), "", layout=layout)


def is_matched(info: Mapping[str, Any], name: str, file: str) -> bool:
    """Whether a map or a pattern says how it is cut; without one a parameter is cut on dim 0 by
    stock's convention alone. Raises RuleError, DamagedFileError."""
    return entry_of(info, name, file) is not None or bool(_matches(name, info, file))


def unused(info: Mapping[str, Any], names: Iterable[str], file: str) -> str | None:
    """The first pattern that says how a parameter is not cut on dim 0, and that matches none of
    these names. Raises as `is_matched`."""
    named = list(names)
    for kind in (REPLICATED, AVERAGED, ROW):
        for pattern in usable(info.get(kind), kind, file):
            if not any(re.match(pattern, name) for name in named):
                return pattern
    return None


def _refuse_unsupported(name: str, info: Mapping[str, Any], file: str) -> None:
    """Raises UnsupportedError for a parameter of which AutoTP says that nothing describes it."""
    reasons = at_key_or(info, UNSUPPORTED, {}, file)
    for pattern in usable(list(reasons), UNSUPPORTED, file):
        if re.match(pattern, name):
            raise UnsupportedError(
                "DeepSpeed marks a parameter that AutoTP cut as one that can't be put together",
                file=file,
                parameter=name,
                expected="a layout that is described",
                found=str(reasons[pattern])[:200],
                fix="resume on the same mesh with DeepSpeed's own load",
            )


def _matches(name: str, info: Mapping[str, Any], file: str) -> list[tuple[str, Any]]:
    if len(name) > LONGEST_NAME:
        raise RuleError(
            "a name is too long for patterns",
            file=file,
            parameter=f"{name[:80]}...",
            expected=f"at most {LONGEST_NAME} characters",
            found=len(name),
            fix="give a family",
        )
    found: list[tuple[str, Any]] = []
    for kind in (REPLICATED, AVERAGED, ROW, VOCABULARY, HALVES):
        found += [
            (kind, pattern)
            for pattern in usable(info.get(kind), kind, file)
            if re.match(pattern, name)
        ]
    for entry in _listed(info.get(SUB_PARAMS), SUB_PARAMS, file):
        fields: Any = entry.state if isinstance(entry, Stand) else entry
        patterns = fields.get("patterns") if isinstance(fields, Mapping) else fields
        found += [
            (SUB_PARAMS, fields)
            for pattern in usable(patterns, SUB_PARAMS, file)
            if re.match(pattern, name)
        ]
    return found


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
        if kind == SUB_PARAMS and isinstance(spec.layout, ShardNC):
            _add(out, kind, fused([pattern], sub_shape(spec.layout, spec.shape)))
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


def sub_shape(layout: ShardNC, shape: Ints) -> tuple[tuple[Any, ...], int]:
    """`shape` and `partition_dim` of a fused parameter in stock's words: the dim that is cut is a
    tuple of its parts."""
    parts = tuple(layout.parts if dim == layout.dim else n for dim, n in enumerate(shape))
    return parts, layout.dim


def kind_of(layout: Layout) -> str | None:
    """Which list a parameter stands in; "" for stock's default, dim 0, None where it has no list
    for it."""
    if isinstance(layout, ShardNC) and layout.axis == "tp" and layout.unit == 1:
        halves = layout.dim == 0 and len(layout.parts) == 2 and len({*layout.parts}) == 1
        return HALVES if halves else SUB_PARAMS
    if isinstance(layout, Partial):
        return AVERAGED
    return _KINDS.get(layout)


def _listed(value: Any, kind: str, file: str) -> Sequence[Any]:
    if value is not None and not isinstance(value, list | tuple):
        raise DamagedFileError(
            "universal_checkpoint_info has another structure than DeepSpeed's",
            file=file,
            expected=f"{kind}: a list",
            found=type(value).__name__,
        )
    return value or ()


def usable(patterns: Any, kind: str, file: str) -> Sequence[str]:
    """A list of patterns that can be matched in bounded time: whoever wrote the checkpoint wrote
    them."""
    for pattern in _listed(patterns, kind, file):
        problem = problem_of(pattern) if isinstance(pattern, str) else "no text"
        if problem:
            raise RuleError(
                "a pattern of universal_checkpoint_info can't be used",
                file=file,
                expected=f"a pattern in {kind}",
                found=f"{problem} ({str(pattern)[:80]})",
                fix="give --rules FILE (Python: rules=), or load with a family",
            )
    return _listed(patterns, kind, file)


def _spec(name: str, local: Ints, info: Mapping[str, Any], tp: int, file: str) -> ParamSpec:
    found = _matches(name, info, file)
    if len(found) > 1:
        raise RuleError(
            "two patterns of universal_checkpoint_info match one parameter",
            file=file,
            parameter=name,
            expected="one pattern",
            found=" and ".join(kind for kind, _ in found),
            fix="give --rules FILE (Python: rules=), or load with a family",
        )
    kind, entry = found[0] if found else ("", None)
    layout = _layout(kind, entry, name, local, info, tp, file)
    if any(cut.dim >= len(local) for cut in layout.cuts()):
        raise LayoutError(
            "universal_checkpoint_info cuts a dim that the parameter does not have",
            file=file,
            parameter=name,
            expected=layout,
            found=f"shape {local}",
            fix="give --rules FILE (Python: rules=), or load with a family",
        )
    shape = tuple(
        n * tp if any(cut.dim == dim for cut in layout.cuts()) else n for dim, n in enumerate(local)
    )
    return ParamSpec(name, shape, "", layout=layout, extent=_extent([kind], shape, info))


def _extent(kinds: Sequence[str], shape: Ints, info: Mapping[str, Any]) -> Extent | None:
    """The rows of a padded vocabulary that are data; None for other parameters."""
    original: Any = info.get("original_vocab_size")
    padded = (
        VOCABULARY in kinds and isinstance(original, int) and shape and 0 < original <= shape[0]
    )
    return Extent(original, shape[0]) if padded else None


def _layout(
    kind: str, entry: Any, name: str, local: Ints, info: Mapping[str, Any], tp: int, file: str
) -> Layout:
    if kind == REPLICATED or not local:
        return Replicate()
    if kind == AVERAGED:
        return Partial("tp")
    if kind == ROW:
        return Shard("tp", 1)
    if kind == HALVES:
        return ShardNC("tp", 0, (local[0] * tp // 2,) * 2)
    if kind == SUB_PARAMS:
        dim, parts = _sub_params(entry, local, file)
        if sum(parts) != local[dim] * tp or any(size % tp for size in parts):
            raise UnsupportedError(
                "sub-parameters that are not cut evenly are not supported",
                file=file,
                parameter=name,
                expected=f"sizes that add up to {local[dim] * tp}, each a multiple of {tp}",
                found=parts,
                fix="give --rules FILE (Python: rules=), or load with a family",
            )
        return ShardNC("tp", dim, parts)
    return Shard("tp", 0)


def _sub_params(entry: Any, local: Ints, file: str) -> tuple[int, Ints]:
    """The dim that is cut of a fused parameter, and the sizes of its parts along it. Raises
    DamagedFileError."""
    said = of_kind(entry, dict, SUB_PARAMS, file)
    dim, shape = at_key(said, "partition_dim", int, file), said.get("shape")
    if not isinstance(shape, list | tuple) or not 0 <= dim < min(len(shape), len(local)):
        raise no_such(f"shape: a tuple with dim {dim}", shape, file)
    return dim, sizes(shape[dim], "shape", file)
