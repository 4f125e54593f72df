"""What a live DeepSpeed engine holds, as a manifest, and where each slot of it lies in memory."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron_ucp.core.flat import FlatBuffer, Member
from megatron_ucp.core.manifest import Manifest, ParamSpec, Tie
from megatron_ucp.core.mesh import Mesh
from megatron_ucp.core.plan import Slot
from megatron_ucp.core.stages import Stage, check_replicas, join
from megatron_ucp.core.states import MASTER, VALUE
from megatron_ucp.engines.deepspeed.wrappers import LiveBuffer, rank_in, wrapper_of
from megatron_ucp.errors import LayoutError, UnsupportedError
from megatron_ucp.families.base import Model
from megatron_ucp.formats.deepspeed.optimizer_files import STRUCTURE
from megatron_ucp.formats.deepspeed.pipe_names import PipeNames
from megatron_ucp.formats.optimizers import ELEMENT

# How an optimizer is run on some hardware, and what its class says already (AdamW is Adam with
# `decoupled_weight_decay`); not what a run sets.
IMPLEMENTATION = frozenset(
    {"foreach", "fused", "capturable", "differentiable", "decoupled_weight_decay"}
)


@dataclass(frozen=True)
class Part:
    """What one pipeline stage tells the others: all that it holds, and the order of each group's
    parameters in the client's optimizer."""

    number: int
    holds: Stage
    order: tuple[tuple[str, ...], ...]
    ties: tuple[Tie, ...]


@dataclass(frozen=True)
class Whole:
    """An engine of all stages: its manifest, and the names of each group's parameters in the order
    of the optimizer."""

    manifest: Manifest
    order: list[list[str]]


