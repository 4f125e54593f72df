"""What the ranks do in the cases of upstream's tests of universal checkpoints: stock's load and
ours of one folder."""

from typing import Any

import torch

import megatron_ucp as ucp
from tests.engines.canonical import base_of, canonical, differences
from tests.engines.kinds import group_settings, kind_of, oracle_of, plant_fault, universal_folders


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
