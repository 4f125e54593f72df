"""What the ranks do in the tests of steps in memory: a run keeps steps and ends; what is left goes
on in another world, of fewer ranks or machines."""

import json
import logging
import os
import shutil
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

import megatron_ucp as ucp
from megatron_ucp import say
from megatron_ucp.core.manifest import FILE_NAME, RUN
from megatron_ucp.engines import memory
from megatron_ucp.engines.memory import NODE, MemoryFolder
from megatron_ucp.engines.record import record_of
from megatron_ucp.reshard import agree
from tests.connected import connect
from tests.engines import megatron_jobs
from tests.engines.canonical import everywhere
from tests.engines.kinds import attached, kind_of, refusal_of
from tests.engines.model import SEQUENCE, Setup, make_engine, train
from tests.engines.resize_jobs import compared, dist_rank, look
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
    return attached(setup, **options)


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
            want[step] = kind.settled_state(engine)
            if step in disk:
                handle.ucp.save(folder)
        found["kept"] = ucp.report(handle).memory
        found["files"] = files_of(first, folder)
        kind.close(engine)
        record_of(handle).memory.close()
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
    found: dict[str, Any] = {"before": None}
    if second.ranks != 3:  # a batch is one of four
        with mock.patch.object(memory.MemorySteps, "ended_step"):  # no start of another run
            kind.train(engine, 1, first=99)
        found["before"] = compare(next(iter(want.values())), kind.settled_state(engine))
    report = ucp.load(handle, folder)
    step = report.global_steps
    found |= {"step": step, "path": report.path, "notes": report.notes, "line": str(report)}
    look(found, kind, engine, want[step], compare)
    found["left"] = files_of(second, folder)
    kind.close(engine)
    record_of(handle).memory.close()
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


def flip(folder: str, world: World, node: str, turn: int = 1) -> None:
    """One bit changes of what the first rank of a machine kept."""
    rank = world.nodes.index(node)
    (path,) = memory_of(folder, node).path.glob(f"*.{turn}.{rank}.bytes")
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 4
    path.write_bytes(data)


def unsay(folder: str, world: World, node: str, turn: int = 1) -> None:
    """What says that a machine's first rank kept a step is not as it was written."""
    rank = world.nodes.index(node)
    (path,) = memory_of(folder, node).path.glob(f"*.{turn}.{rank}.json")
    path.write_bytes(path.read_bytes().replace(b'"steps": 4', b'"steps": 9'))


def of_another_run(folder: str, _: World) -> None:
    """The tag on disk says that another run wrote it."""
    (path,) = Path(folder).glob(f"*/{FILE_NAME}")
    tree = json.loads(path.read_text())
    assert tree["run"][RUN]
    tree["run"][RUN] = "another"
    path.write_text(json.dumps(tree))


def lose(folder: str, nodes: tuple[str, ...]) -> None:
    """Machines go, with all that lies in their memory."""
    for node in nodes:
        shutil.rmtree(memory_of(folder, node).path)


def dies(world: World, folder: str, rank: int, moment: str, want: str) -> None:
    """Keeps steps 2 and 4, and what the state was; then a rank is killed while step 6 is kept."""
    os.environ[NODE] = world.nodes[dist.get_rank()]
    kind = kind_of(world.setup)
    engine = make(world, folder, every=2)
    handle = kind.handle(engine)
    for step in range(1, 6):
        kind.train(engine, 1, first=step)
        ucp.wait(handle)
        if step == 4:
            states = kind.settled_state(engine)
            if dist.get_rank() == 0:
                torch.save(states, want)
    if dist.get_rank() == rank:
        home, name = MOMENTS[moment]
        setattr(home, name, _killed)
    kind.train(engine, 2, first=6)  # step 6 is kept when the next one begins
    ucp.wait(handle)
    raise AssertionError("the step was whole")


MOMENTS: dict[str, tuple[Any, str]] = {
    "copies": (memory, "copy_of"),
    "sums": (memory, "sums_of_rank"),
    "writes what it says": (MemoryFolder, "write_aside"),
    "counts": (MemoryFolder, "count"),
}


