"""DeepSpeed 0.19.8's optimizer wrappers: which flat buffers they hold, and how their training
copies are refreshed."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron_ucp.core import flat
from megatron_ucp.core.names import Keeper
from megatron_ucp.engines.live import broadcast_each, on_cpu, params_of, parts_of
from megatron_ucp.engines.record import record_of
from megatron_ucp.errors import LayoutError, UnsupportedError
from megatron_ucp.formats.deepspeed.optimizers import steps_matrices, uncut_states

# ---- wrappers
#
# One class per wrapper; the attributes that they read are those that the wrapper itself steps with
# (reference: `deepspeed/runtime/zero/stage_1_and_2.py`, `stage3.py`, `bf16_optimizer.py`, `fp16/`).


@dataclass(frozen=True)
class LiveBuffer:
    """One flat buffer: parameters with their starts, this rank's partition of it, and the master
    tensor. Where an optimizer keeps a stacked parameter as it is, `expert` is the number of the
    slice that the buffer is. `uncut`: see `FlatBuffer`."""

    params: tuple[Any, ...]
    starts: tuple[int, ...]
    length: int
    partitions: int
    part: int
    rule: str
    master: torch.Tensor
    group: int | None
    expert: int | None = None
    uncut: tuple[str, ...] = ()

    def own(self, whole: torch.Tensor) -> torch.Tensor:
        """What the buffer has of its master, or of a state of the master's shape."""
        return whole if self.expert is None else whole[self.expert]


def _as_it_is(param: Any, master: torch.Tensor, group: int) -> LiveBuffer:
    """A parameter that an optimizer steps as it is."""
    return LiveBuffer((param,), (0,), param.numel(), 1, 0, "whole", master, group)


def _one_after_another(params: Sequence[Any]) -> tuple[Sequence[int], int]:
    """Where parameters begin, and where the last one ends."""
    return flat.aligned_starts([param.numel() for param in params])


class Wrapper:
    """Base: an optimizer wrapper, `opt`, around the optimizer that steps, `base`."""

    keeper: Keeper
    zero = 0
    is_saved = True  # whether DeepSpeed's own save writes such an engine

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.opt = engine.optimizer
        self.base = self.opt.optimizer

    def buffers(self) -> list[LiveBuffer]:
        raise NotImplementedError

    def prepare(self) -> None:
        """Before the first write."""

    def refresh(self) -> None:
        """Makes the training copies of all ranks equal to the masters. Collective."""
        raise NotImplementedError

    def group_of(self, flat: torch.Tensor) -> int | None:
        """Number of the param group that steps a master tensor."""
        for number, group in enumerate(self.base.param_groups):
            if any(p is flat for p in group["params"]):
                return number
        return None

    def momentum_dtype(self) -> torch.dtype | None:
        """That which Muon's momentum gets at the first step; None for that of the masters."""
        return None

    def scaler(self) -> tuple[Any, Mapping[str, str]]:
        """The object with the loss scale, and canonical field -> attribute."""
        return self.opt.loss_scaler, {}


