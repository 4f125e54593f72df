"""What a conversion or a resize aims at: the manifest of the source on another mesh."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from megatron_ucp.core.box import Ints
from megatron_ucp.core.experts import (
    PartitionRanks,
    check_files,
    in_order,
    in_own_file,
    is_stacked,
    stored_tensors,
)
from megatron_ucp.core.flat import FlatBuffer, Member, States, alone
from megatron_ucp.core.join_ranks import Stage, join
from megatron_ucp.core.layers import Layers
from megatron_ucp.core.layout import Chunks
from megatron_ucp.core.manifest import Manifest, ParamGroup, ParamSpec
from megatron_ucp.core.mesh import EXPERT_RANK, Coords, Mesh, expert_rank_of, stage_of
from megatron_ucp.core.names import MASTER, VALUE, Keeper
from megatron_ucp.core.values import TENSOR, InertObject
from megatron_ucp.errors import (
    LayoutError,
    RuleError,
    StateMismatchError,
    UcpError,
    UnsupportedError,
    UsageError,
)
from megatron_ucp.families import families, recorded_model
from megatron_ucp.families.arguments import with_model
from megatron_ucp.families.megatron_deepspeed import is_of_program, layers_of_program
from megatron_ucp.formats.checkpoint import Checkpoint, apart_in, ranks_of
from megatron_ucp.formats.deepspeed.autoep import group_name
from megatron_ucp.formats.deepspeed.buffers import round_robin
from megatron_ucp.formats.deepspeed.layout_sources import says_layouts
from megatron_ucp.formats.deepspeed.megatron_deepspeed import (
    is_pipeline,
    kept_by_each_rank,
    on_mesh,
)
from megatron_ucp.formats.deepspeed.optimizers import in_its_order, steps_matrices
from megatron_ucp.formats.deepspeed.partition import divide
from megatron_ucp.formats.deepspeed.target import GroupOnRank, Target, config_for, with_states
from megatron_ucp.formats.deepspeed.weights import training_dtype
from megatron_ucp.formats.deepspeed.writer import RunSettings
from megatron_ucp.formats.loss_scale import LossScale
from megatron_ucp.formats.optimizers import kept_by, refuse_step_in_group, require_equal
from megatron_ucp.formats.per_rank import RankDifferences, refuse_unless
from megatron_ucp.formats.pt.allowed_calls import ALLOWED_CALLS
from megatron_ucp.formats.pt.pickle import check_object
from megatron_ucp.formats.pt.unpickle import named_in
from megatron_ucp.reshard.match import (
    check_not_lost,
    match_ties,
    one_value,
    replica_notes,
    require_one_copy,
    scheduler_for,
    source_states,
)

# ---- wanted
#
# What a conversion is asked for.


@dataclass(frozen=True)
class NamedGroup:
    """A parameter group as an optimizer without pipeline has it, and the names in its order."""

    group: ParamGroup
    names: tuple[str, ...]

    def of(self, held: frozenset[str]) -> "NamedGroup":
        """The same group of a rank that holds some parameters."""
        own = [name for name in held if name in self._places]
        return replace(self, names=tuple(sorted(own, key=self._places.__getitem__)))

    @cached_property
    def _places(self) -> dict[str, int]:
        return {name: place for place, name in enumerate(self.names)}


@dataclass(frozen=True)
class Conversion:
    """What is converted, and what for. `file` is the source's, for messages; `declared` says
    whether anybody declared how parameters are cut; `permuted` whether the source's groups are in
    the order of `round_robin_gradients`; `layers` are those of the pipeline, where somebody knows
    them."""

    source: Manifest
    target: Target
    file: str
    layers: Layers | None = None
    declared: bool = True
    permuted: bool = False

    @cached_property
    def dtype(self) -> str:
        """That of the training copies."""
        trained = (spec.dtype for spec in self.source.params if spec.kind == "trainable")
        return self.target.dtype or next(trained, "float32")

    @cached_property
    def places(self) -> dict[str, int]:
        """Where each parameter stands among all."""
        return {name: place for place, name in enumerate(self.params)}

    @cached_property
    def params(self) -> dict[str, ParamSpec]:
        """Parameters as the target trains them: in one dtype; module buffers keep theirs. Files are
        written with the dims in their own order."""
        on_mesh = [replace(spec.without_chunks(), order=None) for spec in self.source.params]
        return {
            spec.name: spec if spec.kind == "buffer" else replace(spec, dtype=self.dtype)
            for spec in on_mesh
        }


# ---- stage division
#
# Which stage of a pipeline that does not exist yet holds which parameters.


def no_layers(file: str) -> UnsupportedError:
    """The error for a pipeline that a model without a family would have."""
    return UnsupportedError(
        "the names of the parameters in a pipeline are not known",
        file=file,
        found="no family",
        expected="a pipeline checkpoint, or one of a family that has a pipeline",
        fix="train with a family, or convert without pp",
    )


def placed(wanted: Conversion, local: Mapping[str, int]) -> list[frozenset[str]]:
    """The names that each stage of the target holds."""
    source, target, layers, file = wanted.source, wanted.target, wanted.layers, wanted.file
    if target.mesh.pp == 1:
        return [frozenset(spec.name for spec in source.params)]
    if layers is None:
        raise no_layers(file)
    known = {name for names in layers.canonical for name in names}
    lost = [spec.name for spec in source.params if spec.name not in known]
    if lost:
        raise UnsupportedError(
            "a parameter or buffer has no place in the pipeline",
            file=file,
            parameter=lost[0],
            found=f"{len(lost)} of {len(source.params)}",
            fix="convert without pp",
        )
    # what DeepSpeed balances
    trained = {spec.name: local[spec.name] for spec in source.params if spec.kind == "trainable"}
    return [
        frozenset(name for at in stage for name in layers.canonical[at])
        for stage in divide(layers, target.stages or "layers", target.mesh.pp, trained)
    ]


def with_stages(wanted: Conversion) -> tuple[Conversion, list[str]]:
    """With how the layers are divided among the stages, where nobody said it: as in the source, if
    that has as many stages, else as many each of the most frequent kind, which a note says."""
    source, target, layers = wanted.source, wanted.target, wanted.layers
    if target.mesh.pp == 1 or target.stages is not None or layers is None:
        return wanted, []
    if source.mesh.pp == target.mesh.pp and source.mesh.vpp == 1:
        if (counts := _stages_of(source, layers)) is not None:
            return replace(wanted, target=replace(target, stages=counts)), []
    note = (
        "nobody said how the layers are divided among the stages: as many each of the most "
        "frequent kind, which is `--stages layers`; the job needs the same partition method"
    )
    return replace(wanted, target=replace(target, stages="layers")), [note]


def _stages_of(source: Manifest, layers: Layers) -> tuple[int, ...] | None:
    """How many layers each stage of the source has; of a parameter that several positions hold the
    last is on the last stage."""
    held = {
        name: [source.buffers[b].stage for b, _ in holders]
        for name, holders in source.holders.items()
    }
    at, seen = [0], set[str]()
    for names in layers.canonical:
        own = [held[name][-1] if name in seen else held[name][0] for name in names if name in held]
        seen.update(names)
        at.append(max([at[-1], *own]))
    counts = tuple(at[1:].count(stage) for stage in range(source.mesh.pp))
    return counts if all(counts) else None


# ---- expert meshes
#
# Which meshes of a conversion experts can be put on.


def check_experts(source: Manifest, mesh: Mesh, file: str) -> None:
    """Raises UsageError for expert-parallel ranks of a model without experts, LayoutError where
    they don't divide its experts."""
    for spec in source.params:
        _expert_rank(spec, mesh, file)
    if mesh.ep > 1 and not any(spec.expert for spec in source.params):
        raise UsageError(
            "this axis is not converted: the model has no experts",
            file=file,
            expected=f"{EXPERT_RANK}=1",
            found=mesh,
            fix="leave this axis out of the mesh (--mesh; Python: mesh=)",
        )


