"""What the ranks do with adapters on a base in bitsandbytes' 4 and 8 bits (QLoRA)."""

import importlib
import os
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import megatron_ucp as ucp
from tests.engines.canonical import canonical, differences
from tests.engines.kinds import plant_fault
from tests.engines.model import engine_around
from tests.engines.trainer_jobs import ds_config, make_data, tiny_llama

KINDS = ("nf4", "fp4, scales quantized too", "8 bits")


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


def make(kind: str, zero: int, seed: int, base: int = 1, attach: str = "stock") -> Any:
    """An adapter of a seed on a base of another one."""
    import peft

    torch.manual_seed(base)
    model = tiny_llama(tied=False).to(torch.bfloat16)
    quantized(model, kind)
    model = model.to("cpu")  # quantizes
    model.requires_grad_(False)
    torch.manual_seed(seed)
    config = peft.LoraConfig(
        r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], init_lora_weights=False
    )
    wrapped: Any = peft.get_peft_model(model, config)
    optimizer = torch.optim.AdamW([p for p in wrapped.parameters() if p.requires_grad], lr=1e-2)
    engine = engine_around(
        wrapped,
        optimizer,
        ds_config(zero, bf16={"enabled": True}, zero_force_ds_cpu_optimizer=False),
        rate=lambda step: 1.0,
    )
    return ucp.attach(engine, save=attach) if attach else engine


def train(engine: Any, steps: int) -> list[float]:
    rank, world = dist.get_rank(), dist.get_world_size()
    losses: list[float] = []
    for step in range(steps):
        rows = torch.stack([row["input_ids"] for row in make_data()[4 * step : 4 * step + 4]])
        mine = rows.chunk(world)[rank]
        loss = engine(input_ids=mine, labels=mine).loss
        engine.backward(loss)
        engine.step()
        losses.append(float(loss))
    return losses


def save(kind: str, zero: int, folder: str, exclude: bool, attach: str) -> dict[str, Any]:
    """Trains and saves; the state, the losses of the next steps, and the adapter as peft has it."""
    import deepspeed

    engine = make(kind, zero, 3, attach=attach)
    train(engine, 3)
    engine.save_checkpoint(folder, tag="tag", exclude_frozen_parameters=exclude)
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters()), enabled=zero == 3):
        if dist.get_rank() == 0:
            engine.module.save_pretrained(Path(folder) / "peft")
    found = {"states": canonical(engine), "losses": train(engine, 2)}
    engine.destroy()
    return found


def resume(
    kind: str, zero: int, folder: str, want: dict[str, Any], base: int = 1, fault: str = ""
) -> dict[str, Any]:
    """Another seed's adapter, then the checkpoint's."""
    engine = make(kind, zero, 8, base)
    before = differences(want, canonical(engine))
    try:
        report = ucp.load(engine, folder, tag="tag", allow={"missing"})
    except ucp.UcpError as error:
        engine.destroy()
        return {"error": str(error)}
    if fault:
        plant_fault(engine, fault)
    found = {"after": differences(want, canonical(engine)), "before": before, "error": ""}
    found |= {"losses": train(engine, 2), "notes": report.notes}
    engine.destroy()
    return found


def left_alone(folder: str, asked: bool) -> dict[str, Any]:
    """Under the runner: an engine whose model no load could give back, and a script that saves and
    resumes it with DeepSpeed's own methods."""
    import deepspeed

    from megatron_ucp.engines.install import install_for_scripts

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