class LiveZero12(Wrapper):
    """DeepSpeedZeroOptimizer, stages 1 and 2. Each group is a flat buffer that is cut as a whole;
    `lists` are the wrapper's own names of what it has for each: this rank's partition of the
    masters, parameters, weights in one tensor, and partitions of these."""

    keeper = Keeper.ZERO_1_OR_2
    lists = (
        "single_partition_of_fp32_groups",
        "round_robin_bit16_groups",
        "bit16_groups_flat",
        "parallel_partitioned_bit16_groups",
    )

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        self.zero = 2 if self.opt.partition_gradients else 1

    def _rows(self) -> Iterator[tuple[Any, ...]]:
        """Of each group what `lists` say, its number of partitions, and the ranks that have
        them."""
        names = (*self.lists, "partition_count", "real_dp_process_group")
        return zip(*(getattr(self.opt, name) for name in names), strict=True)

    def buffers(self) -> list[LiveBuffer]:
        out: list[LiveBuffer] = []
        for g, (master, params, weights, _, count, ranks) in enumerate(self._rows()):
            starts, group = self._starts(g, params), self.group_of(master)
            _check_starts(self.engine, params, starts, weights)
            stepped = {} if group is None else self.base.param_groups[group]
            uncut = uncut_states(stepped, self.keeper, self._is_offloaded)
            lies = tuple(params), tuple(starts), weights.numel(), count, rank_in(ranks)
            out.append(LiveBuffer(*lies, "whole", master, group, uncut=uncut))
        return out

    @property
    def _is_offloaded(self) -> bool:
        return getattr(self.opt, "cpu_offload", False)

    def _starts(self, group: int, params: Sequence[Any]) -> Sequence[int]:
        """Where parameters begin in the flat buffer of a group. DeepSpeed 0.19.0 keeps no list of
        it: there nothing lies between them."""
        offsets = getattr(self.opt, "round_robin_bit16_offsets", None)
        return _one_after_another(params)[0] if offsets is None else offsets[group]

    def momentum_dtype(self) -> torch.dtype | None:
        """That of the gradients that it averages."""
        if self._is_offloaded:
            return None
        apart = self.opt.use_grad_accum_attribute
        return self.opt.gradient_accumulation_dtype if apart else self.opt.dtype

    def refresh(self) -> None:
        rows = list(self._rows())
        if all(on_cpu(partitions) for _, _, _, partitions, _, _ in rows):
            # as `update_lp_params`, in place
            for master, _, _, partitions, _, ranks in rows:
                partitions[rank_in(ranks)].data.copy_(master.data)
            for _, _, _, partitions, _, ranks in rows:
                broadcast_each(partitions, ranks)
        else:
            self.opt.update_lp_params()
        self.opt._link_all_hp_params()
        # the tensors of the states may be new: before the first step there are none to be linked
        self.opt._hp_optimizer_states_linked = False
        if all(master in self.opt.optimizer.state for master, *_ in rows):
            self.opt._lazy_init_hp_params_optimizer_state()


class LiveBf16(LiveZero12):
    """BF16_Optimizer: ZeRO-1 with fp32 gradient accumulation."""

    keeper = Keeper.BF16
    lists = (
        "fp32_groups_flat_partition",
        "bf16_groups",
        "bf16_groups_flat",
        "bf16_partitioned_groups",
    )

    def __init__(self, engine: Any) -> None:
        Wrapper.__init__(self, engine)
        self.zero = 1

    def momentum_dtype(self) -> torch.dtype | None:
        return None

    def scaler(self) -> tuple[Any, Mapping[str, str]]:
        return None, {}


