"""Experts that a model keeps in one tensor and its files hold one by one: since transformers 5 a
mixture in memory has `experts.gate_up_proj` [expert, gate above up, hidden] and `experts.down_proj`
[expert, hidden, width], and `save_pretrained` writes a matrix for each expert, as before.

The names are those of `transformers.conversion_mapping` (5.0 to 5.23): of Mixtral and of those
like it, and of Qwen2-MoE, which most other mixtures share.
"""

from collections.abc import Collection, Mapping

from megatron_ucp.core.layout import Chunks
from megatron_ucp.core.manifest import ParamSpec
from megatron_ucp.core.tensor_parts import TensorPart

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
