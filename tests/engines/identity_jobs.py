"""What ranks do in the tests of identity: which run a step in memory, a tag, an option is of."""

import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import megatron_ucp as ucp
from megatron_ucp.engines import memory
from megatron_ucp.engines.deepspeed.engine import attach_with
from megatron_ucp.engines.memory import NODE
from megatron_ucp.reshard import agree
from tests.engines import megatron_jobs
from tests.engines.canonical import canonical
from tests.engines.kinds import attached
from tests.engines.megatron_jobs import Mcore
from tests.engines.memory_jobs import World, heard, make, memory_of
from tests.engines.model import Setup, make_engine, train

RUN_A, RUN_B = Setup(1), Setup(1, seed=9)
FOLDER_OF_MEMORY = "a"


def alone(job: Callable[[], Any]) -> None:
    """Does something on the first rank while the others wait."""
    dist.barrier()
    if dist.get_rank() == 0:
        job()
    dist.barrier()


def kept(setup: Setup, folder: str, every: int = 1, **options: Any) -> Any:
    """An engine that keeps its steps in memory."""
    os.environ[NODE] = FOLDER_OF_MEMORY
    engine = make_engine(setup, attach=False)
    return ucp.attach(engine, keep="memory", every=every, folder=folder, **options)


def trained(engine: Any, steps: int, first: int = 1) -> Any:
    """The state after the last but one step, which is the newest one in memory."""
    train(engine, steps - 1, first=first)
    ucp.wait(engine)
    state = canonical(engine)
    train(engine, 1, first=first + steps - 1)
    ucp.wait(engine)
    return state


def dead(engine: Any) -> None:
    """Its processes are gone: what it kept is left."""
    engine.destroy()


def tag_without_id(setup: Setup, folder: str, steps: int) -> Any:
    """A tag of plain DeepSpeed; the state in it."""
    engine = make_engine(setup, attach=False)
    train(engine, steps, first=40)
    engine.save_checkpoint(folder)
    state = canonical(engine)
    engine.destroy()
    return state


def loaded(folder: str) -> dict[str, Any]:
    """What a restart gets: its state and what is said."""
    engine = kept(Setup(1, seed=5), folder, every=1000)
    found: dict[str, Any] = {}
    with heard() as lines:
        path, _ = engine.load_checkpoint(folder)
    found["path"] = path
    found["state"] = canonical(engine)
    found["said"] = "\n".join(agree.gather(lines)[0])
    dead(engine)
    return found


def equal(one: Any, other: Any) -> bool:
    """Whether two states are the same in every bit."""
    from tests.engines.canonical import differences

    return not differences(one, other)


def dead_run_and_tags_without_id(folder: str) -> dict[str, Any]:
    """Run A comes to step 6 and dies; run B, which nobody attached, saves its step 2 there."""
    engine = kept(RUN_A, folder)
    state_a = trained(engine, 6)
    dead(engine)
    state_b = tag_without_id(RUN_B, folder, 2)
    found = loaded(folder)
    return found | {"A": equal(found["state"], state_a), "B": equal(found["state"], state_b)}


def begun_from_scratch(folder: str, loads: bool) -> dict[str, Any]:
    """Run A comes to step 6 and dies; run B begins (with a load of what is not there, if `loads`
    and the memory is gone), and dies before it keeps or saves anything."""
    engine = kept(RUN_A, folder)
    state_a = trained(engine, 6)
    dead(engine)
    engine = kept(RUN_B, folder, every=1000)
    if loads:
        with mock.patch("megatron_ucp.engines.memory._listed", return_value=[]):
            assert engine.load_checkpoint(folder) == (None, None)
    train(engine, 2)
    dead(engine)
    found = loaded(folder)
    return found | {"A": equal(found["state"], state_a)}


