"""The command line on real checkpoints: what it prints, what it imports, what it returns."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import megatron_ucp as ucp
from megatron_ucp.cli import main
from tests.engines import kinds
from tests.engines.model import Setup
from tests.engines.sources import PLAIN, Sources
from tests.scripts import run_command

pytestmark = pytest.mark.ranks


def run(*args: str) -> subprocess.CompletedProcess[str]:
    return run_command([sys.executable, "-m", "megatron_ucp.cli", *args])


@pytest.mark.parametrize(
    ("dp", "zero", "engine"), [(2, 0, "zero0"), (2, 1, "zero12"), (4, 3, "zero3")]
)
def test_inspect(
    sources: Sources, capsys: pytest.CaptureFixture[str], dp: int, zero: int, engine: str
) -> None:
    folder = sources.get(dp, Setup(zero, "bf16"))
    assert main(["inspect", folder, "--tag", "trained", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["engine"] == engine and found["has_manifest"]
    assert found["run"]["global_steps"] == 3
    assert ucp.Mesh(**found["mesh"]) == ucp.Mesh(dp=dp, zero=zero)
    rows = {row["name"]: row for row in found["table"]}
    assert rows["embed.weight"]["also"] == ["head.weight"]
    assert rows["frozen.weight"]["kind"] == "frozen"
    assert rows["up.weight"]["states"] == ["fp32", "exp_avg", "exp_avg_sq"]
    assert found["groups"][1]["settings"]["weight_decay"] == 0.0
    assert main(["inspect", folder, "--all"]) == 0
    text = capsys.readouterr().out
    assert "group 1" in text and "up.weight" in text and "13x7" in text


def test_inspect_of_a_stock_checkpoint(
    sources: Sources, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = sources.get(2, Setup(0, "bf16"), attach=False, more=0)
    assert main(["inspect", str(Path(folder) / "trained"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["has_manifest"] is False and len(found["table"]) == 11


def test_inspect_imports_no_torch_and_no_deepspeed(sources: Sources) -> None:
    code = (
        "import sys; from megatron_ucp.cli import main; main(['inspect', sys.argv[1]]);"
        "print([m for m in ('torch', 'deepspeed', 'numpy') if m in sys.modules])"
    )
    done = run_command([sys.executable, "-c", code, sources.get(2, PLAIN)], timeout=60)
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "[]", done.stdout + done.stderr


def test_diff_across_meshes(
    sources: Sources, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = sources.get(2, PLAIN)
    sources.ranks.run(4, kinds.reshard, Setup(3, "bf16", seed=9), folder, str(tmp_path))
    one, other = str(Path(folder) / "trained"), str(tmp_path / "again")
    assert main(["diff", one, other]) == 0
    assert capsys.readouterr().out == "equal\n"
    assert main(["diff", one, str(Path(folder) / "filled"), "--limit", "2"]) == 1
    out = capsys.readouterr().out.splitlines()
    assert (
        len(out) == 4 and "elements, the first is 0" in out[0] and out[-1].endswith("differences")
    )
    assert main(["diff", one, str(Path(folder) / "filled"), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert {"up.weight", "gain"} <= {d["parameter"] for d in found["differences"]}


def test_wrong_input_exits_with_2_and_says_what_to_do(sources: Sources, tmp_path: Path) -> None:
    done = run("inspect", str(tmp_path / "nowhere"))
    assert (
        done.returncode == 2
        and done.stdout == ""
        and "what to do" in done.stderr
        and "Traceback" not in done.stderr
    )
    done = run("diff", str(tmp_path), str(tmp_path), "--json")
    assert done.returncode == 2 and json.loads(done.stdout)["error"] == "NotFoundError"
    assert run("frobnicate").returncode == 2