def check_trained(source: Manifest, mesh: Mesh, file: str) -> None:
    """Raises UnsupportedError for experts that DeepSpeed does not train at ZeRO-3 (all but AutoEP's
    where other ranks share them, its own layers' in any case), and as `check_files`."""
    for spec in source.params:
        if not spec.expert:
            continue
        check_files(mesh.cut_of_dense, mesh.ep, mesh.cut_of_experts, file)
        of_deepspeed = in_own_file(spec.name, False)
        if mesh.zero == 3 and not is_stacked(spec.name) and (of_deepspeed or mesh.experts_apart):
            raise UnsupportedError(
                "DeepSpeed does not train these experts at ZeRO-3"
                + ("" if of_deepspeed else " on ranks of their own"),
                file=file,
                parameter=spec.name,
                expected="ZeRO 0, 1 or 2" + ("" if of_deepspeed else f", or {EXPERT_RANK}=1"),
                found=mesh,
                fix="choose such a mesh (--mesh; Python: mesh=)",
            )


def check_stages(
    by_stage: Sequence[Collection[str]], source: Manifest, mesh: Mesh, file: str
) -> None:
    """Raises UnsupportedError for a stage without experts, where other ranks share them:
    DeepSpeed's pipeline waits for ever there."""
    experts = {spec.name for spec in source.params if spec.expert}
    without = [stage for stage, names in enumerate(by_stage) if experts.isdisjoint(names)]
    if mesh.experts_apart and experts and without:
        raise UnsupportedError(
            "a stage of the pipeline has no layer with experts",
            file=file,
            expected=f"experts on each of {len(by_stage)} stages",
            found=f"none on stage {without[0]}",
            fix="use fewer stages, or another division of the layers",
        )