def goes_on_from_a_tag_without_id(folder: str, base: str, harm: str) -> dict[str, Any]:
    """A run loads a tag of plain DeepSpeed, keeps steps and dies."""
    tag_without_id(RUN_B, folder, 2)
    engine = kept(RUN_A, folder)
    ucp.load(engine, folder)
    state = trained(engine, 3)
    dead(engine)
    if harm == "saved anew":  # the tag has another content then
        alone(lambda: shutil.rmtree(Path(folder, "global_step2")))
        tag_without_id(RUN_B, folder, 2)
    elif harm == "copied":
        alone(lambda: _copy(folder, base, times=True))
    elif harm == "no folder":
        alone(lambda: shutil.rmtree(folder))
    elif harm == "no name":
        alone(lambda: os.unlink(Path(folder, ".memory_run")))
    found = loaded(folder)
    return found | {"kept": equal(found["state"], state)}


def _copy(folder: str, base: str, times: bool) -> None:
    shutil.copytree(folder, base, copy_function=shutil.copy2 if times else shutil.copyfile)
    shutil.rmtree(folder)
    shutil.copytree(base, folder, copy_function=shutil.copy2 if times else shutil.copyfile)


def around_the_package(folder: str, how: str) -> dict[str, Any]:
    """A run saves step 2 and keeps more; its restart loads the tag around the package, goes on,
    keeps step 4 and dies."""
    engine = kept(RUN_A, folder, every=1000, keep_latest=2)
    train(engine, 2)
    engine.save_checkpoint(folder)
    dead(engine)
    engine = kept(Setup(1, seed=5), folder, keep_latest=2)
    if how == "native":
        engine.load_checkpoint(folder, native=True)
    elif how == "a function":
        engine.load_checkpoint(folder, custom_load_fn=lambda src, dst: dst.load_state_dict(src))
    else:
        type(engine).load_checkpoint(engine, folder)
    state = trained(engine, 2, first=3)
    engine.save_checkpoint(folder, "more")
    engine.save_checkpoint(folder, "most")
    tags = sorted(path.name for path in Path(folder).iterdir() if path.is_dir())
    trained(engine, 2, first=5)
    dead(engine)
    found = loaded(folder)
    return found | {"state 3": state, "tags": tags}


def two_engines(folder: str) -> dict[str, Any]:
    """A generator and a discriminator of one program, both with the run's folder."""
    found: dict[str, Any] = {}
    first = kept(RUN_A, folder)
    trained(first, 3)
    try:
        kept(RUN_B, folder)
        found["second"] = "attached"
    except ucp.UsageError as error:
        found["second"] = str(error)
    trained(first, 2, first=4)
    found["first"] = ucp.report(first).memory.steps
    dead(first)
    again = kept(RUN_B, folder)
    found["after the first was destroyed"] = again.ucp is not None
    dead(again)
    return found


def two_stacks(folder: str) -> tuple[str, int]:
    """Two stacks of megatron-core's; and one after the first one has ended."""
    world = World(Mcore(), (FOLDER_OF_MEMORY,) * dist.get_world_size())
    os.environ[NODE] = FOLDER_OF_MEMORY
    first = make(world, folder, every=1)
    for step in range(2):
        megatron_jobs.train(first, 1, first=step)
        ucp.wait(first.handle)
    said, anew = "attached", partial(mock.patch, "pretrain.mcore.models.start")
    try:
        with anew():
            make(world, folder, every=1)
    except ucp.UsageError as error:
        said = str(error)
    for step in (2, 3):
        megatron_jobs.train(first, 1, first=step)
        ucp.wait(first.handle)
    steps = ucp.report(first.handle).memory.steps
    first.handle.ucp.close()
    with anew():
        second = make(world, folder, every=1)
    megatron_jobs.close(second)
    return said, steps


