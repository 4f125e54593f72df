"""How the layers of a pipeline are divided among its stages.

`uniform` and `balanced` give what DeepSpeed 0.19.8 does: `partition_uniform` and
`partition_balanced` in `runtime/utils.py`.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import inf

from megatron_ucp.errors import UsageError

METHODS = "uniform, parameters, layers, or the number of layers of each stage"


@dataclass(frozen=True)
class Layers:
    """A pipeline's list of layers. `held` has for each position: name in its layer file -> name in
    the pipeline, of which `names` gives the canonical one. Several positions may hold one (a tied
    module); `filed` are those with a layer file (of a tied module that is called through a function
    DeepSpeed writes none)."""

    held: tuple[Mapping[str, str], ...]
    names: Mapping[str, str]
    filed: frozenset[int]

    @cached_property
    def canonical(self) -> tuple[tuple[str, ...], ...]:
        """Canonical names at each position."""
        return tuple(tuple(self.names[pipe] for pipe in held.values()) for held in self.held)

    def with_values(self, names: Collection[str]) -> "Layers":
        """With what lies beside a layer's parameters too: buffers, and parameters that no family
        lists."""
        held, known = [dict(at) for at in self.held], dict(self.names)
        own = [
            (at, rest, self.names[pipe])
            for at, layer in enumerate(self.held)
            for rest, pipe in layer.items()
            if pipe == f"{at}.{rest}"
        ]
        prefixes = {
            name.removesuffix(rest): at
            for at, rest, name in own
            if name.endswith(rest) and name != rest
        }
        for name in set(names) - {*known.values()}:
            found = [prefix for prefix in prefixes if name.startswith(prefix)]
            if found:
                at = prefixes[max(found, key=len)]
                rest = name.removeprefix(max(found, key=len))
                held[at][rest] = f"{at}.{rest}"
                known[f"{at}.{rest}"] = name
        return Layers(tuple(held), known, self.filed)

    def stages(
        self, method: str | Sequence[int], stages: int, elems: Mapping[str, int]
    ) -> list[range]:
        """The positions of each stage. `elems` are the elements of each parameter that one rank
        has.

        `uniform`: as many layers each; `parameters`: balanced by elements; `layers`: as many each
        of the kind of layer that is the most frequent; or the counts. Raises UsageError.
        """
        count = len(self.held)
        if stages > count:
            raise UsageError(
                "there are more pipeline stages than layers",
                expected=f"at most {count}",
                found=stages,
            )
        if not isinstance(method, str):
            bounds = [sum(method[:i]) for i in range(len(method) + 1)]
            if len(method) != stages or min(method) < 1 or bounds[-1] != count:
                raise UsageError(
                    "the layers of the stages do not add up",
                    found=", ".join(map(str, method)),
                    expected=f"{stages} numbers of at least 1 with the sum {count}",
                )
        elif method == "uniform":
            bounds = uniform(count, stages)
        elif method == "parameters":
            bounds = balanced(
                [sum(elems.get(name, 0) for name in names) for names in self.canonical], stages
            )
        elif method == "layers":
            kinds = [tuple(sorted(held)) for held in self.held]
            common = max(kinds, key=kinds.count)
            bounds = balanced([int(kind == common) for kind in kinds], stages)
        else:
            raise UsageError(
                "there is no such partition of a pipeline", expected=METHODS, found=method
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
