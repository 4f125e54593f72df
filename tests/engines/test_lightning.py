"""Lightning's DeepSpeedStrategy resumes on other ranks and at another stage, by the config key
alone."""

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

import megatron_ucp as ucp
from tests.engines.canonical import differences
from tests.engines.model import GLOBAL_BATCH
from tests.engines.trainer_jobs import ON
from tests.ranks import RankPool

BATCHES = 6  # of an epoch


def fit(
    folder: str,
    zero: int,
    steps: int,
    save_at: int | None = None,
    resume: str | None = None,
    seed: int = 1,
    config: Mapping[str, Any] = ON,
    fault: str = "",
) -> dict[str, Any]:
    """Trains up to step `steps`; saves once at step `save_at`, or begins with `resume`."""
    import deepspeed
    import lightning
    from lightning.pytorch.callbacks import Callback, ModelCheckpoint

    from tests.engines.lightning_parts import Module, OnCpu, Watch

    world = torch.distributed.get_world_size()
    stock = deepspeed.initialize
    ucp.install()
    module, watch = Module(seed), Watch(fault)
    callbacks: list[Callback] = [watch]
    if save_at:
        callbacks.append(
            ModelCheckpoint(folder, "{step}", every_n_train_steps=save_at, save_top_k=-1)
        )
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=world,
        strategy=OnCpu(
            config={
                "train_micro_batch_size_per_gpu": GLOBAL_BATCH // world,
                "zero_allow_untested_optimizer": True,
                "zero_optimization": {"stage": zero, "stage3_param_persistence_threshold": 0},
                **config,
            }
        ),
        max_steps=steps,
        use_distributed_sampler=False,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=bool(save_at),
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    loader = torch.utils.data.DataLoader(range(BATCHES), batch_size=1)  # type: ignore[arg-type]
    try:
        trainer.fit(module, loader, ckpt_path=resume)
    finally:
        deepspeed.initialize = stock
    ends = (trainer.global_step, trainer.current_epoch)
    return watch.found | {"losses": module.losses, "samples": module.samples, "ends": ends}


def refused(**arguments: Any) -> str:
    """The error of a run that has to fail. On one rank only: others would wait."""
    try:
        fit(**arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "it was not refused"


# ------------------------------------------------ tests


pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(  # found and not imported: that takes seconds of every collection
        find_spec("lightning") is None, reason="lightning is not installed"
    ),
]
JOB = fit
SAVED_AT, STEPS = 4, 8  # in the middle of the first epoch, and in the second one


@pytest.fixture(scope="module")
def trained(ranks: RankPool, tmp_checkpoints: Path) -> tuple[str, dict[str, Any]]:
    """The checkpoint of two ranks at ZeRO-2 which went on to their end, and what rank 0 saw."""
    folder = tmp_checkpoints / "lightning"
    found = ranks.run(2, JOB, str(folder), zero=2, steps=STEPS, save_at=SAVED_AT)
    return str(folder / f"step={SAVED_AT}.ckpt"), found[0]


def check_begun(source: dict[str, Any], found: list[dict[str, Any]]) -> None:
    """Every rank went on where the run was saved, with its states."""
    want, begun = source["saved"], source["begin"]
    assert len(differences(want["states"], begun["states"])) > 10
    for rank in found:
        have = rank["begin"]
        assert differences(want["states"], have["states"]) == []
        # Lightning's own way: the data of the epoch from its beginning, for the batches that are
        # left
        taken = [rank["samples"][step] for step in range(SAVED_AT, STEPS)]
        assert taken == [0, 1, 0, 1]
        # step, epoch and a callback's own state; the loops' counters of batches
        assert have["counters"] == want["counters"] == (SAVED_AT, 0, SAVED_AT)
        assert have["batches"] == want["batches"] != begun["batches"]
        assert rank["ends"] == source["ends"]


@pytest.mark.parametrize(("world", "zero"), [(4, 3), (1, 1), (2, 2)])
def test_it_resumes_on_another_mesh(
    ranks: RankPool, trained: tuple[str, dict[str, Any]], tmp_path: Path, world: int, zero: int
) -> None:
    checkpoint, source = trained
    found = ranks.run(world, JOB, str(tmp_path), zero, STEPS, resume=checkpoint, seed=5)
    check_begun(source, found)
    losses, steps = found[0]["losses"], range(SAVED_AT, STEPS)
    assert [*losses] == [*steps]
    assert max(abs(losses[step] - source["losses"][step]) for step in steps) <= 1e-5


def test_a_planted_fault_is_seen(
    ranks: RankPool, trained: tuple[str, dict[str, Any]], tmp_path: Path
) -> None:
    checkpoint, source = trained
    options = {"resume": checkpoint, "fault": "one moment"}
    found = ranks.run(1, JOB, str(tmp_path), 1, STEPS, **options)
    with pytest.raises(AssertionError, match="exp_avg"):
        check_begun(source, found)


def test_stock_deepspeed_refuses_the_same_resume(
    ranks: RankPool, trained: tuple[str, dict[str, Any]], tmp_path: Path
) -> None:
    arguments = {"folder": str(tmp_path), "zero": 2, "steps": STEPS, "resume": trained[0]}
    job = refused
    (said,) = ranks.run(1, job, config={}, **arguments)
    assert said.startswith("ZeRORuntimeException"), said
