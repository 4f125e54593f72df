"""The short ways of a save while training waits: each finds what the long way finds."""

import random
from collections import OrderedDict, deque
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import load

from megatron_ucp.engines import values
from megatron_ucp.engines.live import params_of, parts_of
from megatron_ucp.engines.run_state import DrawnState, RunState, file_name, states
from megatron_ucp.engines.values import (
    LiveValues,
    SavedValue,
    is_plain,
    refuse_strange,
    strange,
    unreadable,
)
from megatron_ucp.errors import UnsupportedError
from tests.engines.value_kinds import Level, Range


class _Text(str):
    """A class of somebody's own."""


def _nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


def _in_itself() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


_ATOMS = [None, True, False, 0, -1, 2**63 - 1, -(2**63) + 1, 0.5, -0.0, float("nan"), "", "lr"]
_NOT_PLAIN: dict[str, Any] = {
    "a large number": 2**63,
    "a long text": "a" * 1001,
    "a text of others than ASCII": "\ud800",
    "bytes": b"a",
    "a key of bytes": {b"a": 1},
    "a class of text": [_Text("a")],
    "a member of an enum": {"level": Level.LOW},
    "a named tuple": Range(0.0, 1.0),
    "an OrderedDict": OrderedDict(a=1),
    "a deque": deque([1]),
    "a set": {1},
    "a number of numpy": np.float64(0.5),
    "a tensor": {"lr": torch.tensor(0.5)},
    "a function": print,
    "many values": [0] * 1001,
    "many levels": _nested(9),
    "a list that holds itself": _in_itself(),
}


def _tree(dice: random.Random, levels: int) -> Any:
    kind = dice.choice(("atom", "list", "tuple", "dict")) if levels else "atom"
    if kind == "atom":
        return dice.choice(_ATOMS)
    parts = [_tree(dice, levels - 1) for _ in range(dice.randrange(4))]
    if kind == "dict":
        return {dice.choice(_ATOMS): part for part in parts}
    return tuple(parts) if kind == "tuple" else parts


def test_what_is_plain_is_refused_by_no_other_check() -> None:
    dice = random.Random(5)
    for _ in range(500):
        value = _tree(dice, 4)
        assert is_plain(value), value
        assert not [*strange(value, "value", live=False)], value
        assert unreadable(value) == "", value


@pytest.mark.parametrize("what", _NOT_PLAIN)
def test_what_is_not_plain_is_looked_through(what: str) -> None:
    assert not is_plain(_NOT_PLAIN[what])
    assert not is_plain({"deep": (_NOT_PLAIN[what],)})


def test_no_pickle_is_made_of_plain_values_alone() -> None:
    with mock.patch.object(values, "unreadable", return_value="asked") as asked:
        refuse_strange([SavedValue("group", {"lr": 0.1, "betas": (0.9, 0.99)})])
        asked.assert_not_called()
        with pytest.raises(UnsupportedError, match="asked"):
            refuse_strange([SavedValue("group", {"lr": 0.1, "kept": b"a"})])


def _model() -> torch.nn.Module:
    shared = torch.nn.Linear(3, 3)
    model = torch.nn.ModuleDict(
        {
            "first": torch.nn.Sequential(shared, torch.nn.BatchNorm1d(3), shared),
            "second": torch.nn.Linear(3, 3, bias=False),
            "again": shared,
        }
    )
    model["second"].weight = shared.weight
    model.register_module("nothing", None)
    return model


def test_the_short_walk_finds_what_the_walk_of_torch_finds() -> None:
    model = _model()
    assert {*parts_of([model])} == {*model.modules()}
    assert len(parts_of([model, model])) == len([*model.modules()])
    assert {*map(id, params_of(parts_of([model])))} == {*map(id, model.parameters())}
    assert len(params_of(parts_of([model]))) == len([*model.parameters()])
    model["second"].add_module("new", torch.nn.Linear(1, 1))
    assert {*parts_of([model])} == {*model.modules()}


def test_random_states_are_those_of_the_moment_whenever_they_are_written() -> None:
    own = LiveValues({}, {}, None, False, {})
    before = states()
    state = RunState.of_ranks(lambda: ({}, own), lambda: DrawnState.now(None, True), Path("tag"))
    torch.rand(3), np.random.rand(3), random.random()
    after, found = states(), load(state.files[file_name(0)])
    assert found.keys() == before.keys()
    assert all(torch.equal(found[name], before[name]) for name in ("torch", "numpy", "python"))
    assert not all(torch.equal(found[name], after[name]) for name in ("torch", "numpy", "python"))
    without = RunState.of_ranks(lambda: ({}, own), lambda: DrawnState.now(None, False), Path("tag"))
    assert without.files == {}
