"""Generators of tensor-parallel regions are set as the live tracker has them: each name, each kind,
plain states and graph-safe generators, and none of another program's comes in their place."""

import sys
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

import pytest
import torch

from megatron_ucp.engines import run_state
from megatron_ucp.engines.run_state import Restored, states

# "mtp-hsm-rng" is one that a module of Megatron-LM's main adds
NAMES = ("model-parallel-rng", "expert-parallel-rng", "data-parallel-rng", "mtp-hsm-rng")
MODULES = dict(run_state._TRACKERS)


class Tracker:
    """As those of megatron-core, DeepSpeed and Megatron-DeepSpeed; `graph_safe` ones keep
    generators in the place of their states."""

    def __init__(self, names: tuple[str, ...], graph_safe: bool) -> None:
        made = {name: torch.Generator().manual_seed(n) for n, name in enumerate(names)}
        self.kept: dict[str, Any] = (
            made if graph_safe else {name: one.get_state() for name, one in made.items()}
        )

    def get_states(self) -> dict[str, Any]:
        return dict(self.kept)

    def set_states(self, found: dict[str, Any]) -> None:
        self.kept = found

    def draw(self, name: str) -> list[float]:
        """The next numbers of one of them, as a fork of it draws them."""
        one = self.kept[name]
        if not isinstance(one, torch.Generator):
            one = torch.Generator()
            one.set_state(self.kept[name])
            drawn = torch.rand(4, generator=one)
            self.kept[name] = one.get_state()
            return drawn.tolist()
        return torch.rand(4, generator=one).tolist()

    def draw_all(self) -> dict[str, list[float]]:
        return {name: self.draw(name) for name in self.kept}


@pytest.fixture(params=MODULES)
def owner(request: Any) -> str:
    return request.param


@pytest.fixture(autouse=True)
def own_generators() -> Iterator[None]:
    """A test sets those of the process, too."""
    before = Restored(None, states=states())
    yield
    before.apply()


def live(owner: str, tracker: Tracker, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program has this tracker alone."""
    for one in MODULES.values():
        monkeypatch.delitem(sys.modules, one, raising=False)
    module: Any = ModuleType(MODULES[owner])
    module.get_cuda_rng_tracker = lambda: tracker
    monkeypatch.setitem(sys.modules, MODULES[owner], module)


def restored(saved: Mapping[str, torch.Tensor]) -> Restored:
    return Restored._exactly(dict(saved), "file")


@pytest.mark.parametrize("loads", [False, True], ids=["into states", "into generators"])
@pytest.mark.parametrize("saves", [False, True], ids=["from states", "from generators"])
def test_each_name_goes_on_whatever_kind_keeps_it(
    owner: str, saves: bool, loads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = Tracker(NAMES, saves), Tracker(NAMES[::-1], loads)
    live(owner, source, monkeypatch)
    source.draw_all()
    saved = states()
    want = source.draw_all()
    live(owner, target, monkeypatch)
    kept = target.get_states()
    assert {name: target.draw(name) for name in NAMES} != want
    found = restored(saved)
    found.apply()
    assert found.note is None and target.draw_all() == want
    assert not loads or target.get_states() == kept, "what a graph holds is the same generator"
    assert [type(one) for one in target.kept.values()] == [type(one) for one in kept.values()]


@pytest.mark.parametrize("graph_safe", [False, True], ids=["states", "generators"])
def test_a_name_that_a_save_has_not_goes_on_and_is_named(
    owner: str, graph_safe: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = Tracker(NAMES[:3], graph_safe), Tracker(NAMES, graph_safe)
    live(owner, source, monkeypatch)
    saved = states()
    want = source.draw_all()
    live(owner, target, monkeypatch)
    other = Tracker(NAMES, graph_safe).draw(NAMES[3])
    found = restored(saved)
    found.apply()
    assert found.note is not None and f"{owner}.{NAMES[3]}" in found.note
    assert target.draw_all() == {**want, NAMES[3]: other}


@pytest.mark.parametrize("graph_safe", [False, True], ids=["states", "generators"])
def test_on_another_mesh_each_name_is_seeded_by_itself(
    owner: str, graph_safe: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank's own generators differ from those of other ranks, the rest are alike; all names that
    are live are there afterwards, and of their kind."""
    drawn: list[dict[str, list[float]]] = []
    for rank in (0, 1, 0):
        tracker = Tracker(NAMES, graph_safe)
        live(owner, tracker, monkeypatch)
        kinds = {name: type(one) for name, one in tracker.kept.items()}
        Restored("", seed=7, rank=rank).apply()
        assert {name: type(one) for name, one in tracker.kept.items()} == kinds
        drawn.append(tracker.draw_all())
    assert drawn[0] == drawn[2] and len({str(one) for one in drawn[0].values()}) == len(NAMES)
    own = {name for name in NAMES if drawn[0][name] != drawn[1][name]}
    assert own == {name for name in NAMES if name in run_state._OF_EACH_RANK}
