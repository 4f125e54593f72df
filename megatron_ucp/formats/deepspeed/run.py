"""The run that wrote DeepSpeed's own files, as the files show it: its ranks, the names of its
weights, its optimizers, and in which order these flatten parameters."""

import re
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from megatron_ucp.core.box import Ints
from megatron_ucp.core.experts import (
    LocalExperts,
    PartitionRanks,
    counts_of,
    etp_of,
    expert_name,
    file_rank,
    is_expert,
    name_in_module,
    ranks_of,
)
from megatron_ucp.core.grouping import grouped, kept
from megatron_ucp.core.join_ranks import Stage, join
from megatron_ucp.core.manifest import FILE_NAME, RENAMED, Manifest, Order, Tie
from megatron_ucp.core.mesh import Coords, Mesh, stage_of
from megatron_ucp.core.names import Keeper
from megatron_ucp.core.plan import Slot
from megatron_ucp.errors import DamagedFileError, ForeignFileError, NotFoundError, UnsupportedError
from megatron_ucp.formats import expect
from megatron_ucp.formats.checkpoint import CallerModel
from megatron_ucp.formats.deepspeed.autoep import AutoEP, autoep_of
from megatron_ucp.formats.deepspeed.files import (
    PATTERNS,
    TagFolder,
    expert_file_name,
    expert_optimizer_name,
    missing_files,
    model_name,
    tp_of,
    without_sequence_ranks,
)
from megatron_ucp.formats.deepspeed.layout_sources import LayoutSource, pipe_keys, renamed
from megatron_ucp.formats.deepspeed.lost_states import refuse_mics, saved_no_bf16_optimizer
from megatron_ucp.formats.deepspeed.megatron_deepspeed import (
    are_of_program,
    arguments_of,
    order_of,
    rules_for,
)
from megatron_ucp.formats.deepspeed.optimizers import (
    Contents,
    OptimizerFile,
    OptimizerTree,
    PlainFile,
    check_momentum,
    reader_for,
)
from megatron_ucp.formats.deepspeed.tp_patterns import StockInfo, is_uneven
from megatron_ucp.formats.deepspeed.weights import (
    LayerFiles,
    PipeNames,
    StageModels,
    Weights,
    WholeModel,
    shapes_by_group,
)
from megatron_ucp.formats.folder import Folder
from megatron_ucp.formats.loss_scale import LossScale
from megatron_ucp.formats.megatron.run_state import ARGUMENTS_KEY
from megatron_ucp.formats.param_groups import number
from megatron_ucp.formats.pt.refs import TensorRef
from megatron_ucp.formats.wrapped_model import other_prefix

# ---- expert files
#
# Expert files of a tag: one per expert of each mixture of a stage, at each model-parallel rank.


_GROUP_OF_EXPERTS = re.compile(r"ep_size_(?P<ranks>[1-9]\d{0,5})")  # a group's name
Shares = dict[str, tuple[TensorRef, str]]  # name in the module -> tensor, name of its file


