"""Transformer Engine's and Apex' Adam under megatron-core's optimizers, which is what Megatron-LM
has on every GPU: they count their steps in their groups. The stand-ins compute on the CPU."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import megatron_ucp as ucp
from megatron_ucp.errors import UnsupportedError, UsageError
from megatron_ucp.formats.deepspeed.target import Target
from tests.engines import cross_jobs, fused_adam, kinds, megatron_jobs, tensor_jobs
from tests.engines.cross_jobs import Zero
from tests.engines.megatron_jobs import Mcore
from tests.engines.sources import Sources, check
from tests.engines.test_megatron_pairs import BUCKETS, CONSTANT, MOE, show
from tests.ranks import Job, RankPool

RESUME, STOCK = kinds.resume, megatron_jobs.stock_load
TE: dict[str, Any] = {"adam": "te"}
SMALL: dict[str, Any] = {"layers": 2}
SOURCES: dict[str, tuple[int, Any, str]] = {
    "ours": (2, Mcore(**TE, **BUCKETS, **CONSTANT), "ours"),
    "ours-plain": (2, Mcore(distributed=False, **SMALL, **TE, **CONSTANT), "ours"),
    "ours-ep2": (2, Mcore(ep=2, **MOE, **TE), "ours"),
    "ours-bf16": (2, Mcore(dtype="bf16", distributed=False, **SMALL, **TE), "ours"),
    "full": (2, Mcore(tp=2, **TE, **CONSTANT), "fully_reshardable"),
    "buckets": (2, Mcore(pp=2, **TE, **BUCKETS), "dp_reshardable"),
    "legacy": (2, Mcore(tp=2, **TE), "legacy"),
    # the first stage has an embedding alone, and no vector
    "plain": (2, Mcore(distributed=False, pp=2, layout="E|ttttL", **TE), "plain"),
    "torch": (2, Mcore(**BUCKETS, **CONSTANT), "ours"),
    "torch-plain": (2, Mcore(distributed=False, **SMALL), "ours"),
    "deepspeed": (2, Zero(zero=1), ""),
}


def saved(sources: Sources, name: str) -> str:
    ranks, setup, kind = SOURCES[name]
    return sources.get(ranks, setup, **({"more": 3, "kind": kind} if kind else {}))


@pytest.mark.parametrize(
    ("source", "world", "target"),
    [
        ("ours", 4, Mcore(tp=2, pp=2, **TE, **CONSTANT)),
        ("ours", 2, Mcore(tp=2, adam="apex", **CONSTANT)),
        ("ours", 1, Mcore(distributed=False, **CONSTANT)),
        ("ours-plain", 2, Mcore(pp=2, **SMALL, **TE, **CONSTANT)),
        ("ours-ep2", 4, Mcore(tp=2, ep=2, **MOE, **TE)),
        ("ours-bf16", 2, Mcore(dtype="bf16", **SMALL, **TE)),
        ("full", 2, Mcore(**TE, **CONSTANT)),
        ("buckets", 2, Mcore(tp=2, **TE)),
        ("legacy", 2, Mcore(pp=2, **TE)),
        ("torch", 2, Mcore(tp=2, **TE, **CONSTANT)),
        ("torch-plain", 2, Mcore(adam="subclass", **SMALL)),
        ("deepspeed", 2, Mcore(pp=2, **TE, **CONSTANT)),
    ],
    ids=show,
)
@pytest.mark.cases(6)
def test_pair(sources: Sources, source: str, world: int, target: Mcore) -> None:
    more = 3 if target.dtype == "fp32" else 0
    check(sources.resume(world, target, saved(sources, source), more=more), 1e-5 if more else None)


@pytest.mark.parametrize(
    ("source", "world", "target"),
    [
        ("ours", 2, Mcore(tp=2, **TE, **CONSTANT)),
        ("ours-plain", 2, Mcore(distributed=False, pp=2, **SMALL, **TE, **CONSTANT)),
        ("ours-ep2", 2, Mcore(ep=2, **MOE, **TE)),
        ("torch", 2, Mcore(adam="apex", **CONSTANT)),
        ("ours", 2, Mcore(tp=2, **CONSTANT)),
    ],
    ids=show,
)
def test_stock_loads_it_and_steps(sources: Sources, source: str, world: int, target: Mcore) -> None:
    """Their kernels take no float as the step, and a load of theirs no step among the states."""
    folder = saved(sources, source)
    found = sources.ranks.run(world, STOCK, target, folder, ("filled", "trained"), more=2)
    check(found, 1e-5)


def test_a_group_without_parameters_on_the_first_rank_has_the_step_of_the_others(
    sources: Sources,
) -> None:
    folder = saved(sources, "plain")
    target = Mcore(**TE)
    check(sources.resume(1, target, folder, more=3), 1e-5)


@pytest.mark.parametrize("source", ["ours", "ours-plain"])
def test_the_same_mesh_goes_on_with_identical_bits(sources: Sources, source: str) -> None:
    ranks, setup, *_ = SOURCES[source]
    folder = saved(sources, source)
    found = sources.resume(ranks, setup, folder, tags=("trained",), three=True)
    check(found)
    assert all(rank["after"] == [] for rank in found)


# what the fused ones can be told that changes numbers, or where they lie
VARIANTS: dict[str, Any] = {
    "capturable": True,
    "master_weights": True,
    "use_master": True,
    "store_param_remainders": True,
    "use_decoupled_grad": True,
    "exp_avg_dtype": torch.bfloat16,
    "exp_avg_sq_dtype": torch.uint8,
}


def refusals(folder: str) -> dict[str, str]:
    """What is said of each variant, of an optimizer that nobody knows, of a subclass, and of a save
    before the first step."""
    engine = megatron_jobs.make(Mcore(adam="subclass", layers=1))
    chunks, optimizer = engine.stack.chunks, engine.optimizer
    (inner,) = optimizer.chained_optimizers
    said: dict[str, str] = {}
    for name, value in VARIANTS.items():
        setattr(inner.optimizer, name, value)
        with pytest.raises(UnsupportedError, match=name) as found:
            ucp.attach_megatron(chunks, optimizer)
        said[name] = str(found.value)
        setattr(inner.optimizer, name, torch.float32 if name.endswith("dtype") else False)
    for name in ("fp8", "fp4"):
        setattr(engine.stack.transformer, name, "hybrid")
        with pytest.raises(UnsupportedError, match=name):
            ucp.attach_megatron(chunks, optimizer)
        setattr(engine.stack.transformer, name, None)
    ucp.attach_megatron(chunks, optimizer)  # none of them is left
    said |= refused_saves(engine, folder)
    inner.optimizer.__class__ = type("Shampoo", (torch.optim.Optimizer,), {"__module__": "someone"})
    with pytest.raises(UnsupportedError, match=r"someone\.Shampoo") as unknown:
        ucp.attach_megatron(chunks, optimizer)
    said["unknown"] = str(unknown.value)
    megatron_jobs.close(engine)
    return said


def refused_saves(engine: Any, folder: str) -> dict[str, str]:
    """What saves say of a subclass, of states without a step, and of a moment in bf16."""
    said: dict[str, str] = {}
    (inner,) = engine.optimizer.chained_optimizers
    megatron_jobs.train(engine, 1)
    said["subclass"] = "; ".join(ucp.save(engine.handle, folder).notes)
    for group in inner.optimizer.param_groups:  # as after a load that made room for states
        del group["step"]
    with pytest.raises(UsageError, match="first step") as early:
        ucp.save(engine.handle, folder)
    said["early"] = str(early.value)
    held = inner.optimizer.state[inner.optimizer.param_groups[0]["params"][0]]
    held["exp_avg"] = held["exp_avg"].bfloat16()
    for group in inner.optimizer.param_groups:
        group["step"] = 1
    with pytest.raises(UsageError, match="bfloat16") as odd:
        ucp.save(engine.handle, folder)
    said["odd"] = str(odd.value)
    return said


def test_variants_that_keep_other_numbers_are_refused_by_name(
    ranks: RankPool, tmp_path: Path
) -> None:
    (said,) = ranks.run(1, refusals, str(tmp_path))
    assert {*said} == {*VARIANTS, "subclass", "early", "odd", "unknown"}
    assert "taken as transformer_engine.FusedAdam" in said["subclass"]


def under_deepspeed(folder: str) -> list[str]:
    """Of an engine of DeepSpeed with one of them."""
    zero = Zero(layers=2)
    engine = cross_jobs.make(zero, attach=False)
    base = engine.optimizer.optimizer
    base.__class__ = fused_adam.ApexAdam
    said: list[str] = []
    before = [one.detach().clone() for one in engine.module.parameters()]
    for call in (
        lambda: ucp.attach(engine, family=zero.family),
        lambda: ucp.load(engine, folder, tag="trained", family=zero.family),
    ):
        with pytest.raises(UnsupportedError, match=r"apex\.FusedAdam") as found:
            call()
        said.append(str(found.value))
    now = engine.module.parameters()
    assert all(torch.equal(*pair) for pair in zip(before, now, strict=True))
    tensor_jobs.close(engine)
    return said


def test_under_deepspeed_they_are_refused(sources: Sources) -> None:
    """Its files have the step in the states, from where they don't take it."""
    folder = sources.get(1, Zero(layers=2), more=3)
    job = under_deepspeed
    (said,) = sources.ranks.run(1, job, folder)
    assert all("counts its steps in its parameter groups" in one for one in said)


