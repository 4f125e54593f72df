"""What the ranks do where other parameters are trained than in the checkpoint."""

from typing import Any

import torch

import megatron_ucp as ucp
from tests.engines.canonical import canonical, differences
from tests.engines.kinds import plant_fault
from tests.engines.masters import base_of, named, runs_of
from tests.engines.model import Setup, make_engine, train


def plant(engine: Any, fault: str, name: str) -> None:
    """What a load must not do to a parameter that the checkpoint does not train; or a fault of
    another one."""
    if fault == "states of its own":
        (master,) = {master for held, _, _, master, *_ in runs_of(engine) if held == name}
        moments = {key: torch.zeros_like(master) for key in ("exp_avg", "exp_avg_sq")}
        base_of(engine).state[master] = {**moments, "step": torch.tensor(0.0)}
    elif fault == "another value":
        named(engine)[name].data.view(-1)[0] += 1
    elif fault:
        plant_fault(engine, fault)


def go_on(
    setup: Setup, folder: str, first: int, fault: str = "", name: str = "", **options: Any
) -> dict[str, Any]:
    """Canonical states before the load, after it, and after one more step; or the error. `fault`
    is planted after the load, that of one parameter in `name`."""
    engine = make_engine(setup)
    before = canonical(engine)
    try:
        report = ucp.load(engine, folder, tag="trained", **options)
    except ucp.UcpError as error:
        unchanged = differences(before, canonical(engine)) == []
        engine.destroy()
        return {"error": f"{type(error).__name__}: {error}", "unchanged": unchanged}
    plant(engine, fault, name)
    found = {"before": before, "after": canonical(engine), "notes": report.notes}
    train(engine, 1, first)
    found["stepped"] = canonical(engine)
    engine.destroy()
    return found
