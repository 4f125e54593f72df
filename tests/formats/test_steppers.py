"""By which rule DeepSpeed's own Adams stepped, as the config in stock files says."""

from typing import Any

import pytest

from megatron_ucp.core.manifest import ParamGroup
from megatron_ucp.core.values import InertObject
from megatron_ucp.formats.deepspeed.config import DeepSpeedConfig

FUSED = {"lr": 1e-3, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}


def _rule(settings: Any, kind: Any, optimizer: str = "", **params: Any) -> str:
    config = {"optimizer": {"type": kind, "params": params}}
    (group,) = DeepSpeedConfig(config).with_rules([ParamGroup(settings, optimizer)])
    return group.steps_as


@pytest.mark.parametrize(
    ("kind", "params", "rule"),
    [
        ("Adam", {}, "AdamW"),
        ("adam", {"adam_w_mode": True, "eps": 1e-8}, "AdamW"),
        ("Adam", {"adam_w_mode": False}, "Adam"),
        ("Adam", {"adam_w_mode": False, "torch_adam": True}, "Adam"),
        ("AdamW", {"adam_w_mode": False}, "AdamW"),
        ("Muon", {"adam_w_mode": False}, "Adam"),
        ("Lion", {}, ""),
        (None, {}, ""),
        (InertObject("x.Y"), {}, ""),
    ],
)
def test_the_config_says_which_adam_it_was(kind: Any, params: Any, rule: str) -> None:
    assert _rule(FUSED, kind, **params) == rule


def test_only_where_the_groups_leave_it_open() -> None:
    assert _rule(FUSED | {"decoupled_weight_decay": False, "amsgrad": False}, "AdamW") == ""
    assert _rule(FUSED, "AdamW", eps=1e-6) == ""  # the program brought its own optimizer
    assert _rule({"lr": 1e-3, "betas": (0.9, 0.99)}, "AdamW") == ""  # a Lion
    assert _rule(FUSED | {"use_muon": True}, "Muon") == ""
    assert _rule(FUSED, "AdamW", "optimi.Lion") == ""


@pytest.mark.parametrize("config", [None, {}, {"optimizer": None}, {"optimizer": {"params": 3}}])
def test_a_config_that_names_none(config: Any) -> None:
    groups = (ParamGroup(FUSED),)
    assert DeepSpeedConfig(config).with_rules(groups) == groups
