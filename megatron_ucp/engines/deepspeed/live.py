"""A live DeepSpeed engine, described for all its ranks and filled on this one."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch

from megatron_ucp.core.flat import Scalars
from megatron_ucp.core.join_ranks import check_replicas
from megatron_ucp.core.manifest import Manifest
from megatron_ucp.core.mesh import Coords, expert_rank_of
from megatron_ucp.core.names import MASTER, VALUE, dtype_name
from megatron_ucp.core.plan import Slot
from megatron_ucp.engines.deepspeed.optimizer import (
    LiveBuffer,
    drop_gradients,
    stepper_of,
    wrapper_of,
)
from megatron_ucp.engines.deepspeed.refuse import refuse_source
from megatron_ucp.engines.deepspeed.shard import LiveValue, LocalShard, Part, one_order
from megatron_ucp.engines.deepspeed.state import EngineState, saved_by_engine
from megatron_ucp.engines.live import (
    LiveShards,
    built_groups,
    class_name,
    computes_otherwise,
    config_of,
    flat_view,
    memory_of,
    scalar_state,
    set_groups,
    tensors_lie_at,
    told_by,
)
from megatron_ucp.engines.pt_files import RankFiles
from megatron_ucp.engines.values import named_in
from megatron_ucp.families.family import Model
from megatron_ucp.formats.checkpoint import CallerModel, Checkpoint
from megatron_ucp.formats.deepspeed.optimizers import MOMENTUM, other_steps, steps_matrices
from megatron_ucp.formats.deepspeed.weights import PipeNames
from megatron_ucp.reshard import agree
from megatron_ucp.reshard.engine import Wants
from megatron_ucp.reshard.execute import TORCH_DTYPES, fresh
from megatron_ucp.reshard.hugging_face.released import reader

# ---- live


def describe(
    engine: Any, model: Model | None, present: bool = False, weights: bool = False
) -> "LiveEngine":
    """The engine of all stages; its manifest has the optimizer's states that are `present`, or the
    masters alone; or the `weights` that it computes with, as if it had no optimizer. Collective;
    nothing in the engine is changed. Raises a UcpError on every rank."""
    with agree.gathering() as stages:
        shard = LocalShard(engine, model, weights)
        part = shard.part(present)
        # one rank of each place speaks; where there is one place nobody needs to
        stages.value = part if shard.at and shard.speaks else None
    with agree.together():
        told = [part for part in stages.values if part is not None]
        parts = sorted(told, key=lambda part: part.holds.at) or [part]
        return LiveEngine(shard, parts)


class LiveEngine(LiveShards):
    """The engine as `parts` of all its stages, of which this rank holds `shard`.

    Buffers are in the manifest's order: the optimizer's first, then one per frozen parameter and
    module buffer.
    """

    has_one_step = False

    def __init__(self, shard: LocalShard, parts: Sequence[Part]) -> None:
        fix = (
            "make the process groups so that each stage has all of its ranks, as "
            "deepspeed.initialize does"
        )
        stages = [part.holds for part in parts]
        super().__init__(shard, shard.engine, [shard.engine.module], stages, shard.places, fix)
        self.engine, self.shard, self.wrapper = shard.engine, shard, shard.wrapper
        self._live: dict[int, LiveBuffer]
        self._values: dict[int, LiveValue]
        self._live, self._values = self.numbered(shard.buffers, [*shard.values.values()])
        self.order = one_order([part for part in parts if not expert_rank_of(part.holds.at)])
        names = shard.pipe.canonical if shard.pipe else {}
        self.manifest = Manifest(
            shard.wrapper.keeper,
            shard.mesh,
            self.joined.params,
            self.joined.buffers,
            self.joined.groups,
            tuple(dict.fromkeys(tie for part in parts for tie in part.ties)),
            family=shard.model.family.name if shard.model else "",
            names=dict(names),
        )
        check_replicas(self.manifest, PipeNames(names).tied)
        self.has_optimizer = shard.wrapper.base is not None

    def told(self) -> CallerModel:
        model, order = self.shard.model, self.order if self.has_optimizer else None
        classes = frozenset(
            name for kept in saved_by_engine(self.engine) for name in named_in(kept.value)
        )
        if model is None:
            module = self.engine.module
            names = reader(lambda: config_of(module), self.manifest, class_name(module))
            told = CallerModel(like=self.manifest, tensors=names, renamed=self.shard.renamed)
        else:
            told = told_by(model, self.manifest)
        return replace(told, order=order, classes=classes)

    # ------------------------------------------------ places

    def parts(self) -> list[tuple[int, Coords, int]]:
        held = {**self._live, **self._values}.items()
        buffers = self.manifest.buffers
        return [(number, self.shard.cut(buffers[number]), live.part) for number, live in held]

    def tensor(self, slot: Slot) -> torch.Tensor:
        if slot.state == VALUE:
            return memory_of(self._values[slot.buffer].tensor.detach())
        live = self._live[slot.buffer]
        if slot.state == MASTER:
            return flat_view(live.own(live.master.detach()))
        if slot.state in live.uncut and not self._elems(slot.buffer, slot.state):
            return live.master.detach()[:0]
        return flat_view(live.own(self.wrapper.base.state[live.master][slot.state].detach()))

    def _elems(self, buffer: int, state: str) -> int:
        """Elements that this rank has of a state."""
        return self.manifest.buffers[buffer].of(state).elems(self._live[buffer].part)

    def state_dtype(self, buffer: int, state: str) -> str:
        """Its masters', unless the optimizer is told fp32 (CPUAdam), or is Muon."""
        held = self.manifest.buffers[buffer]
        group = self.manifest.groups[held.group or 0].settings
        if getattr(stepper_of(self.wrapper.base, group), "fp32_optimizer_states", None):
            return "float32"
        if state == MOMENTUM and steps_matrices(group):
            own = self.wrapper.momentum_dtype()
            return dict(held.states)[MASTER] if own is None else dtype_name(own)
        return dict(held.states)[MASTER]

    # ------------------------------------------------ before the first write

    def check(self, source: Checkpoint, optimizer: bool) -> None:
        refuse_source(source, self.shard, optimizer)

    def ready(self, wants: Wants) -> EngineState:
        source, own = wants.source, self.own_groups
        self.check(source, wants.options.optimizer)
        groups, left = built_groups(self.param_groups, wants.groups[own], wants)
        place = self.shard.data_rank, self.shard.number
        state = EngineState.prepare(wants, self.wrapper, own, self.manifest.mesh, place)
        notes = other_steps(source.manifest, self.manifest) if wants.options.optimizer else []
        notes += computes_otherwise(source, self.shard.model, self.engine.module)
        return replace(state, groups=groups, notes=(*left, *state.notes, *notes))

    # ------------------------------------------------ writing

    def prepare(self, states: Mapping[int, Sequence[str]] = MappingProxyType({})) -> None:
        self.wrapper.prepare()
        for number, kept in states.items():
            live = self._live[number]
            master = live.master
            held = self.wrapper.base.state[master]
            for key in [key for key in held if key not in kept]:
                del held[key]
            for key in kept:
                dtype, old = TORCH_DTYPES[self.state_dtype(number, key)], held.get(key)
                like = master.detach()
                if key in live.uncut:
                    like = like.new_empty(1).expand(self._elems(number, key))
                if not like.numel():
                    continue  # of matrices that this rank has nothing of DeepSpeed keeps no state
                fits = isinstance(old, torch.Tensor) and old.shape == like.shape
                if not fits or old.dtype != dtype:
                    held[key] = fresh(like, dtype)

    def filled(
        self, ready: EngineState | None, scalars: Mapping[int, Sequence[Scalars]]
    ) -> list[str]:
        self.wrapper.refresh()
        if ready is None:
            return []
        notes = drop_gradients(self.engine, self.wrapper)
        for number, members in scalars.items():
            live, base = self._live[number], self.wrapper.base
            group = base.param_groups[live.group] if live.group is not None else {}
            keeps, held = self.shard.keeps(group), base.state[live.master]
            for key, value in (members[0] if members else {}).items():
                held[key] = scalar_state(value, keeps, group, live.master)
            if not held:
                del base.state[live.master]  # as before the first step
        notes += set_groups(self.param_groups, ready.groups, ready.carried)
        return notes + ready.apply()


