"""Other trainable parameters than in the checkpoint, unfrozen, frozen and new ones; and other
parameter groups."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ucp.core.flat import alone
from megatron_ucp.core.manifest import Manifest, ParamGroup, ParamSpec
from megatron_ucp.core.mesh import Mesh
from megatron_ucp.engines.megatron.live import LiveMegatron
from megatron_ucp.errors import StateMismatchError
from megatron_ucp.reshard.match import Fit, require_alone
from tests.engines import kinds
from tests.engines.kinds import oracle_of, plant_fault
from tests.engines.masters import base_of, named, runs_of
from tests.engines.model import Setup
from tests.engines.sources import Sources, without_manifest
from tests.engines.test_muon import muon
from tests.share import LOSS_STEPS


def plant(engine: Any, fault: str, name: str = "") -> None:
    """What a load must not do to a parameter that the checkpoint does not train; or a fault of
    another one."""
    if fault == "states of its own":
        (master,) = {master for held, _, _, master, *_ in runs_of(engine) if held == name}
        moments = {key: torch.zeros_like(master) for key in ("exp_avg", "exp_avg_sq")}
        base_of(engine).state[master] = {**moments, "step": torch.tensor(0.0)}
    elif fault == "another value":
        named(engine)[name].data.view(-1)[0] += 1
    else:
        plant_fault(engine, fault)


pytestmark = pytest.mark.ranks
STEPS = 3
MOMENTS = ("exp_avg", "exp_avg_sq")
THAWED, NEW, FROZEN = "frozen.weight", "more.weight", "up.weight"
TARGETS = [(1, 0, "fp32"), (4, 1, "bf16"), (2, 2, "fp32"), (4, 3, "bf16"), (1, 3, "fp32")]


def source(sources: Sources, dtype: str, zero: int = 1) -> tuple[str, dict[str, Any]]:
    """A run on two ranks, and its states."""
    folder = sources.get(2, Setup(zero, dtype))
    kept = oracle_of(folder)
    return str(folder), kept["states"]["trained"]


def go_on(sources: Sources, world: int, setup: Setup, folder: str, **options: Any) -> Any:
    options["plant"] = partial(plant, name=options.pop("name", ""))
    return sources.ranks.run(world, kinds.around_load, setup, folder, "trained", **options)[0]


def wrong(want: dict[Any, Any], have: dict[Any, Any], but: str = "") -> list[Any]:
    """Keys of what the run had, of which the engine has something else."""

    def same(a: Any, b: Any) -> bool:
        return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b

    kept = {key: value for key, value in want.items() if but not in (key, key[0])}
    assert len(kept) > 5
    return [key for key, value in kept.items() if key not in have or not same(value, have[key])]


def check_fresh(found: dict[str, Any], want: dict[str, Any], name: str) -> None:
    """A parameter has no states after the load, and those of a first step after one: moments that
    began at zero, a step of its own; its rate follows the schedule of the run."""
    after, stepped = found["after"], found["stepped"]
    assert not [key for key in after["full"] if key[0] == name and key[1] != "fp32"]
    assert wrong(want["full"], found["before"]["full"])  # the load did something
    assert wrong(want["full"], after["full"]) == []
    assert wrong(want["scalars"], after["scalars"]) == []
    steps = {key[0]: value for key, value in stepped["scalars"].items() if key[1] == "step"}
    assert steps.pop(name) == 1 and {*steps.values()} == {STEPS + 1} and len(steps) > 5
    gradient = stepped["full"][name, "exp_avg"] / 0.1
    assert gradient.abs().max() > 0
    assert torch.allclose(stepped["full"][name, "exp_avg_sq"], 1e-3 * gradient**2, rtol=1e-5)
    rates = {key: settings["lr"] for key, settings in stepped["hyper"].items()}
    assert rates[name] == pytest.approx(5e-3 / (1 + STEPS + 1))
    assert rates[FROZEN] == pytest.approx(3e-3 / (1 + STEPS + 1))
    assert any(name in note and "begin afresh" in note for note in found["notes"])


def check_unfrozen(found: dict[str, Any], want: dict[str, Any]) -> None:
    """It goes on from the weight that was frozen."""
    value = want["weights"][THAWED].float().view(-1)
    assert torch.equal(found["after"]["full"][THAWED, "fp32"].view(-1), value)
    assert not torch.equal(found["before"]["full"][THAWED, "fp32"].view(-1), value)
    check_fresh(found, want, THAWED)


def check_new(found: dict[str, Any], want: dict[str, Any]) -> None:
    """It keeps the value that the model drew."""
    own = [found[when]["full"][NEW, "fp32"] for when in ("before", "after", "stepped")]
    assert torch.equal(own[0], own[1]) and not torch.equal(own[1], own[2])
    check_fresh(found, want, NEW)


def check_frozen(found: dict[str, Any], want: dict[str, Any]) -> None:
    """It has the weights that the run computed with: masters, rounded to its training dtype."""
    after = found["after"]
    assert wrong(want["full"], after["full"], but=FROZEN) == []
    assert wrong(want["scalars"], after["scalars"], but=FROZEN) == []
    assert not [key for key in after["full"] if key[0] == FROZEN]
    trained = want["full"][FROZEN, "fp32"].to(want["weights"][FROZEN].dtype)
    for when, equal in (("before", False), ("after", True), ("stepped", True)):
        value = found[when]["weights"][FROZEN]
        assert torch.equal(value.view(-1), trained.view(-1)) == equal
    assert any(FROZEN in note and "dropped" in note for note in found["notes"])


Check = Callable[[dict[str, Any], dict[str, Any]], None]
# what changes: how an engine is built for it, which parameter it is, and the check
CHANGES: dict[str, tuple[dict[str, Any], str, Check]] = {
    "unfreeze": ({"extra": {"thawed": THAWED, "apart": (THAWED,)}}, THAWED, check_unfrozen),
    "new": ({"net": "Grown", "extra": {"apart": (NEW,)}}, NEW, check_new),
    "freeze": ({"extra": {"frozen": FROZEN}}, FROZEN, check_frozen),
}


def change_on(sources: Sources, change: str, world: int, zero: int, dtype: str) -> None:
    folder, want = source(sources, dtype)
    built, _, check = CHANGES[change]
    setup = Setup(zero, dtype, seed=5, **built)
    check(go_on(sources, world, setup, folder, allow={change}), want)


@pytest.mark.parametrize(("world", "zero", "dtype"), TARGETS)
def test_unfrozen(sources: Sources, world: int, zero: int, dtype: str) -> None:
    change_on(sources, "unfreeze", world, zero, dtype)


@pytest.mark.parametrize(("world", "zero", "dtype"), TARGETS)
def test_new(sources: Sources, world: int, zero: int, dtype: str) -> None:
    change_on(sources, "new", world, zero, dtype)


@pytest.mark.parametrize(("world", "zero", "dtype"), TARGETS)
def test_frozen(sources: Sources, world: int, zero: int, dtype: str) -> None:
    change_on(sources, "freeze", world, zero, dtype)


FAULTS = [
    *(("unfreeze", fault) for fault in ("states of its own", "one bit", "one step")),
    *(("new", fault) for fault in ("states of its own", "another value")),
    *(("freeze", fault) for fault in ("another value", "one moment")),
]


@pytest.mark.parametrize(("change", "fault"), FAULTS)
def test_a_planted_fault_is_seen(sources: Sources, change: str, fault: str) -> None:
    folder, want = source(sources, "fp32")
    built, name, check = CHANGES[change]
    options = {"allow": {change}, "fault": fault, "name": name}
    found = go_on(sources, 1, Setup(0, seed=5, **built), folder, **options)
    with pytest.raises(AssertionError):
        check(found, want)


def test_only_what_was_allowed(sources: Sources) -> None:
    """Nothing is changed where a word is missing, or where one step would count for two."""
    folder, _ = source(sources, "fp32")
    thawed = {"thawed": THAWED, "apart": (THAWED,)}
    cases = [
        (Setup(1, extra=thawed), {"freeze", "new"}, "ModelMismatchError", "unfreeze"),
        (Setup(1, extra={"frozen": FROZEN}), {"unfreeze"}, "ModelMismatchError", "freeze"),
        (Setup(1, net="Grown", extra={"apart": (NEW,)}), {"missing"}, "ModelMismatchError", "new"),
        (Setup(1, extra={"thawed": THAWED}), {"unfreeze"}, "StateMismatchError", "group of their"),
    ]
    for setup, allow, error, word in cases:
        found = go_on(sources, 2, setup, folder, allow=allow)
        assert found["error"].startswith(error) and word in found["error"], found["error"]
        assert found["unchanged"]


def test_an_engine_with_one_step_for_all_refuses() -> None:
    """megatron-core's optimizers count one step, DeepSpeed's one for each buffer."""
    apart = [alone(name, 2, (), group) for group, name in enumerate("ab")]
    specs = tuple(ParamSpec(name, (2,), "float32") for name in "ab")
    target = Manifest("", Mesh(), specs, tuple(apart), (ParamGroup({}), ParamGroup({})))
    fit = Fit(new=("b",))
    require_alone(target, fit, False, "x")
    require_alone(target, Fit(), LiveMegatron.has_one_step, "x")
    with pytest.raises(StateMismatchError, match="one step for all"):
        require_alone(target, fit, LiveMegatron.has_one_step, "x")


def test_without_flat_buffers_a_group_may_be_shared(sources: Sources) -> None:
    """At stage 0 every parameter has a step of its own."""
    folder, want = source(sources, "fp32")
    setup = Setup(0, seed=5, extra={"thawed": THAWED})
    found = go_on(sources, 1, setup, folder, allow={"unfreeze"})
    assert wrong(want["full"], found["after"]["full"]) == []
    steps = {key[0]: v for key, v in found["stepped"]["scalars"].items() if key[1] == "step"}
    assert steps.pop(THAWED) == 1 and {*steps.values()} == {STEPS + 1}


@pytest.mark.parametrize(("world", "zero"), [(4, 1), (1, 0), (2, 3)])
@pytest.mark.parametrize("change", ["freeze", "unfreeze"])
def test_matrices_that_muon_steps(sources: Sources, change: str, world: int, zero: int) -> None:
    """Its momentum lies as whole matrices, of which there is one fewer or one more."""
    folder = str(sources.get(2, muon(1), more=LOSS_STEPS))
    want = oracle_of(folder)["states"]["trained"]
    name = "left.weight" if change == "freeze" else THAWED
    apart = {"thawed": name, "apart": (name,)}
    setup = muon(zero, seed=5, extra={"frozen": name} if change == "freeze" else apart)
    found = go_on(sources, world, setup, folder, allow={change})
    assert len(wrong(want["full"], found["before"]["full"], but=name)) > 5
    for part in ("full", "scalars"):
        assert wrong(want[part], found["after"][part], but=name) == []
    own = [
        {key[1] for key in found[when]["full"] if key[0] == name} for when in ("after", "stepped")
    ]
    momenta = {"fp32", "momentum_buffer"}
    assert own == ([set(), set()] if change == "freeze" else [{"fp32"}, momenta])
    assert momenta == {key[1] for key in found["after"]["full"] if key[0] == "right.weight"}


def check_regrouped(found: dict[str, Any], want: dict[str, Any]) -> None:
    assert wrong(want["full"], found["before"]["full"])  # the load did something
    for part in ("full", "scalars", "hyper"):
        assert wrong(want[part], found["after"][part]) == [], part


@pytest.mark.parametrize(
    ("world", "zero", "groups"), [(1, 0, 2), (4, 1, 3), (2, 2, 2), (4, 3, 2), (2, 3, 3)]
)
def test_one_group_becomes_several(sources: Sources, world: int, zero: int, groups: int) -> None:
    """Every member has the hyper-parameters and the rate of its group in the checkpoint."""
    folder = str(sources.get(2, Setup(1, groups=1)))
    want = oracle_of(folder)["states"]["trained"]
    found = go_on(sources, world, Setup(zero, seed=5, groups=groups), folder)
    check_regrouped(found, want)
    assert {s["lr"] for s in found["before"]["hyper"].values()} != {
        s["lr"] for s in found["after"]["hyper"].values()
    }
    rates = [settings["lr"] for settings in found["stepped"]["hyper"].values()]
    assert rates == pytest.approx([3e-3 / (1 + STEPS + 1)] * len(rates)) and len(rates) > 5


def test_groups_that_differ_are_not_joined(sources: Sources) -> None:
    folder, _ = source(sources, "fp32")
    found = go_on(sources, 2, Setup(2, groups=1), folder)
    assert found["error"].startswith("StateMismatchError") and found["unchanged"]
    assert "different hyper-parameters" in found["error"] and "lr: " in found["error"]


ALIKE = Setup(1, groups=3, extra={"alike": True})


def joined(zero: int, dtype: str = "fp32") -> Setup:
    """All parameters in one group."""
    return Setup(zero, dtype, seed=5, groups=1)


@pytest.mark.parametrize(("world", "zero"), [(1, 0), (4, 1), (2, 2), (4, 3)])
def test_groups_that_agree_become_one(sources: Sources, world: int, zero: int) -> None:
    folder = sources.get(2, ALIKE)
    want = oracle_of(folder)["states"]["trained"]
    found = go_on(sources, world, joined(zero), folder)
    check_regrouped(found, want)
    steps = {value for key, value in found["stepped"]["scalars"].items() if key[1] == "step"}
    assert steps == {STEPS + 1}


@pytest.mark.parametrize("fault", ["one bit", "one moment", "one step", "one group's weight decay"])
def test_a_planted_fault_in_joined_groups_is_seen(sources: Sources, fault: str) -> None:
    folder = sources.get(2, ALIKE)
    want = oracle_of(folder)["states"]["trained"]
    found = go_on(sources, 2, joined(2), folder, fault=fault)
    with pytest.raises(AssertionError):
        check_regrouped(found, want)


def test_groups_whose_steps_differ_are_not_joined(sources: Sources, tmp_path: Path) -> None:
    """A flat buffer has one step for all of its parameters; without flat buffers each has its
    own."""
    folder = without_manifest(Path(shutil.copytree(sources.get(2, ALIKE), tmp_path / "steps")))
    for path in (folder / "trained").glob("*optim_states.pt"):
        tree = torch.load(path, weights_only=False)
        tree["optimizer_state_dict"]["base_optimizer_state"]["state"][1]["step"] += 1
        torch.save(tree, path)
    for zero in (2, 3):
        found = go_on(sources, 2, joined(zero), str(folder))
        assert found["error"].startswith("StateMismatchError") and found["unchanged"]
        assert "different steps" in found["error"]
    apart = go_on(sources, 2, Setup(2, groups=3), str(folder))
    assert {*apart["after"]["scalars"].values()} == {STEPS, STEPS + 1}
    each = go_on(sources, 1, joined(0), str(folder))
    assert {*each["after"]["scalars"].values()} == {STEPS, STEPS + 1}


@pytest.mark.parametrize(
    ("groups", "world", "setup"),
    [
        (1, 4, muon(2, groups=2)),
        (1, 2, muon(3, groups=3)),
        (1, 1, muon(0, groups=3)),
        (3, 4, muon(1, groups=1)),
        (3, 2, muon(3, groups=1)),
        (3, 1, muon(0, groups=2)),
    ],
)
def test_other_groups_of_muon(sources: Sources, groups: int, world: int, setup: Setup) -> None:
    """Matrices are sorted by size in each group, and beside them stands Adam's part of it."""
    alike = {"alike": True} if groups > 1 else {}
    folder = str(sources.get(2, muon(1, groups=groups, extra=alike), more=0))
    want = oracle_of(folder)["states"]["trained"]
    found = go_on(sources, world, replace(setup, seed=5), folder)
    check_regrouped(found, want)
    assert {state for _, state in want["full"]} == {"fp32", "momentum_buffer", *MOMENTS}
    steps = {value for key, value in found["stepped"]["scalars"].items() if key[1] == "step"}
    assert steps == {STEPS + 1}
