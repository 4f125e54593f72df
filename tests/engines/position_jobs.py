"""What the ranks do in the tests of stage-0 files that name no parameters."""

import math
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import megatron_ucp as ucp
from tests.engines.canonical import canonical, differences, write_weights
from tests.engines.kinds import oracle_of
from tests.engines.model import Setup, make_engine, train


def save_alike(setup: Setup, folder: str) -> None:
    """Two matrices whose masters differ in what rounding takes away: their weights are the same."""
    engine = make_engine(setup, attach=False)
    train(engine, 2)
    masters = masters_of(engine)
    masters["left.weight"].data.fill_(0.5)
    masters["right.weight"].data.fill_(0.5 + 2.0**-13)
    write_weights(engine)
    engine.save_checkpoint(folder, tag="trained")
    states = {"trained": canonical(engine)}
    if dist.get_rank() == 0:
        torch.save({"states": states, "losses": [], "steps": 2}, Path(folder) / "oracle.pt")
    engine.destroy()


def masters_of(engine: Any) -> dict[str, torch.Tensor]:
    """The master of each parameter of an engine whose optimizer is not flattened."""
    opt, names = engine.optimizer, {p: n for n, p in engine.module.named_parameters()}
    return {
        names[param]: master
        for params, masters in zip(opt.fp16_groups, opt.fp32_groups, strict=True)
        for param, master in zip(params, masters, strict=True)
    }


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
