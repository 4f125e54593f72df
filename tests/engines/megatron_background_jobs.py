"""What the ranks do in the tests of saves of megatron-core's stack that go on beside training."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import megatron_ucp as ucp
from megatron_ucp.core.manifest import RUN
from megatron_ucp.engines.background import Background
from megatron_ucp.engines.megatron import save as saving
from megatron_ucp.engines.megatron.live import CurrentStates
from megatron_ucp.reshard import agree
from tests.engines import kinds
from tests.engines.background_jobs import background_for
from tests.engines.kinds import state_after_load
from tests.engines.megatron_jobs import (
    Engine,
    Mcore,
    arguments,
    attached,
    close,
    make,
    settle,
    train,
)
from tests.engines.megatron_states import canonical, compare
from tests.engines.save_jobs import listing


def saved_both_ways(setup: Mcore, folder: str, **options: Any) -> list[Any]:
    """Saves one moment at once and in the background; what both report."""
    engine = make(setup)
    train(engine, 2)
    reports = []
    for way in ("direct", "background"):
        own = attached(engine, save=way, **(options if way == "background" else {}))
        begun = ucp.save(own.handle, f"{folder}/{way}", arguments=arguments(engine))
        assert begun.is_under_way == (way == "background")
        ucp.wait(own.handle)
        reports.append(ucp.report(own.handle).save)
    close(engine)
    return reports


def trained_on(setup: Mcore, folder: str, plant: str = "") -> dict[str, list[str]]:
    """A save in the background whose writer starts ten steps later; what differs between the state
    at the call and what a load of it gives, and what the steps changed. `plant`: something is left
    out of what is taken."""
    engine = kinds.attached(setup, save="background")
    background = background_for(engine.handle)
    train(engine, 2)
    with _left_live(engine, background, plant):
        held: list[Any] = []
        background.start = lambda *work: held.append(work)  # type: ignore[method-assign]
        flags = {"consumed_train_samples": 8, "many": {"a": [1, 2]}}
        ucp.save(engine.handle, folder, arguments=flags)
        flags["many"]["a"].append(3)  # type: ignore[index]
        settle(engine)
        want = canonical(engine)
        assert not (Path(folder) / "latest_checkpointed_iteration.txt").exists()
        train(engine, 10, first=2)
        settle(engine)
        changed = compare(want, canonical(engine))
        del background.start
        world = agree.world
        agree.world = lambda: (0, 1)  # as when a program's process groups are gone
        background.start(*held[0])
        ucp.wait(engine.handle)
        agree.world = world
    close(engine)
    found = state_after_load(setup, folder, want)["differences"]
    return {"found": found, "changed": changed}


@contextmanager
def _left_live(engine: Engine, background: Background, plant: str) -> Iterator[None]:
    finish, taken = saving.finish_files, background.snapshot.copy
    if plant == "schedule":
        saving.finish_files = partial(_with_live_schedule, engine, finish)  # type: ignore
    if plant == "elements":
        background.snapshot.copy = lambda memory: memory  # type: ignore[method-assign]
    yield
    saving.finish_files, background.snapshot.copy = finish, taken  # type: ignore


def _with_live_schedule(engine: Engine, finish: Any, aside: Path, plan: Any, common: Any) -> None:
    """Writes the counts of a schedule as they are when the writer comes to them."""
    common.tree["opt_param_scheduler"]["num_steps"] = engine.scheduler.state_dict()["num_steps"]
    finish(aside, plan, common)


def torn(setup: Mcore, folder: str, way: str, after: int, checked: bool) -> dict[str, Any]:
    """A save during which the engine steps, `after` so many windows were taken; then the same
    without a step. Not `checked`: nobody counts the steps. What a load of each gives, against the
    state at the call (`found`) and the one after the step (`later`)."""
    engine = kinds.attached(setup, save=way)
    train(engine, 2)
    settle(engine)
    want, out = canonical(engine), dict[str, Any](error="")
    check = CurrentStates.require_unstepped
    if not checked:
        CurrentStates.require_unstepped = lambda self: None  # type: ignore[method-assign]
    with _step_amid(engine, after):
        try:
            ucp.save(engine.handle, f"{folder}/torn", arguments=arguments(engine))
            ucp.wait(engine.handle)
        except ucp.UcpError as error:
            out["error"] = f"{type(error).__name__}: {error}"
    CurrentStates.require_unstepped = check  # type: ignore[method-assign]
    settle(engine)
    later = canonical(engine)
    ucp.save(engine.handle, f"{folder}/whole", arguments=arguments(engine))
    ucp.wait(engine.handle)
    close(engine)
    out["left"] = listing(f"{folder}/torn")
    out["changed"] = compare(want, later)
    out["whole"] = state_after_load(setup, f"{folder}/whole", later)["differences"]
    if not out["error"]:
        out["found"] = state_after_load(setup, f"{folder}/torn", want)["differences"]
        out["later"] = state_after_load(setup, f"{folder}/torn", later)["differences"]
    return out


@contextmanager
def _step_amid(engine: Engine, after: int) -> Iterator[None]:
    """The engine steps once on all ranks, when each has taken so many runs of a save."""
    take, done = saving.StackFiles._memory, []

    def stepping(self: saving.StackFiles, run: Any) -> Any:
        if len(done) == after:
            train(engine, 1, first=50)
        done.append(run)
        return take(self, run)

    saving.StackFiles._memory = stepping  # type: ignore[method-assign]
    yield
    saving.StackFiles._memory = take  # type: ignore[method-assign]
    assert len(done) > after + 1, "it stepped when all was taken"


def saved_again(setup: Mcore, folder: str, way: str) -> dict[str, Any]:
    """Three saves, of values that differ; then the last moment by a handle that has saved nothing
    yet."""
    engine = kinds.attached(setup, save=way)
    for step in range(3):
        train(engine, 1, first=step)
        ucp.save(engine.handle, f"{folder}/background", arguments=arguments(engine))
        ucp.wait(engine.handle)
    other = attached(engine, save="direct")
    ucp.save(other.handle, f"{folder}/direct", arguments=arguments(engine))
    settle(engine)
    want = canonical(engine)
    close(engine)
    return state_after_load(setup, f"{folder}/background", want)


def saved_as_another(
    setup: Mcore, others: Mcore, folder: str, load: Mcore | None = None
) -> dict[str, Any]:
    """A save of a stack, then one after its model and optimizer became those of another one,
    whose buffers lie otherwise."""
    engine = kinds.attached(setup, save="background")
    train(engine, 1)
    ucp.save(engine.handle, folder, arguments=arguments(engine))
    ucp.wait(engine.handle)
    close(engine)
    other = make(replace(others, seed=5))
    train(other, 2)
    handle = engine.handle
    for name in ("chunks", "optimizer", "scheduler", "mesh", "model"):
        setattr(handle, name, getattr(other.handle, name))
    handle.iteration, handle.consumed_samples = 7, other.handle.consumed_samples
    ucp.save(handle, folder, arguments=arguments(other))
    ucp.wait(handle)
    settle(other)
    want = canonical(other)
    close(other)
    return state_after_load(load or setup, folder, want, but=("counters",))


def manifest(folder: Path) -> dict[str, Any]:
    """A save's manifest, but when and by whom it was made."""
    said = json.loads((folder / "ucp_manifest.json").read_text())
    return {key: value for key, value in said.items() if key not in ("save_id", "run")} | {
        "run": {k: v for k, v in said["run"].items() if k not in ("saved_at", RUN)}
    }
