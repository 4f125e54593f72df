"""The files that DeepSpeed itself would have written for a manifest, as trees; see `deepspeed`,
which reads them.

Keys and structure: `_common_checkpoint_state` and the `state_dict` of each optimizer wrapper of
DeepSpeed 0.19.8.
"""

import struct
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_ucp.core.box import Ints
from megatron_ucp.core.flat import FlatBuffer
from megatron_ucp.core.layers import Layers
from megatron_ucp.core.layout import Replicate
from megatron_ucp.core.manifest import Manifest, ParamGroup
from megatron_ucp.core.mesh import EXPERT_CUT, Coords
from megatron_ucp.core.plan import Slot
from megatron_ucp.core.states import MASTER, VALUE
from megatron_ucp.formats.base import Extras
from megatron_ucp.formats.deepspeed.experts import (
    LocalExperts,
    by_layer,
    counts_of,
    expert_place,
    file_rank,
    in_own_file,
    name_in_file,
)
from megatron_ucp.formats.deepspeed.paths import (
    at_tp,
    expert_file_name,
    expert_optimizer_name,
    model_name,
    optimizer_name,
)
from megatron_ucp.formats.deepspeed.stock_info import patterns_of
from megatron_ucp.formats.pt.output import Output, Weight, plain
from megatron_ucp.formats.pt.values import Global, Stand, TensorRef

_SCALER = "deepspeed.runtime.fp16.loss_scaler"
_STAGE = "deepspeed.runtime.zero.config.ZeroStageEnum"
_FRAGMENT = "deepspeed.utils.tensor_fragment.fragment_address"
# What some wrappers do not save of their dynamic loss scaler: the defaults of DeepSpeed's config.
_DYNAMIC = {
    "cur_scale": 2.0**16,
    "cur_iter": 0,
    "last_overflow_iter": -1,
    "scale_factor": 2.0,
    "scale_window": 1000,
    "min_scale": 1,
    "delayed_shift": 2,
    "cur_hysteresis": 2,
    "consecutive_hysteresis": False,
    "raise_error_at_min_scale": True,
    "dynamic": True,
}


@dataclass(frozen=True)
class RunSettings:
    """What written files say besides the manifest. `extras` are the source's; `config`, `version`
    and `dtype` those of the run that the files are for; `scaler` is the loss scale's canonical
    form; `int_steps` says whether the optimizer keeps `step` as an int; `scheduler` gives the
    state of a stage's scheduler."""

    extras: Extras
    config: Mapping[str, Any]
    version: str
    dtype: str
    scaler: Mapping[str, Any]
    clip_grad: float
    int_steps: bool
    scheduler: Callable[[int], Any]


@dataclass(frozen=True)
class Own:
    """One rank: its stage, tensor-parallel rank and partition of the dense buffers, its
    expert-tensor-parallel rank and its experts. `parts` has for each buffer that it holds its
    place along the axes that cut the buffer, and its partition."""

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


