"""A rank that fails at any step of a load, a save or an attach: every rank ends with that error, at
once, and the same call does its work afterwards. A rank that is late is named."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

import megatron_ucp as ucp
from megatron_ucp.errors import UcpError
from megatron_ucp.reshard import agree, waits
from tests.engines import model
from tests.engines.kinds import attached, kind_of
from tests.engines.megatron_jobs import Mcore
from tests.engines.model import Setup, make_engine, train
from tests.ranks import RankPool


class Planted(UcpError):
    """The error of the test."""


class Steps:
    """Counts the blocks that this rank leaves, in whatever thread; at one of them it fails."""

    def __init__(self) -> None:
        self.count = 0
        self.fails_at: int | None = None

    def leave(self, stock: Callable[..., Any], block: Any, *of_error: Any) -> Any:
        if block._ranks is not None and block._ranks.world == 1:
            return stock(block, *of_error)
        self.count += 1
        if self.count - 1 != self.fails_at or of_error[1] is not None:
            return stock(block, *of_error)
        error = Planted(f"planted at step {self.fails_at}")
        return stock(block, Planted, error, None)

    @contextmanager
    def counted(self) -> Iterator[None]:
        together, merging = agree.together.__exit__, agree.merging.__exit__

        def of_together(block: Any, *of_error: Any) -> Any:
            return self.leave(together, block, *of_error)

        def of_merging(block: Any, *of_error: Any) -> Any:
            return self.leave(merging, block, *of_error)

        with (
            mock.patch.object(agree.together, "__exit__", of_together),
            mock.patch.object(agree.merging, "__exit__", of_merging),
        ):
            yield


def fails_at_each(setup: Any, folder: str, what: str, all_ranks: bool) -> dict[str, Any]:
    """What this rank is told for each planted failure, as {(step, failing rank): (text, seconds)};
    and what lies in the folder of saves in the end, when all of it was done once more."""
    steps, world, own = Steps(), dist.get_world_size(), dist.get_rank()
    told: dict[tuple[int, int], tuple[str, float]] = {}
    with mock.patch.object(model, "GLOBAL_BATCH", 12):  # what two, three and four ranks share
        first, then = _work(what, setup, Path(folder))
    with steps.counted():
        first()
        if what != "attach":  # which is done once; a save knows its plan from the one before
            steps.count = 0
            first()
        total = steps.count
        for step in range(total):
            for failing in range(world) if all_ranks else [step % world]:
                dist.barrier()
                steps.count, steps.fails_at = 0, step if own == failing else None
                started = time.monotonic()
                said = _said(then)
                told[step, failing] = said, time.monotonic() - started
        steps.fails_at = None
        then()
    return {"told": told, "left": sorted(path.name for path in Path(folder).glob("other/*"))}


def _work(what: str, setup: Any, out: Path) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Something to do on all ranks, and the same once more."""
    if what == "attach":
        engines = [make_engine(setup, attach=False) for _ in range(2)]
        return lambda: ucp.attach(engines[0]), lambda: ucp.attach(engines[1])
    kind = kind_of(setup)
    engine = kind.make(setup)
    handle = kind.handle(engine)
    kind.train(engine, 1)
    if what == "background":
        handle = attached(setup, save="background")
        train(handle, 1)
    if what == "load":
        handle.ucp.save(out / "good")
        return (lambda: ucp.load(handle, out / "good"),) * 2

    def save() -> None:
        handle.ucp.save(out / "other")
        ucp.wait(handle)

    return save, save


def _said(doing: Callable[[], Any]) -> str:
    try:
        doing()
    except UcpError as error:
        return f"{type(error).__name__}: {error.problem}"
    return "nothing"


# ------------------------------------------------ tests


pytestmark = pytest.mark.ranks
SOON_S = 60.0  # a second on an idle machine; a rank that hangs would wait for ninety
UNREADABLE = "no load would take what was written, and it counts for nothing"
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
    jobs = ranks.run(world, fails_at_each, setup, str(tmp_path), what, world < 4, timeout_s=300)
    assert len(jobs[0]["told"]) >= 2 * (world if world < 4 else 1)
    for key in jobs[0]["told"]:
        for rank, found in enumerate(jobs):
            said, seconds = found["told"][key]
            where = "" if rank == key[1] else f" (on rank {key[1]})"
            planted = f"planted at step {key[0]}{where}"
            expected = {f"Planted: {planted}"}
            if what in ("save", "background"):  # what fails while the files are looked at
                expected.add(f"SaveError: {UNREADABLE}: {planted}")
            assert said in expected, (key, rank, said)
            assert seconds < SOON_S, (key, rank, seconds)
    if what in ("save", "background"):
        assert any(name.startswith(("global_step", "iter_")) for name in jobs[0]["left"])
        assert not [name for name in jobs[0]["left"] if name.startswith(".")], jobs[0]["left"]


def late(which: int, seconds: float) -> list[str]:
    """What this rank says of the wait for another one."""
    said: list[str] = []

    class Keeps(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    handler, logger = Keeps(), logging.getLogger("megatron_ucp")
    logger.addHandler(handler)
    try:
        with mock.patch.object(waits, "LONG_S", 0.5):
            dist.barrier()
            if dist.get_rank() == which:
                time.sleep(seconds)
            with agree.together():
                pass
    finally:
        logger.removeHandler(handler)
    return said


@pytest.mark.parametrize("which", [0, 2])
def test_one_rank_says_which_one_is_late(which: int) -> None:
    pool = RankPool(3, gloo=True)
    try:
        found = pool.run(3, late, which, 4.0)
    finally:
        pool.close()
    (said,) = [one for rank in found for one in rank]
    assert f"1 of 3 ranks have not come to it: rank {which}" in said
    assert "late of tests.engines.test_fault_injection, line" in said
    assert not found[which]


def test_a_short_wait_is_not_told() -> None:
    pool = RankPool(3, gloo=True)
    try:
        assert pool.run(3, late, 1, 0.0) == [[], [], []]
    finally:
        pool.close()
