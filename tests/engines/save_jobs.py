"""What the ranks do in the tests of saves."""

import os
import random
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

import megatron_ucp as ucp
from tests.engines.canonical import canonical, differences, fill
from tests.engines.kinds import attached
from tests.engines.model import Setup, make_engine, train

SAMPLES = 48


def engine_of(setup: Setup, loader: Any = None, **options: Any) -> Any:
    return attached(setup, loader=loader, **options)


def listing(folder: str) -> list[str]:
    """Names in the folder, of tags and of what does not belong there."""
    return sorted(p.name for p in Path(folder).iterdir() if p.is_dir() or p.name.startswith("."))


# ------------------------------------------------ random states


def draw() -> list[float]:
    """The next numbers of every generator."""
    return [
        float(torch.rand(())),
        float(np.random.rand()),
        float(np.random.randn()),
        random.random(),
        random.gauss(0, 1),
    ]


def disturb() -> None:
    """Generators as in another process, some with a half of a pair of normal numbers left."""
    torch.manual_seed(77)
    np.random.seed(77)
    random.seed(77)


def noisy(setup: Setup, folder: str, steps: int = 3) -> list[float]:
    """Trains, saves, trains on; the losses after the save."""
    engine = engine_of(setup)
    np.random.seed(5 + dist.get_rank())
    random.seed(5 + dist.get_rank())
    train(engine, steps)
    np.random.randn()
    random.gauss(0, 1)
    engine.save_checkpoint(folder)
    losses = train(engine, steps, first=steps)
    engine.destroy()
    return losses


def resume_noisy(setup: Setup, folder: str, steps: int = 3, rng: bool = True) -> dict[str, Any]:
    engine = engine_of(setup, rng=rng)
    disturb()
    engine.load_checkpoint(folder)
    out = {"losses": train(engine, steps, first=steps), "notes": engine.ucp_report.notes}
    engine.load_checkpoint(folder)
    out["draws"] = draw()
    engine.destroy()
    return out


# ------------------------------------------------ data


def make_loader() -> Any:
    sampler = DistributedSampler(range(SAMPLES), seed=3)  # type: ignore[arg-type]
    return ucp.ResumableLoader(DataLoader(range(SAMPLES), batch_size=2, sampler=sampler))  # type: ignore[arg-type]


def read_and_save(setup: Setup, folder: str, batches: int) -> list[int]:
    """The samples that this rank got before the save."""
    loader = make_loader()
    engine = engine_of(setup, loader=loader)
    got = []
    for number, batch in enumerate(loader):
        got += batch.tolist()
        if number + 1 == batches:
            break
    engine.save_checkpoint(folder)
    engine.destroy()
    return got


def resume_and_read(
    setup: Setup, folder: str, given: bool = True
) -> tuple[list[int], tuple[str, ...]]:
    """The samples that this rank gets after the load."""
    loader = make_loader()
    engine = engine_of(setup, loader=loader if given else None)
    engine.load_checkpoint(folder)
    engine.destroy()
    return [sample for batch in loader for sample in batch.tolist()], engine.ucp_report.notes


def another_data_order(setup: Setup, folder: str) -> dict[str, Any]:
    sampler = DistributedSampler(range(SAMPLES), seed=4)  # type: ignore[arg-type]
    loader = ucp.ResumableLoader(DataLoader(range(SAMPLES), batch_size=2, sampler=sampler))  # type: ignore[arg-type]
    engine = engine_of(setup, loader=loader)
    before = canonical(engine)
    try:
        engine.load_checkpoint(folder)
        return {"error": ""}
    except ucp.UcpError as error:
        return {"error": str(error), "unchanged": not differences(before, canonical(engine))}
    finally:
        engine.destroy()


# ------------------------------------------------ saves that fail


