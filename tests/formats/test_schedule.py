"""Two spellings of one schedule, and states that are none."""

from typing import Any

import pytest

from megatron_ucp.formats.megatron.arguments import one_spelling

OURS: dict[str, Any] = {  # as `pretrain_gpt.py` keeps it under DeepSpeed
    "num_steps": 32,
    "max_lr": 5e-3,
    "min_lr": 5e-4,
    "init_lr": 0.0,
    "lr_warmup_steps": 16,
    "lr_decay_steps": 64,
    "lr_decay_style": "cosine",
    "weight_decay": 0.01,
    "wsd_decay_steps": None,
    "lr_wsd_decay_style": "exponential",
}
MEGATRON: dict[str, Any] = {  # as megatron-core keeps it
    "max_lr": 5e-3,
    "lr_warmup_steps": 16,
    "num_steps": 32,
    "lr_decay_style": "cosine",
    "lr_decay_steps": 64,
    "min_lr": 5e-4,
    "start_wd": 0.01,
    "end_wd": 0.01,
    "wd_incr_style": "constant",
    "wd_incr_steps": 64,
}


def same(ours: dict[str, Any], megatrons: dict[str, Any]) -> bool:
    return one_spelling({**OURS, **ours}) == one_spelling({**MEGATRON, **megatrons})


def test_one_schedule_in_two_spellings() -> None:
    assert OURS != MEGATRON and same({}, {})
    assert same({"init_lr": 1e-4}, {}), "the warm-up is over"
    assert same({"lr_wsd_decay_style": "linear"}, {}), "it is no WSD"
    assert same({"num_steps": 8}, {"num_steps": 8})
    assert one_spelling(OURS) is not OURS and "start_wd" not in OURS


@pytest.mark.parametrize(
    ("ours", "megatrons"),
    [
        ({"max_lr": 6e-3}, {}),
        ({"num_steps": 40}, {}),
        ({"lr_decay_steps": 65}, {}),
        ({"lr_warmup_steps": 8}, {}),
        ({"lr_decay_style": "linear"}, {}),
        ({"weight_decay": 0.1}, {}),
        ({}, {"end_wd": 0.1}),
        ({}, {"start_wd": 0.1, "end_wd": 0.1}),
        ({"num_steps": 8, "init_lr": 1e-4}, {"num_steps": 8}),  # in the warm-up
        ({"num_steps": 16, "init_lr": 1e-4}, {"num_steps": 16}),
        (
            {"lr_decay_style": "WSD", "wsd_decay_steps": 8},
            {"lr_decay_style": "WSD"},  # whose decay nobody knows
        ),
        ({"something": 1}, {}),
    ],
)
def test_what_differs_stays_a_difference(ours: dict[str, Any], megatrons: dict[str, Any]) -> None:
    assert not same(ours, megatrons)


def test_other_schedulers_are_as_they_were() -> None:
    state = {"base_lrs": [1.0], "last_epoch": 3, "init_lr": 0.0, "lr_warmup_steps": 0}
    assert one_spelling(state) is state and one_spelling(None) is None
    assert one_spelling(state) != one_spelling(OURS)
