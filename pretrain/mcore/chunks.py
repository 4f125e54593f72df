"""megatron-core's own stack around the models of `models`: chunks of a (virtual) pipeline, gradient
buffers, optimizer and schedule, without DeepSpeed.

    models.start(tp=2, seed=1, pp=2, vpp=2, deepspeed=False)
    stack = chunks.build(config, Stages(pp=2, vpp=2), Buffers())
    optimizer = get_megatron_optimizer(OptimizerConfig(...), stack.chunks)
    loss = chunks.run_batch(stack, [(tokens, labels), ...], optimizer)
    optimizer.step()
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from megatron_ucp.engines.mcore_model import canonical_names
from megatron_ucp.errors import UsageError
from pretrain.mcore import models

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig


TRAINED_IN = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Stages:
    """How megatron-core divides the layers: `pp` ranks with `vpp` chunks each, equally, or as
    `layout` says in megatron-core's own words ("Et*2|t|t|tL"); `first` and `last` are the layers of
    the first and the last rank."""

    pp: int = 1
    vpp: int = 1
    layout: str | None = None
    first: int | None = None
    last: int | None = None
    embedding: bool = False  # counts as a layer in an equal division
    loss: bool = False

    def transformer(self, dtype: torch.dtype) -> dict[str, Any]:
        """As megatron-core's TransformerConfig takes them."""
        return {
            "pipeline_model_parallel_size": self.pp,
            "virtual_pipeline_model_parallel_size": self.vpp if self.vpp > 1 else None,
            "pipeline_model_parallel_layout": self.layout,
            "num_layers_in_first_pipeline_stage": self.first,
            "num_layers_in_last_pipeline_stage": self.last,
            "account_for_embedding_in_pipeline_split": self.embedding,
            "account_for_loss_in_pipeline_split": self.loss,
            "pipeline_dtype": dtype,
            # one message at a time: two chunks that send to one rank share a batch, and the
            # messages are then taken for each other
            "overlap_p2p_comm": self.vpp > 1,
            "batch_p2p_comm": self.vpp == 1,
            # over gloo an asynchronous send would read memory that is freed already
            "deallocate_pipeline_outputs": False,
        }


@dataclass(frozen=True)
class Buffers:
    """The gradient buffers of megatron-core's DistributedDataParallel. `bucket` is the size of a
    bucket in elements (None: megatron-core's own), which counts where gradients are reduced while
    the backward pass runs; `pad` to 2^16 elements."""

    distributed: bool = True
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    bucket: int | None = None
    pad: bool = False


@dataclass(frozen=True)
class Stack:
    """What `build` made: `chunks` in megatron-core's DistributedDataParallel, and the bare models
    in them."""

    config: models.ModelConfig
    transformer: "TransformerConfig"
    chunks: list[Any]
    bare: list[Any]


def build(config: models.ModelConfig, stages: Stages, buffers: Buffers) -> Stack:
    """This rank's chunks. Weights depend on the canonical name of a parameter alone, and so on no
    size of the mesh. Call `models.start(deepspeed=False)` first. Collective.

    Raises UsageError for a pipeline that `start` was not called with and for a division of the
    layers that does not work, LayoutError as `models.build`.
    """
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.transformer.module import Float16Module

    tp = models.started_for(config, stages.pp)
    transformer = _transformer(config, tp, stages)
    bare = [_chunk(config, transformer, number) for number in _numbers(stages)]
    half = config.dtype != "fp32"
    wrapped: list[Any] = [Float16Module(transformer, one) if half else one for one in bare]
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=buffers.distributed,
        overlap_grad_reduce=buffers.overlap_grad_reduce,
        overlap_param_gather=buffers.overlap_param_gather,
        bucket_size=buffers.bucket,
        pad_buckets_for_high_nccl_busbw=buffers.pad,
    )
    # as Megatron-LM: what overlaps is the first chunk's
    made = [
        DistributedDataParallel(transformer, settings, one, disable_bucketing=number > 0)
        for number, one in enumerate(wrapped)
    ]
    transformer.finalize_model_grads_func = finalize_model_grads
    if buffers.overlap_grad_reduce:
        no_sync: Any = [one.no_sync for one in made]
        transformer.no_sync_func = no_sync if len(made) > 1 else no_sync[0]
    return Stack(config, transformer, made, bare)


