"""What the ranks do in the tests of the megatron-core models, whole or in stages."""

import itertools
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import megatron_ucp_patches as patches
import torch
import torch.distributed as dist

from megatron_ucp.families.pipe import names
from pretrain.mcore import models, pipeline
from tests.engines.kinds import refusal_of
from tests.engines.model import config_of, engine_around

GLOBAL_BATCH, SEQUENCE = 4, 16
GPT = models.ModelConfig(
    "gpt",
    layers=2,
    hidden=32,
    ffn=48,
    heads=4,
    groups=4,
    vocab=64,
    true_vocab=61,
    positions=SEQUENCE,
    tied=True,
    init_std=0.15,
)
LLAMA = models.ModelConfig(
    "llama",
    layers=2,
    hidden=32,
    ffn=48,
    heads=4,
    groups=2,
    vocab=64,
    true_vocab=61,
    positions=SEQUENCE,
    init_std=0.15,
)


@dataclass(frozen=True)
class Run:
    """One training run: how the model is cut, and how DeepSpeed runs it. `pp` 0: without its
    pipeline."""

    model: models.ModelConfig
    tp: int = 1
    zero: int = 0
    dtype: str = "fp32"
    accumulate: int = 1
    pp: int = 0
    partition: str | Sequence[int] = pipeline.PARTITION
    partitioned: bool = True  # pipe_partitioned and grad_partitioned of DeepSpeed's config
    fp32_sums: bool = False  # data_types.grad_accum_dtype
    plant: str = ""  # what is undone in a negative control


def batch(step: int, vocab: int = 61) -> torch.Tensor:
    """The step's global batch with one token more than a sequence, on every rank the same:
    something that can be learned."""
    starts = torch.randint(
        vocab, (GLOBAL_BATCH, 1), generator=torch.Generator().manual_seed(1000 + step)
    )
    return (starts + 7 * torch.arange(SEQUENCE + 1)) % vocab


