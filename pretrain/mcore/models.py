"""megatron-core's own GPTModel as a family's builder says, to be trained under DeepSpeed; on CPUs
too.

    models.start(tp=2, seed=1)        # after torch.distributed is initialised
    model = models.build(config)      # weights do not depend on tp
    optimizer = AdamW(models.param_groups(model, 1e-3, 0.1))
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, mpu=models.mpu(), config=...)
    engine.backward(models.loss(engine, tokens, labels))
    models.stop()

`engines/pipeline` builds the same models in stages.
"""

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from megatron_ucp.errors import UsageError
from megatron_ucp.families import families, find_family
from megatron_ucp.families.family import TRUE_VOCAB, Builder, Declared, Model, Sizes
from pretrain.mcore import experts
from pretrain.mcore.experts import Experts
from pretrain.mcore.groups import closed_by_stop as closed_by_stop
from pretrain.mcore.groups import deepspeed_trains, expert_group_name
from pretrain.mcore.groups import mpu as mpu
from pretrain.mcore.groups import stage_seed as stage_seed
from pretrain.mcore.groups import start as start
from pretrain.mcore.groups import stop as stop

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules


@dataclass(frozen=True)
class ModelConfig:
    """The sizes of a model and how it is initialised. `vocab` is the padded vocabulary,
    `true_vocab` the tokenizer's; `ffn` the width of one half of a gated MLP; `groups` the key-value
    groups; `positions` the longest sequence; `experts` those of a family that has any;
    `rope_factor` scales rotary positions as Llama 3.1 does, `interpolation` divides them (0:
    neither); `tanh_gelu` is for a family with gelu.

    `dtype` is what the DeepSpeed config trains in (fp32, bf16, fp16); the model itself is built in
    fp32, from which DeepSpeed takes the masters. Raises UsageError for sizes that make no model.
    """

    family: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    groups: int
    vocab: int
    true_vocab: int
    positions: int
    head_dim: int | None = None
    tied: bool = False
    norm_eps: float = 1e-5
    rotary_base: float = 10000
    rope_factor: float = 0.0
    interpolation: float = 0.0
    tanh_gelu: bool = False
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0
    init_std: float = 0.02
    sequence_parallel: bool = False
    dtype: str = "fp32"
    seed: int = 1234
    experts: Experts | None = None

    def __post_init__(self) -> None:
        if builder_of(self.family).experts != (self.experts is not None):
            raise UsageError(
                "only a family with experts has, and needs, experts",
                expected="experts" if self.experts is None else "none",
                found=f"{self.family} with {self.experts}",
                fix="give --num-experts for a family with experts, and leave it out for any other",
            )
        if self.dtype not in ("fp32", "bf16", "fp16"):
            raise UsageError(
                "a model trains in another dtype",
                expected="fp32, bf16 or fp16",
                found=self.dtype,
                fix="give --bf16 or --fp16, or neither for fp32",
            )
        if self.tanh_gelu and self.builder.gated:
            raise UsageError(
                "a gated MLP has no gelu",
                expected="silu",
                found="its tanh form",
                fix="give --swiglu, or leave --openai-gelu out",
            )
        if self.heads % self.groups:
            raise UsageError(
                "the attention heads do not divide into the key-value groups",
                expected=f"a multiple of {self.groups} heads",
                found=self.heads,
                fix="change --num-attention-heads or --num-query-groups",
            )
        if self.head_dim is None and self.hidden % self.heads:
            raise UsageError(
                "the hidden size does not divide into the attention heads",
                expected=f"a multiple of {self.heads}, or a head size",
                found=self.hidden,
                fix="change --hidden-size or --num-attention-heads, or give --kv-channels",
            )
        if self.vocab < self.true_vocab:
            raise UsageError(
                "the padded vocabulary is smaller than the tokenizer's",
                expected=f"at least {self.true_vocab}",
                found=self.vocab,
                fix="give at least as many padded rows as the tokenizer has "
                "(--make-vocab-size-divisible-by)",
            )

    @property
    def builder(self) -> Builder:
        """How the family is built."""
        return builder_of(self.family)

    def model(self) -> Model:
        """The family at these sizes."""
        return Model(find_family(self.family), self.sizes())

    def sizes(self) -> Sizes:
        """The sizes as the family's table takes them."""
        more: dict[str, Any] = self.experts.sizes if self.experts else {}
        return find_family(self.family).sizes(
            layers=self.layers,
            hidden=self.hidden,
            heads=self.heads,
            groups=self.groups,
            head_dim=self.head_dim or self.hidden // self.heads,
            ffn=self.ffn,
            vocab=self.vocab,
            true_vocab=self.true_vocab,
            positions=self.positions if self.builder.learned_positions else 0,
            tied=self.tied,
            **self.builder.flags,
            **more,
        )