@contextmanager
def refusing(how: str, folder: str) -> Iterator[dict[str, Any]]:
    """Makes the disk refuse, for real, on one rank or on all; yields more arguments of the save."""
    rank, more = dist.get_rank(), {}
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if how == "a file that can't grow" and rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    elif how == "a read-only folder":
        os.chmod(folder, 0o555)
        os.seteuid(65534 if os.geteuid() == 0 else os.geteuid())  # root may write everywhere
    elif how == "a client state that can't be pickled":
        more["client_state"] = {"function": lambda: None}
    elif how == "another tag on one rank":
        more["tag"] = f"tag{min(rank, 1)}"
    elif how == "a path below a file":
        (Path(folder) / "file").touch()
    has_no_memory = how == "no memory on one rank" and rank == 1
    full = mock.patch.object(torch, "save", side_effect=MemoryError("for a copy"))
    try:
        with full if has_no_memory else nullcontext():
            yield more
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        os.seteuid(os.getuid())
        os.chmod(folder, 0o755)


def failing_save(setup: Setup, folder: str, how: str) -> dict[str, Any]:
    """A good save, one that fails, a good one: the error, and what lies in the folder after
    each."""
    engine = engine_of(setup)
    train(engine, 1)
    engine.save_checkpoint(folder)
    train(engine, 1, first=1)
    where = folder + "/file/below" if how == "a path below a file" else folder
    dist.barrier()
    with refusing(how, folder) as more:
        try:
            engine.save_checkpoint(where, **more)
            error = None
        except ucp.UcpError as failure:
            error = failure
        dist.barrier()
    out = {
        "error": type(error).__name__,
        "message": str(error),
        "left": listing(folder),
        "latest": (Path(folder) / "latest").read_text(),
    }
    dist.barrier()
    engine.save_checkpoint(folder)
    want = canonical(engine)
    engine.destroy()
    fresh = engine_of(setup)
    fresh.load_checkpoint(folder)
    out["then"] = differences(want, canonical(fresh))
    out["then_left"] = listing(folder)
    fresh.destroy()
    return out


