"""What the ranks do in the tests between the two engines: the models of `stack_jobs` under
DeepSpeed."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import megatron_ucp as ucp
from pretrain.mcore import models, pipeline
from tests.engines import pipeline_jobs, stack_states, tensor_jobs
from tests.engines.canonical import canonical, fill
from tests.engines.stack_jobs import BATCH, Mcore, place
from tests.ranks import allow_fp16_on_cpu
from tests.share import LOSS_STEPS, tags_of


@dataclass(frozen=True)
class Zero(Mcore):
    """The model of an Mcore under DeepSpeed at a ZeRO stage; in DeepSpeed's pipeline for pp > 1.
    The learning rate is constant."""

    zero: int = 1
    style: str = "constant"


def make(setup: Zero, attach: bool = True) -> Any:
    import deepspeed

    if setup.dtype == "fp16":
        allow_fp16_on_cpu()
    models.start(setup.tp, 7, setup.pp, setup.ep, setup.etp)
    config = setup.model
    model: Any = pipeline.build_pipeline(config, setup.pp) if setup.pp > 1 else models.build(config)
    optimizer = torch.optim.AdamW(models.param_groups(model, 3e-3, 0.1), eps=setup.eps)
    schedule: Any = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    dp = dist.get_world_size() // setup.tp // setup.pp
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": BATCH // dp,
        "gradient_clipping": setup.clip,
        "steps_per_print": 10**9,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": setup.zero, "stage3_param_persistence_threshold": 0},
    }
    if setup.dtype != "fp32":
        scale = {"initial_scale_power": 8} if setup.dtype == "fp16" else {}
        settings[setup.dtype] = {"enabled": True, **scale}
    made = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        lr_scheduler=schedule,
        config=settings,
        mpu=None if setup.pp > 1 else models.mpu(),
        dist_init_required=False,
    )[0]
    return ucp.attach(made, family=setup.family) if attach else made


def save(setup: Zero, folder: str, steps: int = 3, more: int = LOSS_STEPS) -> None:
    """Trains, saves the tag `trained`, goes on; then a second engine, filled with provenance
    values, saves `filled`. Canonical states and losses beside them."""
    engine = make(setup)
    pipeline_jobs.train(engine, steps)
    engine.save_checkpoint(folder, tag="trained")
    states = {"trained": canonical(engine)}
    losses = pipeline_jobs.train(engine, 3, first=steps)
    after = canonical(engine)
    losses += pipeline_jobs.train(engine, more - 3, first=steps + 3)
    fill(engine)
    engine.save_checkpoint(folder, tag="filled")
    states["filled"] = canonical(engine)
    tensor_jobs.close(engine)
    if dist.get_rank() == 0:
        oracle = {"states": states, "losses": losses, "steps": steps, "after": after}
        torch.save(oracle, Path(folder) / "oracle.pt")


def resume(setup: Zero, folder: str, three: bool = False, **options: Any) -> dict[str, Any]:
    """As `stack_jobs.resume`, of what either engine saved."""
    oracle = torch.load(Path(folder) / "oracle.pt", weights_only=False)
    engine = make(setup)
    more = options.pop("more", 0)
    tags = options.pop("tags", ()) or tags_of(more)
    pipeline_jobs.train(engine, 1, first=99)
    before = canonical(engine)
    found: dict[str, Any] = {"differences": {}, "before": {}, "notes": {}}
    for tag in tags:
        want = oracle["states"][tag]
        path, name = place(folder, tag)
        found["notes"][tag] = ucp.load(engine, path, tag=name, **options).notes
        found["before"][tag] = stack_states.compare(want, before)
        found["differences"][tag] = stack_states.compare(want, canonical(engine))
    found["scale"] = canonical(engine)["scale"].get("cur_scale")
    found["saved_scale"] = oracle["states"][tags[-1]]["scale"].get("scale")
    stack_states.go_on(found, oracle, lambda n, s: pipeline_jobs.train(engine, n, first=s), more)
    if three:
        pipeline_jobs.train(engine, 3, first=oracle["steps"])
        found["after"] = stack_states.compare(oracle["after"], canonical(engine))
    tensor_jobs.close(engine)
    return found
