"""What the ranks do in the tests of saves that this package writes."""

import os
import time
import zipfile
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import megatron_ucp as ucp
from megatron_ucp.engines import pt_files
from megatron_ucp.engines import save as saves
from megatron_ucp.engines.background import background_of
from megatron_ucp.engines.deepspeed import save as saving
from megatron_ucp.reshard import fingerprint
from megatron_ucp.reshard.folder import RangeWriter
from megatron_ucp.reshard.options import WAYS
from tests.engines.background_jobs import slowly
from tests.engines.canonical import canonical, differences, everywhere
from tests.engines.kinds import attached, kind_of, refusal_of, state_after_load
from tests.engines.model import Setup, make_engine, train
from tests.engines.save_jobs import listing

OF_THE_ARCHIVE = ".data/serialization_id"  # torch's mark of the call that wrote it


def saved_each_way(setup: Any, folder: str, exclude: bool = False) -> list[Any]:
    """Saves one moment by DeepSpeed's own code, and by this package in its two ways; what they
    report."""
    pt_files._LEAST_SHARED_BYTES = 0
    kind, engine = kind_of(setup), attached(setup, save="background")
    kind.train(engine, 2)
    options = {"tag": "tag", "client_state": {"seen": 7}, "exclude_frozen_parameters": exclude}
    reports = []
    for way in WAYS:
        engine.ucp.save_options = replace(engine.ucp.save_options, way=way)
        engine.save_checkpoint(f"{folder}/{way}", **options)
        ucp.wait(engine)
        reports.append(ucp.report(engine).save)
    kind.close(engine)
    return reports


def records(path: Path) -> dict[str, bytes]:
    """The records of an archive, by their names in it. Fails where a checksum is wrong."""
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None, path
        names = [name for name in archive.namelist() if not name.endswith(OF_THE_ARCHIVE)]
        return {name: archive.read(name) for name in names}


def torn(setup: Setup, folder: str, way: str) -> dict[str, Any]:
    """A save during which the engine steps; then one during which it does not."""
    engine = attached(setup, save=way)
    train(engine, 2)
    out: dict[str, Any] = {"said": []}

    def stepping(*args: Any) -> Any:
        train(engine, 1, first=50)
        return stock(*args)

    stock = saving._whole
    for write in (stepping, stock):
        with mock.patch.object(saving, "_whole", write):
            try:
                engine.save_checkpoint(folder)
                ucp.wait(engine)
                out["said"].append("")
            except ucp.UcpError as error:
                out["said"].append(f"{type(error).__name__}: {error}")
        dist.barrier()  # the first rank has taken away what is left, and begins nothing new
        out.setdefault("left", listing(folder))
        dist.barrier()
    want = canonical(engine)
    engine.destroy()
    return out | state_after_load(setup, folder, want)


def trained_on(setup: Setup, folder: str, plant: bool = False) -> list[str]:
    """A save in the background whose writer starts ten steps later; what differs between the state
    at the call and what a load of it gives, or why it ended without a name. `plant`: a scalar is
    left out of the snapshot."""
    engine = attached(setup, save="background")
    train(engine, 2)
    want = canonical(engine)
    background = background_of(engine)
    assert background is not None
    held: list[Any] = []
    background.start = lambda *work: held.append(work)  # type: ignore[method-assign]
    if plant:
        background.snapshot.copy = _all_but_numbers(background.snapshot.copy)  # type: ignore
    engine.save_checkpoint(folder)
    assert not (Path(folder) / "latest").exists()
    train(engine, 10, first=2)
    changed = differences(want, canonical(engine))
    assert len(changed) > 5, "ten steps change the state"
    del background.start
    background.start(*held[0])
    said = ""
    try:
        ucp.wait(engine)
    except ucp.SaveError as error:
        said = str(error)
    engine.destroy()
    return [said] if said else state_after_load(setup, folder, want)["differences"]


def _all_but_numbers(copy: Callable[..., Any]) -> Callable[..., Any]:
    """A snapshot that keeps the live memory of single numbers, as writers did that moved scalars
    into shared memory."""
    return lambda memory: memory if len(memory) <= 8 else copy(memory)


