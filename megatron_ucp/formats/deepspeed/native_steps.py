"""What is known of DeepSpeed's own files, step by step: opened, the ranks that wrote them, the
names of their weights, the optimizers that they hold; last, where each slot lies
(`slot_places`)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, TypeVar

from megatron_ucp.core.experts import LocalExperts, Spread, counts_of, etp_of, file_rank
from megatron_ucp.core.manifest import Manifest
from megatron_ucp.core.mesh import Coords, Mesh, stage_of
from megatron_ucp.errors import DamagedFileError
from megatron_ucp.formats.base import Told
from megatron_ucp.formats.deepspeed.declared import LayoutSource
from megatron_ucp.formats.deepspeed.expert_files import ExpertFiles, WithExperts
from megatron_ucp.formats.deepspeed.optimizer_files import Contents, OptimizerFile
from megatron_ucp.formats.deepspeed.paths import (
    TagFiles,
    expert_optimizer_name,
    missing_files,
    model_name,
    tp_of,
)
from megatron_ucp.formats.deepspeed.tag_folder import TagFolder
from megatron_ucp.formats.deepspeed.weights import Weights
from megatron_ucp.formats.foreign import at_key_or

Next = TypeVar("Next")


@dataclass(frozen=True)
class OpenedFiles:
    """The files of a folder; `meta` is what the first model file says, which tells what kind of run
    wrote the others. `told` is what the caller knows."""

    files: TagFolder
    told: Told
    names: TagFiles
    model_name: str
    meta: Mapping[str, Any]
    pipeline: bool

    @property
    def main_file(self) -> str:
        return self.files.main_file

    @property
    def recorded(self) -> Manifest | None:
        return self.files.recorded

    def model_of(self, mp: int, part: int = 0) -> str:
        """Name of the model file of a model-parallel rank (at ZeRO-3 of one partition)."""
        found = self.names.model.get((None, mp)) or self.names.model.get((part, mp))
        if found is None:
            file, expected = model_name(mp, part), f"partition {part}, model-parallel rank {mp}"
            raise missing_files("model file", 1, self.files.folder / file, expected, "no file")
        return found

    def optimizer_tree(self, part: int, mp: int = 0) -> Any:
        """The optimizer state dict of one partition's file."""
        name = self.names.optimizer[part, mp]
        tree = self.files.tree(name).get("optimizer_state_dict")
        if not isinstance(tree, dict):
            raise DamagedFileError(
                "an optimizer file holds no optimizer",
                file=self.files.full_path(name),
                expected="optimizer_state_dict",
                found=type(tree).__name__,
            )
        return tree

    def fragment(self, name: str, part: int, tp: int = 0) -> Any:
        """One partition of a frozen parameter, as ZeRO-3 keeps it."""
        file = self.model_of(tp, part)
        held = self.files.tree(file)
        return at_key_or(held, "frozen_param_fragments", {}, self.files.full_path(file)).get(name)