@pytest.mark.parametrize("adam", ["te", "torch"])
def test_states_from_before_the_first_step(sources: Sources, adam: str) -> None:
    """An engine that has trained counts from 0 again."""
    folder = sources.get(1, Zero(layers=2), steps=0, more=3)
    target = Mcore(adam=adam, layers=2, **CONSTANT)
    check(sources.resume(1, target, folder, tags=("trained",), more=3), 1e-5)


def test_pair_under_deepspeed(sources: Sources) -> None:
    folder = saved(sources, "ours")
    options = {"more": 3, "load_lr_scheduler_states": False}
    check(sources.resume(2, Zero(zero=2), folder, **options), 1e-5)


# what torch's groups say and the fused ones' don't, and what these folders' arguments leave out
WORDS = {"amsgrad", "capturable", "decoupled_weight_decay", "differentiable", "maximize"}
WORDS |= {"bias_correction", "global_samples", "lr_scheduler"}


@pytest.mark.parametrize("source", ["full", "buckets", "legacy", "plain", "deepspeed"])
def test_conversions(sources: Sources, tmp_path: Path, source: str) -> None:
    """Through DeepSpeed's files back to Megatron's, bit by bit, and stock steps on from there."""
    folder = Path(saved(sources, source))
    native, back = tmp_path / "native" / "trained", tmp_path / "trained" / "iter_0000003"
    ucp.convert(folder, native, target=ucp.Mesh(dp=2, zero=1), tag="trained")
    ucp.convert(native, back, to="torch_dist")
    assert {one.what for one in ucp.diff(folder / "trained", native)} == set()
    assert {one.what for one in ucp.diff(folder / "trained", back)} <= WORDS
    with pytest.raises(UnsupportedError, match=r"apex\.FusedAdam"):
        wrong = Target(ucp.Mesh(dp=2, zero=1), optimizer="apex.FusedAdam")
        ucp.convert(folder, tmp_path / "other", target=wrong, tag="trained")
    shutil.copy(folder / "oracle.pt", tmp_path)
    target = Mcore(**TE, **(CONSTANT if source == "deepspeed" else {}))
    check(sources.ranks.run(1, STOCK, target, str(tmp_path), ("trained",), more=2), 1e-5)


