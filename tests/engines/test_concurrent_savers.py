"""Saves of real engines beside other savers: two jobs in one folder, and a tag that is held."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engines import shared_jobs
from tests.engines.megatron_jobs import Mcore
from tests.ranks import ROOT, RankPool

SAVES = 15


@pytest.mark.ranks
def test_two_jobs_save_into_one_folder_at_once(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    command = [sys.executable, "-m", "tests.engines.beside", str(run), "--saves", str(SAVES)]
    done = subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    assert found["codes"] == [0, 0] and found["wrong"] == []
    newest = {f"{name}{number}" for name in "ab" for number in (SAVES - 1, SAVES - 2)}
    tags = {name for name in found["left"] if name[0] in "ab"}
    # the other job's newest stays while `latest` names it: one more may be left
    assert newest <= tags and len(tags) <= len(newest) + 1, tags
    assert not [name for name in found["left"] if name.startswith(".")]


def test_megatrons_save_beside_another_saver(ranks: RankPool, tmp_path: Path) -> None:
    job = shared_jobs.megatron_beside
    for found in ranks.run(2, job, Mcore(layers=2), str(tmp_path)):
        assert "another save is writing this folder" in found["error"]
        assert "a save of this very process" in found["error"]
        assert found["held"] == [".iter_0000001.saving"], "the other one's files are gone"
        assert found["left"] == ["iter_0000002", "iter_0000003"]
        assert found["pointers"] == ["iter_0000003", "3"], "every pointer moves"
        assert found["run"] == ([*found["left"], "iter_0000004"], 1), "a run is one through loads"
