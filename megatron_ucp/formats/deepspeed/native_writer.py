"""The files that DeepSpeed itself would have written for a manifest, as trees; see `deepspeed`,
which reads them.

Keys and structure: `_common_checkpoint_state` and the `state_dict` of each optimizer wrapper of
DeepSpeed 0.19.8.
"""

import struct
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_ucp.core.box import Ints
from megatron_ucp.core.flat import FlatBuffer
from megatron_ucp.core.layout import Replicate
from megatron_ucp.core.manifest import Manifest
from megatron_ucp.core.partition import Layers
from megatron_ucp.core.plan import Slot
from megatron_ucp.core.states import MASTER, VALUE
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
class Run:
    """What the files say besides the manifest. `meta` is the source's model file, `own` the keys in
    it that are not the user's; `scaler` the loss scaler's canonical form; `int_steps` whether the
    optimizer keeps `step` as an int; `stateless` are entries of the weights that hold nothing
    (`_extra_state` of megatron-core), by canonical name."""

    meta: Mapping[str, Any]
    own: frozenset[str]
    config: Mapping[str, Any]
    version: str
    dtype: str
    scaler: Mapping[str, Any]
    clip_grad: float
    int_steps: bool
    stateless: Mapping[str, Any]
    scheduler: Callable[[int], Any]  # of a stage


