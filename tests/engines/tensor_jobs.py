"""What the ranks do in the tensor-parallel tests: megatron-core models under DeepSpeed."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LambdaLR

import megatron_ucp as ucp
from pretrain.mcore import models
from tests.engines.canonical import canonical, differences, fill
from tests.engines.fingerprints import unlike
from tests.engines.model import MUON, uncompiled
from tests.ranks import allow_fp16_on_cpu
from tests.share import LOSS_STEPS, tags_of

SEQUENCE, BATCH, VOCAB = 8, 4, 48


@dataclass(frozen=True)
class Mega:
    """A tiny megatron-core model on a mesh. Weights are drawn large: small ones hide a wrong
    cut."""

    family: str
    tp: int
    zero: int
    dtype: str = "fp32"
    tied: bool = False
    groups: int = 2
    heads: int = 4
    ffn: int = 24
    seed: int = 1
    sequence_parallel: bool = False
    true_vocab: int = VOCAB
    vocab: int = VOCAB
    layers: int = 2
    muon: bool = False


def make(setup: Mega, attach: bool = True) -> Any:
    """An attached engine with two groups and LambdaLR."""
    import deepspeed

    models.start(setup.tp, seed=7)
    config = models.ModelConfig(
        setup.family,
        layers=setup.layers,
        hidden=16,
        head_dim=4,
        ffn=setup.ffn,
        heads=setup.heads,
        groups=setup.groups,
        vocab=setup.vocab,
        true_vocab=min(setup.true_vocab, setup.vocab),
        positions=SEQUENCE,
        tied=setup.tied,
        init_std=0.15,
        dtype=setup.dtype,
        seed=setup.seed,
        sequence_parallel=setup.sequence_parallel,
    )
    model = models.build(config)
    groups = models.param_groups(model, 3e-3, 0.1)
    optimizer = None if setup.muon else torch.optim.AdamW(groups)
    dp = dist.get_world_size() // setup.tp
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": BATCH // dp,
        "gradient_clipping": 1.0,
        "steps_per_print": 10**9,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": setup.zero, "stage3_param_persistence_threshold": 0},
    }
    if setup.dtype != "fp32":
        settings[setup.dtype] = {"enabled": True} | (
            {"initial_scale_power": 8} if setup.dtype == "fp16" else {}
        )
    if setup.dtype == "fp16":
        allow_fp16_on_cpu()
    if setup.muon:
        uncompiled()
        settings["optimizer"] = {"type": MUON, "params": {"lr": 3e-3, "torch_adam": True}}
        settings["zero_optimization"]["reduce_scatter"] = (
            False  # which DeepSpeed asks for at ZeRO-3
        )
    made = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        model_parameters=groups,
        lr_scheduler=lambda opt: LambdaLR(opt, lambda step: 1.0 / (1 + step)),
        config=settings,
        mpu=models.mpu(),
        dist_init_required=False,
    )[0]
    return ucp.attach(made, family=setup.family) if attach else made


def close(engine: Any) -> None:
    engine.destroy()
    models.stop()


def refusal(engine: Any, call: Callable[[], object]) -> str:
    """What a call says against an engine, which is gone then; "" where it says nothing."""
    try:
        call()
    except ucp.UcpError as error:
        return str(error)
    finally:
        close(engine)
    return ""


def train(engine: Any, steps: int, first: int = 0) -> list[float]:
    """Steps on batches that depend on the step number alone; the mean loss over all ranks."""
    mpu = models.mpu()
    rank, world = mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()
    losses = []
    for step in range(first, first + steps):
        drawn = torch.randint(
            40, (BATCH, SEQUENCE + 1), generator=torch.Generator().manual_seed(1000 + step)
        )
        mine = drawn.chunk(world)[rank]
        loss = models.loss(engine, mine[:, :-1].contiguous(), mine[:, 1:].contiguous())
        engine.backward(loss)
        engine.step()
        total = loss.detach().double().reshape(1)
        dist.all_reduce(total, group=mpu.get_data_parallel_group())
        losses.append(float(total) / world)
    return losses


def save(
    setup: Any,
    folder: str,
    steps: int = 3,
    attach: bool = True,
    more: int = LOSS_STEPS,
    making: Any = make,
    training: Any = train,
) -> None:
    """Trains, saves the tag `trained`, fills with provenance values, saves `filled`; canonical
    states beside them.

    `making` and `training` are for engines of another kind, as in pipeline_jobs."""
    engine = making(setup, attach)
    training(engine, steps)
    engine.save_checkpoint(folder, tag="trained")
    states = {"trained": canonical(engine)}
    fill(engine)
    engine.save_checkpoint(folder, tag="filled")
    states["filled"] = canonical(engine)
    close(engine)
    losses = []
    if more:
        engine = making(setup, attach=False)
        training(engine, steps)
        losses = training(engine, more, first=steps)
        close(engine)
    if dist.get_rank() == 0:
        torch.save({"states": states, "losses": losses, "steps": steps}, Path(folder) / "oracle.pt")


def resume(
    setup: Any,
    folder: str,
    more: int = 0,
    plant: str | None = None,
    tags: tuple[str, ...] = (),
    making: Any = make,
    training: Any = train,
    planting: Any = None,
    **options: Any,
) -> dict[str, Any]:
    """Loads each tag into a fresh engine and compares; trains on after the last one."""
    oracle = torch.load(Path(folder) / "oracle.pt", weights_only=False)
    engine = making(setup)
    before = canonical(engine)
    found: dict[str, Any] = {"differences": {}, "before": {}, "notes": {}}
    for tag in tags or tags_of(more):
        report = ucp.load(engine, folder, tag=tag, **options)
        found["notes"][tag] = report.notes
        if plant:
            (planting or plant_fault)(engine, plant)
        found["before"][tag] = differences(oracle["states"][tag], before)
        found["differences"][tag] = differences(oracle["states"][tag], canonical(engine))
        exact = report.fingerprint is not None and not options
        found["differences"][tag] += unlike(engine, folder, tag, exact)
    if more:
        found["loss"] = max(
            abs(a - b)
            for a, b in zip(
                training(engine, more, first=oracle["steps"]), oracle["losses"][:more], strict=True
            )
        )
    close(engine)
    return found


def plant_fault(engine: Any, fault: str) -> None:
    """A fault of the kind that a wrong layout makes, at ZeRO-0 on one rank, in weights that are
    large."""
    from tests.engines.canonical import base_of

    base, params = base_of(engine), dict(engine.module.named_parameters())
    weight = params["decoder.layers.1.mlp.linear_fc1.weight"].data
    qkv = params["decoder.layers.0.self_attention.linear_qkv.weight"].data
    if fault == "gate and up swapped":
        weight.copy_(weight.roll(weight.shape[0] // 2, 0))
    elif fault == "two key-value groups swapped":
        qkv.copy_(qkv.roll(qkv.shape[0] // 2, 0))
    elif fault == "one group's weight decay":
        base.param_groups[1]["weight_decay"] = 0.1
    elif fault == "one step":
        next(iter(base.state.values()))["step"] += 1
    else:
        raise ValueError(fault)


def attempt(setup: Mega, folder: str, change: str = "", **options: Any) -> dict[str, Any]:
    """A build or a load that should fail: the error, and whether the engine is as before."""
    out: dict[str, Any] = {"error": None, "message": "", "unchanged": True}
    engine = None
    try:
        engine = make(setup, attach=False)
        params = dict(engine.module.named_parameters())
        before = canonical(engine)
        if change == "attribute":
            params["decoder.layers.0.mlp.linear_fc2.weight"].partition_dim = 0
        elif change == "unknown parameter":
            engine.module.surprise = torch.nn.Parameter(torch.zeros(3), requires_grad=False)
            engine.param_names[engine.module.surprise] = "surprise"
        ucp.load(engine, folder, tag="trained", **{"family": setup.family, **options})
    except ucp.UcpError as error:
        out |= {"error": type(error).__name__, "message": str(error)}
        if engine is not None:
            if change == "attribute":
                params["decoder.layers.0.mlp.linear_fc2.weight"].partition_dim = 1
            engine.module.__dict__["_parameters"].pop("surprise", None)
            out["unchanged"] = differences(before, canonical(engine)) == []
    if engine is not None:
        engine.destroy()
    models.stop()
    return out


@contextmanager
def loads_universal() -> Iterator[None]:
    """Inside, engines of stock DeepSpeed load universal folders."""
    import deepspeed

    plain = deepspeed.initialize

    def initialize(config: dict[str, Any], **kwargs: Any) -> Any:
        return plain(config={**config, "checkpoint": {"load_universal": True}}, **kwargs)

    deepspeed.initialize = initialize
    try:
        yield
    finally:
        deepspeed.initialize = plain


def stock_universal(setup: Mega, folder: str) -> list[str]:
    """Loads a universal folder with stock DeepSpeed alone and compares with the canonical state of
    the run."""
    oracle = torch.load(Path(folder) / "oracle.pt", weights_only=False)["states"]["trained"]
    with loads_universal():
        engine = make(setup, attach=False)
    engine.load_checkpoint(folder + "/universal", tag="trained_universal")
    found = [
        d
        for d in differences(oracle, canonical(engine))
        if not d.startswith(("counters", "scheduler"))
    ]
    close(engine)
    return found


def resume_plain(setup: Mega, folder: str) -> dict[str, Any]:
    """A tp=1 engine that knows no family loads by what the checkpoint itself declares."""
    oracle = torch.load(Path(folder) / "oracle.pt", weights_only=False)["states"]["trained"]
    engine = make(setup, attach=False)
    report = ucp.load(engine, folder, tag="trained")
    out = {"differences": differences(oracle, canonical(engine)), "notes": report.notes}
    close(engine)
    return out


def resize_vocabulary(setup: Mega, folder: str) -> dict[str, Any]:
    """Refused without the argument; with it, the rows that both sides have are equal and new ones
    are zero."""
    oracle = torch.load(Path(folder) / "oracle.pt", weights_only=False)["states"]["filled"]["full"]
    engine = make(setup)
    out: dict[str, Any] = {"refusal": ""}
    try:
        ucp.load(engine, folder, tag="filled")
    except ucp.UcpError as error:
        out["refusal"] = f"{type(error).__name__}: {error}"
    out["notes"] = ucp.load(engine, folder, tag="filled", allow={"vocab"}).notes
    have = canonical(engine)["full"]
    wrong = []
    for key, want in oracle.items():
        rows = min(len(want), len(have[key])) if want.dim() else None
        if not torch.equal(want[:rows], have[key][:rows]) or (
            rows is not None and have[key][rows:].count_nonzero()
        ):
            wrong.append(key)
    out |= {"wrong": wrong, "compared": len(oracle)}
    close(engine)
    return out
