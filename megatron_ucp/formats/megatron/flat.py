"""The flat buffers that a run of Megatron's DistributedOptimizer had, place by place: from its
arguments and the names and shapes of its parameters alone."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_ucp.core.manifest import ParamSpec
from megatron_ucp.core.mesh import (
    CHUNK_OF_STAGE,
    DENSE_CUT,
    EXPERT_CUT,
    EXPERT_RANK,
    Coords,
    Mesh,
    on_stage,
)
from megatron_ucp.core.states import MASTER
from megatron_ucp.errors import UnsupportedError
from megatron_ucp.formats.megatron.arguments import size
from megatron_ucp.formats.megatron.buckets import GradBuffer, Registered, bucket_cap, grad_buffer
from megatron_ucp.formats.megatron.names import is_expert, is_prediction, number_of_layer
from megatron_ucp.formats.megatron.registration import RegistrationOrder
from megatron_ucp.formats.megatron.stages import PipelinePart

# what the optimizer's files call its states
BUFFER_STATES = {"param": MASTER, "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
EMBEDDING, HEAD = "embedding.word_embeddings.weight", "output_layer.weight"


@dataclass(frozen=True)
class PlacedBuffer:
    """One buffer of a place: a chunk `chunk` of a pipeline rank, its parameters of the dtype
    `dtype`. `number` counts the buffers of an optimizer; `optimizer` is that of the chain: 1 for
    experts that expert parallelism spreads. `layout` has parameters by canonical name."""

    at: Coords
    axes: tuple[str, ...]
    stage: int
    chunk: int
    expert_rank: int
    optimizer: int
    number: int
    dtype: str
    layout: GradBuffer


@dataclass(frozen=True)
class RunLayout:
    """What decides the buffers of a run. `params` are whole parameters as the mesh cuts them;
    `registered(part, expert_rank)` names those of a part in the order of the model."""

    arguments: Mapping[str, Any]
    mesh: Mesh
    parts: Sequence[PipelinePart]
    params: Mapping[str, ParamSpec]
    registered: Callable[[PipelinePart, int], Sequence[str]]

    def buffers(self) -> Iterator[PlacedBuffer]:
        """Every buffer once: those of experts for each expert-parallel rank."""
        for stage in range(self.mesh.pp):
            parts = [part for part in self.parts if part.stage == stage]
            yield from self._of_stage(parts, 0, 0)
            for rank in range(self.mesh.ep) if self.mesh.ep > 1 else ():
                yield from self._of_stage(parts, 1, rank)

    def _of_stage(
        self, parts: Sequence[PipelinePart], optimizer: int, expert_rank: int
    ) -> Iterator[PlacedBuffer]:
        number = 0
        for part in parts:
            names = [
                name
                for name in self.registered(part, expert_rank)
                if (self.mesh.ep > 1 and is_expert(name)) == bool(optimizer)
            ]
            for dtype in dict.fromkeys(self.params[name].dtype for name in names):
                own = [name for name in names if self.params[name].dtype == dtype]
                layout = self._layout(part, own, optimizer)
                at = (*on_stage(part.stage), (CHUNK_OF_STAGE, part.chunk))
                at = (*at, (EXPERT_RANK, expert_rank)) if optimizer else at
                axes = EXPERT_CUT if optimizer else DENSE_CUT
                place = part.stage, part.chunk, expert_rank, optimizer, number
                yield PlacedBuffer(at, axes, *place, dtype, layout)
                number += 1

    def _layout(self, part: PipelinePart, names: Sequence[str], optimizer: int) -> GradBuffer:
        said, mesh = self.arguments, self.mesh
        ranks = mesh.expert_partitions if optimizer else mesh.partitions
        cap = bucket_cap(
            mesh.partitions,
            bool(said.get("overlap_grad_reduce")),
            size(said, "ddp_bucket_size", 0) or None,
            part.stage,
            part.chunk,
        )
        several = any(one.has_predictions and not one.has_embedding for one in self.parts)
        tied = not said.get("untie_embeddings_and_output_weights", True)
        shared = (tied or several) and mesh.pp > 1
        return grad_buffer(
            [Registered(name, self._elems(name), shared and name == EMBEDDING) for name in names],
            _sharing(ranks, size(said, "num_distributed_optimizer_instances")),
            cap,
            wide=bool(said.get("ddp_pad_buckets_for_high_nccl_busbw")),
        )

    def _elems(self, name: str) -> int:
        """The elements that a rank has of a parameter."""
        spec = self.params[name]
        return math.prod(spec.layout.local_shape(name, spec.shape, self.mesh.shares()))


def _sharing(ranks: int, instances: int) -> int:
    """How many ranks share a buffer. Raises UnsupportedError."""
    if ranks % instances:
        raise UnsupportedError(
            "the arguments of the run divide its ranks among more optimizers than they can",
            expected=f"a divisor of {ranks} as num_distributed_optimizer_instances",
            found=instances,
            fix="give the arguments of the run, or load the weights alone",
        )
    return ranks // instances


# ------------------------------------------------ which parameters a part registers, in which order

_EMBEDDINGS = (EMBEDDING, "embedding.position_embeddings.weight")
_TIED_HEAD = f"{HEAD} (tied)"


def registered_names(
    part: PipelinePart,
    rank: int,
    params: Mapping[str, ParamSpec],
    mesh: Mesh,
    order: RegistrationOrder,
) -> list[str] | None:
    """The parameters of a part at an expert-parallel rank, as modules in this order register them.
    None where one of them has no place in it."""
    names = [name for name in params if _is_here(name, params[name], part, rank, mesh)]
    keys = {name: order.key(name) for name in names}
    if part.has_head and not part.has_embedding and HEAD not in params:
        keys[_TIED_HEAD] = order.key(HEAD)
    if any(key is None for key in keys.values()):
        return None
    # a head that is tied to the embedding is registered under the head's name
    ordered = sorted(keys, key=lambda name: keys[name] or ())
    return [EMBEDDING if name == _TIED_HEAD else name for name in ordered]


def _is_here(name: str, spec: ParamSpec, part: PipelinePart, rank: int, mesh: Mesh) -> bool:
    if spec.expert is not None:
        number, count = spec.expert
        if number // max(1, count // mesh.ep) != rank:
            return False
    if name in _EMBEDDINGS:
        return part.has_embedding or part.has_predictions
    if is_prediction(name):
        return part.has_predictions
    layer = number_of_layer(name)
    return part.has_head if layer is None else part.first <= layer < part.last
