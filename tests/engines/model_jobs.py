"""What the ranks do in the tests of the megatron-core models."""

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from megatron_ucp.engines import models

GLOBAL_BATCH, SEQUENCE = 4, 16
GPT = models.ModelConfig("gpt", layers=2, hidden=32, ffn=48, heads=4, groups=4, vocab=64, true_vocab=61, positions=SEQUENCE,
                         tied=True, init_std=0.15)
LLAMA = models.ModelConfig("llama", layers=2, hidden=32, ffn=48, heads=4, groups=2, vocab=64, true_vocab=61,
                           positions=SEQUENCE, init_std=0.15)


@dataclass(frozen=True)
class Run:
    """One training run: how the model is cut, and how DeepSpeed runs it."""

    model: models.ModelConfig
    tp: int = 1
    zero: int = 0
    dtype: str = "fp32"
    accumulate: int = 1
    hooks: bool = True  # sums of sequence-parallel gradients; off for the negative control


def batch(step: int) -> torch.Tensor:
    """The step's global batch with one token more than a sequence, on every rank the same."""
    generator = torch.Generator().manual_seed(1000 + step)
    return torch.randint(61, (GLOBAL_BATCH, SEQUENCE + 1), generator=generator)


def make_engine(run: Run) -> Any:
    import deepspeed

    config = replace(run.model, dtype=run.dtype)
    models.start(run.tp, config.seed)
    model = models.build(config)
    if not run.hooks:
        for param in model.parameters():
            param._backward_hooks = None
    optimizer = torch.optim.AdamW(models.param_groups(model, lr=3e-3, weight_decay=0.1))
    dp = dist.get_world_size() // run.tp
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": GLOBAL_BATCH // dp // run.accumulate, "gradient_accumulation_steps": run.accumulate,
        "gradient_clipping": 1.0, "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": run.zero, "stage3_param_persistence_threshold": 0}, "steps_per_print": 10**9}
    if run.dtype == "bf16":
        settings["bf16"] = {"enabled": True}
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings, mpu=models.mpu(),
                                      dist_init_required=False)
    return engine


def record_norms(engine: Any) -> list[float]:
    """Gradient norms before clipping, filled step by step. Without ZeRO in fp32 the engine throws its norm away."""
    import deepspeed.runtime.engine as module

    norms: list[float] = []
    step = engine._take_model_step

    def clip_and_record() -> None:
        norms.append(float(module.clip_grad_norm_(engine.module.parameters(), engine.gradient_clipping(), mpu=engine.mpu)))

    def step_and_record(*args: Any, **kwargs: Any) -> None:
        step(*args, **kwargs)
        if engine.get_global_grad_norm() is not None:
            norms.append(float(engine.get_global_grad_norm()))

    engine.clip_fp32_gradients, engine._take_model_step = clip_and_record, step_and_record
    return norms


def train(run: Run, steps: int = 20) -> dict[str, list[float]]:
    """The global batch's mean loss and the gradient norm before clipping, by step."""
    engine = make_engine(run)
    mesh = models.mpu()
    norms = record_norms(engine)
    dp, index = mesh.get_data_parallel_world_size(), mesh.get_data_parallel_rank()
    losses = []
    for step in range(steps):
        total = torch.zeros(1, dtype=torch.float64)
        for part in batch(step).chunk(dp)[index].chunk(run.accumulate):
            value = models.loss(engine, part[:, :-1].contiguous(), part[:, 1:].contiguous())
            engine.backward(value)
            engine.step()
            total += value.detach().double() / run.accumulate
        dist.all_reduce(total, group=mesh.get_data_parallel_group())
        losses.append(float(total) / dp)
    engine.destroy()
    models.stop()
    return {"losses": losses, "norms": norms}
