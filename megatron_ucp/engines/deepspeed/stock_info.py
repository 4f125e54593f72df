"""`universal_checkpoint_info` for a family's model, so that stock DeepSpeed's own tools keep
working on our saves."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from megatron_ucp.core.box import flat_index, strides
from megatron_ucp.core.grouping import grouped
from megatron_ucp.core.layers import TIED
from megatron_ucp.core.layout import Layout, Replicate, Shard, ShardNC
from megatron_ucp.core.mesh import DENSE_CUT, Mesh
from megatron_ucp.families.base import Declared, Model
from megatron_ucp.formats.deepspeed.paths import at_tp
from megatron_ucp.formats.deepspeed.stock_info import (
    SUB_PARAMS,
    VOCABULARY,
    fused,
    kind_of,
    sub_shape,
)

# Where an affine map matches, stock's converter leaves out how a parameter is cut, and its load
# then cuts it on dim 0: wrong without an error for row-parallel and gated weights. Their patterns
# alone serve both directions.
_ON_SEVERAL_STAGES = "pipeline_replicated_parameter_patterns"
_CUT_BY_DEFAULT = (Replicate(), Shard(*DENSE_CUT, 0))


def info_of(model: Model, tp: int, pipe: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The dict that DeepSpeed merges into the model files: patterns for its old converters, the
    affine map for the new. `pipe` maps a pipeline's names to canonical ones: stock's tools know
    only the former.

    Empty where no pattern can say how a parameter is cut: without the dict stock's converter stops,
    and with it would cut that one on dim 0."""
    from deepspeed.checkpoint.affine import AFFINE_MAP_FORMAT_VERSION

    table = (
        {name: model.table[canonical] for name, canonical in pipe.items()} if pipe else model.table
    )
    kinds = {name: kind_of(declared.layout) for name, declared in table.items()}
    if None in kinds.values():
        return {}
    rows = model.sizes.vocab  # stock has one size for all of them, and cuts what it merged to it
    vocabulary = [
        name
        for name, declared in table.items()
        if declared.extent is not None and declared.extent.stored == rows and kinds[name] == ""
    ]
    tied = [name for name in table if name.startswith(f"{TIED}.")] if pipe else []
    lists = {_ON_SEVERAL_STAGES: tied, VOCABULARY: vocabulary, **_by_kind(kinds)}
    return {
        "universal_checkpoint_version": 0.4,
        "original_vocab_size": rows,  # padding rows are data here
        **{kind: _patterns(names) for kind, names in lists.items() if names},
        **_sub_params({n: d for n, d in table.items() if kinds[n] == SUB_PARAMS}),
        "affine_map": {
            "version": AFFINE_MAP_FORMAT_VERSION,
            "params": {
                re.escape(n) + "$": _affine(n, d.shape, d.layout, tp)
                for n, d in table.items()
                if n not in vocabulary and d.layout in _CUT_BY_DEFAULT
            },
        },
    }


def _by_kind(kinds: Mapping[str, str | None]) -> dict[str, list[str]]:
    """The names in each of stock's lists of patterns; sub-parameters are no patterns alone."""
    return grouped((kind, name) for name, kind in kinds.items() if kind and kind != SUB_PARAMS)


def _sub_params(table: Mapping[str, Declared]) -> dict[str, Any]:
    """The list of fused parameters that are no two halves, those with the same parts together."""
    alike = grouped(
        (sub_shape(declared.layout, declared.shape), name)
        for name, declared in table.items()
        if isinstance(declared.layout, ShardNC)
    )
    entries = [fused(_patterns(names), cut) for cut, names in alike.items()]
    return {SUB_PARAMS: entries} if entries else {}


def empty_extra_state(_module: Any, state: dict[str, Any], *_: Any) -> None:
    """A state-dict hook: megatron-core's `_extra_state` is None, on which stock's converter fails;
    it takes an empty tensor, and megatron-core ignores what it is given back."""
    import torch

    for name in [
        name for name, value in state.items() if value is None and name.endswith("_extra_state")
    ]:
        state[name] = torch.empty(0)


def _patterns(names: Iterable[str]) -> list[str]:
    """Anchored patterns in which layer numbers are free: stock matches at the start of a name
    only."""
    return sorted({re.sub(r"\\\.\d+\\\.", r"\\.\\d+\\.", re.escape(name)) + "$" for name in names})


def _affine(name: str, shape: tuple[int, ...], layout: Layout, tp: int) -> dict[str, Any]:
    from deepspeed.checkpoint.affine import AffinePiece, ParamAffineMap

    pieces: dict[int, list[Any]] = {}
    shards: dict[int, list[int]] = {}
    everyone = range(tp) if isinstance(layout, Replicate) else None
    for rank in range(tp):
        held = layout.pieces(name, shape, Mesh(tp=tp).place(at_tp(rank)))
        shards[rank] = list(held[0].view)
        pieces[rank] = [
            AffinePiece(
                p.full.shape,
                flat_index(p.full.start, shape),
                strides(shape),
                p.flat_start,
                p.strides,
                everyone or [rank],
            )
            for p in held
        ]
    return ParamAffineMap(logical_shape=shape, shard_shapes=shards, pieces_by_rank=pieces).to_dict()
