"""What the ranks do where other parameters are trained than in the checkpoint."""

from typing import Any

import torch

from tests.engines.kinds import plant_fault
from tests.engines.masters import base_of, named, runs_of


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
