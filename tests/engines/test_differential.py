"""A differential test: our load and stock DeepSpeed's load of the same files, on the same mesh,
leave the same engine beside its tensors."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import megatron_ucp as ucp
from tests.engines.masters import base_of
from tests.engines.model import WIDTH, engine_around
from tests.engines.value_kinds import KINDS, exactly, strangers
from tests.ranks import RankPool, RanksFailed

# ------------------------------------------------ values

_FLOATS = st.floats(allow_nan=True, width=64)
_NUMBERS = st.one_of(
    st.integers(-(2**70), 2**70),
    _FLOATS,
    st.booleans(),
    st.integers(0, 2**31 - 1).map(np.int64),
    st.integers(0, 255).map(np.uint8),
    _FLOATS.map(np.float64),
    st.floats(width=32).map(np.float32),
)
_LEAVES = st.one_of(
    _NUMBERS,
    st.text(max_size=5),
    st.binary(max_size=5),
    st.sampled_from([make()[0] for make in KINDS.values()]),
)
_KEYS = st.one_of(st.text(max_size=4), st.integers(), st.tuples(st.integers(), st.text(max_size=2)))
VALUES = st.recursive(
    _LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(_KEYS, inner, max_size=3),
    ),
    max_leaves=6,
)

# ------------------------------------------------ schedulers, groups


_RATES = st.floats(1e-5, 1e-1)
_STEPS = st.integers(1, 5)


def _as_numpy(numbers: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(numbers, numbers.map(np.asarray).map(lambda array: array[()]))


_SCHEDULES = torch.optim.lr_scheduler
SCHEDULERS: st.SearchStrategy[Any] = st.one_of(
    st.lists(_STEPS, max_size=3).flatmap(
        lambda steps: st.sampled_from([steps, list(np.array(steps, dtype=np.int64))]).map(
            lambda milestones: lambda opt: _SCHEDULES.MultiStepLR(opt, milestones, 0.3)
        )
    ),
    st.tuples(_STEPS, _as_numpy(_RATES)).map(
        lambda drawn: lambda opt: _SCHEDULES.StepLR(opt, drawn[0], drawn[1])
    ),
    st.tuples(_STEPS, _as_numpy(_RATES)).map(
        lambda drawn: lambda opt: _SCHEDULES.CosineAnnealingLR(opt, drawn[0], drawn[1])
    ),
    _STEPS.map(lambda steps: lambda opt: _SCHEDULES.CosineAnnealingWarmRestarts(opt, steps)),
    st.just(lambda opt: _SCHEDULES.LambdaLR(opt, lambda step: np.float64(1.0 / (1 + step)))),
    _RATES.map(lambda top: lambda opt: _SCHEDULES.OneCycleLR(opt, top, total_steps=50)),
    _STEPS.map(
        lambda steps: (
            lambda opt: _SCHEDULES.SequentialLR(
                opt, [_SCHEDULES.ConstantLR(opt), _SCHEDULES.ExponentialLR(opt, 0.9)], [steps]
            )
        )
    ),
    _STEPS.map(lambda steps: lambda opt: _SCHEDULES.PolynomialLR(opt, 9, power=steps)),
)
CASES = st.fixed_dictionaries(
    {
        "schedule": SCHEDULERS,
        "steps": st.integers(0, 4),
        "kept": VALUES,
        "rate": _as_numpy(_RATES),
        "decay": _as_numpy(_RATES),
        "betas": st.sampled_from([(0.9, 0.95), (np.float32(0.9), 0.99), (np.float64(0.8), 0.9)]),
        "own": st.dictionaries(st.sampled_from(["name_of_mine", "layer", "mask"]), VALUES),
        "client_state": st.dictionaries(st.text("abc", min_size=1, max_size=3), VALUES, max_size=3),
    }
)


_OF_ADAMW = {"params", *torch.optim.AdamW([torch.zeros(1)]).defaults}


def engine_of(zero: int) -> Any:
    torch.manual_seed(11)
    net = torch.nn.Linear(WIDTH, 3)
    groups = [{"params": [net.weight]}, {"params": [net.bias], "lr": 0.5}]
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": zero, "stage3_param_persistence_threshold": 0},
        "steps_per_print": 10**9,
    }
    engine = engine_around(net, torch.optim.AdamW(groups), config)
    engine.backward(engine(torch.ones(1, WIDTH)).sum())
    engine.step()
    return engine


def prepare(engine: Any, case: dict[str, Any], saved: bool) -> None:
    """Gives an engine the scheduler of a case; one that saves its values and steps too."""
    for number, group in enumerate(base_of(engine).param_groups):
        for key in [key for key in group if key not in _OF_ADAMW]:
            del group[key]
        group["lr"], group["betas"], group["weight_decay"] = 0.25, (0.5, 0.5), 0.125
        if saved:
            own = {"lr": case["rate"] * (1 + number), "weight_decay": case["decay"]}
            group.update(copy.deepcopy({**own, "betas": case["betas"], **case["own"]}))
    engine.lr_scheduler = case["schedule"](base_of(engine))
    engine.lr_scheduler.kept = copy.deepcopy(case["kept"]) if saved else None
    for _ in range(case["steps"] if saved else 0):
        engine.lr_scheduler.step()


def left(engine: Any, client_state: Any) -> dict[str, Any]:
    """What a load left in an engine, beside tensors."""
    groups = [
        {key: value for key, value in sorted(group.items()) if key != "params"}
        for group in base_of(engine).param_groups
    ]
    return {
        "groups": groups,
        "scheduler": engine.lr_scheduler.state_dict(),
        "client_state": client_state,
    }


def next_rates(engine: Any) -> list[Any]:
    out = []
    for _ in range(3):
        engine.lr_scheduler.step()
        out.append([group["lr"] for group in base_of(engine).param_groups])
    return out


def require_same(want: dict[str, Any], have: dict[str, Any]) -> None:
    for what in want:
        if not exactly(want[what], have[what]):
            raise AssertionError(f"{what}: {want[what]} and {have[what]}")
    if bad := strangers(have):
        raise AssertionError(f"classes of the package: {bad}")


def side_by_side(zero: int, folder: str, examples: int, plant: bool = False) -> int:
    """Compares both loads of generated cases; returns how many. `plant`: a value is changed after
    the load, which the comparison has to see."""
    source, stock, ours = (engine_of(zero) for _ in range(3))
    if not zero:
        ucp.attach(source)  # by its manifest alone states have names
    count = 0

    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],  # a smaller case takes minutes of loads to find
    )
    @given(CASES)
    def run(case: dict[str, Any]) -> None:
        nonlocal count
        prepare(source, case, saved=True)
        source.save_checkpoint(folder, tag=str(count), client_state=case["client_state"])
        for engine in (stock, ours):
            prepare(engine, case, saved=False)
        _, client_state = stock.load_checkpoint(folder, tag=str(count))
        want = left(stock, {key: client_state[key] for key in case["client_state"]})
        have = left(ours, dict(ucp.load(ours, Path(folder) / str(count)).client_state))
        if plant:
            have["groups"][0]["lr"] = float(np.nextafter(have["groups"][0]["lr"], 1))
        require_same(want, have)
        require_same({"rates": next_rates(stock)}, {"rates": next_rates(ours)})
        count += 1

    run()
    for engine in (source, stock, ours):
        engine.destroy()
    return count


# ------------------------------------------------ tests


pytestmark = pytest.mark.ranks
JOB = side_by_side
EXAMPLES = 30


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_both_loads_leave_the_same_engine(ranks: RankPool, tmp_path: Path, zero: int) -> None:
    (count,) = ranks.run(1, JOB, zero, str(tmp_path), EXAMPLES, timeout_s=300)
    assert count >= EXAMPLES


@pytest.mark.slow
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_many_cases_leave_the_same_engine(ranks: RankPool, tmp_path: Path, zero: int) -> None:
    (count,) = ranks.run(1, JOB, zero, str(tmp_path), 300, timeout_s=1200)
    assert count >= 300


def test_the_comparison_sees_a_changed_value(ranks: RankPool, tmp_path: Path) -> None:
    with pytest.raises(RanksFailed, match="groups: "):
        ranks.run(1, JOB, 1, str(tmp_path), 2, plant=True)