class LiveZero3(Wrapper):
    """DeepSpeedZeroOptimizer_Stage3."""

    keeper = Keeper.ZERO_3
    zero = 3

    def momentum_dtype(self) -> torch.dtype | None:
        return self.opt.communication_data_type

    def prepare(self) -> None:
        self.opt.checkpoint_event_prologue()

    def buffers(self) -> list[LiveBuffer]:
        out: list[LiveBuffer] = []
        for i, master in enumerate(self.opt.fp32_partitioned_groups_flat):
            params = self.opt.fp16_groups[i]
            group = self._process_group(i)
            count = torch.distributed.get_world_size(group=group)
            starts, used = flat.aligned_starts([p.ds_tensor.ds_numel for p in params])
            for param, start in zip(params, starts, strict=True):
                share = -(-param.ds_numel // count)
                where = tuple(self.opt.grad_position[self.opt.get_param_id(param)])
                if where[:3] != (i, start, share) or param.ds_tensor.ds_numel != share:
                    raise LayoutError(
                        "the engine keeps a parameter elsewhere than ZeRO-3's formulas say",
                        parameter=self.engine.param_names[param],
                        found=str(where),
                        expected=f"sub-group {i}, offset {start}, {share} elements",
                        fix="report this with the version of DeepSpeed: its ZeRO-3 divides "
                        "parameters otherwise than is known",
                    )
            lies = tuple(params), tuple(starts), used, count, rank_in(group)
            stepped = self.opt.sub_group_to_group_id[i]
            out.append(LiveBuffer(*lies, "each", master, stepped))
        return out

    def _process_group(self, sub_group: int) -> Any:
        """The ranks that share a sub-group; in DeepSpeed 0.19.0, which divides no experts at
        ZeRO-3, those of all."""
        own = getattr(self.opt, "_get_sub_group_process_group", None)
        return self.opt.dp_process_group if own is None else own(sub_group)

    def refresh(self) -> None:
        for i, master in enumerate(self.opt.fp32_partitioned_groups_flat):
            flat = self.opt.fp16_partitioned_groups_flat[i]
            flat.data.copy_(master.data)
            # as DeepSpeed's own load does: the partitions may have been moved off the flat buffer
            for piece, values in zip(
                self.opt.fp16_partitioned_groups[i],
                self.opt.unflatten(flat, self.opt.fp16_partitioned_groups[i]),
                strict=True,
            ):
                piece.data = values.data
        self._gather_small()
        self.opt.checkpoint_event_epilogue()

    def _gather_small(self) -> None:
        """Gathers the parameters that ranks keep whole, as they are small: those of a group of
        ranks at once. DeepSpeed's epilogue, which is next, gathers each by itself, which takes gloo
        longer than all else that it does; it gathers what is left out here."""
        groups: dict[tuple[Any, torch.dtype], list[Any]] = {}
        for param in self.opt.persistent_parameters:
            held = param.ds_tensor
            is_plain = held.status.name == "AVAILABLE" and not hasattr(held, "ds_quant_scale")
            if is_plain and param.ds_status.name == "NOT_AVAILABLE" and on_cpu([held]):
                groups.setdefault((param.ds_process_group, held.dtype), []).append(param)
        for (group, _), params in groups.items():
            if (count := torch.distributed.get_world_size(group)) == 1:
                continue
            own = torch.cat([param.ds_tensor.data.view(-1) for param in params])
            every = own.new_empty(count * len(own))
            torch.distributed.all_gather_into_tensor(every, own, group)
            shares = every.view(count, -1).split([p.ds_tensor.ds_numel for p in params], dim=1)
            for param, share in zip(params, shares, strict=True):
                param.data = share.reshape(-1)[: param.ds_numel].view(param.ds_shape)
                param.ds_status = type(param.ds_status).AVAILABLE


class LiveUnfused(Wrapper):
    """FP16_UnfusedOptimizer: bf16 and fp16 at stage 0."""

    keeper = Keeper.ZERO_0

    def buffers(self) -> list[LiveBuffer]:
        groups = zip(self.opt.fp16_groups, self.opt.fp32_groups, strict=True)
        return [
            _as_it_is(param, master, g)
            for g, lists in enumerate(groups)
            for param, master in zip(*lists, strict=True)
        ]

    def refresh(self) -> None:
        for live in self.buffers():
            live.params[0].data.copy_(live.master.data)

    def scaler(self) -> tuple[Any, Mapping[str, str]]:
        return self.opt.loss_scale_config, {
            "dynamic": "dynamic_loss_scale",
            "min_scale": "min_loss_scale",
        }


class LiveFusedFlat(LiveUnfused):
    """FP16_Optimizer: FusedAdam at stage 0."""

    def buffers(self) -> list[LiveBuffer]:
        out: list[LiveBuffer] = []
        for params, master in zip(self.opt.fp16_groups, self.opt.fp32_groups_flat, strict=True):
            starts, used = _one_after_another(params)
            lies = tuple(params), tuple(starts), used
            out.append(LiveBuffer(*lies, 1, 0, "whole", master, self.group_of(master)))
        return out

    def refresh(self) -> None:
        for live in self.buffers():
            for param, start in zip(live.params, live.starts, strict=True):
                param.data.copy_(live.master.data[start : start + param.numel()].view_as(param))


def remember_stepped(engine: Any) -> None:
    """Keeps which parameters a plain optimizer steps: some may be frozen later."""
    optimizer = engine.optimizer
    if isinstance(optimizer, torch.optim.Optimizer):
        params = (param for group in optimizer.param_groups for param in group["params"])
        stepped = (id(param) for param in params if param.requires_grad)
        record_of(engine).stepped = frozenset(stepped)


class LivePlain(Wrapper):
    """The user's own optimizer, unwrapped: fp32 at stage 0. Its parameters are the masters."""

    keeper = Keeper.ZERO_0

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.opt = self.base = engine.optimizer

    def buffers(self) -> list[LiveBuffer]:
        return [
            _as_it_is(param, param, g)
            for g, group in enumerate(self.base.param_groups)
            for param in group["params"]
            if param.numel() and self._is_stepped(param)
        ]

    def _is_stepped(self, param: torch.Tensor) -> bool:
        """Whether a parameter is one of the optimizer's, as it is under ZeRO: also where it was
        frozen after DeepSpeed was initialized, since then the optimizer goes on keeping its states.
        One that was frozen before is listed, and has none."""
        begun = record_of(self.engine).stepped
        return param.requires_grad or id(param) in begun or param in self.base.state

    def refresh(self) -> None:
        pass

    def scaler(self) -> tuple[Any, Mapping[str, str]]:
        return None, {}


class NoOptimizer(LivePlain):
    """An engine without an optimizer: weights only."""

    keeper = Keeper.NOBODY

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.opt = engine.optimizer
        self.base = None
        self.zero = 3 if type(self.opt).__name__ == _OFFLOAD else 0
        # DeepSpeed asks what wraps nothing for its state; at ZeRO-3 there is no writer
        self.is_saved = self.opt is None

    def buffers(self) -> list[LiveBuffer]:
        return []

    def prepare(self) -> None:
        """Gives whole parameters back, so that the next use gathers the partitions that are
        written."""
        if self.zero == 3:
            self.opt.partition_all_parameters()

    def refresh(self) -> None:
        kept = self.opt.persistent_parameters if self.zero == 3 else ()
        for first in kept[:1]:
            first.all_gather(kept)
        if hasattr(self.opt, "refresh_fp32_params"):  # masters that nobody steps
            self.opt.refresh_fp32_params()


class WeightsAlone(NoOptimizer):
    """An engine as if it had no optimizer: the weights that it computes with."""

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        self.zero = 3 if wrapper_of(engine).zero == 3 else 0


_OFFLOAD = "DeepSpeedZeRoOffload"  # what ZeRO-3 has without an optimizer
_DUMMY = "DummyOptim"  # what a wrapper holds that was built without an optimizer
_WRAPPERS: dict[str, type[Wrapper]] = {
    "DeepSpeedZeroOptimizer": LiveZero12,
    "BF16_Optimizer": LiveBf16,
    "DeepSpeedZeroOptimizer_Stage3": LiveZero3,
    "FP16_UnfusedOptimizer": LiveUnfused,
    "FP16_Optimizer": LiveFusedFlat,
}


def wrapper_of(engine: Any) -> Wrapper:
    """The wrapper class for an engine. Raises UnsupportedError for one that is not known."""
    optimizer = engine.optimizer
    inner = getattr(optimizer, "optimizer", optimizer)
    if inner is None or type(optimizer).__name__ == _OFFLOAD or type(inner).__name__ == _DUMMY:
        return NoOptimizer(engine)
    kind = _WRAPPERS.get(type(optimizer).__name__)
    if kind is not None:
        return kind(engine)
    if isinstance(optimizer, torch.optim.Optimizer):
        return LivePlain(engine)
    raise UnsupportedError(
        "this optimizer wrapper is not known",
        found=type(optimizer).__qualname__,
        expected=", ".join([*_WRAPPERS, "a torch optimizer at stage 0"]),
        fix="let deepspeed.initialize wrap the optimizer, or report the wrapper that it made",
    )


def stepper_of(base: Any, group: Mapping[str, Any]) -> Any:
    """The optimizer that steps a group: beside DeepSpeed's Muon that may be another one."""
    other = getattr(base, "aux_optimizer", None)
    return base if other is None or steps_matrices(group) else other


def rank_in(group: Any) -> int:
    return torch.distributed.get_rank(group=group)


def _check_starts(
    engine: Any, params: Sequence[Any], starts: Sequence[int], flat: torch.Tensor
) -> None:
    """Raises LayoutError where a parameter is not the view of the flat buffer that its start
    says."""
    for param, start in zip(params, starts, strict=True):
        found = (param.data_ptr() - flat.data_ptr()) / flat.element_size()
        if found != start:
            raise LayoutError(
                "a parameter does not lie where its flat buffer says",
                parameter=engine.param_names[param],
                expected=f"element {start}",
                found=f"element {found}",
                fix="load before states are offloaded, and do not replace param.data",
            )


# ---- accumulation
#
# Gradients between two steps of the optimizer. No checkpoint holds them: a load drops them, a
# save says so.


def micro_batches(engine: Any) -> int:
    """How many micro-batches the engine has taken since the boundary of its accumulation; 0 where
    the caller says when that is."""
    managed = getattr(engine, "managed_gradient_accumulation", None)  # 0.19.0 always manages it
    if managed is not None and not managed():
        return 0
    if getattr(engine, "_is_gradient_accumulation_boundary", None) is not None:
        return 0
    return int(engine.micro_steps) % int(engine.gradient_accumulation_steps())


def in_the_middle(engine: Any, wrapper: Wrapper) -> bool:
    """Whether gradients wait for a step."""
    return bool(micro_batches(engine)) or _gradients_wait(engine, wrapper.opt)


def drop_gradients(engine: Any, wrapper: Wrapper) -> list[str]:
    """The engine as after a step: no gradient is left, the next micro-batch is the first one.
    Returns a note where something was dropped."""
    taken, waited = micro_batches(engine), in_the_middle(engine, wrapper)
    opt = wrapper.opt
    for param in engine.module.parameters():
        param.grad = None
        if hasattr(param, "grad_accum"):
            param.grad_accum = None
    if wrapper.base is not None and opt is not wrapper.base:
        opt.zero_grad(set_to_none=True)
        _drop_partitions(opt)
    engine.micro_steps -= taken
    if not waited:
        return []
    return [
        "gradients that waited for a step were dropped: the engine was in the middle of an "
        f"accumulation ({taken} micro-batches since its boundary)"
    ]


def _gradients_wait(engine: Any, opt: Any) -> bool:
    for param in params_of(parts_of([engine.module])):
        for grad in (param.grad, getattr(param, "grad_accum", None)):
            if grad is not None and isinstance(grad, torch.Tensor):
                return True
    averaged: Any = getattr(opt, "averaged_gradients", None) or {}
    if any(grads is not None for grads in averaged.values()):
        return True
    return any(any(group) for group in getattr(opt, "fp32_groups_has_gradients", ()))


def _drop_partitions(opt: Any) -> None:
    """What ZeRO keeps of averaged gradients; as its own `step` leaves it."""
    flat = hasattr(opt, "bit16_groups")  # ZeRO-1 and 2
    if hasattr(opt, "averaged_gradients"):
        opt.averaged_gradients = dict.fromkeys(opt.averaged_gradients) if flat else {}
    if hasattr(opt, "all_grad_tensors"):
        opt.all_grad_tensors = dict.fromkeys(opt.all_grad_tensors)
    if hasattr(opt, "reset_cpu_buffers"):
        opt.reset_cpu_buffers()
    for name in ("_offload_accumulated_param_ids", "_offload_boundary_param_ids"):
        if hasattr(opt, name):
            setattr(opt, name, set())
    if hasattr(opt, "micro_step_id"):
        # each counts from its own number: ZeRO-1 and 2 add one before a backward, ZeRO-3 after it
        opt.micro_step_id = -1 if flat else 0
