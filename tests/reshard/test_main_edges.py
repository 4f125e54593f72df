"""The command line at its edges: an output that is closed or full, meshes that nobody has, loops of
links, rules that are not there. One line, no traceback, exit code 2."""

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import megatron_ucp as ucp
from megatron_ucp.cli import main
from megatron_ucp.errors import UsageError
from tests.reshard import paper
from tests.reshard.plain import SHAPES
from tests.scripts import run_command

CLI = f"{sys.executable} -m megatron_ucp.cli"


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return paper.write(paper.plain_model(SHAPES), tmp_path / "source" / "step7")


def shell(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return run_command(
        ["bash", "-c", f"{CLI} {command}"], env={"PYTHONPATH": os.getcwd()}, cwd=folder
    )


def is_one_error(done: subprocess.CompletedProcess[str]) -> bool:
    """Whether the output was missed, and nothing but that was said."""
    return done.returncode == 2 and "Traceback" not in done.stderr and "ignored" not in done.stderr


@pytest.mark.parametrize("where", [">&-", "> /dev/full"])
@pytest.mark.parametrize("verb", ["inspect source/step7", "verify source/step7", "--help"])
def test_an_output_that_is_closed_or_full(small: Path, where: str, verb: str) -> None:
    folder = small.parent.parent
    done = shell(f"{verb} {where}", folder)
    assert is_one_error(done), done
    assert done.stderr.startswith("megatron-ucp: the output can't be written")
    if verb == "--help":
        return
    done = shell(f"{verb} --json {where}", folder)
    assert is_one_error(done), done
    assert json.loads(done.stderr)["error"] == "UsageError"
    done = shell(f"{verb}x --json {where}", folder)  # an error that can't be said either
    assert is_one_error(done) and "output" in json.loads(done.stderr)["problem"], done


def test_nothing_is_begun_where_nothing_can_be_said(small: Path) -> None:
    done = shell("convert source/step7 out --to universal >&-", small.parent.parent)
    assert is_one_error(done) and not (small.parent.parent / "out").exists()


def test_a_closed_standard_error(small: Path) -> None:
    folder = small.parent.parent
    assert shell("inspect source/step7 2>&-", folder).returncode == 0
    assert shell("inspect nowhere 2>&-", folder).returncode == 2
    assert shell("verify source/step7 --deep 2>&-", folder).returncode == 0


HUGE = ["dp=99999999999999999999", "dp=9223372036854775807", "dp=1000000", "vpp=1000000", "tp=²"]
HUGE += ["dp=" + "9" * 5000, "dp=300000,tp=4", "dp=1000,tp=1000"]


@pytest.mark.parametrize("mesh", HUGE)
@pytest.mark.parametrize("verb", ["plan", "convert"])
def test_a_typing_error_in_the_mesh_is_answered_at_once(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], mesh: str, verb: str
) -> None:
    words = [verb, str(small), *([str(tmp_path / "out")] if verb == "convert" else [])]
    began = time.perf_counter()
    assert main([*words, "--mesh", mesh, "--json"]) == 2
    assert time.perf_counter() - began < 5
    said = json.loads(capsys.readouterr().out)
    assert said["error"] == "UsageError" and "mesh" in said["problem"], said
    assert main([*words, "--mesh", mesh]) == 2
    assert "memory" not in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_mesh_of_the_api(small: Path, tmp_path: Path) -> None:
    meshes = [ucp.Mesh(dp=10**20), ucp.Mesh(tp=10**6), ucp.Mesh(dp=1024, tp=1024)]
    for mesh in (*meshes, ucp.Mesh(vpp=10**9)):
        with pytest.raises(UsageError, match="more ranks than any machine"):
            ucp.convert(small, tmp_path / "out", target=mesh)
        with pytest.raises(UsageError, match="more ranks than any machine"):
            ucp.Target(mesh)
    assert ucp.Target(ucp.Mesh(dp=16384, tp=8)).mesh.world == 131072


@pytest.mark.parametrize("stages", ["²", "9" * 5000, ","])
def test_numbers_of_layers_that_are_none(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], stages: str
) -> None:
    words = ["convert", str(small), str(tmp_path / "out"), "--mesh", "pp=2", "--stages", stages]
    assert main([*words, "--json"]) == 2
    assert "error" in json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("output", ["loop/x", "loop", "loop/a/b"])
def test_an_output_below_a_loop_of_links(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], output: str
) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "pool")
    (tmp_path / "pool").symlink_to(tmp_path / "loop")
    for words in (["convert", str(small)], ["export-hf", str(small)]):
        assert main([*words, str(tmp_path / output), "--json"]) == 2
        assert json.loads(capsys.readouterr().out)["error"] in ("SaveError", "UsageError")
    assert main(["inspect", str(tmp_path / output)]) == 2


def test_rules_that_are_not_there_are_wrong_usage(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = tmp_path / "wrong.toml"
    wrong.write_text("[[")
    for rules in (tmp_path / "nowhere", tmp_path, wrong):
        for verb in ("verify", "inspect"):
            assert main([verb, str(small), "--rules", str(rules), "--json"]) == 2
            assert str(rules) in json.loads(capsys.readouterr().out)["file"]


def test_nan_is_information(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shapes = {"weight": (4, 4)}
    folder = paper.write(paper.plain_model(shapes), tmp_path / "diverged" / "step7")
    for path in folder.glob("*optim*.pt"):
        tree = torch.load(path, weights_only=False)
        spoil(tree)
        torch.save(tree, path)
    (folder / "ucp_manifest.json").unlink(missing_ok=True)
    assert main(["verify", str(folder), "--deep"]) == 0
    said = capsys.readouterr().out
    assert "note: NaN, as a run has that diverged, in " in said and "no damage found" in said, said


def spoil(tree: object) -> None:
    """NaN in the first moment of a tree."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            if key == "exp_avg" and isinstance(value, torch.Tensor):
                value.fill_(math.nan)
            spoil(value)
    elif isinstance(tree, list):
        for value in tree:
            spoil(value)
