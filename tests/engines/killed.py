"""Ranks that save without a pause, killed at random moments; what is left must load bit for bit.

    python -m tests.engines.killed FOLDER deepspeed:stock:10
    python -m tests.engines.killed FOLDER stack:background:4 older:direct:4 --seed 2

kills runs of engines with a way to save, so often each. A save may be missed: where all of one kind
are, more of it follow. Prints a line of JSON for each trial. DeepSpeed is imported once: every rank
is a fork of this process, so that a trial takes a second or two and not twenty.
"""

import argparse
import faulthandler
import itertools
import json
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

from megatron_ucp.formats.store import location
from tests import rank_worker
from tests.scripts import run_command

STEPS = 300  # more than a trial reaches
MOST_SAVES = 5  # that may be whole when a run is killed
MOST_TRIALS = 20  # of a kind of which no save was hit
LIMIT_S = 100
MORE = 1  # steps after a resume


@dataclass(frozen=True)
class Runs:
    """Runs of one kind of engine. `meshes` are setups, and on how many ranks; `pointer` is the file
    that names a whole checkpoint, by which `tag_of` names its folder; `save` is what a run does
    after a step."""

    meshes: Sequence[tuple[Any, int]]
    pointer: str
    tag_of: Callable[[str], str]
    save: Callable[[Any, Any, int], None]


def connect(rank: int, ranks: int, store: Path, limit_s: float) -> None:
    """Of forks: there is no agent that has a store."""
    import deepspeed

    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_PORT": 0}
    os.environ |= {name: str(value) for name, value in places.items()}
    deepspeed.init_distributed(
        "gloo",
        auto_mpi_discovery=False,
        timeout=timedelta(seconds=limit_s),
        init_method=f"file://{store}",
        rank=rank,
        world_size=ranks,
    )