def held_by(
    by_stage: Sequence[frozenset[str]], source: Manifest, mesh: Mesh, file: str
) -> list[list[frozenset[str]]]:
    """What a place of a mesh holds of the parameters of each stage, by stage and expert-parallel
    rank: everything but other ranks' experts.

    Raises LayoutError where the expert-parallel ranks don't divide the experts.
    """
    out: list[list[frozenset[str]]] = []
    for names in by_stage:
        ranks = {name: _expert_rank(source.by_name[name], mesh, file) for name in names}
        of: list[set[str]] = [set() for _ in range(mesh.ep)]
        for name, rank in ranks.items():
            for held in of if rank is None else [of[rank]]:
                held.add(name)
        out.append([frozenset(held) for held in of])
    return out


def _expert_rank(spec: ParamSpec, mesh: Mesh, file: str) -> int | None:
    """The expert-parallel rank that has an expert's parameter; None of what all have."""
    if spec.expert is None:
        return None
    number, count = spec.expert
    if count % mesh.ep:
        works = [n for n in range(1, count + 1) if not count % n]
        raise LayoutError(
            "the expert-parallel size does not divide the experts of a layer",
            file=file,
            parameter=spec.name,
            expected=f"a divisor of {count}",
            found=mesh.ep,
            fix=f"use an expert-parallel size of {', '.join(map(str, works))}",
            id="does-not-divide",
        )
    return number // (count // mesh.ep)


def notes_of_groups(source: Manifest, mesh: Mesh, listed: bool) -> list[str]:
    """What to know of parameter groups: DeepSpeed's own experts have some of their own at any
    size, others where other ranks share them alone."""
    ordinary = any(spec.expert and not in_own_file(spec.name, False) for spec in source.params)
    if listed or not ordinary or mesh.experts_apart or not source.mesh.experts_apart:
        return []
    return [
        "the experts keep parameter groups of their own, as in the source: list the groups "
        "(--groups) for a job that has them among all others, as megatron-core's at "
        f"{EXPERT_RANK}=1"
    ]


def notes_of_universal(source: Manifest) -> list[str]:
    """What to know of a universal folder with experts."""
    if not any(spec.expert for spec in source.params):
        return []
    return [
        f"stock DeepSpeed reads experts of this folder rightly at {EXPERT_RANK}=1 alone: it takes "
        "those of every rank for the first ones; convert to native files for more ranks"
    ]


def marks_on(marks: Mapping[str, Any], mesh: Mesh, source: Mesh) -> dict[str, Any]:
    """What marks a group on a mesh: DeepSpeed calls one of experts as their expert-parallel size,
    and looks for the ranks that share them under the name."""
    if marks.get("name") != group_name(source.ep):
        return dict(marks)
    return {**marks, "name": group_name(mesh.ep)}


# ---- source settings
#
# What a conversion takes from its source besides tensors: config, scheduler, loss scale, the
# layers of its pipeline.


CLIP_GRAD = 1.0  # DeepSpeed's default
VERSION = "0.19.8"  # whose files are written, where the source's don't say theirs


