"""Commands that torchrun starts on several processes: rank 0 speaks, all end alike, and who dies is
named."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import megatron_ucp as ucp
from tests.reshard import paper, twins
from tests.reshard.converted import digest, same

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama on tp=2, dp=2, ZeRO-1 as DeepSpeed's files."""
    home = tmp_path_factory.mktemp("source")
    first = paper.write(twins.model("llama"), home / "first" / "step7")
    ucp.convert(first, home / "runs" / "step7", mesh="tp=2,dp=2,zero=1")
    return home / "runs" / "step7"


def tried(source: Path, folder: Path, what: str, *more: str) -> list[dict[str, Any]]:
    program = [sys.executable, "-m", "tests.reshard.launched", str(source), str(folder), what]
    done = subprocess.run([*program, *more], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def torchrun(*words: str) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    program += ["--nproc_per_node", "2", "-m", "megatron_ucp"]
    return subprocess.run([*program, *words], capture_output=True, text=True, timeout=120)


def test_torchrun(source: Path, tmp_path: Path) -> None:
    """The real one, which has a store of its own and ends everybody when one process fails."""
    ucp.convert(source, tmp_path / "one", to="universal")
    done = torchrun("convert", str(source), str(tmp_path / "two"), "--to", "universal", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["files"] == 63  # one line, of rank 0
    assert digest(tmp_path / "one") == digest(tmp_path / "two")
    done = torchrun("export-hf", str(source), str(tmp_path / "hf"), "--verify")
    assert done.returncode == 0 and done.stdout.count("wrote ") == 1
    ucp.export_hf(source, tmp_path / "alone")
    assert digest(tmp_path / "alone") == digest(tmp_path / "hf")
    done = torchrun("convert", str(source), str(tmp_path / "two"), "--to", "universal")
    assert done.returncode == 1 and done.stderr.count("megatron-ucp: the output exists") == 1


def test_rank_0_speaks_and_all_have_its_exit_code(source: Path, tmp_path: Path) -> None:
    (whole,) = tried(source, tmp_path, "whole")
    assert whole["codes"] == [0, 0, 0] and whole["err"] == ["", "", ""]
    assert whole["out"][0].startswith("wrote ") and whole["out"][1:] == ["", ""]
    assert whole["there"] and not whole["left"]
    same(source, str(tmp_path / "out" / "whole0"))
    (flag,) = tried(source, tmp_path, "flag")
    assert flag["codes"] == [2, 2, 2] and flag["err"][1:] == ["", ""]
    assert "did you mean --latest?" in flag["err"][0] and not flag["there"]
    (full,) = tried(source, tmp_path, "full")
    assert full["codes"] == [2, 2, 2] and full["err"][1:] == ["", ""]
    assert "could not be written; nothing is left of it (on rank 2)" in full["err"][0]
    assert not full["there"] and not full["left"]


def test_who_does_not_come_is_named(source: Path, tmp_path: Path) -> None:
    (found,) = tried(source, tmp_path, "missing")
    assert found["codes"] == [2, 7, 2] and found["s"] < 20 and not found["there"]
    assert all("did not meet: rank 1 did not come" in found["err"][rank] for rank in (0, 2))


@pytest.mark.parametrize("trials", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_killed_at_random_moments(source: Path, tmp_path: Path, trials: int) -> None:
    """Nothing has the output's name but what is whole, and who lives names who was killed."""
    found = tried(source, tmp_path, "kill", "--trials", str(trials), "--seed", "6")
    assert len(found) == trials
    killed = [one for one in found if -9 in one["codes"] and not one["there"]]
    assert len(killed) >= trials // 3, "hardly a kill fell into a conversion"
    for number, one in enumerate(found):
        if one["there"]:
            same(source, str(tmp_path / "out" / f"kill{number}"))
    for one in killed:
        victim = one["victim"]
        others = [rank for rank in range(3) if rank != victim]
        assert [one["codes"][rank] for rank in others] == [2, 2] and one["s"] < 20, one
        for rank in others:
            text = one["err"][rank]
            assert f"rank {victim} died" in text or f"rank {victim} did not come" in text, one


def test_one_that_hangs_is_an_error_of_the_others(source: Path, tmp_path: Path) -> None:
    """Its connections stand: that it does not beat shows it."""
    found = tried(source, tmp_path, "stop", "--trials", "1", "--seed", "1")
    (one,) = found
    others = [rank for rank in range(3) if rank != one["victim"]]
    assert [one["codes"][rank] for rank in others] == [2, 2] and not one["there"], one
    for rank in others:
        assert f"rank {one['victim']} died, hangs, or can't be reached" in one["err"][rank]
