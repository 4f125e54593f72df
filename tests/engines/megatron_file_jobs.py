"""What the ranks do in the tests of Megatron's files: DeepSpeed engines that go on from them."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import megatron_ucp as ucp
from pretrain.mcore import models
from tests.engines.canonical import canonical
from tests.engines.model import config_of, engine_around

SAMPLES, SEQUENCE = 4, 16
# as the runs that wrote the golden folders were started; steps are samples
SCHEDULE: dict[str, Any] = {
    "init_lr": 0.0,
    "max_lr": 3e-3,
    "min_lr": 1e-4,
    "lr_warmup_steps": 8,
    "lr_decay_steps": 80,
    "lr_decay_style": "cosine",
    "start_wd": 0.1,
    "end_wd": 0.1,
    "wd_incr_steps": 80,
    "wd_incr_style": "constant",
    "use_checkpoint_opt_param_scheduler": False,
}


def make(tp: int, zero: int, dtype: str, seed: int = 5, layers: int = 4) -> Any:
    """An attached engine around the LLaMA of the golden folders, with other weights."""

    models.start(tp, seed=seed)
    config = models.ModelConfig(
        "llama",
        layers=layers,
        hidden=32,
        head_dim=8,
        ffn=64,
        heads=4,
        groups=2,
        vocab=64,
        true_vocab=64,
        positions=SEQUENCE,
        tied=False,
        init_std=0.15,
        dtype=dtype,
        seed=seed,
    )
    model = models.build(config)
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    groups = models.param_groups(model, 1e-5, 0.1)
    for group in groups:
        group["wd_mult"] = float(group["params"][0].dim() > 1)
    optimizer: Any = torch.optim.AdamW(groups)
    schedule: Any = OptimizerParamScheduler(optimizer, **SCHEDULE)
    settings = config_of(zero, SAMPLES * tp // dist.get_world_size(), dtype)
    made = engine_around(model, optimizer, settings, lr_scheduler=schedule, mpu=models.mpu())
    return ucp.attach(made, family="llama")


def go_on(tp: int, zero: int, dtype: str, folder: str, steps: int = 3) -> dict[str, Any]:
    """Loads a folder, and trains on with stock's batches and rates: the state after the load, by
    (parameter, state), and the losses."""
    engine = make(tp, zero, dtype)
    before = canonical(engine)["full"]
    report = ucp.load(engine, folder, allow={"scheduler"})
    state = canonical(engine)
    losses = [_step(engine, 3 + at) for at in range(steps)]
    counters = engine.global_steps, engine.global_samples
    engine.destroy()
    models.stop()
    return {
        "before": before,
        "state": state,
        "losses": losses,
        "notes": report.notes,
        "counters": counters,
        "source": Path(report.path).name,
    }


def _step(engine: Any, iteration: int) -> float:
    """One step on the batch that stock's run had in an iteration."""
    mpu = models.mpu()
    rank, world = mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()
    drawn = [
        torch.randint(
            0, 64, (1, SEQUENCE + 1), generator=torch.Generator().manual_seed(1000 * iteration + at)
        )
        for at in range(SAMPLES)
    ]
    mine = torch.cat(drawn[rank::world])
    loss = models.loss(engine, mine[:, :-1].contiguous(), mine[:, 1:].contiguous())
    engine.backward(loss)
    engine.step(lr_kwargs={"increment": SAMPLES})
    total = loss.detach().double().reshape(1)
    dist.all_reduce(total, group=mpu.get_data_parallel_group())
    return float(total) / world
