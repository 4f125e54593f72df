"""Experts in DeepSpeed's files and in live modules: a rank numbers its own from 0, files number
those of the whole layer."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from megatron_ucp.core.mesh import DENSE_CUT, EXPERT_CUT, EXPERT_RANK, Coords, Mesh, on_stage
from megatron_ucp.errors import ModelMismatchError, UnsupportedError

# One module per expert: megatron-core's SequentialMLP, DeepSpeed's own layer.
_EXPERT = re.compile(
    r"(?P<layer>.*\b(?:local_experts|deepspeed_experts))\.(?P<number>\d{1,6})\.(?P<rest>.+)"
)
# One expert's slice of a parameter that has all experts of a rank, as AutoEP keeps them. A
# ParameterDict can give other parameters such names: `refuse_slices`.
_SLICE = re.compile(r"(?P<layer>(?:.+\.)?experts\.w[123])\[(?P<number>\d{1,6})\]")


# megatron-core's experts in the files, where DeepSpeed looks for names like those of its own
_MARKED = "local_experts.deepspeed_moe.experts.deepspeed_experts."


def name_in_file(name: str) -> str:
    """What an expert file calls a parameter."""
    return name.replace("local_experts.", _MARKED, 1)


def name_in_module(name: str) -> str:
    """What the module calls a parameter of an expert file."""
    return name.replace(_MARKED, "local_experts.", 1)


@dataclass(frozen=True)
class ExpertName:
    """A parameter's name in parts: the layer's list of experts, the number, the name in the
    expert. Of a slice `layer` is the name of the stacked parameter, and nothing is the rest."""

    layer: str
    number: int
    rest: str

    @property
    def is_slice(self) -> bool:
        """Whether it is a slice of a stacked parameter."""
        return not self.rest

    @property
    def mixture(self) -> str:
        """The module that has the experts, with all parameters of each."""
        return self.layer.rpartition(".")[0] if self.is_slice else self.layer

    @property
    def name(self) -> str:
        """The whole name."""
        return self.at(self.number)

    def at(self, number: int) -> str:
        """The name of the same parameter of another expert."""
        if self.is_slice:
            return f"{self.layer}[{number}]"
        return f"{self.layer}.{number}.{self.rest}"


@lru_cache(maxsize=2**14)  # every rank asks for every name several times
def expert_name(name: str) -> ExpertName | None:
    """A name in parts; None for what is no expert's."""
    if found := _EXPERT.fullmatch(name):
        return ExpertName(found["layer"], int(found["number"]), found["rest"])
    found = _SLICE.fullmatch(name)
    return ExpertName(found["layer"], int(found["number"]), "") if found else None


def is_expert(name: str) -> bool:
    """Whether a name is that of an expert's parameter."""
    return expert_name(name) is not None


def is_stacked(name: str) -> bool:
    """Whether a name is that of a slice of a stacked parameter."""
    part = expert_name(name)
    return part is not None and part.is_slice


def refuse_slices(names: Iterable[str], file: str | None = None) -> None:
    """Raises UnsupportedError where a model or its file itself calls a parameter as slices of
    stacked ones are called."""
    for name in names:
        if is_stacked(name):
            raise UnsupportedError(
                "a parameter is called like an expert's slice of AutoEP's stacked parameters, "
                "which is not supported",
                file=file,
                parameter=name,
                expected="a name that is not ...experts.w1[NUMBER]",
                fix="give the module that has it another name than `experts`",
            )


def slices_of(stack: str, count: int) -> list[str]:
    """The names of the slices of a stacked parameter."""
    return [ExpertName(stack, number, "").name for number in range(count)]


def stored_tensors(names: Iterable[str]) -> list[list[str]]:
    """Names by the tensor that keeps them: slices of one stacked parameter together, all else
    alone."""
    out: list[list[str]] = []
    last = None
    for name in names:
        part = expert_name(name)
        stack = part.layer if part is not None and part.is_slice else None
        if stack is not None and stack == last:
            out[-1].append(name)
        else:
            out.append([name])
        last = stack
    return out


