"""The files that DeepSpeed itself would have written for a manifest, as trees: the ranks, their
optimizer states, and all model files.

Keys and structure: `_common_checkpoint_state` and the `state_dict` of each optimizer wrapper of
DeepSpeed 0.19.8."""

import struct
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

from megatron_ucp.core.box import Ints
from megatron_ucp.core.experts import (
    LocalExperts,
    by_layer,
    counts_of,
    expert_name,
    expert_place,
    file_rank,
    in_own_file,
    is_stacked,
    name_in_file,
    rank_of_expert,
    stored_tensors,
)
from megatron_ucp.core.flat import FlatBuffer
from megatron_ucp.core.grouping import grouped
from megatron_ucp.core.layers import Layers
from megatron_ucp.core.layout import Replicate
from megatron_ucp.core.manifest import Manifest, ParamGroup, ParamSpec
from megatron_ucp.core.mesh import Coords, Mesh
from megatron_ucp.core.names import MASTER, VALUE, Keeper
from megatron_ucp.core.plan import Slot
from megatron_ucp.core.values import ClassName, InertObject
from megatron_ucp.formats.checkpoint import Extras
from megatron_ucp.formats.deepspeed.autoep import LAYERS, group_name, key_in_file, layers_tree
from megatron_ucp.formats.deepspeed.files import (
    HELPERS,
    at_tp,
    expert_file_name,
    expert_optimizer_name,
    layer_name,
    model_name,
    optimizer_name,
)
from megatron_ucp.formats.deepspeed.megatron_deepspeed import nested
from megatron_ucp.formats.deepspeed.tp_patterns import patterns_of
from megatron_ucp.formats.loss_scale import LossScale
from megatron_ucp.formats.per_rank import OwnValues, RankDifferences
from megatron_ucp.formats.pt.archive import Output, Weight
from megatron_ucp.formats.pt.refs import TensorRef


@dataclass(frozen=True)
class RunSettings:
    """What written files say besides the manifest. `extras` are the source's; `config`, `version`
    and `dtype` those of the run that the files are for; `scaler` is the loss scale; `int_steps`
    says whether the optimizer keeps `step` as an int; `scheduler` gives the state of a stage's
    scheduler; `apart` are the values that ranks have otherwise than each other."""

    extras: Extras
    config: Mapping[str, Any]
    version: str
    dtype: str
    scaler: LossScale
    clip_grad: float
    int_steps: bool
    scheduler: Callable[[int], Any]
    apart: RankDifferences = field(default_factory=RankDifferences)


@dataclass(frozen=True)
class RankView:
    """One rank: its number, its stage, tensor-parallel rank and partition of the dense buffers, its
    expert-tensor-parallel rank and its experts. `parts` has for each buffer that it holds its
    place along the axes that cut the buffer, and its partition."""

    rank: int
    stage: int
    tp: int
    part: int
    etp: int
    experts: LocalExperts
    parts: Mapping[int, tuple[Coords, int]]

    def slot(self, buffer: int, state: str) -> Slot:
        """The slot that the rank has of a state of a buffer."""
        cut, part = self.parts[buffer]
        return Slot(buffer, cut, part, state)


_SCALER = "deepspeed.runtime.fp16.loss_scaler"
_STAGE = "deepspeed.runtime.zero.config.ZeroStageEnum"
_FRAGMENT = "deepspeed.utils.tensor_fragment.fragment_address"
# What some wrappers do not save of their dynamic loss scaler: the defaults of DeepSpeed's config.
_DYNAMIC = LossScale.fresh({}).said