class ExpertFiles:
    """The experts of a tag folder under the names that the files have for them, in which an expert
    has the number of the whole layer."""

    def __init__(self, folder: TagFolder) -> None:
        self._folder = folder

    @cached_property
    def autoep(self) -> AutoEP:
        """What AutoEP stacked. Raises as `autoep_of`."""
        file = min(self._folder.names.model.values())
        return autoep_of(self._folder.tree(file), self._folder.full_path(file))

    @kept
    def of(self, mp: int) -> Shares:
        """The experts in the files of a model-parallel rank. Raises ForeignFileError for one that
        two files hold and that is not the same in both, DamagedFileError for what is no expert."""
        out: Shares = {}
        for (_, expert, rank), file in sorted(self._folder.names.experts.items()):
            for name, ref in self._read(file, expert).items() if rank == mp else ():
                if name in out:
                    self._same(name, out[name], (ref, file))
                out[name] = ref, file
        return out

    def _read(self, file: str, number: int) -> dict[str, TensorRef]:
        out: dict[str, TensorRef] = {}
        name_of = self.autoep.name_in_module if self.autoep else name_in_module
        for key, ref in self._folder.tree(file).items():
            name = name_of(key) if isinstance(key, str) else ""
            part = expert_name(name)
            if part is None or not isinstance(ref, TensorRef) or part.number != number:
                raise DamagedFileError(
                    "an expert file holds something else",
                    file=self._folder.full_path(file),
                    expected=f"tensors of expert {number}",
                    found=str(key)[:120],
                )
            out[name] = ref
        return out

    def _same(self, name: str, one: tuple[TensorRef, str], two: tuple[TensorRef, str]) -> None:
        sums = [
            (ref.shape, ref.storage.dtype, self._folder.file(file).record(ref.storage).crc32)
            for ref, file in (one, two)
        ]
        if sums[0] != sums[1]:
            raise ForeignFileError(
                "an expert is held by two files, which differ",
                file=self._folder.full_path(two[1]),
                parameter=name,
                expected=f"what {one[1]} holds",
                found="other bytes",
                fix="put the files of one save, and no others, into the folder",
            )

    @cached_property
    def counts(self) -> dict[str, int]:
        """Experts of each layer, by the name of its list. Raises NotFoundError for a lost file,
        ForeignFileError for one of another run."""
        self._require_ranks_of_run()
        self._complete()
        found = counts_of(
            name for mp in {mp for _, _, mp in self._folder.names.experts} for name in self.of(mp)
        )
        return {**self.autoep.experts, **found}

    def _complete(self) -> None:
        """Raises NotFoundError where the files of a mixture are not as many as the model file says,
        or leave out a number. Where experts lie in no files at all the caller knows why."""
        found: dict[int, set[int]] = {}
        for layer, expert, _ in self._folder.names.experts:
            found.setdefault(layer, set()).add(expert)
        told = self._told() if found else []
        for layer in sorted({*found, *range(len(told))}):
            known = layer < len(told) and type(told[layer]) is int
            numbers = found.get(layer, set())
            wanted = told[layer] if known else max(numbers, default=-1) + 1
            missing = sorted({*range(wanted)} - numbers)
            if missing:
                raise missing_files(
                    "expert file",
                    len(missing),
                    self._folder.folder / expert_file_name(layer, missing[0], 0),
                    f"experts 0 to {wanted - 1} of mixture {layer}",
                    f"{len(numbers)} of them",
                )

    def _require_ranks_of_run(self) -> None:
        """Raises ForeignFileError for the file of a rank that the run did not have."""
        names = self._folder.names
        most = max(mp for _, mp in names.model)
        for (_, _, mp), file in names.experts.items():
            if mp > most:
                raise ForeignFileError(
                    "there is an expert file of more model-parallel ranks than the run had",
                    file=self._folder.full_path(file),
                    expected=f"model-parallel ranks 0 to {most}",
                    found=f"rank {mp}",
                    fix="put the files of one save, and no others, into the folder",
                )

    def _told(self) -> list[Any]:
        """Experts of each mixture, as the model file with the most of them says."""
        said = (
            self._folder.tree(file).get("num_experts") for file in self._folder.names.model.values()
        )
        return max((one for one in said if isinstance(one, list)), key=len, default=[])

    def ranks(self, meta: Mapping[str, Any], file: str) -> int:
        """Expert-parallel ranks of the run that wrote the files, as they show it: by the optimizer
        files of stage 0, or by the experts that the model file lists for one rank."""
        if self.autoep:
            return self.autoep.ranks
        if self._folder.names.expert_optimizer or meta.get("param_shapes") is None:
            there = 1 + max((ep for ep, _ in self._folder.names.expert_optimizer), default=0)
            return max(self._ranks_by_groups(), there)
        shapes = shapes_by_group(meta, file) or []
        return ranks_of(counts_of(name for named in shapes for name in named), self.counts, file)

    def _ranks_by_groups(self) -> int:
        """Expert-parallel ranks as DeepSpeed names the optimizer's groups of experts ("ep_size_2");
        1 where no file of stage 0 says it."""
        names = self._folder.names
        for file in (*sorted(names.model.values()), *sorted(names.expert_optimizer.values())):
            groups = expect.section(self._folder.tree(file), "optimizer").get("param_groups")
            listed: list[Any] = groups if isinstance(groups, list) else []
            named = [group.get("name") for group in listed if isinstance(group, dict)]
            sizes = [_GROUP_OF_EXPERTS.match(name) for name in named if isinstance(name, str)]
            if found := [int(size["ranks"]) for size in sizes if size is not None]:
                return max(found)
        return 1

    def lost(self, layer: str, number: int, mp: int) -> NotFoundError:
        """The error for an expert without a file."""
        file = expert_file_name(0, number, mp).replace("layer_0", "layer_*")
        expected = f"expert {number} in a file of model-parallel rank {mp}"
        file, param = self._folder.folder / file, f"{layer}.{number}"
        return missing_files("expert file", 1, file, expected, "no such file", param=param)

    def local(self, mesh: Mesh, index: int) -> LocalExperts:
        """What an expert-parallel rank has of them."""
        return LocalExperts.among(self.counts, mesh.ep, index)