def builder_of(family: str) -> Builder:
    """Raises UsageError for a family that megatron-core's modules don't make."""
    built = {name: found.builder for name, found in families().items() if found.builder}
    if family not in built:
        raise UsageError(
            "there is no builder for this family",
            expected=", ".join(built),
            found=family,
            fix="give one of these (--model-family)",
        )
    return built[family]


def build(config: ModelConfig) -> "GPTModel":
    """This rank's part of a model, on the CPU, in fp32. Call `start` first.

    Raises LayoutError when the tensor-parallel size divides heads, vocabulary or ffn not,
    UsageError before `start` and after a `start` with pipeline stages.
    """

    transformer = transformer_config(config, started_for(config, 1))
    # taken as well as the ModuleSpec that megatron-core declares
    return gpt_model(config, transformer, layer_specs(transformer), experts.global_expert_names)


def gpt_model(
    config: ModelConfig,
    transformer: "TransformerConfig",
    layers: Any,
    names_of: Callable[[Any], Mapping[str, str]],
    **stage: Any,
) -> "GPTModel":
    """A GPTModel, or a chunk of one, with first values and attributes; `names_of` gives the
    canonical names of its parameters."""
    from megatron.core.models.gpt import GPTModel

    model = GPTModel(
        transformer,
        layers,
        vocab_size=config.vocab,
        max_sequence_length=config.positions,
        position_embedding_type=config.builder.position_embedding_type,
        **rotary(config),
        share_embeddings_and_output_weights=config.tied,
        **stage,
    )
    experts.mark_experts(model)
    prepare_all(model, config, names_of(model))
    model.__dict__[TRUE_VOCAB] = config.true_vocab
    return model


def prepare_all(model: torch.nn.Module, config: ModelConfig, names: Mapping[str, str]) -> None:
    """Attributes and first values of all parameters, by their canonical `names`."""
    described = config.model()
    for name, param in model.named_parameters():
        prepare(names[name], param, described.find(names[name]), config)


def rotary(config: ModelConfig) -> dict[str, Any]:
    """The rotary embedding, in the words of megatron-core's modules."""
    return {
        "rotary_base": config.rotary_base,
        "rope_scaling": config.rope_factor > 0,
        "rope_scaling_factor": config.rope_factor or 1.0,
        "seq_len_interpolation_factor": config.interpolation or None,
    }


def check_started(config: ModelConfig) -> tuple[int, int]:
    """The sizes (tp, pp) that `start` was called with. Applies the patches that experts need.
    Raises UsageError before it, LayoutError where the sizes do not divide the model,
    UnsupportedError where the model can't be trained under them."""
    from megatron.core import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        raise UsageError(
            "megatron-core's process groups are not there", fix="call models.start(tp, seed) first"
        )
    tp = parallel_state.get_tensor_model_parallel_world_size()
    config.model().check_cut(tp)
    experts.check_mesh(config.experts, config.sequence_parallel)
    if config.experts:
        experts.apply_patches()
    return tp, parallel_state.get_pipeline_model_parallel_world_size()


def started_for(config: ModelConfig, stages: int) -> int:
    """The tensor-parallel size that `start` was called with. Raises as `check_started`, and
    UsageError where it was called with another number of pipeline `stages`."""
    tp, started = check_started(config)
    if stages != started:
        raise UsageError(
            "models.start was called with another number of pipeline stages",
            expected=stages,
            found=started,
            fix="give models.start and the model the same number (--pipeline-model-parallel-size); "
            "engines.pipeline.build_pipeline builds a model in stages",
        )
    return tp


def prepare(name: str, param: torch.nn.Parameter, declared: Declared, config: ModelConfig) -> None:
    """Attributes and first values of a parameter by its canonical name; and hooks, where DeepSpeed
    trains: megatron-core's own stack sums over the sequence itself."""
    from megatron.core.tensor_parallel import (
        set_defaults_if_not_set_tensor_model_parallel_attributes as set_defaults,
    )

    set_defaults(
        param
    )  # what is not cut says so: DeepSpeed's gradient norm and the families' tables ask for it
    _initialise(name, param, declared, config)
    if deepspeed_trains() and (getattr(param, "sequence_parallel", False) or declared.summed):
        param.register_hook(_sum_over_tensor_parallel)


