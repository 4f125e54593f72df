"""What the ranks do between DeepSpeed, Megatron and FSDP2: engines of the model of
`tests/formats/fsdp2_program` load folders, train, save."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import megatron_ucp as ucp
from tests.engines import cross_jobs, megatron_jobs, tensor_jobs
from tests.engines.autotp_states import canonical, tensor_place
from tests.engines.megatron_states import canonical as of_stack
from tests.engines.model import engine_around
from tests.formats import fsdp2_program as program


@dataclass(frozen=True)
class Plain:
    """transformers' model under DeepSpeed on `tp` ranks times copies."""

    zero: int
    tp: int = 1
    dtype: str = "fp32"
    rate: float = program.RATE
    decay: bool = False


def make(setup: Plain, model: str | None) -> Any:
    net = program.model(model, torch.float32)
    with torch.no_grad():  # other weights than those that are loaded
        for param in net.parameters():
            param.mul_(0.5)
    shapes = {name: param.shape for name, param in net.named_parameters()}
    optimizer = torch.optim.AdamW(
        program.groups(net, setup.rate), lr=program.RATE, eps=program.EPSILON
    )
    decay = 0.1 if setup.decay else 0.0
    copies = dist.get_world_size() // setup.tp
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": program.ROWS // copies,
        "steps_per_print": 10**9,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": setup.zero, "stage3_param_persistence_threshold": 0},
    }
    if setup.tp > 1:
        config["tensor_parallel"] = {"autotp_size": setup.tp}
    if setup.dtype != "fp32":
        config[setup.dtype] = {"enabled": True}
    engine = engine_around(net, optimizer, config, rate=lambda step: 1 / (1 + decay * step))
    engine.plain_shapes = shapes
    return ucp.attach(engine)


def train(engine: Any, steps: int, first: int) -> list[float]:
    size, _ = tensor_place(engine)
    copies, copy = dist.get_world_size() // size, dist.get_rank() // size
    losses: list[float] = []
    for step in range(first, first + steps):
        rows = program.batch(step).chunk(copies)[copy]
        loss = program.loss_of(engine, rows)
        engine.backward(loss)
        engine.step()
        total = loss.detach().double().reshape(1)
        dist.all_reduce(total)
        losses.append(float(total) / dist.get_world_size())
    return losses


def resume(
    setup: Plain,
    folder: str,
    model: str | None = None,
    steps: int = 0,
    first: int = 3,
    save: str = "",
    **options: Any,
) -> dict[str, Any]:
    """Loads a folder into an engine of other weights, and goes on; saves after that."""
    engine = make(setup, model)
    try:
        report = ucp.load(engine, folder, **options)
    except ucp.UcpError as error:
        engine.destroy()
        return {"error": f"{type(error).__name__}: {error}"}
    found = {"states": canonical(engine), "notes": report.notes, "error": ""}
    found["losses"] = train(engine, steps, first)
    if save:
        engine.save_checkpoint(save, tag="tag")
        found["after"] = canonical(engine)
    engine.destroy()
    return found


def trained(setup: Plain, folder: str, model: str | None, steps: int = 3, more: int = 0) -> Any:
    """Trains and saves; what it held then, and losses of what comes after."""
    engine = make(setup, model)
    train(engine, steps, 0)
    engine.save_checkpoint(folder, tag="tag")
    found: dict[str, Any] = {"states": canonical(engine)}
    found["losses"] = train(engine, more, steps)
    engine.destroy()
    return found


# ---- megatron-core's model under DeepSpeed, and in its own stack


def zero_of(zero: int, tp: int) -> cross_jobs.Zero:
    return cross_jobs.Zero(tp=tp, layers=2, clip=0.0, seed=7, zero=zero)


def pass_on(zero: int, tp: int, folder: str, out: str) -> None:
    """Loads a folder into megatron-core's model under DeepSpeed, and saves it there."""
    engine = cross_jobs.make(zero_of(zero, tp))
    ucp.load(engine, folder)
    engine.save_checkpoint(out, tag="tag")
    tensor_jobs.close(engine)


def pass_on_stack(tp: int, folder: str, out: str) -> None:
    """Loads a folder into megatron-core's own stack, and saves it there."""
    engine = megatron_jobs.make(replace(stack_of(tp), seed=9))
    ucp.load(engine.handle, folder)
    megatron_jobs.write(engine, Path(out), "ours")
    megatron_jobs.close(engine)


def stack_of(tp: int = 1) -> megatron_jobs.Mcore:
    return megatron_jobs.Mcore(tp=tp, layers=2, clip=0.0, style="constant", seed=5)


def start(folder: str) -> None:
    """Exports a model of megatron-core's as the folder that all runs begin with."""
    engine = megatron_jobs.make(stack_of())
    ucp.export_hf(engine.handle, folder, dtype="float32")
    megatron_jobs.close(engine)


def resume_stack(
    tp: int, folder: str, steps: int = 0, first: int = 3, save: str = "", **options: Any
) -> dict[str, Any]:
    engine = megatron_jobs.make(replace(stack_of(tp), seed=9))
    try:
        report = ucp.load(engine.handle, folder, **options)
    except ucp.UcpError as error:
        megatron_jobs.close(engine)
        return {"error": f"{type(error).__name__}: {error}"}
    found = {"states": of_stack(engine), "notes": report.notes, "error": ""}
    found["losses"] = megatron_jobs.train(engine, steps, first)
    if save:
        megatron_jobs.write(engine, Path(save), "ours")
    megatron_jobs.close(engine)
    return found


def train_stack(tp: int, folder: str, model: str, steps: int = 3, more: int = 0) -> Any:
    """Begins with a folder of transformers, trains, saves."""
    engine = megatron_jobs.make(stack_of(tp))
    ucp.load(engine.handle, model)
    megatron_jobs.train(engine, steps, 0)
    ucp.save(engine.handle, folder)
    found: dict[str, Any] = {"states": of_stack(engine)}
    found["losses"] = megatron_jobs.train(engine, more, steps)
    megatron_jobs.close(engine)
    return found