def fingerprints(setup: Setup, folder: str, target: Setup) -> list[Any]:
    """Of an engine, of its files, and of an engine of another kind that loaded them."""
    engine = make_engine(setup)
    train(engine, 2)
    found = [ucp.fingerprint(engine)]
    engine.save_checkpoint(folder)
    dist.barrier()
    found.append(ucp.fingerprint(folder))
    engine.destroy()
    other = make_engine(replace(target, seed=9))
    train(other, 1)
    before = ucp.fingerprint(other)
    other.load_checkpoint(folder)
    found.append(ucp.fingerprint(other))
    other.destroy()
    return [found, len(before.differences(found[0]))]


def refused_loads(setup: Any, folder: str, tags: list[str]) -> dict[str, tuple[str, str]]:
    """What an engine says to each tag, with checksums and without. `stale`: masters that lie far
    from the training weights beside them are refused before a byte moves, else."""
    engine = kind_of(setup).make(setup)
    out: dict[str, tuple[str, str]] = {}
    for tag in tags:
        said = ["", ""]
        for number, checksums in enumerate((True, False)):
            try:
                ucp.load(engine, f"{folder}/{tag}", checksums=checksums, allow={"stale"})
            except ucp.UcpError as error:
                said[number] = f"{type(error).__name__}: {error}"
        out[tag] = said[0], said[1]
    kind_of(setup).close(engine)
    return out


def reports(setup: Setup, folder: str, stock: str) -> list[Any]:
    """Of loads of everything, of files without a manifest, into an engine of fp32, and without
    checksums."""
    found = []
    for path, dtype, options in (
        (folder, setup.dtype, {}),
        (stock, setup.dtype, {}),
        (folder, "fp32", {}),
        (folder, setup.dtype, {"checksums": False}),
    ):
        engine = make_engine(replace(setup, dtype=dtype))
        found.append(ucp.load(engine, path, **options))
        engine.destroy()
    return found


def back_in_the_next_save(setup: Setup, folder: str) -> list[str]:
    """The writer of a save that was given up comes back while the next save is written; what
    differs between that one and what a load of it gives, and the tags that are there."""
    engine = attached(setup, save="background", on_error="warn", deadline=2.0, keep_snapshot=False)
    train(engine, 1)
    write = RangeWriter.write
    if dist.get_rank() == 1:
        RangeWriter.write = _back_late(write)
    engine.save_checkpoint(folder, tag="given_up")
    ucp.wait(engine)
    RangeWriter.write = slowly(write)
    train(engine, 1, first=1)
    want = canonical(engine)
    dist.barrier()
    engine.save_checkpoint(folder, tag="next")
    ucp.wait(engine)
    RangeWriter.write = write
    engine.destroy()
    time.sleep(1.0)
    dist.barrier()
    found = state_after_load(setup, folder, want)["differences"]
    return found + [name for name in listing(folder) if not name.startswith(".")]


def _back_late(write: Callable[..., Any]) -> Callable[..., Any]:
    """Its first call takes longer than the deadline, and then goes on."""
    late = [3.6]

    def written(*given: Any) -> Any:
        time.sleep(late.pop() if late else 0.0)
        return write(*given)

    return written


def named_as_pointers(setup: Setup, folder: str, way: str) -> tuple[list[str], list[str]]:
    """What saves into tags with the names of pointers say, and what lies there after them."""
    engine = attached(setup, save=way)
    train(engine, 1)
    engine.save_checkpoint(folder)
    ucp.wait(engine)
    said = []
    for tag in ("latest", "latest_checkpointed_iteration.txt", "latest_universal"):
        try:
            engine.save_checkpoint(folder, tag=tag)
            ucp.wait(engine)
        except ucp.UcpError as error:
            said.append(f"{type(error).__name__}: {error}")
    dist.barrier()
    engine.destroy()
    return said, in_folder(Path(folder))


