"""Checkpoints that unmodified Megatron-LM wrote, loaded into megatron-core's stack on other meshes:
the next three losses are those of the run that went on."""

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import megatron_ucp as ucp
from tests.engines.megatron_jobs import Mcore
from tests.formats.megatron_files import GOLDEN, GOLDEN_LATER, LATER
from tests.ranks import RankPool

SEQUENCE, VOCAB, SAMPLES = 16, 64, 4
MOE: dict[str, Any] = {"family": "mixtral"}
CASES: dict[str, tuple[str, int, Mcore]] = {
    "named": ("td_full_tp2dp2", 4, Mcore(pp=2, vpp=2)),
    "named-plain": ("td_full_tp2dp2", 1, Mcore(distributed=False)),
    "flat": ("td_dpr_pp2vpp2", 4, Mcore(tp=2, overlap=True, gather=True, bucket=5000)),
    "mixture": ("td_full_moe_ep2", 4, Mcore(ep=4, **MOE)),
    "bf16": ("td_dpr_dp2_bf16", 4, Mcore(tp=2, dtype="bf16")),
    # of later versions, whichever this environment has
    "0.18 in bf16": ("v018_dpr_pp2dp2_bf16", 4, Mcore(tp=2, dtype="bf16")),
    "0.19": ("v019_dpr_tp2dp2", 4, Mcore(pp=2)),
    "0.19 mixture": ("v019_full_moe_ep2", 4, Mcore(pp=2, ep=2, **MOE)),
}


@dataclass
class Run:
    """A stack of the model that the folders hold, not loaded yet."""

    stack: Any
    optimizer: Any
    scheduler: Any
    handle: Any


def start(setup: Mcore) -> Run:
    from pretrain.mcore import models
    from pretrain.mcore.chunks import Buffers, Stages, build
    from tests.engines.megatron_jobs import make_optimizer

    models.start(setup.tp, 7, setup.pp, setup.ep, setup.etp, vpp=setup.vpp, deepspeed=False)
    experts = setup.model.experts and replace(setup.model.experts, ffn=64)
    sizes = {"hidden": 32, "ffn": 64, "head_dim": 8, "vocab": VOCAB, "true_vocab": VOCAB}
    config = replace(setup.model, positions=SEQUENCE, experts=experts, **sizes)
    buffers = Buffers(setup.distributed, setup.overlap, setup.gather, setup.bucket)
    stack = build(config, Stages(setup.pp, setup.vpp), buffers)
    optimizer, scheduler = make_optimizer(replace(setup, eps=1e-8), stack, use_checkpoint=True)
    handle = ucp.attach_megatron(stack.chunks, optimizer, scheduler)
    return Run(stack, optimizer, scheduler, handle)


def go_on(run: Run) -> list[float]:
    """The losses of iterations 4 to 6."""
    from pretrain.mcore.chunks import run_batch

    losses = []
    for iteration in range(3, 6):
        losses.append(run_batch(run.stack, rows(iteration), run.optimizer))
        run.optimizer.step()
        run.scheduler.step(SAMPLES)
    return losses


def next_losses(setup: Mcore, folder: str, plant: bool = False) -> tuple[list[float], int, int]:
    """Of iterations 4 to 6 after a load; the iteration and samples that it gave."""
    from pretrain.mcore import models

    run = start(setup)
    ucp.load(run.handle, folder)
    position = run.handle.iteration, run.handle.consumed_samples
    if plant:
        for group in run.optimizer.param_groups:
            group["lr"] *= 2
    losses = go_on(run)
    models.stop()
    return losses, *position


def rows(iteration: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """This rank's micro batches of an iteration of the runs that wrote the folders."""
    from megatron.core import parallel_state

    first = parallel_state.get_data_parallel_rank()
    out = []
    for sample in range(first, SAMPLES, parallel_state.get_data_parallel_world_size()):
        generator = torch.Generator().manual_seed(1000 * iteration + sample)
        ids = torch.randint(0, VOCAB, (1, SEQUENCE + 1), generator=generator)
        out.append((ids[:, :-1].contiguous(), ids[:, 1:].contiguous()))
    return out


def folder_of(case: str) -> Path:
    return (GOLDEN_LATER if case in LATER else GOLDEN) / case


def expected(case: str) -> list[float]:
    text = folder_of(case) / "next_losses.txt"
    return [
        float(found) for found in re.findall(r"(?:loss |^)(\d+\.\d{7})", text.read_text(), re.M)
    ]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.cases()
def test_stock_files_go_on(ranks: RankPool, case: str) -> None:
    name, world, setup = CASES[case]
    job = next_losses
    want = expected(name)
    assert len(want) == 3
    for losses, iteration, samples in ranks.run(world, job, setup, str(folder_of(name))):
        assert (iteration, samples) == (3, 12)
        allowed = 5e-3 if setup.dtype == "bf16" else 1e-5
        assert losses == pytest.approx(want, rel=0, abs=allowed)


def test_a_wrong_rate_shows(ranks: RankPool) -> None:
    name, _, setup = CASES["named-plain"]
    job = next_losses
    ((losses, *_),) = ranks.run(1, job, setup, str(GOLDEN / name), plant=True)
    assert losses != pytest.approx(expected(name), rel=0, abs=1e-3)