def _number(name: str) -> int:
    part = expert_name(name)
    return part.number if part is not None else 0


def in_order(names: Iterable[str]) -> list[str]:
    """Names with all experts of a layer where the first of them is, by their numbers: as a model
    of fewer ranks lists them."""
    blocks: dict[str, list[str]] = {}
    for name in names:
        part = expert_name(name)
        blocks.setdefault(part.layer if part else f" {name}", []).append(name)
    return [name for block in blocks.values() for name in sorted(block, key=_number)]


def counts_of(names: Iterable[str]) -> dict[str, int]:
    """Layer's list of experts -> how many there are. Raises ModelMismatchError where numbers are
    left out."""
    found: dict[str, set[int]] = {}
    for name in names:
        if (part := expert_name(name)) is not None:
            found.setdefault(part.layer, set()).add(part.number)
    for layer, numbers in found.items():
        missing = sorted({*range(max(numbers))} - numbers)
        if missing:
            raise ModelMismatchError(
                "an expert is missing",
                parameter=f"{layer}.{missing[0]}",
                expected=f"experts 0 to {max(numbers)}",
                found=f"{len(numbers)} of them",
            )
    return {layer: len(numbers) for layer, numbers in found.items()}


def with_all_experts(names: Iterable[str], counts: Mapping[str, int]) -> set[str]:
    """The names, and for each expert's those of all experts of its layer: a rank's file lists its
    own ones alone. `counts` are those of the whole layers."""
    out: set[str] = set()
    for name in names:
        part = expert_name(name)
        count = counts.get(part.layer, 0) if part else 0
        out |= {name, *(part.at(number) for number in range(count) if part)}
    return out


def experts_of_rank(rank: int, count: int, ranks: int) -> range:
    """The experts that an expert-parallel rank has: the rank-th of equal runs. Of 8 experts on 4
    ranks rank 1 has 2 and 3."""
    share = count // ranks
    return range(rank * share, (rank + 1) * share)


def rank_of_expert(number: int, count: int, ranks: int) -> int:
    """The expert-parallel rank that has an expert."""
    return number // max(1, count // ranks)


