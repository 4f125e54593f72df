"""The training program on real ranks: what a run goes on with, what it logs, how it stops, and
which of its saves are taken."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.pretrain import jobs
from tests.pretrain.common import BATCH, GPT, LLAMA, QUIET, RATES, command, mesh, stdlib
from tests.pretrain.source import ITERATIONS, JOB, SAVED, Source, check_resumed
from tests.ranks import ROOT, RankPool
from tests.scripts import run_command

PROGRAM = [sys.executable, str(ROOT / "pretrain/pretrain_gpt.py")]


def test_random_states(ranks: RankPool, llama: Source) -> None:
    """Same mesh: the saved ones, whatever --seed says now; another mesh, or none wanted: others."""
    job = jobs.random_numbers
    first, again = (ranks.run(4, job, llama.resume(mesh(2, 1), seed)) for seed in ("", "--seed 5"))
    other = ranks.run(4, job, llama.resume(mesh(1, 1), "--universal-checkpoint"))
    fresh = ranks.run(4, job, llama.resume(mesh(2, 1), "--no-load-rng --seed 5"))
    assert first == again
    one, two = first[:2]  # tensor-parallel ranks
    assert one["tracker"] != two["tracker"] and one["torch"] == two["torch"]
    assert other[0] not in first and fresh[0] not in first
    assert fresh[0]["torch"] != other[0]["torch"]


def test_evaluation_and_exit_interval(ranks: RankPool, llama: Source) -> None:
    how = "--mock-data --train-iters 9 --eval-iters 2 --eval-interval 2 --exit-interval 5"
    argv = command(LLAMA, BATCH, RATES, how, "--log-interval 3")
    results = [ranks.run(world, JOB, argv)[-1] for world in (1, 2)]
    assert [r["stopped_by"] for r in results] == ["--exit-interval"] * 2
    assert all(r["iteration"] == 5 and sorted(r["evaluations"]) == [2, 4] for r in results)
    one, two = ([*result["evaluations"].values()] for result in results)
    assert one == pytest.approx(two, abs=1e-5)
    line = r" validation loss at iteration 2 \| lm loss value: \d\.\d{6}E\+00 \| lm loss PPL: "
    assert re.search(line + r"\d\.\d{6}E\+\d\d \| ", results[0]["said"])
    assert re.findall(r"iteration\s+(\d+)/", results[0]["said"]) == ["1", "3"]


def test_tensorboard(ranks: RankPool, tmp_path: Path) -> None:
    """What TensorBoard reads back, at each iteration and at its samples, is what the run logged in
    full."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    how = "--mock-data --train-iters 4 --eval-iters 1 --eval-interval 2 --log-interval 3"
    logs = f"--tensorboard-dir {tmp_path / 'board'} --log-json {tmp_path / 'log.jsonl'}"
    argv = command(LLAMA, BATCH, RATES, how, mesh(2, 1), logs)
    result = ranks.run(2, JOB, argv)[-1]
    entries = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    steps = [entry for entry in entries if "lm_loss" in entry]
    board = EventAccumulator(str(tmp_path / "board"))
    board.Reload()
    check_curves(board, steps)
    validation = {point.step: point.value for point in board.Scalars("lm loss validation")}
    assert validation == pytest.approx(result["evaluations"], rel=1e-6)
    assert list(validation) == [2, 4]
    assert [point.step for point in board.Scalars("lm loss validation vs samples")] == [16, 32]


CURVES = {"lm loss": "lm_loss", "learning-rate": "learning_rate", "grad-norm": "grad_norm"}


def check_curves(board: Any, steps: list[dict[str, Any]]) -> None:
    for name, key in CURVES.items():
        for curve, x in ((name, "iteration"), (f"{name} vs samples", "consumed_samples")):
            found, want = board.Scalars(curve), [entry[key] for entry in steps]
            assert [point.step for point in found] == [entry[x] for entry in steps]
            assert [point.value for point in found] == pytest.approx(want, rel=1e-6)
    assert [entry["consumed_samples"] for entry in steps] == [8, 16, 24, 32]
    for key in ("learning_rate", "grad_norm"):
        assert len({entry[key] for entry in steps}) == 4


def test_sigterm_on_one_rank_stops_all(ranks: RankPool, llama: Source, tmp_path: Path) -> None:
    argv = llama.argv(mesh(2, 1), f"--save {tmp_path}")
    results = ranks.run(4, jobs.run_with_sigterm, argv, rank=1, iteration=3)
    assert all((r["stopped_by"], r["iteration"]) == ("SIGTERM", 3) for r in results)
    assert (tmp_path / "latest").read_text() == "global_step3"
    resume = llama.argv(mesh(1, 0), f"--load {tmp_path} --universal-checkpoint")
    resumed = ranks.run(1, JOB, resume)[0]
    assert resumed["losses"] == pytest.approx(llama.result["losses"][3:], rel=0, abs=1e-5)


