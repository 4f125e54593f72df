"""The flat buffers of a run of Megatron's DistributedOptimizer, as arithmetic: buckets, the
order in which parameters were registered, and the layers of each chunk of the pipeline."""

import functools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from megatron_ucp.core.experts import is_expert, rank_of_expert
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
from megatron_ucp.core.names import MASTER
from megatron_ucp.errors import UnsupportedError
from megatron_ucp.formats.megatron.arguments import size
from megatron_ucp.formats.megatron.names import is_prediction, number_of_layer

# ---- buckets
#
# The flat buffers of Megatron-core's DistributedDataParallel as arithmetic: where each parameter
# lies in them, and how the DistributedOptimizer cuts them into buckets. Counted in elements.
#
# Source: `_ParamAndGradBuffer` of megatron-core 0.16.1 (`distributed/param_and_grad_buffer.py`);
# the rule is the same from 0.10 on.


PARAM_ALIGNMENT = 64  # each parameter begins at a multiple
BUCKET_ALIGNMENT = 128  # each bucket ends at a multiple, of the number of ranks too
WIDE_ALIGNMENT = 2**16  # the same with `pad_buckets_for_high_nccl_busbw`
_LEAST_CAP, _CAP_PER_RANK = 40_000_000, 1_000_000


@dataclass(frozen=True, slots=True)
class Registered:
    """A parameter as a model registered it: the elements that a rank has. `own_bucket`: no other
    parameter is in its bucket, as embedding and head do that several pipeline stages share."""

    name: str
    elems: int
    own_bucket: bool = False


@dataclass(frozen=True, slots=True)
class Bucket:
    """Elements [start, stop) of the buffer, of which the first `used` are not end padding."""

    start: int
    stop: int
    used: int


@dataclass(frozen=True, slots=True)
class InBuffer:
    """Where a parameter begins in the buffer, its elements, and the number of its bucket."""

    name: str
    start: int
    elems: int
    bucket: int


@dataclass(frozen=True)
class GradBuffer:
    """One buffer: its parameters in the order of their places, and its buckets."""

    params: tuple[InBuffer, ...]
    buckets: tuple[Bucket, ...]

    def unpadded_start(self, param: InBuffer) -> int:
        """Where a parameter begins in a file that holds the buckets one after the other, each
        without its end padding."""
        before = sum(bucket.used for bucket in self.buckets[: param.bucket])
        return before + param.start - self.buckets[param.bucket].start

    def starts(self, bucket: int) -> dict[InBuffer, int]:
        """The parameters of a bucket, and where each begins in it."""
        first = self.buckets[bucket].start
        return {param: param.start - first for param in self.params if param.bucket == bucket}


def bucket_cap(ranks: int, overlaps: bool, said: int | None, stage: int, chunk: int) -> int | None:
    """The elements from which on a bucket is closed; None: all is one bucket. Only the first chunk
    of the first pipeline stage has several."""
    if not overlaps or stage or chunk:
        return None
    return said or max(_LEAST_CAP, _CAP_PER_RANK * ranks)


def grad_buffer(
    params: Sequence[Registered],
    ranks: int,
    cap: int | None = None,
    wide: bool = False,
) -> GradBuffer:
    """The buffer for parameters in the order in which the model registered them: they lie in it in
    the reverse order, as gradients become ready. `ranks` share it."""
    builder = _Builder(math.lcm(ranks, BUCKET_ALIGNMENT, WIDE_ALIGNMENT if wide else 1))
    for param in reversed(params):
        builder.add(param, cap)
    builder.close(builder.at)
    return GradBuffer(tuple(builder.params), tuple(builder.buckets))


class _Builder:
    """A buffer on its way: `at` is where the next parameter may begin, `first` where the open
    bucket does."""

    def __init__(self, alignment: int) -> None:
        self.alignment = alignment
        self.params: list[InBuffer] = []
        self.buckets: list[Bucket] = []
        self.at = self.first = 0
        self.is_empty = True

    def add(self, param: Registered, cap: int | None) -> None:
        self.at = _rounded(self.at, PARAM_ALIGNMENT)
        if param.own_bucket:
            self.close(self.at)
        start, stop = self.at, self.at + param.elems
        self.params.append(InBuffer(param.name, start, param.elems, len(self.buckets)))
        self.at, self.is_empty = stop, False
        if param.own_bucket or (cap is not None and stop - self.first >= cap):
            self.close(stop)

    def close(self, stop: int) -> None:
        """Ends the open bucket, where anything is in it."""
        if self.is_empty:
            return
        end = _rounded(stop, self.alignment)
        self.buckets.append(Bucket(self.first, end, stop - self.first))
        self.at = self.first = end
        self.is_empty = True