class SourceSettings:
    """A source as a conversion sees it. `ruled`: a file of rules was given. `notes` say what had to
    be assumed."""

    def __init__(self, source: Checkpoint, ruled: bool) -> None:
        self.source, self.extras = source, source.extras
        self.manifest = with_model(source.manifest)
        self.config: Mapping[str, Any] = self.extras.config or {}
        self.notes: list[str] = []
        self.apart = RankDifferences()
        self._declared = ruled or says_layouts(self.manifest)
        trained = [spec.dtype for spec in self.manifest.params if spec.kind == "trainable"]
        self.dtype = trained[0] if trained else training_dtype({"ds_config": self.config}, {}, ())

    def take_values(self, mesh: Mesh | None, allow: Collection[str]) -> None:
        """Looks at plain values: whether they can be written again, and what ranks have otherwise
        than each other. That goes to files for the same ranks (None: to none); else it is
        refused, or the first rank's is taken where that is allowed.

        Raises StateMismatchError, UnsafePickleError, UnsupportedError."""
        apart = apart_in(self.source)
        self._check_names(apart)
        if not apart.what:
            return
        if mesh is not None and mesh.has_ranks_of(ranks_of(self.source)):
            self.apart = apart
            return
        file, here = str(self.source.folder), str(mesh or "a format without ranks")
        # several ranks of a model must not draw the same: the program seeds anew only where its
        # degrees differ from the files', which say the target's
        is_one = mesh is None or mesh.tp == mesh.pp == 1
        usual = kept_by_each_rank(self.extras.client_state) if is_one else frozenset[str]()
        self.notes.append(refuse_unless("per_rank" in allow, apart.what, file, here, usual))

    def _check_names(self, apart: RankDifferences) -> None:
        """Notes classes of the run's program that values name, as the written files name them
        again. Raises UnsafePickleError for what only a call makes: nobody here knows what it
        would do; UnsupportedError for an object that can't be written."""
        extras, names = self.extras, set[str]()
        kept = [extras.scheduler, extras.client_state, extras.helpers]
        kept += [extras.modules, extras.stateless, extras.data_position]
        kept += [part for group in self.manifest.groups for part in (group.settings, group.marks)]
        kept += [part for own in apart.ranks for part in (own.buffers, own.client_state)]
        kept += [own.scheduler for own in apart.ranks]
        for item in named_in(kept):
            try:
                if isinstance(item, InertObject):
                    check_object(item)
            except UcpError as error:
                error.file = self.source.main_file
                raise
            if item.qualname not in (*ALLOWED_CALLS, TENSOR):
                names.add(item.qualname)
        if names:
            listed = ", ".join(sorted(names))[:200]
            self.notes.append(f"values name classes of the program that wrote them: {listed}")

    def wanted(
        self, target: Target, config: Mapping[str, Any] | None, allow: Collection[str] | None = None
    ) -> Conversion:
        """What is asked for: the target with everything that the config of its job says, or else
        the source's. Raises UsageError; LayoutError where no engine could be built so."""
        self.notes += require_one_copy(self.source, self.manifest.by_name, allow)
        self.notes += replica_notes(self.manifest)
        if config is None and self.extras.config is None and target.dtype is None:
            target = replace(target, dtype=self.dtype)
        target = target.completed(self.config if config is None else config)
        if target.mesh.tp > 1 and (model := recorded_model(self.manifest)) is not None:
            model.check_cut(target.mesh.tp)  # heads, which shapes alone do not show
        file, staged = str(self.source.folder), target.mesh.pp > 1
        of_program = target.mesh.zero < 2 and is_pipeline(self.extras.client_state)
        if target.pipeline is None:
            target = replace(target, pipeline=staged or of_program)
        layers = self._layers() if target.pipeline or staged else None
        if target.pipeline and not staged and layers is None:
            raise no_layers(file)
        return Conversion(self.manifest, target, file, layers, self._declared, self._permuted)

    @property
    def _permuted(self) -> bool:
        """Whether the order of the groups is that of `round_robin_gradients`."""
        settings = self.config.get("zero_optimization")
        return (
            self.manifest.keeper == Keeper.ZERO_1_OR_2
            and isinstance(settings, dict)
            and bool(settings.get("round_robin_gradients"))
        )

    def _layers(self) -> Layers | None:
        """The layers of the pipeline that the model has, or would have; None where nobody knows
        them."""
        names = [spec.name for spec in self.manifest.params]
        # not `find_family`: a family that this process does not know is no reason to refuse
        family = families().get(self.manifest.family)
        if family is not None and family.layers is not None:
            return family.layers(names).with_values(names)
        found = layers_of_program(names) if is_of_program(names) else self.source.layers()
        return None if found is None else found.with_values(names)

    def notes_of_program(self, stage: int | None) -> list[str]:
        """What to know of a folder for a ZeRO stage (None: for any) of Megatron-DeepSpeed, which
        makes one parameter group at ZeRO-3, without weight decay, and two elsewhere."""
        is_one = self.source.manifest.mesh.zero == 3
        is_same = stage is not None and (stage == 3) == is_one
        if not kept_by_each_rank(self.extras.client_state) or is_same or not is_one and not stage:
            return []
        return [
            "Megatron-DeepSpeed makes one parameter group at ZeRO-3 and two at other stages, and "
            "DeepSpeed's own load fills as many as the folder has, without a word: list those of "
            "the job (--groups), or load with this package"
        ]

    def settings(
        self, wanted: Conversion, manifest: Manifest, config: Mapping[str, Any] | None
    ) -> RunSettings:
        """What the files say besides the manifest. `config` is the DeepSpeed config of the
        target, None for the source's."""
        config = self.config if config is None else config
        dtype = wanted.target.dtype or self.dtype
        scaler = self.extras.scaler
        if dtype != "float16" and scaler.dynamic:
            self.notes.append("the dynamic loss scale of fp16 has no place in the target")
        elif dtype == "float16" and self.dtype != "float16":
            scaler = LossScale.fresh(config)
            self.notes.append(
                f"the loss scale of fp16 begins anew, at {scaler.cur_scale:g}: the source has none"
            )
        pipeline = wanted.layers is not None
        client_state = on_mesh(self.extras.client_state, manifest.mesh, pipeline)
        return RunSettings(
            replace(self.extras, client_state=client_state),
            config_for(wanted.target, config, dtype),
            self.extras.version or VERSION,
            dtype,
            scaler,
            self._clip_grad(config),
            self._int_steps(manifest),
            lambda stage: self._scheduler(manifest, stage),
            self.apart,
        )

    def _clip_grad(self, config: Mapping[str, Any]) -> float:
        key = "gradient_clipping"
        for value in (config.get(key), self.extras.clip_grad, self.config.get(key)):
            if isinstance(value, int | float) and not isinstance(value, bool):
                return float(value)
        return CLIP_GRAD

    def _int_steps(self, manifest: Manifest) -> bool:
        """Whether the target's optimizer keeps its step as an int: as its class does, or as the
        source has it."""
        known = [kept_by(g.optimizer, g.settings) for g in manifest.groups if g.optimizer]
        kinds = {kept.step for kept in known if "step" in kept.scalar}
        return self.extras.int_steps if kinds in (set(), {"either"}) else "int" in kinds

    def _scheduler(self, manifest: Manifest, stage: int) -> Any:
        """The scheduler's state for one stage of the target."""
        firsts: dict[int, str] = {}
        for buffer, member, group in manifest.stepped():
            if buffer.stage == stage:
                firsts.setdefault(group, member.param)
        origins = [self.manifest.group_number(name) for _, name in sorted(firsts.items())]
        return scheduler_for(self.extras.scheduler, origins, len(self.manifest.groups))


