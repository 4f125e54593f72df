"""Checkpoints that stock DeepSpeed wrote, with nothing of this package in them, through the
training program."""

from pathlib import Path
from typing import Any

import pytest
import torch

import megatron_ucp as ucp
from tests.pretrain import jobs
from tests.pretrain.common import BATCH, GPT, LLAMA, QUIET, RATES, command, mesh, stdlib
from tests.ranks import RankPool

JOB = jobs.run
SAVED, ITERATIONS = 3, 6
MODELS = {"llama": LLAMA, "gpt": GPT}


def argv(family: str, *more: list[str] | str) -> list[str]:
    return command(
        MODELS[family], BATCH, RATES, QUIET, stdlib(), f"--train-iters {ITERATIONS}", *more
    )


class Stock:
    """Saves once per (family, ZeRO stage), at tp=2, dp=2; the losses of the run that went on."""

    def __init__(self, ranks: RankPool, folder: Path) -> None:
        self.ranks, self.folder = ranks, folder
        self.losses: dict[str, list[float]] = {}

    def get(self, family: str, zero: int) -> Path:
        if family not in self.losses:
            self.losses[family] = self.ranks.run(4, JOB, argv(family, mesh(2, 1)))[-1]["losses"]
        folder = self.folder / f"stock_{family}_{zero}"
        if not folder.exists():
            self.ranks.run(
                4,
                jobs.save_with_stock,
                argv(family, mesh(2, zero)),
                str(folder),
                SAVED,
            )
        return folder


@pytest.fixture(scope="module")
def stock(ranks: RankPool, tmp_checkpoints: Path) -> Stock:
    return Stock(ranks, tmp_checkpoints)


def test_nothing_of_ours_is_in_it(stock: Stock) -> None:
    folder = stock.get("llama", 1) / f"global_step{SAVED}"
    assert not list(folder.glob("ucp_*"))
    # a tag is whole whether or not anybody says how its parameters are cut
    assert ucp.newest_whole(folder.parent).folder.name == folder.name
    state = torch.load(folder / "mp_rank_01_model_states.pt", weights_only=False)
    assert (
        not {"iteration", "consumed_train_samples", "args", "universal_checkpoint_info"}
        & state.keys()
    )


def check(stock: Stock, family: str, result: dict[str, Any]) -> None:
    assert "error" not in result, result["text"]
    assert (result["first"], result["iteration"], result["consumed"]) == (
        SAVED,
        ITERATIONS,
        ITERATIONS * 8,
    )
    assert result["losses"] == pytest.approx(stock.losses[family][SAVED:], rel=0, abs=1e-5)
    assert "iteration 3 and 24 consumed samples are its own counts" in result["said"]


@pytest.mark.parametrize(
    ("family", "zero", "world", "tp", "to"),
    [
        ("llama", 1, 4, 2, 1),
        ("llama", 1, 4, 4, 3),
        ("llama", 3, 2, 1, 2),
        ("gpt", 1, 1, 1, 3),
    ],
)
def test_it_resumes(stock: Stock, family: str, zero: int, world: int, tp: int, to: int) -> None:
    load = ["--load", str(stock.get(family, zero)), "--universal-checkpoint"]
    check(stock, family, stock.ranks.run(world, JOB, argv(family, mesh(tp, to), load))[-1])


@pytest.mark.parametrize(
    ("flags", "error", "says"),
    [
        (["--ffn-hidden-size", "128"], "ModelMismatchError", "linear_fc"),
        (["--use-checkpoint-args"], "UsageError", "the checkpoint holds no arguments"),
        (["--num-layers", "3"], "ModelMismatchError", "decoder.layers.2"),
    ],
)
def test_flags_of_another_model(stock: Stock, flags: list[str], error: str, says: str) -> None:
    # the tag by its number: without it, a tag that does not fit is passed over for an older one
    load = command(f"--load {stock.get('llama', 1)} --universal-checkpoint --ckpt-step {SAVED}")
    for result in stock.ranks.run(2, JOB, argv("llama", mesh(2, 1), load, flags)):
        assert result.get("error") == error and says in result["text"], result


@pytest.mark.parametrize("schedule", [None, {"base_lrs": [0.005, 0.005], "last_epoch": 3}])
def test_a_schedule_that_does_not_count_samples(
    stock: Stock, tmp_path: Path, schedule: Any
) -> None:
    """The flags' schedule, which is a function of the consumed samples, takes its place."""
    import shutil

    folder = tmp_path / "copy"
    shutil.copytree(stock.get("llama", 1), folder)
    for path in folder.glob("*/*model_states.pt"):
        torch.save({**torch.load(path, weights_only=False), "lr_scheduler": schedule}, path)
    result = stock.ranks.run(
        1, JOB, argv("llama", mesh(1, 1), f"--load {folder} --universal-checkpoint")
    )[0]
    check(stock, "llama", result)
    assert "no schedule that counts samples" in result["said"]
