"""What this rank holds of megatron-core's stack, as a manifest says it. Positions are those of
the live buffers."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from typing import Any

import torch

from megatron_ucp.core.experts import PartitionRanks, expert_name
from megatron_ucp.core.flat import FlatBuffer, Member, Scalars, States, alone
from megatron_ucp.core.join_ranks import Stage
from megatron_ucp.core.manifest import ParamGroup, ParamSpec
from megatron_ucp.core.mesh import Coords, Mesh
from megatron_ucp.core.names import MASTER, VALUE, dtype_name
from megatron_ucp.engines.handle import Handle
from megatron_ucp.engines.live import decay_of, group_of, spec_of
from megatron_ucp.engines.mcore_model import bare_model, canonical_names
from megatron_ucp.engines.megatron.optimizer import (
    STRUCTURE,
    LiveBucket,
    OwnValue,
    Stepped,
    inner_optimizers,
    is_distributed,
    pieces_of,
)
from megatron_ucp.errors import LayoutError, UnsupportedError
from megatron_ucp.families.family import Model
from megatron_ucp.formats.megatron.groups import IDENTIFIERS, SCHEDULED
from megatron_ucp.formats.optimizers import name_in_table, taken_as
from megatron_ucp.reshard.hugging_face.export import Exported

# ---- stack
#
# A live stack of megatron-core's, as its user handed it over.


@dataclass
class MegatronStack:
    """Chunks of a model in megatron-core's DistributedDataParallel, their optimizer and scheduler.

    `iteration`, `consumed_samples`, `skipped_iterations` and `floating_point_operations` are the
    run's position: a load sets them, a save writes them; in between they are the training loop's.
    `ucp` has what this package does with it; `ucp_export_hf(dst, ...)` is `ucp.export_hf`.
    """

    chunks: list[Any] = field(repr=False)
    optimizer: Any = field(repr=False)
    scheduler: Any = field(repr=False)
    mesh: Mesh
    model: Model = field(repr=False)
    ucp: Handle = field(init=False, repr=False)
    iteration: int = 0
    consumed_samples: int = 0
    skipped_iterations: int = 0
    floating_point_operations: float = 0

    @property
    def ucp_export_hf(self) -> Callable[..., Exported]:
        return self.ucp.export_hf


# ---- place


MARKS = "megatron"  # of a group: what megatron-core keeps of it beside hyper-parameters


def mesh_of(chunks: Sequence[Any]) -> Mesh:
    """The mesh that megatron-core's process groups make. Raises UnsupportedError for groups that no
    mesh has, and for a model on other groups than those of `parallel_state`."""
    from megatron.core import parallel_state as groups

    if not groups.model_parallel_is_initialized():
        raise UnsupportedError(
            "megatron-core's own process groups are not there, from which the mesh is read",
            expected="parallel_state.initialize_model_parallel before the model is built",
            found="groups of the program's own, or none",
            fix="call initialize_model_parallel with the sizes of your groups, and build the model "
            "on those (ProcessGroupCollection.use_mpu_process_groups())",
        )
    bare = bare_model(chunks[0])
    mesh = Mesh(
        tp=groups.get_tensor_model_parallel_world_size(),
        pp=groups.get_pipeline_model_parallel_world_size(),
        vpp=len(chunks),
        cp=groups.get_context_parallel_world_size(),
        dp=groups.get_data_parallel_world_size(),
        zero=int(bool(chunks[0].ddp_config.use_distributed_optimizer)),
    )
    pairs: list[tuple[str, Any, Sequence[int]]] = []
    rank = torch.distributed.get_rank()
    if getattr(bare.config, "num_moe_experts", None):
        etp: Any = groups.get_expert_tensor_parallel_world_size()
        mesh = mesh.with_experts(groups.get_expert_model_parallel_world_size(), etp)
        copies: Any = groups.get_expert_data_parallel_group()
        pairs.append(("experts", copies, mesh.expert_data_group(rank)))
    data: Any = groups.get_data_parallel_group(with_context_parallel=True)
    pairs.append(("parameters", data, mesh.partition_group(rank)))
    _refuse_own_groups(
        chunks,
        {
            "tp_group": groups.get_tensor_model_parallel_group(),
            "pp_group": groups.get_pipeline_model_parallel_group(),
            "dp_cp_group": data,
        },
    )
    for what, group, want in pairs:
        found = torch.distributed.get_process_group_ranks(group)
        if found != list(want):
            raise UnsupportedError(
                f"the data-parallel group of the {what} is not that of a mesh",
                expected=f"ranks {list(want)} for {mesh}",
                found=str(found),
                fix="make the groups in megatron-core's default order, tp-cp-ep-dp-pp",
            )
    return mesh


def _refuse_own_groups(chunks: Sequence[Any], known: Mapping[str, Any]) -> None:
    """Raises UnsupportedError for chunks that were built on other groups than those of
    `parallel_state`."""
    ranks_of = torch.distributed.get_process_group_ranks
    for chunk, (name, group) in product(chunks, known.items()):
        own = getattr(chunk, name, None)
        if own is not None and ranks_of(own) != ranks_of(group):
            raise UnsupportedError(
                "the model was built on process groups of the program's own",
                expected=f"{name}: ranks {ranks_of(group)}, as in parallel_state",
                found=f"ranks {ranks_of(own)}",
                fix="build the model on megatron-core's own groups, tp-cp-ep-dp-pp "
                "(ProcessGroupCollection.use_mpu_process_groups())",
            )


class LocalShard:
    """A rank's part of the stack: names, buffers, values. Nothing in the stack is changed.
    `group_of` says the group of each parameter; it is set once all ranks told theirs (see
    `own_groups`). Without an optimizer all that is trained is a value, too.

    Raises LayoutError where positions in the buffers contradict each other, UnsupportedError as
    `inner_optimizers`.
    """

    def __init__(
        self, chunks: Sequence[Any], optimizer: Any, mesh: Mesh, model: Model | None
    ) -> None:
        self.chunks, self.mesh, self.model = list(chunks), mesh, model
        self.rank = torch.distributed.get_rank()
        self.spread = PartitionRanks.on(mesh)
        self.inner = [] if optimizer is None else inner_optimizers(optimizer)
        self.group_of: Mapping[str, int] = {}
        self.names: dict[torch.Tensor, str] = {}
        for chunk in chunks:
            bare = bare_model(chunk)
            held = bare.state_dict(keep_vars=True)
            self.names |= {held[own]: name for own, name in canonical_names(bare).items()}

    @property
    def at(self) -> Coords:
        """This rank's place (see `Mesh.holding`)."""
        return self.mesh.at(self.rank, dict(self.mesh.holding()[0]))

    @property
    def speaks(self) -> bool:
        """Whether this is the first rank at its place."""
        return self.rank == self.mesh.rank_of(self.at, 0)

    @cached_property
    def experts(self) -> dict[str, int]:
        """Experts of each layer, by its canonical name."""
        count = getattr(bare_model(self.chunks[0]).config, "num_moe_experts", None) or 0
        parts = filter(None, map(expert_name, self.names.values()))
        return {part.layer: count for part in parts}

    # ------------------------------------------------ the optimizers

    def groups(self) -> tuple[ParamGroup, ...]:
        """The groups of all optimizers, one after the other. megatron-core gives every rank all of
        them, also those of which it holds nothing."""
        return tuple(
            self._group(inner.optimizer, group)
            for inner in self.inner
            for group in inner.optimizer.param_groups
        )

    def _group(self, optimizer: Any, group: dict[str, Any]) -> ParamGroup:
        found = group_of(group, STRUCTURE, name_in_table(type(optimizer)), optimizer)
        marks = {MARKS: {key: group[key] for key in (*IDENTIFIERS, *SCHEDULED) if key in group}}
        return replace(found, settings={**found.settings, **decay_of(optimizer)}, marks=marks)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The live groups of all optimizers, as `groups` lists them."""
        return [group for inner in self.inner for group in inner.optimizer.param_groups]

    def first_group(self, inner: Any) -> int:
        """The number of an optimizer's first group among those of all."""
        count = 0
        for one in self.inner:
            if one is inner:
                break
            count += len(one.optimizer.param_groups)
        return count

    @cached_property
    def buffers(self) -> list[LiveBucket]:
        """In the order of the optimizers; of a distributed one each bucket is a buffer of its own,
        of any other each parameter."""
        out: list[LiveBucket] = []
        for inner in self.inner:
            pieces = {piece.param: piece for piece in pieces_of(inner)}
            if is_distributed(inner):
                for buffer in inner.buffers:
                    out += self._buckets(buffer, pieces)
            else:
                out += [self._alone(piece) for piece in pieces.values()]
        return out

    def own_groups(self) -> dict[str, int]:
        """The group of every parameter of which this rank has a master. A distributed optimizer
        forgets the groups of all others."""
        return {
            self.names[piece.param]: self.first_group(inner) + piece.group
            for inner in self.inner
            for piece in pieces_of(inner)
        }

    def _alone(self, piece: Stepped) -> LiveBucket:
        name = self.names[piece.param]
        states, axes = _masters(piece.master), self.spread.axes(name)
        flat = alone(name, piece.param.numel(), states, self.group_of[name], axes=axes)
        return LiveBucket(flat, 0, {0: piece}, None)

    def _buckets(self, buffer: Any, pieces: Mapping[Any, Stepped]) -> Iterator[LiveBucket]:
        """The buckets of one of megatron-core's buffers."""
        part, ranks = buffer.data_parallel_group.rank(), buffer.data_parallel_world_size
        for bucket in buffer.buckets:
            at = _in_order(buffer, bucket)
            held = [(self.names[param], start, param.numel()) for start, param in at]
            members = tuple(Member(*one, self.group_of[one[0]]) for one in held)
            length, axes = bucket.grad_data.numel(), self._axes(members)
            states = ((MASTER, "float32"),)
            flat = FlatBuffer(members, length, ranks, "whole", states, axes=axes)
            own = {n: pieces[p] for n, (_, p) in enumerate(at) if p in pieces}
            _check_pieces(flat, part, own)
            weights = None
            if buffer.param_dtype == torch.float32:
                size = flat.partition_elems
                weights = bucket.param_data.detach().view(-1)[part * size : (part + 1) * size]
            yield LiveBucket(flat, part, own, weights)

    def _axes(self, members: Sequence[Member]) -> tuple[str, ...]:
        """The axes that cut a buffer. Raises UnsupportedError where experts are among others."""
        found = {self.spread.axes(member.param) for member in members}
        if len(found) != 1:
            raise UnsupportedError(
                "a buffer mixes experts with parameters that other ranks share",
                parameter=members[0].param,
                expected="param.allreduce False for experts alone",
                found=f"a buffer of {len(members)} parameters",
                fix="set param.allreduce = False on the experts' parameters before "
                "DistributedDataParallel is made",
            )
        return found.pop()

    def present(self) -> list[tuple[States, Scalars]]:
        """The element-wise states that the optimizers keep now beside the masters, and their step;
        none before the first step. Each that a piece of this rank has, once: there may be none."""
        out: list[tuple[States, Scalars]] = []
        for live in self.buffers:
            for piece in live.pieces.values():
                if (found := piece.present) not in out:
                    out.append(found)
        return out

    @cached_property
    def taken_as(self) -> list[str]:
        """Notes about optimizers that are subclasses of known ones."""
        found = dict.fromkeys(taken_as(type(inner.optimizer)) for inner in self.inner)
        return [note for note in found if note]

    # ------------------------------------------------ values

    @cached_property
    def values(self) -> list[OwnValue]:
        """Frozen parameters and persistent buffers of modules."""
        stepped = {param for inner in self.inner for param in _params_of(inner)}
        return [
            OwnValue(name, self._kind(v), v.detach())
            for v, name in self.names.items()
            if v not in stepped
        ]

    def _kind(self, value: torch.Tensor) -> str:
        """Of what no optimizer here steps."""
        if not isinstance(value, torch.nn.Parameter):
            return "buffer"
        return "trainable" if value.requires_grad and not self.inner else "frozen"

    # ------------------------------------------------ as a manifest

    def stage(self) -> Stage:
        """This place. Raises LayoutError where a parameter contradicts its family."""
        by_name = {name: tensor for tensor, name in self.names.items()}
        kinds = {value.name: value.kind for value in self.values}
        params = [self._spec(n, t, kinds.get(n, "trainable")) for n, t in by_name.items()]
        values = [
            alone(
                v.name,
                v.tensor.numel(),
                ((VALUE, dtype_name(v.tensor.dtype)),),
                axes=self.spread.axes(v.name),
            )
            for v in self.values
        ]
        flat = tuple(live.flat for live in self.buffers)
        return Stage(tuple(params), flat, self.groups(), tuple(values), self.at)

    def _spec(self, name: str, tensor: torch.Tensor, kind: str) -> ParamSpec:
        local = tuple(tensor.shape)
        return spec_of(self.model, self.mesh, self.experts, name, local, tensor, kind)