@dataclass(frozen=True)
class LocalExperts:
    """The experts of an expert-parallel rank: `counts` are those that it has of each layer, `index`
    of `ranks` is its place. Rank i has the i-th run of them, as megatron-core's MoELayer and
    DeepSpeed's MoE divide experts."""

    counts: Mapping[str, int]
    ranks: int = 1
    index: int = 0

    @classmethod
    def among(cls, whole: Mapping[str, int], ranks: int, index: int) -> "LocalExperts":
        """Of a rank, where the whole layers have so many."""
        return cls({layer: count // ranks for layer, count in whole.items()}, ranks, index)

    def whole_name(self, name: str) -> str:
        """The name with the number that the expert has in the whole layer."""
        part = expert_name(name)
        if part is None or self.ranks == 1:
            return name
        return part.at(self.index * self.counts[part.layer] + part.number)

    def own_name(self, name: str) -> str | None:
        """The name that this rank's module gives an expert of the whole layer; None where another
        rank has it."""
        part = expert_name(name)
        if part is None or self.ranks == 1:
            return name
        rank, number = divmod(part.number, self.counts[part.layer])
        return part.at(number) if rank == self.index else None


def ranks_of(local: Mapping[str, int], whole: Mapping[str, int], file: str) -> int:
    """Expert-parallel ranks, from the experts that a rank has of each layer and those of the whole
    layers. Raises UnsupportedError where layers are divided among different numbers of ranks."""
    found = {layer: divmod(whole[layer], local[layer]) for layer in local if layer in whole}
    ranks = {count for count, _ in found.values()}
    if len(ranks) > 1 or any(rest for _, rest in found.values()):
        raise UnsupportedError(
            "the layers' experts are not divided among one number of ranks",
            file=file,
            expected="one expert-parallel size for all layers",
            found=", ".join(f"{whole[k]} in {local[k]} each of {k}" for k in list(found)[:3]),
            fix="load it with DeepSpeed on the mesh that wrote it, and save it with one "
            "ep_size for all layers",
        )
    return next(iter(ranks), 1)


@dataclass(frozen=True)
class PartitionRanks:
    """Over how many partitions ZeRO divides a buffer of `dense` parameters and one of an `expert`;
    `apart`: experts are divided over other ranks than the rest."""

    dense: int
    expert: int
    apart: bool

    @classmethod
    def on(cls, mesh: Mesh, partitions: int | None = None) -> "PartitionRanks":
        """On a mesh; `partitions` (as files count them) stands for its dense ones."""
        dense = mesh.partitions if partitions is None else partitions
        expert = mesh.expert_partitions if dense > 1 or mesh.partitions == dense else 1
        return cls(dense, expert, mesh.experts_apart)

    def is_apart(self, name: str) -> bool:
        """Whether a parameter is shared by other ranks than the dense ones are."""
        return self.apart and is_expert(name)

    def partitions(self, name: str) -> int:
        """Partitions of a buffer that holds the parameter."""
        return self.expert if self.is_apart(name) else self.dense

    def axes(self, name: str) -> tuple[str, ...]:
        """The axes that cut a buffer that holds the parameter."""
        return EXPERT_CUT if self.is_apart(name) else DENSE_CUT


def number_and_count(name: str, counts: Mapping[str, int]) -> tuple[int, int] | None:
    """What `ParamSpec.expert` says of a parameter; `counts` are those of the whole layers."""
    part = expert_name(name)
    return (part.number, counts[part.layer]) if part else None


def by_layer(names: Iterable[str]) -> list[dict[int, list[str]]]:
    """For each mixture of experts: number -> the names of the expert's parameters."""
    out: dict[str, dict[int, list[str]]] = {}
    for name in names:
        if (part := expert_name(name)) is not None:
            out.setdefault(part.mixture, {}).setdefault(part.number, []).append(name)
    return list(out.values())


def in_own_file(name: str, apart: bool) -> bool:
    """Whether DeepSpeed keeps a parameter in an expert file: an expert of its own layers always,
    another one where other ranks share it."""
    part = expert_name(name)
    own = part is not None and (part.is_slice or part.layer.endswith(".deepspeed_experts"))
    return part is not None and (apart or own)


def expert_place(stage: int, ep: int, etp: int) -> Coords:
    """The place of an expert-parallel and an expert-tensor-parallel rank on a stage."""
    return (*on_stage(stage), (EXPERT_RANK, ep), (EXPERT_CUT[0], etp))


def file_rank(mesh: Mesh, stage: int, ep: int, etp: int) -> int:
    """The model-parallel rank in the names of the files with a share of an expert: that of the
    first rank that holds it, which writes them."""
    rank = mesh.rank_of(expert_place(stage, ep, etp), 0)
    return stage * mesh.tp + mesh.coord(rank).tp


def check_files(tp: int, ep: int, etp: int, file: str | None = None) -> None:
    """Raises UnsupportedError for a mesh of which DeepSpeed's files could not hold all of a model.

    It names the file of an expert by the tensor-parallel rank that writes it: with more ranks that
    cut an expert, several write one file. And a rank that writes no experts writes no other
    parameters either: with fewer ranks for all experts than cut attention, parts are missing.
    """
    if (ep, etp) != (1, tp) and not etp <= tp <= etp * ep:
        raise UnsupportedError(
            "DeepSpeed would not save all parts of a model whose experts are cut like that",
            file=file,
            expected="expert-tensor-parallel size <= tensor-parallel size <= "
            "expert-tensor-parallel size x expert-parallel size",
            found=f"{etp}, {tp}, {etp} x {ep}",
            fix=f"use an expert-tensor-parallel size of {tp} (Megatron-DeepSpeed: "
            f"--enable-expert-tensor-parallelism), or an expert-parallel size of {tp} or more",
        )


def etp_of(cut: Coords) -> int | None:
    """The expert-tensor-parallel rank of a place; None where it is none of experts alone."""
    return dict(cut).get(EXPERT_CUT[0])