def _killed(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def dies_anytime(world: World, folder: str, rank: int, after_s: float) -> None:
    """Keeps every step, until a rank is killed at some moment behind the second one, when the first
    one is whole on all ranks."""
    os.environ[NODE] = world.nodes[dist.get_rank()]
    kind = kind_of(world.setup)
    engine = make(world, folder, every=1)
    for step in range(1, 1000):
        kind.train(engine, 1, first=step)
        if step == 2:
            ucp.wait(kind.handle(engine))
            dist.barrier()
        if step == 2 and dist.get_rank() == rank:
            threading.Timer(after_s, _killed).start()
    raise AssertionError("nobody was killed")


def states_at(world: World, steps: int, want: str) -> None:
    """The states of the same run, to which nothing happened, after so many steps."""
    kind = kind_of(world.setup)
    engine = kind.make(world.setup)
    for step in range(1, steps + 1):
        kind.train(engine, 1, first=step)
    states = kind.settled_state(engine)
    if dist.get_rank() == 0:
        torch.save(states, want)
    kind.close(engine)


def newest_step(world: World, folder: str) -> int:
    """The step that a load takes."""
    os.environ[NODE] = world.nodes[dist.get_rank()]
    kind = kind_of(world.setup)
    engine = make(world, folder, 1)
    handle = kind.handle(engine)
    step = ucp.load(handle, folder).global_steps
    record_of(handle).memory.close()
    kind.close(engine)
    return step


def after_death(
    first: World, second: World, folder: str, want: str, step: int = 4
) -> dict[str, Any]:
    """What another world loads."""
    os.environ[NODE] = second.nodes[dist.get_rank()]
    states = torch.load(want, weights_only=False)
    return loaded(first, second, folder, 1000, {step: states})


def kept_step(engine: Any, steps: int = 1) -> None:
    """Some steps, and the evaluation that comes next, before which the last one is kept."""
    train(engine, steps)
    with torch.inference_mode():
        engine(torch.zeros((1, SEQUENCE), dtype=torch.int64))


def starts_again(folder: str, other: str) -> dict[str, Any]:
    """Two lives of a run, of which one is of a living process, and another run; then the next start
    of the first one."""
    world = World(Setup(1), ("a",) * dist.get_world_size())
    os.environ[NODE] = "a"
    engine = make(world, other, every=1)
    kept_step(engine)
    engine.destroy()
    found: dict[str, Any] = {"another run": names_in(other)}
    engine = make(world, folder, every=1)
    kept_step(engine)
    ucp.wait(engine)
    engine.save_checkpoint(folder)
    kept_step(engine)
    engine.destroy()
    found["dead"] = names_in(folder)
    alive = make(world, folder, every=1)
    kept_step(alive)
    ucp.wait(alive)
    dist.barrier()
    found["alive"] = names_in(folder) - found["dead"]
    memory._OF_FOLDER.clear()  # as one of another process
    engine = make(world, folder, every=1)
    report = ucp.load(engine, folder)
    found |= {"loaded": report.global_steps, "notes": report.notes}
    kept_step(engine)
    ucp.wait(engine)
    dist.barrier()
    found["then"] = names_in(folder)
    found["own"] = found["then"] - found["alive"] - found["dead"]
    return found | {"another run, then": names_in(other)}


def names_in(folder: str) -> set[str]:
    """What lies in a run's memory on machine "a"."""
    return {path.name for path in memory_of(folder, "a").path.glob("*")}


def without_room(folder: str) -> tuple[str, list[str], int]:
    """What a step says for which there is no room; what lies there then; and that training can go
    on."""
    engine = make(World(Setup(1), ("a",)), folder, every=2)
    train(engine, 2)
    said = "nothing was refused"
    with mock.patch.object(MemoryFolder, "free_bytes", lambda self: 2000):
        try:
            train(engine, 1)
        except ucp.UcpError as error:
            said = str(error)
    left = [path.name for path in MemoryFolder(Path(folder)).path.glob("*")]
    train(engine, 1)
    return said, left, engine.global_steps


def all_options(folder: str) -> dict[str, Any]:
    """Options that can't be, and DeepSpeed's own load where only memory has anything."""
    wrong: dict[str, dict[str, Any]] = {
        "keep is a word": {"keep": "disk", "every": 1},
        "every is needed": {"keep": "memory"},
        "every is a number": {"keep": "memory", "every": 0},
        "copies are counted": {"keep": "memory", "every": 1, "copies": -1},
        "keep goes with every": {"every": 2},
        "client_state is a function": {"keep": "memory", "every": 1, "client_state": {}},
    }
    refused: dict[str, str] = {}
    for name, asked in wrong.items():
        refused[name] = refusal_of(partial(attached, Setup(1), **asked), "nothing was refused")
    with heard() as lines:
        engine = make_engine(Setup(1), attach=False)
        engine = ucp.attach(
            engine, keep="memory", every=2, client_state=lambda: {"samples": engine.global_samples}
        )
        kept_step(engine, 2)  # nobody knows yet which run this is
        with suppress(ucp.NotFoundError):
            ucp.load(engine, folder)
        first = engine.load_checkpoint(folder)
        kept_step(engine, 2)
        ucp.wait(engine)
    engine.destroy()
    section = {"enabled": True, "keep": "memory", "every": 2, "folder": folder}
    engine = make_engine(Setup(3, seed=9, config=(("universal_checkpoint", section),)))
    return {
        "refused": refused,
        "first start": first,
        "stock": engine.load_checkpoint(folder),
        "said": "\n".join(agree.gather(lines)[0]),
    }


def uncounted(folder: str) -> tuple[str, Any]:
    """A loop of Megatron-LM's kind that does not set the stack's iteration."""
    engine = make(World(megatron_jobs.Mcore(), ("a",)), folder, every=1)
    with heard() as lines:
        for step in range(3):
            megatron_jobs.train(engine, 1, first=step)
            engine.handle.iteration = 0
    found = ucp.report(engine.handle).memory
    megatron_jobs.close(engine)
    return "\n".join(agree.gather(lines)[0]), found


@contextmanager
def heard() -> Iterator[list[str]]:
    """What is said inside, of rank 0."""
    lines: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    listener = Listener()
    say.LOGGER.addHandler(listener)
    level = say.LOGGER.level
    say.LOGGER.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        say.LOGGER.setLevel(level)
        say.LOGGER.removeHandler(listener)


def clear(folder: str) -> None:
    """Removes all that a test kept for a folder."""
    shutil.rmtree(memory_of(folder, "any").path.parent, ignore_errors=True)


def draws_ahead(folder: str) -> dict[str, Any]:
    """A loop that draws its data before the forward, as loops do: from a loader, and noise from the
    generators. Step 4 is kept, step 5 is done; what another start then draws for its first step."""
    world = World(Setup(1), ("a",) * dist.get_world_size())
    drawn: list[tuple[list[int], float]] = []

    def begun() -> tuple[Any, ucp.ResumableLoader]:
        data = torch.arange(40)[:, None].repeat(1, SEQUENCE) % 11
        data = torch.utils.data.TensorDataset(data, torch.arange(40))
        sampler = DistributedSampler(data, seed=3)
        own = torch.Generator()  # of which a start of the loader draws
        loader = DataLoader(data, batch_size=2, sampler=sampler, generator=own)
        loader = ucp.ResumableLoader(loader)
        engine = make_engine(world.setup, attach=False)
        kept: dict[str, Any] = {"keep": "memory", "every": 2, "folder": folder}
        return ucp.attach(engine, loader=loader, **kept), loader

    def trained(engine: Any, loader: ucp.ResumableLoader, steps: int) -> None:
        for number, (tokens, names) in enumerate(loader):
            drawn.append((names.tolist(), float(torch.rand(()))))
            engine.backward(engine(tokens))
            engine.step()
            ucp.wait(engine)  # so that no step is left out
            if number + 1 == steps:
                break

    os.environ[NODE] = "a"
    engine, loader = begun()
    trained(engine, loader, 6)
    ucp.wait(engine)
    engine.destroy()
    engine, loader = begun()
    step = ucp.load(engine, folder, loader=loader).global_steps
    trained(engine, loader, 2)
    engine.destroy()
    return {"step": step, "drawn": drawn[:6], "again": drawn[6:]}


def evaluates_alone(folder: str) -> int:
    """The first rank evaluates after a step that is to be kept, and the others wait for it; the
    step that another start loads."""
    world = World(Setup(1), ("a",) * dist.get_world_size())
    os.environ[NODE] = "a"
    engine = make(world, folder, every=2)
    train(engine, 2)
    if dist.get_rank() == 0:
        engine.eval()
        with torch.inference_mode():
            engine(torch.zeros((1, SEQUENCE), dtype=torch.int64))
        engine.train()
    dist.barrier()
    train(engine, 1, first=3)
    ucp.wait(engine)
    engine.destroy()
    return newest_step(world, folder)


def loads_elsewhere_first(folder: str, base: str) -> tuple[int, list[str]]:
    """A run keeps a step; its next start fills the engine from another folder, and then asks for
    its own. The step that it has, and the notes."""
    world = World(Setup(1), ("a",) * dist.get_world_size())
    os.environ[NODE] = "a"
    engine = make_engine(world.setup)
    train(engine, 1)
    engine.save_checkpoint(base)
    engine.destroy()
    engine = make(world, folder, every=2)
    train(engine, 3)
    engine.destroy()
    engine = make(world, folder, every=2)
    ucp.load(engine, base)
    report = ucp.load(engine, folder)
    engine.destroy()
    return report.global_steps, [*report.notes]


def asks_for_tags(folder: str, tags: Sequence[str]) -> list[tuple[str, list[str]]]:
    """A run saves its first step and keeps its second one; its next start asks for tags, in whose
    place memory may be taken. What is said of each."""
    world = World(Setup(1), ("a",) * dist.get_world_size())
    os.environ[NODE] = "a"
    engine = make(world, folder, every=2)
    train(engine, 1)
    engine.save_checkpoint(folder)
    train(engine, 2, first=1)
    engine.destroy()
    found: list[tuple[str, list[str]]] = []
    for tag in tags:
        engine = make(world, folder, every=2)
        try:
            report = ucp.load(engine, folder, tag, allow={"memory"})
            found.append((str(report.global_steps), [*report.notes]))
        except ucp.UcpError as error:
            found.append((f"{type(error).__name__}: {error}", []))
        engine.destroy()
    return found
