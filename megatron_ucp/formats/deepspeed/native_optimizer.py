"""Optimizer states in the files that DeepSpeed itself would have written: a tree for each
wrapper."""

import struct
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

from megatron_ucp.core.experts import is_stacked, stored_tensors
from megatron_ucp.core.flat import FlatBuffer
from megatron_ucp.core.grouping import grouped
from megatron_ucp.core.keepers import Keeper
from megatron_ucp.core.manifest import ParamGroup
from megatron_ucp.core.states import MASTER
from megatron_ucp.core.values import Global, Stand
from megatron_ucp.formats.deepspeed.autoep import group_name
from megatron_ucp.formats.deepspeed.native_structure import Own, RunSettings, Structure
from megatron_ucp.formats.deepspeed.paths import optimizer_name
from megatron_ucp.formats.pt.output import Output
from megatron_ucp.formats.pt.values import TensorRef

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


class OptimizerTrees(Structure):
    """The state dict of each optimizer wrapper of DeepSpeed 0.19.8, for every rank."""

    # ---------------------------------------------------------------- optimizer files

    def _optimizer(self, own: Own) -> Output:
        prefix = "bf16_" if self.run.dtype == "bfloat16" else ""
        output = Output(optimizer_name(own.part, self._mp(own.stage, own.tp), prefix))
        wrappers = {
            Keeper.ZERO_1_OR_2: self._zero12,
            Keeper.BF16: self._bf16,
            Keeper.ZERO_3: self._zero3,
        }
        build = wrappers[self.manifest.keeper]
        output.tree = {
            "optimizer_state_dict": build(output, own),
            "ds_config": self.run.config,
            "ds_version": self.run.version,
        }
        return output

    def _flat(
        self, output: Output, own: Own, number: int, state: str, used: int | None = None
    ) -> TensorRef:
        """A rank's partition of a state, of which the first `used` elements are a tensor."""
        buffer, slot = self.manifest.buffers[number], own.slot(number, state)
        shape = (buffer.of(state).elems(slot.part),)
        cut = None if used is None else (used,)
        return output.tensor(slot, dict(buffer.states)[state], shape, cut)

    def _masters(self, output: Output, own: Own) -> list[TensorRef]:
        return [self._flat(output, own, number, MASTER) for number, _ in self._buffers(own)]

    def _base(
        self, output: Output, own: Own, shaped: Callable[[int, str], TensorRef] | None = None
    ) -> dict[str, Any]:
        """torch's `state_dict` of the base optimizer, one entry for each buffer; flat, unless they
        are `shaped`."""
        element = shaped or partial(self._flat, output, own)
        state: dict[int, Any] = {}
        for at, (number, buffer) in enumerate(self._buffers(own)):
            scalars = buffer.members[0].scalars if buffer.members else {}
            entry: dict[str, Any] = {
                name: self._scalar(output, name, value) for name, value in scalars.items()
            }
            kept = [name for name, _ in buffer.states if self._is_kept(own, number, name)]
            entry |= {name: element(number, name) for name in kept}
            if entry:
                state[at] = entry
        groups = [group_tree(output, group, places) for group, places in self._groups(own)]
        return {"state": state, "param_groups": groups}

    def _is_kept(self, own: Own, number: int, state: str) -> bool:
        """Whether an optimizer has an entry for a state: none for one of matrices that a partition
        owns nothing of."""
        buffer, part = self.manifest.buffers[number], own.parts[number][1]
        return state != MASTER and (state not in buffer.uncut or buffer.of(state).elems(part) > 0)

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
            "base_optimizer_state": self._base(output, own),
            "single_partition_of_fp32_groups": [
                self._flat(output, own, number, MASTER, buffer.partition_elems - padding)
                for (number, buffer), padding in zip(buffers, paddings, strict=True)
            ],
            "zero_stage": Stand(_STAGE, (2 if self.mesh.zero == 2 else 1,)),
            "group_paddings": paddings,
            "param_alignment_paddings": [_gaps(buffer) for _, buffer in buffers],
            "partition_count": [buffer.partitions for _, buffer in buffers],
            "ds_version": self.run.version,
            "param_slice_mappings": self._slices(own),
        }

    def _bf16(self, output: Output, own: Own) -> dict[str, Any]:
        buffers, last = self._buffers(own), own.part == self.mesh.partitions - 1
        return {
            "clip_grad": self.run.clip_grad,
            "base_optimizer_state": self._base(output, own),
            "single_partition_of_fp32_groups": self._masters(output, own),
            "group_paddings": [
                buffer.length - buffer.used() if last else 0 for _, buffer in buffers
            ],
            "partition_count": [buffer.partitions for _, buffer in buffers],
            "ds_version": self.run.version,
            "param_slice_mappings": self._slices(own),
        }

    def _slices(self, own: Own) -> list[dict[str, Stand]]:
        """What a rank's partition of each buffer owns of each tensor of the module; of a stacked
        one the experts together."""
        return [self._owned(buffer, number, own) for number, buffer in self._buffers(own)]

    def _owned(self, buffer: FlatBuffer, number: int, own: Own) -> dict[str, Stand]:
        found = grouped(
            (self._in_module(buffer.members[fragment.member].param, own), fragment)
            for fragment in buffer.fragments(own.parts[number][1])
        )
        return OrderedDict(
            (name, _address(sum(f.high - f.low for f in run), run[0].offset))
            for name, run in found.items()
        )

    def _zero3(self, output: Output, own: Own) -> dict[str, Any]:
        scaler, dynamic = scaler_of(self.run)
        return {
            "zero_stage": Stand(_STAGE, (3,)),
            "loss_scaler": scaler,
            "dynamic_loss_scale": dynamic,
            "overflow": False,
            "partition_count": self.mesh.partitions,
            **self._sharing(own),
            "optimizer_state_dict": self._base(output, own),
            "fp32_flat_groups": self._masters(output, own),
        }

    def _sharing(self, own: Own) -> dict[str, Any]:
        """Which ranks share each sub-group, as ZeRO-3 says it where there are stacked experts."""
        mesh, held = self.mesh, [buffer for _, buffer in self._buffers(own)]
        stacked = [any(is_stacked(m.param) for m in buffer.members) for buffer in held]
        if not any(stacked):
            return {}
        ranks = [mesh.sharers(own.rank, buffer.spread) for buffer in held]
        return {
            "ds_zero_partition_groups": [
                {
                    "sub_group": number,
                    "partition_count": len(shared),
                    "partition_rank": shared.index(own.rank),
                    "partition_ranks": list(shared),
                    "families": ["autoep_expert" if experts else "replicated"],
                    "group_names": [group_name(mesh.ep) if experts else "replicated"],
                }
                for number, (shared, experts) in enumerate(zip(ranks, stacked, strict=True))
            ]
        }

    def _unpartitioned(self, output: Output, own: Own) -> dict[str, Any]:
        """The optimizer of stage 0, which lies in the model file: shaped states, or one flat buffer
        per group."""
        buffers = self._buffers(own)
        flat = any(len(buffer.members) > 1 for _, buffer in buffers)
        tensor = partial(self._flat if flat else self._shaped, output, own)
        base = self._base(output, own, tensor)
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
                [tensor(buffers[at][0], MASTER) for at in places] for _, places in self._groups(own)
            ],
        }

    def _shaped(self, output: Output, own: Own, number: int, state: str) -> TensorRef:
        """A state in the shape of its parameter."""
        buffer = self.manifest.buffers[number]
        shape = self._local(buffer.members[0].param)
        return output.tensor(own.slot(number, state), dict(buffer.states)[state], shape)

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


def group_tree(output: Output, group: ParamGroup, params: list[int]) -> dict[str, Any]:
    """A parameter group as an optimizer's `state_dict` has it, with every key of its source."""
    settings, marks = output.adopt(dict(group.settings)), output.adopt(dict(group.marks))
    return {**settings, **marks, "params": params}


def scaler_of(run: RunSettings) -> tuple[Stand, bool]:
    """The pickled loss scaler, and whether it is dynamic."""
    saved = run.scaler.said if run.dtype == "float16" else {"dynamic": False}
    if not saved.get("dynamic", True):
        fields = {"cur_scale": saved.get("cur_scale", 1.0), "dynamic": False}
        return Stand(f"{_SCALER}.LossScaler", (), fields), False
    fields = {**_DYNAMIC, **saved, "dtype": Global("torch.float16")}
    return Stand(f"{_SCALER}.DynamicLossScaler", (), fields), True


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


def _address(elems: int, start: int) -> Stand:
    return Stand(_FRAGMENT, (), {"numel": elems, "start": start})