def around_one_model(folder: str) -> str:
    """A trainer that makes another engine around its model, and keeps the first one."""
    import deepspeed

    first = kept(RUN_A, folder)
    config = first._config._param_dict
    params = [param for param in first.module.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(params)
    again, *_ = deepspeed.initialize(model=first.module, optimizer=optimizer, config=config)
    ucp.attach(again, keep="memory", every=1, folder=folder)
    old, new = (memory.steps_of(one) for one in (first, again))
    return "taken over" if old.path is None and new.path == Path(folder).resolve() else "not"


def damaged_descriptions(folder: str) -> str:
    """All small files of memory are damaged."""
    engine = kept(RUN_A, folder, every=1000)
    train(engine, 2)
    engine.save_checkpoint(folder)
    dead(engine)
    engine = kept(RUN_A, folder)
    ucp.load(engine, folder)
    trained(engine, 3, first=3)
    dead(engine)

    def damage() -> None:
        for path in memory_of(folder, FOLDER_OF_MEMORY).path.glob("*.json"):
            data = bytearray(path.read_bytes())
            data[20] ^= 1
            path.write_bytes(bytes(data))

    alone(damage)
    return loaded(folder)["said"]


# ------------------------------------------------ attached twice


def attached_twice(first: dict[str, Any], second: dict[str, Any], by_install: bool) -> Any:
    """What comes of another attach: an error, or what the engine does with it."""
    engine = make_engine(RUN_A, attach=False)
    stock = engine.save_checkpoint.__func__
    if by_install:
        attach_with(engine, first, by_install=True)
    else:
        ucp.attach(engine, **first)
    try:
        ucp.attach(engine, **second)
    except ucp.UcpError as error:
        return f"{type(error).__name__}: {error}"
    handle = engine.ucp
    assert handle.stock_save.__func__ is stock, "an attached engine was attached around"
    return {"save": handle.save_options.way, "keep_latest": handle.save_options.keep_latest} | dict(
        handle.options
    )


def saves_as_asked_under_install(folder: str) -> tuple[list[str], bool]:
    """A script attaches what the runner attached; which tags are there, and whether a save was made
    in the background."""
    engine = make_engine(RUN_A, attach=False)
    attach_with(engine, {"hyper": "config"}, by_install=True)
    ucp.attach(engine, save="background", keep_latest=1, keep="memory", every=1, folder=folder)
    under_way = False
    for step in (1, 2, 3):
        train(engine, 1, first=step)
        report = engine.ucp.save(folder)
        under_way = under_way or report.is_under_way
        ucp.wait(engine)
    dist.barrier()
    tags = sorted(path.name for path in Path(folder).iterdir() if path.is_dir())
    assert ucp.report(engine).memory is not None
    dead(engine)
    return tags, under_way


# ------------------------------------------------ the doors' defaults


class CountingLoader:
    """A loader whose position is a number."""

    def __init__(self, at: int = 0) -> None:
        self.at = at

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def check(self, state: Any, file: Any = None) -> None: ...

    def load_state_dict(self, state: Any) -> None:
        self.at = state["at"]


def doors(folder: str) -> dict[str, Any]:
    """Each way to fill an engine that was attached with a loader, hyper and rng: where the loader
    is then, whose rate the engine has, and what is said."""
    engine = attached(RUN_A, loader=CountingLoader(7))
    train(engine, 1)
    engine.save_checkpoint(folder)
    held = [ucp.hold(engine), ucp.hold(engine)]

    def filled(fill: Callable[[Any], Any], **options: Any) -> Any:
        other = make_engine(Setup(1, seed=5), attach=False)
        loader = CountingLoader()
        for group in other.optimizer.param_groups:
            group["weight_decay"] = 0.77
        ucp.attach(other, loader=loader, hyper="config", rng=False, **options)
        with heard() as lines:
            fill(other)
        rates = {group["weight_decay"] for group in other.optimizer.param_groups}
        other.destroy()
        said = agree.gather(lines)[0]
        return loader.at, rates, [line for line in said if "position" in line]

    found = {
        "load_checkpoint": filled(lambda one: one.load_checkpoint(folder)),
        "ucp.load": filled(lambda one: ucp.load(one, folder)),
        "engine.ucp.load": filled(lambda one: one.ucp.load(folder)),
        "a tag": filled(lambda one: ucp.load(one, folder, "global_step1")),
        "held": filled(lambda one: ucp.load(one, held.pop())),
        "held, engine.ucp": filled(lambda one: one.ucp.load(held.pop())),
        "resize": filled(lambda one: ucp.resize(engine, one)),
    }
    named = CountingLoader()
    found["another loader"] = (
        filled(lambda one: ucp.load(one, folder, loader=named, hyper="checkpoint")),
        named.at,
    )
    with suppress(ucp.UcpError):
        engine.destroy()
    return found
