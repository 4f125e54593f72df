"""Where megatron-core and DeepSpeed put each parameter: cuts, stages, names and groups."""

import math
from itertools import pairwise

from megatron_ucp.formats.deepspeed.target import Target
from tests.reshard.paper.model import Model, position

FIRST_DIM = (
    "word_embeddings.weight",
    "output_layer.weight",
    "linear_qkv.weight",
    "linear_qkv.bias",
)
Shapes = dict[str, tuple[int, ...]]
Groups = list[tuple[int, list[str]]]  # number of the group in the model, its names on the stage


def cut_of(name: str, gated: bool) -> tuple[int, int] | None:
    """(dim, parts that are cut each for itself), as megatron-core does."""
    end = ".".join(name.split(".")[-2:])
    if end in ("linear_fc1.weight", "linear_fc1.bias"):
        return 0, 2 if gated else 1
    if end in ("linear_proj.weight", "linear_fc2.weight"):
        return 1, 1
    return (0, 1) if end in FIRST_DIM else None


def local_shapes(model: Model, tp: int) -> Shapes:
    """Each tensor's shape on one of `tp` tensor-parallel ranks."""
    shapes = {}
    for name, shape in model.shapes.items():
        cut = cut_of(name, model.sizes.gated)
        shapes[name] = tuple(n // tp if cut and d == cut[0] else n for d, n in enumerate(shape))
    return shapes


def expected_groups(model: Model, target: Target) -> list[Groups]:
    """Of each stage: the groups that it has, with their names in the order of the optimizer."""
    client = target.groups or [names for _, _, names in model.groups]
    number = {name: g for g, (_, _, names) in enumerate(model.groups) for name in names}
    out, layers = [], model.sizes.layers
    edges = [0]
    for count in target.stages or (layers + 3,):
        edges.append(edges[-1] + int(count))
    for low, high in pairwise(edges):
        here = {n for n in model.shapes if low <= position(n, layers) < high}
        if model.sizes.tied and high == layers + 3:
            here.add("embedding.word_embeddings.weight")
        kept = [[name for name in names if name in here] for names in client]
        out.append([(number[names[0]], names) for names in kept if names])
    return out


def named(model: Model, name: str, pipeline: bool) -> str:
    """What the engine's module calls a parameter."""
    if not pipeline:
        return name
    at = position(name, model.sizes.layers)
    rest = name
    for prefix in ("embedding.", "output_layer.", "decoder.final_layernorm."):
        rest = rest.removeprefix(prefix)
    rest = rest.removeprefix(f"decoder.layers.{at - 1}.")
    return f"tied_modules.embed.{rest}" if model.sizes.tied and at == 0 else f"{at}.{rest}"


# what DeepSpeed's flat buffers hold: (number of the group on the stage, names as they lie in it)
Buffers = list[tuple[int, list[str]]]


def buffers_of(groups: Groups, shape: Shapes, target: Target, whole: bool) -> Buffers:
    """The flat buffers of a model-parallel rank; `whole`: BF16_Optimizer's, one for each group."""
    buffers: Buffers = []
    for at, (_, names) in enumerate(groups):
        if target.mesh.zero == 3:
            buffers += [(at, some) for some in _sub_groups(names, shape, target)]
        elif target.round_robin and not whole:
            parts = target.mesh.dp
            turns = [i for d in range(parts) for i in range(d, len(names), parts)]
            buffers.append((at, [names[i] for i in turns]))
        else:
            buffers.append((at, names))
    return buffers


def _sub_groups(names: list[str], shape: Shapes, target: Target) -> list[list[str]]:
    """ZeRO-3: a new one begins where the last holds enough elements of a rank."""
    most = target.sub_group_size or 0
    some: list[list[str]] = []
    held = most
    for name in names:
        if held >= most:
            some.append([])
            held = 0
        some[-1].append(name)
        held += chunk_elems(shape[name], target)
    return some


def chunk_elems(shape: tuple[int, ...], target: Target) -> int:
    """A rank's part of a parameter at ZeRO-3."""
    return -(-math.prod(shape) // target.mesh.dp)
