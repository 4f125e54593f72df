"""megatron-core's hybrid model on a CPU: layers of attention, MLP, experts or Mamba; and its latent
attention."""

import sys
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F

from pretrain.mcore import models
from tests.engines.recurrent_models import kernels_on_cpu, mamba_layer

# of attention, MLP, experts and Mamba: a layer each, as two of them make a layer of a GPTModel
PATTERNS = {"hybrid": "*-*-*-*-", "hybrid mixture": "*E*E*E*E", "mamba": "M-M*M-M*"}


def hybrid(
    config: Any, pattern: str, words: int, positions: int, *, tied: bool, **ends: Any
) -> Any:
    """megatron-core's hybrid model (MambaModel in 0.16.1), of layers of a GPTModel's modules."""
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.mamba import MambaModel
    from megatron.core.ssm import mamba_block
    from megatron.core.ssm.mlp_layer import MLPLayer
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_layer import (
        TransformerLayer,
        TransformerLayerSubmodules,
    )

    fused: Any = get_bias_dropout_add
    # in 0.19 the stack lies in another module, and this one only names it
    stack = sys.modules[mamba_block.MambaStack.__module__]
    with on_cpu(), kernels_on_cpu(), mock.patch.object(stack, "TENorm", WrappedTorchNorm):
        spec = get_gpt_layer_local_spec(
            num_experts=config.num_moe_experts,
            qk_layernorm=config.qk_layernorm,
            normalization="RMSNorm",
        )
        own: Any = spec.submodules
        attention = TransformerLayerSubmodules(
            input_layernorm=own.input_layernorm,
            self_attention=own.self_attention,
            self_attn_bda=fused,
            sharded_state_dict_keys_map=own.sharded_state_dict_keys_map,
        )
        mlp = TransformerLayerSubmodules(
            pre_mlp_layernorm=own.pre_mlp_layernorm,
            mlp=own.mlp,
            mlp_bda=fused,
            sharded_state_dict_keys_map=own.sharded_state_dict_keys_map,
        )
        layers = {
            "mamba_layer": mamba_layer(ColumnParallelLinear, RowParallelLinear, WrappedTorchNorm),
            "attention_layer": ModuleSpec(TransformerLayer, submodules=attention),
            "mlp_layer": ModuleSpec(MLPLayer, submodules=mlp),
            "moe_layer": ModuleSpec(TransformerLayer, submodules=mlp),
        }
        return MambaModel(
            config,
            ModuleSpec(
                mamba_block.MambaStack, submodules=mamba_block.MambaStackSubmodules(**layers)
            ),
            words,
            positions,
            hybrid_override_pattern=pattern,
            share_embeddings_and_output_weights=tied,
            position_embedding_type="rope",
            **ends,
        )


@contextmanager
def on_cpu() -> Any:
    """Latent attention asks for classes of Transformer Engine by name; torch's norms refuse
    sequence parallelism, which the norms of models of this package mark for."""
    import megatron.core.transformer.multi_latent_attention as latent
    import megatron.core.transformer.torch_norm as norms

    for name in ("TEColumnParallelLinear", "TELinear", "Linear"):
        if not isinstance(getattr(latent, name, None), type):
            setattr(latent, name, type(name, (), {}))
    with mock.patch.object(norms.WrappedTorchNorm, "__new__", models.TaggedNorm.__new__):
        yield


def with_latent_attention(spec: Any) -> None:
    """Puts what runs on a CPU into the layers' latent attention."""
    for layer in spec.layer_specs:
        layer.submodules.self_attention.submodules.core_attention = LatentAttention


class LatentAttention(torch.nn.Module):
    """In the place of Transformer Engine's: keys and values of different widths."""

    def __init__(self, config: Any, *_: Any, softmax_scale: float | None = None, **__: Any) -> None:
        super().__init__()
        self.scale = softmax_scale

    def forward(self, query: Any, key: Any, value: Any, mask: Any, *_: Any, **__: Any) -> Any:
        heads = [one.permute(1, 2, 0, 3) for one in (query, key, value)]
        out = F.scaled_dot_product_attention(*heads, is_causal=True, scale=self.scale)
        return out.permute(2, 0, 1, 3).flatten(2)
