"""What the ranks do in the tests of pipeline checkpoints: megatron-core models with and without
pipeline stages."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LambdaLR

import megatron_ucp as ucp
from pretrain.mcore import models, pipeline
from pretrain.mcore.experts import Experts
from tests.engines import tensor_jobs
from tests.engines.canonical import base_of, canonical, differences, named
from tests.engines.model import MUON, uncompiled
from tests.engines.tensor_jobs import BATCH, SEQUENCE, Mega
from tests.ranks import allow_fp16_on_cpu


@dataclass(frozen=True)
class Staged(Mega):
    """A Mega in `pp` stages; 0 for an engine without a pipeline. `extras` adds a frozen parameter
    and a module buffer. `ep` and `etp` (0: as `tp`) are for the family mixtral, whose experts are
    `experts`."""

    layers: int = 3
    pp: int = 0
    partition: str | tuple[int, ...] = "uniform"
    fp32_sums: bool = False
    extras: bool = False
    ep: int = 1
    etp: int = 0
    experts: Experts | None = None


def ds_config(setup: Staged) -> dict[str, Any]:
    dp = dist.get_world_size() // setup.tp // (setup.pp or 1)
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": BATCH // dp,
        "gradient_clipping": 1.0,
        "steps_per_print": 10**9,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": setup.zero, "stage3_param_persistence_threshold": 0},
    }
    if setup.muon:
        uncompiled()
        settings["optimizer"] = {"type": MUON, "params": {"lr": 3e-3, "torch_adam": True}}
        settings["zero_optimization"]["reduce_scatter"] = (
            False  # which DeepSpeed asks for at ZeRO-3
        )
    if setup.fp32_sums:
        settings["data_types"] = {"grad_accum_dtype": "fp32"}
    if setup.dtype != "fp32":
        scale = {"initial_scale_power": 8} if setup.dtype == "fp16" else {}
        settings[setup.dtype] = {"enabled": True, **scale}
    return settings


def make(setup: Staged, attach: bool = True) -> Any:
    """An engine with the groups of Megatron (a stage may have one alone) and LambdaLR."""
    import deepspeed

    models.start(setup.tp, seed=7, pp=setup.pp or 1, ep=setup.ep, etp=setup.etp or None)
    config = models.ModelConfig(
        setup.family,
        layers=setup.layers,
        hidden=16,
        head_dim=4,
        ffn=setup.ffn,
        heads=setup.heads,
        groups=setup.groups,
        vocab=setup.vocab,
        true_vocab=setup.true_vocab,
        positions=SEQUENCE,
        tied=setup.tied,
        init_std=0.15,
        dtype=setup.dtype,
        seed=setup.seed,
        sequence_parallel=setup.sequence_parallel,
        experts=setup.experts,
    )
    model: Any = (
        pipeline.build_pipeline(config, setup.pp, setup.partition)
        if setup.pp
        else models.build(config)
    )
    for name, buffer in model.named_buffers():
        if name.endswith("expert_bias"):
            buffer.copy_(torch.arange(buffer.numel()) * 0.01 * setup.seed)
    if setup.extras:
        add_extras(model, setup.seed)
    groups = models.param_groups(model, 3e-3, 0.1)
    optimizer = None if setup.muon else torch.optim.AdamW(groups)
    if setup.dtype == "fp16":
        allow_fp16_on_cpu()
    made = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        model_parameters=groups,
        lr_scheduler=lambda opt: LambdaLR(opt, lambda step: 1.0 / (1 + step)),
        config=ds_config(setup),
        mpu=None if setup.pp else models.mpu(),
        dist_init_required=False,
    )[0]
    return ucp.attach(made, family=setup.family) if attach else made


def groups_of(setup: Staged) -> list[list[str]]:
    """Names of each parameter group, in the order of the optimizer."""
    engine = make(setup, attach=False)
    names = {param: name for name, param in named(engine).items()}
    listed = getattr(engine.optimizer, "bit16_groups", None) or engine.optimizer.fp16_groups
    found = [[names[param] for param in group] for group in listed]
    tensor_jobs.close(engine)
    return found


def stock_universal(setup: Staged, folder: str) -> list[str]:
    """What differs after stock DeepSpeed's own load of a universal folder, the tag `trained`."""
    with tensor_jobs.loads_universal():
        engine = make(setup, attach=False)
    oracle = torch.load(Path(folder) / "oracle.pt", weights_only=False)["states"]["trained"]
    engine.load_checkpoint(folder, tag="trained")
    found = differences(oracle, canonical(engine))
    tensor_jobs.close(engine)
    return [one for one in found if not one.startswith(("counters", "scheduler"))]


def add_extras(model: Any, seed: int) -> None:
    """In every layer a norm that is not trained, and a buffer beside it."""
    for name, module in model.named_modules():
        if name.endswith("pre_mlp_layernorm"):
            module.weight.requires_grad = False
            module.weight.data.mul_(seed)
    for name, module in list(model.named_modules()):
        if name.endswith("mlp"):
            module.register_buffer("counted", torch.arange(5.0) * seed)


