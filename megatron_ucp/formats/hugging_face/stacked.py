"""Experts that a model keeps in one tensor and its files hold one by one: since transformers 5 a
mixture in memory has `experts.gate_up_proj` [expert, gate above up, hidden] and `experts.down_proj`
[expert, hidden, width], and `save_pretrained` writes a matrix for each expert, as before.

The names are those of `transformers.conversion_mapping` (5.0 to 5.23): of Mixtral and of those
like it, and of Qwen2-MoE, which most other mixtures share.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import replace

from megatron_ucp.core.box import Ints
from megatron_ucp.core.layout import Chunks
from megatron_ucp.core.manifest import ParamSpec
from megatron_ucp.core.tensor_parts import Slice, TensorPart

# end of a parameter's name -> the matrices of an expert that lie one above the other in it, by the
# names that they may have
_STACKED = {
    ".experts.gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")),
    ".experts.down_proj": (("down_proj",), ("w2",)),
}
_MODULE, _MIXTRALS = ".mlp.", ".block_sparse_moe."  # in memory, and in Mixtral's files


def stacks_of(params: Mapping[str, ParamSpec]) -> dict[str, ParamSpec]:
    """The parameters that a folder may hold expert by expert."""
    return {
        name: spec
        for name, spec in params.items()
        if len(spec.shape) == 3 and any(map(name.endswith, _STACKED))
    }


def unstacked(stacks: Mapping[str, ParamSpec], files: Collection[str]) -> dict[str, TensorPart]:
    """What each tensor of a folder holds, for a model with these stacked parameters; nothing where
    the folder holds them stacked, too. Of a stack every tensor is listed, also one that the folder
    lacks."""
    out: dict[str, TensorPart] = {}
    for name, spec in stacks.items():
        if name not in files:
            out |= _one_by_one(name, spec, files)
    if not out:
        return {}
    taken = {share.param for share in out.values()}
    for name in files:
        # the router lies beside the experts
        param = name.replace(_MIXTRALS, _MODULE)
        if name not in out and param not in taken:
            out[name] = TensorPart(param)
    return out


def _one_by_one(name: str, spec: ParamSpec, files: Collection[str]) -> dict[str, TensorPart]:
    """The tensors of one stack, by the names that the folder uses; none where it uses no known
    ones."""
    ending = next(filter(name.endswith, _STACKED))
    before = name.removesuffix(ending) + "."
    experts, rows, columns = spec.shape
    for module in (before, before.replace(_MODULE, _MIXTRALS)):
        for matrices in _STACKED[ending]:
            names = [
                f"{module}experts.{expert}.{matrix}.weight"
                for expert in range(experts)
                for matrix in matrices
            ]
            if any(one in files for one in names):
                height = rows // len(matrices)
                boxes = [
                    (((expert, at, 0), (expert + 1, at + height, columns)),)
                    for expert in range(experts)
                    for at in range(0, height * len(matrices), height)
                ]
                layout = Chunks(tuple(boxes))
                return {
                    one: TensorPart(name, layout, number, stacked=True)
                    for number, one in enumerate(names)
                }
    return {}


_EXPERT = re.compile(r"(.+\.)(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)\.weight")
_PLACES = {
    matrix: (ending, place)
    for ending, both in _STACKED.items()
    for matrices in both
    for place, matrix in enumerate(matrices)
}


def joined(
    shares: Mapping[str, TensorPart], shapes: Mapping[str, Ints]
) -> dict[str, TensorPart] | None:
    """What the tensors of a model in memory hold, of which `shares` says what those of files do;
    `shapes` are those that there are. None where some are of neither kind."""
    out: dict[str, TensorPart] = {}
    upper: dict[str, TensorPart] = {}  # the matrix that lies above another one, by its slice
    for name, part in shares.items():
        found, memory = _EXPERT.fullmatch(name), name.replace(_MIXTRALS, _MODULE)
        if name in shapes or found is None or found[3] not in _PLACES:
            own = name if part.slice_of is None else part.slice_of.tensor
            if own not in shapes and memory not in shapes:
                return None
            out[name if own in shapes else memory] = part
            continue
        ending, place = _PLACES[found[3]]
        stack = f"{found[1]}mlp{ending}"
        if len(shapes.get(stack, ())) != 3:
            return None
        within = Slice(stack, int(found[2]), 0, shapes[stack][0])
        key = f"{stack}[{found[2]}]"
        if ending.endswith("down_proj"):
            out[key] = replace(part, slice_of=within)
        elif not place:
            upper[key] = part
        elif key in upper:
            parts = upper.pop(key), part
            layouts = [one.layout for one in parts]
            if parts[0].param != part.param or not all(isinstance(one, Chunks) for one in layouts):
                return None
            boxes = tuple(b for one in parts for b in _boxes(one))
            out[key] = TensorPart(part.param, Chunks((boxes,)), order=part.order, slice_of=within)
    return None if upper else out


def _boxes(part: TensorPart) -> tuple[tuple[Ints, Ints], ...]:
    return part.layout.held[part.number] if isinstance(part.layout, Chunks) else ()
