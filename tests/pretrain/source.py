"""An uninterrupted run with a checkpoint in the middle, which several files of tests resume."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.pretrain import jobs
from tests.pretrain.common import BATCH, QUIET, RATES, command, mesh, stdlib
from tests.ranks import RankPool

JOB = jobs.run
ITERATIONS, SAVED = 8, 4


@dataclass(frozen=True)
class Source:
    """An uninterrupted run at tp=2, dp=2, ZeRO-1, with a checkpoint in the middle."""

    model: list[str]
    folder: Path
    result: dict[str, Any]

    def argv(self, *more: list[str] | str, iterations: int = ITERATIONS) -> list[str]:
        return command(
            self.model, BATCH, RATES, QUIET, stdlib(), f"--train-iters {iterations}", *more
        )

    def resume(self, *more: list[str] | str, iterations: int = ITERATIONS) -> list[str]:
        return self.argv(f"--load {self.folder} --ckpt-step {SAVED}", *more, iterations=iterations)


def make_source(ranks: RankPool, model: list[str], folder: Path) -> Source:
    source = Source(model, folder, {})
    results = ranks.run(
        4,
        JOB,
        source.argv(
            mesh(2, 1), f"--save {folder} --save-interval {SAVED} --log-json {folder / 'log.jsonl'}"
        ),
    )
    assert all(result["losses"] == results[0]["losses"] for result in results)
    return Source(model, folder, results[3])  # the last rank speaks


def check_resumed(source: Source, result: dict[str, Any]) -> None:
    assert "error" not in result, result["text"]
    reached = result["first"], result["iteration"], result["consumed"]
    assert reached == (SAVED, ITERATIONS, ITERATIONS * 8)
    after = source.result["losses"][SAVED:]
    assert len(result["losses"]) == len(after) == ITERATIONS - SAVED
    assert result["losses"] == pytest.approx(after, rel=0, abs=1e-5)
