"""LLaMA on megatron-core's local layer spec: grouped queries, SwiGLU (gate above up), RMSNorm,
RoPE, no biases."""

from megatron_ucp.errors import UsageError
from megatron_ucp.families import gpt, pipe
from megatron_ucp.families.base import Builder, Declared, Family, Sizes


def table(sizes: Sizes) -> dict[str, Declared]:
    """Every parameter of the model. Raises UsageError for sizes that are no LLaMA."""
    if sizes.biases or sizes.norm_biases or sizes.positions or not sizes.gated:
        raise UsageError(
            "these sizes are no LLaMA",
            expected="a gated MLP, no biases, no learned positions",
            found=str(sizes),
            fix="give the family that the model was built with",
        )
    return gpt.table(sizes)


FAMILY = Family(
    "llama",
    table,
    "megatron_ucp/families/llama.py",
    pipe.names,
    pipe.layers,
    builder=Builder("RMSNorm", gated=True, biases=False, position_embedding_type="rope"),
    defaults={
        "untie_embeddings_and_output_weights": True,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
    },
)