def train(engine: Any, steps: int, first: int = 0) -> list[float]:
    """As tensor_jobs.train."""
    if not hasattr(engine, "num_stages"):
        return tensor_jobs.train(engine, steps, first)
    mpu = models.mpu()
    losses = []
    for step in range(first, first + steps):
        drawn = torch.randint(
            40, (BATCH, SEQUENCE + 1), generator=torch.Generator().manual_seed(1000 + step)
        )
        mine = drawn.chunk(mpu.get_data_parallel_world_size())[mpu.get_data_parallel_rank()]
        losses.append(
            float(engine.train_batch(iter([(mine[:, :-1].contiguous(), mine[:, 1:].contiguous())])))
        )
    return losses


def save(setup: Staged, folder: str, steps: int = 2, attach: bool = True, more: int = 0) -> None:
    """As tensor_jobs.save."""
    tensor_jobs.save(setup, folder, steps, attach, more, make, train)


def resume(
    setup: Staged,
    folder: str,
    more: int = 0,
    plant: str = "",
    tags: tuple[str, ...] = (),
    **options: Any,
) -> dict[str, Any]:
    """As tensor_jobs.resume."""
    return tensor_jobs.resume(setup, folder, more, plant, tags, make, train, plant_fault, **options)


def plant_fault(engine: Any, fault: str) -> None:
    """One wrong thing of the kinds that stages invite, in an engine with a pipeline."""
    base, params = base_of(engine), named(engine)
    if fault == "two layers swapped" and engine.stage_id == 0:
        names = [f"decoder.layers.{n}.mlp.linear_fc1.weight" for n in (0, 1)]
        one, two = (params[name].data for name in names)
        one.copy_(two)
    elif fault == "one bit of a later stage" and engine.stage_id == engine.num_stages - 1:
        weight = params["decoder.final_layernorm.weight"].data
        weight.view(torch.int32)[0] ^= 1
    elif fault == "one group's weight decay" and engine.stage_id == engine.num_stages - 1:
        base.param_groups[-1]["weight_decay"] += 0.1
    elif fault == "one step" and engine.stage_id == 1:
        next(iter(base.state.values()))["step"] += 1
    elif fault in EXPERT_FAULTS:
        EXPERT_FAULTS[fault](engine, params)


LAYER = "decoder.layers.1.mlp."


def swap(one: torch.Tensor, other: torch.Tensor) -> None:
    """Exchanges the values of two tensors."""
    kept = one.clone()
    one.copy_(other)
    other.copy_(kept)


def _swap_experts(_: Any, params: dict[str, Any]) -> None:
    names = [f"{LAYER}experts.local_experts.{n}.linear_fc2.weight" for n in (0, 1)]
    swap(*(params[name].data for name in names))


def _swap_halves(_: Any, params: dict[str, Any]) -> None:
    swap(*params[f"{LAYER}experts.local_experts.2.linear_fc1.weight"].data.chunk(2))


def _swap_rows(_: Any, params: dict[str, Any]) -> None:
    rows = params[f"{LAYER}router.weight"].data
    swap(rows[0], rows[3])


def _move_bias(engine: Any, _: dict[str, Any]) -> None:
    dict(engine.module.named_buffers())[f"{LAYER}router.expert_bias"][1] += 1e-3


def _change_moment(engine: Any, params: dict[str, Any]) -> None:
    weight = params[f"{LAYER}experts.local_experts.3.linear_fc1.weight"]
    base_of(engine).state[weight]["exp_avg"].view(torch.int32).view(-1)[5] ^= 1


EXPERT_FAULTS = {
    "two experts swapped": _swap_experts,
    "gate and up of an expert swapped": _swap_halves,
    "two rows of the router swapped": _swap_rows,
    "a router's bias": _move_bias,
    "an expert's moment": _change_moment,
}


def attempt(
    setup: Staged, folder: str, given: str | None = "gpt", **options: Any
) -> dict[str, Any]:
    """A load that should fail: the error, and whether the engine is as before."""
    engine = make(setup, attach=False)
    before = canonical(engine)
    out: dict[str, Any] = {"error": None, "message": ""}
    try:
        ucp.load(engine, folder, tag="trained", family=given, **options)
    except ucp.UcpError as error:
        out |= {"error": type(error).__name__, "message": str(error)}
    out["unchanged"] = differences(before, canonical(engine)) == []
    tensor_jobs.close(engine)
    return out


def reshard(setup: Staged, folder: str, out: str) -> None:
    """Loads the tag `trained` and saves it again on this mesh as the tag `again`."""
    engine = make(setup)
    ucp.load(engine, folder, tag="trained")
    engine.save_checkpoint(out, tag="again")
    tensor_jobs.close(engine)


def fails_on_rank(setup: Staged, folder: str, rank: int) -> dict[str, Any]:
    """A load in which one rank's disk fails while bytes move."""
    from megatron_ucp.errors import DamagedFileError
    from megatron_ucp.reshard import files as loading

    engine, stock = make(setup), loading.execute

    def execute(*args: Any, **kwargs: Any) -> Any:
        raise DamagedFileError("only here")

    if dist.get_rank() == rank:
        loading.execute = execute
    out: dict[str, Any] = {"error": None, "refuses": []}
    try:
        ucp.load(engine, folder, tag="trained")
    except ucp.UcpError as error:
        out["error"] = type(error).__name__
    finally:
        loading.execute = stock
    for method in (lambda: train(engine, 1), lambda: engine.save_checkpoint(folder, tag="after")):
        try:
            method()
        except ucp.UcpError as error:
            out["refuses"].append(type(error).__name__)
    tensor_jobs.close(engine)
    return out
