"""The command line itself: names of options, exit codes, JSON, pipes, Ctrl-C, and text from foreign
files."""

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ucp import cli
from megatron_ucp.cli import main
from tests.engines.sources import PLAIN, Sources

NAME = "layer.\x1b]0;owned\x07\u202eweight\ud800"


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A stage-0 checkpoint of stock DeepSpeed with a name that a terminal would obey."""
    folder = tmp_path / "small"
    folder.mkdir()
    torch.save(
        {
            "module": OrderedDict({NAME: torch.ones(3), "bias": torch.ones(2)}),
            "buffer_names": [],
            "dp_world_size": 1,
            "mp_world_size": 1,
            "global_steps": 4,
            "skipped_steps": 0,
            "optimizer": None,
        },
        folder / "mp_rank_00_model_states.pt",
    )
    return folder


def run(*words: str, code: str = "") -> "subprocess.Popen[str]":
    start = (
        ["-m", "megatron_ucp.cli"]
        if not code
        else [
            "-c",
            f"{code}\nimport sys\nfrom megatron_ucp.cli import main\nsys.exit(main(sys.argv[1:]))",
        ]
    )
    return subprocess.Popen(
        [sys.executable, *start, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_underscores_are_dashes_in_names_of_options(
    small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(small), "--allow-nan"]) == 0
    dashes = capsys.readouterr().out
    assert main(["verify", str(small), "--allow_nan"]) == 0
    assert capsys.readouterr().out == dashes
    assert cli._dashed(["a_b", "--c_d", "--e_f=g_h", "-i_j", "--", "--k_l"]) == [
        "a_b",
        "--c-d",
        "--e-f=g_h",
        "-i_j",
        "--",
        "--k_l",
    ]


WRITING = ("convert", "export-hf", "import-hf")


@pytest.mark.parametrize("verb", cli.COMMANDS)
def test_every_option_has_dashes_and_every_verb_json(verb: str) -> None:
    """What only has underscores could not be given at all."""
    choices = next(
        action.choices
        for action in cli._parser()._actions
        if isinstance(action, argparse._SubParsersAction)
    )
    actions = choices[verb]._actions
    assert "--json" in [option for action in actions for option in action.option_strings]
    for action in actions:
        assert not action.option_strings or any(
            "_" not in option for option in action.option_strings
        ), action.option_strings


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
    words = [
        verb,
        str(tmp_path / "nowhere"),
        *([str(tmp_path / "out")] if verb in WRITING else []),
    ]
    assert main([*words, "--json"]) == 2
    told = json.loads(capsys.readouterr().out)
    assert "error" in told and "what_to_do" in told


def test_names_of_files_can_not_command_a_terminal(
    small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(small), "--all"]) == 0
    told = capsys.readouterr().out
    assert (
        not set("\x1b\x07\u202e\ud800") & set(told)
        and r"layer.\x1b]0;owned\x07\u202eweight\ud800" in told
    )
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
    process = run(
        "verify",
        "--deep",
        str(small),
        code=(
            "import os, signal\nfrom megatron_ucp.formats.pt.file import PtFile\n"
            "PtFile.check = PtFile.read_into = lambda *_: os.kill(os.getpid(), signal.SIGINT)"
        ),
    )
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
    assert (
        told["file_bytes"] == (small / "mp_rank_00_model_states.pt").stat().st_size
        and told["files"] == 1
    )
    assert sum(state["bytes"] for state in told["states"].values()) > 0
