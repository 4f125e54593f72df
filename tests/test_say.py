"""The visible line, notes and progress: who sees them, and when."""

import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_ucp import say
from tests.scripts import run_command

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def untouched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The logger as a new process has it, and as it was afterwards."""
    before = say.LOGGER.level, say.LOGGER.handlers[:], say.LOGGER.propagate
    say.LOGGER.setLevel(logging.NOTSET)
    say.LOGGER.handlers[:], say.LOGGER.propagate = [], True
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv(say.VARIABLE, raising=False)
    yield
    say.LOGGER.setLevel(before[0])
    say.LOGGER.handlers[:], say.LOGGER.propagate = before[1], before[2]


def said(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().err.splitlines()


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        (None, ["megatron_ucp: loaded; 1 note", "megatron_ucp: note: a fact"]),
        ("info", ["megatron_ucp: loaded; 1 note", "megatron_ucp: note: a fact"]),
        ("warning", ["megatron_ucp: note: a fact"]),
        ("ERROR", []),
        ("quiet", []),
    ],
)
def test_the_setting_says_what_is_shown(
    word: str | None,
    expected: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if word is not None:
        monkeypatch.setenv(say.VARIABLE, word)
    say.ended("loaded", ["a fact"])
    assert said(capsys) == expected


def test_an_unknown_setting_is_said_and_hides_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(say.VARIABLE, "loud")
    say.ended("loaded")
    first, second = said(capsys)
    assert "MEGATRON_UCP_LOG=loud is not known" in first
    assert second == "megatron_ucp: loaded; no notes"


def test_only_rank_0_speaks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "1")
    say.ended("loaded", ["a fact"])
    with say.progress("convert") as progress:
        progress(1, 2)
    assert said(capsys) == []


def test_a_program_that_sets_up_the_logger_keeps_control(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    own = logging.FileHandler(tmp_path / "log")
    say.LOGGER.addHandler(own)
    say.LOGGER.setLevel(logging.WARNING)
    say.ended("loaded", ["a fact"])
    own.close()
    assert (tmp_path / "log").read_text() == "note: a fact\n"
    assert say.LOGGER.propagate
    assert said(capsys) == []


PROGRAM = """
import logging
logging.basicConfig(level=logging.WARNING)          # as trainers do
from deepspeed.utils import logger
logger.setLevel(logging.ERROR)
from megatron_ucp import say
say.ended("loaded", ["a fact"])
"""


def test_it_is_seen_once_under_the_levels_of_deepspeed_and_of_trainers() -> None:
    done = run_command(
        [sys.executable, "-c", PROGRAM], env={"DEEPSPEED_LOG_LEVEL": "error"}, cwd=ROOT, check=True
    )
    ours = [line for line in done.stderr.splitlines() if "megatron_ucp" in line]
    assert ours == ["megatron_ucp: loaded; 1 note", "megatron_ucp: note: a fact"]


def test_progress_is_a_line_each_half_minute(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seconds = iter([0.0, 10.0, 31.0, 40.0, 62.0, 100.0])
    monkeypatch.setattr(say.time, "monotonic", lambda: next(seconds))
    with say.progress("convert") as progress:
        for done in (100, 400, 500, 800, 1000):
            progress(done * 10**7, 10**10)
    assert said(capsys) == [
        "megatron_ucp: convert: 4 of 10 GB (40 %), 46 s left",
        "megatron_ucp: convert: 8 of 10 GB (80 %), 16 s left",
    ]


def test_progress_on_a_terminal_is_a_bar(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with say.progress("verify") as progress:
        progress(1, 4)
    text = capsys.readouterr().err
    assert text.startswith("\rverify") and "megatron_ucp" not in text


def test_a_command_prints_its_own_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(say, "_EACH_S", 0.0)
    monkeypatch.setattr(say.time, "monotonic", lambda: 0.0)
    shown = "megatron_ucp: verify: 1 of 4 files (25 %), 0.00 s left"
    for quiet, expected in ((False, [shown]), (True, [])):
        with say.by_command_line(quiet), say.progress("verify", "files") as progress:
            progress(1, 4)
            say.ended("verified", ["a fact"])
        assert said(capsys) == expected
    say.ended("loaded")
    assert said(capsys) == ["megatron_ucp: loaded; no notes"]


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (say.amount(0), "0 B"),
        (say.amount(999), "999 B"),
        (say.amount(10_600_000), "10.6 MB"),
        (say.amount(2 * 10**12), "2 TB"),
        (say.of(1_200_000_000, 15_500_000_000), "1.2 of 15.5 GB"),
        (say.of(1_200, 15_500, "parameters"), "1,200 of 15,500 parameters"),
        (say.duration(0.16), "0.16 s"),
        (say.duration(9.96), "10 s"),
        (say.duration(41), "41 s"),
        (say.duration(59.9), "1 min 00 s"),
        (say.duration(3899), "1 h 04 min"),
    ],
)
def test_numbers_are_for_people(shown: str, expected: str) -> None:
    assert shown == expected
