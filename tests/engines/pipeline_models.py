"""What the ranks do in the tests of pipelines alone, beside `model_jobs`."""

import os
from dataclasses import replace
from typing import Any
from unittest import mock

import megatron_ucp_patches as patches
import torch
import torch.distributed as dist

from pretrain.mcore import models, pipeline
from tests.engines.model_jobs import GPT, Run, attempting, batches, close, make_engine, train


def stock_clip(run: Run) -> float:
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


def norm_collectives(run: Run) -> tuple[int, int]:
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
    close(engine)
    return first, len(calls) - first


def layer_files(run: Run, folder: str) -> list[str]:
    """What a save by DeepSpeed alone holds, by layer file; and this rank's coordinates."""
    engine = make_engine(run)
    engine.train_batch(batches(run, 0))
    engine.save_checkpoint(folder, tag="one")
    close(engine)
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
    with mock.patch.object(models, "check_started", lambda config: (1, pp)):
        pipeline.build_pipeline(config, pp)
