"""megatron-core's stack, described for all its ranks and filled on this one."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch

from megatron_ucp.core.flat import Scalars, States
from megatron_ucp.core.join_ranks import Stage, check_replicas
from megatron_ucp.core.manifest import BufferPart, Manifest, ParamGroup
from megatron_ucp.core.mesh import Coords
from megatron_ucp.core.names import MASTER, VALUE, Keeper
from megatron_ucp.core.plan import Slot
from megatron_ucp.engines.live import (
    LiveShards,
    broadcast_each,
    built_groups,
    computes_otherwise,
    flat_view,
    on_cpu,
    require_unstepped,
    require_usable,
    set_groups,
    tensors_lie_at,
    told_by,
)
from megatron_ucp.engines.mcore_model import EMBEDDING, POSITIONS, bare_model
from megatron_ucp.engines.megatron.optimizer import (
    STRUCTURE,
    LiveBucket,
    OwnValue,
    Stepped,
    inner_optimizers,
    pieces_of,
)
from megatron_ucp.engines.megatron.refuse import refuse_source
from megatron_ucp.engines.megatron.shard import MARKS, LocalShard, MegatronStack
from megatron_ucp.engines.megatron.state import StackState, require_saved_values
from megatron_ucp.errors import UcpError, UsageError
from megatron_ucp.formats.checkpoint import CallerModel, Checkpoint
from megatron_ucp.formats.megatron.buffers import order_of
from megatron_ucp.formats.megatron.groups import IDENTIFIERS, SCHEDULED
from megatron_ucp.reshard import agree
from megatron_ucp.reshard.engine import Wants


def describe(stack: MegatronStack, weights: bool = False) -> "LiveMegatron":
    """The engine of all ranks; or the `weights` that it computes with, as if it had no optimizer.
    Collective; nothing in the stack is changed. Raises a UcpError on every rank."""
    with agree.gathering() as told:
        optimizer = None if weights else stack.optimizer
        shard = LocalShard(stack.chunks, optimizer, stack.mesh, stack.model)
        told.value = shard.own_groups()
    shard.group_of = {name: group for found in told.values for name, group in found.items()}
    with agree.gathering() as places:
        stage = shard.stage()
        places.value = stage if shard.speaks else None
    with agree.together():
        stages = [stage for stage in places.values if stage is not None]
        return LiveMegatron(stack, shard, sorted(stages, key=lambda one: one.at))


class LiveMegatron(LiveShards):
    """The engine as `stages` of all its places, of which this rank holds `shard`."""

    has_optimizer = True
    has_one_step = True

    def __init__(self, stack: MegatronStack, shard: LocalShard, stages: Sequence[Stage]) -> None:
        fix = (
            "make megatron-core's process groups with parallel_state.initialize_model_parallel "
            "alone"
        )
        modules = [bare_model(chunk) for chunk in stack.chunks]  # the wrappers ask for its own
        super().__init__(shard, stack.optimizer, modules, stages, shard.mesh.holding(), fix)
        self.stack, self.shard, joined = stack, shard, self.joined
        self._live: dict[int, LiveBucket]
        self._values: dict[int, OwnValue]
        self._live, self._values = self.numbered(shard.buffers, shard.values)
        family = stack.model.family.name
        held = (joined.params, joined.buffers, joined.groups)
        self.manifest = Manifest(Keeper.MEGATRON, shard.mesh, *held, family=family)
        self._registered = order_of(
            [spec.name for spec in stage.params if spec.kind != "buffer"] for stage in stages
        )
        check_replicas(self.manifest, _on_several_stages(bare_model(stack.chunks[0])))

    def told(self) -> CallerModel:
        told = told_by(self.stack.model, self.manifest)
        return replace(told, registered=self._registered)

    # ------------------------------------------------ places

    def parts(self) -> list[tuple[int, Coords, int]]:
        return self.manifest.parts_of(self.shard.rank)

    def tensor(self, slot: Slot) -> torch.Tensor:
        if slot.state == VALUE:
            return flat_view(self._values[slot.buffer].tensor)
        return self._live[slot.buffer].tensor(slot.state)

    def read(self, slot: Slot, first: int, last: int) -> torch.Tensor:
        if slot.state == VALUE:
            return super().read(slot, first, last)
        return self._live[slot.buffer].read(slot.state, first, last)

    def piece(self, buffer: int, member: int) -> Stepped:
        """What this rank steps of a member of a buffer."""
        return self._live[buffer].pieces[member]

    def state_dtype(self, buffer: int, state: str) -> str:
        """megatron-core keeps all states in fp32."""
        return "float32"

    # ------------------------------------------------ before the first write

    def check(self, source: Checkpoint, optimizer: bool) -> None:
        refuse_source(source, self.stack, optimizer)

    def ready(self, wants: Wants) -> StackState:
        source, options = wants.source, wants.options
        self.check(source, options.optimizer)
        groups, left = self._built_groups(wants)
        own = wants.origins[self.own_groups]
        marks = [{} if n is None else source.manifest.groups[n].marks.get(MARKS, {}) for n in own]
        state = StackState.prepare(wants, self.stack, self.shard, marks)
        notes = computes_otherwise(source, self.stack.model, bare_model(self.stack.chunks[0]))
        taken_as = self.shard.taken_as if options.optimizer else ()
        return replace(state, groups=groups, notes=(*left, *state.notes, *notes, *taken_as))

    def _built_groups(self, wants: Wants) -> tuple[list[Mapping[str, Any]], list[str]]:
        """As `built_groups`, of this stage's groups. One that has no parameter here gets what the
        same group has at another stage."""
        if not wants.groups:
            return [], []
        live: list[Mapping[str, Any]] = [{} for _ in wants.groups]
        live[self.own_groups] = self.param_groups
        groups, left = built_groups(live, wants.groups, wants)
        both = [*zip(self.manifest.groups, groups, strict=True)]
        elsewhere = {_identity(group): saved for group, saved in both if saved}
        plain: list[Mapping[str, Any]] = [
            {key: value for key, value in found.items() if key not in STRUCTURE}
            for group, saved in both
            for found in [saved or elsewhere.get(_identity(group), {})]
        ]
        return plain[self.own_groups], left

    # ------------------------------------------------ writing

    @torch.no_grad()
    def prepare(self, states: Mapping[int, Sequence[str]] = MappingProxyType({})) -> None:
        """Waits for gathers of weights that are under way: they would undo what is written, and the
        refresh would take them for its own. Masters become whole partitions, also where no state of
        the optimizer is loaded."""
        self.wait_for_gathers()
        for live in self._live.values():
            live.join(MASTER)
        for number, kept in states.items():
            self._live[number].allocate(kept, "float32")

    def wait_for_gathers(self) -> None:
        """Until no weights of other ranks are on their way. Begins no gather: of a group of buckets
        with one under way megatron-core's call waits for it and does nothing else."""
        for _, groups in self._bucket_groups():
            for group in groups:
                if group.param_gather_handle is not None:
                    group.start_param_sync(force_sync=True)

    def _bucket_groups(self) -> Iterator[tuple[Any, tuple[Any, ...]]]:
        """Each chunk with its groups of buckets, where ranks share the masters."""
        for chunk in self.shard.chunks if self.shard.mesh.zero else ():
            yield chunk, (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups)

    def finish_gathers(self) -> None:
        """Every rank gets the weights that others stepped, where gathers overlap what follows: some
        may be on their way, and some not begun. Of a group of buckets with a gather under way
        megatron-core's call waits for that one."""
        if any(chunk.ddp_config.overlap_param_gather for chunk in self.shard.chunks):
            for chunk, _ in self._bucket_groups():
                chunk.start_param_sync(force_sync=True)

    def _share_weights(self) -> None:
        """Every rank gets the weights that others have, where no gather is under way; in place on
        the CPU."""
        for chunk, groups in self._bucket_groups():
            if not on_cpu([bucket.param_data for group in groups for bucket in group.buckets]):
                chunk.start_param_sync(force_sync=True)
                continue
            for group in groups:
                ranks = group.intra_distributed_optimizer_instance_group
                for bucket in group.buckets:
                    broadcast_each(bucket.param_data.tensor_split(ranks.size()), ranks)
                group.param_gather_dispatched = True

    @torch.no_grad()
    def filled(
        self, ready: StackState | None, scalars: Mapping[int, Sequence[Scalars]]
    ) -> list[str]:
        for inner in self.shard.inner:
            if hasattr(inner, "_copy_main_params_to_model_params"):
                inner._copy_main_params_to_model_params()
        self._share_weights()
        if ready is None:
            return []
        for chunk in self.shard.chunks:
            chunk.zero_grad_buffer()
        self.stack.optimizer.zero_grad()
        for buffer, members in scalars.items():
            for number, piece in self._live[buffer].pieces.items():
                piece.set_scalars(members[number])
        return set_groups(self.param_groups, ready.groups, ready.carried) + ready.apply()


