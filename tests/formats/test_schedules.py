"""What schedulers keep per parameter group, at every depth of their states; two spellings of one
schedule, and states that are none."""

from collections import OrderedDict
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_ucp.core.mesh import on_stage
from megatron_ucp.formats.deepspeed.extras import _joined_scheduler
from megatron_ucp.formats.megatron.arguments import one_spelling
from megatron_ucp.formats.schedules import counted_groups, without_groups
from megatron_ucp.reshard.match import scheduler_for


def _inner(*rates: float) -> dict[str, Any]:
    return {"base_lrs": [*rates], "_last_lr": [*rates], "lr_lambdas": [{"a": 1}, None]}


def _joined(*rates: float) -> dict[str, Any]:
    return {
        "_schedulers": [_inner(*rates), {"base_lrs": [*rates], "after": _inner(*rates)}],
        "_milestones": [3, 1],
        "_last_lr": [*rates],
    }


def _rates(state: Any) -> list[Any]:
    return list(counted_groups(state))


def test_groups_are_reordered_and_split_at_every_depth() -> None:
    found = _joined(0.1, 0.2)
    swapped = scheduler_for(found, [1, 0, 1], 2)
    assert _rates(swapped) == [[0.2, 0.1, 0.2]] * 3 and swapped["_last_lr"] == [0.2, 0.1, 0.2]
    assert swapped["_schedulers"][0]["lr_lambdas"] == [None, {"a": 1}, None]
    assert found == _joined(0.1, 0.2)  # is the checkpoint's
    assert swapped["_milestones"] is found["_milestones"]


def test_a_group_of_its_own_has_what_the_target_says() -> None:
    found, here = _joined(0.1, 0.2), _joined(0.5, 0.6, 0.7)
    here["_schedulers"][0]["lr_lambdas"] = [None] * 3
    here["_schedulers"][1]["after"]["lr_lambdas"] = [None] * 3
    assert _rates(scheduler_for(found, [1, None, 0], 2, here)) == [[0.2, 0.6, 0.1]] * 3
    del here["_schedulers"][1]  # another scheduler: nothing is guessed
    assert scheduler_for(found, [1, None, 0], 2, here) is found


def test_what_is_per_group_is_not_compared_where_groups_differ() -> None:
    assert without_groups(_joined(0.1, 0.2)) == without_groups(_joined(0.3, 0.4))
    other = _joined(0.1, 0.2) | {"_milestones": [4, 1]}
    assert without_groups(other) != without_groups(_joined(0.1, 0.2))
    assert without_groups(None) is None


@pytest.mark.parametrize("kind", [dict, OrderedDict])
def test_shared_parts_are_walked_once(kind: Any) -> None:
    state = kind(_inner(0.1, 0.2))
    for _ in range(200):
        state = kind({"one": state, "other": state, "more": [state, state]})
    swapped = scheduler_for(state, [1, 0], 2)
    assert type(swapped) is kind and swapped["one"] is swapped["other"]
    for _ in range(200):
        swapped = swapped["one"]
    assert swapped["base_lrs"] == [0.2, 0.1]


def test_stages_of_a_pipeline_are_joined_at_every_depth() -> None:
    trees = {"first": {"lr_scheduler": _joined(0.1, 0.2)}, "last": {"lr_scheduler": _joined(0.3)}}
    groups = [SimpleNamespace(groups=(1, 2)), SimpleNamespace(groups=(1,))]
    source: Any = SimpleNamespace(
        meta=trees["first"],
        mesh=SimpleNamespace(pp=2),
        first_of_stages=list(trees),
        places=[on_stage(0), on_stage(1)],
        stages=groups,
        tree=trees.__getitem__,
    )
    found = _joined_scheduler(source)
    assert _rates(found) == [[0.1, 0.2, 0.3]] * 3 and found["_last_lr"] == [0.1, 0.2, 0.3]


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