def _numbers(stages: Stages) -> list[int | None]:
    return list(range(stages.vpp)) if stages.vpp > 1 else [None]


def _transformer(config: models.ModelConfig, tp: int, stages: Stages) -> "TransformerConfig":
    """Raises UsageError for a division of the layers that megatron-core refuses."""
    dtype = TRAINED_IN[config.dtype]
    try:
        return models.transformer_config(
            config, tp, params_dtype=dtype, **stages.transformer(dtype)
        )
    except (AssertionError, ValueError) as error:
        raise UsageError(
            "megatron-core can't divide the layers into these stages",
            expected=f"a division of {config.layers} layers",
            found=f"{stages}: {error}",
            fix="give a number of stages that divides the layers, or say the layers of "
            "each one (--pipeline-model-parallel-layout)",
        ) from None


def _chunk(config: models.ModelConfig, transformer: Any, number: int | None) -> Any:
    """One chunk, bare, with the weights of its layers."""
    from megatron.core import parallel_state
    from megatron.core.transformer.transformer_block import (
        TransformerBlockSubmodules,
        get_num_layers_to_build,
    )
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    specs: Any = models.layer_specs(transformer)
    first = get_transformer_layer_offset(transformer, number)
    own = specs.layer_specs[first : first + get_num_layers_to_build(transformer, number)]
    place: dict[str, Any] = {"ignore_virtual": False, "vp_stage": number}
    layers: Any = TransformerBlockSubmodules(own, layer_norm=specs.layer_norm)
    return models.gpt_model(
        config,
        transformer,
        layers,
        canonical_names,
        pre_process=parallel_state.is_pipeline_first_stage(**place),
        post_process=parallel_state.is_pipeline_last_stage(**place),
        vp_stage=number,
    )


def run_batch(
    stack: Stack, batch: Sequence[tuple[torch.Tensor, torch.Tensor]], optimizer: Any = None
) -> float:
    """Forward passes over the micro batches (tokens, labels) of this rank, [batch, sequence] each;
    the mean loss over micro batches and data-parallel ranks, on every rank. With an `optimizer`
    backward passes too: the gradients are then what its `step` takes. Collective."""
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func

    if optimizer is not None:
        for chunk in stack.chunks:
            chunk.zero_grad_buffer()
        stack.transformer.grad_scale_func = optimizer.scale_loss
        optimizer.zero_grad()  # else a plain one's gradients, which alias the buffers, count twice
    several = len(stack.chunks) > 1
    data = [iter(batch) for _ in stack.chunks]
    rows, length = batch[0][0].shape
    models.check_length(length, stack.config.positions, stack.transformer)
    found: list[Any] = get_forward_backward_func()(
        forward_step_func=_forward_step,
        data_iterator=data if several else data[0],
        model=stack.chunks,
        num_microbatches=len(batch),
        seq_length=length,
        micro_batch_size=rows,
        forward_only=optimizer is None,
    )
    total = torch.zeros(1, dtype=torch.float64, device=torch.cuda.current_device())
    for one in found:  # on the last stage only
        total += one["loss"].double() / len(batch)
    ranks = parallel_state.get_data_parallel_world_size()
    copies: Any = parallel_state.get_data_parallel_group()
    torch.distributed.all_reduce(total, group=copies)
    stages: Any = parallel_state.get_pipeline_model_parallel_group()
    torch.distributed.all_reduce(total, group=stages)
    return float(total) / ranks


def _forward_step(
    data: Iterator[tuple[torch.Tensor, torch.Tensor]], model: Any
) -> tuple[torch.Tensor, Callable[[torch.Tensor], tuple[torch.Tensor, dict[str, torch.Tensor]]]]:
    """One micro batch through one chunk, as megatron-core's schedules ask for it."""
    tokens, labels = next(data)
    length, device = tokens.shape[1], tokens.device
    positions = torch.arange(length, device=device).expand_as(tokens)
    out = model(tokens, positions, models.not_attended(length, device), labels=labels)

    def mean(each: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss = each.float().mean()
        return loss, {"loss": loss.detach().clone()}  # the schedule divides the loss in place

    return out, mean
