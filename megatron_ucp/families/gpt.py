"""GPT on megatron-core's local layer spec: learned positions, LayerNorm, gelu, biases, tied or
untied head."""

from megatron_ucp.core.layout import Chunks
from megatron_ucp.core.tensor_parts import TensorPart
from megatron_ucp.families import pipe
from megatron_ucp.families.family import (
    Builder,
    Config,
    Declared,
    Family,
    HuggingFace,
    Sizes,
    attention_and_mlp,
    transformer,
)
from megatron_ucp.families.settings import Architecture
from megatron_ucp.families.twin import (
    TRANSPOSED,
    check_config,
    refused_settings,
    refused_sizes,
    split_qkv,
)


def table(sizes: Sizes) -> dict[str, Declared]:
    """Every parameter of the model."""
    return transformer(sizes, lambda _: attention_and_mlp(sizes))


# ------------------------------------------------ GPT-2 of Hugging Face

_ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_new"}


def tensors(sizes: Sizes) -> dict[str, TensorPart]:
    """What each tensor of GPT2LMHeadModel holds: matrices transposed, in c_attn the queries of all
    heads, then the keys, then the values."""
    out = {
        "transformer.wte.weight": TensorPart("embedding.word_embeddings.weight"),
        "transformer.wpe.weight": TensorPart("embedding.position_embeddings.weight"),
    }
    for number in range(sizes.layers):
        out |= _layer(sizes, f"transformer.h.{number}.", f"decoder.layers.{number}.")
    for part in ("weight", "bias"):
        out[f"transformer.ln_f.{part}"] = TensorPart(f"decoder.final_layernorm.{part}")
    if not sizes.tied:
        out["lm_head.weight"] = TensorPart("output_layer.weight")
    return out


def _layer(sizes: Sizes, prefix: str, canonical: str) -> dict[str, TensorPart]:
    out: dict[str, TensorPart] = {}
    for theirs, ours in {
        "ln_1": "input_layernorm",
        "attn.c_attn": "self_attention.linear_qkv",
        "attn.c_proj": "self_attention.linear_proj",
        "ln_2": "pre_mlp_layernorm",
        "mlp.c_fc": "mlp.linear_fc1",
        "mlp.c_proj": "mlp.linear_fc2",
    }.items():
        for part, rest in (("weight", (sizes.hidden,)), ("bias", ())):
            share = TensorPart(f"{canonical}{ours}.{part}")
            if theirs == "attn.c_attn":
                queries, keys, values = split_qkv(sizes, *rest)
                share = TensorPart(share.param, Chunks(((*queries, *keys, *values),)))
            if rest and not theirs.startswith("ln"):
                share = TensorPart(share.param, share.layout, order=TRANSPOSED)
            out[f"{prefix}{theirs}.{part}"] = share
    return out


def to_config(sizes: Sizes, architecture: Architecture) -> dict[str, object]:
    """config.json of GPT-2."""
    return {
        "activation_function": _ACTIVATIONS[architecture.activation],
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "layer_norm_epsilon": architecture.norm_epsilon,
        "n_embd": sizes.hidden,
        "n_head": sizes.heads,
        "n_inner": sizes.ffn,
        "n_layer": sizes.layers,
        "n_positions": sizes.positions,
        "resid_pdrop": 0.0,
    }


def refuses(sizes: Sizes, architecture: Architecture) -> list[str]:
    """What GPT2LMHeadModel does not have."""
    out = refused_settings(architecture, _ACTIVATIONS) + refused_sizes(sizes)
    if sizes.groups != sizes.heads:
        out.append(f"{sizes.groups} key-value groups for {sizes.heads} heads")
    if sizes.heads * sizes.head_dim != sizes.hidden:
        out.append(f"heads of {sizes.head_dim}, which don't make up {sizes.hidden}")
    if not sizes.positions:
        out.append("no learned positions")
    if not (sizes.biases and sizes.norm_biases) or sizes.gated:
        out.append("a gated MLP" if sizes.gated else "no biases")
    return out


def from_config(config: Config) -> tuple[Sizes, Architecture]:
    """Sizes and architecture of a GPT-2. Raises UnsupportedError for what is not computed here."""
    names = {theirs: ours for ours, theirs in _ACTIVATIONS.items()} | {
        "gelu_pytorch_tanh": "gelu_tanh"
    }
    check_config(
        config,
        {
            "activation_function": ("gelu_new", *names),
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
            "reorder_and_upcast_attn": (False,),
            "add_cross_attention": (False,),
        },
    )
    hidden, heads, vocabulary = (int(config[key]) for key in ("n_embd", "n_head", "vocab_size"))
    positions = int(config["n_positions"])
    sizes = Sizes(
        int(config["n_layer"]),
        hidden,
        heads,
        heads,
        hidden // heads,
        int(config.get("n_inner") or 4 * hidden),
        vocabulary,
        vocabulary,
        positions,
        tied=bool(config.get("tie_word_embeddings", True)),
    )
    return sizes, Architecture(
        positions,
        float(config.get("layer_norm_epsilon", 1e-5)),
        names[str(config.get("activation_function", "gelu_new"))],
    )


FAMILY = Family(
    "gpt",
    table,
    "megatron_ucp/families/gpt.py",
    pipe.names,
    pipe.layers,
    builder=Builder(
        "LayerNorm", gated=False, biases=True, position_embedding_type="learned_absolute"
    ),
    defaults={"untie_embeddings_and_output_weights": False},
    hugging_face=HuggingFace("gpt2", "GPT2LMHeadModel", tensors, to_config, from_config, refuses),
)
