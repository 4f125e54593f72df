"""DeepSpeed's native checkpoints: which record of which file holds which slot.

The structure is rebuilt from what the files themselves say. A manifest beside them is evidence: it adds layouts and the
order of parameters that stage 0 does not store, and every file is compared with it.
"""

import math
import struct
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, cast

from megatron_ucp.core.box import Ints
from megatron_ucp.core.manifest import FILE_NAME, Manifest, ParamSpec
from megatron_ucp.core.mesh import Mesh
from megatron_ucp.core.plan import Slot
from megatron_ucp.core.states import MASTER, VALUE
from megatron_ucp.core.zero import FlatBuffer, Member
from megatron_ucp.errors import DamagedFileError, ForeignFileError, ModelMismatchError, NotFoundError, RuleError, UnsupportedError
from megatron_ucp.formats import stock_info
from megatron_ucp.formats.base import Where
from megatron_ucp.formats.deepspeed_paths import TagFiles, resolve, scan
from megatron_ucp.formats.evidence import compare, group_order
from megatron_ucp.formats.model_file import find_ties, shapes_by_group, training_dtype
from megatron_ucp.formats.optimizer_files import Contents, OptimizerFiles, Plain, number, reader_for
from megatron_ucp.formats.pt_file import PtFile
from megatron_ucp.formats.recorded import Recorded
from megatron_ucp.formats.safe_pickle import ITEMSIZE, TensorRef

Order = Sequence[Sequence[str]]  # names of each parameter group's trainable parameters, in the optimizer's order

# What DeepSpeed itself puts into the model file; every other key is the user's client state.
OWN_KEYS = frozenset({
    "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params",
    "frozen_param_fragments", "lr_scheduler", "data_sampler", "random_ltd", "skipped_steps", "global_steps",
    "global_samples", "dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions", "ds_config", "ds_version",
    "num_experts", "ds_autoep_layers", "universal_checkpoint_info", "folding", "sparse_tensor_module_names"})
_SCALARS = {"float32": "<f", "float64": "<d", "int64": "<q", "int32": "<i", "bool": "<?"}


