"""Elastic runs on real ranks: under torchrun, with nodes that are killed and nodes that join; and
what a start does, on ranks that are there."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tests.scripts  # noqa: F401  (examples/lib is found from there on)
from megatron_ucp.engines.memory import MemoryFolder
from pretrain.elastic import AGAIN
from tests.pretrain import jobs
from tests.pretrain.common import LLAMA, QUIET, RATES, command, mesh, stdlib
from tests.pretrain.source import ITERATIONS, JOB, SAVED, Source
from tests.ranks import ROOT, Job, RankPool

from lib.nodes import Node, Nodes, kill  # type: ignore[import-not-found]  # isort: skip
from lib.starts import Start, lost_steps, read, wrong_losses  # type: ignore[import-not-found]  # isort: skip

PROGRAM = str(ROOT / "pretrain" / "pretrain_gpt.py")
BATCH = ["--global-batch-size", "12", "--micro-batch-size", "6"]
MESHES = "tp=2,dp=1,zero=1;dp=1,zero=2"
INTERVAL, LENGTH, OF_NODES = 3, 60, 200
MOMENTS = int(os.environ.get("TESTS_KILLS", "20"))  # of a run that is long enough for them
LONG = 45 * MOMENTS
# Hundreds of steps on changing meshes: rounding grows less with a small rate.
CALM = ["--lr", "3e-4", "--min-lr", "3e-5", "--init-method-std", "0.02", "--seq-length", "128"]
Losses = dict[int, float]


def elastic_run(iterations: int) -> list[str]:
    text = ["--train-iters", str(iterations), "--elastic", "--elastic-meshes", MESHES]
    calm = CALM if iterations > OF_NODES else []
    return command(LLAMA, BATCH, RATES, QUIET, stdlib(), text, calm, "--no-durable")


def saving(folder: Path, iterations: int) -> list[str]:
    saves = ["--save", str(folder / "out"), "--save-interval", str(INTERVAL), "--keep-latest", "3"]
    return [PROGRAM, *elastic_run(iterations), *saves, "--log-json", str(folder / "log.jsonl")]


def uninterrupted(ranks: RankPool, folder: Path, iterations: int) -> Losses:
    argv = [*elastic_run(iterations), "--save", str(folder), "--save-interval", str(iterations)]
    losses = ranks.run(2, JOB, argv, timeout_s=400)[0]["losses"]
    return dict(enumerate(losses, 1))


@pytest.fixture(scope="module")
def whole(ranks: RankPool, tmp_checkpoints: Path) -> Losses:
    """The losses of a run of `LENGTH` iterations that nothing happened to."""
    return uninterrupted(ranks, tmp_checkpoints / "whole", LENGTH)


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "DS_ACCELERATOR": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }.items():
        monkeypatch.setenv(name, value)


def wait_until(what: Callable[[list[Start]], bool], log: Path, node: Node) -> list[Start]:
    """The starts, once they are what is wanted."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and node.agent.poll() is None:
        if what(found := read(log)):
            return found
        time.sleep(0.05)
    raise AssertionError(node.log.read_text()[-3000:])


def newest_step(memory: MemoryFolder) -> int:
    """The newest step that is whole in memory; 0 where there is none."""
    held: dict[tuple[int, str, int], set[object]] = {}
    gone, here = memory.lives()
    for share in memory.shares([*gone, *here]):
        step = share.steps, share.id, share.parts
        held.setdefault(step, set()).update(one.slot.place for one in share.slots)
    return max((steps for (steps, _, parts), own in held.items() if len(own) == parts), default=0)