# as on GPUs: Transformer Engine's layers and its Adam
GPU: dict[str, Any] = {"fused": True, **TE}
LAYERS: dict[str, tuple[int, Any, str]] = {
    "ours": (2, Mcore("gpt", tied=True, pp=2, **GPU, **CONSTANT), "ours"),
    "full": (2, Mcore(tp=2, **GPU), "fully_reshardable"),
    "buckets": (2, Mcore(overlap=True, bucket=2000, **GPU), "dp_reshardable"),
    "legacy": (2, Mcore(tp=2, overlap=True, bucket=2000, **GPU), "legacy"),
    "experts": (2, Mcore("mixtral", ep=2, every=2, layers=2, **GPU), "dp_reshardable"),
    "local": (2, Mcore(tp=2, **CONSTANT), "ours"),
}


@pytest.mark.parametrize(
    ("source", "job", "world", "target"),
    [
        ("ours", RESUME, 2, Mcore("gpt", tied=True, tp=2, **CONSTANT)),
        ("ours", STOCK, 1, Mcore("gpt", tied=True, **GPU, **CONSTANT)),
        ("full", RESUME, 2, Mcore(pp=2, vpp=2, **GPU)),
        ("buckets", RESUME, 2, Mcore(tp=2, **GPU)),
        ("legacy", RESUME, 2, Mcore(pp=2, overlap=True, bucket=1500, **GPU)),
        ("experts", RESUME, 1, Mcore("mixtral", every=2, layers=2, **GPU)),
        ("local", RESUME, 2, Mcore(overlap=True, bucket=2000, **GPU, **CONSTANT)),
        ("local", STOCK, 2, Mcore(pp=2, **GPU, **CONSTANT)),
    ],
)
def test_layers_of_transformer_engine(
    sources: Sources, source: str, job: Job, world: int, target: Mcore
) -> None:
    ranks, setup, kind = LAYERS[source]
    folder = sources.get(ranks, setup, more=3, kind=kind)
    options: dict[str, Any] = {"tags": ("filled", "trained"), "more": 3}
    check(sources.ranks.run(world, job, target, folder, **options), 1e-5)