class NativeCheckpoint:
    """One opened tag folder. `order` names the parameters of each group for stage-0 files that have no manifest; with
    `positions_too` such a file is read without its optimizer, whose states it keeps by position only. `specs` declare
    whole shapes and layouts; a tensor-parallel checkpoint without a manifest needs them.

    Raises a UcpError for anything that its directories and pickles can show: a missing, truncated, foreign or hostile
    file. Tensor bytes are not read. Usable as a context manager; closes its files.
    """

    def __init__(self, path: str | Path, tag: str | None = None, order: Order | None = None,
                 positions_too: bool = False, specs: Mapping[str, ParamSpec] | None = None) -> None:
        self.folder = resolve(path, tag)
        self.names: TagFiles = scan(self.folder)
        self._specs = specs
        self.notes: list[str] = []
        self._closing = ExitStack()
        self._open: dict[str, PtFile] = {}
        self._trees: dict[str, Any] = {}
        with ExitStack() as undo:
            undo.callback(self.close)
            self._read(order, positions_too)
            undo.pop_all()

    def __enter__(self) -> "NativeCheckpoint":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._closing.close()
        self._open.clear()

    # ---------------------------------------------------------------- structure

    def _read(self, order: Order | None, positions_too: bool) -> None:
        self.recorded = Recorded(self.folder, self.names.names)
        self._closing.callback(self.recorded.close)
        recorded = self.recorded.manifest
        self.model_name = self.names.model.get((None, 0)) or self.names.model.get((0, 0)) or ""
        self.meta: Mapping[str, Any] = self.tree(self.model_name)
        self.partitions = self._partitions()
        self.tensor_parallel = self._tensor_parallel()
        if recorded is not None:
            self._specs = recorded.by_name
        if self.tensor_parallel > 1 and self._specs is None and self.meta.get("universal_checkpoint_info"):
            self._declare_by_stock(self.meta["universal_checkpoint_info"])
        if self.tensor_parallel > 1 and self._specs is None:
            raise UnsupportedError("a tensor-parallel checkpoint without a manifest needs a family",
                                   file=self.folder / self.model_name, found=f"mp_world_size {self.tensor_parallel}",
                                   fix="load it into an engine that was attached with family=")
        if recorded is not None and order is None:
            order = group_order(recorded)
        tree, file = self._first_optimizer()
        self._format: OptimizerFiles = Plain()
        unnamed = not self.names.optimizer and order is None and positions_too
        if tree is None or unnamed:
            found = Contents("none", (), (), (), {}, ())
        else:
            self._format = reader_for(tree, file)
            found = self.read_contents(tree, file, order)
        self.contents = found
        derived = self._manifest(found)
        if recorded is not None:
            compare(recorded, derived, self.folder / FILE_NAME)
        # An elastic file holds no hyper-parameters: there the manifest is the only evidence.
        self.manifest: Manifest = derived if recorded is None else replace(
            recorded, groups=derived.groups if any(derived.groups) else recorded.groups)

    def _declare_by_stock(self, info: Any) -> None:
        """Layouts as stock DeepSpeed's converter would take them; `notes` says where only its default spoke."""
        shapes: dict[str, Ints] = {name: value.shape for name, value in self.module().items() if isinstance(value, TensorRef)}
        for named in shapes_by_group(self.meta) or []:
            shapes.update(named)
        buffers = set(self.meta.get("buffer_names") or [])
        shapes = {name: shape for name, shape in shapes.items() if name not in buffers}
        self._specs = stock_info.declared(info, shapes, self.tensor_parallel, self.full_path(self.model_name))
        if names := stock_info.by_default(info, list(shapes)):
            self.notes.append("cut on dim 0 by stock DeepSpeed's default, as no pattern of universal_checkpoint_info matches: "
                              + ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else ""))

    def _count(self, key: str) -> int:
        """A number of ranks in the model file; 1 where it says nothing."""
        value = self.meta.get(key)
        if value is not None and (type(value) is not int or not 1 <= value <= 2**24):
            raise DamagedFileError(f"the model file says no number of ranks in {key}", file=self.full_path(self.model_name),
                                   expected="a whole number from 1", found=repr(number(value))[:80])
        return value or 1

    def _partitions(self) -> int:
        """Number of partitions: as the model file says, and as many optimizer files must be there."""
        said = self._count("dp_world_size")
        if not self.names.optimizer:
            return 1
        if len(self.names.prefixes) > 1:
            raise ForeignFileError("optimizer files of two precisions lie in one folder", file=self.folder,
                                   expected="one prefix", found=" and ".join(repr(p) for p in self.names.prefixes))
        have, want = set(self.names.optimizer), set(product(range(said), range(self._count("mp_world_size"))))
        missing = sorted(want - have)
        if missing:
            raise NotFoundError("an optimizer file is missing", file=self.folder, expected=f"{said} partitions",
                                found=f"no file of partition {missing[0][0]}, model-parallel rank {missing[0][1]}",
                                fix="restore it, or load another tag")
        if have != want:
            raise ForeignFileError("there are more optimizer files than the run had partitions", file=self.folder,
                                   expected=len(want), found=len(have))
        return said

    def _tensor_parallel(self) -> int:
        """Number of model-parallel ranks: as the model file says, and as many model files must be there."""
        said = self._count("mp_world_size")
        have = {mp for _, mp in self.names.model}
        if have != set(range(said)):
            raise NotFoundError("a model file is missing, or there is one too many", file=self.folder,
                                expected=f"model-parallel ranks 0 to {said - 1}", found=", ".join(map(str, sorted(have))),
                                fix="restore the files of one save, or load another tag")
        return said

    def _first_optimizer(self) -> tuple[Any, str]:
        if not self.names.optimizer:
            return self.meta.get("optimizer"), self.full_path(self.model_name)
        return self.optimizer_tree(0), self.full_path(self.names.optimizer[0, 0])

    def optimizer_tree(self, part: int, mp: int = 0) -> Any:
        """The optimizer state dict of one partition's file."""
        name = self.names.optimizer[part, mp]
        tree = self.tree(name).get("optimizer_state_dict")
        if not isinstance(tree, dict):
            raise DamagedFileError("an optimizer file holds no optimizer", file=self.full_path(name),
                                   expected="optimizer_state_dict", found=type(tree).__name__)
        return cast("Any", tree)

    def read_contents(self, tree: Any, file: str, order: Order | None) -> Contents:
        shapes = shapes_by_group(self.meta)
        if self.names.optimizer:
            if not isinstance(shapes, list):
                raise DamagedFileError("the model file does not say how parameters are flattened",
                                       file=self.full_path(self.model_name), expected="param_shapes",
                                       found=type(shapes).__name__)
        else:
            if order is None:
                raise NotFoundError("a stage-0 checkpoint without a manifest does not name its optimizer's parameters",
                                    file=file, expected=FILE_NAME, found="no manifest",
                                    fix="load it into an engine, which knows the order of its own groups")
            module = self.module()
            shapes = [{name: self._shape(module, name) for name in names} for names in order]
        try:
            return self._format.contents(tree, cast("Any", shapes), self.partitions, file, lambda ref: self.scalar(file, ref))
        except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
            raise DamagedFileError("an optimizer file has another structure than its keys promise", file=file,
                                   found=f"{type(error).__name__}: {error}") from error

    def _shape(self, module: Mapping[str, Any], name: str) -> Ints:
        ref = module.get(name)
        if not isinstance(ref, TensorRef):
            raise ForeignFileError("the model of the engine has a parameter that the checkpoint lacks", parameter=name,
                                   file=self.full_path(self.model_name), found=f"{len(module)} other tensors",
                                   fix="build the model with the configuration that the checkpoint was trained with")
        return ref.shape

    def model_of(self, mp: int, part: int = 0) -> str:
        """Name of the model file of a model-parallel rank (at ZeRO-3 of one partition)."""
        found = self.names.model.get((None, mp)) or self.names.model.get((part, mp))
        if found is None:
            raise NotFoundError("a model file is missing", file=self.folder, found="no file",
                                expected=f"partition {part}, model-parallel rank {mp}", fix="restore it, or load another tag")
        return found

    def module(self, mp: int = 0) -> Mapping[str, Any]:
        """Weights and buffers of one model-parallel rank's model file."""
        module = self.tree(self.model_of(mp)).get("module")
        if not isinstance(module, dict):
            raise UnsupportedError("the model file holds no module weights (a pipeline checkpoint)",
                                   file=self.full_path(self.model_of(mp)))
        return cast("Mapping[str, Any]", module)

    def _manifest(self, found: Contents) -> Manifest:
        module = self.module()
        flat = {m.param for buffer in found.buffers for m in buffer.members}
        shapes: dict[str, Ints] = {}
        for named in shapes_by_group(self.meta) or []:
            shapes.update(named)
        dtype = training_dtype(self.meta, module, shapes)
        ties = find_ties(module, flat, self.meta.get("shared_params") or {})
        aliases = {alias for tie in ties for alias in tie.aliases}
        kept = [name for name, value in module.items() if name not in flat and name not in aliases and
                not _no_extra_state(name, value)]
        buffer_names = set(self.meta.get("buffer_names") or [])
        frozen = self.meta.get("frozen_param_shapes") or {}
        params = [self._spec(name, tuple(shapes.get(name) or self._shape(module, name)), dtype, "trainable") for name in
                  dict.fromkeys(m.param for buffer in found.buffers for m in buffer.members)]
        buffers = list(found.buffers)
        split, old = found.engine == "zero3", "buffer_names" not in self.meta
        for name in dict.fromkeys([*kept, *frozen]):
            if name in flat or name in aliases:
                continue
            ref = module.get(name)
            held = isinstance(ref, TensorRef) and ref.numel > 0
            # Older ZeRO-3 files don't name the buffers, which are all that has bytes there, nor keep frozen parameters.
            if split and old and not held and name not in frozen:
                continue
            is_frozen = name not in buffer_names and not (split and old and held)
            cut = split and is_frozen
            shape = tuple(frozen[name]) if name in frozen else ref.shape if isinstance(ref, TensorRef) else ()
            value = self._frozen_ref(name, 0) if cut else ref
            if not isinstance(value, TensorRef):
                raise DamagedFileError("the value of a parameter is missing", file=self.full_path(self.model_name),
                                       parameter=name)
            params.append(self._spec(name, shape, value.storage.dtype, "frozen" if is_frozen else "buffer"))
            size, parts = math.prod(shape), self.partitions if cut else 1
            buffers.append(FlatBuffer((Member(name, 0, size),), -(-size // parts) if cut else size, parts,
                                      "each" if cut else "whole", ((VALUE, value.storage.dtype),)))
        zero_stage = self._zero_stage(found)
        world = self._count("dp_world_size")
        mesh = Mesh(tp=self.tensor_parallel, dp=world, zero=zero_stage)
        scalars = (*found.scalars, *({},) * (len(buffers) - len(found.buffers)))
        return Manifest(found.engine, mesh, tuple(params), tuple(buffers), found.groups, scalars, ties,
                        run={key: number(self.meta.get(key)) for key in ("global_steps", "skipped_steps", "ds_version")})

    def _spec(self, name: str, local: Ints, dtype: str, kind: str) -> ParamSpec:
        """The parameter with the declared layout, whose share of one rank must have the shape in the file."""
        declared = (self._specs or {}).get(name)
        if self.tensor_parallel == 1 and (declared is None or declared.shape != local):
            return ParamSpec(name, local, dtype, kind)  # another shape is an error of the comparison with the target
        if declared is None and kind == "buffer":
            return ParamSpec(name, local, dtype, kind)
        if declared is None:
            raise RuleError("a tensor-parallel parameter of the checkpoint is not declared", parameter=name,
                            file=self.full_path(self.model_name), expected="a parameter of the family", found="none",
                            fix="build the model as the run that wrote the checkpoint did")
        share = declared.layout.local_shape(name, declared.shape, {"tp": (self.tensor_parallel, 0)})
        if share != local:
            raise ModelMismatchError("the checkpoint's share of a parameter is not what its layout says", parameter=name,
                                     file=self.full_path(self.model_name), found=local,
                                     expected=f"{share} of {declared.shape} at tp={self.tensor_parallel}")
        return replace(declared, dtype=dtype, kind=kind)

    def _zero_stage(self, found: Contents) -> int:
        if found.engine == "zero3":
            return 3
        if found.engine == "bf16":
            return 1
        if found.engine != "zero12":
            return 0
        return 2 if self.optimizer_tree(0)["zero_stage"] == 2 else 1

    def full_path(self, name: str) -> str:
        return str(self.folder / name)

    def file(self, name: str) -> PtFile:
        """An open file of the tag folder. Raises ForeignFileError where it is not the file that the manifest names."""
        if name not in self._open:
            file = self._closing.enter_context(PtFile(self.folder / name))
            self._open[name] = file
            self.recorded.compare(name, file.size_bytes, file.directory_sha256)
        return self._open[name]

    def opened(self, path: str) -> PtFile:
        """The open file for a full path."""
        return self.file(Path(path).name)

    def tree(self, name: str) -> Any:
        """The pickled tree of a file, a dict."""
        if name not in self._trees:
            tree = self.file(name).tree
            if not isinstance(tree, dict):
                raise DamagedFileError("a state file holds no dictionary", file=self.full_path(name), found=type(tree).__name__)
            self._trees[name] = tree
        return self._trees[name]

    def scalar(self, file: str, ref: TensorRef) -> float:
        """The value of a one-element tensor."""
        layout = _SCALARS.get(ref.storage.dtype)
        if ref.numel != 1 or layout is None:
            raise DamagedFileError("a scalar state is no number", file=file, found=f"{ref.storage.dtype} {ref.shape}")
        data = bytearray(struct.calcsize(layout))
        opened = self.file(Path(file).name)
        opened.read_into(opened.record(ref.storage), ref.offset_elems * len(data), memoryview(data))
        return float(struct.unpack(layout, data)[0])

    def _frozen_ref(self, name: str, part: int, mp: int = 0) -> Any:
        held = self.tree(self.model_of(mp, part)).get("frozen_param_fragments") or {}
        return held.get(name)

    def where(self, slot: Slot) -> Where:
        """Place of a slot. Raises DamagedFileError or ForeignFileError where the file disagrees with the structure."""
        buffer = self.manifest.buffers[slot.buffer]
        ref, name = self._ref(slot, buffer, dict(slot.cut).get("tp", 0))
        if not isinstance(ref, TensorRef):
            raise ForeignFileError(f"a file lacks the state {slot.state} that the first file has", file=self.full_path(name),
                                   parameter=buffer.members[0].param if buffer.members else None,
                                   expected=f"{buffer.partition_elems} elements", found=type(ref).__name__)
        used = max((f.offset + f.high - f.low for f in buffer.fragments(slot.part)), default=0)
        dtype = dict(buffer.states)[slot.state]
        if not ref.is_contiguous or ref.storage.dtype != dtype or not used <= ref.numel <= buffer.partition_elems:
            raise ForeignFileError(f"the state {slot.state} has another size or type than the run's structure says",
                                   file=self.full_path(name), parameter=buffer.members[0].param if buffer.members else None,
                                   expected=f"{used} to {buffer.partition_elems} contiguous elements of {dtype}",
                                   found=f"{ref.shape} of {ref.storage.dtype}")
        file = self.file(name)
        return Where(file, file.record(ref.storage), ref.offset_elems * ITEMSIZE[dtype], ref.numel, dtype)

    def _ref(self, slot: Slot, buffer: FlatBuffer, mp: int) -> tuple[Any, str]:
        if slot.state == VALUE:
            param = buffer.members[0].param
            if buffer.partitions > 1 or (self.contents.engine == "zero3" and buffer.rule == "each"):
                return self._frozen_ref(param, slot.part, mp), self.model_of(mp, slot.part)
            return self.module(mp).get(param), self.model_of(mp)
        index = self.contents.indices[slot.buffer]
        if not self.names.optimizer:
            name = self.model_of(mp)
            if slot.state == MASTER and isinstance(self._format, Plain):
                return self.module(mp).get(buffer.members[0].param), name
            return self._format.element(self.tree(name)["optimizer"], index, slot.state), name
        name = self.names.optimizer[slot.part, mp]
        return self._format.element(self.optimizer_tree(slot.part, mp), index, slot.state), name


def _no_extra_state(name: str, value: Any) -> bool:
    """megatron-core's local layer spec has an `_extra_state` per linear layer that says nothing: None, or empty."""
    return name.endswith("_extra_state") and (value is None or (isinstance(value, TensorRef) and not value.numel))