class NativeWriter:
    """The files of a manifest, rank by rank. `layers` are those of its pipeline."""

    def __init__(self, manifest: Manifest, run: RunSettings, layers: Layers | None) -> None:
        self.manifest, self.run, self.mesh = manifest, run, manifest.mesh
        self.layers = layers
        self._pipe = {name: pipe for pipe, name in manifest.names.items()}
        self._number = {
            (buffer.stage, buffer.members[0].param): b
            for b, buffer in enumerate(manifest.buffers)
            if not buffer.stepped
        }
        self._counts = counts_of(spec.name for spec in manifest.params)
        self._info = self._patterns()

    def outputs(self) -> Iterator[Output]:
        """Every file."""
        mesh = self.mesh
        for stage in range(mesh.pp):
            for tp in range(mesh.tp):
                ranks = mesh.partition_ranks_at(stage, tp)
                for rank in ranks if mesh.zero == 3 else ranks[:1]:
                    yield self._model(self._view(rank))
                if self._is_split:
                    for rank in ranks:
                        yield self._optimizer(self._view(rank))
            yield from self._experts(stage)
        for position in range(len(self.layers.held)) if self.layers and not self._staged else ():
            for tp in range(mesh.tp):
                if output := self._layer(position, tp):
                    yield output

    # ------------------------------------------------ what a rank writes of

    def _view(self, rank: int) -> RankView:
        """What a rank writes of."""
        at, (ep, etp) = self.mesh.coord(rank), self.mesh.expert_place(rank)
        parts = {number: (cut, part) for number, cut, part in self.manifest.parts_of(rank)}
        experts = LocalExperts.among(self._counts, self.mesh.ep, ep)
        return RankView(rank, at.pp, at.tp, self.mesh.partition_of(rank), etp, experts, parts)

    # ---------------------------------------------------------------- the structure of a stage

    def _buffers(self, view: RankView) -> list[tuple[int, FlatBuffer]]:
        """The optimizer's buffers that a rank holds, group by group, with their numbers in the
        manifest."""
        held = [(number, self.manifest.buffers[number]) for number in view.parts]
        return sorted(
            ((b, buffer) for b, buffer in held if buffer.stepped),
            key=lambda entry: (entry[1].group or 0, entry[0]),
        )

    def _groups(self, view: RankView) -> list[tuple[ParamGroup, list[int]]]:
        """Each parameter group of a rank, and the places of its buffers among the rank's."""
        held = enumerate(self._buffers(view))
        places = grouped((buffer.group or 0, at) for at, (_, buffer) in held)
        return [(self.manifest.groups[number], places[number]) for number in sorted(places)]

    def _values(self, view: RankView, kind: str) -> list[tuple[int, str]]:
        """Frozen parameters or module buffers of a rank: number of the buffer, and name."""
        held = [(b, name) for (_, name), b in self._number.items() if b in view.parts]
        return [(b, name) for b, name in held if self.manifest.by_name[name].kind == kind]

    def _apart(self, name: str) -> bool:
        """Whether a parameter lies in an expert file."""
        return in_own_file(name, self.mesh.experts_apart)

    def _local(self, name: str) -> Ints:
        return self.manifest.local_shape(name)

    def _named(self, name: str) -> str:
        """The name that the engine's module gives a parameter."""
        return self._pipe.get(name, name) if self.layers else name

    def _mp(self, stage: int, tp: int) -> int:
        return stage * self.mesh.tp + tp

    def _in_module(self, name: str, view: RankView) -> str:
        """The name of the tensor in which a rank's module keeps a parameter."""
        part = expert_name(name)
        stacked = part is not None and part.is_slice
        return part.layer if part is not None and stacked else self._own_name(name, view)

    def _own_name(self, name: str, view: RankView) -> str:
        """The name that a rank's module gives one of its parameters."""
        return self._named(view.experts.own_name(name) or name)

    # ---------------------------------------------------------------- optimizer files

    def _optimizer(self, view: RankView) -> Output:
        prefix = "bf16_" if self.run.dtype == "bfloat16" else ""
        output = Output(optimizer_name(view.part, self._mp(view.stage, view.tp), prefix))
        wrappers = {
            Keeper.ZERO_1_OR_2: self._zero12,
            Keeper.BF16: self._bf16,
            Keeper.ZERO_3: self._zero3,
        }
        build = wrappers[self.manifest.keeper]
        output.tree = {
            "optimizer_state_dict": build(output, view),
            "ds_config": self.run.config,
            "ds_version": self.run.version,
        }
        return output

    def _flat(
        self, output: Output, view: RankView, number: int, state: str, used: int | None = None
    ) -> TensorRef:
        """A rank's partition of a state, of which the first `used` elements are a tensor."""
        buffer, slot = self.manifest.buffers[number], view.slot(number, state)
        shape = (buffer.of(state).elems(slot.part),)
        cut = None if used is None else (used,)
        return output.tensor(slot, dict(buffer.states)[state], shape, cut)

    def _masters(self, output: Output, view: RankView) -> list[TensorRef]:
        return [self._flat(output, view, number, MASTER) for number, _ in self._buffers(view)]

    def _base(
        self, output: Output, view: RankView, shaped: Callable[[int, str], TensorRef] | None = None
    ) -> dict[str, Any]:
        """torch's `state_dict` of the base optimizer, one entry for each buffer; flat, unless they
        are `shaped`."""
        element = shaped or partial(self._flat, output, view)
        state: dict[int, Any] = {}
        for at, (number, buffer) in enumerate(self._buffers(view)):
            scalars = buffer.members[0].scalars if buffer.members else {}
            entry: dict[str, Any] = {
                name: self._scalar(output, name, value) for name, value in scalars.items()
            }
            kept = [name for name, _ in buffer.states if self._is_kept(view, number, name)]
            entry |= {name: element(number, name) for name in kept}
            if entry:
                state[at] = entry
        groups = [group_tree(output, group, places) for group, places in self._groups(view)]
        return {"state": state, "param_groups": groups}

    def _is_kept(self, view: RankView, number: int, state: str) -> bool:
        """Whether an optimizer has an entry for a state: none for one of matrices that a partition
        owns nothing of."""
        buffer, part = self.manifest.buffers[number], view.parts[number][1]
        return state != MASTER and (state not in buffer.uncut or buffer.of(state).elems(part) > 0)

    def _scalar(self, output: Output, name: str, value: float) -> Any:
        return int(value) if name == "step" and self.run.int_steps else scalar_tensor(output, value)

    def _zero12(self, output: Output, view: RankView) -> dict[str, Any]:
        buffers = self._buffers(view)
        paddings = [_padding(buffer, view.parts[number][1]) for number, buffer in buffers]
        scaler, dynamic = scaler_of(self.run)
        return {
            "loss_scaler": scaler,
            "dynamic_loss_scale": dynamic,
            "overflow": False,
            "clip_grad": self.run.clip_grad,
            "base_optimizer_state": self._base(output, view),
            "single_partition_of_fp32_groups": [
                self._flat(output, view, number, MASTER, buffer.partition_elems - padding)
                for (number, buffer), padding in zip(buffers, paddings, strict=True)
            ],
            "zero_stage": InertObject(_STAGE, (2 if self.mesh.zero == 2 else 1,)),
            "group_paddings": paddings,
            "param_alignment_paddings": [_gaps(buffer) for _, buffer in buffers],
            "partition_count": [buffer.partitions for _, buffer in buffers],
            "ds_version": self.run.version,
            "param_slice_mappings": self._slices(view),
        }

    def _bf16(self, output: Output, view: RankView) -> dict[str, Any]:
        buffers, last = self._buffers(view), view.part == self.mesh.partitions - 1
        return {
            "clip_grad": self.run.clip_grad,
            "base_optimizer_state": self._base(output, view),
            "single_partition_of_fp32_groups": self._masters(output, view),
            "group_paddings": [
                buffer.length - buffer.used() if last else 0 for _, buffer in buffers
            ],
            "partition_count": [buffer.partitions for _, buffer in buffers],
            "ds_version": self.run.version,
            "param_slice_mappings": self._slices(view),
        }

    def _slices(self, view: RankView) -> list[dict[str, InertObject]]:
        """What a rank's partition of each buffer owns of each tensor of the module; of a stacked
        one the experts together."""
        return [self._owned(buffer, number, view) for number, buffer in self._buffers(view)]

    def _owned(self, buffer: FlatBuffer, number: int, view: RankView) -> dict[str, InertObject]:
        found = grouped(
            (self._in_module(buffer.members[fragment.member].param, view), fragment)
            for fragment in buffer.fragments(view.parts[number][1])
        )
        return OrderedDict(
            (name, _address(sum(f.high - f.low for f in run), run[0].offset))
            for name, run in found.items()
        )

    def _zero3(self, output: Output, view: RankView) -> dict[str, Any]:
        scaler, dynamic = scaler_of(self.run)
        return {
            "zero_stage": InertObject(_STAGE, (3,)),
            "loss_scaler": scaler,
            "dynamic_loss_scale": dynamic,
            "overflow": False,
            "partition_count": self.mesh.partitions,
            **self._sharing(view),
            "optimizer_state_dict": self._base(output, view),
            "fp32_flat_groups": self._masters(output, view),
        }

    def _sharing(self, view: RankView) -> dict[str, Any]:
        """Which ranks share each sub-group, as ZeRO-3 says it where there are stacked experts."""
        mesh, held = self.mesh, [buffer for _, buffer in self._buffers(view)]
        stacked = [any(is_stacked(m.param) for m in buffer.members) for buffer in held]
        if not any(stacked):
            return {}
        ranks = [mesh.partition_ranks(view.rank, buffer.held_along) for buffer in held]
        return {
            "ds_zero_partition_groups": [
                {
                    "sub_group": number,
                    "partition_count": len(shared),
                    "partition_rank": shared.index(view.rank),
                    "partition_ranks": list(shared),
                    "families": ["autoep_expert" if experts else "replicated"],
                    "group_names": [group_name(mesh.ep) if experts else "replicated"],
                }
                for number, (shared, experts) in enumerate(zip(ranks, stacked, strict=True))
            ]
        }

    def _unpartitioned(self, output: Output, view: RankView) -> dict[str, Any]:
        """The optimizer of stage 0, which lies in the model file: shaped states, or one flat buffer
        per group."""
        buffers = self._buffers(view)
        flat = any(len(buffer.members) > 1 for _, buffer in buffers)
        tensor = partial(self._flat if flat else self._shaped, output, view)
        base = self._base(output, view, tensor)
        if self.run.dtype == "float32":
            return base
        if flat:
            return {
                **(self._scaler_fields() if self.run.dtype == "float16" else {}),
                "optimizer_state_dict": base,
                "fp32_groups_flat": [tensor(number, MASTER) for number, _ in buffers],
                "clip_grad": self.run.clip_grad,
            }
        return {
            **self._scaler_fields(),
            "optimizer_state_dict": base,
            "fp32_groups": [
                [tensor(buffers[at][0], MASTER) for at in places]
                for _, places in self._groups(view)
            ],
        }

    def _shaped(self, output: Output, view: RankView, number: int, state: str) -> TensorRef:
        """A state in the shape of its parameter."""
        buffer = self.manifest.buffers[number]
        shape = self._local(buffer.members[0].param)
        return output.tensor(view.slot(number, state), dict(buffer.states)[state], shape)

    def _scaler_fields(self) -> dict[str, Any]:
        """The loss scaler as the wrappers of stage 0 say it: no object, but fields of their own."""
        if self.run.dtype != "float16":
            return {"dynamic_loss_scale": False, "cur_scale": 1.0, "cur_iter": 0}
        scaler = {**_DYNAMIC, **self.run.scaler.said}
        keys = ["cur_scale", "cur_iter"]
        if scaler["dynamic"]:
            keys += ["last_overflow_iter", "scale_factor", "scale_window"]
        fields = {key: scaler[key] for key in keys}
        return {"dynamic_loss_scale": bool(scaler["dynamic"]), **fields}

    # ------------------------------------------------ model files

    def _expert_counts(self, stage: int) -> list[int]:
        """Experts of each mixture of a stage that lie in files of their own."""
        return [len(names) for names in by_layer(self._held_apart(stage))]

    def _held_apart(self, stage: int) -> list[str]:
        """What lies in such files of a stage."""
        here = {m.param for b in self.manifest.buffers if b.stage == stage for m in b.members}
        return [s.name for s in self.manifest.params if s.name in here and self._apart(s.name)]

    def _patterns(self) -> Any:
        """How stock's own converter has to put parameters together: the source's word was for the
        source's mesh and names."""
        if any(spec.layout != Replicate() for spec in self.manifest.params):
            return patterns_of(self.manifest.params, self._named)
        info = self.run.extras.patterns
        # a universal folder's says the version alone
        return info if info and {*info} != {"universal_checkpoint_version"} else None

    def _model(self, view: RankView) -> Output:
        mesh, mp = self.mesh, self._mp(view.stage, view.tp)
        output = Output(model_name(mp, view.part if mesh.zero == 3 else None))
        split = self._is_split
        shared = {alias: tie.canonical for tie in self.manifest.ties for alias in tie.aliases}
        output.tree = {
            "module": None if self.layers and not self._staged else self._module(output, view),
            "buffer_names": [
                self._own_name(name, view) for _, name in self._values(view, "buffer")
            ],
            "optimizer": None if split else self._unpartitioned(output, view),
            "param_shapes": self._param_shapes(view) if split and mesh.zero else None,
            **self._frozen(output, view),
            "shared_params": shared if split else None,
            **run_fields(output, self.run, mesh, self._scheduler_of(view)),
            **{key: output.adopt(value) for key, value in self._client_state(view).items()},
        }
        output.tree |= self._of_experts(output, view)
        return output

    @property
    def _is_split(self) -> bool:
        """Whether the optimizer is partitioned, and lies in files of its own."""
        return self.manifest.keeper != Keeper.ZERO_0

    def _own_values(self, view: RankView) -> OwnValues | None:
        """What a rank has otherwise than others, where it has a model file of its own."""
        each = self.mesh.zero == 3 and self.run.apart.what
        return self.run.apart.ranks[view.rank] if each else None

    def _client_state(self, view: RankView) -> Mapping[Any, Any]:
        shared, values = self.run.extras.client_state, self._own_values(view)
        return shared if values is None else values.over(shared, self.run.apart.what)

    def _scheduler_of(self, view: RankView) -> Any:
        values = self._own_values(view)
        if values is None or not self.run.apart.what.scheduler:
            return self.run.scheduler(view.stage)
        return values.scheduler

    def _of_experts(self, output: Output, view: RankView) -> dict[str, Any]:
        """What a model file says of experts; without any how parameters are cut, for stock."""
        if counts := self._expert_counts(view.stage):
            names = (spec.name for spec in self.manifest.params)
            return {"num_experts": counts, LAYERS[0]: layers_tree(names, self.mesh, view.rank)}
        if self._info:
            return {"universal_checkpoint_info": output.adopt(self._info)}
        return {}

    def _frozen(self, output: Output, view: RankView) -> dict[str, Any]:
        """What ZeRO-2 and 3 say of frozen parameters."""
        params = self.manifest.params
        experts = any(spec.kind == "frozen" and self._apart(spec.name) for spec in params)
        # stock's load would give every expert-parallel rank those of the first one: without any it
        # goes by the files of the experts
        if self.mesh.zero < 2 or (self.mesh.zero == 2 and experts):
            return {"frozen_param_shapes": None, "frozen_param_fragments": None}
        frozen = [(b, name) for b, name in self._values(view, "frozen") if not self._apart(name)]
        shapes = OrderedDict((self._named(name), _size(self._local(name))) for _, name in frozen)
        fragments = self._fragments(output, frozen, view)
        return {"frozen_param_shapes": shapes, "frozen_param_fragments": fragments}

    def _module(self, output: Output, view: RankView) -> dict[str, Any]:
        """`state_dict` of the module."""
        out: dict[str, Any] = OrderedDict()
        here = {m.param for number in view.parts for m in self.manifest.buffers[number].members}
        for spec in self.manifest.params:
            if spec.name in here and not self._apart(spec.name):
                out[self._named(spec.name)] = self._entry(output, spec, view)
        for tie in self.manifest.ties if not self.layers else ():
            out.update(dict.fromkeys(tie.aliases, out[tie.canonical]))
        for name, value in self._stateless(here).items():
            if name not in out:
                out[name] = _nothing(output, value)
        out |= module_states(output, self.run.extras, self._own_values(view))
        return out if self.layers else nested(out)

    def _entry(self, output: Output, spec: ParamSpec, view: RankView) -> TensorRef:
        """A tensor of a rank's module: at ZeRO-3 parameters are empty."""
        if spec.kind == "buffer" or (spec.kind == "frozen" and self.mesh.zero < 3):
            return self._value(output, spec.name, view)
        if self.mesh.zero == 3:
            return output.tensor(b"", spec.dtype, (0,))
        weight = Weight(spec.name, at_tp(view.tp))
        return output.tensor(weight, spec.dtype, self._local(spec.name))

    @property
    def _staged(self) -> bool:
        """Whether DeepSpeed keeps a pipeline's weights in model files: where there are experts
        that have files of their own."""
        return any(self._apart(spec.name) for spec in self.manifest.params)

    def _stateless(self, here: Collection[str]) -> dict[str, Any]:
        """Entries that hold nothing of the modules with the parameters `here`, by the names that
        the engine gives them; those of experts with files of their own DeepSpeed does not keep."""
        kept = self.run.extras.stateless
        found = {name: value for name, value in kept.items() if not self._apart(name)}
        if not self.layers:
            return dict(found)
        modules = {name.rpartition(".")[0]: self._named(name).rpartition(".")[0] for name in here}
        parts = {name: name.rpartition(".") for name in found}
        return {
            f"{modules[head]}.{rest}": found[name]
            for name, (head, _, rest) in parts.items()
            if head in modules
        }

    def _value(self, output: Output, name: str, view: RankView) -> TensorRef:
        number = self._number[view.stage, name]
        dtype = self.manifest.buffers[number].states[0][1]
        values = self._own_values(view)
        if values is not None and name in values.buffers:
            return cast("TensorRef", output.adopt(values.buffers[name]))
        return output.tensor(view.slot(number, VALUE), dtype, self._local(name))

    def _fragments(
        self, output: Output, frozen: Sequence[tuple[int, str]], view: RankView
    ) -> dict[str, Any]:
        """Frozen parameters as ZeRO keeps them: whole at stage 2, this rank's chunk at stage 3."""
        out: dict[str, Any] = {}
        for number, name in frozen:
            buffer = self.manifest.buffers[number]
            cut = self.mesh.zero == 3
            slot = view.slot(number, VALUE)
            out[self._named(name)] = output.tensor(
                slot, buffer.states[0][1], (buffer.length,) if cut else self._local(name)
            )
        return out

    def _param_shapes(self, view: RankView) -> list[dict[str, InertObject]]:
        """Names and shapes of the module's tensors in each buffer."""
        out: list[dict[str, InertObject]] = []
        for _, buffer in self._buffers(view):
            named: dict[str, InertObject] = OrderedDict()
            for names in stored_tensors(member.param for member in buffer.members):
                shape, stacked = self._local(names[0]), is_stacked(names[0])
                whole = (len(names), *shape) if stacked else shape
                named[self._in_module(names[0], view)] = _size(whole)
            out.append(named)
        return out

    def _experts(self, stage: int) -> Iterator[Output]:
        """The files of a stage's experts, and at stage 0 the optimizers of its expert-parallel
        ranks."""
        mesh = self.mesh
        held = self._held_apart(stage)
        if mesh.zero == 3:  # there they lie in the optimizer files alone
            return
        for etp in range(mesh.etp if held else 0):
            for layer, names in enumerate(by_layer(held)):
                for number, params in names.items():
                    ep = rank_of_expert(number, len(names), mesh.ep)
                    mp = file_rank(mesh, stage, ep, etp)
                    yield self._expert(layer, number, mp, etp, params)
            for ep in range(0 if self._is_split else mesh.ep):
                output = Output(expert_optimizer_name(ep, file_rank(mesh, stage, ep, etp)))
                view = self._view(mesh.rank_of(expert_place(stage, ep, etp), 0))
                output.tree = {"optimizer": self._unpartitioned(output, view)}
                yield output

    def _expert(self, layer: int, number: int, mp: int, etp: int, params: list[str]) -> Output:
        """The file of one expert, whose name has its number in the whole layer."""
        output = Output(expert_file_name(layer, number, mp))
        tree: dict[str, Any] = OrderedDict()
        for name in params:
            spec, (buffer, _) = self.manifest.by_name[name], self.manifest.first_holder(name)
            cut = tuple((axis, etp) for axis in buffer.axes)
            payload: Weight | Slot = Weight(name, cut)
            if spec.kind != "trainable":
                payload = Slot(self._number[buffer.stage, name], cut, 0, VALUE)
            key = key_in_file(name) or name_in_file(self._named(name))
            tree[key] = output.tensor(payload, spec.dtype, self._local(name))
        output.tree = tree
        return output

    def _layer(self, position: int, tp: int) -> Output | None:
        """The weights at one position of the pipeline; None where it has none."""
        layers = self.layers
        if layers is None or position not in layers.filed:
            return None
        output = Output(layer_name(position, tp))
        names = dict(zip(layers.held[position], layers.canonical[position], strict=True))
        stage = self._stage_with({*names.values()})
        view = self._view(self.mesh.partition_ranks_at(stage, tp)[0])
        by_name = self.manifest.by_name
        tree: dict[str, Any] = OrderedDict(
            (key, self._entry(output, by_name[name], view)) for key, name in names.items()
        )
        modules = {name.removesuffix(key) for key, name in names.items() if name.endswith(key)}
        for name, value in self.run.extras.stateless.items():
            for module in modules:
                if module and name.startswith(module):
                    tree[name.removeprefix(module)] = _nothing(output, value)
        output.tree = tree
        return output

    def _stage_with(self, params: Collection[str]) -> int:
        """The first stage that holds one of some parameters."""
        holding = (b for b in self.manifest.buffers if any(m.param in params for m in b.members))
        return next((buffer.stage for buffer in holding), 0)