class NativeWriter:
    """The files of a manifest. `layers` are those of its pipeline."""

    def __init__(self, manifest: Manifest, run: Run, layers: Layers | None) -> None:
        self.manifest, self.run, self.mesh = manifest, run, manifest.mesh
        self.layers = layers if manifest.mesh.pp > 1 else None
        self._pipe = {name: pipe for pipe, name in manifest.names.items()}
        self._number = {
            (dict(buffer.at).get("pp", 0), buffer.members[0].param): b
            for b, buffer in enumerate(manifest.buffers)
            if buffer.group is None
        }
        self._info = self._patterns()

    def outputs(self) -> Iterator[Output]:
        """Every file."""
        mesh = self.mesh
        for stage in range(mesh.pp):
            for tp in range(mesh.tp):
                for part in range(mesh.partitions if mesh.zero == 3 else 1):
                    yield self._model(stage, tp, part)
                if self.manifest.engine != "zero0":
                    for part in range(mesh.partitions):
                        yield self._optimizer(stage, tp, part)
        for position in range(len(self.layers.held)) if self.layers else ():
            for tp in range(mesh.tp):
                if output := self._layer(position, tp):
                    yield output

    # ---------------------------------------------------------------- the structure of a stage

    def _buffers(self, stage: int) -> list[tuple[int, FlatBuffer]]:
        """The optimizer's buffers of a stage, with their numbers in the manifest."""
        return [
            (b, buffer)
            for b, buffer in enumerate(self.manifest.buffers)
            if buffer.group is not None and dict(buffer.at).get("pp", 0) == stage
        ]

    def _groups(self, stage: int) -> list[tuple[Mapping[str, Any], list[int]]]:
        """Each parameter group of a stage: settings, and the places of its buffers among the
        stage's."""
        out: dict[int, list[int]] = {}
        for at, (_, buffer) in enumerate(self._buffers(stage)):
            out.setdefault(buffer.group or 0, []).append(at)
        return [(self.manifest.groups[number], places) for number, places in sorted(out.items())]

    def _values(self, stage: int, kind: str) -> list[tuple[int, str]]:
        """Frozen parameters or module buffers of a stage: buffer number and name."""
        return [
            (b, buffer.members[0].param)
            for b, buffer in enumerate(self.manifest.buffers)
            if buffer.group is None
            and dict(buffer.at).get("pp", 0) == stage
            and self.manifest.by_name[buffer.members[0].param].kind == kind
        ]

    def _local(self, name: str) -> Ints:
        spec = self.manifest.by_name[name]
        return spec.layout.local_shape(name, spec.shape, {"tp": (self.mesh.tp, 0)})

    def _named(self, name: str) -> str:
        """The name that the engine's module gives a parameter."""
        return self._pipe.get(name, name) if self.layers else name

    def _patterns(self) -> Any:
        """How stock's own converter has to put parameters together: the source's word was for the
        source's mesh and names."""
        if any(spec.layout != Replicate() for spec in self.manifest.params):
            return patterns_of(self.manifest.params, self._named)
        info = self.run.meta.get("universal_checkpoint_info")
        return (
            info if isinstance(info, dict) and {*info} != {"universal_checkpoint_version"} else None
        )  # a universal folder's

    def _mp(self, stage: int, tp: int) -> int:
        return stage * self.mesh.tp + tp

    # ---------------------------------------------------------------- model files

    def _model(self, stage: int, tp: int, part: int) -> Output:
        prefix = f"zero_pp_rank_{part}_" if self.mesh.zero == 3 else ""
        output = Output(f"{prefix}mp_rank_{self._mp(stage, tp):02d}_model_states.pt")
        run, mesh, meta = self.run, self.mesh, self.run.meta
        frozen = self._values(stage, "frozen")
        shapes = OrderedDict((self._named(name), _size(self._local(name))) for _, name in frozen)
        split = self.manifest.engine in ("zero12", "zero3", "bf16")
        own: dict[str, Any] = {
            "module": None if self.layers else self._module(output, stage, tp, part),
            "buffer_names": [self._named(name) for _, name in self._values(stage, "buffer")],
            "optimizer": None if split else self._unpartitioned(output, stage, tp),
            "param_shapes": self._param_shapes(stage) if split and mesh.zero else None,
            "frozen_param_shapes": shapes if mesh.zero > 1 else None,
            "shared_params": {
                alias: tie.canonical for tie in self.manifest.ties for alias in tie.aliases
            }
            if split
            else None,
            "frozen_param_fragments": self._fragments(output, frozen, tp, part)
            if mesh.zero > 1
            else None,
            "lr_scheduler": output.adopt(run.scheduler(stage)),
            "data_sampler": output.adopt(meta.get("data_sampler")),
            "random_ltd": output.adopt(meta.get("random_ltd")),
            "skipped_steps": meta.get("skipped_steps", 0),
            "global_steps": meta.get("global_steps", 0),
            **{key: meta[key] for key in ("global_samples",) if key in meta},
            "dp_world_size": mesh.partitions,
            "mp_world_size": mesh.tp * mesh.pp,
            "checkpoint_parallel_dimensions": {"pp_degree": mesh.pp, "tp_degree": mesh.tp},
            "ds_config": output.adopt(run.config),
            "ds_version": run.version,
        }
        kept = {key: output.adopt(value) for key, value in meta.items() if key not in run.own}
        if self._info:
            kept["universal_checkpoint_info"] = output.adopt(self._info)
        output.tree = {**own, **kept}
        return output

    def _module(self, output: Output, stage: int, tp: int, part: int) -> dict[str, Any]:
        """`state_dict` of the module: at ZeRO-3 parameters are empty."""
        out: dict[str, Any] = OrderedDict()
        for spec in self.manifest.params:
            if spec.kind == "buffer" or (spec.kind == "frozen" and self.mesh.zero < 3):
                out[spec.name] = self._value(output, spec.name, stage, tp)
            elif self.mesh.zero == 3:
                out[spec.name] = output.tensor(b"", spec.dtype, (0,))
            else:
                out[spec.name] = output.tensor(
                    Weight(spec.name, tp), spec.dtype, self._local(spec.name)
                )
        for tie in self.manifest.ties:
            out.update(dict.fromkeys(tie.aliases, out[tie.canonical]))
        return out | {
            name: _nothing(output, value)
            for name, value in self.run.stateless.items()
            if name not in out
        }

    def _value(self, output: Output, name: str, stage: int, tp: int) -> TensorRef:
        number = self._number[stage, name]
        dtype = self.manifest.buffers[number].states[0][1]
        return output.tensor(Slot(number, (("tp", tp),), 0, VALUE), dtype, self._local(name))

    def _fragments(
        self, output: Output, frozen: Sequence[tuple[int, str]], tp: int, part: int
    ) -> dict[str, Any]:
        """Frozen parameters as ZeRO keeps them: whole at stage 2, this rank's chunk at stage 3."""
        out: dict[str, Any] = {}
        for number, name in frozen:
            buffer = self.manifest.buffers[number]
            cut = self.mesh.zero == 3
            slot = Slot(number, (("tp", tp),), part if cut else 0, VALUE)
            out[self._named(name)] = output.tensor(
                slot, buffer.states[0][1], (buffer.length,) if cut else self._local(name)
            )
        return out

    def _param_shapes(self, stage: int) -> list[dict[str, Stand]]:
        return [
            OrderedDict((self._named(m.param), _size(self._local(m.param))) for m in buffer.members)
            for _, buffer in self._buffers(stage)
        ]

    def _layer(self, position: int, tp: int) -> Output | None:
        """The weights at one position of the pipeline; None where it has none."""
        layers = self.layers
        if layers is None or position not in layers.filed:
            return None
        output = Output(f"layer_{position:02d}-model_{tp:02d}-model_states.pt")
        stage = next(
            (
                dict(b.at).get("pp", 0)
                for b in self.manifest.buffers
                for m in b.members
                if m.param in layers.canonical[position]
            ),
            0,
        )
        tree: dict[str, Any] = OrderedDict()
        for key, name in zip(layers.held[position], layers.canonical[position], strict=True):
            spec = self.manifest.by_name[name]
            tree[key] = (
                output.tensor(Weight(name, tp), spec.dtype, self._local(name))
                if spec.kind == "trainable"
                else self._value(output, name, stage, tp)
            )
        prefixes = {
            name.removesuffix(key)
            for key, name in zip(layers.held[position], layers.canonical[position], strict=True)
            if name.endswith(key)
        }
        for name, value in self.run.stateless.items():
            for prefix in prefixes:
                if prefix and name.startswith(prefix):
                    tree[name.removeprefix(prefix)] = _nothing(output, value)
        output.tree = tree
        return output

    # ---------------------------------------------------------------- optimizer files

    def _optimizer(self, stage: int, tp: int, part: int) -> Output:
        prefix = "bf16_" if self.run.dtype == "bfloat16" else ""
        output = Output(
            f"{prefix}zero_pp_rank_{part}_mp_rank_{self._mp(stage, tp):02d}_optim_states.pt"
        )
        build = {"zero12": self._zero12, "bf16": self._bf16, "zero3": self._zero3}[
            self.manifest.engine
        ]
        output.tree = {
            "optimizer_state_dict": build(output, stage, tp, part),
            "ds_config": self.run.config,
            "ds_version": self.run.version,
        }
        return output

    def _flat(
        self, output: Output, number: int, tp: int, part: int, state: str, used: int | None = None
    ) -> TensorRef:
        buffer = self.manifest.buffers[number]
        return output.tensor(
            Slot(number, (("tp", tp),), part, state),
            dict(buffer.states)[state],
            (buffer.partition_elems,),
            None if used is None else (used,),
        )

    def _base(
        self, output: Output, stage: int, element: Callable[[int, str], TensorRef]
    ) -> dict[str, Any]:
        """torch's `state_dict` of the base optimizer, one entry for each buffer."""
        state: dict[int, Any] = {}
        for at, (number, buffer) in enumerate(self._buffers(stage)):
            scalars = self.manifest.scalars[number] if self.manifest.scalars else {}
            entry: dict[str, Any] = {
                name: self._scalar(output, name, value) for name, value in scalars.items()
            }
            entry |= {name: element(number, name) for name, _ in buffer.states if name != MASTER}
            if entry:
                state[at] = entry
        groups = [{**plain(settings), "params": places} for settings, places in self._groups(stage)]
        return {"state": state, "param_groups": groups}

    def _scalar(self, output: Output, name: str, value: float) -> Any:
        return int(value) if name == "step" and self.run.int_steps else scalar_tensor(output, value)

    def _zero12(self, output: Output, stage: int, tp: int, part: int) -> dict[str, Any]:
        buffers = self._buffers(stage)
        paddings = [_padding(buffer, part) for _, buffer in buffers]
        scaler, dynamic = scaler_of(self.run)
        return {
            "loss_scaler": scaler,
            "dynamic_loss_scale": dynamic,
            "overflow": False,
            "clip_grad": self.run.clip_grad,
            "base_optimizer_state": self._base(
                output, stage, lambda number, state: self._flat(output, number, tp, part, state)
            ),
            "single_partition_of_fp32_groups": [
                self._flat(output, number, tp, part, MASTER, buffer.partition_elems - padding)
                for (number, buffer), padding in zip(buffers, paddings, strict=True)
            ],
            "zero_stage": Stand(_STAGE, (2 if self.mesh.zero == 2 else 1,)),
            "group_paddings": paddings,
            "param_alignment_paddings": [_gaps(buffer) for _, buffer in buffers],
            "partition_count": [self.mesh.partitions] * len(buffers),
            "ds_version": self.run.version,
            "param_slice_mappings": [self._slices(buffer, part) for _, buffer in buffers],
        }

    def _bf16(self, output: Output, stage: int, tp: int, part: int) -> dict[str, Any]:
        buffers, last = self._buffers(stage), part == self.mesh.partitions - 1
        return {
            "clip_grad": self.run.clip_grad,
            "base_optimizer_state": self._base(
                output, stage, lambda number, state: self._flat(output, number, tp, part, state)
            ),
            "single_partition_of_fp32_groups": [
                self._flat(output, number, tp, part, MASTER) for number, _ in buffers
            ],
            "group_paddings": [
                buffer.length - buffer.used() if last else 0 for _, buffer in buffers
            ],
            "partition_count": [self.mesh.partitions] * len(buffers),
            "ds_version": self.run.version,
            "param_slice_mappings": [self._slices(buffer, part) for _, buffer in buffers],
        }

    def _slices(self, buffer: FlatBuffer, part: int) -> dict[str, Stand]:
        return OrderedDict(
            (
                self._named(buffer.members[f.member].param),
                Stand(_FRAGMENT, (), {"numel": f.high - f.low, "start": f.offset}),
            )
            for f in buffer.fragments(part)
        )

    def _zero3(self, output: Output, stage: int, tp: int, part: int) -> dict[str, Any]:
        scaler, dynamic = scaler_of(self.run)
        return {
            "zero_stage": Stand(_STAGE, (3,)),
            "loss_scaler": scaler,
            "dynamic_loss_scale": dynamic,
            "overflow": False,
            "partition_count": self.mesh.partitions,
            "optimizer_state_dict": self._base(
                output, stage, lambda number, state: self._flat(output, number, tp, part, state)
            ),
            "fp32_flat_groups": [
                self._flat(output, number, tp, part, MASTER) for number, _ in self._buffers(stage)
            ],
        }

    def _unpartitioned(self, output: Output, stage: int, tp: int) -> dict[str, Any]:
        """The optimizer of stage 0, which lies in the model file: shaped states, or one flat buffer
        per group."""
        buffers = self._buffers(stage)
        flat = any(len(buffer.members) > 1 for _, buffer in buffers)

        def tensor(number: int, state: str) -> TensorRef:
            if flat:
                return self._flat(output, number, tp, 0, state)
            buffer = self.manifest.buffers[number]
            return output.tensor(
                Slot(number, (("tp", tp),), 0, state),
                dict(buffer.states)[state],
                self._local(buffer.members[0].param),
            )

        base = self._base(output, stage, tensor)
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
                [tensor(buffers[at][0], MASTER) for at in places]
                for _, places in self._groups(stage)
            ],
        }


def scaler_of(run: Run) -> tuple[Stand, bool]:
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
    stage = dict(buffer.at).get("pp", 0)
    mp = stage * mesh.tp + dict(slot.cut).get("tp", 0)
    if buffer.group is not None and manifest.engine != "zero0":
        return f"bf16_zero_pp_rank_{slot.part}_mp_rank_{mp:02d}_optim_states.pt"
    return (
        f"zero_pp_rank_{slot.part}_mp_rank_{mp:02d}_model_states.pt"
        if mesh.zero == 3
        else f"mp_rank_{mp:02d}_model_states.pt"
    )