# ---- target
#
# The manifest of a checkpoint that does not exist yet: a source's parameters under a target's
# mesh and engine.


def named_groups(wanted: Conversion) -> list[NamedGroup]:
    """The target's groups as an optimizer without pipeline has them. Raises UsageError,
    StateMismatchError."""
    target, source = wanted.target, wanted.source
    found = _listed_groups(wanted) if target.groups is not None else _source_groups(wanted)
    if target.groups is None and target.mesh.ep != source.mesh.ep:
        # the source lists the experts of each of its ranks
        found = [replace(one, names=tuple(in_order(one.names))) for one in found]
    if not target.optimizer:
        return found
    refuse_step_in_group(target.optimizer)
    return [replace(one, group=replace(one.group, optimizer=target.optimizer)) for one in found]


def target_manifest(wanted: Conversion) -> Manifest:
    """What the target holds, buffer by buffer, without files. Raises a UcpError that names what is
    not known."""
    source, mesh, file = wanted.source, wanted.target.mesh, wanted.file
    _check_cuts(wanted)
    match_ties(source, file)
    groups = _with_experts_apart(named_groups(wanted), mesh, source.mesh)
    shapes = _local_shapes(wanted, mesh)
    groups = [_as_stepped(wanted, one, shapes) for one in groups]
    local = {name: math.prod(shape) for name, shape in shapes.items()}
    by_stage = placed(wanted, local)
    check_stages(by_stage, source, mesh, file)
    held = held_by(by_stage, source, mesh, file)
    stages = [
        _stage(wanted, groups, local, held[stage_of(at)][expert_rank_of(at)], at)
        for at in mesh.holding()
    ]
    joined = join(stages)
    layers = wanted.layers
    return Manifest(
        wanted.target.keeper(wanted.dtype),
        mesh,
        joined.params,
        joined.buffers,
        joined.groups,
        source.ties,
        family=source.family,
        run=source.run,
        names=dict(layers.names) if layers else {},
    )


