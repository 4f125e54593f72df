"""How DeepSpeed divides the layers of a pipeline among its stages.

`uniform` and `balanced` give what `partition_uniform` and `partition_balanced` in
`runtime/utils.py` of DeepSpeed 0.19.8 do.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import inf

from megatron_ucp.core.layers import Layers
from megatron_ucp.errors import UsageError

METHODS = "uniform, parameters, layers, or the number of layers of each stage"


def divide(
    layers: Layers, method: str | Sequence[int], stages: int, elems: Mapping[str, int]
) -> list[range]:
    """The positions of each stage. `elems` are the elements of each parameter that one rank
    has.

    `uniform`: as many layers each; `parameters`: balanced by elements; `layers`: as many each
    of the kind of layer that is the most frequent; or the counts. Raises UsageError.
    """
    count = len(layers.held)
    if stages > count:
        raise UsageError(
            "there are more pipeline stages than layers",
            expected=f"at most {count}",
            found=stages,
            fix="give fewer stages (pp of --mesh; Python: mesh=)",
        )
    if not isinstance(method, str):
        bounds = [sum(method[:i]) for i in range(len(method) + 1)]
        if len(method) != stages or min(method) < 1 or bounds[-1] != count:
            raise UsageError(
                "the layers of the stages do not add up",
                found=", ".join(map(str, method)),
                expected=f"{stages} numbers of at least 1 with the sum {count}",
                fix="give one number for each stage, with this sum (--stages; Python: "
                "Target(stages=))",
            )
    elif method == "uniform":
        bounds = uniform(count, stages)
    elif method == "parameters":
        bounds = balanced(
            [sum(elems.get(name, 0) for name in names) for names in layers.canonical], stages
        )
    elif method == "layers":
        kinds = [tuple(sorted(held)) for held in layers.held]
        common = max(kinds, key=kinds.count)
        bounds = balanced([int(kind == common) for kind in kinds], stages)
    else:
        raise UsageError(
            "there is no such partition of a pipeline",
            expected=METHODS,
            found=method,
            fix="give one of these (--stages; Python: Target(stages=))",
        )
    return [range(low, high) for low, high in pairwise(bounds)]


def uniform(count: int, parts: int) -> list[int]:
    """Bounds of `parts` runs of nearly equal length; the longer ones come first."""
    short, longer = divmod(count, parts)
    return [i * short + min(i, longer) for i in range(parts + 1)]


def balanced(weights: Sequence[int], parts: int) -> list[int]:
    """Bounds of runs whose largest and smallest sums differ least; of equal ones those with the
    last cuts."""
    count = len(weights)
    if count <= parts:
        return [min(i, count) for i in range(parts + 1)]
    before = [0]
    for weight in weights:
        before.append(before[-1] + weight)
    best: list[list[tuple[float, float, int]]] = [
        [(inf, inf, 0)] * (parts + 1) for _ in range(count + 1)
    ]  # largest, smallest, cut
    best[0][0] = (0, inf, 0)
    for i in range(1, count + 1):
        for j in range(1, min(i, parts) + 1):
            cost = inf
            for k in range(i):
                held = before[i] - before[k]
                largest, smallest = max(best[k][j - 1][0], held), min(best[k][j - 1][1], held)
                if largest - smallest <= cost:
                    cost = largest - smallest
                    best[i][j] = (largest, smallest, k)
    bounds = [count]
    for j in range(parts, 0, -1):
        bounds.append(best[bounds[-1]][j][2])
    return bounds[::-1]