@pytest.mark.ranks
def test_two_ranks_go_on_as_one(whole: Losses, tmp_path: Path) -> None:
    """A node dies with its rank: the other one goes on alone, from the newest save, with every loss
    as if nothing had happened."""
    with Nodes(tmp_path) as nodes:
        stays, dies = (nodes.start(1, saving(tmp_path, LENGTH)) for _ in range(2))
        log = tmp_path / "log.jsonl"
        wait_until(lambda starts: bool(starts) and starts[-1].last > INTERVAL, log, stays)
        kill(dies)
        assert nodes.wait(stays, 100) == 0, stays.log.read_text()[-3000:]
    starts = read(log)
    assert [start.entry["ranks"] for start in starts] == [2, 1]
    assert not wrong_losses(starts, whole)
    (lost,) = lost_steps(starts)
    assert 0 <= lost <= INTERVAL and starts[1].entry["after_iteration"] >= INTERVAL
    assert wrong_losses(starts, {i: loss + 1e-4 for i, loss in whole.items()})  # negative control


@pytest.mark.ranks
def test_steps_in_memory_are_newer_than_the_save(whole: Losses, tmp_path: Path) -> None:
    """Both ranks are killed, long after the only save: what the machine had kept by then goes on,
    or what it kept since."""
    script = [*saving(tmp_path, LENGTH), "--save-interval", "1000", "--keep-memory-every", "1"]
    memory = MemoryFolder(tmp_path / "out")
    try:
        with Nodes(tmp_path) as nodes:
            node = nodes.start(2, script)
            log = tmp_path / "log.jsonl"
            wait_until(lambda _: newest_step(memory) > 8, log, node)
            kept = newest_step(memory)
            for rank in node.living():
                rank.process.send_signal(signal.SIGKILL)
            assert nodes.wait(node, 100) == 0, node.log.read_text()[-3000:]
        said = node.log.read_text()
    finally:
        shutil.rmtree(memory.path.parent, ignore_errors=True)
    starts = read(log)
    (lost,) = lost_steps(starts)
    assert starts[1].entry["after_iteration"] >= kept > 8 and lost >= 0, said[-3000:]
    assert said.count("the one before it is still under way") <= len(starts)
    assert "from memory: step" in said and "the newest tag on disk is of step 1" in said
    assert not wrong_losses(starts, whole)


ENGINES = {
    "DeepSpeed": mesh(1, 3),
    "a pipeline": [*mesh(1, 1), "--pipeline-model-parallel-size", "2"],
    "Megatron": ["--tensor-model-parallel-size", "2", "--engine", "megatron"],
}


@pytest.mark.parametrize("engine", ENGINES)
def test_every_engine_goes_on_from_memory(ranks: RankPool, tmp_path: Path, engine: str) -> None:
    """The last save is lost; what the machine kept is a step before it, whose losses follow."""
    out, flags = tmp_path / "out", ENGINES[engine]
    argv = [*command(LLAMA, BATCH, RATES, QUIET, stdlib(), flags), "--train-iters", "60"]
    argv += ["--save", str(out), "--save-interval", "100", "--keep-memory-every", "1"]
    try:
        whole = ranks.run(2, JOB, argv, timeout_s=200)[0]
        assert "losses" in whole, whole
        losses = whole["losses"]
        last, pointer, earlier = NAMES.get(engine, NAMES["DeepSpeed"])
        shutil.rmtree(out / last)
        (out / pointer).write_text(earlier)
        argv += ["--load", str(out), "--universal-checkpoint"]
        found = ranks.run(2, JOB, argv, timeout_s=200)[0]
    finally:
        shutil.rmtree(MemoryFolder(out).path.parent, ignore_errors=True)
    first = found["first"]
    assert 1 < first < 60 and found["consumed"] == 60 * 12
    assert found["losses"] == losses[first:] and losses[first] != losses[first - 1]


