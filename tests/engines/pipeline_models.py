"""What the ranks do in the tests of pipelines: the same models, batches and optimizer as in
`model_jobs`."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import megatron_ucp_patches as patches
import torch
import torch.distributed as dist

from megatron_ucp.families.pipe import names
from pretrain.mcore import models, pipeline
from tests.engines.model import config_of
from tests.engines.model_jobs import (
    GLOBAL_BATCH,
    GPT,
    LLAMA,
    SEQUENCE,
    attempting,
    batch,
    record_norms,
)


@dataclass(frozen=True)
class Staged:
    """One training run in stages. `pipeline` is the section of DeepSpeed's config."""

    model: models.ModelConfig
    pp: int
    tp: int = 1
    zero: int = 0
    dtype: str = "fp32"
    accumulate: int = 1
    partition: str | Sequence[int] = pipeline.PARTITION
    fp32_sums: bool = False  # data_types.grad_accum_dtype
    partitioned: bool = True
    plant: str = ""


def make_engine(run: Staged) -> Any:
    import deepspeed

    config = replace(run.model, dtype=run.dtype)
    models.start(run.tp, config.seed, run.pp)
    model = pipeline.build_pipeline(config, run.pp, run.partition)
    if run.plant == "tied copies apart" and model.stage_id:
        model.get_parameter("tied_modules.embed.word_embeddings.weight").data.mul_(1.01)
    if run.plant == "no sums over the sequence":
        for param in model.parameters():
            param._backward_hooks = None
    optimizer = torch.optim.AdamW(models.param_groups(model, lr=3e-3, weight_decay=0.1), eps=1e-4)
    dp = dist.get_world_size() // run.tp // run.pp
    more: dict[str, Any] = {"data_types": {"grad_accum_dtype": "fp32"}} if run.fp32_sums else {}
    settings = config_of(
        run.zero,
        GLOBAL_BATCH // dp // run.accumulate,
        run.dtype,
        gradient_accumulation_steps=run.accumulate,
        pipeline={"pipe_partitioned": run.partitioned, "grad_partitioned": run.partitioned},
        **more,
    )
    return deepspeed.initialize(
        model=model, optimizer=optimizer, config=settings, dist_init_required=False
    )[0]


def batches(run: Staged, step: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """This rank's micro batches of a step, as `model_jobs.train` cuts them."""
    mesh = models.mpu()
    rows = batch(step).chunk(mesh.get_data_parallel_world_size())[mesh.get_data_parallel_rank()]
    for part in rows.chunk(run.accumulate):
        yield part[:, :-1].contiguous(), part[:, 1:].contiguous()


def train(run: Staged, steps: int = 6) -> dict[str, Any]:
    """Loss and gradient norm by step, the evaluation of the first batch at the end, and the
    partition."""
    engine = make_engine(run)
    norms = record_norms(engine)
    losses = [float(engine.train_batch(batches(run, step))) for step in range(steps)]
    evaluation = float(engine.eval_batch(batches(run, 0)))
    tied = [weight.detach().float() for weight, _ in engine.module.get_tied_weights_and_groups()]
    found = {
        "losses": losses,
        "norms": norms,
        "evaluation": evaluation,
        "parts": [int(part) for part in engine.module.parts],
        "optimizer": type(engine.optimizer).__name__,
        "groups": len(engine.optimizer.param_groups),
        "tied": [weight.numpy().tobytes() for weight in tied],
    }
    engine.destroy()
    models.stop()
    return found


def stock_clip(run: Staged) -> float:
    """The norm of the first gradient by DeepSpeed's own function."""
    from deepspeed.runtime import engine

    patches.apply("pipeline_clip")
    patched: Any = engine.clip_grad_norm_
    engine.clip_grad_norm_ = patched.__wrapped__
    try:
        return train(run, 1)["norms"][0]
    finally:
        engine.clip_grad_norm_ = patched


def empty_norm() -> tuple[str, float]:
    """Of no tensors: what DeepSpeed's own function raises, and what the patched one returns."""
    from deepspeed.runtime import bf16_optimizer

    patches.apply("pipeline_empty_norm")
    patched: Any = bf16_optimizer.get_global_norm_of_tensors
    try:
        patched.__wrapped__([])
        said = ""
    except RuntimeError as error:
        said = str(error)
    return said, float(patched([]))


def norm_collectives(run: Staged) -> tuple[int, int]:
    """How many collectives over all stages this rank's gradient norm takes: stock, and patched.
    None is carried out."""
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    engine = make_engine(run)
    optimizer, calls = engine.optimizer, []
    engine.train_batch(batches(run, 0))  # the patch asks for the groups of all stages once
    optimizer._model_parallel_all_reduce = lambda tensor, op: calls.append(tensor)
    optimizer.averaged_gradients = {group: [] for group in range(len(optimizer.bit16_groups))}
    DeepSpeedZeroOptimizer.scaled_global_norm.__wrapped__(optimizer)  # type: ignore[attr-defined]
    first = len(calls)
    optimizer.scaled_global_norm()
    engine.destroy()
    models.stop()
    return first, len(calls) - first


def stages(configs: Sequence[models.ModelConfig], tp: int, pp: int) -> list[dict[str, Any]]:
    """Each model's parameters on this rank by canonical name, with the attributes that are there;
    and all names."""
    found = []
    models.start(tp, 1, pp)
    for config in configs:
        model, canonical = pipeline.build_pipeline(config, pp), names(config.sizes())
        found.append(
            {
                canonical[name]: (
                    param.detach().clone(),
                    {key: value for key, value in param.__dict__.items() if key != "_hp_mapping"},
                    name,
                )
                for name, param in model.named_parameters()
            }
        )
    models.stop()
    return found


def layer_files(run: Staged, folder: str) -> list[str]:
    """What a save by DeepSpeed alone holds, by layer file; and this rank's coordinates."""
    engine = make_engine(run)
    engine.train_batch(batches(run, 0))
    engine.save_checkpoint(folder, tag="one")
    engine.destroy()
    models.stop()
    return sorted(os.listdir(f"{folder}/one"))


def groups_match(tp: int, pp: int) -> dict[str, tuple[list[int], list[int]]]:
    """Ranks of each group in megatron-core and in DeepSpeed's grid."""
    models.start(tp, 1, pp)
    grid, mesh = pipeline.build_pipeline(GPT, pp).mpu(), models.mpu()
    pairs = {
        "tensor": (mesh.get_tensor_model_parallel_group(), grid.get_slice_parallel_group()),
        "data": (mesh.get_data_parallel_group(), grid.get_data_parallel_group()),
        "pipe": (mesh.get_pipeline_model_parallel_group(), grid.get_pipe_parallel_group()),
    }
    found = {
        name: (dist.get_process_group_ranks(a), dist.get_process_group_ranks(b))
        for name, (a, b) in pairs.items()
    }
    models.stop()
    return found


def restarts(times: int) -> list[tuple[int, int]]:
    """Open files and threads after each start, build and stop."""
    out = []
    for _ in range(times):
        models.start(1, 1, 2)
        pipeline.build_pipeline(GPT, 2)
        models.stop()
        out.append((len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))))
    return out


