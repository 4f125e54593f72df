"""Mesh sizes, a rank's coordinates, and the groups of ranks that follow from the rank order."""

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from difflib import get_close_matches
from functools import cached_property
from typing import Any, cast

from megatron_ucp.errors import UsageError

# Fastest axis first. "tp-cp-dp-pp" is megatron-core's default "tp-cp-ep-dp-pp" for dense parameters
# and equals the (pipe, data, model) topology of DeepSpeed's pipeline; "tp-cp-pp-dp" is
# megatron-core's other order.
ORDERS = {"dp-pp": ("tp", "cp", "sp", "dp", "pp"), "pp-dp": ("tp", "cp", "sp", "pp", "dp")}
# Experts re-divide the same ranks; "edp" counts the copies of an expert.
EXPERT_ORDERS = {"dp-pp": ("etp", "ep", "edp", "pp"), "pp-dp": ("etp", "ep", "pp", "edp")}
STAGE = "pp"
CHUNK_OF_STAGE = "vpp"  # the chunks that a stage has, where stages are interleaved
PLACEMENT = (STAGE, CHUNK_OF_STAGE, "ep")  # axes that decide who holds a parameter
CUTTING = ("tp", "ep", "etp", "cp", "sp")  # axes along which layouts cut
DENSE_CUT = ("tp",)  # the axes that cut what is no expert's
EXPERT_CUT = ("etp",)  # those that cut experts
EXPERT_RANK = "ep"
EXPERTS = frozenset({EXPERT_RANK, "etp", "edp"})

# Far above the largest machines: a typing error is answered at once, and not after hours of
# arithmetic.
MOST_RANKS = 2**17

Coords = tuple[tuple[str, int], ...]  # a place along some axes: (axis, index)
Place = Mapping[str, tuple[int, int]]  # mesh axis -> (size, index)


def index_on(at: Coords, axis: str) -> int:
    """The index of a place on an axis; 0 where it does not name it."""
    return next((index for name, index in at if name == axis), 0)


def stage_of(at: Coords) -> int:
    """The pipeline stage of a place."""
    return index_on(at, STAGE)


def on_stage(stage: int) -> Coords:
    """The place of a pipeline stage."""
    return ((STAGE, stage),)


def expert_rank_of(at: Coords) -> int:
    """The expert-parallel rank of a place."""
    return index_on(at, EXPERT_RANK)


def without_cuts(at: Coords) -> Coords:
    """A place less the axes that cut parameters: on all ranks of these, groups are the same."""
    return tuple((axis, index) for axis, index in at if axis not in CUTTING)


def without_experts(at: Coords) -> Coords:
    """A place as it is for what is no expert's."""
    return tuple((axis, index) for axis, index in at if axis not in EXPERTS)


@dataclass(frozen=True)
class Coord:
    """A rank's place along the dense axes."""

    tp: int = 0
    pp: int = 0
    cp: int = 0
    sp: int = 0
    dp: int = 0

    @property
    def shown(self) -> dict[str, int]:
        """What tables name of a place."""
        return {"tp": self.tp, "pp": self.pp, "dp": self.dp}


@dataclass(frozen=True)
class RankGrid:
    """Ranks that are counted along axes with their sizes, the first axis fastest.

    Example: of the ranks 0 to 5 on {"tp": 2, "dp": 3} rank 3 is at tp 1 and dp 1, and the ranks 1,
    3 and 5 are its group along dp.
    """

    sizes: Mapping[str, int]

    def at(self, rank: int) -> dict[str, int]:
        """The index of a rank on each axis."""
        out: dict[str, int] = {}
        for axis, size in self.sizes.items():
            rank, out[axis] = divmod(rank, size)
        return out

    def rank(self, at: Mapping[str, int]) -> int:
        """The rank with these indices; 0 on an axis that is left out. The inverse of `at`."""
        out = 0
        for axis, size in reversed([*self.sizes.items()]):
            out = out * size + at.get(axis, 0)
        return out

    def group(self, rank: int, along: Sequence[str]) -> tuple[int, ...]:
        """The ranks that lie elsewhere than a rank on some axes alone, in order."""
        first = self.rank({**self.at(rank), **dict.fromkeys(along, 0)})
        steps = [(self.rank({axis: 1}), self.sizes[axis]) for axis in along]
        ways = itertools.product(*(range(0, step * size, step) for step, size in steps))
        return tuple(sorted(first + sum(way) for way in ways))


