"""What the ranks do between torchtitan and engines: models of transformers under DeepSpeed load its
folders, train, and save for it."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import megatron_ucp as ucp
from tests.engines import fsdp2_jobs
from tests.engines.autotp_states import canonical
from tests.engines.fsdp2_jobs import Plain
from tests.engines.model import engine_around
from tests.formats import titan_program as program

_SMALL = ("norm", "bias", "sinks")


def make(setup: Plain, config: str) -> Any:
    """A model of a config under DeepSpeed, its weights others than those that are loaded."""
    from transformers import AutoConfig, AutoModelForCausalLM

    said = AutoConfig.from_pretrained(config)
    torch.manual_seed(5)
    net = AutoModelForCausalLM.from_config(said, attn_implementation="eager").float()
    shapes = {name: param.shape for name, param in net.named_parameters()}
    named = list(net.named_parameters())
    small = [param for name, param in named if any(word in name for word in _SMALL)]
    large = [param for name, param in named if not any(word in name for word in _SMALL)]
    groups = [
        {"params": small, "weight_decay": 0.0, "lr": program.OTHER_RATE},
        {"params": large, "weight_decay": 0.1},
    ]
    optimizer = torch.optim.AdamW(groups, lr=program.RATE, betas=(0.9, 0.95), eps=program.EPSILON)
    copies = dist.get_world_size() // setup.tp
    config_of_engine: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": program.ROWS // copies,
        "steps_per_print": 10**9,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": setup.zero, "stage3_param_persistence_threshold": 0},
    }
    if setup.tp > 1:
        config_of_engine["tensor_parallel"] = {"autotp_size": setup.tp}
    engine = engine_around(net, optimizer, config_of_engine, rate=lambda step: 1.0)
    engine.plain_shapes = shapes
    return ucp.attach(engine)


def pass_on(setup: Plain, folder: str, out: str, steps: int = 0) -> dict[str, Any]:
    """Loads a folder of torchtitan's, saves, and goes on."""
    engine = make(setup, folder)
    report = ucp.load(engine, folder)
    found = {"states": canonical(engine), "notes": report.notes}
    engine.save_checkpoint(out)
    losses = fsdp2_jobs.train(engine, steps, report.global_steps)
    found["losses"], found["scheduled"] = losses, engine.lr_scheduler.last_epoch
    engine.destroy()
    return found


def pass_on_stack(tp: int, folder: str, out: str, steps: int = 0) -> dict[str, Any]:
    """The same with megatron-core's own stack."""
    from dataclasses import replace

    from tests.engines import megatron_jobs

    engine = megatron_jobs.make(replace(fsdp2_jobs.stack_of(tp), seed=9))
    report = ucp.load(engine.handle, folder)
    found: dict[str, Any] = {"notes": report.notes}
    ucp.save(engine.handle, out)
    found["losses"] = megatron_jobs.train(engine, steps, report.global_steps)
    megatron_jobs.close(engine)
    return found


def export(folder: str, out: str) -> None:
    ucp.export_hf(folder, out, dtype="float32", config=str(Path(folder) / "config.json"))
