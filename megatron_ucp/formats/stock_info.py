"""Stock DeepSpeed's `universal_checkpoint_info`: how parameters are cut, as regular expressions in the first model file.

Semantics of `merge_tp_slices` in DeepSpeed 0.19.8's `ds_to_universal.py`: patterns match at the start of a name, and what
no pattern matches is cut on dim 0.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_ucp.core.box import Ints
from megatron_ucp.core.layout import Extent, Layout, Partial, Replicate, Shard, ShardNC
from megatron_ucp.core.manifest import ParamSpec
from megatron_ucp.errors import RuleError, UnsupportedError
from megatron_ucp.formats.safe_pickle import Stand

REPLICATED, AVERAGED = "tp_replicated_parameter_patterns", "parameter_to_average_patterns"
ROW, VOCABULARY = "parameter_with_row_parallelism_patterns", "vocabulary_parameter_patterns"
HALVES, SUB_PARAMS = "parameter_with_2_sub_params_cat_dim_0", "parameter_with_sub_params"


def declared(info: Mapping[str, Any], local_shapes: Mapping[str, Ints], tp: int, file: str) -> dict[str, ParamSpec]:
    """Whole shapes and layouts of the parameters with these rank-local shapes.

    Raises RuleError where two patterns match a name, UnsupportedError for uneven sub-parameters.
    """
    return {name: _spec(name, shape, info, tp, file) for name, shape in local_shapes.items()}


def by_default(info: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    """Names that no pattern matches: cut on dim 0 by stock's convention alone."""
    return [name for name in names if not _matches(name, info)]


def _matches(name: str, info: Mapping[str, Any]) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for kind in (REPLICATED, AVERAGED, ROW, VOCABULARY, HALVES):
        found += [(kind, pattern) for pattern in info.get(kind) or [] if re.match(pattern, name)]
    for entry in info.get(SUB_PARAMS) or []:
        fields: Any = entry.state if isinstance(entry, Stand) else entry
        found += [(SUB_PARAMS, fields) for pattern in fields["patterns"] if re.match(pattern, name)]
    return found


def _spec(name: str, local: Ints, info: Mapping[str, Any], tp: int, file: str) -> ParamSpec:
    found = _matches(name, info)
    if len(found) > 1:
        raise RuleError("two patterns of universal_checkpoint_info match one parameter", file=file, parameter=name,
                        expected="one pattern", found=" and ".join(kind for kind, _ in found), fix="give a family instead")
    kind, entry = found[0] if found else ("", None)
    layout = _layout(kind, entry, name, local, info, tp, file)
    shape = tuple(n * tp if any(cut.dim == dim for cut in layout.cuts()) else n for dim, n in enumerate(local))
    original: Any = info.get("original_vocab_size")
    padded = kind == VOCABULARY and isinstance(original, int) and 0 < original <= shape[0]
    return ParamSpec(name, shape, "", layout=layout, extent=Extent(original, shape[0]) if padded else None)


def _layout(kind: str, entry: Any, name: str, local: Ints, info: Mapping[str, Any], tp: int, file: str) -> Layout:
    if kind == REPLICATED or not local:
        return Replicate()
    if kind == AVERAGED:
        return Partial("tp")
    if kind == ROW:
        return Shard("tp", 1)
    if kind == HALVES:
        return ShardNC("tp", 0, (local[0] * tp // 2,) * 2)
    if kind == SUB_PARAMS:
        dim = int(entry["partition_dim"])
        sizes = entry["shape"][dim]
        if not isinstance(sizes, list | tuple) or sum(sizes) != local[dim] * tp or any(size % tp for size in sizes):
            raise UnsupportedError("sub-parameters that are not cut evenly are not supported", file=file, parameter=name,
                                   expected=f"sizes that add up to {local[dim] * tp}, each a multiple of {tp}", found=sizes,
                                   fix="give a family")
        return ShardNC("tp", dim, tuple(sizes))
    return Shard("tp", 0)
