"""A rank that fails at any step of a load, a save or an attach: every rank ends with that error, at
once, and the same call does its work afterwards."""

from pathlib import Path
from typing import Any

import pytest

from tests.engines import step_jobs
from tests.engines.megatron_jobs import Mcore
from tests.engines.model import Setup
from tests.ranks import RankPool

pytestmark = pytest.mark.ranks
SOON_S = 60.0  # a second on an idle machine; a rank that hangs would wait for ninety
CASES = [
    (2, Setup(1), "load"),
    (3, Setup(3), "load"),
    (2, Mcore(tp=2), "load"),
    (3, Setup(1), "save"),
    (2, Setup(1), "background"),
    (2, Mcore(tp=2), "save"),
    (3, Setup(1), "attach"),
]
MORE = [(4, Setup(zero), what) for zero in (0, 1, 3) for what in ("load", "save", "background")]


@pytest.mark.parametrize(
    ("world", "setup", "what"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE)],
    ids=lambda one: repr(one)[:20],
)
def test_each_step_may_fail_on_each_rank(
    ranks: RankPool, tmp_path: Path, world: int, setup: Any, what: str
) -> None:
    """The control: that a planted failure is told at all is asserted for each."""
    jobs = ranks.run(
        world, step_jobs.fails_at_each, setup, str(tmp_path), what, world < 4, timeout_s=300
    )
    assert len(jobs[0]["told"]) >= 2 * (world if world < 4 else 1)
    for key in jobs[0]["told"]:
        for rank, found in enumerate(jobs):
            said, seconds = found["told"][key]
            where = "" if rank == key[1] else f" (on rank {key[1]})"
            assert said == f"Planted: planted at step {key[0]}{where}", (key, rank, said)
            assert seconds < SOON_S, (key, rank, seconds)
    if what in ("save", "background"):
        assert any(name.startswith(("global_step", "iter_")) for name in jobs[0]["left"])
        assert not [name for name in jobs[0]["left"] if name.startswith(".")], jobs[0]["left"]
