"""The command line itself: names of options, exit codes, JSON, pipes, Ctrl-C, and text from foreign
files. At its edges, an output that is closed or full, meshes that nobody has, loops of links, rules
that are not there: one line, no traceback, exit code 2."""

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

import megatron_ucp as ucp
from megatron_ucp import cli
from megatron_ucp.cli import main
from megatron_ucp.errors import UsageError
from tests.engines.sources import PLAIN, Sources
from tests.reshard import paper
from tests.reshard.plain import SHAPES
from tests.scripts import run_command

NAME = "layer.\x1b]0;owned\x07\u202eweight\ud800"


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A stage-0 checkpoint of stock DeepSpeed with a name that a terminal would obey."""
    folder = tmp_path / "small"
    folder.mkdir()
    module = OrderedDict({NAME: torch.ones(3), "bias": torch.ones(2)})
    tree: dict[str, Any] = {"module": module, "buffer_names": [], "optimizer": None}
    tree |= {"dp_world_size": 1, "mp_world_size": 1, "global_steps": 4, "skipped_steps": 0}
    torch.save(tree, folder / "mp_rank_00_model_states.pt")
    return folder


def run(*words: str, code: str = "") -> "subprocess.Popen[str]":
    code += "\nimport sys\nfrom megatron_ucp.cli import main\nsys.exit(main(sys.argv[1:]))"
    command, pipe = [sys.executable, "-c", code, *words], subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True)


def test_underscores_are_dashes_in_names_of_options(
    small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(small), "--allow-nan"]) == 0
    dashes = capsys.readouterr().out
    assert main(["verify", str(small), "--allow_nan"]) == 0
    assert capsys.readouterr().out == dashes
    words = ["a_b", "--c_d", "--e_f=g_h", "-i_j", "--", "--k_l"]
    assert cli._dashed(words) == ["a_b", "--c-d", "--e-f=g_h", "-i_j", "--", "--k_l"]


WRITING = ("convert", "export-hf", "import-hf")


@pytest.mark.parametrize("verb", cli.COMMANDS)
def test_every_option_has_dashes_and_every_verb_json(verb: str) -> None:
    """What only has underscores could not be given at all."""
    parsers = cli._parser()._actions
    (verbs,) = [one for one in parsers if isinstance(one, argparse._SubParsersAction)]
    options = [action.option_strings for action in verbs.choices[verb]._actions]
    assert "--json" in [option for one in options for option in one]
    for one in options:
        assert not one or any("_" not in option for option in one), one


@pytest.mark.parametrize(
    "words",
    [
        ["inspect"],
        ["frobnicate"],
        ["inspect", "a", "b"],
        ["diff", "a"],
        ["verify", "a", "--no-such"],
        ["inspect", "a", "--tag"],
    ],
)
def test_wrong_usage_is_an_error_like_any_other(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    told = capsys.readouterr()
    assert told.out == "" and told.err.startswith("megatron-ucp: ") and "what to do: " in told.err
    assert main([*words, "--json"]) == 2
    told = capsys.readouterr()
    assert told.err == "" and json.loads(told.out)["error"] == "UsageError"


def test_help_is_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["inspect", "--help"])
    assert ended.value.code == 0 and "--all" in capsys.readouterr().out


@pytest.mark.parametrize(
    "verb", [one for one in cli.COMMANDS if one not in ("diff", "run", "doctor")]
)
def test_a_path_that_is_not_there(
    verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = [str(tmp_path / "out")] if verb in WRITING else []
    assert main([verb, str(tmp_path / "nowhere"), *out, "--json"]) == 2
    told = json.loads(capsys.readouterr().out)
    assert "error" in told and "what_to_do" in told


def test_names_of_files_can_not_command_a_terminal(
    small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(small), "--all"]) == 0
    told = capsys.readouterr().out
    assert not set("\x1b\x07\u202e\ud800") & set(told)
    assert r"layer.\x1b]0;owned\x07\u202eweight\ud800" in told
    assert main(["inspect", str(small), "--json"]) == 0
    assert NAME in [row["name"] for row in json.loads(capsys.readouterr().out)["table"]]


def test_a_reader_that_goes_away_is_no_error_message(small: Path) -> None:
    process = run("inspect", str(small))
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.wait(60) == 141 and process.stderr.read() == ""


@pytest.mark.ranks  # a process
def test_ctrl_c_ends_with_130_and_leaves_nothing(small: Path) -> None:
    before = sorted(path.name for path in small.iterdir())
    code = "import os, signal\nfrom megatron_ucp.formats.pt.file import PtFile\n"
    code += "PtFile.check = PtFile.read_into = lambda *_: os.kill(os.getpid(), signal.SIGINT)"
    process = run("verify", "--deep", str(small), code=code)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130 and out == "" and err == "megatron-ucp: interrupted\n"
    assert sorted(path.name for path in small.iterdir()) == before


def test_what_the_system_refuses_is_named(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(small.parent), "--tag", "x" * 300]) == 2
    told = capsys.readouterr().err
    assert "File name too long" in told and "what to do" in told and len(told) < 1000


def test_inspect_believes_a_manifest_of_files_that_are_there(
    sources: Sources, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It opens none of them, so that it takes no longer on thousands of ranks; `verify` does."""
    folder, model = tmp_path / "copy", "mp_rank_00_model_states.pt"
    shutil.copytree(Path(sources.get(2, PLAIN)) / "trained", folder)
    assert main(["inspect", str(folder), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["states"]["weights"]["dtypes"] == ["bfloat16", "float32", "int64"]
    assert told["states"]["fp32"]["dtypes"] == ["float32"]
    trainable = [row for row in told["table"] if row["kind"] == "trainable"]
    fp32_bytes = 4 * sum(_elems(row["shape"]) for row in trainable)
    assert told["states"]["exp_avg"]["bytes"] == told["states"]["fp32"]["bytes"] == fp32_bytes
    files = [path for path in folder.iterdir() if path.suffix in (".pt", ".safetensors")]
    assert told["file_bytes"] == sum(path.stat().st_size for path in files)
    check_that_files_are_only_counted(folder / model, told, capsys)


def check_that_files_are_only_counted(
    model: Path, told: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, size = model.parent, model.stat().st_size
    model.write_bytes(bytes(size))
    assert main(["inspect", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == told
    assert main(["verify", str(folder)]) == 1
    os.truncate(model, size - 1)
    assert main(["inspect", str(folder)]) == 2
    assert "another size" in capsys.readouterr().err
    model.unlink()
    assert main(["inspect", str(folder)]) == 2
    assert "missing" in capsys.readouterr().err


def _elems(shape: list[int]) -> int:
    return math.prod(shape)


def test_inspect_of_a_checkpoint_without_a_manifest_says_sizes_too(
    small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(small), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    size = (small / "mp_rank_00_model_states.pt").stat().st_size
    assert (told["file_bytes"], told["files"]) == (size, 1)
    assert sum(state["bytes"] for state in told["states"].values()) > 0


CLI = f"{sys.executable} -m megatron_ucp.cli"


@pytest.fixture
def plain(tmp_path: Path) -> Path:
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
def test_an_output_that_is_closed_or_full(plain: Path, where: str, verb: str) -> None:
    folder = plain.parent.parent
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


def test_nothing_is_begun_where_nothing_can_be_said(plain: Path) -> None:
    done = shell("convert source/step7 out --to universal >&-", plain.parent.parent)
    assert is_one_error(done) and not (plain.parent.parent / "out").exists()


def test_a_closed_standard_error(plain: Path) -> None:
    folder = plain.parent.parent
    assert shell("inspect source/step7 2>&-", folder).returncode == 0
    assert shell("inspect nowhere 2>&-", folder).returncode == 2
    assert shell("verify source/step7 --deep 2>&-", folder).returncode == 0


HUGE = ["dp=99999999999999999999", "dp=9223372036854775807", "dp=1000000", "vpp=1000000", "tp=²"]
HUGE += ["dp=" + "9" * 5000, "dp=300000,tp=4", "dp=1000,tp=1000"]


@pytest.mark.parametrize("mesh", HUGE)
@pytest.mark.parametrize("verb", ["plan", "convert"])
def test_a_typing_error_in_the_mesh_is_answered_at_once(
    plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], mesh: str, verb: str
) -> None:
    words = [verb, str(plain), *([str(tmp_path / "out")] if verb == "convert" else [])]
    began = time.perf_counter()
    assert main([*words, "--mesh", mesh, "--json"]) == 2
    assert time.perf_counter() - began < 5
    said = json.loads(capsys.readouterr().out)
    assert said["error"] == "UsageError" and "mesh" in said["problem"], said
    assert main([*words, "--mesh", mesh]) == 2
    assert "memory" not in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_mesh_of_the_api(plain: Path, tmp_path: Path) -> None:
    meshes = [ucp.Mesh(dp=10**20), ucp.Mesh(tp=10**6), ucp.Mesh(dp=1024, tp=1024)]
    for mesh in (*meshes, ucp.Mesh(vpp=10**9)):
        with pytest.raises(UsageError, match="more ranks than any machine"):
            ucp.convert(plain, tmp_path / "out", target=mesh)
        with pytest.raises(UsageError, match="more ranks than any machine"):
            ucp.Target(mesh)
    assert ucp.Target(ucp.Mesh(dp=16384, tp=8)).mesh.world == 131072


@pytest.mark.parametrize("stages", ["²", "9" * 5000, ","])
def test_numbers_of_layers_that_are_none(
    plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], stages: str
) -> None:
    words = ["convert", str(plain), str(tmp_path / "out"), "--mesh", "pp=2", "--stages", stages]
    assert main([*words, "--json"]) == 2
    assert "error" in json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("output", ["loop/x", "loop", "loop/a/b"])
def test_an_output_below_a_loop_of_links(
    plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], output: str
) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "pool")
    (tmp_path / "pool").symlink_to(tmp_path / "loop")
    for words in (["convert", str(plain)], ["export-hf", str(plain)]):
        assert main([*words, str(tmp_path / output), "--json"]) == 2
        assert json.loads(capsys.readouterr().out)["error"] in ("SaveError", "UsageError")
    assert main(["inspect", str(tmp_path / output)]) == 2


def test_rules_that_are_not_there_are_wrong_usage(
    plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = tmp_path / "wrong.toml"
    wrong.write_text("[[")
    for rules in (tmp_path / "nowhere", tmp_path, wrong):
        for verb in ("verify", "inspect"):
            assert main([verb, str(plain), "--rules", str(rules), "--json"]) == 2
            assert str(rules) in json.loads(capsys.readouterr().out)["file"]


def test_nan_is_information(
    plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
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
