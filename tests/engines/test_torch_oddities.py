"""Odd models: what stock's own load gets right is right across stages too, or refused by name when
the engine is attached."""

from pathlib import Path
from typing import Any

import pytest

import megatron_ucp as ucp
from megatron_ucp.errors import UnsupportedError
from tests.engines import odd_jobs
from tests.ranks import RankPool

pytestmark = pytest.mark.ranks
STAGES = {0: (0, 3), 1: (1,), 3: (3, 1)}


def require_right(found: dict[str, Any], count: int) -> None:
    """Every load got all of it, and had something to get. Losses are then the same; another stage
    adds in another order, which may change their last bit (under torch 2.14 it does)."""
    assert len(found) == count
    for key, load in found.items():
        assert not load["error"], (key, load["error"])
        assert load["before"] > 10, key  # the comparison sees another model
        source, _, target = key.partition(" to ")
        allowed = 0.0 if not target or source.endswith(target) else 1e-6
        assert load["after"] == [] and load["loss"] <= allowed, (key, load)


def loads_of(source: int, targets: tuple[int, ...]) -> int:
    """How many loads `odd_jobs.cross` makes: stock's files of stage 0 are loaded by stock alone."""
    return (2 if source else 1) * len(targets) + 2


@pytest.mark.parametrize("net", ["ExtraState", "Turned", "Alias", "Brackets"])
def test_loads_are_right_where_stocks_are(ranks: RankPool, tmp_path: Path, net: str) -> None:
    for source, targets in STAGES.items():
        for found in ranks.run(
            2, odd_jobs.cross, net, str(tmp_path / str(source)), source, targets
        ):
            require_right(found, loads_of(source, targets))


def test_a_planted_fault_is_seen(ranks: RankPool, tmp_path: Path) -> None:
    """In what modules keep besides tensors, and in a buffer that lies transposed."""
    for faults in ranks.run(2, odd_jobs.planted, str(tmp_path)):
        assert [len(fault) for fault in faults] == [1, 1], faults


def test_hooks_that_rename_entries(ranks: RankPool, tmp_path: Path) -> None:
    for net in ("Hooked", "HookedBuffer"):
        for source, targets in STAGES.items():
            folder = str(tmp_path / f"{net}{source}")
            for found in ranks.run(2, odd_jobs.cross, net, folder, source, targets):
                require_right(found, loads_of(source, targets))


def test_hooked_files_without_the_model(ranks: RankPool, tmp_path: Path) -> None:
    """The manifest says what a hook called the entries. Stock's files don't: what may be one of
    several things is refused, and not as damage."""
    for net, source, entry, name in (
        ("HookedBuffer", 3, "factor", "scale"),
        ("Hooked", 1, "old_up.weight", "up.weight"),
        ("Hooked", 2, "old_up.weight", "up.weight"),
    ):
        folder = tmp_path / f"{net}{source}"
        (found,) = ranks.run(1, odd_jobs.cross, net, str(folder), source, (source,))
        require_right(found, 4)
        assert ucp.verify(folder / "attached", deep=True).findings == ()
        with pytest.raises(UnsupportedError, match="a hook of its state dict") as error:
            ucp.describe(folder / "stock")
        assert f"parameter: {entry}\n" in str(error.value) and name in str(error.value)


def test_parameters_without_elements(ranks: RankPool, tmp_path: Path) -> None:
    for source, targets in {0: (0,), 1: (1, 2), 2: (2, 1)}.items():
        folder = str(tmp_path / str(source))
        for found in ranks.run(2, odd_jobs.cross, "Nothings", folder, source, targets):
            require_right(found, loads_of(source, targets))


def test_parameters_frozen_midway(ranks: RankPool, tmp_path: Path) -> None:
    """Their states stay, also at stage 0, as they do under ZeRO; another stage, which has one step
    for all of a group, refuses the two steps."""
    for source, targets in {0: (0, 3), 1: (1, 3)}.items():
        job = odd_jobs.cross, "Net", str(tmp_path / str(source)), source, targets
        for found in ranks.run(2, *job, change="freeze_one"):
            if not source:
                assert "different steps" in found.pop("attached 0 to 3")["error"]
            require_right(found, len(found))


def test_conversions_of_odd_models(ranks: RankPool, tmp_path: Path) -> None:
    """What modules keep, and transposed buffers, go into native and universal folders."""
    for found in ranks.run(2, odd_jobs.converted, str(tmp_path)):
        require_right(found, 8)


def test_what_no_save_could_hold_is_refused_when_it_is_attached(ranks: RankPool) -> None:
    for net, words in {
        "Expanded": ("wide", "memory of its own", "contiguous()"),
        "Gapped": ("part", "memory of its own", "contiguous()"),
        "Strange": ("meter._extra_state", "odd_models.Strange", "get_extra_state"),
        "Changed": ("scale", "hook", "another tensor"),
        "Added": ("version", "hook", "any names"),
        "LikeSlices": ("experts.w1[3]", "AutoEP", "another name"),
    }.items():
        for said in ranks.run(2, odd_jobs.refused, net):
            assert said.startswith("UnsupportedError") and all(w in said for w in words), said


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_a_prefix_on_one_side_only_is_named(ranks: RankPool, tmp_path: Path, zero: int) -> None:
    for attach in (True, False) if zero else (True,):
        for said in ranks.run(2, odd_jobs.prefixed, str(tmp_path / str(attach)), zero, attach):
            for allowed in (0, 3):
                for source, target, words in (
                    ("Net", "Compiled", ("prefix _orig_mod. added", "model.compile()")),
                    ("Compiled", "Net", ("prefix _orig_mod. removed", "torch.compile")),
                    ("Net", "Wrapped", ("prefix module. added", "inside the wrapper")),
                    ("Wrapped", "Net", ("prefix module. removed", "wrap the model as")),
                ):
                    error = said[f"{source} {target} {allowed}"]
                    assert error.startswith("ModelMismatchError"), error
                    assert all(word in error for word in words), error
            assert "the prefix" not in said["Net Wider 0"]  # another model is another model


def test_a_load_under_inference_mode(ranks: RankPool, tmp_path: Path) -> None:
    """Weights are ordinary tensors after it: the run that goes on is the one that was saved."""
    for found in ranks.run(2, odd_jobs.under_inference_mode, str(tmp_path)):
        require_right(found, 10)