def moved_away(setup: Setup, folder: str, way: str) -> tuple[list[str], list[str]]:
    """A save into a relative path, by a program that goes elsewhere; what lies here, and there."""
    engine = attached(setup, save=way)
    train(engine, 1)
    os.chdir(folder)
    if not dist.get_rank():
        Path("away", "here").mkdir(parents=True)  # where the path leads later
    dist.barrier()
    settled = saves._write_beside
    saves._write_beside = slowly(settled)
    engine.save_checkpoint("here")
    os.chdir("away")
    ucp.wait(engine)
    saves._write_beside = settled
    engine.destroy()
    dist.barrier()
    return in_folder(Path(folder, "here")), in_folder(Path(folder, "away"))


def in_folder(folder: Path) -> list[str]:
    """All but the scripts that DeepSpeed puts beside the tags."""
    return sorted(one.name for one in folder.iterdir() if one.suffix != ".py")


def refused_in_the_call(setup: Setup, folder: str, on_error: str) -> dict[str, Any]:
    """A good save, one whose ranges find no room before the call returns, a good one."""
    engine = attached(setup, save="background", on_error=on_error)
    train(engine, 1)
    engine.save_checkpoint(folder)
    train(engine, 1, first=1)
    ucp.wait(engine)
    out: dict[str, Any] = {"said": "", "returned": None}
    take = pt_files.RankFiles._take

    def full(files: pt_files.RankFiles, _: Any) -> Any:
        raise OSError(28, "No space left on device", str(files.aside))

    pt_files.RankFiles._take = full if dist.get_rank() == 1 else take  # type: ignore
    try:
        out["returned"] = engine.save_checkpoint(folder)
    except ucp.UcpError as error:
        out["said"] = f"{type(error).__name__}: {error}"
    pt_files.RankFiles._take = take  # type: ignore[method-assign]
    out["report"] = ucp.report(engine).save.error
    train(engine, 1, first=2)
    engine.save_checkpoint(folder)
    ucp.wait(engine)
    dist.barrier()
    out["left"] = [name for name in listing(folder) if not name.startswith(".")]
    engine.destroy()
    return out


def summed_again(source: Setup, target: Setup, folder: str) -> dict[str, int]:
    """Bytes of memory at which the fingerprint looks itself, on all ranks, as one state is saved
    by each way, and as the last save is loaded."""
    seen = list[int]()

    def counting(stock: Callable[..., int]) -> Callable[..., int]:
        def counted(memory: Any, *args: Any) -> int:
            seen.append(memory.nbytes)
            return stock(memory, *args)

        return counted

    def looked_at(work: Callable[[], Any]) -> int:
        seen.clear()
        work()
        return sum(everywhere(sum(seen)))

    engine = make_engine(source, attach=False)
    train(engine, 2)
    ucp.attach(engine, save="background")
    out: dict[str, int] = {}
    both = {name: counting(getattr(fingerprint, name)) for name in ("of_runs", "linear")}
    with mock.patch.multiple(fingerprint, **both):
        for way in WAYS:
            engine.ucp.save_options = replace(engine.ucp.save_options, way=way)

            def save() -> None:
                engine.save_checkpoint(folder)
                ucp.wait(engine)

            out[way] = looked_at(save)
        fresh = make_engine(target)
        out["load"] = looked_at(lambda: ucp.load(fresh, folder))
        out["engine"] = looked_at(lambda: ucp.fingerprint(fresh))
    engine.destroy()
    fresh.destroy()
    return out


def flipped_once_read(setup: Setup, folder: str, rank: int | None) -> str:
    """A load after whose reads one bit flips in the memory of a rank: what is said."""
    from megatron_ucp.reshard import files

    stock, engine = files.execute, attached(setup)

    def execute(plan: Any, where: Any, into: Any, **options: Any) -> Any:
        counts = stock(plan, where, into, **options)
        slot, _ = plan.wants[0]
        into(slot).view(torch.uint8)[3] ^= 1
        return counts

    is_hit = dist.get_rank() == rank
    with mock.patch.object(files, "execute", execute) if is_hit else nullcontext():
        said = refusal_of(lambda: ucp.load(engine, folder))
    engine.destroy()
    return said
