"""Notes of a step that takes another number of samples than it did."""

from pathlib import Path
from typing import Any

import pytest

from megatron_ucp.engines.deepspeed.state import BATCH, notes_of_batch


class Engine:
    """What DeepSpeed says of a batch."""

    def __init__(self, micro: int, accumulated: int, ranks: int, autotp: int = 1) -> None:
        self.sizes = micro, accumulated, ranks, autotp

    def train_batch_size(self) -> int:
        micro, accumulated, ranks, autotp = self.sizes
        return micro * accumulated * ranks * autotp

    def train_micro_batch_size_per_gpu(self) -> int:
        return self.sizes[0]

    def gradient_accumulation_steps(self) -> int:
        return self.sizes[1]

    def autotp_size(self) -> int:
        return self.sizes[3]


def notes(folder: Path, engine: Engine, run: dict[str, Any], tp: int = 1, **kept: Any) -> list[str]:
    counters = {"global_steps": 10, "global_samples": 320, **kept}
    return notes_of_batch(folder / "tag", run, counters, engine, tp, counts_samples=False)


@pytest.mark.parametrize("run", [{BATCH: 32}, {}])
def test_eight_ranks_become_six(tmp_path: Path, run: dict[str, Any]) -> None:
    """32 samples can't be kept on 6 ranks: the note says what they are now, and what is nearest."""
    changed, skipped = notes(tmp_path, Engine(4, 1, 6), run)
    assert "32 samples before, 24 (4 x 1 accumulated x 6 data-parallel ranks) now" in changed
    assert "32 does not divide by 6 ranks: per-rank batch x accumulation of 5 or 6" in changed
    assert "goes on after sample 240, which repeats 80 samples" in skipped


def test_a_batch_that_can_be_kept(tmp_path: Path) -> None:
    (changed, _) = notes(tmp_path, Engine(4, 1, 4), {})
    assert "per-rank batch x accumulation of 8 keeps it" in changed
    assert notes(tmp_path, Engine(4, 2, 4), {}) == []


def test_nobody_is_told_of_a_batch_that_nobody_knows(tmp_path: Path) -> None:
    """Files of tensor parallelism without a manifest count samples once, or once for each rank."""
    assert notes(tmp_path, Engine(4, 1, 6), {}, tp=2) == []
    (changed,) = notes(tmp_path, Engine(4, 1, 6), {BATCH: 32}, tp=2)
    assert "32 samples before" in changed
    assert notes(tmp_path, Engine(4, 1, 8), {BATCH: 32}, tp=2) == []
    assert notes(tmp_path, Engine(4, 1, 6), {}, global_steps=0) == []


def test_the_trainer_counts_by_its_steps(tmp_path: Path) -> None:
    (tmp_path / "trainer_state.json").write_text("{}")
    changed, trainer = notes(tmp_path, Engine(4, 2, 6), {})
    assert "48 (4 x 2 accumulated x 6" in changed
    assert "goes on after sample 480, which leaves out 160 samples" in trainer
