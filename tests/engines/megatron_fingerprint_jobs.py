"""What the ranks do in the tests of the fingerprint of megatron-core's stack."""

from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import megatron_ucp as ucp
from tests.engines import cross_jobs, tensor_jobs
from tests.engines.cross_jobs import Zero
from tests.engines.kinds import attached
from tests.engines.megatron_jobs import Engine, Mcore, arguments, close, make, train
from tests.engines.megatron_states import held, numbered, plant_fault


@contextmanager
def trained(setup: Mcore, steps: int) -> Any:
    """An engine of either kind: what this package handles, and what `megatron_states` takes."""
    if isinstance(setup, Zero):
        engine = cross_jobs.make(setup)
        tensor_jobs.train(engine, steps, first=90)
        yield engine, None
        tensor_jobs.close(engine)
    else:
        own = make(setup)
        train(own, steps, first=90)
        yield own.handle, own
        close(own)


def memory(engine: Engine) -> list[int]:
    """Where everything that the optimizer steps lies."""
    tensors = [t for one in held(engine) for t in (one[3], *one[4].values())]
    return [tensor.data_ptr() for tensor in tensors if isinstance(tensor, torch.Tensor)]


def saved(setup: Mcore, folder: str, way: str = "direct") -> dict[str, Any]:
    """Fingerprints of an engine, and of the files of its save; what the first one moved."""
    engine = attached(setup, save="background") if way == "background" else make(setup)
    first = ucp.fingerprint(engine.handle)
    train(engine, 2)
    before = memory(engine)
    own = ucp.fingerprint(engine.handle)
    moved = before != memory(engine)
    ucp.save(engine.handle, folder, arguments=arguments(engine))
    if way == "background":
        train(engine, 1, first=2)
        ucp.wait(engine.handle)
    notes = ucp.report(engine.handle).save.notes
    dist.barrier()
    files = ucp.fingerprint(folder)
    close(engine)
    states = sorted({state for kept in first.table.values() for state in kept})
    return {"own": own, "files": files, "moved": moved, "notes": notes, "first": states}


def loaded(setup: Mcore, folder: str) -> list[Any]:
    """The fingerprint of an engine that loaded a save, and how far it was from it."""
    with trained(replace(setup, seed=9), 1) as (handle, _):
        before = ucp.fingerprint(handle)
        ucp.load(handle, folder, load_lr_scheduler_states=False)
        after = ucp.fingerprint(handle)
    return [after, len(before.differences(after))]


def refused(setup: Mcore, folder: str) -> str:
    with trained(setup, 1) as (handle, _):
        try:
            ucp.load(handle, folder, load_lr_scheduler_states=False)
        except ucp.UcpError as error:
            return f"{type(error).__name__}: {error}"
    return ""


def changed_by(setup: Mcore, faults: list[str]) -> dict[str, list[str]]:
    """What a fault of each kind changes."""
    out: dict[str, list[str]] = {}
    with trained(setup, 2) as (handle, engine):
        before = ucp.fingerprint(handle)
        for fault in faults:
            plant_fault(engine, fault)
            after = ucp.fingerprint(handle)
            out[fault], before = before.differences(after), after
    return out


def diverged(setup: Mcore, param: str, folder: str) -> dict[str, Any]:
    """One bit of a copy of a parameter differs on the last rank: what a save says, and what the
    fingerprint of the engine is."""
    out: dict[str, Any] = {}
    with trained(setup, 2) as (handle, engine):
        names = numbered(engine)
        ucp.save(handle, folder, arguments=arguments(engine))
        out["alike"] = ucp.report(handle).save.notes
        for held_param, _, _, master, _, _ in held(engine):
            if dist.get_rank() == dist.get_world_size() - 1 and names[held_param] == param:
                master.view(torch.int32).view(-1)[1] ^= 1
        ucp.save(handle, f"{folder}/apart", arguments=arguments(engine))
        out["notes"] = ucp.report(handle).save.notes
        try:
            ucp.fingerprint(handle)
        except ucp.UcpError as error:
            out["error"] = f"{type(error).__name__}: {error}"
    out["recorded"] = sorted(ucp.fingerprint(Path(folder) / "apart").table)
    return out
