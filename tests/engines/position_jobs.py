"""What the ranks do in the tests of stage-0 files that name no parameters."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.engines.canonical import canonical, write_weights
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
