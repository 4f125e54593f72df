"""The quickstart, as a user runs it, with fewer steps."""

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest
from matplotlib import image

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ["bash", str(ROOT / "examples" / "quickstart.sh")]
ROW = re.compile(r"\| (ZeRO-\d, \d ranks?) +\| ([\d,]+) +\| [\d.]+ +\| (yes|NO) \(.*?\) +\| ([\d.e+-]+) +\|")

pytestmark = pytest.mark.ranks
Done = subprocess.CompletedProcess[str]


def quickstart(out: Path, *arguments: str) -> Done:
    return subprocess.run([*SCRIPT, "--out", str(out), "--steps", "6", "--more", "5", *arguments], cwd=out.parent,
                          capture_output=True, text=True, timeout=400)


@pytest.fixture(scope="module")
def run(tmp_checkpoints: Path) -> tuple[Path, Done]:
    """The folder and the output of a whole run, in a folder that holds other things already."""
    out = tmp_checkpoints / "quickstart"
    out.mkdir()
    (out / "mine.txt").write_text("kept")
    (out / "resumed_zero3_ranks4.json").write_text("left by an earlier run")
    return out, quickstart(out)


def test_the_quickstart_resumes_on_three_meshes(run: tuple[Path, Done]) -> None:
    out, done = run
    assert done.returncode == 0, done.stdout + done.stderr
    rows = ROW.findall(done.stdout)
    assert [row[0] for row in rows] == ["ZeRO-3, 4 ranks", "ZeRO-2, 2 ranks", "ZeRO-0, 1 rank"]
    parameters = int(re.findall(r"([\d,]+) parameters", done.stdout)[0].replace(",", ""))
    for _, read_bytes, equal, difference in rows:
        # a master and two moments, 4 bytes each, are what a load needs
        assert 12 * parameters <= int(read_bytes.replace(",", "")) <= 1.02 * 12 * parameters
        assert equal == "yes"
        assert float(difference) <= 1e-5
    assert (out / "table.md").read_text() in done.stdout
    assert (out / "mine.txt").read_text() == "kept"


def test_the_picture_shows_something(run: tuple[Path, Done]) -> None:
    picture = image.imread(run[0] / "losses.png")  # (height, width, 4)
    assert picture.shape[0] > 600 and picture.shape[1] > 600
    assert picture[..., :3].std() > 0.05, "the picture is blank"


def test_the_quickstart_sees_one_flipped_bit(run: tuple[Path, Done]) -> None:
    done = quickstart(run[0], "--reuse", "--resume", "2:1", "--plant-fault")
    assert done.returncode == 1, done.stdout + done.stderr
    assert [row[2] for row in ROW.findall(done.stdout)] == ["NO"]
    assert "NOT EQUAL after the load at ZeRO-2, 1 rank: master of" in done.stdout


def test_ctrl_c_stops_every_rank(tmp_path: Path) -> None:
    out, shared = tmp_path / "run", set(Path("/dev/shm").glob("deepspeed*"))
    process = subprocess.Popen([*SCRIPT, "--out", str(out), "--steps", "1", "--more", "100000"], text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        deadline = time.monotonic() + 120
        while not (out / "checkpoint" / "latest").exists() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.2)
        ranks = psutil.Process(process.pid).children(recursive=True)
        assert len(ranks) >= 5  # the launcher and four ranks, in the middle of their training
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        said, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "interrupted" in said
    assert not [rank for rank in ranks if rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE]
    assert set(Path("/dev/shm").glob("deepspeed*")) <= shared
