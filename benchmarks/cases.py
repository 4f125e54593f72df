"""What `benchmarks.load` measures, as data: meshes of its ranks, and pairs of them."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mesh:
    """A ZeRO stage on all ranks; with `tp`, the GPT of megatron-core cut `tp` times, else a model
    in plain torch; with `pp`, in as many stages on DeepSpeed's PipelineEngine, which may be one;
    with `ep`, megatron-core's mixture of experts, divided among so many ranks."""

    zero: int
    tp: int = 0
    pp: int = 0
    ep: int = 0

    def __str__(self) -> str:
        cuts = {"ep": self.ep, "pp": self.pp, "tp": self.tp}
        first = next((f"{axis}{size}" for axis, size in cuts.items() if size), "")
        return f"{first}z{self.zero}"


@dataclass(frozen=True)
class Pair:
    """A checkpoint of `source` goes into an engine of `target`.

    `load` is the largest ratio allowed to stock's own load of `target` files into `target`, `floor`
    that to one reading of as many bytes, `convert` the smallest one of stock's conversion and
    universal load to our load. None: measured, but nothing is claimed. `converts`: stock does that
    too.
    """

    source: Mesh
    target: Mesh
    load: float | None = None
    convert: float | None = None
    floor: float | None = None
    converts: bool = True
    observed: bool = True
    """Bytes and memory are counted, too."""

    def __str__(self) -> str:
        return f"{self.source} to {self.target}"


Z1, Z3 = Mesh(1), Mesh(3)
PP1Z1, PP2Z1 = Mesh(1, 1, 1), Mesh(1, 1, 2)
TP1Z1, TP2Z1, TP1Z3, TP2Z3 = Mesh(1, 1), Mesh(1, 2), Mesh(3, 1), Mesh(3, 2)
EP1Z1, EP2Z1, EP4Z1 = (Mesh(1, 1, ep=ranks) for ranks in (1, 2, 4))
RANKS = {"experts": 4}  # of a suite; two in the others
SUITES = {
    "data": (  # stock can't cross the stages
        Pair(Z3, Z1, load=0.8, converts=False),
        Pair(Z1, Z3, load=1.0, converts=False),
        Pair(Z1, Z1, convert=15.0, observed=False),
        Pair(Z3, Z3, convert=15.0, observed=False),
    ),
    "tensor": (
        Pair(TP2Z1, TP1Z1, load=0.8, convert=15.0),
        Pair(TP1Z1, TP2Z1, load=0.8, convert=15.0),
        Pair(TP2Z3, TP1Z3, load=1.0, convert=15.0),
        Pair(TP1Z3, TP2Z3, load=1.0, convert=15.0),
    ),
    "pipeline": (  # stock can't go between an engine with a pipeline and one without
        Pair(PP2Z1, PP1Z1, load=0.8, convert=15.0),
        Pair(PP1Z1, PP2Z1, load=0.8, convert=15.0),
        Pair(PP2Z1, TP1Z1, load=0.8, converts=False),
        Pair(TP1Z1, PP2Z1, load=0.8, converts=False),
    ),
    "experts": (Pair(EP2Z1, EP4Z1, floor=1.2), Pair(EP2Z1, EP1Z1, floor=1.2)),
}


def meshes(pairs: tuple[Pair, ...]) -> list[Mesh]:
    """Every mesh once, the targets too, whose own files stock loads."""
    return list(dict.fromkeys(mesh for pair in pairs for mesh in (pair.source, pair.target)))


def targets(pairs: tuple[Pair, ...]) -> dict[Mesh, tuple[Pair, ...]]:
    """The pairs of each target."""
    return {
        mesh: tuple(p for p in pairs if p.target == mesh)
        for mesh in dict.fromkeys(p.target for p in pairs)
    }
