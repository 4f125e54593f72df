"""What the ranks do with adapters on a base in bitsandbytes' 4 and 8 bits (QLoRA)."""

import importlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import megatron_ucp as ucp
from tests.engines.kinds import KINDS, Kind
from tests.engines.model import engine_around
from tests.engines.trainer_jobs import ds_config, make_data, tiny_llama


def quantized(module: Any, kind: str) -> None:
    """Every linear layer but the head in quantized weights."""
    bnb: Any = importlib.import_module("bitsandbytes.nn")
    for name, child in list(module.named_children()):
        if not isinstance(child, torch.nn.Linear) or name == "lm_head":
            quantized(child, kind)
            continue
        sizes = child.in_features, child.out_features
        if kind == "8 bits":
            layer: Any = bnb.Linear8bitLt(*sizes, bias=False, has_fp16_weights=False)
            layer.weight = bnb.Int8Params(child.weight.data, requires_grad=False)
        else:
            nested = kind != "nf4"
            layer = bnb.Linear4bit(
                *sizes, bias=False, compute_dtype=torch.bfloat16, quant_type=kind[:3]
            )
            layer.weight = bnb.Params4bit(
                child.weight.data,
                requires_grad=False,
                quant_type=kind[:3],
                compress_statistics=nested,
                blocksize=64,
            )
        setattr(module, name, layer)


@dataclass(frozen=True)
class Quantized:
    """An adapter of a seed on a base of another one, attached for saves in a way, or not at all."""

    kind: str
    zero: int
    way: str = "stock"
    base: int = 1
    seed: int = 3


def make(setup: Quantized, attach: bool = True) -> Any:
    import peft

    torch.manual_seed(setup.base)
    model = tiny_llama(tied=False).to(torch.bfloat16)
    quantized(model, setup.kind)
    model = model.to("cpu")  # quantizes
    model.requires_grad_(False)
    torch.manual_seed(setup.seed)
    config = peft.LoraConfig(
        r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], init_lora_weights=False
    )
    wrapped: Any = peft.get_peft_model(model, config)
    optimizer = torch.optim.AdamW([p for p in wrapped.parameters() if p.requires_grad], lr=1e-2)
    settings = ds_config(setup.zero, bf16={"enabled": True}, zero_force_ds_cpu_optimizer=False)
    engine = engine_around(wrapped, optimizer, settings, rate=lambda step: 1.0)
    return ucp.attach(engine, save=setup.way) if attach and setup.way else engine


def train(engine: Any, steps: int, first: int = 0) -> list[float]:
    """Each rank's own losses."""
    rank, world = dist.get_rank(), dist.get_world_size()
    losses: list[float] = []
    for step in range(first, first + steps):
        rows = torch.stack([row["input_ids"] for row in make_data()[4 * step : 4 * step + 4]])
        mine = rows.chunk(world)[rank]
        loss = engine(input_ids=mine, labels=mine).loss
        engine.backward(loss)
        engine.step()
        losses.append(float(loss))
    return losses


def write(engine: Any, folder: Path, tag: str, exclude: bool) -> None:
    """Saves; beside it the adapter as peft has it."""
    engine.save_checkpoint(str(folder), tag=tag, exclude_frozen_parameters=exclude)
    with whole(engine):
        if dist.get_rank() == 0:
            engine.module.save_pretrained(folder / "peft")


def whole(engine: Any) -> Any:
    """Every parameter is on every rank inside."""
    import deepspeed

    partitioned = engine.zero_optimization_stage() == 3
    return deepspeed.zero.GatheredParameters(list(engine.module.parameters()), enabled=partitioned)


KINDS[Quantized] = Kind(make, train, write=write, trains_on=True)


def left_alone(folder: str, asked: bool) -> dict[str, Any]:
    """Under the runner: an engine whose model no load could give back, and a script that saves and
    resumes it with DeepSpeed's own methods."""
    import deepspeed

    from megatron_ucp.engines.deepspeed.install import install_for_scripts

    def adds(module: Any, state: dict[str, Any], prefix: str, _: Any) -> None:
        state[f"{prefix}own_entry"] = torch.ones(2)

    def made(seed: int) -> Any:
        torch.manual_seed(seed)
        model = tiny_llama(tied=False)
        model.lm_head.register_state_dict_post_hook(adds)
        model.register_load_state_dict_pre_hook(drops)
        section: dict[str, Any] = {"universal_checkpoint": {"enabled": True}} if asked else {}
        return engine_around(
            model,
            torch.optim.AdamW(model.parameters(), lr=1e-2),
            {**ds_config(2, zero_force_ds_cpu_optimizer=False), **section},
        )

    def drops(_: Any, state: dict[str, Any], *rest: Any) -> None:
        state.pop("lm_head.own_entry", None)

    said: list[str] = []
    with (
        mock.patch.object(deepspeed, "initialize", deepspeed.initialize),
        mock.patch("megatron_ucp.say.note", said.append),
    ):
        install_for_scripts()
        try:
            engine = made(1)
        except ucp.UcpError as error:
            return {"error": str(error)}
        train(engine, 2)
        engine.save_checkpoint(folder, tag="tag")
        again = made(2)
        again.load_checkpoint(folder, tag="tag")
        return {
            "error": "",
            "losses": (train(engine, 2), train(again, 2)),
            "notes": said,
            "manifest": os.path.exists(f"{folder}/tag/ucp_manifest.json"),
        }