def _in_order(buffer: Any, bucket: Any) -> list[tuple[int, Any]]:
    """(start in the bucket, parameter) of all that a bucket holds, by their starts."""
    starts = [(buffer.param_index_map[p][0] - bucket.offset, p) for p in bucket.params_list]
    return sorted(starts, key=lambda one: one[0])


def _params_of(inner: Any) -> list[Any]:
    if is_distributed(inner):
        return [param for buffer in inner.buffers for param in buffer.param_index_map]
    return [piece.param for piece in pieces_of(inner)]


def _masters(master: torch.Tensor) -> States:
    return ((MASTER, dtype_name(master.dtype)),)


def _check_pieces(flat: FlatBuffer, part: int, pieces: Mapping[int, Stepped]) -> None:
    """Compares the pieces that the optimizer has with those that the buffer's partition holds.
    Raises LayoutError."""
    want = {one.member: (one.low, one.high) for one in flat.fragments(part)}
    have = {number: (piece.first, piece.last) for number, piece in pieces.items()}
    for number in sorted(want.keys() | have.keys()):
        if want.get(number) != have.get(number):
            raise LayoutError(
                "the optimizer has other elements of a parameter than its bucket says",
                parameter=flat.members[number].param,
                expected=want.get(number, "none"),
                found=have.get(number, "none"),
                fix="report this: megatron-core divides its buffers otherwise than is known",
            )
