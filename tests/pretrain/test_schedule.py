"""The schedule against closed formulas and against megatron-core's own scheduler."""

import dataclasses
import math
from types import SimpleNamespace

import pytest

from megatron_ucp.errors import StateMismatchError, UsageError
from pretrain.schedule import STYLES, Scheduler, Settings

BASE = Settings(
    max_lr=1e-3,
    min_lr=1e-4,
    init_lr=0.0,
    lr_warmup_steps=80,
    lr_decay_steps=800,
    lr_decay_style="cosine",
    weight_decay=0.1,
    wsd_decay_steps=200,
)


def make(style: str, **more: object) -> Settings:
    return dataclasses.replace(BASE, lr_decay_style=style, **more)  # type: ignore[arg-type]


def groups() -> SimpleNamespace:
    return SimpleNamespace(
        param_groups=[{"lr": 0.0, "weight_decay": 0.1}, {"lr": 0.0, "weight_decay": 0.0}]
    )


@pytest.mark.parametrize("style", STYLES)
def test_warm_up(style: str) -> None:
    assert [make(style).lr(n) for n in (0, 20, 80)] == pytest.approx([0.0, 2.5e-4, 1e-3])


def test_closed_formulas() -> None:
    middle = 80 + 720 // 4
    assert make("linear").lr(middle) == pytest.approx(1e-4 + 0.75 * 9e-4)
    assert make("cosine").lr(middle) == pytest.approx(
        1e-4 + 0.5 * (1 + math.cos(math.pi / 4)) * 9e-4
    )
    assert make("constant").lr(10**6) == 1e-3
    assert make("inverse-square-root").lr(320) == pytest.approx(5e-4)
    assert all(
        make(style).lr(801) == 1e-4 for style in ("linear", "cosine", "WSD", "inverse-square-root")
    )
    wsd = {
        style: make("WSD", lr_wsd_decay_style=style)
        for style in ("linear", "cosine", "exponential", "minus_sqrt")
    }
    assert all(
        settings.lr(600) == 1e-3 and settings.lr(800) == pytest.approx(1e-4)
        for settings in wsd.values()
    )
    shares = {
        "linear": 0.75,
        "cosine": 0.5 * (1 + math.cos(math.pi / 4)),
        "exponential": 2 * 0.5**0.25 - 1,
        "minus_sqrt": 0.5,
    }
    for style, share in shares.items():
        assert wsd[style].lr(650) == pytest.approx(1e-4 + share * 9e-4)


@pytest.mark.parametrize("style", STYLES)
def test_as_megatron_core(style: str) -> None:
    scheduler = pytest.importorskip("megatron.core.optimizer_param_scheduler")
    theirs = scheduler.OptimizerParamScheduler(
        groups(),
        0.0,
        1e-3,
        1e-4,
        80,
        800,
        style,
        0.1,
        0.1,
        800,
        "constant",
        wsd_decay_steps=200,
        lr_wsd_decay_style="exponential",
    )
    mine = Scheduler(groups(), make(style))
    for _ in range(110):
        theirs.step(8)
        mine.step(8)
        assert mine.get_last_lr()[0] == pytest.approx(
            theirs.optimizer.param_groups[0]["lr"], rel=1e-12
        )


def test_groups_without_decay_stay_without() -> None:
    scheduler = Scheduler(groups(), BASE)
    scheduler.step(8)
    assert [group["weight_decay"] for group in scheduler.optimizer.param_groups] == [0.1, 0.0]


def test_samples_and_not_iterations() -> None:
    """Ten steps of 8 samples and five of 16 lead to the same rate."""
    small, large = Scheduler(groups(), BASE), Scheduler(groups(), BASE)
    for _ in range(10):
        small.step(8)
    for _ in range(5):
        large.step(16)
    assert small.get_last_lr() == large.get_last_lr()


def test_state_comes_back() -> None:
    first = Scheduler(groups(), BASE)
    first.step(320)
    second = Scheduler(groups(), BASE)
    second.load_state_dict(first.state_dict())
    assert second.state_dict() == first.state_dict() and second.get_last_lr() == first.get_last_lr()


def test_changed_settings() -> None:
    saved = Scheduler(groups(), BASE)
    saved.step(320)
    other = dataclasses.replace(BASE, max_lr=2e-3, lr_decay_steps=1600)
    with pytest.raises(StateMismatchError, match="--lr, --lr-decay-iters") as caught:
        Scheduler(groups(), other).load_state_dict(saved.state_dict())
    assert "max_lr=0.001" in str(caught.value) and "--use-checkpoint-opt_param-scheduler" in str(
        caught.value
    )
    mine, theirs = (
        Scheduler(groups(), other, override=True),
        Scheduler(groups(), other, use_checkpoint=True),
    )
    for scheduler in (mine, theirs):
        scheduler.load_state_dict(saved.state_dict())
        assert scheduler.num_steps == 320
    assert mine.get_last_lr()[0] == other.lr(320) != theirs.get_last_lr()[0] == BASE.lr(320)


@pytest.mark.parametrize(
    "change",
    [
        {"min_lr": 2e-3},
        {"lr_warmup_steps": 800},
        {"lr_decay_style": "step"},
        {"init_lr": 1.0},
        {"lr_decay_style": "WSD", "wsd_decay_steps": None},
        {"lr_decay_style": "WSD", "wsd_decay_steps": 801},
    ],
)
def test_settings_that_are_no_schedule(change: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        dataclasses.replace(BASE, **change)  # type: ignore[arg-type]