def lies_at(engine: Any, masters: bool) -> list[object]:
    """As `tensors_lie_at`, of the weights of an engine, and of its `masters`: then with how the
    buffers of its optimizer are cut."""
    if not masters:
        return tensors_lie_at([engine.module])
    wrapper = wrapper_of(engine)
    buffers = wrapper.buffers()
    cuts = [
        (live.length, live.partitions, live.part, live.rule, live.group, live.uncut)
        for live in buffers
    ]
    steppers = [] if wrapper.base is None else [wrapper.base]
    lie_at = tensors_lie_at([engine.module], steppers, [live.master for live in buffers])
    return [id(wrapper.opt), id(wrapper.base), cuts, *lie_at]


# ---- live fingerprint
#
# The memory of which the fingerprint of a DeepSpeed engine's save is taken.


def held_by(live: LiveEngine, files: RankFiles | None) -> dict[Slot, torch.Tensor]:
    """The memory of every state that this rank has: of a save in the background that of its
    snapshot. What that has not got is copied, unless another rank has it."""
    out: dict[Slot, torch.Tensor] = {}
    for number, cut, part in live.parts():
        for state, _ in live.manifest.buffers[number].states:
            slot = Slot(number, cut, part, state)
            memory = live.tensor(slot)
            kept = memory if files is None else files.kept(memory)
            if kept is not None:
                out[slot] = kept
            elif not _is_copy(live, number):
                out[slot] = memory.clone()
    return out


def _is_copy(live: LiveEngine, number: int) -> bool:
    """Whether another data-parallel rank has a whole buffer, and writes it."""
    manifest = live.manifest
    buffer = manifest.buffers[number]
    dense = all(manifest.by_name[one.param].expert is None for one in buffer.members)
    return dense and buffer.partitions == 1 and live.shard.data_rank > 0
