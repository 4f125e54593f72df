"""What stock DeepSpeed did not save is named with its cause, from the config in the files and from
what lies in them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import megatron_ucp as ucp
from megatron_ucp.cli import main
from megatron_ucp.errors import StateMismatchError, UnsupportedError
from megatron_ucp.formats.deepspeed.lost_states import NOT_SAVED
from tests.reshard import paper
from tests.reshard.plain import edited, target

Change = Callable[[dict[str, Any]], None]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """ZeRO-3 on two ranks, in three sub-groups, with a frozen parameter."""
    shapes = {"a": (4, 3), "b": (5, 2), "c": (3,), "kept": (4, 2)}
    model = paper.plain_model(shapes, kinds={"kept": "frozen"}, betas=(0.9, 0.95))
    first = paper.write(model, tmp_path / "first" / "step7")
    out = tmp_path / "source" / "step7"
    ucp.convert(first, out, target=target(2, 3, sub_group_size=5))
    return out


def configured(name: str, tree: dict[str, Any], **settings: Any) -> None:
    tree["ds_config"]["zero_optimization"].update(settings)


def states_of(name: str, tree: dict[str, Any]) -> dict[int, Any]:
    return tree["optimizer_state_dict"]["optimizer_state_dict"]["state"] if "optim" in name else {}


def super_offload(name: str, tree: dict[str, Any]) -> None:
    configured(name, tree, offload_optimizer={"device": "cpu", "super_offload": True})
    states_of(name, tree).clear()


def partial_offload(name: str, tree: dict[str, Any]) -> None:
    configured(name, tree, offload_optimizer={"device": "cpu", "ratio": 0.5})
    states_of(name, tree).pop(1, None)


def zenflow(name: str, tree: dict[str, Any]) -> None:
    configured(name, tree, zenflow={"topk_ratio": 0.1})


def quantized(name: str, tree: dict[str, Any]) -> None:
    configured(name, tree, zero_quantized_nontrainable_weights=True)
    held = tree.get("frozen_param_fragments") or {}
    for key, value in held.items():
        held[key] = (value * 10).to(torch.int8)


CASES: dict[str, tuple[Any, str, type[ucp.UcpError]]] = {
    "SuperOffload": (super_offload, "SuperOffload", StateMismatchError),
    "partial offload": (partial_offload, "partial offload", StateMismatchError),
    "ZenFlow": (zenflow, "ZenFlow", UnsupportedError),
    "quantized frozen weights": (quantized, "zero_quantized_nontrainable", UnsupportedError),
}


@pytest.mark.parametrize("case", CASES)
def test_the_cause_is_named(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    change, word, kind = CASES[case]
    edited(source, change)
    assert main(["inspect", str(source)]) == 0
    (line,) = [row for row in capsys.readouterr().out.splitlines() if "not saved" in row]
    assert word in line
    with pytest.raises(kind, match=word) as caught:
        ucp.convert(source, tmp_path / "out" / "step7", target=target(1, 1))
    assert word in str(caught.value.found) and not (tmp_path / "out").exists()
    assert any(word in note for note in ucp.verify(source).notes)


CONTROLS: dict[str, Change | Any] = {
    "nothing": lambda name, tree: None,
    "SuperOffload with moments": lambda name, tree: configured(
        name, tree, offload_optimizer={"device": "cpu", "super_offload": True}
    ),
    "a whole offload": lambda name, tree: configured(
        name, tree, offload_optimizer={"device": "cpu", "ratio": 1.0}
    ),
    "quantized in the config alone": lambda name, tree: configured(
        name, tree, zero_quantized_nontrainable_weights=True
    ),
}


@pytest.mark.parametrize("case", CONTROLS)
def test_a_healthy_folder_is_not_accused(source: Path, tmp_path: Path, case: str) -> None:
    edited(source, CONTROLS[case])
    assert NOT_SAVED not in ucp.describe(source).run
    ucp.convert(source, tmp_path / "out" / "step7", target=target(1, 1))
    assert ucp.verify(source, deep=True).findings == ()


def test_files_of_mics_are_refused_by_name(source: Path, tmp_path: Path) -> None:
    """Their number of partitions is not that of the ranks."""
    edited(source, lambda name, tree: configured(name, tree, mics_shard_size=-1))
    assert ucp.verify(source).findings == ()  # DeepSpeed's default: no MiCS
    edited(source, lambda name, tree: configured(name, tree, mics_shard_size=2))
    with pytest.raises(UnsupportedError, match="MiCS"):
        ucp.convert(source, tmp_path / "out" / "step7", target=target(1, 1))
    for look in (ucp.describe, ucp.verify):
        with pytest.raises(UnsupportedError, match="MiCS"):
            look(source)


def test_masters_of_zenflow_as_they_are(source: Path, tmp_path: Path) -> None:
    edited(source, zenflow)
    out = tmp_path / "out" / "step7"
    done = ucp.convert(source, out, target=target(1, 1), allow=["stale"])
    assert any("ZenFlow" in note for note in done.notes)
    with pytest.raises(UnsupportedError, match="ZenFlow"):  # the files still say it
        ucp.convert(out, tmp_path / "again" / "step7", target=target(1, 1))
