"""Calls that some ranks make with other options than others."""

from functools import partial
from pathlib import Path
from typing import Any

import torch

import megatron_ucp as ucp
from tests.engines import megatron_jobs
from tests.engines.canonical import canonical, differences
from tests.engines.kinds import refusal_of
from tests.engines.model import Setup, make_engine, train

SETUP = Setup(1, groups=1)


def saved(folder: str, other: str) -> None:
    """Two tags in one folder, and one in another."""
    engine = make_engine(SETUP)
    for step, (path, tag) in enumerate([(folder, "one"), (other, "one"), (folder, "two")]):
        train(engine, 1, first=step)
        engine.save_checkpoint(path, tag=tag)
    engine.destroy()


def differing(folder: str) -> dict[str, Any]:
    """What loads and saves say where rank 1 asks for something else."""
    rank = torch.distributed.get_rank()
    other = f"{folder}/other"
    saved(folder, other)
    engine = make_engine(SETUP)
    before = canonical(engine)
    found: dict[str, Any] = {}
    for name, values in loads(folder, other).items():
        asked = {"path": folder, "tag": "one", name.split()[-1]: values[rank]}
        found[name] = refusal_of(partial(ucp.load, engine, **asked))
    for name, values in methods(folder).items():
        asked = {"load_dir": folder, "tag": "one", **values[rank]}
        found[f"load_checkpoint {name}"] = refusal_of(partial(engine.load_checkpoint, **asked))
    found["unchanged"] = differences(before, canonical(engine)) == []
    for name in ("save_latest", "exclude_frozen_parameters"):
        asked = {"save_dir": folder, "tag": "three", name: bool(rank)}
        found[f"save {name}"] = refusal_of(partial(engine.save_checkpoint, **asked))
    torch.distributed.barrier()  # rank 0 has removed what it had made for the save
    found["left"] = sorted(path.name for path in Path(folder).iterdir() if path.suffix != ".py")
    report = ucp.load(engine, (folder, f"{folder}/./")[rank], "one")  # one folder, spelled twice
    found["loaded"] = report.path
    engine.destroy()
    return found


def loads(folder: str, other: str) -> dict[str, tuple[Any, Any]]:
    """The last word of each is an option of `load`, with what both ranks give."""
    return {
        "load_optimizer_states": (True, False),
        "load_lr_scheduler_states": (True, False),
        "load_module_only": (False, True),
        "hyper": ("checkpoint", "config"),
        "an unknown hyper": ("checkpoint", "mine"),
        "allow": ((), {"missing"}),
        "rng": (True, False),
        "checksums": (True, False),
        "tag": ("one", "two"),
        "path": (folder, other),
    }


def methods(folder: str) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """What both ranks give `load_checkpoint`."""
    return {
        "native": ({"native": False}, {"native": True}),
        "load_module_strict": ({"load_module_strict": True}, {"load_module_strict": False}),
        "load_dir": ({"tag": None}, {"tag": None, "load_dir": f"{folder}/none"}),
    }


def attached() -> dict[str, str]:
    """What `attach` says where rank 1 gives it other options."""
    rank = torch.distributed.get_rank()
    engine = make_engine(SETUP, attach=False)
    found = {
        name: refusal_of(partial(ucp.attach, engine, **{name: values[rank]}))
        for name, values in {
            "keep_latest": (1, 2),
            "durable": (True, False),
            "hyper": ("checkpoint", "mine"),
            "allow": (["missing"], []),
            "rng": (True, False),
        }.items()
    }
    engine.destroy()
    return found


def stack(folder: str) -> dict[str, Any]:
    """As `differing`, of megatron-core's own stack; and a load under inference mode, after which
    it trains as before."""
    rank = torch.distributed.get_rank()
    engine = megatron_jobs.make(megatron_jobs.Mcore(layers=2))
    megatron_jobs.train(engine, 1)
    megatron_jobs.settle(engine)
    handle = engine.handle
    ucp.save(handle, folder)
    want = megatron_jobs.train(engine, 2, first=1)
    found: dict[str, Any] = {}
    for name in ("load_optimizer_states", "load_module_only"):
        found[name] = refusal_of(partial(ucp.load, handle, folder, **{name: bool(rank)}))
    found["path"] = refusal_of(partial(ucp.load, handle, (folder, f"{folder}/none")[rank]))
    for name in ("durable", "rng"):
        found[f"save {name}"] = refusal_of(partial(ucp.save, handle, folder, **{name: not rank}))
    found["save keep_latest"] = refusal_of(partial(ucp.save, handle, folder, keep_latest=1 + rank))
    with torch.inference_mode():
        ucp.load(handle, folder)
    found["equal"] = megatron_jobs.train(engine, 2, first=1) == want
    megatron_jobs.close(engine)
    return found
