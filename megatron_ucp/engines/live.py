"""What a live DeepSpeed engine holds, as a manifest, and where each slot of it lies in memory.

One class per optimizer wrapper of DeepSpeed 0.19.8; the attributes that they read are those that the wrapper itself
steps with (reference: `deepspeed/runtime/zero/stage_1_and_2.py`, `stage3.py`, `bf16_optimizer.py`, `fp16/`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron_ucp.core import zero
from megatron_ucp.core.manifest import Manifest, ParamSpec, Tie
from megatron_ucp.core.mesh import Mesh
from megatron_ucp.core.plan import Slot
from megatron_ucp.core.states import ELEMENT, MASTER, VALUE
from megatron_ucp.core.zero import FlatBuffer, Member
from megatron_ucp.errors import LayoutError, UnsupportedError
from megatron_ucp.formats.optimizer_files import STRUCTURE

# How an optimizer is run on some hardware; not what it computes.
IMPLEMENTATION = frozenset({"foreach", "fused", "capturable", "differentiable"})


@dataclass(frozen=True)
class LiveBuffer:
    """One flat buffer: parameters with their starts, this rank's partition of it, and the master tensor."""

    params: tuple[Any, ...]
    starts: tuple[int, ...]
    length: int
    partitions: int
    part: int
    rule: str
    master: torch.Tensor
    group: int | None


class Wrapper:
    """Base: an optimizer wrapper, `opt`, around the optimizer that steps, `base`."""

    engine_name = ""
    zero = 0

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.opt = engine.optimizer
        self.base = self.opt.optimizer

    def buffers(self) -> list[LiveBuffer]:
        raise NotImplementedError

    def prepare(self) -> None:
        """Before anything is read or written."""

    def restore(self) -> None:
        """Undoes `prepare`. Collective."""

    def refresh(self) -> None:
        """Makes the training copies of all ranks equal to the masters. Collective."""
        raise NotImplementedError

    def group_of(self, flat: torch.Tensor) -> int | None:
        """Number of the param group that steps a master tensor."""
        for number, group in enumerate(self.base.param_groups):
            if any(p is flat for p in group["params"]):
                return number
        return None

    def scaler(self) -> tuple[Any, Mapping[str, str]]:
        """The object with the loss scale, and canonical field -> attribute."""
        return self.opt.loss_scaler, {}


class Zero12(Wrapper):
    """DeepSpeedZeroOptimizer, stages 1 and 2."""

    engine_name = "zero12"

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        self.zero = 2 if self.opt.partition_gradients else 1

    def buffers(self) -> list[LiveBuffer]:
        out: list[LiveBuffer] = []
        for g, master in enumerate(self.opt.single_partition_of_fp32_groups):
            params, starts = self.opt.round_robin_bit16_groups[g], self.opt.round_robin_bit16_offsets[g]
            flat = self.opt.bit16_groups_flat[g]
            _check_starts(self.engine, params, starts, flat)
            out.append(LiveBuffer(tuple(params), tuple(starts), flat.numel(), self.opt.partition_count[g],
                                  _rank_in(self.opt.real_dp_process_group[g]), "whole", master, self.group_of(master)))
        return out

    def refresh(self) -> None:
        self.opt.update_lp_params()
        self.opt._link_all_hp_params()
        self.opt._hp_optimizer_states_linked = False  # the state tensors may be new: link them again on first use


class Bf16(Wrapper):
    """BF16_Optimizer: ZeRO-1 with fp32 gradient accumulation."""

    engine_name = "bf16"
    zero = 1

    def buffers(self) -> list[LiveBuffer]:
        out: list[LiveBuffer] = []
        for g, master in enumerate(self.opt.fp32_groups_flat_partition):
            params, flat = self.opt.bf16_groups[g], self.opt.bf16_groups_flat[g]
            starts, _ = zero.aligned_starts([p.numel() for p in params])
            _check_starts(self.engine, params, starts, flat)
            out.append(LiveBuffer(tuple(params), tuple(starts), flat.numel(), self.opt.partition_count[g],
                                  _rank_in(self.opt.real_dp_process_group[g]), "whole", master, self.group_of(master)))
        return out

    def refresh(self) -> None:
        self.opt.update_lp_params()
        self.opt._link_all_hp_params()
        self.opt._hp_optimizer_states_linked = False

    def scaler(self) -> tuple[Any, Mapping[str, str]]:
        return None, {}


