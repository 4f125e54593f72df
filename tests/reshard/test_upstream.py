"""The cases of upstream's own tests of universal checkpoints, written anew: their dimensions, our
converter, stock's load and ours.

Upstream compares what it loads with `allclose`, its model has neither frozen parameters nor
buffers, and it has no stage 2. Here everything is compared bit by bit, and what stock's load leaves
out is written down exactly. S and L are the numbers of its known defects, as in
`tests/engines/test_defects.py`.
"""

import shutil
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

import megatron_ucp as ucp
from tests.engines.canonical import base_of, canonical, differences
from tests.engines.kinds import group_settings, kind_of, oracle_of, plant_fault, universal_folders
from tests.engines.model import Setup
from tests.engines.sources import Sources
from tests.engines.tensor_jobs import Mega


def loads(
    setup: Any,
    folder: str,
    states: bool,
    ways: tuple[str, ...] = ("stock", "universal", "native"),
    plant: str | None = None,
) -> dict[str, Any]:
    """A fresh engine for each way: stock's own load of the universal folder, ours of it, ours of
    the native files."""
    kept = oracle_of(folder)
    want, groups = kept["states"]["filled"], kept["groups"].get("filled")
    return {way: _load(setup, folder, states, way, want, plant, groups) for way in ways}


def _load(
    setup: Any,
    folder: str,
    states: bool,
    way: str,
    want: dict[str, Any],
    plant: str | None,
    groups: list[dict[str, Any]] | None,
) -> dict[str, Any]:
    """What differs from the source before and after; the optimizer's states, its flats, and the
    step tensors of them all."""
    with universal_folders(way == "stock"):
        engine = kind_of(setup).make(setup, attach=way != "stock")
    before, error = differences(want, canonical(engine)), ""
    if way != "stock":
        ucp.load(
            engine,
            f"{folder}/{'filled' if way == 'native' else 'filled_universal'}",
            load_optimizer_states=states,
        )
    else:
        try:  # by `latest_universal`, as the user of stock DeepSpeed does
            engine.load_checkpoint(folder, load_optimizer_states=states)
        except (AttributeError, RuntimeError, TypeError, ValueError) as found:
            error = f"{type(found).__name__}: {found}"
    if plant is not None:
        plant_fault(engine, plant)
    have, held = canonical(engine), base_of(engine).state
    steps = {
        id(state["step"]) for state in held.values() if isinstance(state.get("step"), torch.Tensor)
    }
    out = {
        "before": before,
        "error": error,
        "differences": differences(want, have),
        "flats": len(held),
        "step tensors": len(steps),
        "states": sorted({key for _, key in have["full"]}),
        "groups": other_keys(groups, _after_a_step(engine)) if groups else None,
        "decay": {n: h["weight_decay"] for n, h in have["hyper"].items()},
    }
    kind_of(setup).close(engine)
    return out


def _after_a_step(engine: Any) -> list[dict[str, Any]]:
    """Settings of the groups as they are after the next step: FusedAdam gives each group a count of
    0 then, from which it begins where a parameter has no states."""
    fused = type(base_of(engine)).__name__ == "FusedAdam"
    return [({"step": 0} if fused else {}) | group for group in group_settings(engine)]


def other_keys(want: list[dict[str, Any]], have: list[dict[str, Any]]) -> list[str]:
    """Keys of the parameter groups that differ, or that one side lacks."""
    out = [f"{len(want)} groups became {len(have)}"] if len(want) != len(have) else []
    for number, (one, other) in enumerate(zip(want, have, strict=False)):
        keys = sorted({**one, **other})
        missing = object()
        out += [f"{number}: {k}" for k in keys if one.get(k, missing) != other.get(k, missing)]
    return out


# ------------------------------------------------ tests


