"""Client states of two checkpoints, compared in type and bits."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import megatron_ucp as ucp
from tests.reshard import paper
from tests.reshard.plain import SHAPES, edited, target

MODEL = paper.plain_model(SHAPES)
TABLE = {"rows": torch.arange(6.0).view(2, 3), "best": np.float64(0.5)}
OLD: dict[Any, Any] = {"epoch": 3, "table": TABLE, 7: [1]}


def _with_client(folder: Path, client: dict[Any, Any]) -> Path:
    def change(name: str, tree: dict[Any, Any]) -> None:
        if name.endswith("model_states.pt"):
            tree.update(client)

    return edited(paper.write(MODEL, folder / "step7"), change)


def _whats(a: Path, b: Path) -> list[str]:
    return [found.what for found in ucp.diff(a, b)]


def test_the_same_on_another_mesh_is_no_difference(tmp_path: Path) -> None:
    source = _with_client(tmp_path / "source", OLD)
    assert ucp.diff(source, _with_client(tmp_path / "again", OLD)) == []
    ucp.convert(source, tmp_path / "out", target=target(dp=3, zero=3))
    ucp.convert(source, tmp_path / "universal", "universal")
    assert ucp.diff(source, tmp_path / "out") == []
    assert ucp.diff(tmp_path / "universal", source) == []


@pytest.mark.parametrize(
    ("key", "value", "place"),
    [
        ("epoch", 4, ""),
        ("epoch", 3.0, ""),
        ("epoch", np.int64(3), ""),
        ("table", {**TABLE, "rows": torch.arange(6.0).view(3, 2)}, "['rows']"),
        ("table", {**TABLE, "rows": torch.tensor([[0.0, 1, 2], [3, 4, 6]])}, "['rows']"),
        ("table", {**TABLE, "best": 0.5}, "['best']"),
        (7, (1,), ""),
        (7, [2], "[0]"),
        ("more", None, ""),
        ("iteration", 7, ""),
    ],
)
def test_another_value_is_named(tmp_path: Path, key: Any, value: Any, place: str) -> None:
    source = _with_client(tmp_path / "source", OLD)
    other = _with_client(tmp_path / "other", {**OLD, key: value})
    (found,) = ucp.diff(source, other)
    assert found.what == f"client_state[{key!r}]{place}" and found.parameter == ""
    assert (found.a == "missing") is (key not in OLD) and found.a != found.b


def test_the_order_of_a_dictionary_is_no_difference(tmp_path: Path) -> None:
    turned: dict[Any, Any] = dict(reversed(OLD.items()))
    a, b = _with_client(tmp_path / "a", OLD), _with_client(tmp_path / "b", turned)
    assert ucp.diff(a, b) == []


def test_what_megatron_keeps_in_its_own_place(tmp_path: Path) -> None:
    """Its version and counters come and go with its format; the program's own keys do not."""
    megatron = {"args": {"seed": 1}, "iteration": 7, "checkpoint_version": 3.0}
    a = _with_client(tmp_path / "a", {"iteration": 6, "mine": 1})
    b = _with_client(tmp_path / "b", {**megatron, "mine": 2})
    assert _whats(a, b) == ["client_state['mine']"]


def test_a_value_that_holds_itself(tmp_path: Path) -> None:
    """Is no crash."""
    loop: list[Any] = []
    loop.append(loop)
    a, b = (_with_client(tmp_path / name, {"loop": loop}) for name in "ab")
    (found,) = ucp.diff(a, b)
    assert found.what == "client_state['loop'], which can't be compared"
