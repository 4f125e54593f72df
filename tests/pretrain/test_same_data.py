"""A checkpoint's position is one in its own data: other data are refused by name, moved files are
the same data."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from megatron_ucp.errors import UsageError
from pretrain import same_data
from pretrain.arguments import complete, parse
from tests.pretrain import jobs
from tests.pretrain.common import BATCH, LLAMA, QUIET, RATES, command, stdlib
from tests.ranks import RankPool

JOB = jobs.run


def told(*flags: str) -> str:
    rest = ["--micro-batch-size", "2", "--lr", "1e-3", "--train-iters", "10"]
    return same_data.identity(complete(parse(command(LLAMA, rest, list(flags))), 1))


@pytest.fixture
def texts(tmp_path: Path) -> list[str]:
    paths = [str(tmp_path / name) for name in ("one.txt", "two.txt")]
    for number, path in enumerate(paths):
        Path(path).write_text(f"{number} and more\n" * 400)
    return paths


def test_what_is_the_same_data(texts: list[str], tmp_path: Path) -> None:
    one, two = texts
    moved = str(tmp_path / "elsewhere.text")
    shutil.copy(one, moved)
    first = told("--data-path", one)
    assert same_data.differences(first, told("--data-path", moved)) == []
    assert same_data.differences(first, told("--data-path", "3", one)) == []  # one source
    split = told("--data-path", one, "--split", "8,2")
    assert same_data.differences(split, told("--data-path", one, "--split", "80,20,0")) == []
    blend = told("--data-path", "1", one, "3", two)
    assert same_data.differences(blend, told("--data-path", "2", moved, "6", two)) == []
    for unknown in (None, "", "[]", "nothing", 3):  # of an older checkpoint
        assert same_data.differences(unknown, first) == []


def test_what_is_other_data(texts: list[str], tmp_path: Path) -> None:
    one, two = texts
    base = ("--data-path", "1", one, "3", two)
    longer = str(tmp_path / "longer.txt")
    Path(longer).write_text(Path(one).read_text() + "x")
    for flags, flag in {
        ("--data-path", one): "--data-path",
        ("--data-path", "1", two, "3", one): "--data-path",
        ("--data-path", "1", one, "2", two): "--data-path",
        ("--data-path", "1", longer, "3", two): "--data-path",
        (*base, "--split", "8,2"): "--split",
        (*base, "--seq-length", "16"): "--seq-length",
    }.items():
        (line,) = same_data.differences(told(*base), told(*flags))
        assert line.startswith(f"{flag} was "), line
    assert len(same_data.differences(told(*base), told("--mock-data"))) == 3


def test_changes_in_large_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ends of a large file are looked at, and its size."""
    monkeypatch.setattr(same_data, "WINDOWS", 4)
    monkeypatch.setattr(same_data, "WINDOW_BYTES", 16)
    data = bytes(range(256)) * 3
    path = tmp_path / "data.txt"
    path.write_bytes(data)
    first = told("--data-path", str(path))
    for other in (b"x" + data[1:], data[:-1] + b"x", data + b"x"):
        path.write_bytes(other)
        assert same_data.differences(first, told("--data-path", str(path)))
    path.write_bytes(data)
    assert same_data.differences(first, told("--data-path", str(path))) == []


def test_the_flag_needs_a_checkpoint() -> None:
    with pytest.raises(UsageError, match="needs --load"):
        told("--mock-data", "--allow-other-data")


class Runs:
    """A run that was saved after two iterations, and what follows."""

    def __init__(self, ranks: RankPool, folder: str, engine: str, data: str) -> None:
        whole = command(LLAMA, BATCH, RATES, QUIET, "--engine", engine)
        self._whole = [*whole, "--train-iters", "4", "--lr-decay-iters", "4"]
        self._ranks, self._folder = ranks, folder
        first = self.of("--data-path", data, "--save", folder, "--exit-interval", "2")
        assert first["iteration"] == 2
        self.losses = self.of("--data-path", data)["losses"][2:]

    def of(self, *flags: str) -> dict[str, Any]:
        return self._ranks.run(1, JOB, [*self._whole, *flags])[0]

    def resumed(self, *flags: str) -> dict[str, Any]:
        return self.of("--load", self._folder, *flags)


@pytest.mark.parametrize("engine", ["deepspeed", "megatron"])
def test_a_run_goes_on_in_its_own_data_alone(ranks: RankPool, tmp_path: Path, engine: str) -> None:
    """The losses are those of the run that was not interrupted where only the path is another one,
    and others where other data were allowed."""
    own, moved, other = stdlib()[2], str(tmp_path / "moved.py"), stdlib()[4]
    shutil.copy(own, moved)
    runs = Runs(ranks, str(tmp_path / "saved"), engine, own)
    assert runs.resumed("--data-path", moved)["losses"] == runs.losses
    for flags, words in {
        ("--data-path", other): ("--data-path was", own, other),
        ("--data-path", own, "--split", "1,1"): ("--split was 0.969 0.03 0.001, is 0.5 0.5 0",),
        ("--mock-data",): ("--mock-data was not given, is True",),
    }.items():
        refused = runs.resumed(*flags)
        assert refused["error"] == "UsageError", refused
        assert all(word in refused["text"] for word in (*words, "--allow-other-data")), refused
        found = runs.resumed(*flags, "--allow-other-data")
        assert words[0] in found["said"] and "as allowed" in found["said"]
        assert (found["first"], found["iteration"]) == (2, 4) and found["losses"] != runs.losses
    begun = runs.resumed("--data-path", other, "--finetune")
    assert begun["first"] == 0 and "as allowed" not in begun["said"]