_UNSAID = -1  # a ZeRO stage that nobody named


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """The parallel layout of a job: how many ranks there are along each axis.

    Args:
        tp: Tensor-parallel ranks.
        pp: Pipeline stages.
        vpp: Chunks of layers that a stage has, where stages are interleaved.
        ep: Expert-parallel ranks: they re-divide the ranks of a stage.
        etp: Ranks that cut an expert; 0 is as many as `tp`.
        cp: Context-parallel ranks.
        sp: Ranks that share a sequence (Ulysses).
        dp: Data-parallel replicas, without `sp` and `cp`.
        zero: The ZeRO stage, 0 to 3. Left out it is 0, and that of the source where a conversion
            or a plan is for the mesh (`says_zero` is false then).
        order: The order of the ranks, see `ORDERS`.

    Raises:
        UsageError: For sizes that no job can have.

    Example:
        >>> import megatron_ucp as ucp
        >>> ucp.Mesh(tp=2, dp=4, zero=1).world
        8
        >>> str(ucp.Mesh.parse("tp=2,dp=4,zero=1"))
        'tp=2,pp=1,dp=4,zero=1'
    """

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    etp: int = 0
    cp: int = 1
    sp: int = 1
    dp: int = 1
    zero: int = _UNSAID
    order: str = "dp-pp"

    def __post_init__(self) -> None:
        # no field: two meshes are equal, whoever named their stage
        self.__dict__["_says_zero"] = self.zero != _UNSAID
        if self.zero == _UNSAID:
            object.__setattr__(self, "zero", 0)
        if self.etp == 0:
            object.__setattr__(self, "etp", self.tp)
        if bad := self._bad():
            raise UsageError(
                "this is no mesh",
                expected=f"sizes of at least 1, zero 0 to 3, order {' or '.join(ORDERS)}",
                found=", ".join(f"{name}={value!r}" for name, value in bad.items())[:200],
                fix="give every axis a whole number of ranks, and a ZeRO stage from 0 to 3",
            )
        if self.world % (self.etp * self.ep * self.pp):
            raise UsageError(
                "the expert axes do not divide the mesh",
                found=str(self),
                expected=f"etp x ep x pp to divide {self.world} ranks",
                fix="change ep or etp; they divide the ranks of a pipeline stage",
            )

    def _bad(self) -> dict[str, Any]:
        """What is no size of an axis, no stage and no order."""
        sizes = {
            f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("zero", "order")
        }
        bad = {name: size for name, size in sizes.items() if type(size) is not int or size < 1}
        if type(self.zero) is not int or self.zero not in range(4):
            bad["zero"] = self.zero
        if not isinstance(cast("object", self.order), str) or self.order not in ORDERS:
            bad["order"] = self.order
        if "tp" in bad and self.etp is self.tp:
            del bad["etp"]  # nobody gave it
        return bad

    @property
    def says_zero(self) -> bool:
        """Whether somebody named the ZeRO stage."""
        return bool(self.__dict__["_says_zero"])

    def __str__(self) -> str:
        usual = {**type(self).__dict__, "etp": self.tp}
        shown = {
            k: v
            for k, v in asdict(self).items()
            if k in ("tp", "pp", "dp", "zero") or v != usual[k]
        }
        return ",".join(f"{name}={value}" for name, value in shown.items())

    @classmethod
    def parse(cls, text: str) -> "Mesh":
        """From `tp=2,pp=1,dp=4,zero=1`; an axis that is left out is 1, `zero` is 0. Raises
        UsageError."""
        known = [f.name for f in fields(cls)]
        values: dict[str, int | str] = {}
        if not isinstance(cast("object", text), str):
            raise _no_mesh(repr(text)[:200], "no text", known, False)
        for item in filter(None, text.replace(" ", "").split(",")):
            name, _, value = item.partition("=")
            is_number = re.fullmatch(r"[0-9]{1,20}", value) is not None
            if name not in known or name in values or not (name == "order" or is_number):
                raise _no_mesh(text, item, known, name in values)
            values[name] = value if name == "order" else int(value)
        mesh = cls(**values)  # type: ignore[arg-type]
        mesh.require_possible()
        return mesh

    def require_possible(self) -> None:
        """Raises UsageError for a mesh that somebody asks for and nobody has."""
        if max(self.world, self.vpp) > MOST_RANKS:
            raise UsageError(
                "the mesh has more ranks than any machine",
                expected=f"at most {MOST_RANKS:,} ranks",
                found=str(self)[:200],
                fix="correct the sizes of the mesh",
            )

    def has_ranks_of(self, other: "Mesh") -> bool:
        """Whether every rank has the place that it has in another mesh; ZeRO does not decide
        that."""
        return replace(self, zero=0, vpp=1) == replace(other, zero=0, vpp=1)

    @property
    def world(self) -> int:
        return self.tp * self.pp * self.cp * self.sp * self.dp

    @property
    def partitions(self) -> int:
        """Ranks that share one dense ZeRO buffer."""
        return self.dp * self.sp * self.cp

    @property
    def expert_partitions(self) -> int:
        """Ranks that share one expert ZeRO buffer."""
        return self.world // (self.etp * self.ep * self.pp)

    def size(self, axis: str) -> int:
        """Ranks along an axis; "edp" counts the copies of an expert."""
        return self.expert_partitions if axis == "edp" else int(getattr(self, axis))

    @cached_property
    def dense(self) -> RankGrid:
        """The ranks as they share what is no expert's."""
        return RankGrid({axis: self.size(axis) for axis in ORDERS[self.order]})

    @cached_property
    def experts(self) -> RankGrid:
        """The same ranks as they share experts; "edp" counts the copies of an expert.

        Source: the second RankGenerator of megatron-core's `initialize_model_parallel` (tp=etp, ep,
        dp=edp, pp, cp=1).
        """
        return RankGrid({axis: self.size(axis) for axis in EXPERT_ORDERS[self.order]})

    def coord(self, rank: int) -> Coord:
        """Coordinates of a global rank."""
        if not 0 <= rank < self.world:
            raise UsageError(
                "no such rank in the mesh",
                expected=f"0 to {self.world - 1}",
                found=rank,
                fix="give a rank of this mesh, or a mesh with more ranks",
            )
        return Coord(**self.dense.at(rank))

    def rank(self, coord: Coord) -> int:
        """The global rank at the coordinates; the inverse of `coord`."""
        return self.dense.rank(vars(coord))

    def index(self, rank: int, axis: str) -> int:
        """Where a rank lies on an axis, dense or expert.

        Raises UsageError for an axis that the mesh does not have.
        """
        if axis in self.dense.sizes:
            return int(getattr(self.coord(rank), axis))
        if axis in self.experts.sizes:
            return self.experts.at(rank)[axis]
        raise UsageError(
            "a rank has no place on this axis",
            expected=", ".join(AXES),
            found=axis,
            fix="give one of these axes",
        )

    def at(self, rank: int, axes: Iterable[str]) -> Coords:
        """The place of a rank along some axes."""
        return tuple((axis, self.index(rank, axis)) for axis in axes)

    def everywhere(self, axes: Sequence[str]) -> list[Coords]:
        """Every place along some axes, the last axis fastest."""
        counts = (range(self.size(axis)) for axis in axes)
        return [tuple(zip(axes, indices, strict=True)) for indices in itertools.product(*counts)]

    def place(self, at: Coords) -> dict[str, tuple[int, int]]:
        """Axis -> (size, index), as layouts ask for it.

        Where the ranks of expert-tensor parallelism are those of tensor parallelism, in turn, an
        index on the one says that on the other: a buffer that holds both kinds of parameters is
        cut along one axis.
        """
        out = {axis: (self.size(axis), index) for axis, index in at}
        (dense,), (expert,) = DENSE_CUT, EXPERT_CUT
        if dense in out and expert not in out and not self.size(dense) % self.size(expert):
            out[expert] = self.size(expert), out[dense][1] % self.size(expert)
        return out

    @property
    def experts_apart(self) -> bool:
        """Whether other ranks share an expert's buffers than share the dense ones."""
        return self.size(EXPERT_RANK) > 1 or self.cut_of_experts != self.cut_of_dense

    @property
    def cut_of_dense(self) -> int:
        """Ranks that cut what is no expert's."""
        return math.prod(self.size(axis) for axis in DENSE_CUT)

    @property
    def cut_of_experts(self) -> int:
        """Ranks that cut an expert."""
        return math.prod(self.size(axis) for axis in EXPERT_CUT)

    def with_experts(self, ep: int, etp: int) -> "Mesh":
        """The same ranks, divided for experts. Raises UsageError where that does not work."""
        return replace(self, ep=ep, etp=etp)

    def expert_parallel_group(self, rank: int) -> list[int]:
        """The ranks among which the experts of a layer are divided whose share `rank` has, in
        order of the experts."""
        return [*self.experts.group(rank, (EXPERT_RANK,))]

    def expert_place(self, rank: int) -> tuple[int, int]:
        """A rank's index among the expert-parallel ranks, and among those that cut an expert."""
        return self.index(rank, EXPERT_RANK), self.index(rank, EXPERT_CUT[0])

    def holding(self, uneven: bool = False) -> list[Coords]:
        """Every place that has parameters of its own, stage by stage: a stage, and on it an
        expert-parallel rank; where shares are `uneven`, each rank that cuts. An axis of one rank is
        not named."""
        axes = (STAGE, *(DENSE_CUT if uneven else ()), EXPERT_RANK)
        return self.everywhere([axis for axis in axes if self.size(axis) > 1])

    def rank_of(self, at: Coords, part: int) -> int:
        """The first rank at a place, or the one with partition `part` of what lies there. A place
        with an expert axis is an expert's.
        """
        named = dict(at)
        if not EXPERTS.isdisjoint(named):
            return self.experts.rank({**named, "edp": part})
        rest, cp = divmod(part, self.cp)
        dp, sp = divmod(rest, self.sp)
        return self.dense.rank({**named, "cp": cp, "sp": sp, "dp": dp})

    def cuts(self, expert: bool = False) -> dict[str, int]:
        """Sizes of the axes that cut an expert, or what is none."""
        return {axis: self.size(axis) for axis in (EXPERT_CUT if expert else DENSE_CUT)}

    def first_shares(self) -> dict[str, tuple[int, int]]:
        """The size of each axis that cuts, and the first index on it: for shapes that are the same
        on every rank."""
        return {axis: (self.size(axis), 0) for axis in CUTTING}

    def partition_ranks(self, rank: int, axes: Iterable[str]) -> tuple[int, ...]:
        """The ranks over which ZeRO partitions a buffer that `axes` cut or place, in order: those
        that hold the same experts for an expert's, else the dense ones."""
        return self.expert_data_group(rank) if EXPERTS & {*axes} else self.partition_group(rank)

    def partition_index(self, rank: int, axes: Iterable[str]) -> int:
        """The place of a rank among the `partition_ranks`, without making their list, which has all
        ranks of a large mesh."""
        return self.index(rank, "edp") if EXPERTS & {*axes} else self.partition_of(rank)

    def replica_ranks(self, rank: int, axes: Iterable[str]) -> tuple[int, ...]:
        """The ranks that hold the same as a rank of a buffer that `axes` cut or place, and no
        partition divides; that rank alone where these axes tell all ranks apart."""
        is_alone = {*axes} & {"dp", "cp", "sp", "edp"}
        return (rank,) if is_alone else self.partition_ranks(rank, axes)

    def partition_of(self, rank: int) -> int:
        """Which one of the dense partitions a rank has: its place in `partition_group`."""
        at = self.coord(rank)
        return at.cp + self.cp * (at.sp + self.sp * at.dp)

    def partition_group(self, rank: int) -> tuple[int, ...]:
        """The ranks over which ZeRO partitions the dense parameters of `rank`, in order."""
        return self.dense.group(rank, ("cp", "sp", "dp"))

    def partition_ranks_at(self, stage: int, tp: int) -> tuple[int, ...]:
        """The ranks of a stage that share the dense buffers of a tensor-parallel rank."""
        return self.partition_group(self.rank(Coord(tp=tp, pp=stage)))

    def expert_data_group(self, rank: int) -> tuple[int, ...]:
        """The ranks that hold the same experts as `rank`."""
        return self.experts.group(rank, ("edp",))


def _no_mesh(text: str, item: str, known: Sequence[str], is_twice: bool) -> UsageError:
    """The error for a text with an item that says no axis and its size."""
    name = item.partition("=")[0]
    near = get_close_matches(name.lower(), known, n=1, cutoff=0.75)
    fix = f"give {item!r} once" if is_twice else "write NAME=SIZE, between commas"
    if name in known and not is_twice:
        fix = f"give {name} a whole number"
    elif near and not is_twice:
        fix = f"did you mean {near[0]}=...?"
    return UsageError(
        f"{item[:80]!r} is no axis of a mesh and its size",
        expected=f"such as tp=2,pp=1,dp=4,zero=1; the axes are {', '.join(known)}",
        found=text[:200],
        fix=fix,
    )


AXES = tuple(f.name for f in fields(Mesh) if f.name not in ("zero", "order"))
