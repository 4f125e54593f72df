"""Each save says what the engine is at that moment, whatever the program changed since the last
one."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import megatron_ucp as ucp
from tests.engines.kinds import attached, kind_of
from tests.engines.model import Setup
from tests.ranks import RankPool


def _other_memory(engine: Any) -> None:
    held = engine.optimizer.optimizer.state
    first = next(iter(held))
    held[first]["exp_avg"] = held[first]["exp_avg"].clone()


def _other_dtype(engine: Any) -> None:
    engine.module.scale = engine.module.scale.double()


def _other_rates(engine: Any) -> None:
    for group in engine.optimizer.param_groups:
        group["lr"] = 0.125


def _other_names(engine: Any) -> None:
    engine.module.register_buffer("quadrat", engine.module.square)
    del engine.module.square


def _not_saved(engine: Any) -> None:
    engine.module._non_persistent_buffers_set.add("calls")


def _name_of_a_hook(engine: Any) -> None:
    def hook(_module: Any, state: dict[str, Any], *_: Any) -> None:
        state["factor"] = state.pop("scale")

    engine.module.register_state_dict_post_hook(hook)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda engine: None,
    "the memory of a moment": _other_memory,
    "the dtype of a buffer": _other_dtype,
    "a rate": _other_rates,
    "a buffer turned in place": lambda engine: engine.module.square.t_(),
    "another view of a buffer's memory": lambda engine: setattr(
        engine.module, "square", engine.module.square.t()
    ),
    "a buffer under another name": _other_names,
    "a buffer that is saved no more": _not_saved,
    "a name in the state dict": _name_of_a_hook,
}
GAPS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a view with gaps": lambda buffer: buffer.as_strided((2, 2), (3, 1)),
    "one row for many": lambda buffer: buffer[:1].expand(3, 3),
}


def changed(setup: Setup, folder: str, way: str) -> dict[str, dict[str, torch.Tensor]]:
    """A save after each change, one upon the other: the buffers and parameters that the module had
    then and that are saved."""
    kind, engine = kind_of(setup), attached(setup, save=way)
    engine.module.register_buffer("square", torch.arange(9.0).view(3, 3))
    kind.train(engine, 1)
    found: dict[str, dict[str, torch.Tensor]] = {}
    for name, change in CHANGES.items():
        change(engine)
        engine.save_checkpoint(folder, tag=name)
        state = engine.module.state_dict()
        if "factor" in state:
            state["scale"] = state.pop("factor")  # what it is, whatever a hook calls it
        found[name] = {key: value.detach().clone() for key, value in state.items()}
        ucp.wait(engine)
    kind.close(engine)
    return found


def gaps(setup: Setup, folder: str) -> dict[str, str]:
    """What a save says of each buffer whose elements share memory or leave some out, after one that
    was in order."""
    kind, engine = kind_of(setup), attached(setup, save="direct")
    whole = torch.arange(9.0).view(3, 3)
    engine.module.register_buffer("square", whole)
    kind.train(engine, 1)
    engine.save_checkpoint(folder, tag="whole")
    said: dict[str, str] = {}
    for name, view in GAPS.items():
        engine.module.square = view(whole)
        try:
            engine.save_checkpoint(folder, tag=name)
        except ucp.UcpError as error:
            said[name] = str(error)
    kind.close(engine)
    return said


# ------------------------------------------------ tests


pytestmark = pytest.mark.ranks


@pytest.mark.parametrize("way", ["stock", "direct", "background"])
@pytest.mark.parametrize("zero", [1, 2])
def test_what_was_changed_is_saved(ranks: RankPool, tmp_path: Path, zero: int, way: str) -> None:
    setup = Setup(zero)
    states = ranks.run(2, changed, setup, str(tmp_path), way, timeout_s=200)[0]
    assert states.keys() == CHANGES.keys()
    for name, state in states.items():
        saved = ucp.fp32_state_dict(tmp_path, tag=name)
        assert saved.keys() == state.keys(), name
        for key, value in state.items():
            want = value.float() if value.is_floating_point() else value
            assert torch.equal(saved[key], want), (name, key)
        assert ucp.verify(tmp_path / name, deep=True), name
    rates = {group.settings["lr"] for group in ucp.describe(tmp_path / "a rate").groups}
    assert rates == {0.125}
    turned = [states[name]["square"] for name in ("nothing", "a buffer turned in place")]
    assert torch.equal(turned[0], turned[1].t()) and not torch.equal(*turned)


def test_elements_that_share_memory_are_no_save(ranks: RankPool, tmp_path: Path) -> None:
    for said in ranks.run(2, gaps, Setup(1), str(tmp_path)):
        assert said.keys() == GAPS.keys()
        assert all("is not contiguous" in text for text in said.values()), said
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["whole"]
