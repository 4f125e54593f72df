"""What a Hugging Face folder says as this program's arguments."""

from pathlib import Path
from typing import Any

from megatron_ucp.families.family import Sizes
from megatron_ucp.families.mixtral import MixtralSizes
from megatron_ucp.families.settings import PRE_SOFTMAX, Architecture
from megatron_ucp.reshard.hugging_face.names import read_twin


def described(folder: Path) -> tuple[dict[str, Any], int]:
    """The arguments that make the folder's model, and the rows of its vocabulary. Raises
    UnsupportedError for a model that no family describes."""
    twin, sizes, architecture = read_twin(folder)
    return _arguments(twin.family, sizes, architecture), sizes.vocab


def _arguments(family: str, sizes: Sizes, architecture: Architecture) -> dict[str, Any]:
    out: dict[str, Any] = {
        "model_family": family,
        "num_layers": sizes.layers,
        "hidden_size": sizes.hidden,
        "ffn_hidden_size": sizes.ffn,
        "num_attention_heads": sizes.heads,
        "num_query_groups": sizes.groups,
        "kv_channels": sizes.head_dim,
        "norm_epsilon": architecture.norm_epsilon,
        "untie_embeddings_and_output_weights": not sizes.tied,
        "max_position_embeddings": sizes.positions or architecture.positions,
        "openai_gelu": architecture.activation == "gelu_tanh",
    }
    if sizes.positions:
        return out
    base = architecture.rotary_base
    out |= {
        "rotary_base": int(base) if base == int(base) else base,
        "use_rope_scaling": architecture.rope_factor > 0,
        "rotary_seq_len_interpolation_factor": architecture.interpolation or None,
    }
    if architecture.rope_factor:
        out["rope_scaling_factor"] = architecture.rope_factor
    if isinstance(sizes, MixtralSizes):
        out |= {
            "num_experts": sizes.experts,
            "moe_ffn_hidden_size": sizes.width,
            "moe_router_topk": architecture.topk,
            "moe_layer_freq": sizes.every,
            "moe_router_pre_softmax": architecture.odd.get(PRE_SOFTMAX, False),
        }
    return out
