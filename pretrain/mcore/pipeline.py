"""The models of `engines/models` in stages, on DeepSpeed's PipelineModule.

    models.start(tp=2, seed=1, pp=2)  # after torch.distributed is initialised
    model = pipeline.build_pipeline(config, pp=2, partition="type:transformer")
    optimizer = AdamW(models.param_groups(model, 1e-3, 0.1))
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=...)
    # an iterator of (tokens, labels) or (tokens, (labels, mask))
    loss = engine.train_batch(batches)
    models.stop()

Layers by position: 0 the embedding, 1 to L the transformer layers, L+1 the final norm, L+2 the
head; a tied head is the embedding's word matrix on the last stage. `families/pipe` has the names
that follow. ZeRO 0 and 1: DeepSpeed's pipeline takes no others.
"""

import contextlib
import io
import itertools
import os
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from megatron_ucp.errors import UnsupportedError, UsageError
from megatron_ucp.families.family import TRUE_VOCAB
from megatron_ucp.families.pipe import TIED_KEY
from pretrain.mcore import experts, models
from pretrain.mcore.groups import experts_are_apart
from pretrain.mcore.models import ModelConfig

if TYPE_CHECKING:
    from deepspeed.runtime.pipe.module import LayerSpec, PipelineModule
    from megatron.core.transformer import TransformerConfig


PATCHES = (
    "pipeline_clip",
    "pipeline_group_norms",
    "pipeline_empty_norm",
    "pipeline_auxiliary_loss",
)
STAGE_METHODS = "uniform, parameters, type:REGEX, or the number of layers of each stage"
PARTITION = (
    "type:transformer"  # the same number of transformer layers for each stage, as Megatron does
)


def build_pipeline(
    config: ModelConfig, pp: int, partition: str | Sequence[int] = PARTITION
) -> "PipelineModule":
    """This rank's stage of a model, in fp32, with the first values that `models.build` gives. Call
    `start(tp, seed, pp)` first.

    `partition` says which of the L+3 layers (see above) a stage holds: one of DeepSpeed's methods
    (`uniform`: as many layers each; `parameters`: balanced; `type:REGEX`: as many layers each of
    those whose class name matches), or the counts, as "1,3,1,2" or a list. Collective. Raises
    UsageError for more stages than layers and for a partition that does not fit, before `start`,
    and where `start` got another pp; LayoutError as `models.build`.
    """
    tp = models.started_for(config, pp)
    if "LOCAL_RANK" not in os.environ:
        raise UsageError(
            "DeepSpeed's pipeline needs a launcher's environment",
            expected="LOCAL_RANK",
            found="nothing",
            fix="start with torchrun or deepspeed",
        )
    layers = config.layers + 3
    if pp > layers:
        raise UsageError(
            "there are more pipeline stages than layers",
            expected=f"at most {layers}: {config.layers} transformer "
            "layers, embedding, final norm and head",
            found=pp,
            fix="give fewer stages (--pipeline-model-parallel-size)",
        )
    import megatron_ucp_patches as patches  # pyright: ignore[reportMissingImports]  (package_dir in setup.py)

    for name in PATCHES:
        patches.apply(name)
    return _build(config, tp, pp, stage_method(partition, layers, pp))


def stage_method(partition: str | Sequence[int], layers: int, pp: int) -> str | tuple[int, ...]:
    """A name of DeepSpeed's, or how many layers each stage holds. Raises UsageError."""
    if isinstance(partition, str) and not re.fullmatch(r"\s*\d+(\s*,\s*\d+)*\s*", partition):
        if partition in ("uniform", "parameters") or re.fullmatch("type:.+", partition):
            return partition
        raise UsageError(
            "there is no such partition of a pipeline",
            expected=STAGE_METHODS,
            found=partition,
            fix="give one of these (--pp-partition-method)",
        )
    counts = tuple(
        int(count) for count in (partition.split(",") if isinstance(partition, str) else partition)
    )
    if len(counts) != pp or min(counts) < 1 or sum(counts) != layers:
        raise UsageError(
            "the layers of the stages do not add up",
            found=", ".join(map(str, counts)),
            expected=f"{pp} numbers of at least 1 with the sum {layers}: transformer layers, "
            "embedding, norm and head",
            fix="give --pp-partition-method one number for each stage, with this sum",
        )
    return counts


