"""megatron-core models under DeepSpeed, cut by tensor parallelism and by pipeline stages."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LambdaLR

import megatron_ucp as ucp
from pretrain.mcore import models, pipeline
from pretrain.mcore.experts import Experts
from tests.engines import kinds
from tests.engines.canonical import base_of, canonical, named
from tests.engines.kinds import KINDS, Kind, oracle_of
from tests.engines.model import config_of, engine_around, muon_section, step_with, tokens_of

SEQUENCE, BATCH, VOCAB = 8, 4, 48
LAYER = "decoder.layers.1.mlp."


@dataclass(frozen=True)
class Mega:
    """A tiny megatron-core model on a mesh. Weights are drawn large: small ones hide a wrong
    cut. `pp` stages; 0 for an engine without a pipeline. `extras` adds a frozen parameter and a
    module buffer. `ep` and `etp` (0: as `tp`) are for the family mixtral, whose experts are
    `experts`."""

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
    pp: int = 0
    partition: str | tuple[int, ...] = "uniform"
    fp32_sums: bool = False
    extras: bool = False
    ep: int = 1
    etp: int = 0
    experts: Experts | None = None


@dataclass(frozen=True)
class Staged(Mega):
    """A Mega of three layers, for stages of unequal sizes."""

    layers: int = 3


def settings_of(setup: Mega) -> dict[str, Any]:
    """The config for DeepSpeed."""
    rows = BATCH // (dist.get_world_size() // setup.tp // (setup.pp or 1))
    more: dict[str, Any] = {}
    if setup.fp32_sums:
        more["data_types"] = {"grad_accum_dtype": "fp32"}
    if setup.muon:
        more["optimizer"] = muon_section()
    # which DeepSpeed asks for with Muon at ZeRO-3
    zero = {"reduce_scatter": False} if setup.muon else {}
    return config_of(setup.zero, rows, setup.dtype, zero, **more)


def make(setup: Mega, attach: bool = True) -> Any:
    """An engine with the groups of Megatron (a stage may have one alone) and LambdaLR."""

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
        true_vocab=min(setup.true_vocab, setup.vocab),
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
    made = engine_around(
        model,
        optimizer,
        settings_of(setup),
        model_parameters=groups,
        lr_scheduler=lambda opt: LambdaLR(opt, lambda step: 1.0 / (1 + step)),
        mpu=None if setup.pp else models.mpu(),
    )
    return ucp.attach(made, family=setup.family) if attach else made


def add_extras(model: Any, seed: int) -> None:
    """In every layer a norm that is not trained, and a buffer beside it."""
    for name, module in model.named_modules():
        if name.endswith("pre_mlp_layernorm"):
            module.weight.requires_grad = False
            module.weight.data.mul_(seed)
    for name, module in list(model.named_modules()):
        if name.endswith("mlp"):
            module.register_buffer("counted", torch.arange(5.0) * seed)


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
        mine = tokens_of(step, (BATCH, SEQUENCE + 1), 40).chunk(world)[rank]
        batch = mine[:, :-1].contiguous(), mine[:, 1:].contiguous()
        if hasattr(engine, "num_stages"):
            losses.append(float(engine.train_batch(iter([batch]))))
        else:
            loss = models.loss(engine, *batch)
            losses.append(step_with(engine, loss, mpu.get_data_parallel_group()))
    return losses


# ------------------------------------------------ planted faults


def swap(one: torch.Tensor, other: torch.Tensor) -> None:
    """Exchanges the values of two tensors."""
    kept = one.clone()
    one.copy_(other)
    other.copy_(kept)


def _swap_halves(params: dict[str, Any]) -> None:
    weight = params[f"{LAYER}linear_fc1.weight"].data
    weight.copy_(weight.roll(weight.shape[0] // 2, 0))


def _swap_groups(params: dict[str, Any]) -> None:
    qkv = params["decoder.layers.0.self_attention.linear_qkv.weight"].data
    qkv.copy_(qkv.roll(qkv.shape[0] // 2, 0))


def _copy_layer(params: dict[str, Any]) -> None:
    names = [f"decoder.layers.{n}.mlp.linear_fc1.weight" for n in (0, 1)]
    if all(name in params for name in names):  # on their stage
        params[names[0]].data.copy_(params[names[1]].data)


def _flip_norm(params: dict[str, Any]) -> None:
    norm = params.get("decoder.final_layernorm.weight")
    if norm is not None:  # on the last stage
        norm.data.view(torch.int32)[0] ^= 1


def _swap_experts(params: dict[str, Any]) -> None:
    swap(*(params[f"{LAYER}experts.local_experts.{n}.linear_fc2.weight"].data for n in (0, 1)))


def _swap_halves_of_expert(params: dict[str, Any]) -> None:
    swap(*params[f"{LAYER}experts.local_experts.2.linear_fc1.weight"].data.chunk(2))


def _swap_rows(params: dict[str, Any]) -> None:
    rows = params[f"{LAYER}router.weight"].data
    swap(rows[0], rows[3])


# faults that a wrong layout makes, at ZeRO-0, in weights that are large
FAULTS: dict[str, Callable[[dict[str, Any]], None]] = {
    "gate and up swapped": _swap_halves,
    "two key-value groups swapped": _swap_groups,
    "two layers swapped": _copy_layer,
    "one bit of a later stage": _flip_norm,
    "two experts swapped": _swap_experts,
    "gate and up of an expert swapped": _swap_halves_of_expert,
    "two rows of the router swapped": _swap_rows,
}


def plant_fault(engine: Any, fault: str) -> None:
    """One of FAULTS, of an expert's own values, or of those that every engine can have."""
    params = named(engine)
    if fault in FAULTS:
        FAULTS[fault](params)
    elif fault == "a router's bias":
        dict(engine.module.named_buffers())[f"{LAYER}router.expert_bias"][1] += 1e-3
    elif fault == "an expert's moment":
        weight = params[f"{LAYER}experts.local_experts.3.linear_fc1.weight"]
        base_of(engine).state[weight]["exp_avg"].view(torch.int32).view(-1)[5] ^= 1
    else:
        kinds.plant_fault(engine, fault)


KINDS[Mega] = Kind(make, train, plant_fault, close)


# ------------------------------------------------ jobs


@contextmanager
def other_cut(engine: Any) -> Iterator[None]:
    """Inside, a parameter says that it is cut along another dim."""
    param = dict(engine.module.named_parameters())["decoder.layers.0.mlp.linear_fc2.weight"]
    param.partition_dim = 0
    try:
        yield
    finally:
        param.partition_dim = 1


@contextmanager
def unknown_parameter(engine: Any) -> Iterator[None]:
    """Inside, a model has a parameter that no family knows."""
    engine.module.surprise = torch.nn.Parameter(torch.zeros(3), requires_grad=False)
    engine.param_names[engine.module.surprise] = "surprise"
    try:
        yield
    finally:
        del engine.module.surprise


def groups_of(setup: Mega) -> list[list[str]]:
    """Names of each parameter group, in the order of the optimizer."""
    engine = make(setup, attach=False)
    names = {param: name for name, param in named(engine).items()}
    listed = getattr(engine.optimizer, "bit16_groups", None) or engine.optimizer.fp16_groups
    found = [[names[param] for param in group] for group in listed]
    close(engine)
    return found


def resize_vocabulary(setup: Mega, folder: str) -> dict[str, Any]:
    """Refused without the argument; with it, the rows that both sides have are equal and new ones
    are zero."""
    oracle = oracle_of(folder)["states"]["filled"]["full"]
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
