"""Saves of real engines beside other savers: two jobs in one folder, and a tag that is held."""

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import megatron_ucp as ucp
from megatron_ucp.core.manifest import RUN, TAG
from megatron_ucp.formats import output_folder
from tests.engines.megatron_jobs import Mcore, arguments, close, make, train
from tests.ranks import ROOT, RankPool
from tests.scripts import run_command


def folders(folder: str) -> list[str]:
    dist.barrier()
    found = sorted(path.name for path in Path(folder).iterdir() if path.is_dir())
    dist.barrier()
    return found


def megatron_beside(setup: Mcore, folder: str) -> dict[str, Any]:
    """A tag that another saver holds is refused; the next ones are saved, and move DeepSpeed's
    pointer, which lies there."""
    engine, out = make(setup), dict[str, Any]()
    is_first = dist.get_rank() == 0
    train(engine, 1)
    with output_folder.begin(Path(folder), "iter_0000001") if is_first else nullcontext():
        dist.barrier()
        try:
            ucp.save(engine.handle, folder, arguments=arguments(engine))
        except ucp.UcpError as error:
            out["error"] = str(error)
        out["held"] = folders(folder)
    if is_first:
        (Path(folder) / "latest").write_text("global_step9")
    for step in (1, 2):
        train(engine, 1, first=step)
        ucp.save(engine.handle, folder, arguments=arguments(engine))
    out["left"] = folders(folder)
    names = ("latest", "latest_checkpointed_iteration.txt")
    out["pointers"] = [(Path(folder) / name).read_text() for name in names]
    close(engine)
    again = make(setup)
    ucp.load(again.handle, folder)
    train(again, 1, first=3)
    ucp.save(again.handle, folder, arguments=arguments(again))
    runs = [output_folder.manifest_of(Path(folder) / tag).run for tag in folders(folder)]
    out["run"] = [one[TAG] for one in runs], len({one[RUN] for one in runs})
    close(again)
    return out


SAVES = 15


@pytest.mark.ranks
def test_two_jobs_save_into_one_folder_at_once(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    command = [sys.executable, "-m", "tests.engines.beside", str(run), "--saves", str(SAVES)]
    done = run_command(command, timeout=200, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    assert found["codes"] == [0, 0] and found["wrong"] == []
    newest = {f"{name}{number}" for name in "ab" for number in (SAVES - 1, SAVES - 2)}
    tags = {name for name in found["left"] if name[0] in "ab"}
    # the other job's newest stays while `latest` names it: one more may be left
    assert newest <= tags and len(tags) <= len(newest) + 1, tags
    assert not [name for name in found["left"] if name.startswith(".")]


def test_megatrons_save_beside_another_saver(ranks: RankPool, tmp_path: Path) -> None:
    job = megatron_beside
    for found in ranks.run(2, job, Mcore(layers=2), str(tmp_path)):
        assert "another save is writing this folder" in found["error"]
        assert "a save of this very process" in found["error"]
        assert found["held"] == [".iter_0000001.saving"], "the other one's files are gone"
        assert found["left"] == ["iter_0000002", "iter_0000003"]
        assert found["pointers"] == ["iter_0000003", "3"], "every pointer moves"
        assert found["run"] == ([*found["left"], "iter_0000004"], 1), "a run is one through loads"
