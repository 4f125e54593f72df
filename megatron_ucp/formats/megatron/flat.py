"""The flat buffers that a run of Megatron's DistributedOptimizer had, place by place: from its
arguments and the names and shapes of its parameters alone."""

import math
import re
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
from megatron_ucp.formats.megatron.names import is_expert, number_of_layer
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
        shared = not said.get("untie_embeddings_and_output_weights", True) and mesh.pp > 1
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


# ------------------------------------------------ the order in which a model registers them

_BEFORE = (EMBEDDING, "embedding.position_embeddings.weight")
_BEHIND = ("decoder.final_layernorm.weight", "decoder.final_layernorm.bias", HEAD)
_NORM = ("input_layernorm.weight", "input_layernorm.bias")
_PROJ = ("self_attention.linear_proj.weight", "self_attention.linear_proj.bias")
_QKV = ("self_attention.linear_qkv.weight", "self_attention.linear_qkv.bias")
_REST = (
    *("self_attention.q_layernorm.weight", "self_attention.k_layernorm.weight"),
    *("pre_mlp_layernorm.weight", "pre_mlp_layernorm.bias"),
    *("mlp.linear_fc1.weight", "mlp.linear_fc1.bias"),
    *("mlp.linear_fc2.weight", "mlp.linear_fc2.bias"),
    "mlp.router.weight",
    "mlp.experts",
    "mlp.shared_experts.gate_weight",
    *("mlp.shared_experts.linear_fc1.weight", "mlp.shared_experts.linear_fc2.weight"),
)
# Transformer Engine's layers have the norm in front of them as their own first parameters.
_LAYERS = ((*_NORM, *_PROJ, *_QKV, *_REST), (*_PROJ, *_NORM, *_QKV, *_REST))
_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(linear_fc[12]\.\w+)")
_MATRICES = ("linear_fc1.weight", "linear_fc1.bias", "linear_fc2.weight", "linear_fc2.bias")


KNOWN_ORDERS = 4


def in_order(names: Sequence[str], number: int) -> list[str] | None:
    """The names of a part in one of the orders in which the modules of megatron-core may have
    registered them: with its own layers or those of Transformer Engine, experts one by one or
    matrix by matrix. None where a name has no place in it."""
    layers, by_expert = _LAYERS[number // 2], number % 2 == 0
    keys = {name: _place(name, layers, by_expert) for name in names}
    if any(key is None for key in keys.values()):
        return None
    # a head that is tied to the embedding is registered under the head's name
    return [_TIED.get(name, name) for name in sorted(names, key=lambda name: keys[name] or ())]


_TIED_HEAD = "output_layer.weight (tied)"
_TIED = {_TIED_HEAD: EMBEDDING}


def names_of(
    part: PipelinePart, rank: int, params: Mapping[str, ParamSpec], mesh: Mesh
) -> list[str]:
    """The parameters of a part at an expert-parallel rank, as `in_order` takes them."""
    out: list[str] = []
    for name, spec in params.items():
        layer = number_of_layer(name)
        if spec.expert is not None:
            number, count = spec.expert
            is_here = number // max(1, count // mesh.ep) == rank
        else:
            is_here = True
        if layer is None:
            is_here = part.has_embedding if name in _BEFORE else part.has_head
        elif not part.first <= layer < part.last:
            is_here = False
        if is_here:
            out.append(name)
    if part.has_head and not part.has_embedding and HEAD not in params:
        out.append(_TIED_HEAD)
    return out


def _place(name: str, layers: Sequence[str], by_expert: bool) -> tuple[int, ...] | None:
    if name in _BEFORE:
        return (0, _BEFORE.index(name))
    if name in _BEHIND:
        return (2, _BEHIND.index(name))
    if name == _TIED_HEAD:
        return (2, len(_BEHIND))
    layer = number_of_layer(name)
    rest = re.sub(r"^decoder\.layers\.\d+\.", "", name)
    expert = _EXPERT.fullmatch(rest)
    if layer is None or (expert is None and rest not in layers):
        return None
    if expert is None:
        return (1, layer, layers.index(rest))
    if expert[2] not in _MATRICES:
        return None
    at = int(expert[1]), _MATRICES.index(expert[2])
    return (1, layer, layers.index("mlp.experts"), *(at if by_expert else at[::-1]))
