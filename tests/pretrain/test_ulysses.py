"""Ranks that share sequences: the losses are those of ranks that don't, and checkpoints resume on
any other number of them."""

import re
from pathlib import Path
from typing import Any

import pytest

from tests.pretrain import jobs
from tests.pretrain.common import GPT, LLAMA, QUIET, RATES, command, stdlib
from tests.pretrain.source import JOB
from tests.ranks import Job, RankPool

pytestmark = pytest.mark.ranks
BATCH = ["--global-batch-size", "8", "--micro-batch-size", "2"]


def run(
    ranks: RankPool, world: int, sp: int, zero: int, *more: str, model: Any = GPT, job: Job = JOB
) -> dict[str, Any]:
    flags = ["--ds-sequence-parallel-size", str(sp), "--zero-stage", str(zero)]
    words = command(model, BATCH, RATES, QUIET, stdlib(), flags, [*more])
    return ranks.run(world, job, words)[-1]


def furthest(one: list[float], other: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("model", [LLAMA, GPT], ids=["llama", "gpt"])
def test_losses_are_those_of_ranks_that_share_nothing(ranks: RankPool, model: list[str]) -> None:
    want = run(ranks, 1, 1, 1, "--train-iters", "6", model=model)["losses"]
    have = run(ranks, 4, 2, 2, "--train-iters", "6", model=model)["losses"]
    assert furthest(want, have) <= 1e-5 and want[0] - want[-1] > 0.3


def norms(found: dict[str, Any]) -> list[str]:
    return re.findall(r"grad norm: ([0-9.]+)", found["said"])


def test_gradients_are_those_of_ranks_that_share_nothing(ranks: RankPool) -> None:
    """Clipping hides a gradient that is too small by a factor: the norms show it."""
    want = norms(run(ranks, 1, 1, 1, "--train-iters", "4"))
    assert len(want) == 4
    for world, sp, zero in ((4, 4, 1), (4, 2, 2), (4, 2, 3), (4, 4, 3)):
        assert norms(run(ranks, world, sp, zero, "--train-iters", "4")) == want, (sp, zero)


def test_a_planted_fault_is_seen(ranks: RankPool) -> None:
    """Rotary embeddings that begin at 0 on every rank."""
    want = run(ranks, 1, 1, 1, "--train-iters", "4", model=LLAMA)["losses"]
    job = jobs.run_unplaced
    have = run(ranks, 2, 2, 1, "--train-iters", "4", model=LLAMA, job=job)["losses"]
    assert furthest(want, have) > 1e-4


def test_resumes(ranks: RankPool, tmp_path: Path) -> None:
    """Other numbers of ranks that share a sequence, other stages; and back to none."""
    save = ["--save", str(tmp_path), "--save-interval", "3", "--train-iters", "6"]
    want = run(ranks, 4, 2, 1, *save)["losses"]
    load = ["--load", str(tmp_path), "--ckpt-step", "3", "--train-iters", "6"]
    other = run(ranks, 2, 2, 1, *load)
    assert other["error"] == "UsageError" and "--universal-checkpoint" in other["text"]
    for world, sp, zero in ((4, 4, 3), (2, 1, 2), (1, 1, 0), (2, 2, 3)):
        found = run(ranks, world, sp, zero, *load, "--universal-checkpoint")
        assert found["first"] == 3 and furthest(found["losses"], want[3:]) <= 1e-5, (world, sp)
    fresh = run(ranks, 4, 4, 3, *load, "--universal-checkpoint", "--no-load-optim")
    assert furthest(fresh["losses"], want[3:]) > 1e-3


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--tensor-model-parallel-size", "2"], "--tensor-model-parallel-size"),
        (["--seq-length", "31"], "--seq-length 31"),
        (["--num-attention-heads", "1", "--kv-channels", "8"], "--num-attention-heads 1"),
        (["--engine", "megatron"], "--engine megatron"),
    ],
)
def test_refused_with_a_message(ranks: RankPool, flags: list[str], says: str) -> None:
    found = run(ranks, 2, 2, 1, "--train-iters", "1", *flags)
    assert found["error"] in ("UsageError", "UnsupportedError") and says in found["text"]
