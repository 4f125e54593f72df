"""The quickstart and the other examples, with fewer steps. `tests/run.sh all` runs each as a user
does, the default run the quickstart's resume with a fault; the others take warm processes there."""

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from matplotlib import image

from tests.ranks import ROOT
from tests.scripts import AS_A_USER, Done, run_command, run_example, start

SCRIPT = ["bash", str(ROOT / "examples" / "quickstart.sh")]
ROW = re.compile(
    r"\| (tp=\d, dp=\d, ZeRO-\d) +\| ([\d,]+) +\| [\d.]+ +\| (yes|NO) \(.*?\) +\| ([\d.e+-]+) +\|"
)

FEW_STEPS = ["--steps", "4", "--more", "3"]

pytestmark = pytest.mark.ranks


def quickstart(out: Path, *arguments: str) -> Done:
    arguments = ("--out", str(out), *FEW_STEPS, *arguments)
    if not AS_A_USER:
        return run_example("quickstart.py", *arguments)
    return run_command([*SCRIPT, *arguments], timeout=400, cwd=out.parent)


@pytest.fixture(scope="module")
def run(tmp_checkpoints: Path) -> tuple[Path, Done]:
    """The folder and the output of a whole run, in a folder that holds other things already."""
    out = tmp_checkpoints / "quickstart"
    out.mkdir()
    (out / "mine.txt").write_text("kept")
    (out / "resumed_tp1_pp1_dp4_zero3.json").write_text("left by an earlier run")
    return out, quickstart(out)


def test_the_quickstart_resumes_on_three_meshes(run: tuple[Path, Done]) -> None:
    out, done = run
    assert done.returncode == 0, done.stdout + done.stderr
    rows = ROW.findall(done.stdout)
    assert [row[0] for row in rows] == [
        "tp=1, dp=4, ZeRO-3",
        "tp=4, dp=1, ZeRO-1",
        "tp=1, dp=1, ZeRO-0",
    ]
    parameters = int(re.findall(r"([\d,]+) parameters", done.stdout)[0].replace(",", ""))
    for mesh, read_bytes, equal, difference in rows:
        # A master and two moments, 4 bytes each, are what a load needs. Four tensor-parallel ranks
        # also read a copy of the norms each, and the short gaps between their parts of the rows of
        # linear_proj.
        most = 1.1 if mesh.startswith("tp=4") else 1.02
        assert 12 * parameters <= int(read_bytes.replace(",", "")) <= most * 12 * parameters
        assert equal == "yes"
        assert float(difference) <= 1e-5
    assert (out / "table.md").read_text() in done.stdout
    assert (out / "mine.txt").read_text() == "kept"


def test_the_picture_shows_something(run: tuple[Path, Done]) -> None:
    picture = image.imread(run[0] / "losses.png")  # (height, width, 4)
    assert picture.shape[0] > 600 and picture.shape[1] > 600
    assert picture[..., :3].std() > 0.05, "the picture is blank"


def test_the_quickstart_sees_one_flipped_bit(run: tuple[Path, Done]) -> None:
    done = quickstart(run[0], "--reuse", "--resume", "tp=2,dp=1,zero=2", "--plant-fault")
    assert done.returncode == 1, done.stdout + done.stderr
    assert [row[2] for row in ROW.findall(done.stdout)] == ["NO"]
    assert "NOT EQUAL after the load at tp=2, dp=1, ZeRO-2: master of" in done.stdout


