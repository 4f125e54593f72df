"""The tables of Hugging Face names: bijections of elements, and configs that say the same sizes."""

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from megatron_ucp.core.layout import Chunks
from megatron_ucp.core.tensor_parts import TensorPart, weights_manifest
from megatron_ucp.errors import UnsupportedError
from megatron_ucp.families import families, find_family, megatron_deepspeed
from megatron_ucp.families.family import HuggingFace, Sizes
from megatron_ucp.families.settings import Architecture
from tests.reshard import twins

SHAPES: dict[str, tuple[str, Sizes]] = {
    **{family: (family, sizes) for family, sizes in twins.SIZES.items()},
    "gpt untied": ("gpt", replace(twins.GPT, tied=False)),
    "llama tied": ("llama", replace(twins.LLAMA, tied=True)),
    "llama, a group for each head": ("llama", replace(twins.LLAMA, groups=4)),
    "llama, one group": ("llama", replace(twins.LLAMA, groups=1)),
}


def twin_of(family: str) -> HuggingFace:
    found = find_family(family).hugging_face
    assert found is not None
    return found


def elements(
    shares: Mapping[str, TensorPart], family: str, sizes: Sizes
) -> dict[tuple[str, int], str]:
    """(parameter, element) -> the tensor that has it. Raises ValueError for one that two have."""
    table = find_family(family).table(sizes)
    specs = {name: declared.spec(name, "float32") for name, declared in table.items()}
    manifest = weights_manifest(specs, [(share, "float32") for share in shares.values()])
    out: dict[tuple[str, int], str] = {}
    for tensor, buffer in zip(shares, manifest.buffers, strict=True):
        for piece in manifest.pieces(buffer.members[0], ()):
            shape = manifest.by_name[buffer.members[0].param].shape
            for index in range(piece.full.numel):
                rest, at, stride = index, 0, 1
                for start, size, whole in reversed(
                    [*zip(piece.full.start, piece.full.shape, shape, strict=True)]
                ):
                    rest, inner = divmod(rest, size)
                    at, stride = at + (start + inner) * stride, stride * whole
                key = buffer.members[0].param, at
                if key in out:
                    raise ValueError(f"{key} in {out[key]} and {tensor}")
                out[key] = tensor
    return out


@pytest.mark.parametrize("shape", SHAPES)
def test_every_element_is_in_one_tensor(shape: str) -> None:
    family, sizes = SHAPES[shape]
    sizes = replace(sizes, vocab=sizes.true_vocab)
    table = find_family(family).table(sizes)
    listed = twin_of(family).tensors(sizes)
    shares = {name: one for name, one in listed.items() if not name.endswith(twins.COPIES)}
    found = elements(shares, family, sizes)
    assert len(found) == sum(math.prod(declared.shape) for declared in table.values())
    assert {param for param, _ in found} == {*table} and {*found.values()} == {*shares}


def test_a_planted_fault_is_seen() -> None:
    shares = twin_of("llama").tensors(twins.LLAMA)
    name = "model.layers.0.self_attn.k_proj.weight"
    rows = shares[name].layout
    assert isinstance(rows, Chunks)
    twice = Chunks((rows.held[0], rows.held[0], rows.held[2]))
    changed = {
        key: replace(share, layout=twice) if share.param == shares[name].param else share
        for key, share in shares.items()
    }
    with pytest.raises(ValueError, match=r"linear_qkv.*in .*q_proj.* and .*k_proj"):
        elements(changed, "llama", twins.LLAMA)
    del shares[name]
    assert len(elements(shares, "llama", twins.LLAMA)) < sum(
        math.prod(one.shape) for one in find_family("llama").table(twins.LLAMA).values()
    )


