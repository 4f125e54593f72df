"""What ranks do with the recipes of the pages, word for word."""

import os
import re
from types import SimpleNamespace
from typing import Any

import megatron_ucp as ucp
from megatron_ucp.formats.store import location
from tests.docs.journeys import called
from tests.engines import autotp_jobs
from tests.engines.autotp_jobs import Auto
from tests.engines.canonical import canonical, differences, everywhere
from tests.engines.model import Setup, make_engine, train
from tests.rank_reset import take_down
from tests.ranks import ROOT


def recipe(page: str, heading: str) -> str:
    """The first block of Python below a heading of a page."""
    text = (ROOT / "docs" / page).read_text().partition(f"\n## {heading}\n")[2]
    return re.search(r"```python\n(.*?)```", text, re.DOTALL)[1]  # type: ignore[index]


def in_between(store: str, edit: bool) -> Any:
    """A run is held, the world is taken down as the page says, and the next one of three ranks is
    built. What differs then. `edit`: as the page once said it, which must fail."""
    import deepspeed
    import torch
    import torch.distributed as dist

    rank, where = dist.get_rank(), f"file://{store}"
    engine = make_engine(Setup(1))
    train(engine, 2)
    want = canonical(engine)
    held = ucp.hold(engine, ranks=3)
    block = recipe("resize.md", "In between")
    assert "deepspeed.comm.destroy_process_group()" in block
    if edit:
        block = block.replace("deepspeed.comm.destroy", "torch.distributed.destroy")
    before = {name: os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_SIZE")}
    names = {"engine": engine, "rank": rank, "where": where, "torch": torch, "os": os}
    try:
        if rank == 3:  # it leaves
            take_down()
            return []
        exec(block, names | {"deepspeed": deepspeed})
        again = make_engine(Setup(3, seed=9))
        ucp.load(again, held)
        found = differences(everywhere(want)[0], canonical(again))
        again.destroy()
        return found
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def refits() -> dict[str, list[str]]:
    """The blocks of refit.md, in their order; after each the weights that are not the
    trainer's."""
    import torch

    trainer = make_engine(Setup(1))
    rollout = make_engine(Setup(0, seed=9, extra={"evaluate": True}))
    like = {name: value.detach() for name, value in trainer.module.named_parameters()}
    tensors = {name: torch.zeros_like(value) for name, value in like.items()}
    taken: dict[str, torch.Tensor] = {}
    names: dict[str, Any] = {
        **{"ucp": ucp, "trainer": trainer, "rollout": rollout, "tensors": tensors},
        **{"batches": range(2), "train": lambda engine, step: train(engine, 1, first=step)},
        **{"load_weights": taken.update, "rank": 0},
    }
    text = (ROOT / "docs" / "refit.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    found: dict[str, list[str]] = {}
    for number, block in enumerate(blocks):
        if number:
            train(trainer, 1, first=number)
        exec(block.replace(" if rank >= 2 else None", ""), names)  # both are on all ranks here
        have = taken if number == 1 else dict(rollout.module.named_parameters())
        found[f"block {number}"] = [
            name for name, value in like.items() if not torch.equal(value, have[name].detach())
        ]
    return found


def in_a_bucket() -> list[str]:
    """The blocks of stores.md that save and resume, for a model of transformers whose config lies
    beside the saves, as trainers leave it: what differs between what was saved and what is there
    again."""
    saved, again = (autotp_jobs.make(Auto("even", 1, zero), attach=False) for zero in (1, 3))
    autotp_jobs.train(saved, 2)
    exec(recipe("stores.md", "Save to a bucket"), {"ucp": ucp, "engine": saved})
    ucp.wait(saved)
    config = location("s3://bucket/runs/llama/config.json")
    config.write_text(saved.module.config.to_json_string())
    made = SimpleNamespace(initialize=lambda **_: (again, None, None, None))
    names = {"ucp": ucp, "deepspeed": made, "model": None, "ds_config": None}
    exec(recipe("stores.md", "Resume from a bucket"), names)
    return differences(canonical(saved), canonical(again))


def journeys(folder: str) -> dict[str, list[str]]:
    """What a save, a load, and a hold with its load call, by the headings of the architecture."""
    first = make_engine(Setup(1))
    train(first, 1)
    ucp.attach(first)
    saving = called(lambda: first.save_checkpoint(folder, tag="one"))
    again = make_engine(Setup(1, seed=9))
    loading = called(lambda: ucp.load(again, folder, tag="one"))
    held: list[Any] = []
    holding = called(lambda: held.append(ucp.hold(first)))
    third = make_engine(Setup(1, seed=7))
    holding += [name for name in called(lambda: ucp.load(third, held[0])) if name not in holding]
    for engine in (first, again, third):
        engine.destroy()
    return {"A save": saving, "A load": loading, "A resize": holding}