def test_where_the_newest_tag_is_damaged_memory_is_newer_than_the_one_before(
    ranks: RankPool, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    argv = [
        *command(LLAMA, BATCH, RATES, QUIET, stdlib(), mesh(1, 1)),
        "--train-iters",
        "60",
    ]  # some are left out: one is kept at a time
    argv += ["--save", str(out), "--save-interval", "100", "--keep-memory-every", "1"]
    try:
        losses = ranks.run(2, JOB, argv, timeout_s=200)[0]["losses"]
        next((out / "global_step60").glob("*optim_states.pt")).unlink()
        argv += ["--load", str(out), "--universal-checkpoint"]
        found = ranks.run(2, JOB, argv, timeout_s=200)[0]
    finally:
        shutil.rmtree(MemoryFolder(out).path.parent, ignore_errors=True)
    first = found["first"]  # the last step that was kept: one may be left out
    text = f"from memory: step {first}; global_step1 on disk is of step 1, {first - 1} before it"
    assert text in found["said"]
    assert 1 < first < 60 and found["losses"] == losses[first:]


NAMES = {
    "DeepSpeed": ("global_step60", "latest", "global_step1"),
    "Megatron": ("iter_0000060", "latest_checkpointed_iteration.txt", "1"),
}


def start_again(ranks: RankPool, llama: Source, folder: Path, job: Job, *more: str) -> Any:
    """A start of an elastic run that finds the source's first save, on three ranks, of 8 samples a
    batch in the source."""
    shutil.copytree(llama.folder, folder, dirs_exist_ok=True)
    shutil.rmtree(folder / f"global_step{ITERATIONS}")
    flags = ["--elastic", "--save", str(folder), "--save-interval", "100", *more]
    world = 3 if "3" in "".join(more) else 2
    return ranks.run(world, job, llama.argv(flags))[-1]


def test_a_start_goes_on_with_the_sample_where_the_save_was(
    ranks: RankPool, llama: Source, tmp_path: Path
) -> None:
    """On a mesh with another micro batch. With a shifted position the losses are others."""
    after, flags = llama.result["losses"][SAVED:], ("--elastic-meshes", "dp=2,zero=2")
    found = start_again(ranks, llama, tmp_path / "a", JOB, *flags)
    assert (found["first"], found["consumed"]) == (SAVED, ITERATIONS * 8)
    assert found["losses"] == pytest.approx(after, rel=0, abs=1e-5)
    assert (
        "elastic: 2 ranks, tp=1,pp=1,dp=2,zero=2; global batch 8 = 2 x 2 ranks x 2"
        in (found["said"])
    )
    shifted = jobs.run_shifted
    other = start_again(ranks, llama, tmp_path / "b", shifted, *flags)["losses"]
    assert len(other) == len(after) - 1  # the run ends after as many samples
    assert all(abs(a - b) > 1e-4 for a, b in zip(other, after, strict=False))


def test_a_batch_within_the_tolerance_is_said(
    ranks: RankPool, llama: Source, tmp_path: Path
) -> None:
    """Eight samples for three ranks: refused, or nine of them, and the run ends after as many."""
    mesh_of_three = ("--elastic-meshes", "dp=3,zero=3")
    refused = start_again(ranks, llama, tmp_path / "a", JOB, *mesh_of_three)
    assert refused["error"] == "UsageError" and "a multiple of 3" in refused["text"]
    tolerance = ("--elastic-batch-tolerance", "0.125")
    found = start_again(ranks, llama, tmp_path / "b", JOB, *mesh_of_three, *tolerance)
    assert "global batch 9 (--global-batch-size 8: +12.5%) = 1 x 3 ranks x 3" in found["said"]
    assert found["first"] == SAVED and len(found["losses"]) == (ITERATIONS - SAVED) * 8 // 9
    assert found["consumed"] == SAVED * 8 + len(found["losses"]) * 9
    assert found["losses"][0] == pytest.approx(llama.result["losses"][SAVED], abs=0.2)


def test_from_one_engine_to_the_other(ranks: RankPool, llama: Source, tmp_path: Path) -> None:
    """DeepSpeed's save, megatron-core's own engine."""
    engine = ("--engine", "megatron", "--elastic-meshes", "dp=2,zero=1", "--async-save")
    found = start_again(ranks, llama, tmp_path, JOB, *engine)
    assert "elastic: 2 ranks, tp=1,pp=1,dp=2,zero=1" in found["said"], found
    assert (found["first"], found["consumed"]) == (SAVED, ITERATIONS * 8)
    assert found["losses"] == pytest.approx(llama.result["losses"][SAVED:], rel=0, abs=1e-5)


def test_no_mesh_for_the_ranks_is_an_error_on_each(
    ranks: RankPool, llama: Source, tmp_path: Path
) -> None:
    flags = ["--elastic", "--elastic-meshes", "dp=2;dp=4", "--save", str(tmp_path)]
    found = ranks.run(3, JOB, llama.argv(flags, "--save-interval 100"))
    assert all("no mesh of --elastic-meshes has 3 ranks" in one["text"] for one in found)


def test_a_rank_that_is_not_signalled_wants_to_be_started_again(
    ranks: RankPool, llama: Source, tmp_path: Path
) -> None:
    """A node is given back: its rank is done, and the others' agents shall start them again."""
    argv = llama.argv(mesh(1, 1), f"--elastic --save {tmp_path} --save-interval 100")
    found = ranks.run(2, jobs.run_with_sigterm, argv, rank=1, iteration=3)
    assert [one["again"] for one in found] == [True, False]
    assert all((one["stopped_by"], one["iteration"]) == ("SIGTERM", 3) for one in found)
    assert (tmp_path / "latest").read_text() == "global_step3"
    argv = llama.argv(mesh(1, 1), f"--save {tmp_path / 'plain'}")
    found = ranks.run(2, jobs.run_with_sigterm, argv, rank=1, iteration=3)
    assert not any(one["again"] for one in found)


@pytest.mark.ranks
def test_a_signal_in_the_last_save_does_not_cut_it_off(tmp_path: Path) -> None:
    """torchrun's own SIGTERM comes to a rank that stopped because another one was told to."""
    code = (
        "import os, runpy, signal, sys; sys.argv = sys.argv[1:]\n"
        "sys.path.insert(0, os.path.dirname(os.path.dirname(sys.argv[0])))\n"
        "from pretrain import checkpoint; save = checkpoint.save\n"
        "def signalled(*args):\n"
        "    os.kill(os.getpid(), signal.SIGTERM); save(*args)\n"
        "checkpoint.save = signalled; runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    argv = [*elastic_run(4), "--elastic-meshes", "dp=1", "--exit-interval", "4"]
    argv += ["--save", str(tmp_path / "out"), "--save-interval", "100"]
    process = [sys.executable, "-c", code, PROGRAM, *argv]
    done = subprocess.run(process, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "out" / "latest").read_text() == "global_step4"
    assert AGAIN not in (0, 1, 2)


# ------------------------------------------------ many moments


# where the steps are, and by how many a start may go back: one that is kept in memory counts once
# its sums are there, while later ones are trained
KEPT: dict[str, tuple[list[str], int]] = {
    "files": ([], INTERVAL),
    "memory": (["--save-interval", "100", "--keep-memory-every", "2"], 6),
}


@pytest.mark.slow
@pytest.mark.parametrize("kept", KEPT)
def test_killed_at_random_moments(ranks: RankPool, tmp_path: Path, kept: str) -> None:
    """Ranks and nodes die at any moment, also while they start, load and save. Every loss that was
    ever logged is one of the uninterrupted run; no start goes back further than one save, or some
    steps where memory keeps them."""
    flags, most = KEPT[kept]
    want = uninterrupted(ranks, tmp_path / "whole", LONG)
    log, script = tmp_path / "log.jsonl", [*saving(tmp_path, LONG), *flags]
    with Nodes(tmp_path, restarts=4 * MOMENTS) as nodes:
        there = [nodes.start(1, script) for _ in range(2)]
        wait_until(lambda starts: bool(starts) and starts[-1].last >= 1, log, there[0])
        kills = kill_at_random(nodes, there, script, log)
        for node in there:
            assert nodes.wait(node, 300) == 0, node.log.read_text()[-3000:]
    starts = read(log)
    assert not wrong_losses(starts, want)
    assert all(lost <= most for lost in lost_steps(starts)), lost_steps(starts)
    assert kills >= MOMENTS // 2, "the run had ended before"
    assert MOMENTS < 20 or {start.entry["ranks"] for start in starts} == {1, 2}


def kill_at_random(nodes: Nodes, there: list[Node], script: list[str], log: Path) -> int:
    """At each moment a node, or the rank of one; where one node is left, another joins. The first
    node that is left alone trains: on a slow machine the next moment may come before it starts. On
    a fast one the run may end before the last moment: how many there were is returned."""
    dice, was_alone = random.Random(5), False
    for number in range(MOMENTS):
        time.sleep(dice.uniform(0, 12))
        if any(n.agent.poll() == 0 for n in there):
            return number
        assert all(n.agent.poll() is None for n in there), there[0].log.read_text()[-3000:]
        if len(there) == 2 and dice.random() < 0.4:
            kill(there.pop(dice.randrange(2)))
            if not was_alone:
                wait_until(lambda starts: starts[-1].entry["ranks"] == 1, log, there[0])
            was_alone = True
            continue
        for rank in dice.choice(there).living():
            rank.process.send_signal(signal.SIGKILL)
        if len(there) == 1:
            there.append(nodes.start(1, script))
    return MOMENTS


@pytest.mark.slow
def test_a_node_that_joins_and_one_that_is_given_back_cost_nothing(
    ranks: RankPool, tmp_path: Path
) -> None:
    """With notice, the run is saved at the step where it is."""
    want = uninterrupted(ranks, tmp_path / "whole", OF_NODES)
    log, script = tmp_path / "log.jsonl", [*saving(tmp_path, OF_NODES), "--async-save"]
    with Nodes(tmp_path) as nodes:
        stays = nodes.start(1, script)
        wait_until(lambda starts: bool(starts) and starts[-1].last > 10, log, stays)
        joins = nodes.start(1, script)
        wait_until(lambda starts: len(starts) == 2 and len(starts[1].losses) > 10, log, stays)
        joins.agent.terminate()  # to the agent, which hands it on
        wait_until(lambda starts: len(starts) == 3 and len(starts[2].losses) > 10, log, stays)
        assert nodes.wait(stays, 100) == 0, stays.log.read_text()[-3000:]
    starts = read(log)
    assert [start.entry["ranks"] for start in starts] == [1, 2, 1]
    assert lost_steps(starts) == [0, 0] and not wrong_losses(starts, want)


@pytest.mark.slow
def test_a_rank_that_says_nothing_any_more_is_left_behind(tmp_path: Path) -> None:
    """As a node without a network: nothing is closed, so only the bound of a wait ends it."""
    script = [*saving(tmp_path, LONG), "--distributed-timeout-minutes", "0.15"]
    log = tmp_path / "log.jsonl"
    with Nodes(tmp_path) as nodes:
        stays, silent = nodes.start(1, script), nodes.start(1, script)
        wait_until(lambda starts: bool(starts) and starts[-1].last > 5, log, stays)
        (rank,) = silent.living()
        for process in (silent.agent.pid, rank.process.pid):
            os.kill(process, signal.SIGSTOP)
        stopped = time.monotonic()
        starts = wait_until(lambda starts: len(starts) == 2, log, stays)
        assert time.monotonic() - stopped < 60
        assert starts[1].entry["ranks"] == 1
        assert "Timed out" in stays.log.read_text() or "timed out" in stays.log.read_text()


def test_the_log_is_read_and_compared(tmp_path: Path) -> None:
    """Negative control of what the tests on ranks compare with."""
    rows: list[dict[str, Any]] = [
        {"start": "dp=2", "after_iteration": 0},
        *({"iteration": i, "lm_loss": float(i), "time": 0.0} for i in (1, 2, 3)),
        {"start": "dp=1", "after_iteration": 2},
        *({"iteration": i, "lm_loss": float(i), "time": 0.0} for i in (3, 4)),
    ]
    path = tmp_path / "log.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    starts, want = read(path), {i: float(i) for i in (1, 2, 3, 4)}
    assert lost_steps(starts) == [1] and not wrong_losses(starts, want)
    assert wrong_losses(starts, want | {2: 2.1}) == ["iteration 2 on dp=2: loss 2.0, not 2.1"]
    assert wrong_losses(starts, want | {5: 5.0}) == ["no start computed iteration 5"]
