"""What the ranks do in the tests of steps in memory: a run keeps steps and ends; what is left goes
on in another world, of fewer ranks or machines."""

import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

import megatron_ucp as ucp
from megatron_ucp.formats.memory_folder import NODE, MemoryFolder
from tests.connected import connect
from tests.engines import stack_jobs
from tests.engines.canonical import everywhere
from tests.engines.resize_jobs import compared, dist_rank, kind_of, look
from tests.rank_reset import take_down


@dataclass(frozen=True)
class World:
    """Ranks of a job that make up a world: as many as there are `nodes`, the machine of each. What
    trains there is an engine of `setup`, which is attached with `options`."""

    setup: Any
    nodes: tuple[str, ...]
    options: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def ranks(self) -> int:
        return len(self.nodes)


def make(world: World, folder: str, every: int) -> Any:
    """An engine whose steps are kept in memory."""
    setup, options = world.setup, {"keep": "memory", "every": every, "folder": folder}
    options |= world.options
    if isinstance(setup, stack_jobs.Mcore):
        engine = stack_jobs.make(setup)
        parts = engine.stack.chunks, engine.optimizer, engine.scheduler
        engine.handle = ucp.attach_megatron(*parts, family=setup.family, **options)
        return engine
    engine = kind_of(setup).make(setup, attach=False)  # type: ignore[call-arg]
    return ucp.attach(engine, family=getattr(setup, "family", None), **options)


def connected(world: World, store: str) -> bool:
    """Brings a world up; whether this rank is in it."""
    take_down()
    rank = dist_rank()
    if rank >= world.ranks:
        return False
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world.ranks), NODE: world.nodes[rank]}
    connect(False, rank, world.ranks, store, 120)
    return True


def recalled(
    first: World,
    second: World,
    folder: str,
    store: str,
    steps: int = 5,
    every: int = 2,
    disk: tuple[int, ...] = (),
    lost: tuple[str, ...] = (),
    harm: Any = None,
) -> dict[str, Any]:
    """A run of so many steps that keeps some of them, saves some on `disk`, and ends; machines are
    `lost`, and `harm` comes to what is left. Another world loads, and compares."""
    found: dict[str, Any] = {}
    want: dict[int, Any] = {}
    kind = kind_of(first.setup)
    if connected(first, f"{store}0"):
        engine = make(first, folder, every)
        handle = kind.handle(engine)
        for step in range(1, steps + 1):
            kind.train(engine, 1, first=step)
            ucp.wait(handle)
            want[step] = kind.canonical(engine)
            if step in disk:
                handle.ucp.save(folder)
        found["kept"] = ucp.report(handle).memory
        found["files"] = files_of(first, folder)
        kind.close(engine)
        handle.__dict__["_ucp_memory_steps"].close()
        del engine, handle
    if connected(second, f"{store}1"):
        if dist.get_rank() == 0:
            lose(folder, lost)
            if harm is not None:
                harm(folder, first)
        dist.barrier()
        found |= loaded(first, second, folder, every, everywhere(want)[0])
    return found


def loaded(first: World, second: World, folder: str, every: int, want: Any) -> dict[str, Any]:
    """Fills another engine, and compares it with the step that it says it is of."""
    kind, compare = kind_of(second.setup), compared(first.setup, second.setup)
    engine = make(second, folder, every)
    handle = kind.handle(engine)
    if second.ranks != 3:  # a batch is one of four
        kind.train(engine, 1, first=99)
    found: dict[str, Any] = {}
    report = ucp.load(handle, folder)
    step = report.global_steps
    found |= {"step": step, "path": report.path, "notes": report.notes, "line": str(report)}
    look(found, kind, engine, want[step], compare)
    found["left"] = files_of(second, folder)
    kind.close(engine)
    handle.__dict__["_ucp_memory_steps"].close()
    return found


def memory_of(folder: str, node: str) -> MemoryFolder:
    """The folder of a run on a machine."""
    before = os.environ.get(NODE)
    os.environ[NODE] = node
    try:
        return MemoryFolder(Path(folder))
    finally:
        os.environ.pop(NODE)
        if before is not None:
            os.environ[NODE] = before


def files_of(world: World, folder: str) -> dict[str, list[str]]:
    """What lies on each machine."""
    return {
        node: sorted(path.name for path in memory_of(folder, node).path.glob("*"))
        for node in {*world.nodes}
    }


def lose(folder: str, nodes: tuple[str, ...]) -> None:
    """Machines go, with all that lies in their memory."""
    for node in nodes:
        shutil.rmtree(memory_of(folder, node).path)


def clear(folder: str) -> None:
    """Removes all that a test kept for a folder."""
    shutil.rmtree(memory_of(folder, "any").path.parent, ignore_errors=True)