def transformer_config(config: ModelConfig, tp: int, **stages: Any) -> "TransformerConfig":
    """What megatron-core's modules are built from. `stages` are those of megatron-core's own
    pipeline; under DeepSpeed there are none: megatron-core would count its own on top of those of
    DeepSpeed's pipeline, and number the layers twice."""
    from megatron.core.transformer import TransformerConfig

    return TransformerConfig(
        num_layers=config.layers,
        hidden_size=config.hidden,
        ffn_hidden_size=config.ffn,
        num_attention_heads=config.heads,
        num_query_groups=config.groups,
        kv_channels=config.sizes().head_dim,
        layernorm_epsilon=config.norm_eps,
        **config.builder.settings,
        activation_func=_activation(config),
        hidden_dropout=config.hidden_dropout,
        attention_dropout=config.attention_dropout,
        bf16=config.dtype == "bf16",
        fp16=config.dtype == "fp16",  # softmax in fp32, whatever the scores' dtype is
        tensor_model_parallel_size=tp,
        sequence_parallel=config.sequence_parallel and tp > 1,
        # `_initialise` fills the weights; these two only let megatron-core set the attributes that
        # it sets while initialising
        use_cpu_initialization=True,
        init_method=_leave,
        output_layer_init_method=_leave,
        embedding_init_method=_leave,
        # The fusions need CUDA kernels, or compute something else: bias_activation_fusion is the
        # tanh form of gelu.
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        **(config.experts.transformer if config.experts else {}),
        **stages,
    )


def _activation(config: ModelConfig) -> Any:
    if config.builder.gated:
        return torch.nn.functional.silu
    return gelu_tanh if config.tanh_gelu else torch.nn.functional.gelu


def gelu_tanh(values: torch.Tensor) -> torch.Tensor:
    """The tanh form of gelu, under the name that an `Architecture` has for it."""
    return torch.nn.functional.gelu(values, approximate="tanh")


def _leave(weight: torch.Tensor) -> None:
    """An init method that does nothing."""


class TaggedNorm:
    """LayerNorm or RMSNorm that marks its parameters under sequence parallelism, where
    megatron-core's own refuses."""

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> Any:
        kind = torch.nn.RMSNorm if config.normalization == "RMSNorm" else torch.nn.LayerNorm
        norm = kind(hidden_size, eps=eps)
        for param in norm.parameters():
            param.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm


def layer_specs(transformer: "TransformerConfig") -> "TransformerBlockSubmodules":
    """megatron-core's local layer specs, one for each layer, with norms that sequence parallelism
    can use."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    layers = []
    for number in range(transformer.num_layers):
        layer = get_gpt_layer_local_spec(
            num_experts=transformer.num_moe_experts if has_experts(transformer, number) else None,
            normalization=transformer.normalization,
            qk_layernorm=transformer.qk_layernorm,
        )
        if transformer.qk_layernorm:
            heads: Any = layer.submodules.self_attention.submodules  # type: ignore[union-attr]
            heads.q_layernorm = heads.k_layernorm = TaggedNorm
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = TaggedNorm  # type: ignore[union-attr]
        layers.append(layer)
    return TransformerBlockSubmodules(layers, layer_norm=TaggedNorm)  # type: ignore[arg-type]


def has_experts(transformer: "TransformerConfig", number: int) -> bool:
    """Whether a transformer layer, counted from 0, has experts."""
    every: Any = transformer.moe_layer_freq
    return bool(transformer.num_moe_experts) and number % every == 0


@torch.no_grad()
def _initialise(name: str, param: torch.Tensor, declared: Declared, config: ModelConfig) -> None:
    """Draws the whole tensor from a generator of its own, seeded by (seed, name), and keeps this
    rank's cut of it: every tensor-parallel size starts from the same model. The distributions are
    Megatron's (see `Declared.init`)."""
    if declared.init in ("ones", "zeros"):
        param.fill_(float(declared.init == "ones"))
        return
    parts, rank = experts.cut_of(param)
    shape, std = list(param.shape), config.init_std
    dim: int = param.partition_dim  # type: ignore[attr-defined]
    if param.tensor_model_parallel:  # type: ignore[attr-defined]
        shape[dim] *= parts
    if declared.init == "residual":
        std /= (2 * config.layers) ** 0.5
    # a CPU generator takes the low 32 bits of its seed only: seed and name must meet in them
    generator = torch.Generator().manual_seed(zlib.crc32(f"{config.seed} {name}".encode()))
    whole = torch.empty(shape).normal_(0.0, std, generator=generator)
    if param.tensor_model_parallel:  # type: ignore[attr-defined]
        # a gated MLP's fc1 is two stacked tensors (stride 2), each one cut
        stacked = whole.chunk(param.partition_stride, dim)  # type: ignore[attr-defined]
        whole = torch.cat([one.chunk(parts, dim)[rank] for one in stacked], dim)
    param.copy_(whole)