class NativeWriter:
    """The files of a manifest. `layers` are those of its pipeline."""

    def __init__(self, manifest: Manifest, run: RunSettings, layers: Layers | None) -> None:
        self.manifest, self.run, self.mesh = manifest, run, manifest.mesh
        self.layers = layers if manifest.mesh.pp > 1 else None
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
                ranks = mesh.sharers_at(stage, tp)
                for rank in ranks if mesh.zero == 3 else ranks[:1]:
                    yield self._model(self._own(rank))
                if self.manifest.engine != "zero0":
                    for rank in ranks:
                        yield self._optimizer(self._own(rank))
            yield from self._experts(stage)
        for position in range(len(self.layers.held)) if self.layers and not self._staged else ():
            for tp in range(mesh.tp):
                if output := self._layer(position, tp):
                    yield output

    def _own(self, rank: int) -> Own:
        """What a rank writes of."""
        at, (ep, etp) = self.mesh.coord(rank), self.mesh.expert_place(rank)
        parts = {number: (cut, part) for number, cut, part in self.manifest.parts_of(rank)}
        part = self.mesh.partition_group(rank).index(rank)
        counts = {layer: count // self.mesh.ep for layer, count in self._counts.items()}
        return Own(at.pp, at.tp, part, etp, LocalExperts(counts, self.mesh.ep, ep), parts)

    # ---------------------------------------------------------------- the structure of a stage

    def _buffers(self, own: Own) -> list[tuple[int, FlatBuffer]]:
        """The optimizer's buffers that a rank holds, group by group, with their numbers in the
        manifest."""
        held = [(number, self.manifest.buffers[number]) for number in own.parts]
        return sorted(
            ((b, buffer) for b, buffer in held if buffer.stepped),
            key=lambda entry: (entry[1].group or 0, entry[0]),
        )

    def _groups(self, own: Own) -> list[tuple[ParamGroup, list[int]]]:
        """Each parameter group of a rank, and the places of its buffers among the rank's."""
        out: dict[int, list[int]] = {}
        for at, (_, buffer) in enumerate(self._buffers(own)):
            out.setdefault(buffer.group or 0, []).append(at)
        return [(self.manifest.groups[number], places) for number, places in sorted(out.items())]

    def _values(self, own: Own, kind: str) -> list[tuple[int, str]]:
        """Frozen parameters or module buffers of a rank, but for experts that have files of their
        own: buffer number and name."""
        held = [(b, name) for (_, name), b in self._number.items() if b in own.parts]
        return [
            (b, name)
            for b, name in held
            if self.manifest.by_name[name].kind == kind and not self._apart(name)
        ]

    def _apart(self, name: str) -> bool:
        """Whether a parameter lies in an expert file."""
        return in_own_file(name, self.mesh.experts_apart)

    def _local(self, name: str) -> Ints:
        return self.manifest.local_shape(name)

    def _named(self, name: str) -> str:
        """The name that the engine's module gives a parameter."""
        return self._pipe.get(name, name) if self.layers else name

    def _expert_counts(self, stage: int) -> list[int]:
        """Experts of each mixture of a stage that lie in files of their own."""
        here = {m.param for b in self.manifest.buffers if b.stage == stage for m in b.members}
        held = [s.name for s in self.manifest.params if s.name in here and self._apart(s.name)]
        return [len(names) for names in by_layer(held)]

    def _patterns(self) -> Any:
        """How stock's own converter has to put parameters together: the source's word was for the
        source's mesh and names."""
        if any(spec.layout != Replicate() for spec in self.manifest.params):
            return patterns_of(self.manifest.params, self._named)
        info = self.run.extras.patterns
        # a universal folder's says the version alone
        return info if info and {*info} != {"universal_checkpoint_version"} else None

    def _mp(self, stage: int, tp: int) -> int:
        return stage * self.mesh.tp + tp

    # ------------------------------------------------ model files

    def _model(self, own: Own) -> Output:
        mesh, extras = self.mesh, self.run.extras
        output = Output(
            model_name(self._mp(own.stage, own.tp), own.part if mesh.zero == 3 else None)
        )
        split = self.manifest.engine in ("zero12", "zero3", "bf16")
        shared = {alias: tie.canonical for tie in self.manifest.ties for alias in tie.aliases}
        output.tree = {
            "module": None if self.layers and not self._staged else self._module(output, own),
            "buffer_names": [self._named(name) for _, name in self._values(own, "buffer")],
            "optimizer": None if split else self._unpartitioned(output, own),
            "param_shapes": self._param_shapes(own) if split and mesh.zero else None,
            **self._frozen(output, own),
            "shared_params": shared if split else None,
            "lr_scheduler": output.adopt(self.run.scheduler(own.stage)),
            **model_extras(output, extras),
            "dp_world_size": mesh.partitions,
            "mp_world_size": mesh.tp * mesh.pp,
            "checkpoint_parallel_dimensions": {"pp_degree": mesh.pp, "tp_degree": mesh.tp},
            "ds_config": output.adopt(self.run.config),
            "ds_version": self.run.version,
            **{key: output.adopt(value) for key, value in extras.client_state.items()},
        }
        if counts := self._expert_counts(own.stage):
            output.tree |= {"num_experts": counts, "ds_autoep_layers": None}
        elif self._info:
            output.tree["universal_checkpoint_info"] = output.adopt(self._info)
        return output

    def _frozen(self, output: Output, own: Own) -> dict[str, Any]:
        """What ZeRO-2 and 3 say of frozen parameters."""
        if self.mesh.zero < 2:
            return {"frozen_param_shapes": None, "frozen_param_fragments": None}
        frozen = self._values(own, "frozen")
        shapes = OrderedDict((self._named(name), _size(self._local(name))) for _, name in frozen)
        fragments = self._fragments(output, frozen, own)
        return {"frozen_param_shapes": shapes, "frozen_param_fragments": fragments}

    def _module(self, output: Output, own: Own) -> dict[str, Any]:
        """`state_dict` of the module: at ZeRO-3 parameters are empty."""
        out: dict[str, Any] = OrderedDict()
        here = {m.param for number in own.parts for m in self.manifest.buffers[number].members}
        for spec in self.manifest.params:
            name = self._named(spec.name)
            if spec.name not in here or self._apart(spec.name):
                continue
            if spec.kind == "buffer" or (spec.kind == "frozen" and self.mesh.zero < 3):
                out[name] = self._value(output, spec.name, own)
            elif self.mesh.zero == 3:
                out[name] = output.tensor(b"", spec.dtype, (0,))
            else:
                out[name] = output.tensor(
                    Weight(spec.name, at_tp(own.tp)), spec.dtype, self._local(spec.name)
                )
        for tie in self.manifest.ties if not self.layers else ():
            out.update(dict.fromkeys(tie.aliases, out[tie.canonical]))
        return out | {
            name: _nothing(output, value)
            for name, value in self._stateless(here).items()
            if name not in out
        }

    @property
    def _staged(self) -> bool:
        """Whether DeepSpeed keeps a pipeline's weights in model files: where there are experts
        that have files of their own."""
        return any(self._apart(spec.name) for spec in self.manifest.params)

    def _stateless(self, here: Collection[str]) -> dict[str, Any]:
        """Entries that hold nothing of the modules with the parameters `here`, by the names that
        the engine gives them."""
        found = self.run.extras.stateless
        if not self.layers:
            return dict(found)
        modules = {name.rpartition(".")[0]: self._named(name).rpartition(".")[0] for name in here}
        parts = {name: name.rpartition(".") for name in found}
        return {
            f"{modules[head]}.{rest}": found[name]
            for name, (head, _, rest) in parts.items()
            if head in modules
        }

    def _value(self, output: Output, name: str, own: Own) -> TensorRef:
        number = self._number[own.stage, name]
        dtype = self.manifest.buffers[number].states[0][1]
        return output.tensor(own.slot(number, VALUE), dtype, self._local(name))

    def _fragments(
        self, output: Output, frozen: Sequence[tuple[int, str]], own: Own
    ) -> dict[str, Any]:
        """Frozen parameters as ZeRO keeps them: whole at stage 2, this rank's chunk at stage 3."""
        out: dict[str, Any] = {}
        for number, name in frozen:
            buffer = self.manifest.buffers[number]
            cut = self.mesh.zero == 3
            slot = own.slot(number, VALUE)
            out[self._named(name)] = output.tensor(
                slot, buffer.states[0][1], (buffer.length,) if cut else self._local(name)
            )
        return out

    def _param_shapes(self, own: Own) -> list[dict[str, Stand]]:
        return [
            OrderedDict(
                (self._own_name(m.param, own), _size(self._local(m.param))) for m in buffer.members
            )
            for _, buffer in self._buffers(own)
        ]

    def _own_name(self, name: str, own: Own) -> str:
        """The name that a rank's module gives one of its parameters."""
        return self._named(own.experts.own_name(name) or name)

    def _experts(self, stage: int) -> Iterator[Output]:
        """The files of a stage's experts, and at stage 0 the optimizers of its expert-parallel
        ranks."""
        mesh = self.mesh
        here = {m.param for b in self.manifest.buffers if b.stage == stage for m in b.members}
        held = [s.name for s in self.manifest.params if s.name in here and self._apart(s.name)]
        for etp in range(mesh.etp if held else 0):
            for layer, names in enumerate(by_layer(held)):
                for number, params in names.items():
                    ep = number * mesh.ep // len(names)
                    mp = file_rank(mesh, stage, ep, etp)
                    yield self._expert(layer, number, mp, etp, params)
            for ep in range(mesh.ep if self.manifest.engine == "zero0" else 0):
                output = Output(expert_optimizer_name(ep, file_rank(mesh, stage, ep, etp)))
                own = self._own(mesh.rank_of(expert_place(stage, ep, etp), 0))
                output.tree = {"optimizer": self._unpartitioned(output, own)}
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
            key = name_in_file(self._named(name))
            tree[key] = output.tensor(payload, spec.dtype, self._local(name))
        output.tree = tree
        return output

    def _layer(self, position: int, tp: int) -> Output | None:
        """The weights at one position of the pipeline; None where it has none."""
        layers = self.layers
        if layers is None or position not in layers.filed:
            return None
        output = Output(f"layer_{position:02d}-model_{tp:02d}-model_states.pt")
        here = {*layers.canonical[position]}
        holding = (b for b in self.manifest.buffers if any(m.param in here for m in b.members))
        own = self._own(self.mesh.sharers_at(next((buffer.stage for buffer in holding), 0), tp)[0])
        tree: dict[str, Any] = OrderedDict()
        for key, name in zip(layers.held[position], layers.canonical[position], strict=True):
            spec = self.manifest.by_name[name]
            if self._apart(name):
                continue
            if spec.kind == "trainable":
                tree[key] = output.tensor(Weight(name, at_tp(tp)), spec.dtype, self._local(name))
            else:
                tree[key] = self._value(output, name, own)
        prefixes = {
            name.removesuffix(key)
            for key, name in zip(layers.held[position], layers.canonical[position], strict=True)
            if name.endswith(key)
        }
        for name, value in self.run.extras.stateless.items():
            for prefix in prefixes:
                if prefix and name.startswith(prefix):
                    tree[name.removeprefix(prefix)] = _nothing(output, value)
        output.tree = tree
        return output

    # ---------------------------------------------------------------- optimizer files

    def _optimizer(self, own: Own) -> Output:
        prefix = "bf16_" if self.run.dtype == "bfloat16" else ""
        output = Output(optimizer_name(own.part, self._mp(own.stage, own.tp), prefix))
        wrappers = {"zero12": self._zero12, "bf16": self._bf16, "zero3": self._zero3}
        build = wrappers[self.manifest.engine]
        output.tree = {
            "optimizer_state_dict": build(output, own),
            "ds_config": self.run.config,
            "ds_version": self.run.version,
        }
        return output

    def _flat(
        self, output: Output, number: int, own: Own, state: str, used: int | None = None
    ) -> TensorRef:
        buffer = self.manifest.buffers[number]
        return output.tensor(
            own.slot(number, state),
            dict(buffer.states)[state],
            (buffer.partition_elems,),
            None if used is None else (used,),
        )

    def _base(
        self, output: Output, own: Own, element: Callable[[int, str], TensorRef]
    ) -> dict[str, Any]:
        """torch's `state_dict` of the base optimizer, one entry for each buffer."""
        state: dict[int, Any] = {}
        for at, (number, buffer) in enumerate(self._buffers(own)):
            scalars = buffer.members[0].scalars if buffer.members else {}
            entry: dict[str, Any] = {
                name: self._scalar(output, name, value) for name, value in scalars.items()
            }
            entry |= {name: element(number, name) for name, _ in buffer.states if name != MASTER}
            if entry:
                state[at] = entry
        groups = [group_tree(output, group, places) for group, places in self._groups(own)]
        return {"state": state, "param_groups": groups}

    def _scalar(self, output: Output, name: str, value: float) -> Any:
        return int(value) if name == "step" and self.run.int_steps else scalar_tensor(output, value)

    def _zero12(self, output: Output, own: Own) -> dict[str, Any]:
        buffers = self._buffers(own)
        paddings = [_padding(buffer, own.parts[number][1]) for number, buffer in buffers]
        scaler, dynamic = scaler_of(self.run)
        return {
            "loss_scaler": scaler,
            "dynamic_loss_scale": dynamic,
            "overflow": False,
            "clip_grad": self.run.clip_grad,
            "base_optimizer_state": self._base(
                output, own, lambda number, state: self._flat(output, number, own, state)
            ),
            "single_partition_of_fp32_groups": [
                self._flat(output, number, own, MASTER, buffer.partition_elems - padding)
                for (number, buffer), padding in zip(buffers, paddings, strict=True)
            ],
            "zero_stage": Stand(_STAGE, (2 if self.mesh.zero == 2 else 1,)),
            "group_paddings": paddings,
            "param_alignment_paddings": [_gaps(buffer) for _, buffer in buffers],
            "partition_count": [buffer.partitions for _, buffer in buffers],
            "ds_version": self.run.version,
            "param_slice_mappings": [
                self._slices(buffer, own.parts[number][1], own) for number, buffer in buffers
            ],
        }

    def _bf16(self, output: Output, own: Own) -> dict[str, Any]:
        buffers, last = self._buffers(own), own.part == self.mesh.partitions - 1
        return {
            "clip_grad": self.run.clip_grad,
            "base_optimizer_state": self._base(
                output, own, lambda number, state: self._flat(output, number, own, state)
            ),
            "single_partition_of_fp32_groups": [
                self._flat(output, number, own, MASTER) for number, _ in buffers
            ],
            "group_paddings": [
                buffer.length - buffer.used() if last else 0 for _, buffer in buffers
            ],
            "partition_count": [buffer.partitions for _, buffer in buffers],
            "ds_version": self.run.version,
            "param_slice_mappings": [
                self._slices(buffer, own.parts[number][1], own) for number, buffer in buffers
            ],
        }

    def _slices(self, buffer: FlatBuffer, part: int, own: Own) -> dict[str, Stand]:
        return OrderedDict(
            (
                self._own_name(buffer.members[f.member].param, own),
                Stand(_FRAGMENT, (), {"numel": f.high - f.low, "start": f.offset}),
            )
            for f in buffer.fragments(part)
        )

    def _zero3(self, output: Output, own: Own) -> dict[str, Any]:
        scaler, dynamic = scaler_of(self.run)
        return {
            "zero_stage": Stand(_STAGE, (3,)),
            "loss_scaler": scaler,
            "dynamic_loss_scale": dynamic,
            "overflow": False,
            "partition_count": self.mesh.partitions,
            "optimizer_state_dict": self._base(
                output, own, lambda number, state: self._flat(output, number, own, state)
            ),
            "fp32_flat_groups": [
                self._flat(output, number, own, MASTER) for number, _ in self._buffers(own)
            ],
        }

    def _unpartitioned(self, output: Output, own: Own) -> dict[str, Any]:
        """The optimizer of stage 0, which lies in the model file: shaped states, or one flat buffer
        per group."""
        buffers = self._buffers(own)
        flat = any(len(buffer.members) > 1 for _, buffer in buffers)

        def tensor(number: int, state: str) -> TensorRef:
            if flat:
                return self._flat(output, number, own, state)
            buffer = self.manifest.buffers[number]
            return output.tensor(
                own.slot(number, state),
                dict(buffer.states)[state],
                self._local(buffer.members[0].param),
            )

        base = self._base(output, own, tensor)
        if self.run.dtype == "float32":
            return base
        fields: dict[str, Any] = {"dynamic_loss_scale": False, "cur_scale": 1.0, "cur_iter": 0}
        if self.run.dtype == "float16":
            scaler = {**_DYNAMIC, **self.run.scaler}
            fields = {
                "dynamic_loss_scale": bool(scaler["dynamic"]),
                **{key: scaler[key] for key in ("cur_scale", "cur_iter")},
            }
            if scaler["dynamic"]:
                fields |= {
                    key: scaler[key]
                    for key in ("last_overflow_iter", "scale_factor", "scale_window")
                }
        if flat:
            return {
                **(fields if self.run.dtype == "float16" else {}),
                "optimizer_state_dict": base,
                "fp32_groups_flat": [tensor(number, MASTER) for number, _ in buffers],
                "clip_grad": self.run.clip_grad,
            }
        return {
            **fields,
            "optimizer_state_dict": base,
            "fp32_groups": [
                [tensor(buffers[at][0], MASTER) for at in places] for _, places in self._groups(own)
            ],
        }


def group_tree(output: Output, group: ParamGroup, params: list[int]) -> dict[str, Any]:
    """A parameter group as an optimizer's `state_dict` has it, with every key of its source."""
    marks = {key: output.adopt(value) for key, value in group.marks.items()}
    return {**plain(group.settings), **marks, "params": params}


def model_extras(output: Output, extras: Extras) -> dict[str, Any]:
    """Counters, and the states of DeepSpeed's own helpers, as a model file has them."""
    return {
        "data_sampler": output.adopt(extras.others.get("data_sampler")),
        "random_ltd": output.adopt(extras.others.get("random_ltd")),
        "skipped_steps": 0,
        "global_steps": 0,
        **extras.counters,
    }


def scaler_of(run: RunSettings) -> tuple[Stand, bool]:
    """The pickled loss scaler, and whether it is dynamic."""
    saved = dict(run.scaler)
    if run.dtype != "float16":
        return Stand(f"{_SCALER}.LossScaler", (), {"cur_scale": 1.0, "dynamic": False}), False
    if not saved.get("dynamic", True):
        return Stand(
            f"{_SCALER}.LossScaler",
            (),
            {"cur_scale": saved.get("cur_scale", 1.0), "dynamic": False},
        ), False
    return Stand(
        f"{_SCALER}.DynamicLossScaler", (), {**_DYNAMIC, **saved, "dtype": Global("torch.float16")}
    ), True


def scalar_tensor(output: Output, value: float) -> TensorRef:
    """A 0-d tensor: float32 as torch's optimizers keep it, or float64 where that would round (steps
    past 2**24)."""
    exact = abs(value) < 3e38 and struct.unpack("<f", struct.pack("<f", value))[0] == value
    return output.tensor(
        struct.pack("<f" if exact else "<d", value), "float32" if exact else "float64", ()
    )


def _nothing(output: Output, value: Any) -> Any:
    """An entry that holds nothing: None, or an empty tensor."""
    return (
        output.tensor(b"", value.storage.dtype, value.shape)
        if isinstance(value, TensorRef)
        else None
    )


def _size(shape: Ints) -> Stand:
    return Stand("torch.Size", (shape,))


def _padding(buffer: FlatBuffer, part: int) -> int:
    """Elements at the end of a partition that lie behind the last parameter."""
    size = buffer.partition_elems
    return min(max((part + 1) * size - buffer.used(), 0), size)


def _gaps(buffer: FlatBuffer) -> list[int]:
    """Elements between each parameter and the next one."""
    ends = [member.start + member.size for member in buffer.members]
    return [after.start - end for end, after in zip(ends, buffer.members[1:], strict=False)] + (
        [0] if ends else []
    )


def state_file(manifest: Manifest, slot: Slot) -> str:
    """The file in which DeepSpeed would keep a slot of a manifest that trains in bf16."""
    buffer, mesh = manifest.buffers[slot.buffer], manifest.mesh
    rank = mesh.rank_of((*buffer.at, *slot.cut), slot.part)
    mp = buffer.stage * mesh.tp + mesh.coord(rank).tp
    if buffer.stepped and manifest.engine != "zero0":
        return optimizer_name(mesh.partition_group(rank).index(rank), mp, "bf16_")
    ep, etp = mesh.expert_place(rank)
    if buffer.stepped and buffer.axes == EXPERT_CUT:
        return expert_optimizer_name(ep, file_rank(mesh, buffer.stage, ep, etp))
    return model_name(mp, slot.part if mesh.zero == 3 else None)
