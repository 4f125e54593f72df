"""The patches: each states what it is, is refused for an unknown version, and cures a defect that
is there without it."""

import inspect
import json
import sys
from collections.abc import Callable
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import megatron_ucp_patches as patches
import pytest

from megatron_ucp.errors import UnsupportedError, UsageError
from tests.engines import model_jobs
from tests.ranks import ROOT, RankPool
from tests.scripts import run_command


def test_every_patch_says_what_it_is() -> None:
    assert "round_robin_links" in patches.names()
    for name in patches.names():
        patch = patches.find(name)
        assert patch.package in ("deepspeed", "megatron-core") and patch.versions
        assert all(len(text) > 20 for text in (patch.upstream, patch.why, patch.until)), name
        assert not set(patch.versions) & set(patch.mended), name


@pytest.fixture
def deepspeed_says(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Sets the version that an imported DeepSpeed says. Nothing is applied in this process yet."""
    monkeypatch.setattr(patches, "_applied", set())

    def say(version: str) -> None:
        monkeypatch.setitem(sys.modules, "deepspeed", SimpleNamespace(__version__=version))

    return say


def test_an_unknown_patch_and_an_unknown_version(deepspeed_says: Callable[[str], None]) -> None:
    with pytest.raises(UsageError, match="no such patch"):
        patches.apply("nothing")
    deepspeed_says("99.0")
    with pytest.raises(UnsupportedError, match=r"does not know this version"):
        patches.apply("round_robin_links")


def test_a_patch_does_nothing_and_says_so_where_upstream_has_mended_the_defect(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    deepspeed_says: Callable[[str], None],
) -> None:
    monkeypatch.setattr(patches, "has_gpu", lambda: False)
    deepspeed_says("0.19.8")
    with caplog.at_level("INFO", logger=patches.__name__):
        assert not patches.apply("zero3_gathers_waited")
    assert "deepspeed 0.19.8 has no such defect" in caplog.text
    assert not patches._applied


def test_the_imported_module_says_the_version(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    name = "megatron.core"
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(__version__="0.17.1+446de22"))
    assert patches.version_of("megatron-core") == "0.17.1"
    monkeypatch.delitem(sys.modules, name)
    assert patches.version_of("megatron-core") == version("megatron-core")
    assert name not in sys.modules  # its distribution was asked

    def no_distribution(package: str) -> str:
        raise PackageNotFoundError(package)

    # A checkout that is on the path and was never installed: the module is imported.
    monkeypatch.setattr(patches, "version", no_distribution)
    (tmp_path / "a_checkout.py").write_text('__version__ = "0.18.2+446de22"\n')
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(patches, "MODULES", {"it": "a_checkout", "nothing": "a_checkout_of_no"})
    assert patches.version_of("it") == "0.18.2"
    assert patches.version_of("nothing") == "none"


def wrong_reads(patched: bool) -> list[str]:
    """Parameters that DeepSpeed's accessor returns wrong under round robin."""
    import torch
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
    from deepspeed.utils import safe_get_full_fp32_param

    from tests.engines.model import Setup, make_engine, train

    stock = DeepSpeedZeroOptimizer._link_all_hp_params
    try:
        if patched:
            patches.apply("round_robin_links")
        engine = make_engine(
            Setup(1, "fp32", zero_config=(("round_robin_gradients", True),)), attach=False
        )
        train(engine, 1)
        wrong = []
        for name, param in engine.module.named_parameters():
            if param.requires_grad and not torch.equal(
                safe_get_full_fp32_param(param), param.detach()
            ):
                wrong.append(name)
        engine.destroy()
        return wrong
    finally:
        DeepSpeedZeroOptimizer._link_all_hp_params = stock
        patches._applied.discard("round_robin_links")


@pytest.mark.ranks
def test_round_robin_links(ranks: RankPool) -> None:
    assert all(wrong for wrong in ranks.run(2, wrong_reads, False)), (
        "the defect is gone: drop the patch"
    )
    assert ranks.run(2, wrong_reads, True) == [[], []]


class Late:
    """A gather that fills its output when it is waited for, as a slow one may."""

    def __init__(self, gather: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        self.gather = lambda: gather(*args, **(kwargs | {"async_op": False}))

    def wait(self) -> None:
        self.gather()


def stale_after_a_gather(patched: bool) -> list[str]:
    """Parameters of ZeRO-3 that DeepSpeed gathers and gives out before they are there."""
    from unittest import mock

    import torch
    from deepspeed.runtime.zero import GatheredParameters, partition_parameters

    from tests.engines.model import Setup, make_engine

    engine = make_engine(Setup(3, "fp32"), attach=False)
    params = dict(engine.module.named_parameters())
    with GatheredParameters(list(params.values())):
        whole = {name: param.detach().clone() for name, param in params.items()}
    comm, kind = partition_parameters.dist, partition_parameters.Init
    gathers = ("all_gather", "all_gather_into_tensor")
    late: Any = {name: partial(Late, getattr(comm, name)) for name in gathers}
    before, applied = kind._allgather_params_coalesced, set(patches._applied)
    kind._allgather_params_coalesced = inspect.unwrap(before)  # the ranks may have the patch
    patches._applied.discard("zero3_gathers_waited")
    try:
        if patched:
            patches.apply("zero3_gathers_waited")
        with mock.patch.multiple(comm, **late), GatheredParameters(list(params.values())):
            found = {name: param.detach().clone() for name, param in params.items()}
    finally:
        kind._allgather_params_coalesced = before
        patches._applied.clear()
        patches._applied.update(applied)
    engine.destroy()
    return [name for name in params if not torch.equal(whole[name], found[name])]


@pytest.mark.ranks
def test_zero3_gathers_waited(ranks: RankPool) -> None:
    patch = patches.find("zero3_gathers_waited")
    job = stale_after_a_gather
    if patches.version_of(patch.package) in patch.mended:
        assert ranks.run(2, job, False) == [[], []]
        return
    assert all(stale for stale in ranks.run(2, job, False))
    assert ranks.run(2, job, True) == [[], []]


def test_a_patch_for_machines_without_a_gpu_does_nothing_where_there_is_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(patches, "has_gpu", lambda: True)
    monkeypatch.setattr(patches, "_applied", set())
    meant = [name for name in patches.names() if patches.find(name).only_without_gpu]
    assert meant == [
        "cuda_literals_on_cpu",
        "cuda_streams_on_cpu",
        "cuda_type_names_on_cpu",
        "current_device_is_cpu",
        "moe_dispatch_on_cpu",
        "no_muon_compile",
        "no_torch_compile",
        "rng_tracker_on_cpu",
        "uneven_gather_on_cpu",
        "zero3_gathers_waited",
    ]
    with caplog.at_level("INFO", logger=patches.__name__):
        assert not any(patches.apply(name) for name in meant)
    assert len(caplog.records) == len(meant)
    assert all(meant[i] in record.getMessage() for i, record in enumerate(caplog.records))
    assert not patches._applied


def stepped(distributed: bool) -> Any:
    """megatron-core's own optimizer after a step."""
    from megatron.core.distributed import DistributedDataParallel as Ddp
    from megatron.core.distributed import DistributedDataParallelConfig as DdpConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    from pretrain.mcore import models
    from tests.engines.model_jobs import GPT

    model = models.build(GPT)
    chunk = Ddp(model.config, DdpConfig(use_distributed_optimizer=distributed), model)
    clip = float(distributed)  # clipping asks for the names of types, too
    config = OptimizerConfig(lr=1e-3, clip_grad=clip, use_distributed_optimizer=distributed)
    made = get_megatron_optimizer(config, [chunk], use_gloo_process_groups=False)
    made.step()
    return made


def waited() -> Any:
    """Before megatron-core writes a checkpoint, and of what it gathered over gloo."""
    import torch

    torch.cuda.synchronize()
    return torch.ones(2).cuda()


def loaded() -> Any:
    """Whether each parameter has its own step after a load."""
    import torch

    one = stepped(True).chained_optimizers[0]
    one.load_state_dict(one.state_dict())
    steps = {id(state["step"]) for state in one.optimizer.state.values()}
    assert len(steps) == len(one.optimizer.state), "one step for all"
    return torch.ones(1)


def draw() -> Any:
    import torch
    from megatron.core.tensor_parallel import get_cuda_rng_tracker, model_parallel_cuda_manual_seed

    model_parallel_cuda_manual_seed(7, force_reset_rng=True)
    outside = torch.get_rng_state()
    with get_cuda_rng_tracker().fork():
        drawn = torch.rand(3)
    with get_cuda_rng_tracker().fork():
        drawn = torch.cat([drawn, torch.rand(3)])
    # Megatron's seed of tensor-parallel rank 0
    generator = torch.Generator().manual_seed(7 + 2718)
    alone = [torch.rand(3, generator=generator) for _ in range(2)]
    assert torch.equal(outside, torch.get_rng_state())
    assert torch.equal(drawn, torch.cat(alone))
    return drawn


def compiled() -> Any:
    import torch
    from megatron.core import activations

    # raises where a compiler would be started
    with torch.compiler.set_stance("fail_on_recompile"):
        return activations.squared_relu(torch.tensor([-1.0, 2.0]))


def orthogonal() -> Any:
    import torch
    from deepspeed.runtime.zero.muon import original_muon

    with torch.compiler.set_stance("fail_on_recompile"):
        return original_muon.zeropower_via_newtonschulz5(torch.eye(2), 1)


def megatron_without_a_gpu(folder: str) -> dict[str, list[str | bool]]:
    """For each patch that one rank needs: what a call does without it, and then with it; False for
    a patch that does nothing here."""
    from unittest import mock

    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state

    from pretrain.mcore import experts, models
    from tests.engines.expert_jobs import with_experts
    from tests.engines.model_jobs import GPT, batch

    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    tokens = batch(0)[:, :16].contiguous()

    def forward() -> torch.Tensor:
        return models.loss(models.build(GPT), tokens, tokens)

    def routed(dispatcher: str) -> torch.Tensor:
        with mock.patch.object(experts, "apply_patches"):
            model = models.build(with_experts(dispatcher=dispatcher))
        return models.loss(model, tokens % 32, tokens % 32)

    calls = {
        "rng_tracker_on_cpu": draw,
        "current_device_is_cpu": forward,
        "no_torch_compile": compiled,
        "no_muon_compile": orthogonal,
        "moe_router_gemm": lambda: routed("allgather"),
        "moe_dispatch_on_cpu": lambda: routed("alltoall"),
        "cuda_literals_on_cpu": lambda: stepped(distributed=False).get_loss_scale(),
        "cuda_type_names_on_cpu": lambda: stepped(distributed=True).get_loss_scale(),
        "cuda_streams_on_cpu": waited,
        "adamw_load": loaded,
    }
    return {name: [said(call), patches.apply(name) and said(call)] for name, call in calls.items()}


def said(call: Callable[[], Any]) -> str:
    try:
        assert call().isfinite().all()
    except (RuntimeError, AssertionError, NameError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return "right"


APART = {"uneven_gather_on_cpu", "zero3_gathers_waited"}  # have tests of their own


@pytest.mark.ranks
def test_megatron_without_a_gpu(tmp_path: Path) -> None:
    """In a process of its own: a patch stays, and the ranks of the pool have them all."""
    if patches.has_gpu():
        pytest.skip("there is a GPU")
    code = (
        "import json, sys; from tests.test_patches import megatron_without_a_gpu as probe; "
        "json.dump(probe(sys.argv[1]), open(sys.argv[1] + '/found.json', 'w'))"
    )
    ran = run_command(
        [sys.executable, "-c", code, str(tmp_path)],
        env={"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        timeout=300,
        cwd=ROOT,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    found = json.loads((tmp_path / "found.json").read_text())
    meant = {name for name in patches.names() if patches.find(name).only_without_gpu}
    assert set(found) == meant - APART | {"moe_router_gemm", "adamw_load"}
    for name, (without, with_it) in found.items():
        patch = patches.find(name)
        if patches.version_of(patch.package) in patch.mended:
            assert without == "right" and with_it is False, (name, without, with_it)
        else:
            assert without != "right" and with_it == "right", (name, without, with_it)


@pytest.mark.ranks
def test_unfused_norm(ranks: RankPool) -> None:
    """The first gradient norm in bf16 without ZeRO, on one rank, on two, and on two without the
    patch."""
    from tests.engines.model_jobs import GPT, Run

    whole, patched, stock = (
        ranks.run(run.tp, model_jobs.train, run, 1)[0]["norms"][0]
        for run in (
            Run(GPT, dtype="bf16"),
            Run(GPT, tp=2, dtype="bf16"),
            Run(GPT, tp=2, dtype="bf16", plant="unpatched norm"),
        )
    )
    assert patched == pytest.approx(whole, rel=0.01)
    assert stock < 0.9 * whole, "the defect is gone: drop the patch"


def gathered(patched: bool) -> str | list[float]:
    """What ranks with 1, 2, ... rows gather; or what gloo says."""
    import torch
    import torch.distributed as dist
    from megatron.core.tensor_parallel import mappings

    patches.apply("current_device_is_cpu")
    patches.apply("uneven_gather_on_cpu")
    gather: Any = mappings._gather_along_first_dim
    rank, world = dist.get_rank(), dist.get_world_size()
    rows = torch.full((rank + 1, 2), float(rank))
    try:
        call = gather if patched else gather.__wrapped__
        return call(rows, dist.group.WORLD, [n + 1 for n in range(world)])[:, 0].tolist()
    except RuntimeError as error:
        return str(error)


@pytest.mark.ranks
def test_uneven_gather(ranks: RankPool) -> None:
    if patches.has_gpu():
        pytest.skip("there is a GPU")
    assert ranks.run(2, gathered, True) == [[0.0, 1.0, 1.0]] * 2
    stock = ranks.run(2, gathered, False)
    assert all(isinstance(said, str) for said in stock), "the defect is gone: drop the patch"
