"""What this rank holds of a live DeepSpeed engine: its own pipeline stage. No collectives."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from megatron_ucp.core.experts import (
    LocalExperts,
    PartitionRanks,
    counts_of,
    expert_place,
    slices_of,
)
from megatron_ucp.core.flat import (
    FlatBuffer,
    Member,
    Scalars,
    States,
    alone,
    one_after_another,
    slices,
)
from megatron_ucp.core.join_ranks import Stage
from megatron_ucp.core.manifest import ParamGroup, ParamSpec, Tie
from megatron_ucp.core.mesh import Coords, Mesh
from megatron_ucp.core.names import MASTER, VALUE, dtype_name
from megatron_ucp.engines.deepspeed.modules import (
    is_uneven,
    layouts_of,
    renamed_entries,
    stacks_of,
    with_experts,
)
from megatron_ucp.engines.deepspeed.optimizer import (
    LiveBuffer,
    WeightsAlone,
    Wrapper,
    rank_in,
    stepper_of,
    wrapper_of,
)
from megatron_ucp.engines.deepspeed.program import unsaved_buffers
from megatron_ucp.engines.live import group_of, order_of, spec_of
from megatron_ucp.engines.pt_files import replicated_params
from megatron_ucp.engines.record import record_of
from megatron_ucp.errors import UnsupportedError
from megatron_ucp.families.family import Model
from megatron_ucp.formats.deepspeed.files import at_tp
from megatron_ucp.formats.deepspeed.weights import PipeNames, by_dotted_name
from megatron_ucp.formats.optimizers import Kept, is_element, is_scalar, kept_by, name_in_table
from megatron_ucp.formats.param_groups import GROUP_MARKS


@dataclass(frozen=True)
class LiveValue:
    """A value that no optimizer steps: `tensor` is what this rank has of it, partition `part` of
    `partitions`: the engine's own, so that whoever keeps this keeps no memory that the engine let
    go of."""

    kind: str
    shape: tuple[int, ...]
    tensor: torch.Tensor
    partitions: int = 1
    part: int = 0
    split: bool = False

    def slices(self) -> list["LiveValue"]:
        """Of a stacked parameter: one for each expert. Raises UnsupportedError for one that ZeRO-3
        partitions, which DeepSpeed does not save."""
        if self.split:
            raise UnsupportedError(
                "frozen experts of AutoEP at ZeRO-3 are not supported",
                fix="train the experts, or use ZeRO-2: DeepSpeed does not save them either",
            )
        return [replace(self, shape=self.shape[1:], tensor=one) for one in self.tensor]


@dataclass(frozen=True)
class Part:
    """What one place (see `Mesh.holding`) tells the others: all that it holds, and the order of
    each group's parameters in the client's optimizer."""

    holds: Stage
    order: tuple[tuple[str, ...], ...]
    ties: tuple[Tie, ...]


class LocalShard:
    """A rank's stage: names, buffers, values; or its `weights` alone, as of an engine without an
    optimizer. Nothing in the engine is changed."""

    def __init__(self, engine: Any, model: Model | None, weights: bool = False) -> None:
        self.engine, self.model = engine, model
        (tp, self.tp_rank), (pp, self.number) = parallel_of(engine)
        self.wrapper: Wrapper = WeightsAlone(engine) if weights else wrapper_of(engine)
        sp, dp = sequence_parallel_of(engine)
        mesh = Mesh(tp=tp, pp=pp, sp=sp, dp=dp, zero=self.wrapper.zero)
        self.mesh = with_experts(engine, mesh)
        self.data_rank = rank_in(engine.seq_data_parallel_group)  # of those with its buffers
        self.layouts = layouts_of(engine, tp, self.tp_rank)
        self.uneven = is_uneven(self.layouts, tp)
        self.places = self.mesh.holding(self.uneven)
        rank = torch.distributed.get_rank()
        self.ep_rank, self.etp_rank = self.mesh.expert_place(rank)
        self.stacks = stacks_of(engine)
        self.experts = LocalExperts(counts_of(self._listed()), self.mesh.ep, self.ep_rank)
        self.spread = PartitionRanks.on(self.mesh)
        self.pipe = PipeNames(model.pipe) if model is not None and is_pipeline(engine) else None
        self.names = {param: self._names_of(name) for param, name in engine.param_names.items()}

    @cached_property
    def buffers(self) -> list[LiveBuffer]:
        """What this rank has of the optimizer's flat buffers."""
        found = [live for live in self.wrapper.buffers() if live.length or not self.uneven]
        return [own for live in found for own in self._by_expert(live)]

    @cached_property
    def replicated(self) -> Mapping[str, torch.nn.Parameter]:
        """As `replicated_params`: parameters and no storages, so that whoever keeps this keeps no
        memory that the engine let go of."""
        return replicated_params(self.engine)

    def _own_names(self, name: str) -> list[str]:
        """The module's name of a parameter, or those of the slices of a stacked one."""
        return slices_of(name, self.stacks[name]) if name in self.stacks else [name]

    def _names_of(self, name: str) -> list[str]:
        """The canonical names of what the module calls `name`."""
        return [self._name(own) for own in self._own_names(name)]

    def _listed(self) -> list[str]:
        """The module's own names of all parameters, of a stacked one those of its slices."""
        named = self.engine.param_names.values()
        return [own for name in named for own in self._own_names(name)]

    def _by_expert(self, live: LiveBuffer) -> list[LiveBuffer]:
        """A buffer of the optimizer; of a stacked parameter that it keeps as it is, one for each
        expert: in files that no ZeRO partitioned they have records of their own."""
        name = self.engine.param_names[live.params[0]] if len(live.params) == 1 else ""
        shaped = live.master.dim() > 1 and live.partitions == 1
        if name not in self.stacks or not shaped:
            return [live]
        count = self.stacks[name]
        return [replace(live, length=live.length // count, expert=k) for k in range(count)]

    def _name(self, name: str) -> str:
        """The canonical name of a parameter or buffer. Raises ModelMismatchError for one that the
        pipeline's family lacks."""
        return self._pipe_name(self.experts.whole_name(name))

    @property
    def at(self) -> Coords:
        """This rank's place (see `Mesh.holding`)."""
        return self.along(axis for axis, _ in self.places[0])

    @property
    def speaks(self) -> bool:
        """Whether this is the first rank at its place. Without experts the engine's own groups
        say so, whatever the order of its ranks."""
        if self.mesh.ep == 1:
            return (self.tp_rank == 0 or self.uneven) and self.data_rank == 0
        return torch.distributed.get_rank() == self.mesh.rank_of(self.at, 0)

    def cut(self, buffer: FlatBuffer) -> Coords:
        """This rank's place along the axes that cut one of its buffers."""
        return self.along(buffer.axes)

    def along(self, axes: Iterable[str]) -> Coords:
        """This rank's place along some axes."""
        experts = expert_place(self.number, self.ep_rank, self.etp_rank)
        here = dict((*at_tp(self.tp_rank), *experts))
        return tuple((axis, here[axis]) for axis in axes)

    # ------------------------------------------------ values

    @cached_property
    def values(self) -> dict[str, LiveValue]:
        """Frozen parameters and persistent module buffers; without an optimizer all parameters."""
        stepped = {id(param) for buffer in self.buffers for param in buffer.params}
        params = dict(self.engine.module.named_parameters())
        kept = {*self.engine._get_buffer_names()} - unsaved_buffers(self.engine.module)
        buffers = {n: b for n, b in self.engine.module.named_buffers() if n in kept}
        found: dict[str, Any] = {**params, **buffers}
        listed = list(found)
        if self.wrapper.zero < 3:
            entries = map(str, by_dotted_name(self.engine.module.state_dict(keep_vars=True)))
            listed = [self.renamed.get(name, name) for name in entries]
        out: dict[str, LiveValue] = {}
        for name in listed:
            tensor = found.get(name)
            if tensor is None or id(tensor) in stepped:
                continue
            if self.uneven and name in self.layouts and not _shape(tensor).numel():
                continue  # other ranks have all of it, and this one has an empty share
            value = self._value(tensor, name in params)
            if name in self.stacks:
                out |= dict(zip(self._names_of(name), value.slices(), strict=True))
            else:
                out[self._name(name)] = value
        return out

    @cached_property
    def renamed(self) -> dict[str, str]:
        """Names in the module's state dict that a hook made, and those of the parameters and
        buffers that they are."""
        return {} if self.pipe else renamed_entries(self.engine.module)

    def _value(self, tensor: Any, is_param: bool) -> LiveValue:
        if not is_param:
            return LiveValue("buffer", tuple(tensor.shape), tensor)
        # an engine without an optimizer holds the weights of a model that others train
        idle = self.wrapper.base is None and tensor.requires_grad
        kind = "trainable" if idle else "frozen"
        if not hasattr(tensor, "ds_tensor"):
            return LiveValue(kind, tuple(tensor.shape), tensor)
        group = getattr(tensor, "ds_process_group", None)
        count = torch.distributed.get_world_size(group=group)
        shape, own = tuple(tensor.ds_shape), tensor.ds_tensor
        return LiveValue(kind, shape, own, count, rank_in(group), True)

    def ties(self) -> tuple[Tie, ...]:
        """Names of one parameter beside the first one."""
        first: dict[int, str] = {}
        aliases: dict[str, list[str]] = {}
        for pipe, param in self.engine.module.named_parameters(remove_duplicate=False):
            name = self._names_of(pipe)[0]
            if first.setdefault(id(param), name) != name:
                aliases.setdefault(first[id(param)], []).append(name)
        return tuple(Tie(name, tuple(found)) for name, found in aliases.items())

    # ------------------------------------------------ the optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return getattr(self.wrapper.base, "param_groups", [])

    def groups(self) -> tuple[ParamGroup, ...]:
        name = self.optimizer_name()
        base = self.wrapper.base
        return tuple(
            group_of(group, GROUP_MARKS, name, stepper_of(base, group))
            for group in self.param_groups
        )

    def optimizer_name(self) -> str:
        """Such as "torch.AdamW"; "" without an optimizer. A subclass is taken as the class that is
        known."""
        base = self.wrapper.base
        return "" if base is None else name_in_table(type(base))

    def keeps(self, group: Mapping[str, Any]) -> Kept:
        """What the optimizer keeps for a group, and how it stores the step."""
        kept = kept_by(self.optimizer_name(), group)
        if kept.step != "either":
            return kept
        other = name_in_table(type(stepper_of(self.wrapper.base, group)))
        return replace(kept, step="tensor" if other.startswith("torch.") else "int")

    def order(self) -> tuple[tuple[str, ...], ...]:
        """Names of each group's trainable parameters in the order of the client's optimizer."""
        listed = getattr(self.wrapper.opt, "bit16_groups", None)
        if listed is None:
            numbered = [(buffer.group, buffer.params) for buffer in self.buffers]
        else:
            numbered = list(enumerate(listed))
        out: list[list[str]] = [[] for _ in self.param_groups]
        for number, params in numbered:
            if number is not None and number < len(out):
                out[number] += [name for param in params for name in self.names[param]]
        # a stacked parameter has a buffer for each of its experts where ZeRO partitions nothing
        return tuple(tuple(dict.fromkeys(names)) for names in out)

    def state(self, live: LiveBuffer) -> dict[str, Any]:
        """The optimizer's state of a buffer's master; empty before the first step."""
        return dict(self.wrapper.base.state.get(live.master, {}))

    def present_states(self, live: LiveBuffer) -> States:
        held = self.state(live).items()
        return tuple(
            (key, dtype_name(value.dtype))
            for key, value in held
            if is_element(key) and self._is_whole(live, key, value)
        )

    def _is_whole(self, live: LiveBuffer, state: str, value: Any) -> bool:
        """Whether a value is what this rank has of an element-wise state."""
        if not isinstance(value, torch.Tensor):
            return False
        if state not in live.uncut:
            return value.shape == live.master.shape
        return value.shape == (self._buffer(live, ()).of(state).elems(live.part),)

    def scalars(self, live: LiveBuffer) -> Scalars:
        held = self.state(live).items()
        return {k: float(v) for k, v in held if is_scalar(k) and _is_number(v)}

    def not_carried(self) -> list[str]:
        """Names of states that the optimizer keeps now and that no manifest can describe."""
        found: set[str] = set()
        for live in self.buffers:
            for key, value in self.state(live).items():
                whole = self._is_whole(live, key, value)
                fits = whole if is_element(key) else is_scalar(key) and _is_number(value)
                if not fits and value is not None:
                    found.add(str(key))
        return sorted(found)

    # ------------------------------------------------ as a manifest

    def part(self, present: bool) -> Part:
        """This stage; with the element-wise states that are `present`, or with masters alone.

        Raises LayoutError where a parameter contradicts its family.
        """
        params: list[ParamSpec] = []
        buffers: list[FlatBuffer] = []
        for live in self.buffers:
            states = self.present_states(live) if present else ()
            params += [
                self._spec(name, tuple(self.own_shape(param)), param, "trainable")
                for param in live.params
                for name in self._held(live, param)
            ]
            buffers.append(self._buffer(live, states))
        values: list[FlatBuffer] = []
        for name, value in self.values.items():
            spec = self._spec(name, value.shape, value.tensor, value.kind)
            params.append(replace(spec, order=order_of(value.tensor)))
            values.append(_value_buffer(name, value, self.spread.axes(name)))
        holds = Stage(tuple(params), tuple(buffers), self.groups(), tuple(values), self.at)
        return Part(holds, self.order(), self.ties())

    def _buffer(self, live: LiveBuffer, states: States) -> FlatBuffer:
        scalars = self.scalars(live)
        members: list[Member] = []
        for param, start in zip(live.params, live.starts, strict=True):
            size = self.own_shape(param).numel()
            names = self._held(live, param)
            stored = [Member(name, start, size, live.group, scalars) for name in names]
            members += slices(stored) if live.rule == "each" else one_after_another(stored)
        kept = ((MASTER, dtype_name(live.master.dtype)), *states)
        axes = self._axes_of([member.param for member in members])
        lies = live.length, live.partitions, live.rule
        return FlatBuffer(tuple(members), *lies, kept, axes=axes, uncut=live.uncut)

    def _axes_of(self, names: list[str]) -> tuple[str, ...]:
        """The axes that cut a buffer of some parameters. Raises UnsupportedError where experts are
        among others that other ranks share."""
        found = dict.fromkeys(map(self.spread.axes, names)) or {self.spread.axes(""): None}
        if len(found) > 1:
            expert = next(name for name in names if self.spread.is_apart(name))
            raise UnsupportedError(
                "a parameter group mixes experts with parameters that other ranks share",
                parameter=expert,
                expected="groups of their own for experts",
                found=f"a group of {len(names)} parameters",
                fix="use deepspeed.moe.utils.split_params_into_different_moe_groups_for_optimizer",
            )
        return next(iter(found))

    def _held(self, live: LiveBuffer, param: Any) -> list[str]:
        """The canonical names of what a buffer has of a live parameter."""
        names = self.names[param]
        return names if live.expert is None else [names[live.expert]]

    def own_shape(self, param: Any) -> torch.Size:
        """The shape of a parameter on this rank, or that of each slice of a stacked one."""
        stacked = self.engine.param_names[param] in self.stacks
        return _shape(param)[1:] if stacked else _shape(param)

    def _spec(self, name: str, local: tuple[int, ...], tensor: Any, kind: str) -> ParamSpec:
        if name in self.layouts:
            shape, layout = self.layouts[name]
            return ParamSpec(name, shape, dtype_name(tensor.dtype), kind, layout)
        return spec_of(self.model, self.mesh, self._expert_counts, name, local, tensor, kind)

    @cached_property
    def _expert_counts(self) -> dict[str, int]:
        """Experts of each layer, by its canonical name."""
        local = counts_of(map(self._pipe_name, self._listed()))
        return {layer: count * self.mesh.ep for layer, count in local.items()}

    def _pipe_name(self, name: str) -> str:
        return self.pipe.find(name) if self.pipe else name


def _shape(param: Any) -> torch.Size:
    """Rank-local, before ZeRO-3 cuts it."""
    return torch.Size(getattr(param, "ds_shape", param.shape))


def _value_buffer(name: str, value: LiveValue, axes: tuple[str, ...]) -> FlatBuffer:
    size = int(torch.Size(value.shape).numel())
    states = ((VALUE, dtype_name(value.tensor.dtype)),)
    if not value.split:
        return alone(name, size, states, axes=axes)
    length = -(-size // value.partitions)
    return FlatBuffer((Member(name, 0, size),), length, value.partitions, "each", states)


def is_pipeline(engine: Any) -> bool:
    """Whether the engine is DeepSpeed's PipelineEngine."""
    from deepspeed.runtime.pipe.engine import PipelineEngine

    return isinstance(engine, PipelineEngine)


def parallel_of(engine: Any) -> tuple[tuple[int, int], tuple[int, int]]:
    """((tensor-parallel size, rank), (pipeline stages, this rank's)). DeepSpeed's "model parallel"
    ranks are both together."""
    if is_pipeline(engine):
        grid = engine.grid
        tensor = (
            int(grid.get_slice_parallel_world_size()),
            int(grid.get_slice_parallel_rank()),
        )
        return tensor, (int(engine.num_stages), int(engine.stage_id))
    size = int(engine.mp_world_size)
    return (size, _tensor_rank(engine, size) if size > 1 else 0), (1, 0)


def _tensor_rank(engine: Any, size: int) -> int:
    """This rank among those that cut the engine's parameters. It is asked once: megatron-core's
    groups may be those of another engine later. Raises UnsupportedError where they are already."""
    record = record_of(engine)
    if record.tensor_rank is None:
        sizes = getattr(engine.mpu, "get_model_parallel_world_size", None)
        found = size if sizes is None else int(sizes())
        if found != size:
            raise UnsupportedError(
                "the tensor-parallel groups are not those that the engine was made with",
                expected=f"{size} ranks",
                found=f"{found} ranks, as those of another engine",
                fix="attach the engine (ucp.attach) before the groups of another one are made",
            )
        record.tensor_rank = int(engine.mpu.get_model_parallel_rank())
    return record.tensor_rank


def sequence_parallel_of(engine: Any) -> tuple[int, int]:
    """(Sequence-parallel size, data-parallel size). Under Ulysses ZeRO partitions over both, and
    DeepSpeed's files count their product as data-parallel ranks."""
    whole, size = int(engine.seq_dp_world_size), int(engine.sequence_parallel_size)
    folded = hasattr(engine.mpu, "get_sequence_data_parallel_world_size")
    return (size, whole // size) if folded else (1, whole)


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    return isinstance(value, int | float)


def one_order(parts: list[Part]) -> list[list[str]]:
    """The groups of all stages as an optimizer without a pipeline has them: a stage may lack a
    group, so where the stages count differently groups are one that have the same settings."""
    alike = len({len(part.order) for part in parts}) == 1
    out: dict[Any, dict[str, None]] = {}
    for part in parts:
        for number, (names, group) in enumerate(zip(part.order, part.holds.groups, strict=True)):
            settings = {k: v for k, v in group.settings.items() if k not in ("lr", "initial_lr")}
            key = number if alike else repr(sorted(settings.items()))
            out.setdefault(key, {}).update(dict.fromkeys(names))
    return [list(names) for names in out.values()]