def _local_shapes(wanted: Conversion, mesh: Mesh) -> dict[str, Ints]:
    """The shape of every parameter on a rank of a mesh."""
    shares = mesh.first_shares()
    return {
        spec.name: spec.layout.local_shape(spec.name, spec.shape, shares)
        for spec in wanted.params.values()
    }


def _as_stepped(wanted: Conversion, one: NamedGroup, shapes: Mapping[str, Ints]) -> NamedGroup:
    """A group in the order of the optimizer that steps it, which Muon sorts by rank-local
    `shapes`. Raises UsageError."""
    if not steps_matrices(one.group.settings):
        return one
    listed = wanted.target.groups is not None
    source = shapes if listed else _local_shapes(wanted, wanted.source.mesh)
    at_init = wanted.target.mesh.zero == 3
    names = in_its_order(one.names, shapes, source, wanted.file, at_init)
    return replace(one, names=names)


def _check_cuts(wanted: Conversion) -> None:
    """Raises RuleError where the target's mesh cuts what nobody declared how to cut, and as
    `check_experts`."""
    source, mesh, file = wanted.source, wanted.target.mesh, wanted.file
    cuts = _cuts_parameters(mesh)
    if cuts and not _cuts_parameters(source.mesh) and not wanted.declared:
        raise RuleError(
            "nobody declared how the parameters are cut",
            file=file,
            expected=f"layouts for {mesh}",
            found="a checkpoint without tensor parallelism and without a family",
            fix="give --rules FILE (Python: rules=); docs/reference/rules.md says how to write one",
            id="layout-unknown",
        )
    unknown = [spec for spec in source.params if _is_unknown(spec)] if cuts else []
    if unknown:
        raise RuleError(
            "nobody declared how a parameter is cut",
            file=file,
            parameter=unknown[0].name,
            expected=f"a layout for {mesh}",
            found=f"{len(unknown)} such parameters",
            fix="give --rules FILE (Python: rules=), convert to tp=1, or load into a live engine",
            id="layout-unknown",
        )
    check_experts(source, mesh, file)
    check_trained(source, mesh, file)


def _cuts_parameters(mesh: Mesh) -> bool:
    return max(mesh.cut_of_dense, mesh.cut_of_experts) > 1


def _is_unknown(spec: ParamSpec) -> bool:
    """Whether files hold a parameter in chunks, or ranks in shares of different sizes, that say
    nothing of how another mesh cuts it."""
    if any(cut.runs for cut in spec.layout.cuts()):
        return True
    chunked = isinstance(spec.layout, Chunks) and spec.kind != "buffer"
    return chunked and spec.on_mesh is None and len(spec.shape) > 0


def _with_experts_apart(groups: list[NamedGroup], mesh: Mesh, source: Mesh) -> list[NamedGroup]:
    """Groups in which no expert is among parameters that other ranks share; those of experts come
    last, as DeepSpeed's own function splits them."""
    spread = PartitionRanks.on(mesh)
    apart: list[NamedGroup] = []
    others: list[NamedGroup] = []
    for one in groups:
        experts = tuple(name for name in one.names if spread.is_apart(name))
        rest = tuple(name for name in one.names if not spread.is_apart(name))
        if experts and rest:
            marks = {**one.group.marks, "name": group_name(mesh.ep), "moe": True}
            apart.append(NamedGroup(replace(one.group, marks=marks), experts))
            others.append(replace(one, names=rest))
        else:
            marks = marks_on(one.group.marks, mesh, source)
            others.append(replace(one, group=replace(one.group, marks=marks)))
    return [*others, *apart]


def _stage(
    wanted: Conversion,
    groups: list[NamedGroup],
    local: Mapping[str, int],
    held: frozenset[str],
    at: Coords,
) -> Stage:
    """What one place of the target holds. `local` are the elements of each parameter that a rank
    has."""
    keeper, params = wanted.target.keeper(wanted.dtype), wanted.params
    here = [one for one in (group.of(held) for group in groups) if one.names]
    buffers: list[FlatBuffer] = []
    for number, one in enumerate(here):
        _check_stacks(one.names, params, wanted.target.mesh, wanted.file)
        on_rank = _on_rank(wanted, number, one, local, keeper)
        buffers += wanted.target.buffers(on_rank, keeper, wanted.dtype)
    for buffer in buffers:  # files keep one set of them for each buffer
        stepped = [member.param for member in buffer.members]
        one_value(stepped, wanted.source.scalars_of, "steps", wanted.file)
    specs = tuple(params[name] for name in sorted(held, key=wanted.places.__getitem__))
    values = tuple(
        _value(wanted.target.mesh, keeper, spec, local[spec.name])
        for spec in specs
        if spec.kind != "trainable"
    )
    return Stage(specs, tuple(buffers), tuple(one.group for one in here), values, at)