def _on_several_stages(model: Any) -> list[str]:
    """What megatron-core keeps alike on the first stage and the last: a tied embedding, and all
    embeddings where layers for multi-token prediction need them."""
    if getattr(model.config, "mtp_num_layers", None):
        return [EMBEDDING, POSITIONS]
    return [EMBEDDING] if getattr(model, "share_embeddings_and_output_weights", False) else []


def _identity(group: ParamGroup) -> tuple[tuple[str, Any], ...]:
    """Which of megatron-core's groups it is, whatever the stage."""
    own = group.marks[MARKS]
    return tuple((key, own.get(key)) for key in (*IDENTIFIERS, *SCHEDULED))


def lies_at(stack: MegatronStack, masters: bool) -> list[object]:
    """As `tensors_lie_at`, of the weights of a stack, and of its `masters`."""
    modules = [bare_model(chunk) for chunk in stack.chunks]
    inner = inner_optimizers(stack.optimizer) if masters else []
    pieces = [piece.master for one in inner for piece in pieces_of(one)]
    return tensors_lie_at(modules, [one.optimizer for one in inner], pieces)


# ---- with the states that its optimizers have now


@dataclass(frozen=True)
class CurrentStates:
    """What the ranks hold of masters and moments, and of values: the engine, as the `manifest` says
    with all `states` that its optimizers have now beside the masters (none before the first
    step). Their count of steps is in `scalars`."""

    manifest: Manifest
    live: LiveMegatron
    states: States
    scalars: Scalars

    def parts(self) -> list[BufferPart]:
        return self.live.parts()

    def read(self, slot: Slot, first: int, last: int) -> torch.Tensor:
        return self.live.read(slot, first, last)

    def require_unstepped(self) -> None:
        """Raises SaveError where an optimizer has stepped since: what was read meanwhile may be of
        two steps. Sums of what was read can't show that: they fit it."""
        for _, scalars in self.live.shard.present():
            require_unstepped(dict(self.scalars), dict(scalars))


