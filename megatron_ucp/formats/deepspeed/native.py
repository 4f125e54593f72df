"""DeepSpeed's native checkpoints: which record of which file holds which slot.

The structure is rebuilt from what the files themselves say. A manifest beside them is evidence: it
adds layouts and the order of parameters that stage 0 does not store, and every file is compared
with it.
"""

from collections.abc import Collection, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from megatron_ucp.core.box import Ints
from megatron_ucp.core.flat import FlatBuffer
from megatron_ucp.core.layers import Layers
from megatron_ucp.core.manifest import FILE_NAME, Manifest, ParamSpec
from megatron_ucp.core.plan import Slot
from megatron_ucp.core.rules import RuleSet
from megatron_ucp.core.stages import Stage, check_replicas, join
from megatron_ucp.core.states import MASTER, VALUE
from megatron_ucp.errors import (
    DamagedFileError,
    ForeignFileError,
    ModelMismatchError,
    NotFoundError,
    RuleError,
    UnsupportedError,
)
from megatron_ucp.formats.base import Checkpoint, Extras, Order, Told, Where
from megatron_ucp.formats.deepspeed import frozen
from megatron_ucp.formats.deepspeed.autotp import refuse_autotp
from megatron_ucp.formats.deepspeed.counts import count_ranks
from megatron_ucp.formats.deepspeed.declared import LayoutSource, compared, pipe_names
from megatron_ucp.formats.deepspeed.evidence import compare, group_order
from megatron_ucp.formats.deepspeed.extras import extras_of, layers_of
from megatron_ucp.formats.deepspeed.flattened import flattened
from megatron_ucp.formats.deepspeed.folder import WRONG_STRUCTURE, TagFolder
from megatron_ucp.formats.deepspeed.model_file import shapes_by_group, training_dtype
from megatron_ucp.formats.deepspeed.optimizer_files import (
    Contents,
    OptimizerFile,
    PlainFile,
    reader_for,
)
from megatron_ucp.formats.deepspeed.paths import is_universal, tag_folder, tp_of
from megatron_ucp.formats.deepspeed.pipe_names import PipeNames
from megatron_ucp.formats.deepspeed.plain_values import number
from megatron_ucp.formats.deepspeed.positions import MATCHED, by_position
from megatron_ucp.formats.deepspeed.stage_order import orders_of, wrong_structure
from megatron_ucp.formats.deepspeed.weights import LayerFiles, Weights, WholeModel
from megatron_ucp.formats.deepspeed.whole import check_file
from megatron_ucp.formats.pt.unpickler import ITEMSIZE, TensorRef


