"""Model classes of transformers, one tiny model each, and what a rank does with them: the folder
that `save_pretrained` writes, into an engine of another seed; that engine's save as a folder again.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

import megatron_ucp as ucp
from tests.engines.model import engine_around
from tests.engines.trainer_jobs import ds_config

# of any config that has such a key, in the configs inside of it too
SIZES: dict[str, Any] = {
    **{"vocab_size": 96, "hidden_size": 16, "n_embd": 16, "d_model": 16, "word_embed_proj_dim": 16},
    **{"intermediate_size": 24, "ffn_dim": 24, "ffn_hidden_size": 24, "d_ff": 24, "n_inner": 24},
    **{"num_hidden_layers": 2, "n_layer": 2, "n_layers": 2, "num_layers": 2, "depth": 1},
    **{"encoder_layers": 1, "decoder_layers": 1, "num_decoder_layers": 1},
    **{"num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4},
    **{"encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_key_value_heads": 2},
    **{"encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "head_dim": 4, "d_kv": 4, "embed_dim": 16},
    **{"max_position_embeddings": 64, "n_positions": 64, "max_seq_len": 64, "sliding_window": 8},
    **{"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4},
    **{"num_experts_per_tok": 2, "moe_k": 2, "n_group": 2, "topk_group": 1, "rotary_dim": 4},
    **{
        "moe_intermediate_size": 8,
        "shared_expert_intermediate_size": 8,
        "expert_ffn_hidden_size": 8,
    },
    **{"first_k_dense_replace": 1, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4},
    **{"qk_nope_head_dim": 4, "v_head_dim": 4, "image_size": 16, "patch_size": 4},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 4},
    **{"linear_value_head_dim": 4, "state_size": 4, "mamba_d_state": 4, "ssm_state_size": 4},
    **{"mamba_num_heads": 4, "mamba_head_dim": 8, "mamba_n_heads": 4, "mamba_d_head": 8},
    **{"n_groups": 1, "mamba_n_groups": 1, "mamba_dt_rank": 4, "time_step_rank": 4},
    **{"chunk_size": 8, "mamba_chunk_size": 8, "conv_kernel": 4},
}
_QWEN_TEXT: dict[str, Any] = {
    **{key: size for key, size in SIZES.items() if not key.endswith("_token_id")},
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 0]},
}
_QWEN_VISION: dict[str, Any] = {
    **{"depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": 4},
    **{"out_hidden_size": 16, "spatial_merge_size": 2},
}
_QWEN_2_5 = {**_QWEN_VISION, "window_size": 16, "fullatt_block_indexes": [0]}
_QWEN_3 = {**_QWEN_VISION, "deepstack_visual_indexes": [0], "num_position_embeddings": 16}

# what a class's config has beside SIZES
_OWN: Mapping[str, Mapping[str, Any]] = {
    **{f"Deepseek{v}ForCausalLM": {"num_key_value_heads": 4} for v in ("V2", "V3")},
    "Qwen2VLForConditionalGeneration": {"text_config": _QWEN_TEXT},
    "Lfm2MoeForCausalLM": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "Mamba2ForCausalLM": {"num_heads": 4, "head_dim": 8},
    "Qwen2_5_VLForConditionalGeneration": {
        "text_config": _QWEN_TEXT,
        "vision_config": _QWEN_2_5,
    },
    "Qwen3VLForConditionalGeneration": {"vision_config": _QWEN_3},
    "Qwen3VLMoeForConditionalGeneration": {"vision_config": _QWEN_3},
}
_NAMES = (
    # decoders
    *(
        "LlamaForCausalLM",
        "MistralForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
        "GemmaForCausalLM",
        "Gemma2ForCausalLM",
        "Gemma3ForCausalLM",
        "PhiForCausalLM",
        "Phi3ForCausalLM",
        "GPT2LMHeadModel",
        "GPTNeoXForCausalLM",
        "GPTJForCausalLM",
        "OPTForCausalLM",
        "BloomForCausalLM",
        "FalconForCausalLM",
        "StableLmForCausalLM",
        "Starcoder2ForCausalLM",
        "OlmoForCausalLM",
        "Olmo2ForCausalLM",
        "CohereForCausalLM",
        "GraniteForCausalLM",
        "GlmForCausalLM",
        "Glm4ForCausalLM",
        "Ernie4_5ForCausalLM",
        "NemotronForCausalLM",
        "SmolLM3ForCausalLM",
    ),
    # mixtures
    *(
        "MixtralForCausalLM",
        "Qwen2MoeForCausalLM",
        "Qwen3MoeForCausalLM",
        "PhimoeForCausalLM",
        "OlmoeForCausalLM",
        "GraniteMoeForCausalLM",
        "DeepseekV2ForCausalLM",
        "DeepseekV3ForCausalLM",
        "Glm4MoeForCausalLM",
        "Ernie4_5_MoeForCausalLM",
        "GptOssForCausalLM",
        "MiniMaxForCausalLM",
        "Lfm2MoeForCausalLM",
    ),
    # hybrids, and state spaces
    *(
        "JambaForCausalLM",
        "BambaForCausalLM",
        "NemotronHForCausalLM",
        "Qwen3NextForCausalLM",
        "GraniteMoeHybridForCausalLM",
        "MambaForCausalLM",
        "RecurrentGemmaForCausalLM",
        "Mamba2ForCausalLM",
    ),
    # encoders, and encoders with decoders
    *(
        "T5ForConditionalGeneration",
        "BartForConditionalGeneration",
        "BertForMaskedLM",
        "RobertaForMaskedLM",
        "ModernBertForMaskedLM",
        "ViTForImageClassification",
    ),
    # of images, sound and text
    *(
        "LlavaForConditionalGeneration",
        "LlavaNextForConditionalGeneration",
        "LlavaOnevisionForConditionalGeneration",
        "Gemma3ForConditionalGeneration",
        "Mistral3ForConditionalGeneration",
        "InternVLForConditionalGeneration",
        "Idefics3ForConditionalGeneration",
        "PaliGemmaForConditionalGeneration",
        "MllamaForConditionalGeneration",
        "Qwen2VLForConditionalGeneration",
        "Qwen2AudioForConditionalGeneration",
        "Qwen2_5_VLForConditionalGeneration",
        "Qwen3VLForConditionalGeneration",
        "Qwen3VLMoeForConditionalGeneration",
    ),
)
CLASSES = {name: _OWN.get(name, {}) for name in _NAMES}


def tiny_config(kind: Any, more: Mapping[str, Any]) -> Any:
    """A config of the class with small sizes."""
    usual = kind()
    said = usual.to_dict()
    inner = getattr(kind, "sub_configs", None) or {}
    out = {key: size for key, size in SIZES.items() if key in said and key not in inner}
    for key in inner:
        if getattr(usual, key, None) is not None and key not in more:
            out[key] = tiny_config(type(getattr(usual, key)), {}).to_dict()
    kinds = said.get("layer_types")
    if kinds and "layer_types" not in more:
        layers = out.get("num_hidden_layers", 2)
        out["layer_types"] = ([*dict.fromkeys(kinds)] * layers)[:layers]
    return kind(**{**out, **more})


def tiny_model(name: str, seed: int) -> Any:
    """A model of a class, in which no parameter is drawn as all zeros or ones."""
    import transformers

    cls = getattr(transformers, name)
    torch.manual_seed(seed)
    model = cls(tiny_config(cls.config_class, CLASSES[name]))
    dice = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, param in sorted(model.named_parameters()):
            param.copy_(0.1 * torch.randn(param.shape, generator=dice) + (param.dim() == 1))
    return model.eval()


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    """What a model computes of a text, an image or both."""
    given: dict[str, Any] = {}
    dice = torch.Generator().manual_seed(3)
    if model.main_input_name == "input_ids":
        given["input_ids"] = torch.randint(3, 90, (2, 7), generator=dice)
        given["attention_mask"] = torch.ones_like(given["input_ids"])
    if model.main_input_name == "pixel_values":
        given["pixel_values"] = torch.randn(2, 3, 16, 16, generator=dice)
    if model.config.is_encoder_decoder:
        given["decoder_input_ids"] = given["input_ids"]
    model.config.get_text_config().use_cache = False
    found: torch.Tensor = model(**given).logits
    return found


def differing(found: Mapping[str, torch.Tensor], want: Mapping[str, torch.Tensor]) -> list[str]:
    """The names that one side lacks, or whose tensors are not the same bits."""
    return [
        name
        for name in sorted({*found, *want})
        if name not in found or name not in want or not torch.equal(found[name], want[name])
    ]


def there_and_back(name: str, folder: str, fault: str = "") -> dict[str, Any]:
    """save_pretrained -> load at ZeRO-3 -> save -> export -> from_pretrained, with a `fault` in the
    folder that is loaded or in the one that is exported."""
    import transformers

    start, native, out = (Path(folder) / part for part in ("start", "native", "out"))
    model = tiny_model(name, 1)
    model.save_pretrained(start)
    want, computed = load_file(start / "model.safetensors"), logits(model)
    state = {n: t.clone() for n, t in model.state_dict().items()}
    if fault == "loaded":
        flip(start)
    other = tiny_model(name, 5)
    engine: Any = engine_around(
        other,
        torch.optim.AdamW(other.parameters(), lr=1e-2),
        {**ds_config(3), "zero_force_ds_cpu_optimizer": False},
    )
    ucp.attach(engine)
    drawn = gathered(engine)
    report = ucp.load(engine, start)
    held = gathered(engine)
    engine.save_checkpoint(str(native), tag="tag")
    live = engine.ucp_export_hf(str(Path(folder) / "live"))
    engine.destroy()
    done = ucp.export_hf(native, out, config=start, verify=True)
    if fault == "exported":
        flip(out)
    cls: Any = getattr(transformers, name)
    again, info = cls.from_pretrained(out, output_loading_info=True, dtype=torch.float32)
    lacking = sorted(key for key in {"missing_keys", "unexpected_keys"} if info[key])
    params = {n for n, _ in model.named_parameters()}
    return {
        "drawn": [n for n in params if n in drawn and torch.equal(drawn[n], state[n])],
        "loaded": differing(held, {n: state[n] for n in held}),
        "not held": sorted(params - {*held}),
        "exported": differing(load_file(out / "model.safetensors"), want),
        "live": differing(load_file(Path(folder) / "live" / "model.safetensors"), want),
        "again": lacking,
        "logits": bool(torch.equal(logits(again.eval()), computed)),
        "diff": [str(one) for one in ucp.diff(native, start)],
        "notes": [*report.notes, *done.notes, *live.notes],
        "others": sorted({*want} - {*state}),
    }


def gathered(engine: Any) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers, whole."""
    import deepspeed

    module = engine.module
    with deepspeed.zero.GatheredParameters(list(module.parameters())):
        found = {name: param.detach().clone() for name, param in module.named_parameters()}
    kept = {*engine._get_buffer_names()}
    return found | {n: b.clone() for n, b in module.named_buffers() if n in kept}


def flip(folder: Path) -> None:
    """The sign of one element of the largest matrix."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    name = max(tensors, key=lambda name: tensors[name].numel())
    tensors[name].view(-1)[5] *= -1
    save_file(tensors, path, metadata={"format": "pt"})