def _build(
    config: ModelConfig, tp: int, pp: int, method: str | tuple[int, ...]
) -> "PipelineModule":
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

    described = config.model()
    if not described.pipe:
        raise UsageError(
            "the family has no pipeline",
            found=config.family,
            fix=f"train without pipeline stages, or add the pipeline's names to "
            f"{described.family.source}",
        )
    transformer = models.transformer_config(config, tp)
    # (pipe, data, model) is megatron-core's default order of ranks: its tensor-parallel groups are
    # the topology's
    topology = PipeModelDataParallelTopology(
        num_pp=pp, num_mp=tp, num_dp=dist.get_world_size() // (tp * pp)
    )
    layers = _specs(config, transformer)
    with (
        models.closed_by_stop(),
        contextlib.redirect_stdout(io.StringIO()),
    ):  # DeepSpeed prints the partition on rank 0
        model = _staged_model()(config, transformer, layers, topology, method)
    experts.mark_experts(model)
    names = experts.global_expert_names(model)
    whole = {pipe: described.pipe[name] for pipe, name in names.items()}
    for pipe, param in model.named_parameters():
        if whole[pipe].startswith("decoder.final_layernorm."):
            param.sequence_parallel = transformer.sequence_parallel  # type: ignore[attr-defined]  (as models.TaggedNorm)
    models.prepare_all(model, config, whole)
    return model


class Shared:
    """What the transformer layers of a stage share: the attention mask and the rotary positions,
    made once per length."""

    def __init__(self, config: ModelConfig, transformer: "TransformerConfig") -> None:
        self.transformer = transformer
        self.mask = lru_cache(maxsize=8)(models.not_attended)
        self.rotary = rotary_of(config)

    def length(self, hidden: torch.Tensor) -> int:
        """Of the whole sequence. `hidden` is [sequence, batch, hidden], under sequence parallelism
        this rank's part."""
        return len(hidden) * models.parts_of_sequence(self.transformer)


def rotary_of(config: ModelConfig) -> Any:
    """The rotary embedding of a model; None for one without."""
    if config.builder.position_embedding_type != "rope":
        return None
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    size: int = config.sizes().head_dim
    return RotaryEmbedding(size, 1.0, use_cpu_initialization=True, **models.rotary(config))


def _specs(config: ModelConfig, transformer: "TransformerConfig") -> "list[LayerSpec]":
    """All layers by position."""
    from deepspeed.runtime.pipe.module import LayerSpec, TiedLayerSpec

    builder, shared = config.builder, Shared(config, transformer)
    norm = torch.nn.RMSNorm if builder.normalization == "RMSNorm" else torch.nn.LayerNorm
    kind = _transformer_layer(shared)
    specs: Any = models.layer_specs(transformer).layer_specs
    embedding = {
        "config": transformer,
        "vocab_size": config.vocab,
        "max_sequence_length": config.positions,
        "position_embedding_type": builder.position_embedding_type,
    }
    middle = [
        *(
            LayerSpec(kind, config=transformer, submodules=spec.submodules, layer_number=number)
            for number, spec in enumerate(specs, 1)
        ),
        LayerSpec(norm, config.hidden, eps=config.norm_eps),
    ]
    head = {"config": transformer, "init_method": transformer.init_method, "bias": False}
    if not config.tied:
        return [
            LayerSpec(_embedding(), **embedding),
            *middle,
            LayerSpec(_head(), config.hidden, config.vocab, **head),
        ]
    tied: Any = {
        "tied_weight_attr": "word_embeddings.weight"
    }  # DeepSpeed takes a name as well as a list of them
    return [
        TiedLayerSpec(TIED_KEY, _embedding(), **tied, **embedding),
        *middle,
        TiedLayerSpec(
            TIED_KEY,
            _tied_head(),
            transformer,
            config.vocab,
            **tied,
            forward_fn=_tied_logits(config, head),
        ),
    ]