def stock_writes_other_weights(setup: Setup, folder: str, way: str, how: str) -> dict[str, Any]:
    """A good save; one of weights that are not those that the engine was described with, and what
    it ends with; what lies in the folder then."""
    engine = engine_of(setup, save=way)
    train(engine, 1)
    engine.save_checkpoint(folder)
    train(engine, 1, first=1)
    stock = type(engine).module_state_dict

    def changed(self: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        tree = dict(stock(self, *args, **kwargs))
        first = next(name for name, value in tree.items() if getattr(value, "ndim", 0) == 2)
        if how == "another name":
            tree[f"{first}.other"] = tree.pop(first)
        elif how == "another size":
            tree[first] = tree[first][:-1]
        elif how == "another dtype":
            tree[first] = tree[first].half()
        return tree

    with mock.patch.object(type(engine), "module_state_dict", changed):
        said = ""
        try:
            engine.save_checkpoint(folder)
            ucp.wait(engine)
        except ucp.UcpError as error:
            said = f"{type(error).__name__}: {error}"
    dist.barrier()
    out = {"said": said, "left": listing(folder), "latest": Path(folder, "latest").read_text()}
    engine.destroy()
    return out


def die_in_save(setup: Setup, folder: str) -> None:
    """Rank 1 dies while it writes."""
    engine = engine_of(setup)
    train(engine, 1)
    engine.save_checkpoint(folder)
    train(engine, 1, first=1)
    if dist.get_rank() == 1:
        engine.checkpoint_engine.save = lambda *_, **__: os._exit(7)
    engine.save_checkpoint(folder)


# ------------------------------------------------ several saves


def save_many(
    setup: Setup, folder: str, steps: int, milestone: int = 0, **options: Any
) -> tuple[str, ...]:
    """Saves after every step, provenance values in the last one; the notes of the last report."""
    engine = engine_of(setup, **options)
    for step in range(steps):
        train(engine, 1, first=step)
        if step + 1 == steps:
            fill(engine)
        engine.save_checkpoint(folder, save_latest=step + 1 != milestone)
    engine.destroy()
    return engine.ucp_save_report.notes


def stock_save_into(setup: Setup, folder: str, tag: str) -> None:
    """A save by DeepSpeed alone, of another state."""
    engine = make_engine(setup, attach=False)
    train(engine, 2, first=7)
    engine.save_checkpoint(folder, tag=tag)
    engine.destroy()


def try_load(setup: Setup, folder: str, tag: str | None = None) -> str:
    engine = engine_of(setup)
    try:
        engine.load_checkpoint(folder, tag=tag)
        return ""
    except ucp.UcpError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        engine.destroy()


def save_twice_into(setup: Setup, folder: str, tag: str) -> list[str]:
    """A user's file lies in the tag's folder when the second save replaces it."""
    engine = engine_of(setup)
    train(engine, 1)
    engine.save_checkpoint(folder, tag=tag)
    if dist.get_rank() == 0:
        (Path(folder) / tag / "mine.txt").write_text("kept")
    dist.barrier()
    train(engine, 1, first=1)
    engine.save_checkpoint(folder, tag=tag)
    want = canonical(engine)
    engine.destroy()
    fresh = engine_of(setup)
    fresh.load_checkpoint(folder)
    found = differences(want, canonical(fresh))
    fresh.destroy()
    return found


def crowded(setup: Setup, folder: str) -> dict[str, Any]:
    """Another holder has the tag `taken`, and a copy of a tag lies there. What saves say, and
    what lies there."""
    from megatron_ucp.formats import output_folder

    engine = engine_of(setup, keep_latest=1)
    train(engine, 1)
    engine.save_checkpoint(folder)
    if dist.get_rank() == 0:
        shutil.copytree(Path(folder) / "global_step1", Path(folder) / "mine")
    dist.barrier()
    out: dict[str, Any] = {}
    with output_folder.begin(Path(folder), "taken") if dist.get_rank() == 0 else nullcontext():
        dist.barrier()
        try:
            engine.save_checkpoint(folder, tag="taken")
        except ucp.UcpError as error:
            out["error"] = str(error)
        train(engine, 1, first=1)
        engine.save_checkpoint(folder)
        out["notes"] = engine.ucp_save_report.notes
        dist.barrier()
        out["beside"] = folders(folder)
        dist.barrier()
    train(engine, 1, first=2)
    engine.save_checkpoint(folder, tag="taken")
    out["then"] = engine.ucp_save_report.notes
    dist.barrier()
    out["left"] = folders(folder)
    engine.destroy()
    return out


def runs_of_saves(setup: Setup, folder: str) -> list[str]:
    """What saves say of their run: of an engine, of one that loaded its tag, of one that loaded its
    weights alone, of a new one."""

    def saved(engine: Any, tag: str) -> str:
        engine.save_checkpoint(folder, tag=tag)
        dist.barrier()
        return ucp.describe(folder, tag=tag).run["run_id"]

    first = engine_of(setup)
    train(first, 1)
    found = [saved(first, "one"), saved(first, "two")]
    first.destroy()
    for tag, options in (("three", {}), ("four", {"load_module_only": True}), ("five", None)):
        engine = engine_of(setup)
        if options is not None:
            engine.load_checkpoint(folder, tag="one", **options)
        train(engine, 1)
        found.append(saved(engine, tag))
        if tag in ("three", "five"):  # a tag of its own run again, and one of another
            engine.save_checkpoint(folder, tag="two")
            reported = ucp.report(engine).save
            assert reported is not None
            found += [note for note in reported.notes if "another run" in note]
        engine.destroy()
    return found


def folders(folder: str) -> list[str]:
    return sorted(path.name for path in Path(folder).iterdir() if path.is_dir())


def count_syncs(setup: Setup, folder: str, durable: bool) -> int:
    """Calls of fsync on this rank during a save."""
    engine = engine_of(setup, durable=durable)
    train(engine, 1)
    calls, fsync = [], os.fsync
    os.fsync = lambda handle: calls.append(fsync(handle))  # type: ignore[assignment]
    try:
        engine.save_checkpoint(folder)
    finally:
        os.fsync = fsync
    engine.destroy()
    return len(calls)
