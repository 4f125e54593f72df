"""A hybrid model's stack of megatron-core's local layers: its own specs need Transformer Engine.
`--spec tests.stock.hybrid_layers local_stack` names it."""

from dataclasses import replace

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.hybrid import hybrid_block
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_layer import (
    MoETransformerLayer,
    TransformerLayer,
    TransformerLayerSubmodules,
)

hybrid_block.TENorm = WrappedTorchNorm  # type: ignore[attr-defined]


def _stack() -> ModuleSpec:
    layer = get_gpt_layer_local_spec(normalization="RMSNorm").submodules
    keys = layer.sharded_state_dict_keys_map
    attention = TransformerLayerSubmodules(
        input_layernorm=layer.input_layernorm,
        self_attention=layer.self_attention,
        self_attn_bda=get_bias_dropout_add,
        sharded_state_dict_keys_map=keys,
    )
    mlp = TransformerLayerSubmodules(
        pre_mlp_layernorm=layer.pre_mlp_layernorm,
        mlp=layer.mlp,
        mlp_bda=get_bias_dropout_add,
        sharded_state_dict_keys_map=keys,
    )
    mixture = get_gpt_layer_local_spec(
        num_experts=4, moe_grouped_gemm=False, normalization="RMSNorm"
    ).submodules
    experts = replace(mlp, pre_mlp_layernorm=mixture.pre_mlp_layernorm, mlp=mixture.mlp)
    return ModuleSpec(
        module=HybridStack,
        submodules=HybridStackSubmodules(
            attention_layer=ModuleSpec(module=TransformerLayer, submodules=attention),
            mlp_layer=ModuleSpec(module=MLPLayer, submodules=mlp),
            moe_layer=ModuleSpec(module=MoETransformerLayer, submodules=experts),
        ),
    )


local_stack = _stack()