def group_tree(output: Output, group: ParamGroup, params: list[int]) -> dict[str, Any]:
    """A parameter group as an optimizer's `state_dict` has it, with every key of its source."""
    settings, marks = output.adopt(dict(group.settings)), output.adopt(dict(group.marks))
    return {**settings, **marks, "params": params}


def scaler_of(run: RunSettings) -> tuple[InertObject, bool]:
    """The pickled loss scaler, and whether it is dynamic."""
    saved = run.scaler.said if run.dtype == "float16" else {"dynamic": False}
    if not saved.get("dynamic", True):
        fields = {"cur_scale": saved.get("cur_scale", 1.0), "dynamic": False}
        return InertObject(f"{_SCALER}.LossScaler", (), fields), False
    fields = {**_DYNAMIC, **saved, "dtype": ClassName("torch.float16")}
    return InertObject(f"{_SCALER}.DynamicLossScaler", (), fields), True


def scalar_tensor(output: Output, value: float) -> TensorRef:
    """A 0-d tensor: float32 as torch's optimizers keep it, or float64 where that would round (steps
    past 2**24)."""
    exact = abs(value) < 3e38 and struct.unpack("<f", struct.pack("<f", value))[0] == value
    return output.tensor(
        struct.pack("<f" if exact else "<d", value), "float32" if exact else "float64", ()
    )


