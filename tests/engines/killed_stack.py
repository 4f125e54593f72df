"""The runs of megatron-core's stack that `tests.engines.killed` kills."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import megatron_ucp as ucp
from tests.engines.killed import Runs
from tests.engines.stack_background_jobs import attached
from tests.engines.stack_jobs import Mcore, arguments, make, settle, train
from tests.engines.stack_states import canonical, compare

POINTER = "latest_checkpointed_iteration.txt"
SMALL = Mcore(layers=2, style="constant")
MESHES = [
    (SMALL, 2),
    (replace(SMALL, overlap=True, gather=True, bucket=2000), 2),
    (replace(SMALL, tp=2), 2),
    (replace(SMALL, pp=2), 2),
    (replace(SMALL, distributed=False), 2),
    (SMALL, 1),
]
MORE = 1  # steps after a resume


def save_on_and_on(setup: Mcore, folder: Path, steps: int, way: str) -> None:
    """A save in every other step."""
    engine = attached(make(setup), save=way)
    for step in range(1, steps + 1):
        train(engine, 1, first=step)
        if step % 2 == 0:
            ucp.save(engine.handle, folder, keep_latest=3, arguments=arguments(engine))


def go_uninterrupted(setup: Mcore, steps: int, oracle: Path) -> None:
    """The states of the same run, to which nothing happened, after so many steps, and the losses of
    the next ones."""
    engine = make(setup)
    train(engine, steps, first=1)
    settle(engine)
    states: dict[str, Any] = canonical(engine)
    states["losses"] = train(engine, MORE, first=steps + 1)
    if dist.get_rank() == 0:
        torch.save(states, oracle)


def load(setup: Mcore, folder: Path, result: Path) -> None:
    """Loads the newest whole tag on a mesh of its own, and goes on; then what the pointer names."""
    engine = make(replace(setup, seed=2))
    before = canonical(engine)
    found = ucp.newest_whole(folder)
    ucp.load(engine.handle, found.folder)
    step = engine.handle.iteration
    after = canonical(engine)
    losses = train(engine, MORE, first=step + 1)
    ucp.load(engine.handle, folder)
    if dist.get_rank() == 0:
        said = {
            "step": step,
            "tag": found.folder.name,
            "latest": f"iter_{int((folder / POINTER).read_text()):07d}",
            "passed_over": found.passed_over,
            "unfinished": [p.name for p in folder.iterdir() if p.name.endswith(".saving")],
        }
        torch.save({"said": said, "before": before, "after": after, "losses": losses}, result)


RUNS = {"stack": Runs(MESHES, POINTER, save_on_and_on, go_uninterrupted, load, compare)}