def batches(run: Any, step: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """This rank's micro batches of a step."""
    mesh = models.mpu()
    dp, index = mesh.get_data_parallel_world_size(), mesh.get_data_parallel_rank()
    for part in batch(step, run.model.true_vocab).chunk(dp)[index].chunk(run.accumulate):
        yield part[:, :-1].contiguous(), part[:, 1:].contiguous()


def engine_of(run: Any, model: Any, optimizer: torch.optim.Optimizer, **more: Any) -> Any:
    dp = dist.get_world_size() // run.tp // (run.pp or 1)
    if run.fp32_sums:
        more["data_types"] = {"grad_accum_dtype": "fp32"}
    rows, parts = GLOBAL_BATCH // dp // run.accumulate, run.accumulate
    return engine_around(
        model,
        optimizer,
        config_of(run.zero, rows, run.dtype, gradient_accumulation_steps=parts, **more),
        mpu=None if run.pp else models.mpu(),
    )


def make_engine(run: Run) -> Any:
    config = replace(run.model, dtype=run.dtype)
    models.start(run.tp, config.seed, run.pp or 1)
    whole = not run.pp
    model: Any = (
        models.build(config) if whole else pipeline.build_pipeline(config, run.pp, run.partition)
    )
    for param in model.parameters():
        if run.plant == "no sums over the sequence":
            param._backward_hooks = None
        if run.plant == "no attributes":
            param.tensor_model_parallel = False
    if run.plant == "tied copies apart" and model.stage_id:
        model.get_parameter("tied_modules.embed.word_embeddings.weight").data.mul_(1.01)
    # eps: an element whose gradient is 0 but for rounding would move by lr, either way: 1.3e-5 in
    # the losses with Adam's 1e-8
    optimizer = torch.optim.AdamW(models.param_groups(model, lr=3e-3, weight_decay=0.1), eps=1e-4)
    section = {"pipe_partitioned": run.partitioned, "grad_partitioned": run.partitioned}
    engine = engine_of(run, model, optimizer, **({} if whole else {"pipeline": section}))
    if run.plant == "unpatched norm":
        from deepspeed.moe.utils import split_params_grads_into_shared_and_expert_params as stock
        from deepspeed.runtime.fp16 import unfused_optimizer

        unfused_optimizer.split_params_grads_into_shared_and_expert_params = stock
    return engine


def close(engine: Any) -> None:
    engine.destroy()
    models.stop()


def record_norms(engine: Any) -> list[float]:
    """Gradient norms before clipping, filled step by step. Without ZeRO in fp32 DeepSpeed's own
    engine throws its norm away."""
    import deepspeed.runtime.engine as module

    norms: list[float] = []
    clip, step = engine.clip_fp32_gradients, engine._take_model_step
    stock: Any = module.clip_grad_norm_

    def noted(*args: Any, **kwargs: Any) -> Any:
        norm = stock(*args, **kwargs)
        norms.append(float(norm))
        return norm

    def clip_and_record() -> None:
        with mock.patch.object(module, "clip_grad_norm_", noted):
            norm = clip()
        if norm is not None:
            norms.append(float(norm))

    def step_and_record(*args: Any, **kwargs: Any) -> None:
        step(*args, **kwargs)
        if engine.get_global_grad_norm() is not None:
            norms.append(float(engine.get_global_grad_norm()))

    engine.clip_fp32_gradients, engine._take_model_step = clip_and_record, step_and_record
    return norms


def checksum_of_copies(engine: Any) -> int:
    """Of all parameters that every tensor-parallel rank has a copy of."""
    import deepspeed

    params = [param for param in engine.module.parameters() if not param.tensor_model_parallel]
    with deepspeed.zero.GatheredParameters(params):
        return zlib.crc32(b"".join(param.detach().float().numpy().tobytes() for param in params))


def train_step(engine: Any, run: Any, step: int) -> float:
    """The mean loss of the global batch."""
    if run.pp:
        return float(engine.train_batch(batches(run, step)))
    total = torch.zeros(1, dtype=torch.float64)
    for inputs, labels in batches(run, step):
        value = models.loss(engine, inputs, labels)
        engine.backward(value)
        engine.step()
        total += value.detach().double() / run.accumulate
    mesh = models.mpu()
    dist.all_reduce(total, group=mesh.get_data_parallel_group())
    return float(total) / mesh.get_data_parallel_world_size()


def train(run: Run, steps: int = 20) -> dict[str, Any]:
    """Losses and gradient norms before clipping, by step; at the end a checksum of the copies, or
    of stages the evaluation of the first batch, the partition and the copies of tied weights."""
    engine = make_engine(run)
    found: dict[str, Any] = {"norms": record_norms(engine)}
    found["losses"] = [train_step(engine, run, step) for step in range(steps)]
    if run.pp:
        tied = [one.detach().float() for one, _ in engine.module.get_tied_weights_and_groups()]
        found |= {
            "evaluation": float(engine.eval_batch(batches(run, 0))),
            "parts": [int(part) for part in engine.module.parts],
            "optimizer": type(engine.optimizer).__name__,
            "tied": [weight.numpy().tobytes() for weight in tied],
        }
    else:
        found["copies"] = checksum_of_copies(engine)
    close(engine)
    if run.plant == "unpatched norm":
        patches.find("unfused_norm").change()  # back to what the other jobs of this process expect
    return found


def live(configs: Sequence[models.ModelConfig], tp: int, pp: int = 0) -> list[dict[str, Any]]:
    """Each model's parameters as megatron-core holds them on this rank, by canonical name: values,
    the attributes that are there, and the name on a stage."""
    found = []
    models.start(tp, 1, pp or 1)
    for config in configs:
        model: Any = pipeline.build_pipeline(config, pp) if pp else models.build(config)
        canonical = names(config.sizes()) if pp else {}
        found.append(
            {
                canonical[name] if pp else name: (
                    param.detach().clone(),
                    dict(param.__dict__),
                    name,
                )
                for name, param in model.named_parameters()
            }
        )
    models.stop()
    return found


def groups_and_steps(config: models.ModelConfig) -> dict[str, Any]:
    """What param_groups makes of a model, one of whose layers is frozen."""
    models.start(1, seed=1)
    model = models.build(config)
    model.decoder.layers[0].requires_grad_(False)
    names = {id(param): name for name, param in model.named_parameters()}
    groups = models.param_groups(model, lr=0.5, weight_decay=0.25)
    models.stop()
    return {
        "frozen": [name for name, param in model.named_parameters() if not param.requires_grad],
        "groups": [
            ([names[id(p)] for p in g["params"]], g["lr"], g["weight_decay"]) for g in groups
        ],
    }


def masks_of(shape: Any) -> dict[str, Any]:
    """All tokens of a batch, the first half, the second half, none."""
    first = torch.zeros(shape)
    first[:, : SEQUENCE // 2] = 1
    ones, none = torch.ones(shape), torch.zeros(shape)
    return {"all": None, "ones": ones, "first": first, "second": 1 - first, "none": none}


def masked(config: models.ModelConfig, tp: int) -> dict[str, float]:
    """Losses of one batch under each mask; of the first half on its own."""
    models.start(tp, seed=1)
    model = models.build(config)
    tokens = batch(0)
    inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    masks = masks_of(inputs.shape)
    out = {name: float(models.loss(model, inputs, labels, mask)) for name, mask in masks.items()}
    out["short"] = float(models.loss(model, inputs[:, : SEQUENCE // 2], labels[:, : SEQUENCE // 2]))
    models.stop()
    return out


def masked_stages() -> dict[str, float]:
    """The same by evaluation, on two stages."""
    run = Run(LLAMA, pp=2)
    engine = make_engine(run)
    tokens, labels = next(batches(run, 0))
    out = {}
    for name, mask in masks_of(tokens.shape).items():
        given = tokens, labels if mask is None else (labels, mask)
        out[name] = float(engine.eval_batch(itertools.repeat(given)))
    close(engine)
    return out


def generators(config: models.ModelConfig, tp: int) -> list[bytes]:
    """After a step with dropout: the default generator, and the one of the tensor-parallel
    regions."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    models.start(tp, seed=3)
    model = models.build(config)
    before = torch.get_rng_state()
    tokens = batch(0)
    models.loss(model, tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()).backward()
    states = [
        before,
        torch.get_rng_state(),
        get_cuda_rng_tracker().get_states()["model-parallel-rng"],
    ]
    models.stop()
    return [state.numpy().tobytes() for state in states]


def restarts(times: int, pp: int) -> list[tuple[int, int]]:
    """Open files and threads after each start and stop, with what is built in stages."""
    out = []
    for index in range(times):
        models.start(1 + index % 2 if pp == 1 else 1, 1, pp)
        if pp > 1:
            pipeline.build_pipeline(GPT, pp)
        models.stop()
        out.append((len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))))
    return out


def attempting(found: dict[str, str]) -> Callable[[str, Callable[[], Any]], None]:
    """A function that makes a call and notes under its name what it raised."""

    def attempt(name: str, call: Callable[[], Any]) -> None:
        found[name] = refusal_of(call, "nothing")

    return attempt


def refusals() -> dict[str, str]:
    """On two ranks: what each wrong call raises."""
    short = torch.zeros(1, 5, dtype=torch.int64)
    found: dict[str, str] = {}
    attempt = attempting(found)
    attempt("not started", lambda: models.build(GPT))
    attempt("world", lambda: models.start(3, 1))
    models.start(2, 1)
    attempt("twice", lambda: models.start(2, 1))
    attempt("heads", lambda: models.build(replace(LLAMA, heads=3, groups=3, head_dim=8)))
    attempt("vocabulary", lambda: models.build(replace(GPT, vocab=63)))
    attempt("groups", lambda: models.build(replace(LLAMA, heads=6, groups=3, hidden=48)))
    model = models.build(replace(LLAMA, sequence_parallel=True))
    attempt("odd", lambda: models.loss(model, short, short))
    attempt("long", lambda: models.loss(model, short.repeat(1, 4), short.repeat(1, 4)))
    models.stop()
    return found


def largest_differences(
    found: list[dict[str, Any]], want: dict[str, Any], steps: int
) -> tuple[float, float]:
    """Of losses, and of gradient norms in relation to the norm, over all ranks and steps."""
    pairs: dict[str, list[tuple[float, float]]] = {}
    for part in ("losses", "norms"):
        for rank in found:
            assert len(rank[part]) == len(want[part]) == steps
        pairs[part] = [both for rank in found for both in zip(rank[part], want[part], strict=True)]
    return max(abs(a - b) for a, b in pairs["losses"]), max(
        abs(a - b) / b for a, b in pairs["norms"]
    )
