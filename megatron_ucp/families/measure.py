"""Sizes of a live model, from its own config."""

from typing import Any

from megatron_ucp.errors import UsageError
from megatron_ucp.families.base import Sizes

TRUE_VOCAB = "ucp_true_vocab"  # of a model: the rows of its vocabulary that are data


def measured(module: Any) -> Sizes:
    """Sizes of a megatron-core GPTModel, or of a PipelineModule with the same attributes, from its
    own config. Raises UsageError for another module."""
    config: Any = getattr(module, "config", None)
    missing = [
        name
        for name in ("num_layers", "num_query_groups", "kv_channels", "gated_linear_unit")
        if not hasattr(config, name)
    ]
    of_module = ("share_embeddings_and_output_weights", "position_embedding_type")
    if missing or not all(hasattr(module, name) for name in of_module):
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
        true_vocab=getattr(module, TRUE_VOCAB, module.vocab_size),
        positions=module.max_sequence_length if learned else 0,
        tied=module.share_embeddings_and_output_weights,
        gated=config.gated_linear_unit,
        biases=config.add_bias_linear,
        norm_biases=config.normalization == "LayerNorm",
        qkv_biases=bool(getattr(config, "add_qkv_bias", False)) and not config.add_bias_linear,
        qk_norms=bool(getattr(config, "qk_layernorm", False)),
    )
