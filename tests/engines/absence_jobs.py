"""What the ranks do in the test of the law of absence: one engine loads what is left of a save."""

import importlib
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

import megatron_ucp as ucp
from tests.engines import moe_pipe_jobs
from tests.engines.canonical import differences

EXACT = "exact"


def loads(
    making: Callable[..., Any], states: str, setup: Any, oracle: str, tags: list[str]
) -> list[str]:
    """Loads each tag folder into one engine, which has other values before: `EXACT` where it has
    what the engine had that saved, else what the load says. `making` makes the engine, `states`
    is the module that gathers its values and overwrites them."""
    known = moe_pipe_jobs.known() if making is moe_pipe_jobs.make else nullcontext()
    found: list[str] = []
    with known:
        engine = making(setup)
        values: Any = importlib.import_module(states)
        want = torch.load(Path(oracle) / "oracle.pt", weights_only=False)["states"]["trained"]
        for tag in tags:
            found.append(_load(engine, tag, want, values))
        engine.destroy()
    return found


def _load(engine: Any, tag: str, want: dict[str, Any], values: Any) -> str:
    values.fill(engine)
    if not differences(want, values.canonical(engine)):
        return "the engine had these values before the load: nothing is shown"
    try:
        ucp.load(engine, tag)
    except ucp.UcpError as error:
        return f"{type(error).__name__}: {error}"
    other = differences(want, values.canonical(engine))
    return f"other values: {other[:3]}" if other else EXACT
