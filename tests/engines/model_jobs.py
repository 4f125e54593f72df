"""What the ranks do in the tests of the megatron-core models."""

import os
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import megatron_ucp_patches as patches
import torch
import torch.distributed as dist

from pretrain.mcore import models
from tests.engines.kinds import refusal_of
from tests.engines.model import config_of

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
    """One training run: how the model is cut, and how DeepSpeed runs it."""

    model: models.ModelConfig
    tp: int = 1
    zero: int = 0
    dtype: str = "fp32"
    accumulate: int = 1
    plant: str = ""  # what is undone in a negative control


def batch(step: int) -> torch.Tensor:
    """The step's global batch with one token more than a sequence, on every rank the same:
    something that can be learned."""
    starts = torch.randint(
        61, (GLOBAL_BATCH, 1), generator=torch.Generator().manual_seed(1000 + step)
    )
    return (starts + 7 * torch.arange(SEQUENCE + 1)) % 61


def make_engine(run: Run) -> Any:
    import deepspeed

    config = replace(run.model, dtype=run.dtype)
    models.start(run.tp, config.seed)
    model = models.build(config)
    for param in model.parameters():
        if run.plant == "no sums over the sequence":
            param._backward_hooks = None
        if run.plant == "no attributes":
            param.tensor_model_parallel = False  # type: ignore[attr-defined]
    # eps: an element whose gradient is 0 but for rounding would move by lr, either way: 1.3e-5 in
    # the losses with Adam's 1e-8
    optimizer = torch.optim.AdamW(models.param_groups(model, lr=3e-3, weight_decay=0.1), eps=1e-4)
    dp = dist.get_world_size() // run.tp
    rows, parts = GLOBAL_BATCH // dp // run.accumulate, run.accumulate
    settings = config_of(run.zero, rows, run.dtype, gradient_accumulation_steps=parts)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        config=settings,
        mpu=models.mpu(),
        dist_init_required=False,
    )
    if run.plant == "unpatched norm":
        from deepspeed.moe.utils import split_params_grads_into_shared_and_expert_params as stock
        from deepspeed.runtime.fp16 import unfused_optimizer

        unfused_optimizer.split_params_grads_into_shared_and_expert_params = stock
    return engine


def record_norms(engine: Any) -> list[float]:
    """Gradient norms before clipping, filled step by step. Without ZeRO in fp32 the engine throws
    its norm away."""
    import deepspeed.runtime.engine as module

    norms: list[float] = []
    step = engine._take_model_step

    def clip_and_record() -> None:
        norms.append(
            float(
                module.clip_grad_norm_(
                    engine.module.parameters(), engine.gradient_clipping(), mpu=engine.mpu
                )
            )
        )

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


def train(run: Run, steps: int = 20) -> dict[str, Any]:
    """The global batch's mean loss and the gradient norm before clipping, by step; a checksum of
    the copies at the end."""
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
    copies = checksum_of_copies(engine)
    engine.destroy()
    models.stop()
    if run.plant == "unpatched norm":
        patches.find("unfused_norm").change()  # back to what the other jobs of this process expect
    return {"losses": losses, "norms": norms, "copies": copies}


def live(configs: Sequence[models.ModelConfig], tp: int) -> list[dict[str, Any]]:
    """Each model's parameters as megatron-core holds them on this rank: values and the attributes
    that are there."""
    found = []
    models.start(tp, seed=1)
    for config in configs:
        model = models.build(config)
        found.append(
            {
                name: (param.detach().clone(), dict(param.__dict__))
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


def masked(config: models.ModelConfig, tp: int) -> dict[str, float]:
    """Losses of one batch: of all tokens, of the first half, of the second half, of none; each part
    on its own."""
    models.start(tp, seed=1)
    model = models.build(config)
    tokens = batch(0)
    inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    first = torch.zeros(inputs.shape)
    first[:, : SEQUENCE // 2] = 1
    masks = {
        "all": None,
        "ones": torch.ones(inputs.shape),
        "first": first,
        "second": 1 - first,
        "none": torch.zeros(inputs.shape),
    }
    out = {name: float(models.loss(model, inputs, labels, mask)) for name, mask in masks.items()}
    out["short"] = float(models.loss(model, inputs[:, : SEQUENCE // 2], labels[:, : SEQUENCE // 2]))
    models.stop()
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


def restarts(times: int) -> list[tuple[int, int]]:
    """Open files and threads after each start and stop."""
    out = []
    for index in range(times):
        models.start(1 + index % 2, seed=1)
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
