"""Mixtures of transformers under DeepSpeed, whose experts lie in one tensor in memory and are
tensors of their own in the folders that transformers writes."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

import megatron_ucp as ucp
from tests.engines.canonical import canonical
from tests.engines.model import engine_around
from tests.engines.trainer_jobs import ds_config

SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "num_experts_per_tok": 2,
}


def mixture(kind: str, seed: int) -> Any:
    import transformers

    torch.manual_seed(seed)
    if kind == "mixtral":
        config = transformers.MixtralConfig(**SIZES, num_local_experts=3)
        return transformers.MixtralForCausalLM(config)
    own: dict[str, Any] = {"num_experts": 3, "moe_intermediate_size": 12}
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**SIZES, **own))


def write(kind: str, folder: Path, fault: str) -> dict[str, torch.Tensor]:
    """What transformers writes of a model, with a fault; the model's own tensors."""
    model = mixture(kind, 1)
    model.save_pretrained(folder)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    gate, up = ("w1", "w3") if kind == "mixtral" else ("gate_proj", "up_proj")
    (name,) = [one for one in tensors if "layers.1." in one and f"experts.2.{gate}." in one]
    other = name.replace(gate, up)
    if fault == "gate and up swapped":
        tensors[name], tensors[other] = tensors[other], tensors[name]
    elif fault == "an expert is missing":
        del tensors[name]
    elif fault == "an expert too many":
        tensors[name.replace("experts.2", "experts.3")] = tensors[name].clone()
    elif fault == "another width":
        tensors[name] = tensors[name][:-1].clone()
    save_file(tensors, path, metadata={"format": "pt"})
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def load(kind: str, zero: int, folder: str, fault: str = "") -> dict[str, Any]:
    """Loads what transformers wrote of a model into an engine of another seed, and saves `native`.
    Parameters whose masters are others than those of the written model, before and after."""

    want = write(kind, Path(folder) / "hf", fault) if dist.get_rank() == 0 else None
    box = [want]
    dist.broadcast_object_list(box)
    model = mixture(kind, 9)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    made = engine_around(
        model,
        optimizer,
        {**ds_config(zero), "zero_force_ds_cpu_optimizer": False},
        rate=lambda step: 1.0,
    )
    engine = ucp.attach(made)
    before = canonical(engine)["full"]
    found: dict[str, Any] = {"error": "", "before": others(before, box[0] or {})}
    try:
        ucp.load(engine, f"{folder}/hf")
    except ucp.UcpError as error:
        found["error"] = str(error)
    found["after"] = others(canonical(engine)["full"], box[0] or {})
    if not found["error"]:
        engine.save_checkpoint(f"{folder}/native", tag="tag")
    engine.destroy()
    return found


def others(full: dict[tuple[str, str], torch.Tensor], want: dict[str, torch.Tensor]) -> list[str]:
    """Names whose masters are not the wanted values, bit by bit."""
    return [
        name
        for name, value in want.items()
        if not torch.equal(full[name, "fp32"].view(-1), value.view(-1))
    ]
