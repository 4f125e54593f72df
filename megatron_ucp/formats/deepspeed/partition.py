"""How DeepSpeed divides the layers of a pipeline among its stages.

`uniform` and `balanced` give what `partition_uniform` and `partition_balanced` in
`runtime/utils.py` of DeepSpeed 0.19.8 do.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from math import inf
from typing import NamedTuple

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
    before = [0, *accumulate(weights)]
    # best[j][i]: the first i layers in j runs
    best = [[_Runs(0, inf, 0), *[_IMPOSSIBLE] * count]]
    for j in range(1, parts + 1):
        runs = [_IMPOSSIBLE] * (count + 1)
        for i in range(j, count + 1):
            options = [best[-1][k].then(before[i] - before[k], k) for k in range(i)]
            runs[i] = min(options, key=_Runs.order)
        best.append(runs)
    bounds = [count]
    for runs in reversed(best[1:]):
        bounds.append(runs[bounds[-1]].cut)
    return bounds[::-1]


class _Runs(NamedTuple):
    """Sums of the largest and the smallest of some runs, and where the last of them begins."""

    largest: float
    smallest: float
    cut: int

    def then(self, held: int, cut: int) -> "_Runs":
        """With one more run."""
        return _Runs(max(self.largest, held), min(self.smallest, held), cut)

    def order(self) -> tuple[float, int]:
        """The best runs have the least."""
        return self.largest - self.smallest, -self.cut


_IMPOSSIBLE = _Runs(inf, inf, 0)