pytestmark = pytest.mark.ranks
LOADS = loads
# dtype, stage, optimizer, load_optimizer_states, whether there are sub-groups, (ranks of the
# source, ranks of the target)
Case = tuple[str, int, str, bool, bool, tuple[int, int]]
DIMENSIONS = (
    ("fp32", "bf16", "fp16"),
    (1, 2, 3),
    ("AdamW", "FusedAdam"),
    (True, False),
    (False, True),
    ((2, 2), (4, 2), (2, 4)),
)
CASES: list[Case] = list(product(*DIMENSIONS))
SPREAD = CASES[
    ::11
]  # 11 has no divisor in common with the sizes of the dimensions: they all go round
SUB_GROUP = {
    2: 100,
    4: 50,
    # upstream's size at two ranks; in elements of one rank, so that there are two sub-groups at
    # four, too
}
FORGOTTEN = {"values calls", "values scale", "weights frozen.weight"}  # S4, S5
WEIGHTS_ALONE = {
    "full",
    "scalars",
    "hyper",
}  # moments and steps that are not there, and the rate before the scheduler's next step


def setup_of(case: Case, ranks: int, seed: int = 1) -> Setup:
    dtype, stage, optimizer, _, split, _ = case
    return Setup(
        stage,
        dtype,
        optimizer,
        zero_config=(("sub_group_size", SUB_GROUP[ranks]),) if split else (),
        groups=1,
        seed=seed,
    )


def converted(sources: Sources, ranks: int, setup: Any) -> str:
    """A folder with native saves and, beside them, the universal folder of the newest one: as
    stock's converter leaves it."""
    folder = Path(sources.get(ranks, setup, more=0))
    if not (folder / "filled_universal").exists():
        ucp.convert(folder / "filled", folder / "filled_universal", to="universal")
    assert (folder / "latest").read_text() == "filled" and (
        folder / "latest_universal"
    ).read_text() == "filled_universal"
    return str(folder)


def kinds(found: dict[str, Any]) -> set[str]:
    return {difference.partition(":")[0] for difference in found["differences"]}


def test_the_spread_has_every_pair_of_values() -> None:
    pairs = [
        {(i, case[i], j, case[j]) for case in cases for i in range(6) for j in range(i)}
        for cases in (SPREAD, CASES)
    ]
    assert pairs[0] == pairs[1] and len(CASES) == 216 and len(SPREAD) == 20


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case,
            marks=() if case in SPREAD else pytest.mark.slow,
            id="-".join(str(value).replace(" ", "") for value in case),
        )
        for case in CASES
    ],
)
def test_case(sources: Sources, case: Case) -> None:
    dtype, stage, optimizer, states, split, (before, after) = case
    folder = converted(sources, before, setup_of(case, before))
    flats = 2 if stage == 3 and split else 1
    left_out = WEIGHTS_ALONE | ({"scale"} if dtype == "fp16" else set())
    setup = setup_of(case, after, seed=9)
    for rank in sources.ranks.run(after, LOADS, setup, folder, states, timeout_s=200):
        for found in rank.values():
            assert len(found["before"]) >= 24, "the target was like the source before the load"
        for found in (rank["universal"], rank["native"]):
            assert kinds(found) == (set() if states else left_out)
            assert found["flats"] == (flats if states else 0)
            assert found["states"] == held_if(states)
            assert found["groups"] == [] or not states
            assert found["step tensors"] == (flats if states and optimizer == "AdamW" else 0)
        # S12: stages 1 and 2 load the states although they should not
        check_stock(rank["stock"], flats, states or stage < 3, optimizer == "AdamW", left_out)


def check_stock(
    stock: dict[str, Any], flats: int, given: bool, adamw: bool, left_out: set[str]
) -> None:
    assert stock["error"] == ""
    assert kinds(stock) == (FORGOTTEN if given else FORGOTTEN | left_out)
    assert stock["flats"] == (flats if given else 0)
    assert stock["states"] == held_if(given)
    # S1: ZeRO-3 has one step tensor for all of its flats, which then counts once for each of them
    assert stock["step tensors"] == (1 if given and adamw else 0)


MOMENTS = ["exp_avg", "exp_avg_sq", "fp32"]