class WithExperts(Weights):
    """Weights whose experts lie in files of their own. `name_of` gives the canonical name of what a
    file calls an expert."""

    def __init__(
        self, beside: Weights, files: ExpertFiles, mesh: Mesh, name_of: Callable[[str, str], str]
    ) -> None:
        self._beside, self._files, self._mesh, self._name_of = beside, files, mesh, name_of

    @kept
    def experts(self, etp: int) -> Shares:
        """Every expert's share at an expert-tensor-parallel rank, by canonical name."""
        out: Shares = {}
        for stage in range(self._mesh.pp):
            for ep in range(self._mesh.ep):
                out |= self._share(stage, ep, etp)
        return out

    def _share(self, stage: int, ep: int, etp: int) -> Shares:
        """What a rank has of a stage's experts. Raises NotFoundError for a lost file."""
        mp, local = file_rank(self._mesh, stage, ep, etp), self._files.local(self._mesh, ep)
        held = self._files.of(mp)
        own = {name: one for name, one in held.items() if local.own_name(name) is not None}
        found = {(part.layer, part.number) for part in map(expert_name, own) if part}
        for layer in {layer for layer, _ in found}:
            first = ep * local.counts[layer]
            for expert in range(first, first + local.counts[layer]):
                if (layer, expert) not in found:
                    raise self._files.lost(layer, expert, mp)
        return {self._name_of(name, one[1]): one for name, one in own.items()}

    def name_of(self, name: str, file: str) -> str:
        return self._beside.name_of(name, file)

    def module(self, tp: int = 0) -> Mapping[str, Any]:
        dense = self._beside.module(tp)
        own = {name: ref for name, ref in dense.items() if not is_expert(name)}
        return own | {name: ref for name, (ref, _) in self.experts(tp % self._mesh.etp).items()}

    def file_of(self, name: str, tp: int = 0) -> str:
        held = self.experts(tp % self._mesh.etp).get(name)
        return held[1] if held else self._beside.file_of(name, tp)

    def ties(self, flat: Iterable[str]) -> tuple[Tie, ...]:
        return self._beside.ties(name for name in flat if not is_expert(name))

    def extra_states(self) -> dict[str, Any]:
        return self._beside.extra_states()

    def check(self, file: str) -> None:
        """Also an expert file with that of the first expert-tensor-parallel rank."""
        if file not in self._by_file:
            self._beside.check(file)
        first = self.experts(0)
        for name, ref in self._by_file.get(file, ()):
            want = first.get(name, (None, ""))[0]
            if want is None or want.shape != ref.shape:
                raise ForeignFileError(
                    "an expert file differs from that of the first expert-tensor-parallel rank",
                    file=file,
                    parameter=name,
                    expected=want and want.shape,
                    found=ref.shape,
                )

    @cached_property
    def _by_file(self) -> dict[str, list[tuple[str, TensorRef]]]:
        """What each expert file holds, by canonical name."""
        return grouped(
            (file, (name, ref))
            for etp in range(self._mesh.etp)
            for name, (ref, file) in self.experts(etp).items()
        )


# ---- the run


FlattenedShapes = list[dict[str, Ints]]  # names and rank-local shapes of each group's parameters
_SLICES = "param_slice_mappings"
_OTHER_ORDER = "use_data_before_expert_parallelism"