@dataclass(frozen=True)
class RunRanks(OpenedFiles):
    """The ranks of the run: `uneven` says whether each tensor-parallel one has buffers of its own,
    `places` are those that have parameters of their own."""

    experts: ExpertFiles
    mesh: Mesh
    spread: Spread
    uneven: bool
    places: Sequence[Coords]

    @property
    def first_of_stages(self) -> list[str]:
        """The model file of each stage's first tensor-parallel rank."""
        return [self.model_of(stage * self.mesh.tp) for stage in range(self.mesh.pp)]

    def file_place(self, rank: int) -> tuple[int, int]:
        """(partition, model-parallel rank) in the names of a rank's files."""
        at = self.mesh.coord(rank)
        return self.mesh.partition_of(rank), at.pp * self.mesh.tp + at.tp

    def rank_of_file(self, part: int, mp: int) -> int:
        """The rank whose files have a partition and a model-parallel rank in their names."""
        return self.mesh.sharers_at(*divmod(mp, self.mesh.tp))[part]

    def place_of_rank(self, rank: int) -> int:
        """The number of a rank's place among `places`."""
        return self.places.index(self.mesh.at(rank, [axis for axis, _ in self.places[0]]))

    def optimizer_of(self, mp: int) -> tuple[Any, str]:
        """The optimizer's state dict of the first rank of a model-parallel one, and its file."""
        tree, name = self.optimizer_of_rank(self.rank_of_file(0, mp))
        return tree, self.files.full_path(name)

    def optimizer_of_rank(self, rank: int, of_experts: bool = True) -> tuple[Any, str]:
        """The optimizer's state dict of a rank, and its file; at stage 0 of one like it."""
        part, mp = self.file_place(rank)
        if self.names.optimizer:
            return self.optimizer_tree(part, mp), self.names.optimizer[part, mp]
        name = self.model_of(mp)
        tree = self.files.tree(name).get("optimizer")
        if not self.names.expert_optimizer or (tree is not None and not of_experts):
            return tree, name
        name = self._expert_optimizer(rank)
        return self.files.tree(name).get("optimizer"), name

    def _expert_optimizer(self, rank: int) -> str:
        """The file of stage 0 with the states of a rank's experts. Raises NotFoundError."""
        ep, etp = self.mesh.expert_place(rank)
        place = ep, file_rank(self.mesh, self.mesh.coord(rank).pp, ep, etp)
        if place not in self.names.expert_optimizer:
            file = self.files.folder / expert_optimizer_name(*place)
            expected = f"expert-parallel rank {place[0]}, model-parallel rank {place[1]}"
            raise missing_files("expert optimizer file", 1, file, expected, "no such file")
        return self.names.expert_optimizer[place]


@dataclass(frozen=True)
class NamedWeights(RunRanks):
    """The weights by canonical name; `pipe_names` are those in a pipeline, with the canonical
    ones, `declared` says how parameters are cut."""

    pipe_names: Mapping[str, str]
    weights: Weights
    declared: LayoutSource

    @cached_property
    def expert_counts(self) -> dict[str, int]:
        """Experts of each layer, by the canonical name of its list."""
        return {**self.experts.autoep.experts, **counts_of(self.weights.module())}

    def names_at(self, rank: int, file: str) -> Callable[[str], str]:
        """The canonical name of what the module of a rank calls a parameter."""
        ep, _ = self.mesh.expert_place(rank)
        apart = self.mesh.ep > 1
        local = self.experts.local(self.mesh, ep) if apart else LocalExperts({})
        return lambda name: self.weights.name_of(local.whole_name(name), file)

    def weight_dtype(self, name: str) -> str:
        """The dtype in which a model file keeps a parameter."""
        return self.weights.module()[name].storage.dtype

    def weight(self, name: str, cut: Coords) -> tuple[Any, str]:
        """The weight of a parameter at a place along the axes that cut it, and its file."""
        etp, weights = etp_of(cut), self.weights
        if etp is not None and isinstance(weights, WithExperts):
            return weights.experts(etp).get(name, (None, self.model_name))
        tp = tp_of(cut)
        return weights.module(tp).get(name), weights.file_of(name, tp)


@dataclass(frozen=True)
class Optimizers(NamedWeights):
    """The optimizers: how the files of each place keep theirs, what the first ones hold, and all of
    them as one."""

    readers: Sequence[OptimizerFile]
    stages: Sequence[Contents]
    contents: Contents

    def format_of(self, stage: int) -> OptimizerFile:
        """How the files of a stage keep its optimizer."""
        return self.readers[[stage_of(at) for at in self.places].index(stage)]


def after(step: OpenedFiles, kind: type[Next], **more: Any) -> Next:
    """The next step: what the one before it knew, and more."""
    return kind(**{one.name: getattr(step, one.name) for one in fields(step)}, **more)