def _embedding() -> type[torch.nn.Module]:
    from megatron.core.models.common.embeddings.language_model_embedding import (
        LanguageModelEmbedding,
    )

    class EmbeddingPipe(LanguageModelEmbedding):
        """[batch, sequence] of tokens -> [sequence, batch, hidden]."""

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            models.check_length(tokens.shape[1], self.max_sequence_length, self.config)
            return super().forward(
                tokens, torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
            )

    return EmbeddingPipe


def _transformer_layer(shared: Shared) -> type[torch.nn.Module]:
    from megatron.core.tensor_parallel import get_cuda_rng_tracker
    from megatron.core.transformer.transformer_layer import TransformerLayer

    class TransformerLayerPipe(TransformerLayer):
        """megatron-core's layer, which makes its own mask and positions: a pipeline sends
        activations alone."""

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            length = shared.length(hidden)
            tracker: Any = (
                get_cuda_rng_tracker()
            )  # dropout, as megatron-core's TransformerBlock draws it
            with tracker.fork() if self.config.sequence_parallel else contextlib.nullcontext():
                out: Any = super().forward(
                    hidden,
                    attention_mask=shared.mask(length, hidden.device),
                    rotary_pos_emb=shared.rotary and shared.rotary(length),
                )
                return out[0]

    return TransformerLayerPipe


def _head() -> type[torch.nn.Module]:
    from megatron.core.tensor_parallel import ColumnParallelLinear

    class HeadPipe(ColumnParallelLinear):
        """[sequence, batch, hidden] -> logits of this rank's part of the vocabulary."""

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return super().forward(hidden)[0]

    return HeadPipe


def _tied_head() -> type[torch.nn.Module]:
    from megatron.core.tensor_parallel import VocabParallelEmbedding

    class TiedHeadPipe(torch.nn.Module):
        """The last stage's copy of the embedding: words alone, as it needs no positions."""

        def __init__(self, transformer: "TransformerConfig", vocab: int) -> None:
            super().__init__()
            init: Any = transformer.embedding_init_method
            self.word_embeddings = VocabParallelEmbedding(
                vocab, transformer.hidden_size, init_method=init, config=transformer
            )

    return TiedHeadPipe


def _tied_logits(config: ModelConfig, head: dict[str, Any]) -> Any:
    from megatron.core.tensor_parallel import ColumnParallelLinear

    linear = ColumnParallelLinear(
        config.hidden, config.vocab, **head, skip_weight_param_allocation=True
    )  # holds nothing

    def logits(module: Any, hidden: torch.Tensor) -> torch.Tensor:
        return linear(hidden, weight=module.word_embeddings.weight)[0]

    return logits


def _loss_of(transformer: "TransformerConfig") -> Any:
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    def loss(logits: torch.Tensor, labels: Any) -> torch.Tensor:
        """As `models.loss`. `logits` are [sequence, batch, part of the vocabulary], `labels`
        [batch, sequence] or with a mask."""
        labels, mask = labels if isinstance(labels, tuple | list) else (labels, None)
        each = vocab_parallel_cross_entropy(logits, labels.transpose(0, 1).contiguous())
        mean = models.mean_of(each.transpose(0, 1).contiguous().float(), mask)
        return experts.with_auxiliary_losses(mean, transformer)

    return loss


