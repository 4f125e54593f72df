"""What the ranks do in the tests of parameters without elements."""

import math
from typing import Any

import megatron_ucp as ucp
from tests.engines.canonical import canonical, differences
from tests.engines.kinds import oracle_of
from tests.engines.model import Setup, make_engine, train


def resume_empty(setup: Setup, folder: str) -> dict[str, Any]:
    """What differs before and after a load, but for what an optimizer counts for a parameter
    without elements; its shape, and whether training goes on."""
    kept = oracle_of(folder)
    want = of_elements(kept["states"]["trained"])
    engine = make_engine(setup)
    before = differences(want, of_elements(canonical(engine)))
    ucp.load(engine, folder, tag="trained")
    out = {"before": before, "after": differences(want, of_elements(canonical(engine)))}
    (nothing,) = (p for n, p in engine.module.named_parameters() if n == "nothing")
    out["shape"] = tuple(getattr(nothing, "ds_shape", nothing.shape))
    losses = train(engine, 2, first=kept["steps"])
    out["steady"] = all(math.isfinite(loss) for loss in losses) and nothing.requires_grad
    engine.destroy()
    return out


def of_elements(state: dict[str, Any]) -> dict[str, Any]:
    """A canonical state without the entries of the optimizer for `nothing`."""
    counted = {
        part: {key: value for key, value in state[part].items() if "nothing" not in (key, key[0])}
        for part in ("full", "scalars", "hyper")
    }
    return {**state, **counted}
