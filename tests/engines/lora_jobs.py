"""What the ranks do with low-rank adapters: the real peft around a model of transformers, under
DeepSpeed."""

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import megatron_ucp as ucp
from tests.engines import kinds
from tests.engines.kinds import Kind
from tests.engines.mixture_jobs import mixture
from tests.engines.model import engine_around
from tests.engines.model_classes import tiny_model
from tests.engines.quantized_jobs import train, whole
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


def wrapped(kind: str, seed: int) -> Any:
    import peft

    model = base_model(kind, 1)  # the base is always the same
    torch.manual_seed(seed)
    name, settings = FORMS.get(kind, ("LoraConfig", KINDS.get(kind, {})))
    usual = {"r": RANK, "lora_alpha": ALPHA} if name == "LoraConfig" else {}
    wrapped: Any = peft.get_peft_model(model, getattr(peft, name)(**{**usual, **settings}))
    for name, param in wrapped.named_parameters():
        if any(part in name for part in BESIDE.get(kind, ())):
            param.requires_grad_(True)
    return wrapped


@dataclass(frozen=True)
class Adapted:
    kind: str
    zero: int
    dtype: str = "fp32"
    seed: int = 3


def make(setup: Adapted, attach: bool = True) -> Any:
    model = wrapped(setup.kind, setup.seed)
    trained = [param for param in model.parameters() if param.requires_grad]
    section = {} if setup.dtype == "fp32" else {setup.dtype: {"enabled": True}}
    config = ds_config(setup.zero, zero_force_ds_cpu_optimizer=False, **section)
    if setup.dtype == "fp16":
        config["fp16"]["initial_scale_power"] = 8
        allow_fp16_on_cpu()
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    made = engine_around(model, optimizer, config, rate=lambda step: 1.0)
    made.adapted = setup.kind
    return ucp.attach(made) if attach else made


def write(engine: Any, folder: Path, tag: str, exclude: bool) -> None:
    """Saves; beside it the base model, what is trained, and what peft writes of the adapter and of
    the merged model."""
    engine.save_checkpoint(str(folder), tag=tag, exclude_frozen_parameters=exclude)
    engine.ucp_export_hf(folder / "live", "float32")
    with whole(engine):
        if dist.get_rank() == 0:
            base_model(engine.adapted, 1).save_pretrained(folder / "base")
            engine.module.save_pretrained(folder / "peft")
            named = engine.module.named_parameters()
            trained = {n: p.detach().clone() for n, p in named if p.requires_grad}
            torch.save(trained, folder / "trained.pt")
            if engine.zero_optimization_stage() < 3:
                copy.deepcopy(engine.module).merge_and_unload().save_pretrained(folder / "merged")


kinds.KINDS[Adapted] = Kind(make, train, write=write, trains_on=True)