def _padding(buffer: FlatBuffer, part: int) -> int:
    """Elements at the end of a partition that lie behind the last parameter."""
    size = buffer.partition_elems
    return min(max((part + 1) * size - buffer.used(), 0), size)


def _gaps(buffer: FlatBuffer) -> list[int]:
    """Elements between each tensor and the next one."""
    members = {member.param: member for member in buffer.members}
    tensors = stored_tensors(members)
    firsts = [members[names[0]].start for names in tensors]
    ends = [members[names[-1]].start + members[names[-1]].size for names in tensors]
    return [start - end for end, start in zip(ends, firsts[1:], strict=False)] + (
        [0] if ends else []
    )


def _address(elems: int, start: int) -> InertObject:
    return InertObject(_FRAGMENT, (), {"numel": elems, "start": start})


def run_fields(output: Output, run: RunSettings, mesh: Mesh, scheduler: Any) -> dict[str, Any]:
    """What a model file says of the run: scheduler, counters, the states of DeepSpeed's own
    helpers, sizes and config."""
    return {
        "lr_scheduler": output.adopt(scheduler),
        **{key: output.adopt(run.extras.helpers.get(key)) for key in HELPERS},
        "skipped_steps": 0,
        "global_steps": 0,
        **run.extras.counters,
        "dp_world_size": mesh.partitions,
        "mp_world_size": mesh.tp * mesh.pp,
        "checkpoint_parallel_dimensions": {"pp_degree": mesh.pp, "tp_degree": mesh.tp},
        "ds_config": output.adopt(run.config),
        "ds_version": run.version,
    }


def module_states(output: Output, extras: Extras, own: OwnValues | None = None) -> dict[str, Any]:
    """What modules keep besides tensors, as entries of the weights; `own` is what a rank has
    otherwise."""
    of_rank = {} if own is None else own.buffers
    return {name: output.adopt(of_rank.get(name, value)) for name, value in extras.modules.items()}


def _nothing(output: Output, value: Any) -> Any:
    """An entry that holds nothing: None, or an empty tensor."""
    return (
        output.tensor(b"", value.storage.dtype, value.shape)
        if isinstance(value, TensorRef)
        else None
    )


def _size(shape: Ints) -> InertObject:
    return InertObject("torch.Size", (shape,))