@pytest.mark.parametrize("shape", SHAPES)
def test_a_config_says_sizes_and_architecture(shape: str) -> None:
    family, sizes = SHAPES[shape]
    twin = twin_of(family)
    said = twins.ARCHITECTURES[family]
    scaled = said.activation == "silu" and family != "deepseek_v3"
    for architecture in (
        said,
        replace(said, norm_epsilon=1e-3),
        *([replace(said, rope_factor=4.0)] if scaled else ()),
        *([replace(said, interpolation=2.0)] if scaled else ()),
        *([replace(said, odd={**said.odd, **YARN})] if family == "deepseek_v3" else ()),
        *([replace(said, odd={**said.odd, **GPT_OSS_YARN})] if family == "gpt_oss" else ()),
        *([replace(said, odd=WITHOUT_WINDOWS)] if family == "gpt_oss" else ()),
        *([replace(said, activation="gelu_tanh")] if family == "gpt" else ()),
    ):
        config = json.loads(json.dumps(twin.whole_config(sizes, architecture, "bfloat16")))
        found, computed = twin.read(config)
        assert computed == architecture
        assert find_family(family).table(found).keys() == find_family(family).table(sizes).keys()
        assert twin.tensors(found) == twin.tensors(replace(sizes, vocab=45))
        assert found.true_vocab == 45 and config["vocab_size"] == 45


