"""Files that older versions of DeepSpeed wrote are loaded into engines of the present one, on other
meshes, bit for bit."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import megatron_ucp as ucp
from tests.engines.canonical import canonical, differences
from tests.engines.kinds import plant_fault
from tests.engines.model import Setup, make_engine
from tests.engines.sources import check, check_fails
from tests.formats.golden.make_older import FOLDER, STEPS, VERSIONS, cases_of, values_of
from tests.formats.test_older import LOST
from tests.ranks import RankPool

LOW = {"fp32": torch.float32, "bf16": torch.bfloat16}
OWN_BUFFERS = ("0.19.4",)  # leave buffers in fp32, as 0.19.8 does


def expected(version: str, case: str, dtype: str) -> dict[str, Any]:
    """The canonical state of the run that saved a golden checkpoint: values by the rule that filled
    them, the rest as its engine said."""
    held = json.loads(Path(FOLDER, version, f"{case}.json").read_text())
    values = values_of()
    kept = torch.float32 if version in OWN_BUFFERS else LOW[dtype]
    full = {key: tensor for key, tensor in values.items() if key[1] != "value"}
    weights = {name: tensor for (name, state), tensor in full.items() if state == "fp32"}
    weights["frozen.weight"] = values["frozen.weight", "value"]
    return {
        "full": full,
        "weights": {name: tensor.to(LOW[dtype]) for name, tensor in weights.items()},
        "values": {
            # cast with the weights when it was saved
            "scale": values["scale", "value"].to(kept).float(),
            "calls": torch.tensor(STEPS),
        },
        "scalars": {tuple(key.split("|")): value for key, value in held["scalars"].items()},
        "hyper": {name: _plain(settings) for name, settings in held["hyper"].items()},
        "scheduler": held["scheduler"],
        "counters": tuple(held["counters"]),
        "scale": {},
    }


def _plain(settings: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(v) if isinstance(v, list) else v for key, v in settings.items()}


def resume(
    setup: Setup, version: str, case: str, plant: str | None = None, **options: Any
) -> dict[str, Any]:
    """Loads a golden checkpoint into a fresh engine, and compares."""
    want = expected(version, case, setup.dtype)
    engine = make_engine(setup)
    before = canonical(engine)
    out: dict[str, Any] = {"before": {case: differences(want, before)}, "error": ""}
    try:
        out["notes"] = ucp.load(engine, FOLDER / version / case, **options).notes
    except ucp.UcpError as error:
        out |= {"error": type(error).__name__, "message": str(error)}
    if plant:
        plant_fault(engine, plant)
    have = canonical(engine)
    out["differences"] = {case: differences(want, have)}
    out["unchanged"] = differences(before, have) == []
    engine.destroy()
    return out


JOB = resume
# what a case is loaded into: ranks and stage, neither of which is its own
TARGETS = {
    "zero0_bf16": [(4, 3), (1, 2)],
    "zero1": [(4, 3), (1, 0)],
    "zero2": [(1, 3), (4, 1)],
    "zero3": [(4, 1), (1, 2)],
    "bf16_optimizer": [(4, 3), (1, 2)],
    "ulysses_zero1": [(2, 3)],
    "ulysses_zero3": [(2, 2)],
}
LOADS = [
    (version, case, *target)
    for version in VERSIONS
    for case in cases_of(version)
    if (version, case) not in LOST
    for target in TARGETS.get(case, ())  # stage 0 has no names: tests/engines/test_positions
]
FIRST = {("0.14.5", "zero3"), ("0.15.4", "zero0_bf16"), ("0.16.9", "zero2")}
FIRST |= {("0.17.6", "zero1"), ("0.18.9", "bf16_optimizer"), ("0.18.2", "ulysses_zero3")}
FIRST |= {("0.19.4", "zero3")}


def setup_of(zero: int) -> Setup:
    return Setup(zero, "bf16", seed=9)


def slow(load: tuple[str, str, int, int]) -> bool:
    version, case, *target = load
    return (version, case) not in FIRST or tuple(target) != TARGETS[case][0]


@pytest.mark.parametrize(
    ("version", "case", "world", "zero"),
    [pytest.param(*load, marks=[pytest.mark.slow] if slow(load) else []) for load in LOADS],
)
@pytest.mark.cases(4)
def test_pair(ranks: RankPool, version: str, case: str, world: int, zero: int) -> None:
    found = ranks.run(world, JOB, setup_of(zero), version, case)
    assert [rank.get("message") for rank in found] == [None] * world
    check(found)


@pytest.mark.parametrize("fault", ["one bit", "one moment", "one step", "a buffer"])
def test_a_planted_fault_is_seen(ranks: RankPool, fault: str) -> None:
    found = ranks.run(2, JOB, setup_of(1), "0.14.5", "zero3", plant=fault)
    check_fails(found)


@pytest.mark.parametrize(("version", "case"), sorted(LOST))
def test_states_that_were_never_saved_are_missed(ranks: RankPool, version: str, case: str) -> None:
    for zero in (0, 3):
        for rank in ranks.run(2, JOB, setup_of(zero), version, case):
            assert rank["error"] == "StateMismatchError" and rank["unchanged"]
            assert "0.17 to 0.18.4" in rank["message"]
            assert "load_optimizer_states=False" in rank["message"]
    for rank in ranks.run(2, JOB, setup_of(3), version, case, load_optimizer_states=False):
        assert not rank["error"]
        parts = {difference.partition(" ")[0] for difference in rank["differences"][case]}
        assert not parts & {"weights", "values", "counters:", "scheduler:"}
        assert {"full", "scalars:"} <= parts  # masters are what the weights say, moments begin anew
