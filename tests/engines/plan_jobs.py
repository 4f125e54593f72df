"""What ranks do in the tests of descriptions and plans that are kept from one save to the next."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import megatron_ucp as ucp
from megatron_ucp.engines.background import Background, BackgroundOptions, keep_background
from megatron_ucp.engines.deepspeed import live
from megatron_ucp.engines.deepspeed.shard import LocalShard
from megatron_ucp.engines.record import record_of
from tests.engines.kinds import attached, kind_of
from tests.engines.model import Setup, train
from tests.engines.step_jobs import Steps

Rows = dict[str, dict[str, Any]]  # by tag


@contextmanager
def descriptions() -> Iterator[list[LocalShard]]:
    """Each place that is described inside on this rank."""
    found: list[LocalShard] = []
    part = LocalShard.part

    def counted(shard: LocalShard, present: bool) -> Any:
        found.append(shard)
        return part(shard, present)

    with mock.patch.object(LocalShard, "part", counted):
        yield found


class Saves:
    """Saves of one engine, and what each of them did: whether it planned, in how many agreements,
    how often the engine was described, and its notes."""

    def __init__(self, handle: Any, folder: str) -> None:
        self.handle, self.folder = handle, folder
        self.rows: Rows = {}

    def save(self, tag: str) -> None:
        steps = Steps()
        with steps.counted(), descriptions() as described:
            self.handle.save_checkpoint(self.folder, tag=tag)
            taken = steps.count
            ucp.wait(self.handle)
        report = ucp.report(self.handle).save
        assert report is not None
        self.rows[tag] = {
            "planned": report.planned,
            "agreements": taken,
            "described": len(described),
            "notes": report.notes,
        }


def again(setup: Any, folder: str, way: str) -> Rows:
    """Two saves with a step between them, and a third one at once, for which nothing is kept."""
    kind = kind_of(setup)
    engine = kind.make(setup)
    handle = kind.handle(engine)
    handle.ucp.save_options = replace(handle.ucp.save_options, way=way)
    if way == "background":
        keep_background(handle, Background(BackgroundOptions()))
    saves = Saves(handle, folder)
    for step, tag in enumerate(("first", "again")):
        kind.train(engine, 1, first=step)
        saves.save(tag)
    record_of(handle).described = None
    saves.save("anew")
    kind.close(engine)
    return saves.rows


def _other_memory(engine: Any) -> None:
    held = engine.optimizer.optimizer.state
    first = next(iter(held))
    held[first]["exp_avg"] = held[first]["exp_avg"].clone()


def _other_dtype(engine: Any) -> None:
    engine.module.scale = engine.module.scale.double()


def _not_saved(engine: Any) -> None:
    engine.module._non_persistent_buffers_set.add("calls")


def _other_names(engine: Any) -> None:
    def hook(_module: Any, state: dict[str, Any], *_: Any) -> None:
        state["factor"] = state.pop("scale")

    engine.module.register_state_dict_post_hook(hook)


CHANGES: dict[str, Callable[[Any], None]] = {
    "the memory of a moment": _other_memory,
    "the dtype of a buffer": _other_dtype,
    "a buffer that is saved no more": _not_saved,
    "a name in the state dict": _other_names,
}


def changed(setup: Setup, folder: str, is_seen: bool = True) -> Rows:
    """A save before and after each change, and one for which nothing is kept. Unless changes are
    seen, all tensors are said to lie where they lay."""
    engine = attached(setup, save="direct")
    train(engine, 1)
    saves = Saves(engine, folder)
    blind = mock.patch.object(live, "tensors_lie_at", lambda *_: [])
    with nullcontext() if is_seen else blind:
        saves.save("before")
        for name, change in CHANGES.items():
            change(engine)
            saves.save(name)
            record_of(engine).described = None
            saves.save(f"{name}, anew")
            saves.save(f"{name}, again")
    engine.destroy()
    return saves.rows


def moved(setup: Setup, folder: str) -> Rows:
    """A save before and after another rate: no tensor is another one."""
    engine = attached(setup, save="direct")
    train(engine, 1)
    saves = Saves(engine, folder)
    saves.save("before")
    for group in engine.optimizer.param_groups:
        group["lr"] = 0.125
    saves.save("after")
    engine.destroy()
    return saves.rows


def in_memory(setup: Setup, folder: str) -> list[tuple[int, int | None]]:
    """After each of four steps: how often the engine was described, and which step is kept in
    memory."""
    engine = attached(setup, keep="memory", every=1, folder=folder)
    out: list[tuple[int, int | None]] = []
    with descriptions() as described:
        for step in range(4):
            train(engine, 1, first=step)
            ucp.wait(engine)
            kept = ucp.report(engine).memory
            out.append((len(described), None if kept is None else kept.steps))
    engine.destroy()
    return out
