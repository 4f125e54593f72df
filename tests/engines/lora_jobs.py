"""What the ranks do with low-rank adapters: the real peft around a model of transformers, under
DeepSpeed."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import megatron_ucp as ucp
from tests.engines.canonical import canonical, differences
from tests.engines.kinds import plant_fault
from tests.engines.mixture_jobs import mixture
from tests.engines.model import engine_around
from tests.engines.model_classes import tiny_model
from tests.engines.quantized_jobs import train
from tests.engines.trainer_jobs import SEQUENCE, VOCAB, ds_config, tiny_llama
from tests.ranks import allow_fp16_on_cpu

RANK, ALPHA = 4, 12
KINDS: dict[str, dict[str, Any]] = {
    "llama": {"target_modules": ["q_proj", "down_proj"], "modules_to_save": ["lm_head"]},
    "rslora": {
        "target_modules": ["q_proj", "v_proj"],
        "use_rslora": True,
        "alpha_pattern": {"layers.1.self_attn.q_proj": 20},
        "rank_pattern": {"v_proj": 2},
    },
    "gpt2": {"target_modules": ["c_attn"], "fan_in_fan_out": True, "bias": "all"},
    "mixed": {"target_modules": ["c_attn", "lm_head"], "fan_in_fan_out": True},
    "square": {"target_modules": ["attn.c_proj", "lm_head"], "fan_in_fan_out": True},
    "tied": {"target_modules": ["embed_tokens", "k_proj"]},
    "embedding": {"target_modules": ["embed_tokens", "k_proj"]},
    "dora": {"target_modules": ["q_proj"], "use_dora": True},
    "images": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "pissa": {"target_modules": ["q_proj"], "init_lora_weights": "pissa"},
}


# other forms of peft, by the class of their config and its settings
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "experts": (
        "LoraConfig",
        {
            "target_modules": ["q_proj"],
            "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        },
    ),
    "tokens": ("LoraConfig", {"target_modules": ["q_proj"], "trainable_token_indices": [1, 5]}),
    "tokens and head": (
        "LoraConfig",
        {
            "target_modules": ["q_proj"],
            "trainable_token_indices": {"embed_tokens": [1, 5], "lm_head": [2]},
        },
    ),
    "tokens of a tied head": (
        "LoraConfig",
        {"target_modules": ["q_proj"], "trainable_token_indices": [1, 5]},
    ),
    "saved modules": (
        "LoraConfig",
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head", "mlp"]},
    ),
    "head and embedding": (
        "LoraConfig",
        {"target_modules": ["q_proj", "embed_tokens", "lm_head"]},
    ),
    "bias of factors": ("LoraConfig", {"target_modules": ["q_proj"], "lora_bias": True}),
    "whole layers beside": ("LoraConfig", {"target_modules": ["q_proj"]}),
    "biases that no config says": ("LoraConfig", {"target_modules": ["c_attn"]}),
}
# what is trained beside the adapter, set by hand, by a part of its name
BESIDE = {
    "whole layers beside": ("layers.1.mlp", "norm.weight"),
    "biases that no config says": (".bias",),
}


def base_model(kind: str, seed: int) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    if kind == "images":
        return tiny_model("LlavaForConditionalGeneration", seed)
    if kind == "experts":
        return mixture("qwen3_moe", seed)
    if kind in ("gpt2", "mixed", "square", "biases that no config says"):
        sizes = GPT2Config(
            vocab_size=VOCAB, n_positions=SEQUENCE, n_embd=16, n_layer=2, n_head=2, use_cache=False
        )
        sizes.attn_pdrop = sizes.embd_pdrop = sizes.resid_pdrop = 0.0
        sizes.tie_word_embeddings = kind == "gpt2"
        return GPT2LMHeadModel(sizes)
    return tiny_llama(tied=kind in ("tied", "tokens of a tied head"))


def wrapped(kind: str, seed: int, base: Path | None = None) -> Any:
    import peft

    model = base_model(kind, 1)  # the base is always the same
    if base is not None and dist.get_rank() == 0:
        model.save_pretrained(base)
    torch.manual_seed(seed)
    name, settings = FORMS.get(kind, ("LoraConfig", KINDS.get(kind, {})))
    usual = {"r": RANK, "lora_alpha": ALPHA} if name == "LoraConfig" else {}
    wrapped: Any = peft.get_peft_model(model, getattr(peft, name)(**{**usual, **settings}))
    for name, param in wrapped.named_parameters():
        if any(part in name for part in BESIDE.get(kind, ())):
            param.requires_grad_(True)
    return wrapped


def make(kind: str, zero: int, seed: int, dtype: str = "fp32", base: Path | None = None) -> Any:
    model = wrapped(kind, seed, base)
    trained = [param for param in model.parameters() if param.requires_grad]
    config = ds_config(zero, **({dtype: {"enabled": True}} if dtype != "fp32" else {}))
    config["zero_force_ds_cpu_optimizer"] = False
    if dtype == "fp16":
        config["fp16"]["initial_scale_power"] = 8
        allow_fp16_on_cpu()
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    made = engine_around(model, optimizer, config, rate=lambda step: 1.0)
    return ucp.attach(made)


def save(kind: str, zero: int, folder: str, exclude: bool, dtype: str = "fp32") -> dict[str, Any]:
    """Trains and saves; beside it the base model, and what peft writes of the adapter and of the
    merged model."""
    import deepspeed

    out, rank = Path(folder), dist.get_rank()
    engine = make(kind, zero, 3, dtype, out / "base")
    train(engine, 3)
    engine.save_checkpoint(folder, tag="tag", exclude_frozen_parameters=exclude)
    live = engine.ucp_export_hf(out / "live", "float32")
    found = {"states": canonical(engine), "live": live.notes}
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters()), enabled=zero == 3):
        if rank == 0:
            engine.module.save_pretrained(out / "peft")
            named = engine.module.named_parameters()
            found["trained"] = {n: p.detach().clone() for n, p in named if p.requires_grad}
            if zero < 3:
                engine.module.merge_and_unload().save_pretrained(out / "merged")
    engine.destroy()
    return found


def resume(
    kind: str,
    zero: int,
    folder: str,
    want: dict[str, Any],
    excluded: bool | set[str],
    fault: str = "",
    dtype: str = "fp32",
    **options: Any,
) -> dict[str, Any]:
    """Another seed's adapter, then the checkpoint's, whose canonical state is `want`. `excluded`:
    whether it lacks the frozen weights, or what is allowed to it."""
    engine = make(kind, zero, 8, dtype)
    fresh = canonical(engine)
    lacking = {"missing"} if excluded else set[str]()
    allow = excluded if isinstance(excluded, set) else lacking
    ucp.load(engine, folder, tag="tag", allow=allow, **options)
    if fault:
        plant_fault(engine, fault)
    found = {"tag": differences(want, canonical(engine))}
    train(engine, 1)
    engine.destroy()
    return {"before": {"tag": differences(want, fresh)}, "differences": found}
