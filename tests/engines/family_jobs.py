"""Models like DeepSeek-V3 and gpt-oss in megatron-core's own stack, attached with their family:
saved, loaded from folders of Hugging Face, and what they compute."""

import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import megatron_ucp as ucp
from megatron_ucp.engines.mcore_model import canonical_names
from megatron_ucp.families import find_family
from megatron_ucp.families.family import row
from pretrain.mcore import models
from tests.engines import any_models
from tests.engines.any_models import BIASED, LATENT, SHARED, AnyModel
from tests.engines.encoder_models import forward_of, windows_on_cpu
from tests.engines.megatron_jobs import Engine, close, stock_save
from tests.engines.megatron_jobs import train as train_on_cpu

_LIKE = {
    **{**LATENT, **SHARED, **BIASED},
    **{"qk_layernorm": True, "layernorm_epsilon": 1e-6, "moe_router_topk_scaling_factor": 2.5},
    "moe_shared_expert_intermediate_size": 16,
}
DEEPSEEK: dict[str, dict[str, Any]] = {
    "DeepSeek-V3": {**_LIKE, "mtp_num_layers": 1},
    "yarn, groups of experts": {
        **_LIKE,
        **{"rope_type": "yarn", "rotary_scaling_factor": 4.0, "mscale_all_dim": 0.5},
        **{"original_max_position_embeddings": 4, "beta_fast": 2, "rotary_base": 50.0},
        **{"moe_router_num_groups": 2, "moe_router_group_topk": 1},
    },
    "Moonlight": {**_LIKE, "q_lora_rank": None, "moe_layer_freq": 1, "v_head_dim": 6},
}


GPT_OSS: dict[str, dict[str, Any]] = {
    "gpt-oss": any_models.GPT_OSS,
    "yarn, other windows": {
        **any_models.GPT_OSS,
        "window_size": (3, 0),
        "window_attn_skip_freq": [1, 1, 0, 1],
        "layernorm_epsilon": 1e-3,
    },
}
KINDS = DEEPSEEK | GPT_OSS
YARN = {  # which TransformerConfig takes as attributes alone
    "position_embedding_type": "yarn",
    "rotary_base": 10000,
    "yarn_rotary_scaling_factor": 8.0,
    "yarn_original_max_position_embeddings": 4,
    "yarn_beta_fast": 2.0,
    "yarn_beta_slow": 0.5,
    "yarn_mscale": None,
    "yarn_mscale_all_dim": None,
    "yarn_correction_range_round_to_int": False,
}


def make(setup: AnyModel, family: Any = "") -> Engine:
    """An engine, attached with the family of its kind, or another one."""
    family = family or ("gpt_oss" if setup.kind in GPT_OSS else "deepseek_v3")
    stock = any_models._config

    def config(setup: AnyModel) -> Any:
        made = stock(setup)
        vars(made).update(YARN if setup.kind.startswith("yarn, other") else {})
        return made

    with (
        mock.patch.dict(any_models.SETTINGS, KINDS),
        mock.patch.object(any_models, "_config", config),
    ):
        engine = any_models.make_any(setup, attach=False)
    parts = engine.stack.chunks, engine.optimizer, engine.scheduler
    return replace(engine, handle=ucp.attach_megatron(*parts, family=family))


def train(engine: Engine, steps: int) -> None:
    with forward_of("gpt"):
        train_on_cpu(engine, steps)


@torch.no_grad()
def randomise(engine: Engine) -> None:
    """Weights that hide nothing: norms that are not 1, biases of routers that are not 0. No rank
    cuts a parameter."""
    (bare,) = engine.stack.bare
    held = bare.state_dict(keep_vars=True)
    for own, name in canonical_names(bare).items():
        dice = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        drawn = torch.randn(held[own].shape, generator=dice)
        is_norm = drawn.dim() == 1 and "norm" in name
        held[own].copy_(1 + 0.2 * drawn if is_norm else drawn * (0.3 if drawn.dim() > 1 else 0.1))
    engine.optimizer.reload_model_params()


@torch.no_grad()
def logits_of(engine: Engine, tokens: torch.Tensor) -> torch.Tensor:
    """Of a model that ranks divide by experts alone. Layers that predict further tokens ask for
    labels: the head's last output is that of the model itself (the loss then overwrites it)."""
    (bare,) = engine.stack.bare
    said: list[torch.Tensor] = []
    hook = bare.output_layer.register_forward_hook(lambda *given: said.append(given[2][0].clone()))
    bare.eval()
    places = torch.arange(tokens.shape[1]).expand_as(tokens)
    mask = models.not_attended(tokens.shape[1], tokens.device)
    with windows_on_cpu():
        bare(tokens, places, mask, labels=tokens)
    hook.remove()
    return said[-1].transpose(0, 1).clone()


def save(setup: AnyModel, folder: str, tokens: torch.Tensor) -> torch.Tensor:
    """Saves a model by this package, and by stock beside it; what it computes."""
    engine = make(setup)
    train(engine, 1)  # without a step there is no optimizer state to save
    randomise(engine)
    ucp.save(engine.handle, folder)
    stock_save(engine, Path(folder) / "stock")
    found = logits_of(engine, tokens)
    close(engine)
    return found


def load(setup: AnyModel, hf: str, folder: str, tokens: torch.Tensor | None = None) -> Any:
    """Loads a folder of Hugging Face, and exports from memory; what the model computes then."""
    engine = make(setup)
    train(engine, 1)
    report = ucp.load(engine.handle, hf)
    ucp.export_hf(engine.handle, folder)
    found = None if tokens is None else logits_of(engine, tokens)
    close(engine)
    return report.notes if found is None else found


def refused(setup: AnyModel) -> str:
    """What attaching says where the family cuts an up projection otherwise than the model does."""
    family = find_family("deepseek_v3")

    def table(sizes: Any) -> Any:
        name = "decoder.layers.1.self_attention.linear_kv_up_proj.weight"
        whole = family.table(sizes)
        rows, columns = whole[name].shape
        return {**whole, name: row(rows, columns)}

    try:
        close(make(setup, replace(family, table=table)))
    except ucp.UcpError as error:
        models.stop()
        return str(error)
    return ""
