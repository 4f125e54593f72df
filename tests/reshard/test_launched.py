"""Commands that torchrun starts on several processes: rank 0 speaks, and all end alike."""

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


def tried(source: Path, folder: Path, *words: str) -> list[dict[str, Any]]:
    program = [sys.executable, "-m", "tests.reshard.launched", str(source), str(folder), *words]
    done = subprocess.run(program, capture_output=True, text=True, timeout=900)
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
    # rank 0 has told the error before torchrun ends it because rank 1 failed
    done = torchrun("export-hf", str(source), str(tmp_path / "two"))
    assert done.returncode == 1 and done.stderr.count("megatron-ucp: the output exists") == 1


def test_all_end_alike(source: Path, tmp_path: Path) -> None:
    """Rank 0 speaks, all have its exit code, and nothing is left of what failed."""
    events = ("whole", "flag", "full")
    found = {one["what"]: one for one in tried(source, tmp_path, *events)}
    whole, flag, full = (found[event] for event in events)
    assert whole["codes"] == [0, 0, 0] and whole["err"] == ["", "", ""]
    assert whole["out"][0].startswith("wrote ") and whole["out"][1:] == ["", ""]
    assert whole["there"] and not whole["left"]
    same(source, str(tmp_path / "out" / "whole0"))
    assert flag["codes"] == [2, 2, 2] and flag["err"][1:] == ["", ""]
    assert "did you mean --latest?" in flag["err"][0] and not flag["there"]
    assert full["codes"] == [2, 2, 2] and full["err"][1:] == ["", ""]
    assert "could not be written; nothing is left of it (on rank 2)" in full["err"][0]
    assert not full["there"] and not full["left"]


@pytest.mark.parametrize("trials", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_killed_at_random_moments(source: Path, tmp_path: Path, trials: int) -> None:
    """Nothing has the output's name but what is whole, and who lives ends with an error."""
    found = tried(source, tmp_path, "kill", "--trials", str(trials), "--seed", "6")
    assert len(found) == trials
    killed = [one for one in found if -9 in one["codes"] and not one["there"]]
    assert len(killed) >= trials // 3, "hardly a kill fell into a conversion"
    for number, one in enumerate(found):
        if one["there"]:
            same(source, str(tmp_path / "out" / f"kill{number}"))
    for one in killed:
        assert one["s"] < 20, one
        for rank in {0, 1, 2} - {one["victim"]}:
            code, text = one["codes"][rank], one["err"][rank]
            told = code == 2 and ("a rank died" in text or "did not meet" in text)
            assert told or code == -15, json.dumps(one, indent=1)
