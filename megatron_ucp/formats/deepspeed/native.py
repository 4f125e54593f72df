"""DeepSpeed's native checkpoints: which record of which file holds which slot.

The structure is rebuilt from what the files themselves say. A manifest beside them is evidence: it
adds layouts and the order of parameters that stage 0 does not store, and every file is compared
with it.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from megatron_ucp.core.experts import PartitionRanks
from megatron_ucp.core.join_ranks import check_replicas
from megatron_ucp.core.layers import Layers
from megatron_ucp.core.manifest import FILE_NAME, RENAMED, Manifest
from megatron_ucp.core.plan import Slot
from megatron_ucp.errors import UnsupportedError
from megatron_ucp.formats import expect
from megatron_ucp.formats.byte_files import Where
from megatron_ucp.formats.checkpoint import CallerModel, Checkpoint, Extras
from megatron_ucp.formats.deepspeed.by_position import MATCHED, by_position
from megatron_ucp.formats.deepspeed.checks import TrainedWeights, check_file, trained_weights
from megatron_ucp.formats.deepspeed.expected_files import (
    count_ranks,
    first_model_file,
    is_partitioned,
    require_expert_files,
    require_layer_files,
)
from megatron_ucp.formats.deepspeed.experts import ExpertFiles, WithExperts
from megatron_ucp.formats.deepspeed.extras import extras_of, layers_of
from megatron_ucp.formats.deepspeed.files import (
    TagFiles,
    TagFolder,
    is_universal,
    without_sequence_ranks,
)
from megatron_ucp.formats.deepspeed.layout_sources import LayoutSource, compared, pipe_names
from megatron_ucp.formats.deepspeed.lost_states import refuse_mics, refuse_unusable, said_of
from megatron_ucp.formats.deepspeed.manifest import compare, held_of, manifest_of
from megatron_ucp.formats.deepspeed.per_rank import differs_in, held_by
from megatron_ucp.formats.deepspeed.run import (
    NamedWeights,
    OpenedFiles,
    Optimizers,
    RunRanks,
    SlotPlaces,
    after,
)
from megatron_ucp.formats.deepspeed.tp_patterns import is_uneven, order_of
from megatron_ucp.formats.deepspeed.weights import (
    LayerFiles,
    PipeNames,
    StageModels,
    Weights,
    WholeModel,
    said_of_side_data,
)
from megatron_ucp.formats.folder import Folder
from megatron_ucp.formats.per_rank import PER_RANK, OwnValues, PerRank

_WEIGHTS_ALONE = "the weights alone were looked at, as allowed: master weights begin as these"


class NativeCheckpoint(TagFolder):
    """One opened tag folder. `told` is what the caller knows and files may not say: the order of
    the parameters in files of stage 0 without a manifest (with `positions_too` such a file is read
    without its optimizer), whole shapes, layouts, names of a pipeline. Rules that contradict a
    manifest are an error.

    Raises a UcpError for anything that its directories and pickles can show: a missing, truncated,
    foreign or hostile file. Tensor bytes are not read.
    """

    def __init__(
        self,
        folder: Folder,
        told: CallerModel | None = None,
        positions_too: bool = False,
    ) -> None:
        told = told or CallerModel()
        super().__init__(folder, told.classes, told.weights)
        with self.closed_on_failure():
            if told.weights:
                told = self._told_of_weights(told)
            if is_universal(self.folder):
                raise UnsupportedError(
                    "this is a universal folder, not a native one",
                    file=self.folder,
                    fix="open_checkpoint reads it",
                )
            named = _named(_ranks(self._opened(told)))
            held = held_of(named, positions_too)
            self.known = after(held, SlotPlaces, manifest=_with_evidence(held, manifest_of(held)))
            self.manifest: Manifest = self.known.manifest
            self.known.declared.check_patterns()

    def _told_of_weights(self, told: CallerModel) -> CallerModel:
        """What is known of the weights alone: of what a manifest says layouts and names, as the
        rest of it is about an optimizer that nobody looks at. Raises UnsupportedError at ZeRO-3."""
        if is_partitioned(self.names):
            raise UnsupportedError(
                "at ZeRO-3 the weights lie in the optimizer's files, so that they can't be loaded "
                "without these",
                file=self.folder,
                expected="ZeRO-0 to ZeRO-2",
                found="a model file of each partition",
                fix='restore the files and leave "weights" out, or load another tag',
            )
        said, self.evidence.manifest = self.evidence.manifest, None
        if said is None:
            return told
        renamed: Any = said.run.get(RENAMED) or {}
        return replace(told, specs=said.by_name, names=said.names, renamed=renamed)

    def _opened(self, told: CallerModel) -> OpenedFiles:
        """With the first model file, which says what kind of run wrote the others."""
        name = first_model_file(self.names)
        self.main_file = self.full_path(name)
        meta: Mapping[str, Any] = self.tree(name)
        if meta.get("mp_world_size") == 1:
            self.names = without_sequence_ranks(self.names)
        refuse_mics(meta.get("ds_config"), self.main_file)
        return OpenedFiles(self, told, self.names, name, meta, is_pipeline(self.names, meta))

    # ------------------------------------------------ what the operations ask for

    @property
    def notes(self) -> list[str]:
        positions = [MATCHED] if by_position(self.known) else []
        declared = self.known.declared.notes
        alone = [_WEIGHTS_ALONE] if self.known.told.weights else []
        side = said_of_side_data(self.known.weights.side_data())
        told = (*self.path_notes, *alone, *declared, *positions)
        return [*told, *said_of(self.manifest), *side]

    def read_extras(self) -> Extras:
        return extras_of(self.known)

    def layers(self) -> Layers | None:
        return layers_of(self.known) if self.known.pipeline else None

    def copies(self) -> TrainedWeights | None:
        return trained_weights(self.known)

    def check(self, name: str, allow: Collection[str] = (), optimizer: bool = True) -> None:
        # before any comparison of this rank's files: the cause, not what follows from it
        refuse_unusable(self.manifest, self.main_file, allow)
        check_file(self.known, name, allow, optimizer)

    @property
    def _ranks_have_files(self) -> bool:
        """Whether model files alone show what differs from rank to rank: at ZeRO-3 all have one."""
        said = self.recorded is not None and PER_RANK in self.recorded.run
        return self.manifest.mesh.zero == 3 and not said

    def differs(self, name: str) -> PerRank:
        return differs_in(self.known, name) if self._ranks_have_files else super().differs(name)

    def of_rank(self, rank: int) -> OwnValues:
        return held_by(self.known, rank) if self._ranks_have_files else super().of_rank(rank)

    def where(self, slot: Slot) -> Where:
        return self.known.where(slot)


def _ranks(step: OpenedFiles) -> RunRanks:
    experts = ExpertFiles(step.files)
    mesh, partitions = count_ranks(step, experts)
    info: Any = step.meta.get("universal_checkpoint_info")
    if step.recorded is not None:
        uneven = any(buffer.share for buffer in step.recorded.buffers)
    else:  # AutoTP gives some ranks larger shares
        uneven = mesh.tp > 1 and not step.pipeline and is_uneven(info, step.main_file)
    out = after(
        step,
        RunRanks,
        experts=experts,
        mesh=mesh,
        spread=PartitionRanks.on(mesh, partitions),
        uneven=uneven,
        places=mesh.holding(uneven),
    )
    require_expert_files(out)
    require_layer_files(out)
    return out


def _named(step: RunRanks) -> NamedWeights:
    recorded, rules = step.recorded, step.told.rules
    names = step.told.names or {}
    if recorded is not None:
        names = recorded.names
    elif not step.pipeline:
        names = {}  # who knows them need not know what kind of run it was
    elif not names and rules is not None and rules.pipeline:
        names = pipe_names(step.files, step.first_of_stages, rules)
    weights: Weights = _weights(step, names)
    if step.names.experts:
        weights = WithExperts(weights, step.experts, step.mesh, weights.name_of)
    return after(
        step, NamedWeights, pipe_names=names, weights=weights, declared=_layout_source(step, names)
    )


def _weights(step: RunRanks, names: Mapping[str, str]) -> Weights:
    """Without the experts that lie in files of their own."""
    mesh = step.mesh
    if not step.pipeline:
        files = {rank: step.model_of(rank) for rank in range(mesh.tp)}
        return WholeModel(step.files, files, _renamed(step))
    if not names:
        raise UnsupportedError(
            "a pipeline checkpoint without a manifest needs a family or rules",
            file=step.main_file,
            found=f"{mesh.pp} stages",
            fix="give --rules (Python: rules=) a file with [[pipeline]] entries "
            "(docs/reference/rules.md); or load it into an engine that was attached with a family",
            id="layout-unknown",
        )
    if step.names.layers or step.meta.get("module") is None:
        return LayerFiles(step.files, PipeNames(names), mesh.tp)
    places = [(stage, rank) for stage in range(mesh.pp) for rank in range(mesh.tp)]
    models = {(s, t): step.model_of(s * mesh.tp + t) for s, t in places}
    return StageModels(step.files, PipeNames(names), models)


def _renamed(step: RunRanks) -> Mapping[str, str]:
    """Names of entries of the weights -> those of the model, as the run said, or the caller."""
    said: Any = step.told.renamed if step.recorded is None else step.recorded.run.get(RENAMED)
    if not isinstance(said, dict):
        return {}
    expect.texts([*said, *said.values()], RENAMED, step.files.folder / FILE_NAME)
    return said


def _layout_source(step: RunRanks, names: Mapping[str, str]) -> LayoutSource:
    """Raises UnsupportedError where nothing says how tensor-parallel parameters are cut."""
    patterns: Any = step.meta.get("universal_checkpoint_info")
    found = LayoutSource(
        step.mesh,
        step.main_file,
        step.told.specs if step.recorded is None else step.recorded.by_name,
        step.told.rules,
        patterns if isinstance(patterns, dict) else None,
        {name: pipe for pipe, name in names.items()},
        order_of(step.meta.get("args")),
    )
    if step.mesh.tp > 1 and found.silent:
        raise UnsupportedError(
            "a tensor-parallel checkpoint without a manifest needs a family or rules",
            file=step.main_file,
            found=f"mp_world_size {step.mesh.tp}",
            fix="give --rules FILE (Python: rules=; docs/reference/rules.md), for which "
            "`megatron-ucp inspect --all` lists names and shapes; or load it into an engine that "
            "was attached with a family",
            id="layout-unknown",
        )
    return found


def _with_evidence(step: Optimizers, derived: Manifest) -> Manifest:
    """The recorded manifest, once it is known not to contradict the files; else what the files
    say. Raises ForeignFileError, RuleError, ModelMismatchError."""
    recorded, file = step.recorded, step.files.folder / FILE_NAME
    check_replicas(derived, PipeNames(step.pipe_names).tied, str(step.files.folder))
    if recorded is None:
        return derived
    compare(recorded, derived, file)
    if step.told.rules is not None:
        recorded = compared(recorded, step.told.rules, str(file))
    # An elastic file holds no hyper-parameters: there the manifest is the only evidence.
    if not any(group.settings for group in derived.groups):
        return recorded
    groups = tuple(
        replace(found, optimizer=said.optimizer, steps_as=said.steps_as)
        for found, said in zip(derived.groups, recorded.groups, strict=True)
    )
    return replace(recorded, groups=groups)


def is_pipeline(names: TagFiles, meta: Mapping[str, Any]) -> bool:
    """Whether the files are of a pipeline's stages: there are files of its layers, or the model
    file says so (one with experts has no layer files)."""
    degrees = meta.get("checkpoint_parallel_dimensions")
    stages: Any = degrees.get("pp_degree") if isinstance(degrees, dict) else 1
    staged = type(stages) is int and stages > 1
    return bool(names.layers) or meta.get("module", {}) is None or staged


class NativeFormat:
    """DeepSpeed's own files: what no other format recognises."""

    def recognises(self, folder: Folder) -> bool:
        return True

    def open(self, folder: Folder, told: CallerModel) -> Checkpoint:
        return NativeCheckpoint(folder, told, told.order is None)