def _check_stacks(
    names: Sequence[str], params: Mapping[str, ParamSpec], mesh: Mesh, file: str
) -> None:
    """Raises UsageError where a group does not list all experts of a stacked parameter, in their
    order: one tensor is in one group."""
    for tensor in stored_tensors(names):
        spec = params[tensor[0]]
        if not is_stacked(spec.name) or spec.expert is None:
            continue
        number, count = spec.expert
        numbers = [expert[0] for name in tensor if (expert := params[name].expert)]
        if numbers != list(range(number, number + count // mesh.ep)):
            raise UsageError(
                "a group does not list the experts of a stacked parameter together",
                file=file,
                parameter=spec.name,
                expected=f"{count // mesh.ep} of them, by their numbers",
                found=f"{numbers}",
                fix="list all experts of this parameter in one group, by their numbers "
                "(--groups; Python: Target(groups=))",
            )


def universal_manifest(wanted: Conversion) -> Manifest:
    """The same parameters, each one whole and in a buffer of its own. Raises a UcpError."""
    source = wanted.source
    match_ties(source, wanted.file)
    groups, specs = named_groups(wanted), wanted.params
    buffers: list[FlatBuffer] = []
    for number, one in enumerate(groups):
        states = _states(wanted, one, Keeper.UNIVERSAL)
        for name in one.names:
            scalars = source.scalars_of(name)
            buffers.append(alone(name, specs[name].elems, states, number, scalars, axes=()))
    for spec in specs.values():
        if spec.kind != "trainable":
            buffers.append(alone(spec.name, spec.elems, ((VALUE, spec.dtype),), axes=()))
    return Manifest(
        Keeper.UNIVERSAL,
        Mesh(),
        tuple(specs.values()),
        tuple(buffers),
        tuple(one.group for one in groups),
        source.ties,
        family=source.family,
        run=source.run,
    )


def _states(wanted: Conversion, group: NamedGroup, keeper: Keeper) -> States:
    """Masters and element-wise states of a group, which the target's `optimizer` has to keep if it
    is another one. At stage 0 in float32 the weights are the masters, whatever the source's are."""
    source, file, first = wanted.source, wanted.file, group.names[0]
    masters = {source.states_of(name).get(MASTER) for name in group.names}
    found = one_value(group.names, lambda name: source_states(source, name), "states", file)
    if len(masters) > 1 or None in masters:
        raise StateMismatchError(
            "the checkpoint holds no master weights of one kind",
            file=file,
            parameter=first,
            found=", ".join(map(str, masters)),
            fix="convert a checkpoint that was saved with its optimizer",
            id="no-optimizer",
        )
    states = {**found, **source.scalars_of(first)}
    if not states:
        check_not_lost(source, source.group_of(first), group.group.optimizer, file)
    elif wanted.target.optimizer:
        kept = kept_by(wanted.target.optimizer, group.group.settings)
        require_equal((*kept.element, *kept.scalar), states, first, file)
    plain = (keeper, wanted.dtype) == (Keeper.ZERO_0, "float32")
    master = str(masters.pop())
    if source.keeper == Keeper.DCP:  # whose program may step weights in bf16, as DeepSpeed does not
        found = {state: _wide(dtype) for state, dtype in found.items()}
        master = _wide(master)
    return with_states(found, wanted.dtype if plain else master)


def _wide(dtype: str) -> str:
    """The dtype in which DeepSpeed keeps what another program has in a smaller one, exactly."""
    return "float32" if dtype in ("bfloat16", "float16") else dtype


def _on_rank(
    wanted: Conversion, number: int, one: NamedGroup, local: Mapping[str, int], keeper: Keeper
) -> GroupOnRank:
    spread, first = PartitionRanks.on(wanted.target.mesh), one.names[0]
    return GroupOnRank(
        number,
        one.group.optimizer,
        [(name, local[name]) for name in one.names],
        _states(wanted, one, keeper),
        wanted.source.scalars_of,
        spread.partitions(first),
        spread.axes(first),
        one.group.settings,
    )


def _value(mesh: Mesh, keeper: Keeper, spec: ParamSpec, elems: int) -> FlatBuffer:
    """A buffer, or a frozen parameter, which ZeRO-3 partitions."""
    states = ((VALUE, spec.dtype),)
    if keeper != Keeper.ZERO_3 or spec.kind != "frozen":
        return alone(spec.name, elems, states, axes=PartitionRanks.on(mesh).axes(spec.name))
    parts = mesh.partitions
    return FlatBuffer((Member(spec.name, 0, elems),), -(-elems // parts), parts, "each", states)


# ------------------------------------------------ groups


def _listed_groups(wanted: Conversion) -> list[NamedGroup]:
    """The groups that the target lists. Raises UsageError where they don't list every trainable
    parameter once, StateMismatchError where members of one disagree."""
    source, file = wanted.source, wanted.file
    wished = wanted.target.groups or ()
    trainable = [spec.name for spec in source.params if spec.kind == "trainable"]
    listed = [name for names in wished for name in names]
    if sorted(listed) != sorted(trainable):
        twice = [name for name in listed if listed.count(name) > 1]
        odd = sorted(set(listed) ^ set(trainable)) or twice
        raise UsageError(
            "the groups do not list every trainable parameter once",
            file=file,
            parameter=odd[0],
            expected=f"{len(trainable)} names",
            found=f"{len(listed)}",
            fix="list each of them in one group (--groups; Python: Target(groups=))",
            id="groups-differ",
        )
    out: list[NamedGroup] = []
    for names in wished:
        one_value(names, source.group_of, "hyper-parameters", file)
        number = source.group_number(names[0]) if names else None
        group = source.groups[number] if number is not None else ParamGroup({})
        out.append(NamedGroup(group, tuple(names)))
    return out


def _source_groups(wanted: Conversion) -> list[NamedGroup]:
    """The source's groups. The stages of a pipeline number their own: those are one that have the
    same number where all stages have as many, else those with the same settings (but for the
    rate)."""
    source, file = wanted.source, wanted.file
    by_stage = _groups_by_stage(source)
    if not by_stage:
        raise _no_optimizer(source, file)
    alike = len({len(groups) for groups in by_stage.values()}) == 1
    out: dict[Any, tuple[ParamGroup, dict[str, None]]] = {}
    for _, groups in sorted(by_stage.items()):
        for at, (number, names) in enumerate(sorted(groups.items())):
            group = source.groups[number]
            settings = {k: v for k, v in group.settings.items() if k not in ("lr", "initial_lr")}
            key = at if alike else repr(sorted(settings.items()))
            if wanted.permuted:
                names = _unpermuted(names, source.mesh.partitions)
            out.setdefault(key, (group, {}))[1].update(dict.fromkeys(names))
    for _, names in out.values():
        one_value(names, source.group_of, "hyper-parameters", file)
    return [NamedGroup(group, tuple(names)) for group, names in out.values()]


def _no_optimizer(source: Manifest, file: str) -> StateMismatchError:
    found = "none; or states by position, as stage 0 keeps them"
    fix = (
        "convert a checkpoint that was saved with its optimizer; files of stage 0 without "
        "a manifest: load them into an engine, which knows the order of its groups, and save"
    )
    if source.keeper == Keeper.WEIGHTS:
        found = "weights alone"
        fix = "an engine loads this folder as it is; import-hf writes native files of it"
    return StateMismatchError(
        "the checkpoint holds no optimizer",
        file=file,
        expected="parameter groups",
        found=found,
        fix=fix,
        id="no-optimizer",
    )


def _groups_by_stage(source: Manifest) -> dict[int, dict[int, list[str]]]:
    """Names by stage and by number of the group, in the order of the buffers."""
    out: dict[int, dict[int, dict[str, None]]] = {}
    for buffer, member, group in source.stepped():
        groups = out.setdefault(buffer.stage, {})
        groups.setdefault(group, {})[member.param] = None
    return {
        stage: {number: list(names) for number, names in groups.items()}
        for stage, groups in out.items()
    }


def _unpermuted(names: Sequence[str], parts: int) -> list[str]:
    """The client's order of what `round_robin_gradients` permuted."""
    out = [""] * len(names)
    for name, index in zip(names, round_robin(len(names), parts), strict=True):
        out[index] = name
    return out