def held_if(states: bool) -> list[str]:
    return MOMENTS if states else ["fp32"]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_s2_stock_gives_all_groups_of_zero_3_the_first_ones_settings(
    sources: Sources, stage: int
) -> None:
    folder = converted(sources, 2, Setup(stage, "bf16"))
    for rank in sources.ranks.run(2, LOADS, Setup(stage, "bf16", seed=9), folder, True):
        assert kinds(rank["universal"]) == kinds(rank["native"]) == set()
        assert kinds(rank["stock"]) == FORGOTTEN | ({"hyper"} if stage == 3 else set())
        decays = {"embed.weight": 0.1, "up.weight": 0.1, "up.bias": 0.0, "gain": 0.0}
        assert {name: rank["native"]["decay"][name] for name in decays} == decays
        assert {name: rank["stock"]["decay"][name] for name in decays} == {
            n: 0.1 if stage == 3 else d for n, d in decays.items()
        }


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_l12_stock_needs_the_native_files_for_weights_alone(
    sources: Sources, tmp_path: Path, stage: int
) -> None:
    """At ZeRO-3 it reads them by the way (and does not use them): a universal folder alone is not
    enough there."""
    source = converted(sources, 2, Setup(stage, "bf16"))
    for name in ("filled_universal", "latest_universal", "oracle.pt"):
        (shutil.copytree if name == "filled_universal" else shutil.copy)(
            Path(source) / name, tmp_path / name
        )
    for rank in sources.ranks.run(
        2, LOADS, Setup(stage, "bf16", seed=9), str(tmp_path), False, ("stock", "universal")
    ):
        assert kinds(rank["universal"]) == WEIGHTS_ALONE
        if stage == 3:
            assert (
                rank["stock"]["error"]
                == f"ValueError: Unable to find 'latest' file at {tmp_path}/latest"
            )
            assert sorted(rank["stock"]["differences"]) == sorted(rank["stock"]["before"])
        else:
            assert rank["stock"]["error"] == "" and kinds(rank["stock"]) == FORGOTTEN


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_stock_loads_no_universal_folder_at_stage_0(sources: Sources, dtype: str) -> None:
    """L2: what it looks for in the model file is the optimizer of a native save."""
    folder = converted(sources, 2, Setup(0, dtype))
    for rank in sources.ranks.run(2, LOADS, Setup(0, dtype, seed=9), folder, True):
        assert kinds(rank["universal"]) == kinds(rank["native"]) == set()
        assert (
            rank["stock"]["error"] == STAGE_0[dtype]
            and "weights up.weight" in rank["stock"]["differences"]
        )


NO_OPTIMIZER = "TypeError: 'NoneType' object is not subscriptable"
STAGE_0 = {
    "fp32": "AttributeError: 'NoneType' object has no attribute 'copy'",
    "bf16": NO_OPTIMIZER,
    "fp16": NO_OPTIMIZER,
}


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_stock_cuts_for_tensor_parallelism_at_stages_1_and_2(sources: Sources, stage: int) -> None:
    """At ZeRO-3 it takes each parameter as whole, which a rank of tp=2 has no room for."""
    folder = converted(sources, 4, Mega("llama", 2, 1))
    for rank in sources.ranks.run(2, LOADS, Mega("llama", 2, stage, seed=9), folder, True):
        assert kinds(rank["universal"]) == kinds(rank["native"]) == set()
        if stage == 3:
            assert (
                rank["stock"]["error"].startswith("RuntimeError: start (")
                and "exceeds dimension size" in rank["stock"]["error"]
            )
        else:
            assert (
                rank["stock"]["error"] == "" and kinds(rank["stock"]) == set()
            )  # no frozen parameters, no buffers


@pytest.mark.parametrize("fault", ["one bit", "one moment", "one step"])
def test_a_planted_fault_is_seen(sources: Sources, fault: str) -> None:
    folder = converted(sources, 2, Setup(3, "bf16", groups=1))
    seen = {"one bit": "full ", "one moment": "full ", "one step": "scalars: "}[fault]
    for rank in sources.ranks.run(
        2, LOADS, Setup(3, "bf16", groups=1, seed=9), folder, True, ("universal",), plant=fault
    ):
        assert any(difference.startswith(seen) for difference in rank["universal"]["differences"])


def test_a_planted_key_of_a_group_is_seen(sources: Sources) -> None:
    setup = Setup(3, "fp32", groups=1)
    folder, plant = converted(sources, 2, setup), "one group's weight decay"
    for rank in sources.ranks.run(2, LOADS, setup, folder, True, ("native",), plant=plant):
        assert rank["native"]["groups"] == ["0: weight_decay"]