def start(rank: int, ranks: int, store: Path, work: Callable[..., None], *args: Any) -> int:
    """Forks a rank that does the work and ends; its pid."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        faulthandler.dump_traceback_later(LIMIT_S, exit=True)
        connect(rank, ranks, store, LIMIT_S)
        work(*args)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def together(ranks: int, store: Path, work: Callable[..., None], *args: Any) -> None:
    """Runs the work on that many ranks, to its end."""
    pids = [start(rank, ranks, store, work, *args) for rank in range(ranks)]
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    store.unlink(missing_ok=True)
    if any(codes):
        sys.exit(f"{work.__name__} on {ranks} ranks: exit codes {codes}")


def save_tag(engine: Any, folder: Any, step: int) -> None:
    """New tags, then old ones again."""
    engine.save_checkpoint(folder, tag=f"step{step % 3}" if step > 6 else f"step{step}")


def save_latest(engine: Any, folder: Any, _: int) -> None:
    import megatron_ucp as ucp
    from tests.engines.megatron_jobs import arguments

    ucp.save(engine.handle, folder, keep_latest=3, arguments=arguments(engine))


def runs_of(name: str) -> Runs:
    """Of DeepSpeed's engines, or of megatron-core's stack."""
    from tests.engines.megatron_jobs import Mcore
    from tests.engines.model import Setup

    if name != "stack":
        meshes = [(1, 2), (2, 2), (3, 2), (0, 1), (3, 1)]  # ZeRO stage, ranks
        setups = [(Setup(zero, "fp32"), ranks) for zero, ranks in meshes]
        return Runs(setups, "latest", str, save_tag)
    small = Mcore(layers=2, style="constant")
    others = ({"overlap": True, "gather": True, "bucket": 2000}, {"tp": 2}, {"pp": 2})
    changes: tuple[dict[str, Any], ...] = ({}, *others, {"distributed": False})
    stacks = [*((replace(small, **change), 2) for change in changes), (small, 1)]
    pointer = "latest_checkpointed_iteration.txt"
    return Runs(stacks, pointer, lambda text: f"iter_{int(text):07d}", save_latest)


def save_on_and_on(setup: Any, folder: Path, steps: int, way: str, name: str) -> None:
    """A save after every step; in the background, and of a stack, after every other one."""
    from tests.engines.kinds import attached, kind_of

    kind, engine = kind_of(setup), attached(setup, save=way)
    for step in range(1, steps + 1):
        kind.train(engine, 1, first=step)
        if step % 2 == 0 or (name != "stack" and way != "background"):
            runs_of(name).save(engine, folder, step)


def go_uninterrupted(setup: Any, steps: int, oracle: Path) -> None:
    """The states of the same run, to which nothing happened, after so many steps, and the losses of
    the next ones."""
    import torch
    import torch.distributed as dist

    from tests.engines.kinds import attached, kind_of

    kind, engine = kind_of(setup), attached(setup)
    kind.train(engine, steps, first=1)
    states = kind.settled_state(engine)
    losses = kind.train(engine, MORE, first=steps + 1)
    if dist.get_rank() == 0:
        torch.save({"states": states, "losses": losses}, oracle)


def load(setup: Any, folder: Path, result: Path, name: str) -> None:
    """Loads the newest whole tag on a mesh of its own, and goes on; then what the pointer names.
    The states before and after."""
    import torch
    import torch.distributed as dist

    import megatron_ucp as ucp
    from megatron_ucp.reshard.look import unfinished
    from tests.engines.kinds import attached, kind_of

    runs, kind, engine = runs_of(name), kind_of(setup), attached(replace(setup, seed=2))
    before = kind.canonical(engine)
    found = ucp.newest_whole(folder)
    report = ucp.load(kind.handle(engine), found.folder)
    after = kind.canonical(engine)
    losses = kind.train(engine, MORE, first=report.global_steps + 1)
    ucp.load(kind.handle(engine), folder)
    if dist.get_rank() == 0:
        said = {
            "step": report.global_steps,
            "tag": found.folder.name,
            "latest": runs.tag_of((folder / runs.pointer).read_text()),
            "passed_over": found.passed_over,
            "unfinished": unfinished(folder),
        }
        torch.save({"said": said, "before": before, "after": after, "losses": losses}, result)


def named_by(pointer: Any) -> str:
    """What a pointer says; nothing where there is none. An object is asked for without the library
    of stores, whose threads no fork survives."""
    if isinstance(pointer, Path):
        return pointer.read_text() if pointer.exists() else ""
    time.sleep(0.02)
    try:
        with urlopen(f"{os.environ['AWS_ENDPOINT_URL']}/{pointer.parts[1]}/{pointer.key}") as found:
            return found.read().decode()
    except HTTPError:
        return ""


def wait_for_saves(pointer: Any, saves: int) -> float:
    """Waits until the pointer has named so many saves. How long the last one took, in seconds: a
    save and the steps before it, on this machine and as busy as it is."""
    began = now = time.monotonic()
    deadline, named = began + LIMIT_S, ""
    while saves and now < deadline:
        time.sleep(0.001)
        names = named_by(pointer)
        if names == named:
            continue
        saves, named = saves - 1, names
        began, now = now, time.monotonic()
    return now - began


def save_and_kill(
    name: str, mesh: tuple[Any, int], folder: Any, store: Path, dice: random.Random, way: str
) -> tuple[float, list[int]]:
    """Kills a run after some of its saves, at any moment of the next one. How long after the end of
    the save before, and the exit codes of its ranks."""
    setup, ranks = mesh
    job = ranks, store, save_on_and_on, setup, folder, STEPS, way, name
    pids = [start(rank, *job) for rank in range(ranks)]
    one_save_s = wait_for_saves(folder / runs_of(name).pointer, dice.randint(2, MOST_SAVES))
    after_s = dice.uniform(0, one_save_s)
    time.sleep(after_s)
    for pid in dice.sample(pids, len(pids)):
        os.kill(pid, signal.SIGKILL)
        time.sleep(dice.choice([0, 0.01]))
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    store.unlink(missing_ok=True)
    return after_s, codes


def trial(
    number: int, folder: Path, dice: random.Random, way: str, name: str, url: str = ""
) -> dict[str, Any]:
    """One run that is killed, and what can be loaded after it. It saves into `url`, where one is
    given."""
    import torch

    from tests.engines.kinds import kind_of

    meshes = runs_of(name).meshes
    mesh, (target, others) = dice.choice(meshes), dice.choice(meshes)
    store = folder / f"store{number}"
    checkpoints = (location(url) if url else folder) / f"trial{number}"
    after_s, codes = save_and_kill(name, mesh, checkpoints, store, dice, way)
    result, oracle = folder / f"result{number}.pt", folder / f"oracle{number}.pt"
    together(others, folder / f"store{number}b", load, target, checkpoints, result, name)
    found = torch.load(result, weights_only=False)
    step = found["said"]["step"]
    setup, ranks = mesh
    together(ranks, folder / f"store{number}c", go_uninterrupted, setup, step, oracle)
    want, compare = torch.load(oracle, weights_only=False), kind_of(setup).differences
    losses = zip(found["losses"], want["losses"], strict=True)
    return {
        "killed_after_s": round(after_s, 3),
        "source": [str(setup), ranks],
        "target": [str(target), others],
        "codes": codes,
        "differences": compare(want["states"], found["after"]),
        "differed_before": len(compare(want["states"], found["before"])),
        "losses": max(abs(a - b) for a, b in losses),
        **found["said"],
    }


def prepare() -> None:
    """Imports all that a rank needs, before the forks."""
    rank_worker.prepare()
    import torch

    torch.set_num_threads(1)
    import deepspeed

    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
    deepspeed.utils.logger.setLevel("WARNING")
    import tests.engines.megatron_jobs  # noqa: F401 - before the forks


def trials_in_a_process(folder: Path, kinds: Sequence[str], *words: str) -> list[dict[str, Any]]:
    """What the program prints of trials of some kinds, each of which was a run that was killed, and
    loads bit for bit from the tag that its pointer names. Fails otherwise, and where no save of a
    kind was hit."""
    command = [sys.executable, "-m", "tests.engines.killed", str(folder), *kinds, *words]
    done = run_command(
        command,
        timeout=200 + sum(20 * int(kind.split(":")[2]) for kind in kinds),
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    for each in found:
        assert set(each["codes"]) == {-signal.SIGKILL}, "the run ended before it was killed"
        assert each["differences"] == [] and each["differed_before"] > 5, each
        assert each["tag"] == each["latest"], each
        assert each["losses"] <= 1e-5, each  # another mesh sums in another order
    for kind in kinds:
        of_kind = [each for each in found if each["kind"] == kind]
        assert len(of_kind) >= int(kind.split(":")[2])
        assert any(each["unfinished"] for each in of_kind), f"no save of {kind} was hit"
        assert len({each["step"] for each in of_kind}) > 1, "the moments are hardly random"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Kill saves at random moments and load what is left."
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("kinds", nargs="+", help="deepspeed, stack or older:a way to save:trials")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--url", default="", help="where runs save, in place of FOLDER")
    args = parser.parse_args()
    prepare()
    dice, numbers = random.Random(args.seed), itertools.count()
    for kind in args.kinds:
        engine, way, trials = kind.split(":")
        found = list[dict[str, Any]]()
        while len(found) < int(trials) or (
            not any(one["unfinished"] for one in found) and len(found) < MOST_TRIALS
        ):
            one = trial(next(numbers), args.folder, dice, way, engine, args.url)
            found.append(one)
            print(json.dumps({"kind": kind, **one}), flush=True)


if __name__ == "__main__":
    main()