class NativeCheckpoint(TagFolder):
    """One opened tag folder. `order` names the parameters of each group for stage-0 files that have
    no manifest; with `positions_too` such a file is read without its optimizer, whose states it
    keeps by position only. `specs` declare whole shapes and layouts, which a tensor-parallel
    checkpoint without a manifest needs; `names` the canonical names of a pipeline's parameters,
    which one of a pipeline without a manifest needs. `rules` declare both; those that contradict a
    manifest are an error.

    Raises a UcpError for anything that its directories and pickles can show: a missing, truncated,
    foreign or hostile file. Tensor bytes are not read.
    """

    def __init__(
        self,
        path: str | Path,
        tag: str | None = None,
        order: Order | None = None,
        positions_too: bool = False,
        specs: Mapping[str, ParamSpec] | None = None,
        names: Mapping[str, str] | None = None,
        rules: RuleSet | None = None,
    ) -> None:
        super().__init__(tag_folder(path, tag))
        if is_universal(self.folder):
            raise UnsupportedError(
                "this is a universal folder, not a native one",
                file=self.folder,
                fix="open_checkpoint reads it",
            )
        self._specs = specs
        self._names = names or {}
        self._rules = rules
        self._used: dict[tuple[int, int], int] = {}
        with ExitStack() as undo:
            undo.callback(self.close)
            try:
                self._read(order, positions_too)
            except WRONG_STRUCTURE as error:
                raise DamagedFileError(
                    "the checkpoint has another structure than its keys promise",
                    file=self.folder,
                    found=f"{type(error).__name__}: {str(error)[:200]}",
                ) from error
            undo.pop_all()

    # ------------------------------------------------ structure

    def _read(self, order: Order | None, positions_too: bool) -> None:
        recorded = self.recorded
        self.model_name = self.names.model.get((None, 0)) or self.names.model.get((0, 0)) or ""
        self.main_file = self.full_path(self.model_name)
        self.meta: Mapping[str, Any] = self.tree(self.model_name)
        self.pipeline = bool(self.names.layers) or self.meta.get("module", {}) is None
        self.counts = count_ranks(self, self.model_name, self.pipeline)
        if recorded is not None:
            self._specs, self._names = recorded.by_name, recorded.names
        elif not self._names and self.pipeline and self._rules is not None and self._rules.pipeline:
            self._names = pipe_names(self, self.first_of_stages, self._rules)
        self.weights: Weights = self._weights()
        refuse_autotp(self)
        self.declared = self._layout_source()
        self._formats: list[OptimizerFile] = []
        self.stages = self._stages(order, positions_too)
        joined = join([Stage((), found.buffers, found.groups) for found in self.stages])
        self.contents = replace(
            self.stages[0],
            buffers=joined.buffers,
            groups=joined.groups,
            indices=tuple(index for found in self.stages for index in found.indices),
        )
        self.manifest: Manifest = self._with_evidence(self._derived(), recorded)

    def _layout_source(self) -> LayoutSource:
        """Raises UnsupportedError where nothing says how tensor-parallel parameters are cut."""
        patterns: Any = self.meta.get("universal_checkpoint_info")
        found = LayoutSource(
            self.counts.mesh,
            self.main_file,
            self._specs,
            self._rules,
            patterns if isinstance(patterns, dict) else None,
            {name: pipe for pipe, name in self._names.items()},
        )
        if self.counts.tp > 1 and found.silent:
            raise UnsupportedError(
                "a tensor-parallel checkpoint without a manifest needs a family or rules",
                file=self.folder / self.model_name,
                found=f"mp_world_size {self.counts.tp}",
                fix="load it into an engine that was attached with family=; or give --rules, which "
                "`megatron-ucp rules` drafts",
            )
        return found

    def _with_evidence(self, derived: Manifest, recorded: Manifest | None) -> Manifest:
        """The recorded manifest, once it is known not to contradict the files; else what the files
        say. Raises ForeignFileError, RuleError, ModelMismatchError."""
        check_replicas(derived, PipeNames(self._names).tied, str(self.folder))
        if recorded is None:
            return derived
        compare(recorded, derived, self.folder / FILE_NAME)
        if self._rules is not None:
            recorded = compared(recorded, self._rules, str(self.folder / FILE_NAME))
        # An elastic file holds no hyper-parameters: there the manifest is the only evidence.
        if not any(group.settings for group in derived.groups):
            return recorded
        groups = tuple(
            replace(found, optimizer=said.optimizer)
            for found, said in zip(derived.groups, recorded.groups, strict=True)
        )
        return replace(recorded, groups=groups)

    def _weights(self) -> Weights:
        tp = self.counts.tp
        if not self.pipeline:
            return WholeModel(self, {rank: self.model_of(rank) for rank in range(tp)})
        if not self._names:
            raise UnsupportedError(
                "a pipeline checkpoint without a manifest needs a family or rules",
                file=self.folder / self.model_name,
                found=f"{self.counts.stages} stages",
                fix="load it into an engine that was attached with family=; or give --rules with "
                "[[pipeline]] entries, which `megatron-ucp rules` drafts",
            )
        return LayerFiles(self, PipeNames(self._names), tp)

    def _stages(self, order: Order | None, positions_too: bool) -> list[Contents]:
        """The optimizer of every stage, as the files of its first tensor-parallel rank say. Each
        numbers from 0."""
        recorded, out, orders = self.recorded, list[Contents](), orders_of(self, order)
        for stage in range(self.counts.stages):
            mp = stage * self.counts.tp
            wanted = orders[stage] if recorded is None else group_order(recorded, stage)
            tree, file = self.optimizer_of(mp)
            unnamed = not self.names.optimizer and wanted is None and positions_too
            if tree is None or unnamed:
                self._formats.append(PlainFile(self._weight_dtype))
                out.append(Contents("none", (), (), {}, ()))
            else:
                self._formats.append(reader_for(tree, file, self._weight_dtype))
                out.append(self.read_contents(tree, file, wanted, mp))
            if out[0].engine != out[-1].engine:
                raise ForeignFileError(
                    "the stages of the pipeline have different kinds of optimizers",
                    file=file,
                    expected=out[0].engine,
                    found=out[-1].engine,
                )
        return out

    @property
    def first_of_stages(self) -> list[str]:
        """The model file of each stage's first tensor-parallel rank."""
        return [self.model_of(stage * self.counts.tp) for stage in range(self.counts.stages)]

    def optimizer_of(self, mp: int) -> tuple[Any, str]:
        """The optimizer's state dict of a model-parallel rank (of its first partition), and its
        file."""
        if not self.names.optimizer:
            name = self.model_of(mp)
            return self.tree(name).get("optimizer"), self.full_path(name)
        return self.optimizer_tree(0, mp), self.full_path(self.names.optimizer[0, mp])

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
        return cast("Any", tree)

    def read_contents(self, tree: Any, file: str, order: Order | None, mp: int = 0) -> Contents:
        """One optimizer file of the model-parallel rank `mp`, with canonical names."""
        reader = self._formats[mp // self.counts.tp]
        try:
            named = flattened(self, tree, file, order, mp)
            return reader.contents(
                tree, named, self.counts.partitions, file, lambda ref: self.scalar(file, ref)
            )
        except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
            raise wrong_structure(error, file) from error

    def shape_of(self, module: Mapping[str, Any], name: str) -> Ints:
        ref = module.get(name)
        if not isinstance(ref, TensorRef):
            raise ForeignFileError(
                "the model of the engine has a parameter that the checkpoint lacks",
                parameter=name,
                file=self.main_file,
                found=f"{len(module)} other tensors",
                fix="build the model with the configuration that the checkpoint was trained with",
            )
        return ref.shape

    def format_of(self, stage: int) -> OptimizerFile:
        """How the files of a stage keep its optimizer."""
        return self._formats[stage]

    def _weight_dtype(self, name: str) -> str:
        return self.weights.module()[name].storage.dtype

    def model_of(self, mp: int, part: int = 0) -> str:
        """Name of the model file of a model-parallel rank (at ZeRO-3 of one partition)."""
        found = self.names.model.get((None, mp)) or self.names.model.get((part, mp))
        if found is None:
            raise NotFoundError(
                "a model file is missing",
                file=self.folder,
                found="no file",
                expected=f"partition {part}, model-parallel rank {mp}",
                fix="restore it, or load another tag",
            )
        return found

    def _derived(self) -> Manifest:
        """The manifest that follows from the files alone."""
        found = self.contents
        module = self.weights.module()
        members = [member.param for buffer in found.buffers for member in buffer.members]
        flat = dict.fromkeys(members)
        shapes = self._flat_shapes()
        dtype = training_dtype(self.meta, module, shapes)
        ties = self.weights.ties(flat)
        # in a plain optimizer's file the weights are the masters, of whatever dtype the model is
        plain = any(isinstance(reader, PlainFile) for reader in self._formats)
        params = [
            self._spec(
                name,
                shapes[name] if name in shapes else self.shape_of(module, name),
                self._weight_dtype(name) if plain else dtype,
                "trainable",
            )
            for name in flat
        ]
        values = self._values(module, {*flat, *(alias for tie in ties for alias in tie.aliases)})
        mesh = replace(self.counts.mesh, zero=self._zero_stage(found))
        run = {
            key: number(self.meta.get(key))
            for key in ("global_steps", "skipped_steps", "ds_version")
        }
        return Manifest(
            found.engine,
            mesh,
            (*params, *(spec for spec, _ in values)),
            (*found.buffers, *(buffer for _, buffer in values)),
            found.groups,
            ties,
            names=self._names if self.pipeline else {},
            run=run,
        )

    def _flat_shapes(self) -> dict[str, Ints]:
        """Rank-local shapes of what is flattened, as the model files of all stages say."""
        out: dict[str, Ints] = {}
        for file in self.first_of_stages:
            for named in shapes_by_group(self.tree(file)) or []:
                out |= {self.weights.name_of(name, file): shape for name, shape in named.items()}
        return out

    def _values(
        self, module: Mapping[str, Any], known: set[str]
    ) -> list[tuple[ParamSpec, FlatBuffer]]:
        """Frozen parameters and module buffers, one flat buffer for each."""
        buffer_names = {
            self.weights.name_of(name, file)
            for file in self.first_of_stages
            for name in self.tree(file).get("buffer_names") or []
        }
        found = frozen.values(
            self.meta,
            module,
            buffer_names,
            known,
            self.counts.partitions if self.contents.engine == "zero3" else None,
            lambda name: self._fragment(name, 0),
            self.main_file,
        )
        return [
            (self._spec(name, shape, buffer.states[0][1], kind), buffer)
            for name, shape, kind, buffer in found
        ]

    def _spec(self, name: str, local: Ints, dtype: str, kind: str) -> ParamSpec:
        """The parameter with the declared layout, whose share of one rank must have the shape in
        the file."""
        declared = self.declared.find(name, local, kind)
        # at tp=1 another shape is an error of the comparison with the target
        other = self.counts.tp == 1 and (declared is None or declared.shape != local)
        if other or (declared is None and kind == "buffer"):
            return ParamSpec(name, local, dtype, kind)
        if declared is None:
            raise RuleError(
                "a tensor-parallel parameter of the checkpoint is not declared",
                parameter=name,
                file=self.main_file,
                expected="a parameter of the family",
                found="none",
                fix="build the model as the run that wrote the checkpoint did",
            )
        shares = self.counts.mesh.shares()
        share = declared.layout.local_shape(name, declared.shape, shares)
        if share != local:
            raise ModelMismatchError(
                "the checkpoint's share of a parameter is not what its layout says",
                parameter=name,
                file=self.main_file,
                found=local,
                expected=f"{share} of {declared.shape} at tp={self.counts.tp}",
            )
        return replace(declared, dtype=dtype, kind=kind)

    def _zero_stage(self, found: Contents) -> int:
        if found.engine == "zero12":
            return 2 if self.optimizer_tree(0)["zero_stage"] == 2 else 1
        return {"zero3": 3, "bf16": 1}.get(found.engine, 0)

    def _fragment(self, name: str, part: int, tp: int = 0) -> Any:
        """One partition of a frozen parameter, as ZeRO-3 keeps it."""
        held = self.tree(self.model_of(tp, part)).get("frozen_param_fragments") or {}
        return held.get(name)

    # ------------------------------------------------ what the operations ask for

    @property
    def notes(self) -> list[str]:
        return [*self.declared.notes, *([MATCHED] if by_position(self) else [])]

    def read_extras(self) -> Extras:
        return extras_of(self)

    def layers(self) -> Layers | None:
        return layers_of(self) if self.pipeline else None

    def check(self, name: str, allow: Collection[str] = (), optimizer: bool = True) -> None:
        check_file(self, name, allow, optimizer)

    def where(self, slot: Slot) -> Where:
        """Place of a slot. Raises DamagedFileError or ForeignFileError where the file disagrees
        with the structure."""
        buffer = self.manifest.buffers[slot.buffer]
        ref, name = self._ref(slot, buffer)
        if not isinstance(ref, TensorRef):
            raise ForeignFileError(
                f"a file lacks the state {slot.state} that the first file has",
                file=self.full_path(name),
                parameter=buffer.members[0].param if buffer.members else None,
                expected=f"{buffer.partition_elems} elements",
                found=type(ref).__name__,
            )
        used = self._used_elems(slot.buffer, slot.part)
        dtype = dict(buffer.states)[slot.state]
        fits = used <= ref.numel <= buffer.partition_elems
        if not ref.is_contiguous or ref.storage.dtype != dtype or not fits:
            raise ForeignFileError(
                f"the state {slot.state} has another size or type than the run's structure says",
                file=self.full_path(name),
                parameter=buffer.members[0].param if buffer.members else None,
                expected=f"{used} to {buffer.partition_elems} contiguous elements of {dtype}",
                found=f"{ref.shape} of {ref.storage.dtype}",
            )
        file = self.file(name)
        return Where(
            file, file.record(ref.storage), ref.offset_elems * ITEMSIZE[dtype], ref.numel, dtype
        )

    def _used_elems(self, buffer: int, part: int) -> int:
        """Elements of a partition up to the end of its last parameter. Kept: every place of a
        checkpoint asks for it."""
        if (buffer, part) not in self._used:
            fragments = self.manifest.buffers[buffer].fragments(part)
            self._used[buffer, part] = max(
                (f.offset + f.high - f.low for f in fragments), default=0
            )
        return self._used[buffer, part]

    def _ref(self, slot: Slot, buffer: FlatBuffer) -> tuple[Any, str]:
        """The tensor of a slot as its file has it, and the name of the file."""
        param = buffer.members[0].param if buffer.members else ""
        tp = tp_of(slot.cut)
        if slot.state == VALUE:
            if buffer.rule == "each":
                return self._fragment(param, slot.part, tp), self.model_of(tp, slot.part)
            return self.weights.module(tp).get(param), self.weights.file_of(param, tp)
        reader = self._formats[buffer.stage]
        mp = buffer.stage * self.counts.tp + tp
        index = self.contents.indices[slot.buffer]
        if self.names.optimizer:
            tree, file = self.optimizer_tree(slot.part, mp), self.names.optimizer[slot.part, mp]
        elif slot.state == MASTER and isinstance(reader, PlainFile):
            return self.weights.module(tp).get(param), self.weights.file_of(param, tp)
        else:
            tree, file = self.tree(self.model_of(mp))["optimizer"], self.model_of(mp)
        return reader.element(tree, index, slot.state), file


class NativeFormat:
    """DeepSpeed's own files: what no other format recognises."""

    def recognises(self, folder: Path) -> bool:
        return True

    def open(self, folder: Path, told: Told) -> Checkpoint:
        return NativeCheckpoint(
            folder, None, told.order, told.order is None, told.specs, told.names, told.rules
        )