class Live:
    """A live engine as a manifest, and a way to its tensors.

    A rank knows its own stage (`part`); `join` makes the manifest of all stages from everybody's
    parts. Buffers are in the manifest's order: the optimizer's first, then one per frozen parameter
    and module buffer.
    """

    def __init__(self, engine: Any, model: Model | None = None) -> None:
        self.engine = engine
        self.model = model
        self.tp, self.pp = parallel_of(engine)
        self.cut = (("tp", self.tp[1]),)
        self.pipe = PipeNames(model.pipe) if model is not None and is_pipeline(engine) else None
        self.wrapper = wrapper_of(engine)
        self.wrapper.prepare()
        self.buffers = self.wrapper.buffers()
        self.names: dict[Any, str] = {
            param: self._name(name) for param, name in engine.param_names.items()
        }
        self.values = self._values()
        self.first_buffer = self.first_group = (
            0  # the numbers in the manifest of all stages: set by `join`
        )
        self.first_value = len(self.buffers)

    def _name(self, name: str) -> str:
        """The canonical name of a parameter or buffer. Raises ModelMismatchError for one that the
        pipeline's family lacks."""
        return self.pipe.find(name) if self.pipe else name

    def _values(self) -> dict[str, tuple[str, tuple[int, ...], torch.Tensor, int, int]]:
        """Frozen parameters and persistent module buffers: kind, full shape, tensor, partitions,
        this rank's one."""
        stepped = {id(p) for buffer in self.buffers for p in buffer.params}
        out: dict[str, tuple[str, tuple[int, ...], torch.Tensor, int, int]] = {}
        named = dict(self.engine.module.named_parameters())
        buffers = set(self.engine._get_buffer_names())
        found: dict[str, Any] = {
            **named,
            **{n: b for n, b in self.engine.module.named_buffers() if n in buffers},
        }
        for name in (
            self.engine.module.state_dict(keep_vars=True) if self.wrapper.zero < 3 else found
        ):
            tensor = found.get(name)
            if tensor is None or id(tensor) in stepped:
                continue
            if name in named and hasattr(tensor, "ds_tensor"):
                group = getattr(tensor, "ds_process_group", None)
                count = torch.distributed.get_world_size(group=group)
                out[name] = (
                    "frozen",
                    tuple(tensor.ds_shape),
                    tensor.ds_tensor.data,
                    count,
                    rank_in(group),
                )
            else:
                out[self._name(name)] = (
                    "frozen" if name in named else "buffer",
                    tuple(tensor.shape),
                    tensor.data,
                    1,
                    0,
                )
        return out

    def ties(self) -> tuple[Tie, ...]:
        """Names of one parameter beside the first one."""
        first: dict[int, str] = {}
        aliases: dict[str, list[str]] = {}
        for pipe, param in self.engine.module.named_parameters(remove_duplicate=False):
            name = self._name(pipe)
            if first.setdefault(id(param), name) != name:
                aliases.setdefault(first[id(param)], []).append(name)
        return tuple(Tie(name, tuple(found)) for name, found in aliases.items())

    def order(self) -> tuple[tuple[str, ...], ...]:
        """Names of each group's trainable parameters in the order of the client's optimizer."""
        groups = getattr(self.wrapper.opt, "bit16_groups", None) or [b.params for b in self.buffers]
        numbers = (
            range(len(groups))
            if hasattr(self.wrapper.opt, "bit16_groups")
            else [b.group for b in self.buffers]
        )
        out: list[list[str]] = [[] for _ in getattr(self.wrapper.base, "param_groups", [])]
        for number, params in zip(numbers, groups, strict=True):
            if number is not None and number < len(out):
                out[number] += [self.names[p] for p in params]
        return tuple(map(tuple, out))

    def part(self, states: Callable[[LiveBuffer], Sequence[tuple[str, str]]]) -> Part:
        """This rank's stage with the given element-wise states (name, dtype) besides the masters.
        No collective.

        Raises LayoutError where a parameter contradicts its family.
        """
        params: list[ParamSpec] = []
        buffers: list[FlatBuffer] = []
        for live in self.buffers:
            members: list[Member] = []
            for param, start in zip(live.params, live.starts, strict=True):
                shape = tuple(getattr(param, "ds_shape", param.shape))
                params.append(self._spec(self.names[param], shape, param, "trainable"))
                members.append(Member(self.names[param], start, int(torch.Size(shape).numel())))
            buffers.append(
                FlatBuffer(
                    tuple(members),
                    live.length,
                    live.partitions,
                    live.rule,
                    ((MASTER, dtype_name(live.master.dtype)), *states(live)),
                    live.group,
                )
            )
        values: list[FlatBuffer] = []
        for name, (kind, shape, tensor, partitions, _) in self.values.items():
            size = int(torch.Size(shape).numel())
            params.append(self._spec(name, shape, tensor, kind))
            each = partitions > 1 or (self.wrapper.zero == 3 and kind == "frozen")
            values.append(
                FlatBuffer(
                    (Member(name, 0, size),),
                    -(-size // partitions),
                    partitions,
                    "each" if each else "whole",
                    ((VALUE, dtype_name(tensor.dtype)),),
                )
            )
        holds = Stage(
            tuple(params),
            tuple(buffers),
            self.groups(),
            tuple(self.scalars(live) for live in self.buffers),
            tuple(values),
        )
        return Part(self.pp[1], holds, self.order(), self.ties())

    def told(self, part: Part) -> Part | None:
        """What this rank sends to the others: one rank of each stage speaks; without a pipeline
        nobody needs to."""
        return part if self.pp[0] > 1 and self.tp[1] == 0 and self.place()[0] == 0 else None

    def join(self, own: Part, told: Sequence[Part | None]) -> "Whole":
        """The engine of all stages. `told` is what all ranks sent. Raises ModelMismatchError where
        the stages don't fit."""
        parts = sorted(
            (part for part in told if part is not None), key=lambda part: part.number
        ) or [own]
        if len(parts) != self.pp[0]:
            raise UnsupportedError(
                "the ranks of the engine don't make up whole stages",
                expected=f"{self.pp[0]} stages",
                found=f"{len(parts)}",
            )
        joined = join([part.holds for part in parts])
        here = self.pp[1]
        self.first_buffer, self.first_group, self.first_value = (
            joined.first_buffer[here],
            joined.first_group[here],
            joined.first_value[here],
        )
        manifest = Manifest(
            self.wrapper.engine_name,
            self.mesh(),
            joined.params,
            joined.buffers,
            joined.groups,
            joined.scalars,
            tuple(dict.fromkeys(tie for part in parts for tie in part.ties)),
            optimizer=self.optimizer_name(),
            family=self.model.family.name if self.model else "",
            names=dict(self.pipe.canonical) if self.pipe else {},
        )
        check_replicas(manifest)
        return Whole(manifest, _one_order(parts))

    def _spec(self, name: str, local: tuple[int, ...], tensor: Any, kind: str) -> ParamSpec:
        """A parameter as its family declares it, after the live one was compared with the
        declaration."""
        dtype = dtype_name(tensor.dtype)
        if self.model is None or kind == "buffer":
            return ParamSpec(name, local, dtype, kind)
        declared = self.model.find(name)
        share = declared.layout.local_shape(name, declared.shape, {"tp": self.tp})
        if share != local:
            raise LayoutError(
                "a live parameter has another shape than its family declares",
                parameter=name,
                found=local,
                expected=f"{share} of {declared.shape} at tp={self.tp[0]}",
                fix=f"check that the model is a {self.model.family.name} with the sizes of its "
                "config",
            )
        for attribute, value in declared.attributes.items():
            found = getattr(
                tensor, attribute, value
            )  # absent where the layer spec sets none: the shape was checked
            if found != value:
                raise LayoutError(
                    f"a live parameter's attribute {attribute} contradicts its family",
                    parameter=name,
                    expected=value,
                    found=found,
                    fix=f"check {self.model.family.source}",
                )
        return declared.spec(name, dtype, kind)

    def mesh(self) -> Mesh:
        return Mesh(
            tp=self.tp[0],
            pp=self.pp[0],
            dp=int(self.engine.seq_dp_world_size),
            zero=self.wrapper.zero,
        )

    def place(self) -> tuple[int, int]:
        """This rank's data-parallel rank and pipeline stage."""
        return rank_in(self.engine.seq_data_parallel_group), self.pp[1]

    def groups(self) -> tuple[Mapping[str, Any], ...]:
        groups = getattr(self.wrapper.base, "param_groups", [])
        return tuple(
            {k: _number(v) for k, v in group.items() if k not in STRUCTURE} for group in groups
        )

    def optimizer_name(self) -> str:
        """Such as "torch.AdamW"; "" without an optimizer."""
        kind = type(self.wrapper.base)
        return (
            ""
            if self.wrapper.base is None
            else f"{kind.__module__.partition('.')[0]}.{kind.__qualname__}"
        )

    def state(self, live: LiveBuffer) -> dict[str, Any]:
        """The optimizer's state of a buffer's master; empty before the first step."""
        return dict(self.wrapper.base.state.get(live.master, {}))

    def state_dtype(self, master: str) -> str:
        """The dtype that the optimizer gives a new element-wise state: its master's, unless it is
        told fp32 (CPUAdam)."""
        return "float32" if getattr(self.wrapper.base, "fp32_optimizer_states", None) else master

    def present_states(self, live: LiveBuffer) -> list[tuple[str, str]]:
        """Element-wise states that exist now."""
        return [
            (key, dtype_name(value.dtype))
            for key, value in self.state(live).items()
            if key in ELEMENT and isinstance(value, torch.Tensor)
        ]

    def scalars(self, live: LiveBuffer) -> dict[str, float]:
        return {
            key: float(value)
            for key, value in self.state(live).items()
            if key not in ELEMENT and value is not None
        }

    def parts(self) -> list[tuple[int, int]]:
        """This rank's (buffer number, partition) in the manifest of all stages."""
        optimizer = [(self.first_buffer + i, live.part) for i, live in enumerate(self.buffers)]
        return optimizer + [
            (self.first_value + i, part) for i, (*_, part) in enumerate(self.values.values())
        ]

    def tensor(self, slot: Slot) -> torch.Tensor:
        """The memory of one of this rank's slots, flat, detached."""
        if slot.state == VALUE:
            found = list(self.values.values())[slot.buffer - self.first_value][2]
        else:
            live = self.buffers[slot.buffer - self.first_buffer]
            found = (
                live.master
                if slot.state == MASTER
                else self.wrapper.base.state[live.master][slot.state]
            )
        return _flat(found.detach())


def _one_order(parts: Sequence[Part]) -> list[list[str]]:
    """The groups of all stages as an optimizer without a pipeline has them: a stage may lack a
    group, so where the stages count differently groups are one that have the same settings."""
    counts = {len(part.order) for part in parts}
    out: dict[Any, dict[str, None]] = {}
    for part in parts:
        for number, (names, group) in enumerate(zip(part.order, part.holds.groups, strict=True)):
            settings = repr(
                sorted((k, v) for k, v in group.items() if k not in ("lr", "initial_lr"))
            )
            out.setdefault(number if len(counts) == 1 else settings, {}).update(
                dict.fromkeys(names)
            )
    return [list(names) for names in out.values()]


def is_pipeline(engine: Any) -> bool:
    """Whether the engine is DeepSpeed's PipelineEngine."""
    from deepspeed.runtime.pipe.engine import PipelineEngine

    return isinstance(engine, PipelineEngine)


def parallel_of(engine: Any) -> tuple[tuple[int, int], tuple[int, int]]:
    """((tensor-parallel size, rank), (pipeline stages, this rank's)). DeepSpeed's "model parallel"
    ranks are both together."""
    if is_pipeline(engine):
        grid = engine.grid
        return (
            (int(grid.get_slice_parallel_world_size()), int(grid.get_slice_parallel_rank())),
            (int(engine.num_stages), int(engine.stage_id)),
        )
    size = int(engine.mp_world_size)
    return (size, int(engine.mpu.get_model_parallel_rank()) if size > 1 else 0), (1, 0)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_contiguous():
        raise UnsupportedError(
            "a live tensor is not contiguous",
            found=f"shape {tuple(tensor.shape)}, strides {tensor.stride()}",
            fix="make it contiguous when the model is built",
        )
    return tensor.view(-1)


def _number(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return float(value)
    return tuple(_number(v) for v in value) if isinstance(value, list | tuple) else value


def dtype_name(dtype: torch.dtype) -> str:
    """As manifests write it."""
    return str(dtype).removeprefix("torch.")