def present_states(live: LiveMegatron) -> CurrentStates:
    """Collective; nothing is changed. Raises UsageError on every rank where states differ."""
    with agree.gathering() as told:
        told.value = live.shard.present()
    with agree.together():
        states, scalars = _one_of([one for own in told.values for one in own])
    buffers = tuple(
        replace(
            buffer,
            states=(*buffer.states, *states),
            members=tuple(replace(member, scalars=scalars) for member in buffer.members),
        )
        if buffer.stepped
        else buffer
        for buffer in live.manifest.buffers
    )
    return CurrentStates(replace(live.manifest, buffers=buffers), live, states, scalars)


def _one_of(found: list[tuple[States, Scalars]]) -> tuple[States, Scalars]:
    """What all pieces of all ranks have. Raises UsageError where it is not the same."""
    first = found[0] if found else ((), {})
    for one in found:
        if one != first:
            raise UsageError(
                "the optimizer's states are not alike",
                expected="the same states and step of all parameters, on every rank",
                found=f"{first} and {one}",
                fix="step all parameters before",
            )
    return first


def present_to_save(stack: MegatronStack, error: type[UcpError]) -> CurrentStates:
    """The engine with the states that its optimizers have now, all weights gathered. Collective.
    Raises an `error` of that class for a value that no load could give back."""
    with agree.together():
        require_saved_values(stack, error)
        require_usable(stack.optimizer)
    live = describe(stack)
    live.finish_gathers()
    return present_states(live)