def generators() -> tuple[int, int]:
    """Draws of the default generator and of the tensor-parallel one after `start`, at tp=2 x
    pp=2."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    models.start(2, 3, 2)
    tracker: Any = get_cuda_rng_tracker()
    with tracker.fork():
        inside = int(torch.randint(2**31, ()))
    outside = int(torch.randint(2**31, ()))
    models.stop()
    return outside, inside


def masked() -> dict[str, float]:
    """The loss of one batch under masks, by evaluation; on two stages."""
    import itertools

    run = Staged(LLAMA, pp=2)
    engine = make_engine(run)
    tokens, labels = next(batches(run, 0))
    first = torch.zeros(tokens.shape)
    first[:, : SEQUENCE // 2] = 1
    given = {
        "all": labels,
        "ones": (labels, torch.ones(tokens.shape)),
        "first": (labels, first),
        "second": (labels, 1 - first),
        "none": (labels, torch.zeros(tokens.shape)),
    }
    out = {
        name: float(engine.eval_batch(itertools.repeat((tokens, label))))
        for name, label in given.items()
    }
    engine.destroy()
    models.stop()
    return out


def refusals() -> dict[str, str]:
    """On two ranks: what each wrong call raises."""
    found: dict[str, str] = {}
    attempt = attempting(found)
    attempt("not started", lambda: pipeline.build_pipeline(GPT, 2))
    attempt("world", lambda: models.start(1, 1, 3))
    attempt("with tp", lambda: models.start(2, 1, 2))
    models.start(1, 1, 2)
    attempt("whole model", lambda: models.build(GPT))
    attempt("other pp", lambda: pipeline.build_pipeline(GPT, 1))
    for name, partition in {
        "sum": "2,2",
        "count": "1,1,3",
        "zero": [0, 5],
        "name": "best",
        "type": "type:attention",
        "regex": "type:(",
    }.items():
        attempt(name, lambda partition=partition: pipeline.build_pipeline(GPT, 2, partition))
    attempt("many", lambda: many(replace(GPT, layers=1), 5))
    models.stop()
    return found


def many(config: models.ModelConfig, pp: int) -> None:
    """A build with more stages than this world has ranks."""
    from unittest import mock

    with mock.patch.object(models, "check_started", lambda config: (1, pp)):
        pipeline.build_pipeline(config, pp)