def _sum_over_tensor_parallel(grad: torch.Tensor) -> torch.Tensor:
    """Under sequence parallelism a norm's gradient, and a row-parallel bias's, covers this rank's
    part of the sequence.

    As a hook on the leaf it runs once per backward pass, before autograd adds the gradient to
    `.grad`, hence before ZeRO's own hooks take it. Summing after `engine.backward`, where Megatron
    does it, is too late for ZeRO 1 to 3.
    """
    from megatron.core import parallel_state

    total = (
        grad.float() if grad.dtype != torch.float32 else grad.clone()
    )  # rounded once, after the sum
    group: Any = parallel_state.get_tensor_model_parallel_group()
    dist.all_reduce(total, group=group)
    return total.to(grad.dtype)


def loss(
    model: Any,
    tokens: torch.Tensor,
    labels: torch.Tensor,
    mask: torch.Tensor | None = None,
    first: int = 0,
) -> torch.Tensor:
    """Mean cross entropy in fp32 over the tokens, or over those where `mask` is not 0; a scalar,
    the same on all tensor-parallel ranks. `tokens`, `labels` and `mask` are [batch, sequence];
    labels are the tokens shifted by one. `first` is the position of the first token, where ranks
    share sequences.

    `model` is a model of `build` or a DeepSpeed engine around it. Raises UsageError for a sequence
    that does not fit.
    """
    bare, length = _bare(model), tokens.shape[1]
    check_length(first + length, bare.max_sequence_length, bare.config)
    positions = torch.arange(first, first + length, device=tokens.device).expand_as(tokens)
    each = model(
        tokens, positions, not_attended(length, tokens.device), labels=labels
    )  # [batch, sequence]
    return experts.with_auxiliary_losses(mean_of(each.float(), mask), bare.config)


def check_length(length: int, longest: int, transformer: "TransformerConfig") -> None:
    """Raises UsageError for a sequence that does not fit."""
    parts = parts_of_sequence(transformer)
    if length > longest or length % parts:
        raise UsageError(
            "the sequence length does not fit the model",
            found=length,
            expected=f"at most {longest}" + (f", a multiple of {parts}" if parts > 1 else ""),
            fix="give a --seq-length that fits, or a model with a larger --max-position-embeddings",
        )


def parts_of_sequence(transformer: "TransformerConfig") -> int:
    """Into how many parts tensor-parallel ranks divide a sequence."""
    return transformer.tensor_model_parallel_size if transformer.sequence_parallel else 1


def not_attended(length: int, device: torch.device) -> torch.Tensor:
    """[1, 1, sequence, sequence], True where a token must not look: at those after it."""
    return torch.ones(1, 1, length, length, dtype=torch.bool, device=device).triu(1)


def mean_of(each: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Mean of [batch, sequence], or of those where `mask` is not 0; 0 where it is 0 everywhere."""
    if mask is None:
        return each.mean()
    weights = mask.float()
    return (each * weights).sum() / weights.sum().clamp(min=1.0)


def _bare(model: Any) -> Any:
    from megatron.core.models.gpt import GPTModel

    while not isinstance(model, GPTModel) and hasattr(model, "module"):
        model = model.module
    return model


def param_groups(model: torch.nn.Module, lr: float, weight_decay: float) -> list[dict[str, Any]]:
    """Megatron's two groups: matrices decay, biases and norms do not. Frozen parameters and empty
    groups are left out; a pipeline stage may have one group only. Experts that have DeepSpeed's
    groups of their own come after them, in the same two groups.

    Call it before deepspeed.initialize: ZeRO-3 flattens parameters.
    """
    trained = [param for param in model.parameters() if param.requires_grad]
    groups: list[dict[str, Any]] = []
    for apart in (False, True):
        members = [param for param in trained if experts.is_apart(param) == apart]
        # by these two DeepSpeed knows them
        marks = {"moe": True, "name": expert_group_name()} if apart and members else {}
        for matrices in (True, False):
            params = [param for param in members if (param.dim() > 1) == matrices]
            decay = weight_decay if matrices else 0.0
            groups.append({"params": params, "lr": lr, "weight_decay": decay, **marks})
    return [group for group in groups if group["params"]]