def _as_gpt_model(config: ModelConfig) -> dict[str, Any]:
    """Attributes that a GPTModel has, from which a family reads its sizes and settings."""
    return {
        "vocab_size": config.vocab,
        TRUE_VOCAB: config.true_vocab,
        "max_sequence_length": config.positions,
        "share_embeddings_and_output_weights": config.tied,
        "position_embedding_type": config.builder.position_embedding_type,
        "rotary_base": config.rotary_base,
        "rotary_scaling": config.rope_factor > 0,
        "rotary_pos_emb": rotary_of(config),
    }


def _staged_model() -> Any:
    from deepspeed.runtime.pipe.module import PipelineModule
    from megatron.core.tensor_parallel import (
        gather_from_sequence_parallel_region,
        scatter_to_sequence_parallel_region,
    )

    class StagedModel(PipelineModule):
        """A PipelineModule that takes counts for a partition, sends whole sequences, and says its
        sizes as a GPTModel does."""

        def __init__(
            self,
            config: ModelConfig,
            transformer: "TransformerConfig",
            layers: "list[LayerSpec]",
            topology: Any,
            method: Any,
        ) -> None:
            super().__init__(
                layers,
                topology=topology,
                loss_fn=_loss_of(transformer),
                partition_method=method,
            )
            _check_experts(self.parts, transformer)
            self.config = transformer
            # what is no part of the module is asked for what it computes
            self.__dict__.update(_as_gpt_model(config))

        def _partition_layers(self, method: Any = "uniform") -> None:
            if isinstance(method, tuple):
                self.parts = [0, *itertools.accumulate(method)]
                self._set_bounds(*self.parts[self.stage_id : self.stage_id + 2])
            else:
                _check_types(method, self._layer_specs)
                super()._partition_layers(method)

        def forward(self, forward_input: torch.Tensor) -> torch.Tensor:
            # DeepSpeed takes activations for the same on all tensor-parallel ranks, and by default
            # sends a part of them from each. Under sequence parallelism they differ: without the
            # two lines the next stage would get a wrong mixture.
            split = self.config.sequence_parallel
            first, last = self.stage_id == 0, self.stage_id + 1 == self.num_stages
            out: Any = super().forward(
                scatter_to_sequence_parallel_region(forward_input)
                if split and not first
                else forward_input
            )
            return (
                gather_from_sequence_parallel_region(out, tensor_parallel_output_grad=False)
                if split and not last
                else out
            )

    return StagedModel


def _check_types(method: str, specs: "Sequence[LayerSpec]") -> None:
    """Raises UsageError for `type:REGEX` that names no layer."""
    if not method.startswith("type:"):
        return
    names = list(dict.fromkeys(spec.typename.__name__ for spec in specs))
    try:
        found = any(re.search(method.split(":")[1], name, re.IGNORECASE) for name in names)
    except re.error as error:
        raise UsageError(
            "the type of a pipeline's partition is no regular expression",
            found=f"{method}: {error}",
            fix="correct the pattern (--pp-partition-method type:PATTERN)",
        ) from None
    if not found:
        raise UsageError(
            "no layer of the pipeline has such a type",
            expected=f"a part of {', '.join(names)}",
            found=method,
            fix="name a part of one of these (--pp-partition-method type:NAME)",
        )


def _check_experts(parts: Sequence[int], transformer: "TransformerConfig") -> None:
    """Raises UnsupportedError where DeepSpeed has groups for experts, and a stage no layer with
    any. The transformer layers are those at the positions 1 to L of the pipeline."""
    layers = range(transformer.num_layers)
    with_experts = {number + 1 for number in layers if models.has_experts(transformer, number)}
    if not with_experts or not experts_are_apart():
        return
    for stage, (first, last) in enumerate(itertools.pairwise(parts)):
        if with_experts.isdisjoint(range(first, last)):
            raise UnsupportedError(
                "a stage of the pipeline has no layer with experts: DeepSpeed saves such a stage "
                "in another way than the others, and waits for them",
                expected="a layer with experts on every stage",
                found=f"stage {stage}: layers {first} to {last - 1}",
                fix="choose another partition, or train without expert parallelism",
            )
