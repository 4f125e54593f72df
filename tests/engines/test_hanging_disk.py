"""Saves whose disk hangs until after their deadline: a pointer never moves to an older save, what
was confirmed stays, what is said of a save that was given up is so, and the next one is saved."""

import threading
from pathlib import Path

import pytest

from tests.engines import hung_jobs
from tests.ranks import RankPool

pytestmark = pytest.mark.ranks
CASES = [
    (kind, keep, call, when)
    for kind in ("deepspeed", "stack")
    for keep in (1, None)
    for call, when in [
        ("fsync", "before"),
        *((c, w) for c in ("rename", "replace") for w in ("before", "after")),
    ]
]
DEFAULT = [
    ("deepspeed", 1, "fsync", "before"),
    ("deepspeed", 1, "rename", "before"),
    ("stack", 1, "replace", "before"),
]


@pytest.mark.parametrize(
    ("kind", "keep", "call", "when"),
    [
        *DEFAULT,
        *(pytest.param(*one, marks=pytest.mark.slow) for one in CASES if one not in DEFAULT),
    ],
)
def test_a_save_that_was_given_up_changes_nothing_any_more(
    ranks: RankPool, tmp_path: Path, kind: str, keep: int | None, call: str, when: str
) -> None:
    (found,) = ranks.run(1, hung_jobs.hung, kind, str(tmp_path), keep, call, when, timeout_s=600)
    assert found["faults"] == [] and found["untrue"] == []
    least = {"fsync": 7, "rename": 1 if keep is None else 2, "replace": 2}
    assert found["positions"] >= least[call], found
    if call == "fsync":
        assert {one.partition(",")[0] for one in found["said"]} >= {"nothing of it counts"}
        assert any("is there and whole" in one for one in found["said"]), found


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["deepspeed", "stack"])
@pytest.mark.parametrize("seed", range(10))
def test_random_lives(ranks: RankPool, tmp_path: Path, kind: str, seed: int) -> None:
    (found,) = ranks.run(1, hung_jobs.lives, kind, str(tmp_path), seed, 8, 10, timeout_s=900)
    assert found["faults"] == []
    assert found["hangs"] > 3 and found["confirmed"] > 20


def test_what_watches_finds_a_pointer_that_moves_back(tmp_path: Path) -> None:
    run = object.__new__(hung_jobs.Run)
    run.kind, run.folder, run.keep, run.step = "deepspeed", tmp_path, 1, 2
    run.pointer, run.confirmed, run.faults, run._highest = tmp_path / "latest", [1], [], 0
    run._looks = threading.Lock()
    for step in (2, 1):
        run.path(step).mkdir()
        (run.path(step) / "ucp_manifest.json").touch()
        run.pointer.write_text(f"step{step}")
        run.look()
    assert run.faults == ["the pointer moved from 2 back to 1"]
    run.path(1).rename(tmp_path / "elsewhere")
    run.look()
    assert run.faults[-1] == "1 was confirmed, and is gone"
    assert run.untrue("given up: step2 is there and whole") == []
    assert run.untrue("nothing of it counts")[0].startswith("step2 is there")
