"""DeepSpeed's native checkpoints: which record of which file holds which slot.

The structure is rebuilt from what the files themselves say. A manifest beside them is evidence: it
adds layouts and the order of parameters that stage 0 does not store, and every file is compared
with it.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from megatron_ucp.core.box import Ints
from megatron_ucp.core.flat import FlatBuffer, Member
from megatron_ucp.core.manifest import FILE_NAME, Manifest, ParamSpec
from megatron_ucp.core.mesh import Mesh
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
from megatron_ucp.formats.base import Where
from megatron_ucp.formats.deepspeed.declared import Declared, compared, pipe_names
from megatron_ucp.formats.deepspeed.evidence import compare, group_order
from megatron_ucp.formats.deepspeed.folder import STRUCTURE, TagFolder
from megatron_ucp.formats.deepspeed.model_file import shapes_by_group, training_dtype
from megatron_ucp.formats.deepspeed.optimizer_files import (
    Contents,
    OptimizerFiles,
    Plain,
    number,
    reader_for,
)
from megatron_ucp.formats.deepspeed.paths import is_universal, resolve
from megatron_ucp.formats.deepspeed.pipe_names import PipeNames
from megatron_ucp.formats.deepspeed.stage_order import group_sizes, of_stages
from megatron_ucp.formats.deepspeed.weights import LayerFiles, Weights, WholeModel, no_extra_state
from megatron_ucp.formats.pt.unpickler import ITEMSIZE, TensorRef

Order = Sequence[
    Sequence[str]
]  # names of each parameter group's trainable parameters, in the optimizer's order

# What DeepSpeed itself puts into the model file; every other key is the user's client state.
OWN_KEYS = frozenset(
    {
        "module",
        "buffer_names",
        "optimizer",
        "param_shapes",
        "frozen_param_shapes",
        "shared_params",
        "frozen_param_fragments",
        "lr_scheduler",
        "data_sampler",
        "random_ltd",
        "skipped_steps",
        "global_steps",
        "global_samples",
        "dp_world_size",
        "mp_world_size",
        "checkpoint_parallel_dimensions",
        "ds_config",
        "ds_version",
        "num_experts",
        "ds_autoep_layers",
        "universal_checkpoint_info",
        "folding",
        "sparse_tensor_module_names",
    }
)
# What torch's schedulers keep once per parameter group; the stages of a pipeline may have different
# groups.
PER_GROUP = frozenset(
    {"base_lrs", "_last_lr", "lr_lambdas", "min_lrs", "max_lrs", "base_momentums"}
)


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
        super().__init__(resolve(path, tag))
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
            except STRUCTURE as error:
                raise DamagedFileError(
                    "the checkpoint has another structure than its keys promise",
                    file=self.folder,
                    found=f"{type(error).__name__}: {str(error)[:200]}",
                ) from error
            undo.pop_all()

    # ---------------------------------------------------------------- structure

    def _read(self, order: Order | None, positions_too: bool) -> None:
        recorded = self.recorded.manifest
        self.model_name = self.names.model.get((None, 0)) or self.names.model.get((0, 0)) or ""
        self.meta: Mapping[str, Any] = self.tree(self.model_name)
        self.partitions = self._partitions()
        self.pipeline = bool(self.names.layers) or self.meta.get("module", {}) is None
        self.pipeline_stages, self.tensor_parallel = self._degrees()
        if recorded is not None:
            self._specs, self._names = recorded.by_name, recorded.names
        elif not self._names and self.pipeline and self._rules is not None and self._rules.pipeline:
            self._names = pipe_names(self, self.first_of_stages, self._rules)
        self.weights: Weights = self._weights()
        info: Any = self.meta.get("universal_checkpoint_info")
        self.declared = Declared(
            self.tensor_parallel,
            self.full_path(self.model_name),
            self._specs,
            self._rules,
            info if isinstance(info, dict) else None,
            {name: pipe for pipe, name in self._names.items()},
        )
        if self.tensor_parallel > 1 and self.declared.silent:
            raise UnsupportedError(
                "a tensor-parallel checkpoint without a manifest needs a family or rules",
                file=self.folder / self.model_name,
                found=f"mp_world_size {self.tensor_parallel}",
                fix="load it into an engine that was attached with family=; or give --rules, which "
                "`megatron-ucp rules` drafts",
            )
        self._format: OptimizerFiles = Plain()
        self.stages = self._stages(order, positions_too)
        joined = join([Stage((), c.buffers, c.groups, c.scalars) for c in self.stages])
        self.first_buffer = joined.first_buffer
        self.contents = replace(
            self.stages[0],
            buffers=joined.buffers,
            groups=joined.groups,
            scalars=joined.scalars,
            indices=tuple(index for c in self.stages for index in c.indices),
        )
        derived = self._manifest(self.contents)
        check_replicas(derived, str(self.folder))
        if recorded is not None:
            compare(recorded, derived, self.folder / FILE_NAME)
            if self._rules is not None:
                recorded = compared(recorded, self._rules, str(self.folder / FILE_NAME))
        # An elastic file holds no hyper-parameters: there the manifest is the only evidence.
        self.manifest: Manifest = (
            derived
            if recorded is None
            else replace(
                recorded, groups=derived.groups if any(derived.groups) else recorded.groups
            )
        )

    def _weights(self) -> Weights:
        if not self.pipeline:
            return WholeModel(self, {tp: self.model_of(tp) for tp in range(self.tensor_parallel)})
        if not self._names:
            raise UnsupportedError(
                "a pipeline checkpoint without a manifest needs a family or rules",
                file=self.folder / self.model_name,
                found=f"{self.pipeline_stages} stages",
                fix="load it into an engine that was attached with family=; or give --rules with "
                "[[pipeline]] "
                "entries, which `megatron-ucp rules` drafts",
            )
        return LayerFiles(self, PipeNames(self._names), self.tensor_parallel)

    def _stages(self, order: Order | None, positions_too: bool) -> list[Contents]:
        """The optimizer of every stage, as the files of its first tensor-parallel rank say. Each
        numbers from 0."""
        recorded, out, orders = self.recorded.manifest, list[Contents](), self._orders(order)
        for stage in range(self.pipeline_stages):
            mp = stage * self.tensor_parallel
            wanted = orders[stage] if recorded is None else group_order(recorded, stage)
            tree, file = self.optimizer_of(mp)
            unnamed = not self.names.optimizer and wanted is None and positions_too
            if tree is None or unnamed:
                out.append(Contents("none", (), (), (), {}, ()))
            else:
                self._format = reader_for(tree, file)
                out.append(self.read_contents(tree, file, wanted, mp))
            if out[0].engine != out[-1].engine:
                raise ForeignFileError(
                    "the stages of the pipeline have different kinds of optimizers",
                    file=file,
                    expected=out[0].engine,
                    found=out[-1].engine,
                )
        return out

    def _orders(self, order: Order | None) -> list[Order | None]:
        """What `order` is for each stage, whose optimizer of stage 0 says only how many parameters
        it keeps."""
        if (
            order is None
            or self.recorded.manifest is not None
            or self.names.optimizer
            or not self.pipeline
        ):
            return [order] * self.pipeline_stages
        trees = [
            self.optimizer_of(stage * self.tensor_parallel) for stage in range(self.pipeline_stages)
        ]
        if any(tree is None for tree, _ in trees):
            return [order] * self.pipeline_stages
        try:
            sizes = [group_sizes(tree) for tree, _ in trees]
        except (KeyError, TypeError, AttributeError) as error:
            raise DamagedFileError(
                "an optimizer file has another structure than its keys promise",
                file=trees[0][1],
                found=f"{type(error).__name__}: {error}",
            ) from error
        module = self.weights.module()
        return [
            *of_stages(
                order,
                PipeNames(self._names),
                [size for size, _ in sizes],
                (lambda name: math.prod(self._shape(module, name))) if sizes[0][1] else lambda _: 1,
                trees[0][1],
            )
        ]

    @property
    def notes(self) -> list[str]:
        """What a reader should know of how parameters are cut."""
        return self.declared.notes

    @property
    def first_of_stages(self) -> list[str]:
        """The model file of each stage's first tensor-parallel rank."""
        return [
            self.model_of(stage * self.tensor_parallel) for stage in range(self.pipeline_stages)
        ]

    def _count(self, key: str) -> int:
        """A number of ranks in the model file; 1 where it says nothing."""
        value = self.meta.get(key)
        if value is not None and (type(value) is not int or not 1 <= value <= 2**24):
            raise DamagedFileError(
                f"the model file says no number of ranks in {key}",
                file=self.full_path(self.model_name),
                expected="a whole number from 1",
                found=repr(number(value))[:80],
            )
        return value or 1

    def _partitions(self) -> int:
        """Number of partitions: as the model file says, and as many optimizer files must be
        there."""
        said = self._count("dp_world_size")
        if not self.names.optimizer:
            return 1
        if len(self.names.prefixes) > 1:
            raise ForeignFileError(
                "optimizer files of two precisions lie in one folder",
                file=self.folder,
                expected="one prefix",
                found=" and ".join(repr(p) for p in self.names.prefixes),
            )
        have, ranks = set(self.names.optimizer), self._count("mp_world_size")
        if missing := next(
            ((p, r) for p in range(said) for r in range(ranks) if (p, r) not in have), None
        ):
            raise NotFoundError(
                "an optimizer file is missing",
                file=self.folder,
                expected=f"{said} partitions",
                found=f"no file of partition {missing[0]}, model-parallel rank {missing[1]}",
                fix="restore it, or load another tag",
            )
        if len(have) != said * ranks:
            raise ForeignFileError(
                "there are more optimizer files than the run had partitions",
                file=self.folder,
                expected=said * ranks,
                found=len(have),
            )
        return said

    def _degrees(self) -> tuple[int, int]:
        """Pipeline stages and tensor-parallel ranks: as the model file says, and as many model
        files must be there."""
        said = self._count("mp_world_size")
        have = {mp for _, mp in self.names.model}
        if len(have) != said or max(have) >= said:
            raise NotFoundError(
                "a model file is missing, or there is one too many",
                file=self.folder,
                expected=f"model-parallel ranks 0 to {said - 1}",
                found=", ".join(map(str, sorted(have))),
                fix="restore the files of one save, or load another tag",
            )
        if not self.pipeline:
            return 1, said
        degrees = self.meta.get("checkpoint_parallel_dimensions")
        tp: Any = degrees.get("tp_degree") if isinstance(degrees, dict) else None
        if tp is None:  # older files: there is a layer file for every tensor-parallel rank
            tp = 1 + max((rank for _, rank in self.names.layers), default=0)
        if type(tp) is not int or tp < 1 or said % tp:
            raise DamagedFileError(
                "the model file does not say how its ranks divide into stages and tensor-parallel "
                "ranks",
                file=self.full_path(self.model_name),
                expected=f"a divisor of {said}",
                found=repr(number(tp))[:80],
            )
        return said // tp, tp

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
        try:
            return self._format.contents(
                tree,
                self._flattened(tree, file, order, mp),
                self.partitions,
                file,
                lambda ref: self.scalar(file, ref),
            )
        except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
            raise DamagedFileError(
                "an optimizer file has another structure than its keys promise",
                file=file,
                found=f"{type(error).__name__}: {error}",
            ) from error

    def _flattened(
        self, tree: Any, file: str, order: Order | None, mp: int
    ) -> list[dict[str, Ints]]:
        """Names and rank-local shapes of each group's parameters in the order in which they are
        flattened."""
        model = self.model_of(mp)
        shapes = shapes_by_group(self.tree(model))
        if self.names.optimizer and isinstance(shapes, list):
            return [
                {self.weights.name_of(name, model): shape for name, shape in named.items()}
                for named in shapes
            ]
        if self.names.optimizer and "param_slice_mappings" in tree:
            # BF16_Optimizer without ZeRO, in a pipeline: what each partition owns names all, in
            # order
            order = [
                list(
                    dict.fromkeys(
                        self.weights.name_of(name, model)
                        for part in range(self.partitions)
                        for name in self.optimizer_tree(part, mp)["param_slice_mappings"][group]
                    )
                )
                for group in range(len(tree["param_slice_mappings"]))
            ]
        elif self.names.optimizer:
            raise DamagedFileError(
                "the model file does not say how parameters are flattened",
                file=self.full_path(model),
                expected="param_shapes",
                found=type(shapes).__name__,
            )
        if order is None:
            raise NotFoundError(
                "a stage-0 checkpoint without a manifest does not name its optimizer's parameters",
                file=file,
                expected=FILE_NAME,
                found="no manifest",
                fix="load it into an engine, which knows the order of its own groups",
            )
        module = self.weights.module(mp % self.tensor_parallel)
        return [{name: self._shape(module, name) for name in names} for names in order]

    def _shape(self, module: Mapping[str, Any], name: str) -> Ints:
        ref = module.get(name)
        if not isinstance(ref, TensorRef):
            raise ForeignFileError(
                "the model of the engine has a parameter that the checkpoint lacks",
                parameter=name,
                file=self.full_path(self.model_name),
                found=f"{len(module)} other tensors",
                fix="build the model with the configuration that the checkpoint was trained with",
            )
        return ref.shape

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

    def _manifest(self, found: Contents) -> Manifest:
        module = self.weights.module()
        flat = {m.param for buffer in found.buffers for m in buffer.members}
        shapes = self._flat_shapes()
        dtype = training_dtype(self.meta, module, shapes)
        ties = self.weights.ties(flat)
        params = [
            self._spec(
                name,
                tuple(shapes[name] if name in shapes else self._shape(module, name)),
                dtype,
                "trainable",
            )
            for name in dict.fromkeys(m.param for buffer in found.buffers for m in buffer.members)
        ]
        values = self._values(
            found, module, {*flat, *(alias for tie in ties for alias in tie.aliases)}
        )
        mesh = Mesh(
            tp=self.tensor_parallel,
            pp=self.pipeline_stages,
            dp=self._count("dp_world_size"),
            zero=self._zero_stage(found),
        )
        return Manifest(
            found.engine,
            mesh,
            (*params, *(spec for spec, _ in values)),
            (*found.buffers, *(b for _, b in values)),
            found.groups,
            (*found.scalars, *({},) * len(values)),
            ties,
            names=self._names if self.pipeline else {},
            run={
                key: number(self.meta.get(key))
                for key in ("global_steps", "skipped_steps", "ds_version")
            },
        )

    def _flat_shapes(self) -> dict[str, Ints]:
        """Rank-local shapes of what is flattened, as the model files of all stages say."""
        out: dict[str, Ints] = {}
        for file in self.first_of_stages:
            for named in shapes_by_group(self.tree(file)) or []:
                out |= {self.weights.name_of(name, file): shape for name, shape in named.items()}
        return out

    def _values(
        self, found: Contents, module: Mapping[str, Any], known: set[str]
    ) -> list[tuple[ParamSpec, FlatBuffer]]:
        """Frozen parameters and module buffers, one flat buffer for each."""
        files = self.first_of_stages
        buffer_names = {
            self.weights.name_of(name, file)
            for file in files
            for name in self.tree(file).get("buffer_names") or []
        }
        frozen = self.meta.get("frozen_param_shapes") or {}
        split, old = found.engine == "zero3", "buffer_names" not in self.meta
        out: list[tuple[ParamSpec, FlatBuffer]] = []
        for name in dict.fromkeys(
            [*(n for n, value in module.items() if not no_extra_state(n, value)), *frozen]
        ):
            if name in known:
                continue
            ref = module.get(name)
            held = isinstance(ref, TensorRef) and ref.numel > 0
            # Older ZeRO-3 files don't name the buffers, which are all that has bytes there, nor
            # keep frozen parameters.
            if split and old and not held and name not in frozen:
                continue
            is_frozen = name not in buffer_names and not (split and old and held)
            cut = split and is_frozen
            shape = (
                tuple(frozen[name])
                if name in frozen
                else ref.shape
                if isinstance(ref, TensorRef)
                else ()
            )
            value = self._frozen_ref(name, 0) if cut else ref
            if not isinstance(value, TensorRef):
                raise DamagedFileError(
                    "the value of a parameter is missing",
                    file=self.full_path(self.model_name),
                    parameter=name,
                )
            size, parts = math.prod(shape), self.partitions if cut else 1
            out.append(
                (
                    self._spec(
                        name, shape, value.storage.dtype, "frozen" if is_frozen else "buffer"
                    ),
                    FlatBuffer(
                        (Member(name, 0, size),),
                        -(-size // parts) if cut else size,
                        parts,
                        "each" if cut else "whole",
                        ((VALUE, value.storage.dtype),),
                    ),
                )
            )
        return out

    def _spec(self, name: str, local: Ints, dtype: str, kind: str) -> ParamSpec:
        """The parameter with the declared layout, whose share of one rank must have the shape in
        the file."""
        declared = self.declared.find(name, local, kind)
        if self.tensor_parallel == 1 and (declared is None or declared.shape != local):
            return ParamSpec(
                name, local, dtype, kind
            )  # another shape is an error of the comparison with the target
        if declared is None and kind == "buffer":
            return ParamSpec(name, local, dtype, kind)
        if declared is None:
            raise RuleError(
                "a tensor-parallel parameter of the checkpoint is not declared",
                parameter=name,
                file=self.full_path(self.model_name),
                expected="a parameter of the family",
                found="none",
                fix="build the model as the run that wrote the checkpoint did",
            )
        share = declared.layout.local_shape(name, declared.shape, {"tp": (self.tensor_parallel, 0)})
        if share != local:
            raise ModelMismatchError(
                "the checkpoint's share of a parameter is not what its layout says",
                parameter=name,
                file=self.full_path(self.model_name),
                found=local,
                expected=f"{share} of {declared.shape} at tp={self.tensor_parallel}",
            )
        return replace(declared, dtype=dtype, kind=kind)

    def _zero_stage(self, found: Contents) -> int:
        if found.engine == "zero3":
            return 3
        if found.engine == "bf16":
            return 1
        if found.engine != "zero12":
            return 0
        return 2 if self.optimizer_tree(0)["zero_stage"] == 2 else 1

    def _frozen_ref(self, name: str, part: int, mp: int = 0) -> Any:
        held = self.tree(self.model_of(mp, part)).get("frozen_param_fragments") or {}
        return held.get(name)

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
        if (
            not ref.is_contiguous
            or ref.storage.dtype != dtype
            or not used <= ref.numel <= buffer.partition_elems
        ):
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

    def stage_of(self, buffer: int) -> int:
        """The stage of a buffer of the optimizer, by its number in the manifest."""
        return max(
            stage
            for stage, first in enumerate(self.first_buffer)
            if first <= buffer and self.stages[stage].buffers
        )

    def _ref(self, slot: Slot, buffer: FlatBuffer) -> tuple[Any, str]:
        param, tp = buffer.members[0].param if buffer.members else "", dict(slot.cut).get("tp", 0)
        if slot.state == VALUE:
            if buffer.partitions > 1 or (self.contents.engine == "zero3" and buffer.rule == "each"):
                return self._frozen_ref(param, slot.part, tp), self.model_of(tp, slot.part)
            return self.weights.module(tp).get(param), self.weights.file_of(param, tp)
        mp = self.stage_of(slot.buffer) * self.tensor_parallel + tp
        index = self.contents.indices[slot.buffer]
        if not self.names.optimizer:
            if slot.state == MASTER and isinstance(self._format, Plain):
                return self.weights.module(tp).get(param), self.weights.file_of(param, tp)
            return self._format.element(
                self.tree(self.model_of(mp))["optimizer"], index, slot.state
            ), self.model_of(mp)
        return self._format.element(
            self.optimizer_tree(slot.part, mp), index, slot.state
        ), self.names.optimizer[slot.part, mp]