@pytest.mark.ranks
def test_program_ends_with_zero_after_sigterm(tmp_path: Path) -> None:
    argv = command(
        LLAMA, BATCH, RATES, QUIET, stdlib(), f"--train-iters 100000 --save {tmp_path / 'out'}"
    )
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
    with (tmp_path / "errors").open("w") as errors:
        streams = {"stdout": subprocess.PIPE, "stderr": errors, "text": True}
        process = subprocess.Popen([*PROGRAM, *argv], env=environment, **streams)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if re.search(r"iteration\s+3/", line):
                process.send_signal(signal.SIGTERM)
                break
        rest, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0, (tmp_path / "errors").read_text()
    saved = re.search(r"saved \S+ at iteration (\d+)", rest)
    assert saved and (tmp_path / "out" / "latest").read_text() == f"global_step{saved[1]}"
    inspect = [sys.executable, "-m", "megatron_ucp.cli", "inspect", str(tmp_path / "out")]
    shown = run_command(inspect, cwd=ROOT)
    assert shown.returncode == 0, shown.stderr


@pytest.mark.ranks
def test_program_names_an_unknown_flag() -> None:
    done = run_command([*PROGRAM, "--tensor-model-paralel-size", "2"], cwd="/")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "the nearest is --tensor-model-parallel-size" in done.stderr


# ------------------------------------------------ saves that can be trusted


def test_with_dropout_the_same_mesh_goes_on_with_the_same_losses(
    ranks: RankPool, tmp_path: Path
) -> None:
    model = [*GPT[:-4], "--hidden-dropout", "0.2", "--attention-dropout", "0.2"]
    argv = command(model, BATCH, RATES, QUIET, stdlib(), mesh(2, 1), "--train-iters 6")
    whole = ranks.run(4, JOB, [*argv, "--save", str(tmp_path), "--save-interval", "3"])[-1]
    again = [*argv, "--load", str(tmp_path), "--ckpt-step", "3"]
    assert ranks.run(4, JOB, again)[-1]["losses"] == whole["losses"][3:]
    without = ranks.run(4, JOB, [*again, "--no-load-rng"])[-1]["losses"]
    pairs = zip(without, whole["losses"][3:], strict=True)
    assert all(a != b for a, b in pairs), "dropout draws random numbers"
    resume = f"--train-iters 6 --load {tmp_path} --universal-checkpoint --ckpt-step 3"
    argv = command(model, BATCH, RATES, QUIET, stdlib(), mesh(1, 3), resume)
    other = ranks.run(2, JOB, argv)[0]
    assert "derived from the seed, the step" in other["said"]
    assert other["losses"] == pytest.approx(whole["losses"][3:], rel=0.1)
    assert other["losses"] != whole["losses"][3:]


def test_without_a_tag_the_newest_whole_one_is_taken_and_others_are_named(
    ranks: RankPool, llama: Source, tmp_path: Path
) -> None:
    folder = shutil.copytree(llama.folder, tmp_path / "copy")
    next((folder / f"global_step{ITERATIONS}").glob("*zero_pp_rank_1*")).unlink()
    argv = llama.argv(mesh(2, 2), f"--load {folder} --universal-checkpoint")
    result = ranks.run(2, JOB, argv)[-1]
    check_resumed(llama, result)
    passed = f"passed over global_step{ITERATIONS}: a file that the manifest lists is missing"
    assert passed in result["said"]
    for asked in ranks.run(2, JOB, [*argv, "--ckpt-step", str(ITERATIONS)]):
        assert asked["error"] == "NotFoundError", "what was asked for is not replaced by another"
    next((folder / f"global_step{SAVED}").glob("mp_rank_01*")).unlink()
    for result in ranks.run(2, JOB, argv):
        assert result["error"] == "NotFoundError"
        assert "no tag in this folder is whole" in result["text"]
        assert all(f"global_step{step}: " in result["text"] for step in (ITERATIONS, SAVED))


def test_keep_latest(ranks: RankPool, llama: Source, tmp_path: Path) -> None:
    save = f"--save {tmp_path} --save-interval 1 --keep-latest 2 --no-durable"
    said = ranks.run(2, JOB, llama.argv(mesh(2, 1), save, iterations=4))[0]["said"]
    left = sorted(path.name for path in tmp_path.iterdir() if path.is_dir())
    assert left == ["global_step3", "global_step4"] and "removed global_step2" in said