@pytest.mark.slow
def test_ctrl_c_stops_every_rank(tmp_path: Path) -> None:
    out, shared = tmp_path / "run", set(Path("/dev/shm").glob("deepspeed*"))
    process = subprocess.Popen(
        [*SCRIPT, "--out", str(out), "--steps", "1", "--more", "100000"],
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + 120
        while (
            not (out / "checkpoint" / "latest").exists()
            and process.poll() is None
            and time.monotonic() < deadline
        ):
            time.sleep(0.2)
        ranks = psutil.Process(process.pid).children(recursive=True)
        assert len(ranks) >= 5  # the launcher and four ranks, in the middle of their training
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        said, _ = process.communicate(timeout=150)  # seconds on a quiet machine
    finally:
        process.kill()
    assert process.returncode == 130
    assert "interrupted" in said
    assert not [
        rank for rank in ranks if rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE
    ]
    assert set(Path("/dev/shm").glob("deepspeed*")) <= shared


def stock_train(folder: Path, ranks: int, *arguments: str) -> dict[str, float]:
    """examples/stock_train.py under the runner; its losses by step."""
    log, script = folder / f"log_{ranks}", [str(ROOT / "examples" / "stock_train.py"), *arguments]
    command = ["-m", "megatron_ucp.run", *script, "--out", str(folder / "out")]
    assert start(ranks, command, log) == 0, log.read_text()
    found = re.findall(r"step (\d+): loss (\S+)", log.read_text())
    return {step: float(loss) for step, loss in found}


def test_a_script_that_knows_nothing_of_this_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (tmp_path / "whole").mkdir()
    whole = stock_train(tmp_path / "whole", 2, "--steps", "5", "--zero", "1")
    begun = stock_train(tmp_path, 2, "--steps", "3", "--zero", "1")
    resumed = stock_train(tmp_path, 1, "--steps", "5", "--resume")
    assert list(begun) == ["1", "2", "3"] and list(resumed) == ["4", "5"]
    assert list(resumed.values()) == pytest.approx([whole["4"], whole["5"]], rel=0, abs=1e-5)
    # what a run from the beginning would have
    assert resumed["4"] != pytest.approx(whole["1"], abs=0.01)


def test_the_minimal_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """examples/minimal.py, as its page starts it: two ranks, then one."""
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    said = []
    for ranks in (2, 1):
        script = [str(ROOT / "examples" / "minimal.py"), str(tmp_path / "checkpoint")]
        log = tmp_path / f"log_{ranks}"
        assert start(ranks, script, log) == 0, log.read_text()
        said.append(sorted(re.findall(r"(rank \d: step \d+), loss", log.read_text())))
    assert said == [["rank 0: step 10", "rank 1: step 10"], ["rank 0: step 20"]]


@pytest.mark.slow
def test_a_job_that_is_killed_again_and_again(tmp_path: Path) -> None:
    """examples/preemption.sh with fewer kills."""
    # a save every second iteration: there is one, however slow the machine
    how = ["--kills", "2", "--iterations", "60", "--longest", "0.5"]
    how += ["--at-least", "4", "--seed", "4"]
    script = ROOT / "examples" / "preemption.sh"
    done = run_command(["bash", script, "--out", tmp_path, *how], timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    lives = re.findall(
        r"life +\d+: .* from iteration +(\d+) to +(\d+), (killed|finished)", done.stdout
    )
    assert [how for *_, how in lives] == ["killed", "killed", "finished"], done.stdout
    assert int(lives[1][0]) > 1 and "60 of 60 losses" in done.stdout


@pytest.mark.slow
def test_an_elastic_run(tmp_path: Path) -> None:
    """examples/elastic.sh with fewer iterations."""
    script = ["bash", str(ROOT / "examples" / "elastic.sh"), "--out", str(tmp_path)]
    done = run_command([*script, "--iterations", "60", "--interval", "5"], timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = re.findall(r"\| (\d) +\| (tp=\d),pp=1,(dp=\d),zero=\d \|", done.stdout)
    assert rows == [("4", "tp=2", "dp=2"), ("3", "tp=1", "dp=3"), ("4", "tp=2", "dp=2")]
    assert len(re.findall(r"\| a node [a-z ]+\| \d+\.\d +\|", done.stdout)) == 2
    picture = image.imread(tmp_path / "elastic.png")
    assert picture[..., :3].std() > 0.05, "the picture is blank"


def trainer_log(path: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.slow
def test_an_elastic_run_of_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """examples/elastic_trainer.py: two ranks, one, two; every loss is the one of a run on two."""
    from lib.nodes import Nodes, kill  # type: ignore[import-not-found]

    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    program = [str(ROOT / "examples" / "elastic_trainer.py"), "--steps", "40", "--save-steps", "5"]
    whole, log = tmp_path / "whole", tmp_path / "out" / "log.jsonl"
    with Nodes(tmp_path, most=1) as nodes:
        node = nodes.start(2, [*program, "--out", str(whole)])
        assert nodes.wait(node, 200) == 0, node.log.read_text()
    script = [*program, "--out", str(log.parent)]
    with Nodes(tmp_path) as nodes:
        stays, dies = nodes.start(1, script), nodes.start(1, script)
        wait_for_rows(log, 12, stays)
        kill(dies)
        wait_for_rows(log, 16, stays)
        assert trainer_log(log)[-1]["ranks"] == 1
        joins = nodes.start(1, script)
        for node in (stays, joins):
            assert nodes.wait(node, 200) == 0, node.log.read_text()
    check_trainer(trainer_log(log), trainer_log(whole / "log.jsonl"))


def check_trainer(rows: list[dict[str, float]], whole: list[dict[str, float]]) -> None:
    want = {row["step"]: row["loss"] for row in whole}
    ranks = [int(row["ranks"]) for row in rows]
    assert [n for i, n in enumerate(ranks) if not i or n != ranks[i - 1]] == [2, 1, 2]
    assert {row["step"] for row in rows} == want.keys() == set(range(1, 41))
    assert all(row["loss"] == pytest.approx(want[row["step"]], rel=0, abs=1e-5) for row in rows)
    assert not all(row["loss"] == pytest.approx(want[1], abs=0.1) for row in rows)


def wait_for_rows(log: Path, count: int, node: Any) -> None:
    deadline = time.monotonic() + 120
    while len(trainer_log(log)) < count:
        assert node.agent.poll() is None and time.monotonic() < deadline, node.log.read_text()
        time.sleep(0.05)


def example(name: str, out: Path, *more: str) -> Done:
    arguments = ["--out", str(out), *FEW_STEPS, *more]
    return run_example(name, *arguments, preload=["peft", "transformers.trainer"])


def test_an_example_that_resumes(tmp_path: Path) -> None:
    done = example("hf_trainer.py", tmp_path / "out")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = re.findall(r"\| (\w[^|]*ZeRO-\d) +\| [\d,]+ +\| (yes|NO) ", done.stdout)
    assert rows == [("4 ranks, ZeRO-3", "yes"), ("1 rank, ZeRO-1", "yes")]


@pytest.mark.slow
def test_an_example_that_resumes_sees_a_fault(tmp_path: Path) -> None:
    """Negative control: one bit of one moment."""
    done = example("hf_trainer.py", tmp_path / "out", "--plant-fault")
    assert done.returncode == 1 and done.stdout.count("NO (1 differ)") == 2, done.stdout
