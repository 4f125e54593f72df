"""What the ranks do in the tests of Lightning, whose DeepSpeedStrategy calls
`deepspeed.initialize` itself."""

from collections.abc import Mapping
from typing import Any

import torch

import megatron_ucp as ucp
from tests.engines.model import GLOBAL_BATCH
from tests.engines.trainer_jobs import ON

BATCHES = 6  # of an epoch


def fit(
    folder: str,
    zero: int,
    steps: int,
    save_at: int | None = None,
    resume: str | None = None,
    seed: int = 1,
    config: Mapping[str, Any] = ON,
    fault: str = "",
) -> dict[str, Any]:
    """Trains up to step `steps`; saves once at step `save_at`, or begins with `resume`."""
    import deepspeed
    import lightning
    from lightning.pytorch.callbacks import Callback, ModelCheckpoint

    from tests.engines.lightning_parts import Module, OnCpu, Watch

    world = torch.distributed.get_world_size()
    stock = deepspeed.initialize
    ucp.install()
    module, watch = Module(seed), Watch(fault)
    callbacks: list[Callback] = [watch]
    if save_at:
        callbacks.append(
            ModelCheckpoint(folder, "{step}", every_n_train_steps=save_at, save_top_k=-1)
        )
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=world,
        strategy=OnCpu(
            config={
                "train_micro_batch_size_per_gpu": GLOBAL_BATCH // world,
                "zero_allow_untested_optimizer": True,
                "zero_optimization": {"stage": zero, "stage3_param_persistence_threshold": 0},
                **config,
            }
        ),
        max_steps=steps,
        use_distributed_sampler=False,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=bool(save_at),
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    loader = torch.utils.data.DataLoader(range(BATCHES), batch_size=1)  # type: ignore[arg-type]
    try:
        trainer.fit(module, loader, ckpt_path=resume)
    finally:
        deepspeed.initialize = stock
    ends = (trainer.global_step, trainer.current_epoch)
    return watch.found | {"losses": module.losses, "samples": module.samples, "ends": ends}


def refused(**arguments: Any) -> str:
    """The error of a run that has to fail. On one rank only: others would wait."""
    try:
        fit(**arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "it was not refused"
