"""Numbers of files that live objects get are Python's own; by which rule DeepSpeed's own Adams
stepped, as the config in stock files says."""

import struct
from pathlib import PurePosixPath
from typing import Any

import pytest

from megatron_ucp.core.manifest import ParamGroup
from megatron_ucp.core.values import DtypeName, InertObject, VersionName, numpy_scalar
from megatron_ucp.formats.deepspeed.config import DeepSpeedConfig
from megatron_ucp.formats.loss_scale import LossScale
from megatron_ucp.formats.param_groups import number

TEXT = "static".encode("utf-32-le")


@pytest.mark.parametrize(
    ("value", "want"),
    [
        (numpy_scalar("<f8", struct.pack("<d", 1024.0)), 1024.0),
        (numpy_scalar("<f4", struct.pack("<f", 0.5)), 0.5),
        (numpy_scalar("<i8", struct.pack("<q", 3)), 3),
        (numpy_scalar("|b1", b"\1"), True),
        (numpy_scalar("<U6", TEXT), "static"),
        (DtypeName("torch.float16"), "torch.float16"),
        (VersionName("2.13"), "2.13"),
        (PurePosixPath("a/b"), "a/b"),
        (True, True),
        (None, None),
        (2, 2),
        ([1], "<list>"),
    ],
)
def test_a_scalar_is_of_pythons_own_type(value: Any, want: Any) -> None:
    found = number(value)
    assert found == want and type(found) is type(want)


def test_a_loss_scaler_with_numpys_numbers() -> None:
    scale = numpy_scalar("<f8", struct.pack("<d", 256.0))
    stand = InertObject("x.DynamicLossScaler", state={"cur_scale": scale, "cur_iter": 4})
    found = LossScale.pickled(stand)
    assert found.said == {"cur_scale": 256.0, "cur_iter": 4}
    assert type(found.cur_scale) is float


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
