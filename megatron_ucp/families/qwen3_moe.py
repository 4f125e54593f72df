"""Qwen3-MoE on megatron-core's local layer spec: a Qwen3 whose layers, or every n-th of them, have
experts instead of an MLP.

Its config may list any layers that have an MLP, and say that the weights of the chosen experts are
taken as the softmax over all of them gives them: megatron-core's `moe_router_pre_softmax`.
"""

from dataclasses import replace
from typing import Any

from megatron_ucp.errors import UnsupportedError
from megatron_ucp.families import llama, mixtral
from megatron_ucp.families.mixtral import MixtralSizes
from megatron_ucp.families.settings import FREQUENCY, PRE_SOFTMAX, Architecture, every_of
from megatron_ucp.families.twin import (
    MLP_ROWS,
    Config,
    HuggingFace,
    by_rows,
    common,
    read_architecture,
    read_common,
)

_BUILDER = replace(mixtral.MIXTURE, qk_norms=True)
_ROWS = {**mixtral.rows("mlp.", "gate_proj", "up_proj", "down_proj"), **MLP_ROWS}


def config(sizes: MixtralSizes, architecture: Architecture) -> dict[str, Any]:
    """config.json of Qwen3-MoE."""
    return {
        **common(sizes, architecture),
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [n for n in range(sizes.layers) if not sizes.has_experts(n)],
        "moe_intermediate_size": sizes.width,
        "norm_topk_prob": not architecture.odd.get(PRE_SOFTMAX, False),
        "num_experts": sizes.experts,
        "num_experts_per_tok": architecture.topk,
        "output_router_logits": False,
        "use_sliding_window": False,
    }


def refuses(sizes: MixtralSizes, architecture: Architecture) -> list[str]:
    """What Qwen3MoeForCausalLM does not have."""
    known = "qk_layernorm", PRE_SOFTMAX, FREQUENCY
    return mixtral.refused_mixture(sizes, architecture, *known)


def read(found: Config) -> tuple[MixtralSizes, Architecture]:
    """Sizes and architecture of a Qwen3-MoE. Raises UnsupportedError for what is not computed
    here."""
    found, odd = llama.without_used_window(found), dict[str, Any](qk_layernorm=True)
    if (every := _every(found)) != 1:
        odd[FREQUENCY] = every
    if not found.get("norm_topk_prob", False):
        odd[PRE_SOFTMAX] = True
    sizes = MixtralSizes(
        **read_common(found, int(found["vocab_size"]), qk_norms=True),
        experts=int(found.get("num_experts", found.get("num_local_experts", 128))),
        expert_ffn=int(found.get("moe_intermediate_size", 768)),
        every=every,
    )
    topk = int(found.get("num_experts_per_tok", 8))
    return sizes, read_architecture(found, 1e-6, 10000.0, topk=topk, odd=odd)


def _every(found: Config) -> int:
    """Which layers have experts as a number. Raises UnsupportedError where none says it."""
    step = found.get("decoder_sparse_step", 1)
    without = [*(found.get("mlp_only_layers") or ())]
    layers = range(int(found["num_hidden_layers"]))
    marks = [number not in without and not (number + 1) % step for number in layers]
    try:
        return every_of(marks)
    except ValueError:
        raise UnsupportedError(
            "which layers have experts is nothing that a number says, which is not supported",
            expected="experts in every n-th layer, from the first one on",
            found=f"decoder_sparse_step {step}, mlp_only_layers {without}",
            fix="train such a model with transformers under DeepSpeed, which needs no family",
        ) from None


table = mixtral.table_of(_BUILDER, "Qwen3-MoE")
FAMILY = mixtral.alike(
    "qwen3_moe",
    _BUILDER,
    table,
    HuggingFace("qwen3_moe", "Qwen3MoeForCausalLM", by_rows(table, _ROWS), config, read, refuses),
)