YARN = {
    **{"rope_type": "yarn", "rotary_scaling_factor": 8.0, "original_max_position_embeddings": 64},
    **{"beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 0.5},
}
DEEPSEEK = twins.ARCHITECTURES["deepseek_v3"]


def also(**odd: Any) -> Architecture:
    """DeepSeek-V3 with other settings."""
    return replace(DEEPSEEK, odd={**DEEPSEEK.odd, **odd})


GPT_OSS = twins.ARCHITECTURES["gpt_oss"]
GPT_OSS_YARN = {
    "position_embedding_type": "yarn",
    "yarn_rotary_scaling_factor": 32.0,
    "yarn_original_max_position_embeddings": 4096,
    "yarn_beta_fast": 32.0,
    "yarn_beta_slow": 1.0,
    "yarn_correction_range_round_to_int": False,
}
_WINDOWS = ("window_size", "window_attn_skip_freq")
WITHOUT_WINDOWS = {key: value for key, value in GPT_OSS.odd.items() if key not in _WINDOWS}


def oss(**odd: Any) -> tuple[str, Sizes, Architecture]:
    """gpt-oss with other settings."""
    return "gpt_oss", twins.GPT_OSS, replace(GPT_OSS, odd={**GPT_OSS.odd, **odd})


LLAMA, GPT, MIXTRAL = (twins.ARCHITECTURES[name] for name in ("llama", "gpt", "mixtral"))
REFUSED: dict[str, tuple[str, Sizes, Architecture]] = {
    "rotary_percent=0.5": ("llama", twins.LLAMA, replace(LLAMA, odd={"rotary_percent": 0.5})),
    "rotary_interleaved=True": (
        "llama",
        twins.LLAMA,
        replace(LLAMA, odd={"rotary_interleaved": True}),
    ),
    "qk_layernorm=True": ("llama", twins.LLAMA, replace(LLAMA, odd={"qk_layernorm": True})),
    "activation relu": ("llama", twins.LLAMA, replace(LLAMA, activation="relu")),
    "4 heads do not divide": ("llama", replace(twins.LLAMA, hidden=18), LLAMA),
    "2 key-value groups": ("gpt", replace(twins.GPT, groups=2), GPT),
    "no learned positions": ("gpt", replace(twins.GPT, positions=0), GPT),
    "no biases": ("gpt", replace(twins.GPT, biases=False), GPT),
    "a shared expert": ("mixtral", replace(twins.MIXTRAL, shared_ffn=4), MIXTRAL),
    "experts in every layer number 2": ("mixtral", replace(twins.MIXTRAL, every=2), MIXTRAL),
    "one expert for each token": ("mixtral", twins.MIXTRAL, replace(MIXTRAL, topk=1)),
    "moe_router_score_function=sigmoid": (
        "mixtral",
        twins.MIXTRAL,
        replace(MIXTRAL, odd={"moe_router_score_function": "sigmoid"}),
    ),
    "scores of routers": ("deepseek_v3", twins.DEEPSEEK, also(moe_router_score_function="softmax")),
    "a shared expert of the width 12": (
        "deepseek_v3",
        replace(twins.DEEPSEEK, shared_ffn=12),
        DEEPSEEK,
    ),
    "mscale 0.7 with mscale_all_dim 0.0": (
        "deepseek_v3",
        twins.DEEPSEEK,
        also(**{**YARN, "mscale": 0.7, "mscale_all_dim": 0.0}),
    ),
    "groups of experts that are chosen by 2/2": (
        "deepseek_v3",
        twins.DEEPSEEK,
        also(moe_router_num_groups=2, moe_router_group_topk=2),
    ),
    "a tied head that": ("deepseek_v3", replace(twins.DEEPSEEK, tied=True), DEEPSEEK),
    "a window of (3, 1)": oss(window_size="(3, 1)"),
    "a window of (-1, 0)": oss(window_size="(-1, 0)"),
    "window_attn_skip_freq [1, 0, 1]": oss(window_attn_skip_freq="[1, 0, 1]"),
    "window_attn_skip_freq 0": oss(window_attn_skip_freq=0),
    "softmax_type other than learnable": oss(softmax_type="off-by-one"),
    "glu_linear_offset other than 1.0": oss(glu_linear_offset=0.5),
    "no activation_func_clamp_value": oss(activation_func_clamp_value="None"),
    "yarn_mscale=0.7": oss(**GPT_OSS_YARN, yarn_mscale=0.7),
    "moe_router_pre_softmax=True": (
        "mixtral",
        twins.MIXTRAL,
        replace(MIXTRAL, odd={"moe_router_pre_softmax": True}),
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_the_twin_lacks_is_refused_by_name(what: str) -> None:
    family, sizes, architecture = REFUSED[what]
    with pytest.raises(UnsupportedError) as raised:
        twin_of(family).whole_config(sizes, architecture, "float32")
    assert what in str(raised.value.found)


def test_all_that_is_refused_is_listed() -> None:
    odd = {"rotary_percent": 0.5, "softmax_scale": 2.0, "qk_l2_norm": True}
    with pytest.raises(UnsupportedError) as raised:
        twin_of("llama").whole_config(
            replace(twins.LLAMA, hidden=18), replace(LLAMA, odd=odd, activation="gelu"), "float32"
        )
    assert str(raised.value.found).count(";") == 4


CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "attention_bias True": ("llama", {"attention_bias": True}),
    "hidden_act gelu": ("llama", {"hidden_act": "gelu"}),
    "rope type yarn": ("llama", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}),
    "rope parameters": (
        "llama",
        {"rope_parameters": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 2.0}},
    ),
    "partial_rotary_factor 0.5": ("llama", {"partial_rotary_factor": 0.5}),
    "layer types sliding_attention": (
        "qwen2",
        {"layer_types": ["full_attention", "sliding_attention"]},
    ),
    "sliding_window 4096": ("mixtral", {"sliding_window": 4096}),
    "rope_scaling beside rope_parameters another": (
        "llama",
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
    ),
    "norm_topk_prob False": ("deepseek_v3", {"norm_topk_prob": False}),
    "rope_interleave False": ("deepseek_v3", {"rope_interleave": False}),
    "dense, sparse, dense": (
        "deepseek_v3",
        {"num_hidden_layers": 3, "mlp_layer_types": ["dense", "sparse", "dense"]},
    ),
    "rope type llama3": ("deepseek_v3", {"rope_parameters": {"rope_type": "llama3"}}),
    "chosen by 2/2": ("deepseek_v3", {"n_group": 2, "topk_group": 2}),
    "swiglu_alpha 1.0": ("gpt_oss", {"swiglu_alpha": 1.0}),
    "attention_bias False": ("gpt_oss", {"attention_bias": False}),
    "sliding_attention, chunked": (
        "gpt_oss",
        {"layer_types": ["sliding_attention", "chunked"]},
    ),
    "attention_factor 2.0": (
        "gpt_oss",
        {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "attention_factor": 2.0}},
    ),
    "mlp_only_layers [0]": ("qwen3_moe", {"mlp_only_layers": [0]}),
    "scale_attn_by_inverse_layer_idx True": ("gpt", {"scale_attn_by_inverse_layer_idx": True}),
    "activation_function relu": ("gpt", {"activation_function": "relu"}),
}