class Zero3(Wrapper):
    """DeepSpeedZeroOptimizer_Stage3."""

    engine_name = "zero3"
    zero = 3

    def prepare(self) -> None:
        self.opt.checkpoint_event_prologue()

    def restore(self) -> None:
        self.opt.checkpoint_event_epilogue()

    def buffers(self) -> list[LiveBuffer]:
        out: list[LiveBuffer] = []
        for i, master in enumerate(self.opt.fp32_partitioned_groups_flat):
            params = self.opt.fp16_groups[i]
            group = self.opt._get_sub_group_process_group(i)
            count = torch.distributed.get_world_size(group=group)
            starts, used = zero.aligned_starts([p.ds_tensor.ds_numel for p in params])
            for param, start in zip(params, starts, strict=True):
                where = self.opt.grad_position[self.opt.get_param_id(param)]
                if (where[0], where[1], where[2]) != (i, start, param.ds_tensor.ds_numel) or \
                        param.ds_tensor.ds_numel != -(-param.ds_numel // count):
                    raise LayoutError("the engine keeps a parameter elsewhere than ZeRO-3's formulas say",
                                      parameter=self.engine.param_names[param], found=str(where),
                                      expected=f"sub-group {i}, offset {start}, {-(-param.ds_numel // count)} elements")
            out.append(LiveBuffer(tuple(params), tuple(starts), used, count, _rank_in(group), "each", master,
                                  self.opt.sub_group_to_group_id[i]))
        return out

    def refresh(self) -> None:
        for i, master in enumerate(self.opt.fp32_partitioned_groups_flat):
            flat = self.opt.fp16_partitioned_groups_flat[i]
            flat.data.copy_(master.data)
            # as DeepSpeed's own load does: the partitions may have been moved off the flat buffer
            for piece, values in zip(self.opt.fp16_partitioned_groups[i],
                                     self.opt.unflatten(flat, self.opt.fp16_partitioned_groups[i]), strict=True):
                piece.data = values.data
        self.opt.checkpoint_event_epilogue()


class Unfused(Wrapper):
    """FP16_UnfusedOptimizer: bf16 and fp16 at stage 0."""

    engine_name = "zero0"

    def buffers(self) -> list[LiveBuffer]:
        return [LiveBuffer((param,), (0,), param.numel(), 1, 0, "whole", master, g)
                for g, (params, masters) in enumerate(zip(self.opt.fp16_groups, self.opt.fp32_groups, strict=True))
                for param, master in zip(params, masters, strict=True)]

    def refresh(self) -> None:
        for params, masters in zip(self.opt.fp16_groups, self.opt.fp32_groups, strict=True):
            for param, master in zip(params, masters, strict=True):
                param.data.copy_(master.data)

    def scaler(self) -> tuple[Any, Mapping[str, str]]:
        return self.opt.loss_scale_config, {"dynamic": "dynamic_loss_scale", "min_scale": "min_loss_scale"}


class FusedFlat(Unfused):
    """FP16_Optimizer: FusedAdam at stage 0."""

    def buffers(self) -> list[LiveBuffer]:
        out: list[LiveBuffer] = []
        for g, master in enumerate(self.opt.fp32_groups_flat):
            params = self.opt.fp16_groups[g]
            starts, used = zero.aligned_starts([p.numel() for p in params])
            out.append(LiveBuffer(tuple(params), tuple(starts), used, 1, 0, "whole", master, self.group_of(master)))
        return out

    def refresh(self) -> None:
        for params, master in zip(self.opt.fp16_groups, self.opt.fp32_groups_flat, strict=True):
            at = 0
            for param in params:
                param.data.copy_(master.data[at:at + param.numel()].view_as(param))
                at += param.numel()


class Plain(Wrapper):
    """The user's own optimizer, unwrapped: fp32 at stage 0. Its parameters are the masters."""

    engine_name = "zero0"

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.opt = self.base = engine.optimizer

    def buffers(self) -> list[LiveBuffer]:
        return [LiveBuffer((param,), (0,), param.numel(), 1, 0, "whole", param, g)
                for g, group in enumerate(self.base.param_groups) for param in group["params"]
                if param.requires_grad and param.numel()]

    def refresh(self) -> None:
        pass

    def scaler(self) -> tuple[Any, Mapping[str, str]]:
        return None, {}


class NoOptimizer(Plain):
    """An engine without an optimizer: weights only."""

    engine_name = "none"

    def buffers(self) -> list[LiveBuffer]:
        return []


_WRAPPERS: dict[str, type[Wrapper]] = {
    "DeepSpeedZeroOptimizer": Zero12, "BF16_Optimizer": Bf16, "DeepSpeedZeroOptimizer_Stage3": Zero3,
    "FP16_UnfusedOptimizer": Unfused, "FP16_Optimizer": FusedFlat,
}


def wrapper_of(engine: Any) -> Wrapper:
    """The wrapper class for an engine. Raises UnsupportedError for one that is not known."""
    optimizer = engine.optimizer
    if optimizer is None:
        return NoOptimizer(engine)
    kind = _WRAPPERS.get(type(optimizer).__name__)
    if kind is not None:
        return kind(engine)
    if isinstance(optimizer, torch.optim.Optimizer):
        return Plain(engine)
    raise UnsupportedError("this optimizer wrapper is not known", found=type(optimizer).__qualname__,
                           expected=", ".join([*_WRAPPERS, "a torch optimizer at stage 0"]))


def _rank_in(group: Any) -> int:
    return torch.distributed.get_rank(group=group)


def _check_starts(engine: Any, params: Sequence[Any], starts: Sequence[int], flat: torch.Tensor) -> None:
    """Raises LayoutError where a parameter is not the view of the flat buffer that its start says."""
    for param, start in zip(params, starts, strict=True):
        found = (param.data_ptr() - flat.data_ptr()) / flat.element_size()
        if found != start:
            raise LayoutError("a parameter does not lie where its flat buffer says", parameter=engine.param_names[param],
                              expected=f"element {start}", found=f"element {found}",
                              fix="load before states are offloaded, and do not replace param.data")


class Live:
    """A live engine as a manifest of the states `states(buffer, group)` and a way to its tensors.

    `buffers` are in the manifest's order: the optimizer's first, then one per frozen parameter and module buffer.
    """

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.wrapper = wrapper_of(engine)
        self.wrapper.prepare()
        self.buffers = self.wrapper.buffers()
        self.names: dict[Any, str] = engine.param_names
        self.values = self._values()

    def _values(self) -> dict[str, tuple[str, tuple[int, ...], torch.Tensor, int, int]]:
        """Frozen parameters and persistent module buffers: kind, full shape, tensor, partitions, this rank's one."""
        stepped = {id(p) for buffer in self.buffers for p in buffer.params}
        out: dict[str, tuple[str, tuple[int, ...], torch.Tensor, int, int]] = {}
        named = dict(self.engine.module.named_parameters())
        buffers = set(self.engine._get_buffer_names())
        found: dict[str, torch.Tensor] = {**named, **{n: b for n, b in self.engine.module.named_buffers() if n in buffers}}
        for name in self.engine.module.state_dict(keep_vars=True) if self.wrapper.zero < 3 else found:
            tensor = found.get(name)
            if tensor is None or id(tensor) in stepped:
                continue
            if name in named and hasattr(tensor, "ds_tensor"):
                group = getattr(tensor, "ds_process_group", None)
                count = torch.distributed.get_world_size(group=group)
                out[name] = ("frozen", tuple(tensor.ds_shape), tensor.ds_tensor.data, count, _rank_in(group))
            else:
                out[name] = ("frozen" if name in named else "buffer", tuple(tensor.shape), tensor.data, 1, 0)
        return out

    def ties(self) -> tuple[Tie, ...]:
        """Names of one parameter beside the first one."""
        first: dict[int, str] = {}
        aliases: dict[str, list[str]] = {}
        for name, param in self.engine.module.named_parameters(remove_duplicate=False):
            if first.setdefault(id(param), name) != name:
                aliases.setdefault(first[id(param)], []).append(name)
        return tuple(Tie(name, tuple(found)) for name, found in aliases.items())

    def order(self) -> list[list[str]]:
        """Names of each group's trainable parameters in the order of the client's optimizer."""
        groups = getattr(self.wrapper.opt, "bit16_groups", None) or [b.params for b in self.buffers]
        numbers = range(len(groups)) if hasattr(self.wrapper.opt, "bit16_groups") else [b.group for b in self.buffers]
        out: list[list[str]] = [[] for _ in getattr(self.wrapper.base, "param_groups", [])]
        for number, params in zip(numbers, groups, strict=True):
            if number is not None and number < len(out):
                out[number] += [self.names[p] for p in params]
        return out

    def manifest(self, states: Callable[[LiveBuffer], Sequence[tuple[str, str]]]) -> Manifest:
        """The engine's manifest with the given element-wise states (name, dtype) besides the masters."""
        params: list[ParamSpec] = []
        buffers: list[FlatBuffer] = []
        for live in self.buffers:
            members: list[Member] = []
            for param, start in zip(live.params, live.starts, strict=True):
                shape = tuple(getattr(param, "ds_shape", param.shape))
                name = self.names[param]
                params.append(ParamSpec(name, shape, _dtype_name(param.dtype)))
                members.append(Member(name, start, int(torch.Size(shape).numel())))
            buffers.append(FlatBuffer(tuple(members), live.length, live.partitions, live.rule,
                                      ((MASTER, _dtype_name(live.master.dtype)), *states(live)), live.group))
        for name, (kind, shape, tensor, partitions, _) in self.values.items():
            size = int(torch.Size(shape).numel())
            params.append(ParamSpec(name, shape, _dtype_name(tensor.dtype), kind))
            each = partitions > 1 or (self.wrapper.zero == 3 and kind == "frozen")
            buffers.append(FlatBuffer((Member(name, 0, size),), -(-size // partitions), partitions,
                                      "each" if each else "whole", ((VALUE, _dtype_name(tensor.dtype)),)))
        return Manifest(self.wrapper.engine_name, self.mesh(), tuple(params), tuple(buffers), self.groups(),
                        (*(self.scalars(live) for live in self.buffers), *({},) * len(self.values)), self.ties(),
                        optimizer=self.optimizer_name())

    def mesh(self) -> Mesh:
        return Mesh(dp=int(self.engine.seq_dp_world_size), zero=self.wrapper.zero)

    def groups(self) -> tuple[Mapping[str, Any], ...]:
        groups = getattr(self.wrapper.base, "param_groups", [])
        return tuple({k: _number(v) for k, v in group.items() if k not in STRUCTURE} for group in groups)

    def optimizer_name(self) -> str:
        """Such as "torch.AdamW"; "" without an optimizer."""
        kind = type(self.wrapper.base)
        return "" if self.wrapper.base is None else f"{kind.__module__.partition('.')[0]}.{kind.__qualname__}"

    def state(self, live: LiveBuffer) -> dict[str, Any]:
        """The optimizer's state of a buffer's master; empty before the first step."""
        return dict(self.wrapper.base.state.get(live.master, {}))

    def state_dtype(self, live: LiveBuffer) -> str:
        """The dtype that the optimizer gives a new element-wise state: its master's, unless it is told fp32 (CPUAdam)."""
        told = getattr(self.wrapper.base, "fp32_optimizer_states", None)
        return "float32" if told else _dtype_name(live.master.dtype)

    def present_states(self, live: LiveBuffer) -> list[tuple[str, str]]:
        """Element-wise states that exist now."""
        return [(key, _dtype_name(value.dtype)) for key, value in self.state(live).items()
                if key in ELEMENT and isinstance(value, torch.Tensor)]

    def scalars(self, live: LiveBuffer) -> dict[str, float]:
        return {key: float(value) for key, value in self.state(live).items() if key not in ELEMENT and value is not None}

    def parts(self) -> list[tuple[int, int]]:
        """This rank's (buffer number, partition) in the manifest's order."""
        optimizer = [(i, live.part) for i, live in enumerate(self.buffers)]
        return optimizer + [(len(self.buffers) + i, part) for i, (*_, part) in enumerate(self.values.values())]

    def tensor(self, slot: Slot) -> torch.Tensor:
        """The memory of one of this rank's slots, flat, detached."""
        if slot.state == VALUE:
            found = list(self.values.values())[slot.buffer - len(self.buffers)][2]
        else:
            live = self.buffers[slot.buffer]
            found = live.master if slot.state == MASTER else self.wrapper.base.state[live.master][slot.state]
        return _flat(found.detach())


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_contiguous():
        raise UnsupportedError("a live tensor is not contiguous", found=f"shape {tuple(tensor.shape)}, "
                               f"strides {tensor.stride()}", fix="make it contiguous when the model is built")
    return tensor.view(-1)


def _number(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return float(value)
    return tuple(_number(v) for v in value) if isinstance(value, list | tuple) else value


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