class NativeRun(TagFolder):
    """A tag folder with DeepSpeed's own files, and what follows from them: each property from
    those that it asks for, when it is asked for. Any of them may raise a UcpError.

    `told` is what the caller knows and files may not say: whole shapes, layouts, names of a
    pipeline, the order of the parameters in Megatron-DeepSpeed's files of stage 0. A file of stage
    0 without a manifest is read without its optimizer where nobody knows the order.
    """

    def __init__(self, folder: Folder, told: CallerModel) -> None:
        super().__init__(folder, told.classes, told.weights)
        with self.closed_on_failure():
            self.told = self._told_of_weights(told) if told.weights else told
            self.model_name = self.names.first_model
            self.main_file = self.full_path(self.model_name)
            self.arguments = arguments_of(self.meta.get(ARGUMENTS_KEY))
            self.told = self._with_rules_of_program(self.told)
            if self.meta.get("mp_world_size") == 1:
                self.names = without_sequence_ranks(self.names)
            refuse_mics(self.meta.get("ds_config"), self.main_file)

    def _told_of_weights(self, told: CallerModel) -> CallerModel:
        """What is known of the weights alone: of what a manifest says layouts and names, as the
        rest of it is about an optimizer that nobody looks at. Raises UnsupportedError at ZeRO-3."""
        if self.names.is_partitioned:
            raise UnsupportedError(
                "at ZeRO-3 the weights lie in the optimizer's files, so that they can't be loaded "
                "without these",
                file=self.folder,
                expected="ZeRO-0 to ZeRO-2",
                found="a model file of each partition",
                fix='restore the files and leave "weights" out, or load another tag',
            )
        recorded, self.evidence.manifest = self.evidence.manifest, None
        if recorded is None:
            return told
        renamed = recorded.run.get(RENAMED) or {}
        return replace(told, specs=recorded.by_name, names=recorded.names, renamed=renamed)

    def _with_rules_of_program(self, told: CallerModel) -> CallerModel:
        """With the rules that the saved arguments of Megatron-DeepSpeed decide, where nobody says
        how parameters are cut and named."""
        if self.recorded is not None or told.rules is not None or told.specs is not None:
            return told
        return replace(told, rules=rules_for(self.meta, self.main_file))

    @abstractmethod
    def ref_of(self, slot: Slot) -> tuple[TensorRef, str]:
        """The tensor of a slot, and the name of its file. Raises DamagedFileError, ForeignFileError
        where the file disagrees with the structure."""

    # ------------------------------------------------ files

    @cached_property
    def meta(self) -> Mapping[str, Any]:
        """What the first model file says, which tells what kind of run wrote the others."""
        return self.tree(self.model_name)

    @cached_property
    def pipeline(self) -> bool:
        """Whether the files are of a pipeline's stages: there are files of its layers, or the model
        file says so (one with experts has no layer files)."""
        stages = expect.section(self.meta, "checkpoint_parallel_dimensions").get("pp_degree", 1)
        staged = type(stages) is int and stages > 1
        return bool(self.names.layers) or self.meta.get("module", {}) is None or staged

    @cached_property
    def has_optimizer_files(self) -> bool:
        """Whether the run's optimizer lies in files of its own, one for each partition of each
        model-parallel rank. Of a load of the weights alone nobody asks for them."""
        if self.told.weights:
            return False
        config, version = self.meta.get("ds_config"), self.meta.get("ds_version")
        flattens = self.meta.get("param_shapes") is not None
        lost = saved_no_bf16_optimizer(config, version)
        return bool(self.names.optimizer) or self.names.is_partitioned or (flattens and not lost)

    def model_of(self, mp: int, part: int = 0) -> str:
        """Name of the model file of a model-parallel rank (at ZeRO-3 of one partition)."""
        name = self.names.model.get((None, mp)) or self.names.model.get((part, mp))
        if name is None:
            file, expected = model_name(mp, part), f"partition {part}, model-parallel rank {mp}"
            raise missing_files("model file", 1, self.folder / file, expected, "no file")
        return name

    def optimizer_tree(self, part: int, mp: int = 0) -> Any:
        """The optimizer state dict of one partition's file."""
        name = self.names.optimizer[part, mp]
        tree = self.tree(name).get("optimizer_state_dict")
        if not isinstance(tree, dict):
            raise DamagedFileError(
                "an optimizer file holds no optimizer",
                file=self.full_path(name),
                expected="optimizer_state_dict",
                found=type(tree).__name__,
            )
        return tree

    def fragment(self, name: str, part: int, tp: int = 0) -> Any:
        """One partition of a frozen parameter, as ZeRO-3 keeps it."""
        file = self.model_of(tp, part)
        fragments = expect.key_or(
            self.tree(file), "frozen_param_fragments", {}, self.full_path(file)
        )
        return fragments.get(name)

    # ------------------------------------------------ ranks

    @cached_property
    def dp(self) -> int:
        """Partitions of the dense buffers."""
        return self._count("dp_world_size")

    @cached_property
    def model_ranks(self) -> int:
        """Model-parallel ranks: stages times tensor-parallel ranks."""
        return self._count("mp_world_size")

    def _count(self, key: str) -> int:
        """A number of ranks in the model file; 1 where it says nothing."""
        value = self.meta.get(key)
        if value is not None and (type(value) is not int or not 1 <= value <= 2**24):
            raise DamagedFileError(
                f"the model file says no number of ranks in {key}",
                file=self.main_file,
                expected="a whole number from 1",
                found=repr(number(value))[:80],
            )
        return value or 1

    @cached_property
    def experts(self) -> ExpertFiles:
        return ExpertFiles(self)

    @cached_property
    def mesh(self) -> Mesh:
        """The ranks, without their ZeRO stage."""
        stages, tp = self._degrees()
        ep, etp = self._expert_degrees(tp)
        return Mesh(tp=tp, pp=stages, dp=self.dp, ep=ep, etp=etp)

    def _degrees(self) -> tuple[int, int]:
        """Pipeline stages and tensor-parallel ranks."""
        if not self.pipeline:
            return 1, self.model_ranks
        tp = expect.section(self.meta, "checkpoint_parallel_dimensions").get("tp_degree")
        if tp is None:  # older files: there is a layer file for every tensor-parallel rank
            tp = 1 + max((rank for _, rank in self.names.layers), default=0)
        if type(tp) is not int or tp < 1 or self.model_ranks % tp:
            raise DamagedFileError(
                "the model file does not say how its ranks divide into stages and tensor-parallel "
                "ranks",
                file=self.main_file,
                expected=f"a divisor of {self.model_ranks}",
                found=repr(number(tp))[:80],
            )
        return self.model_ranks // tp, tp

    def _expert_degrees(self, tp: int) -> tuple[int, int]:
        """Expert-parallel and expert-tensor-parallel ranks."""
        if self.recorded is not None:
            return self.recorded.mesh.ep, self.recorded.mesh.etp
        config = expect.section(self.meta, "ds_config")
        if config.get(_OTHER_ORDER) and self.meta.get("num_experts"):
            raise UnsupportedError(
                "the ranks of this run were divided in another order among the experts",
                file=self.main_file,
                expected=f"no {_OTHER_ORDER}",
                found=_OTHER_ORDER,
                fix="load it with DeepSpeed at the same sizes",
            )
        # AutoEP's lie in the optimizer files alone at ZeRO-3
        in_shards = bool(self.experts.autoep) and any(
            part is not None for part, _ in self.names.model
        )
        if self.names.experts or in_shards:
            return self.experts.ranks(self.meta, self.main_file), self._cuts_of_experts(tp)
        if self.meta.get("num_experts"):
            counts = self.meta["num_experts"]
            known = [n for n in (counts if isinstance(counts, list) else []) if type(n) is int]
            raise missing_files(
                "expert file",
                max(2, sum(known)),
                self.folder / expert_file_name(0, 0, 0),
                f"a file of each of {known or number(counts)} experts: without them "
                "local numbers say nothing",
                "no such file",
            )
        return 1, tp

    def _cuts_of_experts(self, tp: int) -> int:
        """Ranks that cut an expert: each one has a file of it. DeepSpeed's own layers have one
        share or one copy on each tensor-parallel rank."""
        files = Counter((layer, number, mp // tp) for layer, number, mp in self.names.experts)
        most = max(files.values(), default=tp)
        return next(size for size in range(most, tp + 1) if tp % size == 0)

    @cached_property
    def partition_ranks(self) -> PartitionRanks:
        """Over how many ranks ZeRO divides a buffer."""
        return PartitionRanks.on(self.mesh, self.dp if self.has_optimizer_files else 1)

    @cached_property
    def uneven(self) -> bool:
        """Whether each tensor-parallel rank has buffers of its own, as AutoTP gives some ranks
        larger shares."""
        if self.recorded is not None:
            return any(buffer.cut_at for buffer in self.recorded.buffers)
        info = self.meta.get(PATTERNS)
        return self.mesh.tp > 1 and not self.pipeline and is_uneven(info, self.main_file)

    @cached_property
    def places(self) -> list[Coords]:
        """The places that have parameters of their own."""
        return self.mesh.holding(self.uneven)

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
        return self.mesh.partition_ranks_at(*divmod(mp, self.mesh.tp))[part]

    def place_of_rank(self, rank: int) -> int:
        """The number of a rank's place among `places`."""
        return self.places.index(self.mesh.at(rank, [axis for axis, _ in self.places[0]]))

    def optimizer_of(self, mp: int) -> tuple[Any, str]:
        """The optimizer's state dict of the first rank of a model-parallel one, and its file."""
        tree, name = self.optimizer_of_rank(self.rank_of_file(0, mp))
        return tree, self.full_path(name)

    def optimizer_of_rank(self, rank: int, of_experts: bool = True) -> tuple[Any, str]:
        """The optimizer's state dict of a rank, and its file; at stage 0 of one like it."""
        part, mp = self.file_place(rank)
        if self.names.optimizer:
            return self.optimizer_tree(part, mp), self.names.optimizer[part, mp]
        name = self.model_of(mp)
        tree = self.tree(name).get("optimizer")
        if not self.names.expert_optimizer or (tree is not None and not of_experts):
            return tree, name
        name = self._expert_optimizer(rank)
        return self.tree(name).get("optimizer"), name

    def _expert_optimizer(self, rank: int) -> str:
        """The file of stage 0 with the states of a rank's experts. Raises NotFoundError."""
        ep, etp = self.mesh.expert_place(rank)
        place = ep, file_rank(self.mesh, self.mesh.coord(rank).pp, ep, etp)
        if place not in self.names.expert_optimizer:
            file = self.folder / expert_optimizer_name(*place)
            expected = f"expert-parallel rank {place[0]}, model-parallel rank {place[1]}"
            raise missing_files("expert optimizer file", 1, file, expected, "no such file")
        return self.names.expert_optimizer[place]

    # ------------------------------------------------ weights

    @cached_property
    def pipe_names(self) -> Mapping[str, str]:
        """Names in a pipeline, with the canonical ones."""
        rules = self.told.rules
        if self.recorded is not None:
            return self.recorded.names
        if not self.pipeline:
            return {}  # who knows them need not know what kind of run it was
        if not self.told.names and rules is not None and rules.pipeline:
            # the experts of other ranks than the first are in files of experts alone
            of_experts = (
                name
                for stage in range(self.mesh.pp)
                for name in self.experts.of(stage * self.mesh.tp)
            )
            return renamed([*pipe_keys(self, self.first_of_stages), *of_experts], rules)
        return self.told.names or {}

    @cached_property
    def weights(self) -> Weights:
        """The weights by canonical name."""
        dense = self._dense_weights()
        if self.names.experts:
            return WithExperts(dense, self.experts, self.mesh, dense.name_of)
        return dense

    def _dense_weights(self) -> Weights:
        """Without the experts that lie in files of their own."""
        mesh, names = self.mesh, self.pipe_names
        if not self.pipeline:
            files = {rank: self.model_of(rank) for rank in range(mesh.tp)}
            return WholeModel(self, files, self._renamed())
        if not names:
            raise UnsupportedError(
                "a pipeline checkpoint without a manifest needs a family or rules",
                file=self.main_file,
                found=f"{mesh.pp} stages",
                fix="give --rules (Python: rules=) a file with [[pipeline]] entries "
                "(docs/reference/rules.md); or load it into an engine that was attached with a "
                "family",
                id="layout-unknown",
            )
        if self.names.layers or self.meta.get("module") is None:
            return LayerFiles(self, PipeNames(names), mesh.tp)
        places = [(stage, rank) for stage in range(mesh.pp) for rank in range(mesh.tp)]
        models = {(s, t): self.model_of(s * mesh.tp + t) for s, t in places}
        return StageModels(self, PipeNames(names), models)

    def _renamed(self) -> Mapping[str, str]:
        """Names of entries of the weights -> those of the model, as the run said, or the caller."""
        recorded = self.recorded
        renamed = self.told.renamed if recorded is None else recorded.run.get(RENAMED)
        if not isinstance(renamed, dict):
            return {}
        expect.texts([*renamed, *renamed.values()], RENAMED, self.folder / FILE_NAME)
        return renamed

    @cached_property
    def layouts(self) -> LayoutSource:
        """What says how parameters are cut. Raises UnsupportedError where nothing does and
        several ranks have shares of one."""
        patterns = expect.section(self.meta, PATTERNS)
        found = LayoutSource(
            self.mesh,
            StockInfo(patterns, self.main_file, order_of(self.arguments)),
            self.told.specs if self.recorded is None else self.recorded.by_name,
            self.told.rules,
            {name: pipe for pipe, name in self.pipe_names.items()},
        )
        if self.mesh.tp > 1 and found.silent:
            raise UnsupportedError(
                "a tensor-parallel checkpoint without a manifest needs a family or rules",
                file=self.main_file,
                found=f"mp_world_size {self.mesh.tp}",
                fix="give --rules FILE (Python: rules=; docs/reference/rules.md), for which "
                "`megatron-ucp inspect --all` lists names and shapes; or load it into an engine "
                "that was attached with a family",
                id="layout-unknown",
            )
        return found

    def require_described(self) -> None:
        """Raises UnsupportedError where nothing says the names of a pipeline's parameters, or how
        parameters are cut."""
        _ = self.weights, self.layouts

    @cached_property
    def expert_counts(self) -> dict[str, int]:
        """Experts of each layer, by the canonical name of its list."""
        return {**self.experts.autoep.experts, **counts_of(self.weights.module())}

    def names_at(self, rank: int, file: str) -> Callable[[str], str]:
        """The canonical name of what the module of a rank calls a parameter."""
        ep, _ = self.mesh.expert_place(rank)
        local = self.experts.local(self.mesh, ep) if self.mesh.ep > 1 else LocalExperts({})
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

    def shape_of(self, module: Mapping[str, Any], name: str) -> Ints:
        """The rank-local shape of a parameter that the caller, or the manifest, names. Raises
        ForeignFileError where the weights lack it, ModelMismatchError where a prefix does that."""
        ref = module.get(name)
        if not isinstance(ref, TensorRef):
            wanted = [param for names in self.told.order or () for param in names]
            raise other_prefix(module, wanted, self.main_file) or ForeignFileError(
                "the model of the engine has a parameter that the checkpoint lacks",
                parameter=name,
                file=self.main_file,
                found=f"{len(module)} other tensors",
                fix="build the model with the configuration that the checkpoint was trained with",
            )
        return ref.shape

    # ------------------------------------------------ optimizers

    @cached_property
    def stages(self) -> Sequence[Contents]:
        """The optimizer of the first rank of each of the `places`."""
        self.require_named()
        out: list[Contents] = []
        for at in self.places:
            rank = self.mesh.rank_of(at, 0)
            recorded = self.recorded
            wanted = self.told.order if recorded is None else group_order(recorded, at)
            out.append(self._first_of_place(rank, wanted))
            if out[0].keeper != out[-1].keeper:
                raise ForeignFileError(
                    "the stages of the pipeline have different kinds of optimizers",
                    file=self.full_path(self.optimizer_of_rank(rank)[1]),
                    expected=out[0].keeper,
                    found=out[-1].keeper,
                )
        return out

    @cached_property
    def contents(self) -> Contents:
        """All of them as one."""
        places = zip(self.places, self.stages, strict=True)
        joined = join([Stage((), found.buffers, found.groups, at=at) for at, found in places])
        indices = {
            number: index
            for numbers, found in zip(joined.buffer_numbers, self.stages, strict=True)
            for number, index in zip(numbers, found.indices, strict=True)
        }
        return replace(
            self.stages[0],
            buffers=joined.buffers,
            groups=joined.groups,
            indices=tuple(indices[number] for number in sorted(indices)),
        )

    def stage(self, stage: int) -> Contents:
        """The optimizer of the first place of a pipeline stage."""
        return self.stages[[stage_of(at) for at in self.places].index(stage)]

    @cached_property
    def lies_by_position(self) -> bool:
        """Whether an engine wants optimizer states whose names no file says: those of stage 0
        without a manifest."""
        told = self.told.order is not None and not self.told.weights
        unnamed = told and self.recorded is None and not self.names.optimizer
        return unnamed and self.optimizer_of(0)[0] is not None

    def require_named(self) -> None:
        """Raises UnsupportedError for states that lie by position, but for those of
        Megatron-DeepSpeed's program: it lists parameters in the order of its model."""
        is_listed = are_of_program(self.arguments) and not self.names.experts
        if self.lies_by_position and (self.mesh.pp > 1 or not is_listed):
            raise UnsupportedError(
                "optimizer states of ZeRO stage 0 lie by position, and nothing says whose they are",
                file=self.full_path(self.optimizer_of_rank(0)[1]),
                expected="a manifest beside the files, or ZeRO stage 1 to 3",
                found=f"ZeRO stage 0, {self.mesh.pp} stages, no manifest",
                fix="resume once with DeepSpeed's own load at the same tensor- and "
                "pipeline-parallel size, then save with megatron_ucp.attach, which writes the "
                'manifest; or take the weights alone: --allow weights (Python: allow={"weights"}, '
                "load_optimizer_states=False)",
            )

    def _first_of_place(self, rank: int, wanted: Order | None) -> Contents:
        """What a place's first rank holds, in the order `wanted` where its file names nothing."""
        tree, name = self.optimizer_of_rank(rank)
        unnamed = not self.names.optimizer and wanted is None
        if tree is None or unnamed or self.told.weights:
            nothing = PlainFile(self.weight_dtype)
            return Contents(nothing, Keeper.NOBODY, (), (), LossScale(), ())
        file = self.full_path(name)
        format_ = reader_for(tree, file, self.weight_dtype, self.meta.get("ds_config"))
        return self.read_contents(format_, tree, file, wanted, rank)

    def read_contents(
        self, format_: OptimizerFile, tree: Any, file: str, order: Order | None, rank: int
    ) -> Contents:
        """What the optimizer of a rank holds, with canonical names: its state dict, and its
        file."""
        tree = expect.kind(tree, dict, "the optimizer", file)
        self.prefetch_scalars(self.folder.name_of(file), tree)
        found = OptimizerTree(tree, file, lambda ref: self.tensor(file, ref))
        contents = format_.contents(
            found, self._flattened(found, order, rank), self.partition_ranks
        )
        check_momentum(contents.groups, contents.buffers, file)
        return contents

    # ------------------------------------------------ the order in which parameters are flattened

    def _flattened(self, found: OptimizerTree, order: Order | None, rank: int) -> FlattenedShapes:
        """What each group flattens in the file of a rank. `order` has the names that files of stage
        0 don't say. Raises DamagedFileError."""
        _, mp = self.file_place(rank)
        model = self.model_of(mp)
        file = self.full_path(model)
        listed = shapes_by_group(self.tree(model), file)
        if self.names.optimizer and listed is not None:
            name_of = self.names_at(rank, model)
            inside = (self.experts.autoep.in_slices(named, file) for named in listed)
            flat = [{name_of(name): shape for name, shape in named.items()} for named in inside]
            return self._with_trained_experts(flat, rank)
        if self.names.optimizer and _SLICES in found.tree:
            # BF16_Optimizer without ZeRO, in a pipeline: what each partition owns names all, in
            # order
            order = self._by_slices(rank, model)
        elif self.names.optimizer:
            raise DamagedFileError(
                "the model file does not say how parameters are flattened",
                file=file,
                expected="param_shapes",
                found="none",
            )
        module = self.weights.module(mp % self.mesh.tp)
        shapes = [{name: self.shape_of(module, name) for name in names} for names in order or ()]
        if self.uneven:  # a rank without a share of a parameter does not step it
            shapes = [
                {n: shape for n, shape in named.items() if 0 not in shape} for named in shapes
            ]
        return shapes

    def _with_trained_experts(self, flat: FlattenedShapes, rank: int) -> FlattenedShapes:
        """A rank's order of parameters. DeepSpeed writes it for expert-parallel rank 0 alone: with
        its experts renumbered it is that of another rank, unless ranks freeze different experts.
        Only a manifest knows that: where it lists other experts for this rank, its list is
        taken."""
        recorded, at = self.recorded, self.places[self.place_of_rank(rank)]
        if recorded is None or not self.names.experts or not self.mesh.expert_place(rank)[0]:
            return flat
        here = [b for b in recorded.buffers if b.stepped and b.is_held_at(at)]
        listed = [[member.param for member in buffer.members] for buffer in here]
        if [*map(set, listed)] == [*map(set, flat)]:  # then the files' own order is the evidence
            return flat
        module = self.weights.module(self.mesh.coord(rank).tp)
        return [{name: self.shape_of(module, name) for name in names} for names in listed]

    def _by_slices(self, rank: int, model: str) -> list[list[str]]:
        """The parameters of each group: what the optimizer files of all partitions of a rank's
        buffers name, in order; of experts only the rank's own."""
        mesh, name_of = self.mesh, self.names_at(rank, model)
        experts = mesh.expert_place(rank)
        partitions = [
            (self._slices(*self.file_place(other)), mesh.expert_place(other) == experts)
            for other in mesh.partition_group(rank)
        ]
        counts = {len(groups) for groups, _ in partitions}
        if len(counts) != 1:
            raise ForeignFileError(
                "optimizer files hold different numbers of groups",
                file=self.full_path(model),
                expected="as many in each",
                found=", ".join(map(str, sorted(counts))),
            )

        def named(group: int) -> Iterator[str]:
            for groups, has_experts in partitions:
                is_apart = self.partition_ranks.is_apart
                yield from (n for n in groups[group] if has_experts or not is_apart(n))

        return [list(dict.fromkeys(map(name_of, named(group)))) for group in range(counts.pop())]

    def _slices(self, partition: int, mp: int) -> list[list[str]]:
        """What a partition owns of each group. Raises DamagedFileError."""
        file = self.full_path(self.names.optimizer[partition, mp])
        groups = expect.each(self.optimizer_tree(partition, mp).get(_SLICES), dict, _SLICES, file)
        return [expect.texts(list(group), _SLICES, file) for group in groups]


def group_order(manifest: Manifest, at: Coords = ()) -> list[list[str]] | None:
    """Names of each parameter group at a place (see `Mesh.holding`), in the optimizer's order; None
    where the files say it themselves."""
    if manifest.keeper != Keeper.ZERO_0:
        return None
    here = [b for b in manifest.buffers if b.stepped and b.is_held_at(at)]
    numbers = sorted({m.group for b in here for m in b.members if m.group is not None})
    if manifest.mesh.pp == 1:
        numbers = list(range(len(manifest.groups)))
    return [[m.param for b in here for m in b.members if m.group == n] for n in numbers]