@pytest.mark.parametrize("what", CONFIGS)
def test_a_config_that_is_not_computed_here_is_refused(what: str) -> None:
    family, change = CONFIGS[what]
    twin = twin_of(family)
    config = twin.whole_config(twins.SIZES[family], twins.ARCHITECTURES[family], "float32")
    with pytest.raises(UnsupportedError) as raised:
        twin.read({**config, **change})
    assert what in str(raised.value.found)


def test_a_setting_that_a_config_leaves_out_is_the_classs_own() -> None:
    """Mistral's class has a window where nobody says none; a scaling has no usual factor."""
    config = twin_of("mistral").whole_config(twins.LLAMA, twins.ARCHITECTURES["mistral"], "float32")
    with pytest.raises(UnsupportedError, match="sliding_window 4096"):
        twin_of("mistral").read({k: v for k, v in config.items() if k != "sliding_window"})
    config = twin_of("llama").whole_config(twins.LLAMA, LLAMA, "float32")
    with pytest.raises(KeyError, match="factor"):
        twin_of("llama").read({**config, "rope_parameters": {"rope_type": "linear"}})


def test_released_gpt_oss() -> None:
    """Its config.json has transformers' older keys; what it leaves out is the class's own."""
    config = {
        **{"architectures": ["GptOssForCausalLM"], "attention_bias": True, "head_dim": 64},
        **{"experts_per_token": 4, "hidden_act": "silu", "hidden_size": 2880},
        **{"initial_context_length": 4096, "intermediate_size": 2880, "model_type": "gpt_oss"},
        **{"max_position_embeddings": 131072, "num_attention_heads": 64, "num_hidden_layers": 24},
        **{"num_key_value_heads": 8, "num_local_experts": 32, "rms_norm_eps": 1e-05},
        **{"rope_theta": 150000, "sliding_window": 128, "swiglu_limit": 7.0},
        **{"tie_word_embeddings": False, "vocab_size": 201088},
        "rope_scaling": {
            **{"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "rope_type": "yarn"},
            **{"original_max_position_embeddings": 4096, "truncate": False},
        },
    }
    sizes, said = twin_of("gpt_oss").read(config)
    odd = {**GPT_OSS.odd, **GPT_OSS_YARN, "window_size": "(127, 0)"}
    assert (said.odd, said.topk, said.rotary_base) == (odd, 4, 150000.0)
    assert (sizes.layers, sizes.head_dim, sizes.groups) == (24, 64, 8)
    again, computed = twin_of("gpt_oss").read(twin_of("gpt_oss").whole_config(sizes, said, "bf16"))
    assert (again, computed) == (sizes, said)
    del config["rope_scaling"]
    assert twin_of("gpt_oss").read(config)[1].odd == odd


def test_the_epsilon_of_latents_is_said_where_it_differs() -> None:
    twin = twin_of("deepseek_v3")
    assert twin.notes(twins.DEEPSEEK, DEEPSEEK) == []
    (said,) = twin.notes(twins.DEEPSEEK, replace(DEEPSEEK, norm_epsilon=1e-5))
    assert "1e-05 in megatron-core, and 1e-06 in transformers" in said


@pytest.mark.parametrize("kind", ["kimi_k2", "glm4_moe_lite"])
def test_kin_of_deepseek(kind: str) -> None:
    """Their configs say the same; GLM's lists which layers have experts."""
    twin = twin_of("deepseek_v3")
    config = {**twin.whole_config(twins.DEEPSEEK, DEEPSEEK, "float32"), "model_type": kind}
    if kind == "glm4_moe_lite":
        del config["first_k_dense_replace"]
        config["mlp_layer_types"] = ["dense", "sparse"]
    found, computed = twin.read(config)
    assert twin.has(kind) and not twin.has("deepseek_v2") and computed == DEEPSEEK
    assert found == replace(twins.DEEPSEEK, vocab=45)


def test_every_family_of_ours_has_a_twin() -> None:
    """Those of Megatron-DeepSpeed's names have that of another family."""
    of_program = {family.name for family in megatron_deepspeed.FAMILIES}
    found = {name for name, one in families().items() if one.hugging_face}
    assert found - of_program == {*twins.SIZES} and of_program < found
