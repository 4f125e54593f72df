"""The family of a live megatron-core model, at the sizes of its own config."""

from typing import Any

from megatron_ucp.engines.deepspeed.stage import parallel_of
from megatron_ucp.errors import UsageError
from megatron_ucp.families import find_family
from megatron_ucp.families.base import Family, Model, Sizes

_REMEMBERED = "_ucp_model"
# an attribute of the model: the tokenizer's size, where the vocabulary is padded
_TRUE_VOCAB = "ucp_true_vocab"


def model_of(engine: Any, family: str | Family | None) -> Model | None:
    """The family at the sizes of the engine's model; without one, what an earlier call gave.

    Raises UsageError for a module that is no megatron-core GPTModel, LayoutError where the
    tensor-parallel size does not divide it.
    """
    if family is None:
        return engine.__dict__.get(_REMEMBERED)
    chosen = find_family(family) if isinstance(family, str) else family
    measure = chosen.measure or sizes_of
    model = Model(chosen, measure(engine.module))
    model.check_cut(parallel_of(engine)[0][0])
    engine.__dict__[_REMEMBERED] = model
    return model


def sizes_of(module: Any) -> Sizes:
    """Sizes of a megatron-core GPTModel, or of a PipelineModule with the same attributes, from its
    own config. Raises UsageError for another module."""
    config: Any = getattr(module, "config", None)
    missing = [
        name
        for name in ("num_layers", "num_query_groups", "kv_channels", "gated_linear_unit")
        if not hasattr(config, name)
    ]
    if missing or not hasattr(module, "share_embeddings_and_output_weights"):
        raise UsageError(
            "a family describes a megatron-core GPTModel",
            expected="GPTModel as the engine's module",
            found=type(module).__qualname__,
            fix="leave family out for other models (at tp=1), or give the family a `measure`",
        )
    learned = module.position_embedding_type == "learned_absolute"
    return Sizes(
        layers=config.num_layers,
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        groups=config.num_query_groups or config.num_attention_heads,
        head_dim=config.kv_channels,
        ffn=config.ffn_hidden_size,
        vocab=module.vocab_size,
        true_vocab=getattr(module, _TRUE_VOCAB, module.vocab_size),
        positions=module.max_sequence_length if learned else 0,
        tied=module.share_embeddings_and_output_weights,
        gated=config.gated_linear_unit,
        biases=config.add_bias_linear,
        norm_biases=config.normalization == "LayerNorm",
    )