def _rounded(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


# ---- registration
#
# The order in which a model of megatron-core registers its parameters: it decides where each of
# them lies in the optimizer's buffers.
#
# An order is a list of templates: names with "#" in the place of the numbers of layers and
# experts.
#
#     embedding.word_embeddings.weight
#     decoder.layers.#.input_layernorm.weight
#     decoder.layers.#.mlp.experts.local_experts.#.linear_fc1.weight
#     output_layer.weight
#
# A live model says its own order (`order_of`). Where there is none, the orders of megatron-core's
# modules are tried, which stand here: attributes in the order of `__init__` (0.16.1 to 0.19.2).


_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_EXPERTS = "local_experts.#"
_HEAD = "output_layer.weight"


@dataclass(frozen=True)
class RegistrationOrder:
    """`by_expert`: whether one expert follows the other (SequentialMLP), or one matrix of all
    experts the other (TEGroupedMLP)."""

    templates: tuple[str, ...]
    by_expert: bool = True

    @cached_property
    def _first(self) -> dict[str, int]:
        """The place of each template, and of the first one behind each beginning up to a "#"."""
        out: dict[str, int] = {}
        for place, template in enumerate(self.templates):
            out[template] = place
            for found in re.finditer("#", template):
                out.setdefault(template[: found.end()], place)
        return out

    def key(self, name: str) -> tuple[int, ...] | None:
        """What to sort names by; None for a name that the order does not have.

        A list of layers counts as one place, in which its layers follow each other by number.
        """
        template, numbers = _template(name), [int(one) for one in _NUMBER.findall(name)]
        if template not in self._first:
            return None
        out: list[int] = []
        behind: list[int] = []
        for found, number in zip(re.finditer("#", template), numbers, strict=True):
            before = template[: found.end()]
            out.append(self._first[before])
            (behind if before.endswith(_EXPERTS) and not self.by_expert else out).append(number)
        return (*out, self._first[template], *behind)


def order_of(names: Iterable[Iterable[str]]) -> tuple[str, ...]:
    """The templates of a model of which each rank has some names, in the order in which it
    registered them; ranks of earlier pipeline stages come first."""
    merged: list[str] = []
    for own in names:
        at = 0  # behind the template before
        for template in map(_template, own):
            if template in merged:
                at = merged.index(template) + 1
            else:
                merged.insert(at, template)
                at += 1
    return tuple(merged)


@functools.lru_cache(100_000)
def _template(name: str) -> str:
    return _NUMBER.sub("#", name)


# ------------------------------------------------ of megatron-core's modules


def _with_biases(*modules: str) -> Iterator[str]:
    for module in modules:
        yield from (f"{module}.weight", f"{module}.bias")


_NORM = tuple(_with_biases("input_layernorm"))
_IN_FRONT = ("self_attention.core_attention.softmax_offset",)
_PROJ = tuple(_with_biases("self_attention.linear_proj"))
_QKV = (
    *_with_biases("self_attention.linear_qkv"),
    *_with_biases("self_attention.q_layernorm", "self_attention.k_layernorm"),
)
# Multi-head latent attention. Transformer Engine's up projections have the norm in front of them.
_LATENT = (
    *_with_biases("self_attention.linear_q_proj", "self_attention.linear_qkv_down_proj"),
    *_with_biases("self_attention.linear_q_down_proj"),
    "self_attention.linear_q_up_proj.layer_norm_weight",
    *_with_biases("self_attention.linear_q_up_proj", "self_attention.linear_kv_down_proj"),
    "self_attention.linear_kv_up_proj.layer_norm_weight",
    *_with_biases("self_attention.linear_kv_up_proj"),
    *_with_biases("self_attention.q_layernorm", "self_attention.kv_layernorm"),
)
_MLP = (
    *_with_biases("pre_mlp_layernorm", "mlp.linear_fc1", "mlp.linear_fc2", "mlp.router"),
    *_with_biases("mlp.fc1_latent_proj", "mlp.fc2_latent_proj"),
    *_with_biases(f"mlp.experts.{_EXPERTS}.linear_fc1", f"mlp.experts.{_EXPERTS}.linear_fc2"),
    "mlp.shared_experts.gate_weight",
    *_with_biases("mlp.shared_experts.linear_fc1", "mlp.shared_experts.linear_fc2"),
)
# A Mamba layer of a hybrid model: the mixer's own parameters, then those of its modules. Its
# convolution was a module until 0.18.
_OWN = ("mixer.dt_bias", "mixer.A_log", "mixer.D")
_CONVOLUTION = tuple(_with_biases("mixer.conv1d"))
_PROJECTION = (
    *("mixer.in_proj.layer_norm_weight", "mixer.in_proj.layer_norm_bias"),
    *_with_biases("mixer.in_proj"),
)
_BEHIND = tuple(_with_biases("mixer.norm", "mixer.out_proj", "norm"))
_MAMBAS = (
    (*_OWN, *_PROJECTION, *_CONVOLUTION, *_BEHIND),
    (*_CONVOLUTION, *_OWN, *_PROJECTION, *_BEHIND),
)
# Transformer Engine's layers have the norm in front of a matrix as the matrix's own parameter.
_ATTENTIONS = (
    (*_NORM, *_IN_FRONT, *_PROJ, *_QKV),
    (*_IN_FRONT, *_PROJ, *_NORM, *_QKV),
    (*_NORM, *_IN_FRONT, *_PROJ, *_LATENT),
)


def _model(attention: Sequence[str], mamba: Sequence[str]) -> tuple[str, ...]:
    layer = (*attention, *_MLP, *mamba)
    predicts = "mtp.layers.#"
    return (
        *("embedding.word_embeddings.weight", "embedding.position_embeddings.weight"),
        *(f"decoder.layers.#.{one}" for one in layer),
        *_with_biases("decoder.final_layernorm", "decoder.final_norm"),
        *(f"{predicts}.{one}" for one in _with_biases("enorm", "hnorm", "eh_proj")),
        *(f"{predicts}.transformer_layer.{one}" for one in layer),
        *(f"{predicts}.mtp_model_layer.layers.#.{one}" for one in layer),
        *(f"{predicts}.{one}" for one in _with_biases("final_layernorm")),
        *_with_biases("output_layer"),
    )


_MODELS = tuple(_model(attention, mamba) for mamba in _MAMBAS for attention in _ATTENTIONS)


def orders_to_try(live: Sequence[str], names: Iterable[str]) -> Iterator[RegistrationOrder]:
    """Each order that a model with these parameters could have, once: that of the caller's `live`
    model, where there is one, then those of megatron-core's modules. Experts may follow each other
    one by one, or matrix by matrix. A live model whose head is tied to its embedding has no name
    for it; the head is the last that is registered."""
    present = {*map(_template, names)}
    own = [(*(one for one in live if one != _HEAD), _HEAD)] if live else []
    seen: set[tuple[str, ...]] = set()
    for templates in (*own, *_MODELS):
        found = tuple(one for one in templates if one in present or one == _HEAD)
        if found in seen or not present <= {*found}:
            continue
        seen.add(found)
        yield RegistrationOrder(found)
        if any(_EXPERTS in one for one in found):
            yield RegistrationOrder(found, by_expert=False)


# ---- stages
#
# Which layers each chunk of a pipeline has. Rank p of P stages has V chunks (virtual stages);
# chunk v of rank p is part v x P + p of the model, and the parts follow each other.
#
# Source: `get_num_layers_to_build` and `get_transformer_layer_offset` of megatron-core 0.16.1.


_MOST_CHARS = 10_000  # of a layout that is written out
_EMBEDDING, _HEAD_KEY, _LAYER, _PREDICTION = "E", "L", "t", "m"
_STAGE_BORDER, _PREDICTIONS_BEHIND = "|", "/"  # in the layer pattern of a hybrid model


@dataclass(frozen=True, slots=True)
class PipelinePart:
    """One chunk of a pipeline rank: its stage, its number there, its layers [first, last), and
    whether it has the embedding, the head, and the layers for multi-token prediction, which have a
    copy of the embedding of their own."""

    stage: int
    chunk: int
    first: int
    last: int
    has_embedding: bool
    has_head: bool
    has_predictions: bool = False


def parts_of(arguments: Mapping[str, Any], mesh: Mesh, file: str) -> list[PipelinePart]:
    """The parts of the model, in their order. Raises UnsupportedError for a division that the
    arguments don't say, or that holds what is no layer of a decoder."""
    written = arguments.get("pipeline_model_parallel_layout")
    if written is not None and mesh.pp > 1:
        contents = _written(written, mesh.pp * mesh.vpp, file)
    else:
        sizes = _by_pattern(arguments, mesh.pp * mesh.vpp, file)
        sizes = sizes or _sizes(arguments, mesh.pp, mesh.vpp, file)
        predicts, end = bool(size(arguments, "mtp_num_layers", 0)), len(sizes) - 1
        contents = [(n, at == 0, at == end, predicts and at == end) for at, n in enumerate(sizes)]
    counts = [layers for layers, *_ in contents]
    if sum(counts) != size(arguments, "num_layers", 0):
        raise _unknown(file, f"{arguments.get('num_layers')} layers", counts)
    out: list[PipelinePart] = []
    first = 0
    for at, (layers, *what) in enumerate(contents):
        chunk, stage = divmod(at, mesh.pp)
        last = first + layers
        out.append(PipelinePart(stage, chunk, first, last, *what))
        first = last
    return out


def _written(layout: object, count: int, file: str) -> list[tuple[int, bool, bool, bool]]:
    """The layers of each part, and whether it has the embedding, the head and the predictions,
    where a layout says them."""
    texts = _unrolled(layout, file)
    known = {_EMBEDDING, _HEAD_KEY, _LAYER, _PREDICTION}
    if len(texts) != count or set("".join(texts)) - known:
        raise _unknown(file, f"{count} parts of E, t, m and L", layout)
    return [
        (text.count(_LAYER), _EMBEDDING in text, _HEAD_KEY in text, _PREDICTION in text)
        for text in texts
    ]


def _by_pattern(arguments: Mapping[str, Any], count: int, file: str) -> list[int]:
    """The layers of each part, where the pattern of a hybrid model has borders of stages
    ("M*-|M*-/M"); empty for any other model. Before 0.17 the pattern had another name."""
    pattern = arguments.get("hybrid_layer_pattern") or arguments.get("hybrid_override_pattern")
    if not isinstance(pattern, str):
        return []
    parts = pattern.split(_PREDICTIONS_BEHIND)[0].split(_STAGE_BORDER)
    if len(parts) == 1:
        return []
    if len(parts) != count:
        raise _unknown(file, f"{count} parts", pattern)
    return [len(part) for part in parts]


def _sizes(arguments: Mapping[str, Any], stages: int, chunks: int, file: str) -> list[int]:
    """The layers of each part, where the division is by numbers."""
    layers = size(arguments, "num_layers", 0)
    first = arguments.get("decoder_first_pipeline_num_layers")
    last = arguments.get("decoder_last_pipeline_num_layers")
    if not isinstance(first, int | None) or not isinstance(last, int | None):
        raise _unknown(file, "numbers of layers", f"{first} and {last}")
    before = bool(arguments.get("account_for_embedding_in_pipeline_split"))
    behind = bool(arguments.get("account_for_loss_in_pipeline_split"))
    said = [count for count in (first, last) if count is not None]
    left = stages - len(said)
    rest = layers + before + behind - sum(said)
    each, over = divmod(rest, max(left, 1))
    if over:
        raise _unknown(file, f"layers that {left} stages share evenly", rest)
    by_stage = [each] * stages
    if first is not None:
        by_stage[0] = first
    if last is not None:
        by_stage[-1] = last
    if any(count % chunks for count in by_stage):
        raise _unknown(file, f"stages that {chunks} chunks divide", by_stage)
    sizes = [count // chunks for count in by_stage] * chunks
    sizes[0] -= before
    sizes[-1] -= behind
    return sizes


def _unrolled(written: object, file: str) -> list[str]:
    """The parts of a layout such as "Et|(tt|)*2tL", each with a letter for what is in it."""
    if not isinstance(written, str) or len(written) > _MOST_CHARS:
        raise _unknown(file, "a text such as Et|tt|tL", written)
    text = written.replace(",", "")
    for pattern in (r"\(([^)]+)\)\*(\d{1,3})", r"(.)\*(\d{1,3})"):
        text = re.sub(pattern, lambda found: found[1] * int(found[2]), text)
        if len(text) > _MOST_CHARS * 10:
            raise _unknown(file, "a layout of fewer layers", written)
    return text.split("|")


def _unknown(file: str, expected: object, found: object) -> UnsupportedError:
    return UnsupportedError(
        "how the layers are divided among the stages of the pipeline can't be read",
        file=file,
        expected=expected,
        found=str(found)[:100],
        fix="save it again with --dist-ckpt-optim-fully-reshardable",
    )


# ---- flat
#
# The flat buffers that a run of Megatron's DistributedOptimizer had, place by place: from its
# arguments and the names and shapes of its parameters alone.


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
        return math.prod(spec.layout.local_shape(name, spec.shape, self.mesh.first_shares()))


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
        if rank_of_expert(number, count, mesh.ep) != rank:
            return False
    if name in _EMBEDDINGS:
        return part.has_embedding or part.has_predictions
    if is_prediction(name):
        return part.has_predictions
    layer = number_of_layer(name)
    return part.has_head if layer is None else part.first <= layer < part.last
