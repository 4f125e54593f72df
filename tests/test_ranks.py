"""The multi-process harness itself: results, changing worlds, failures, hangs, and what it leaves
behind."""

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import types
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.connection import Pipe
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import BUFFERS, ROOT, RankPool, RanksFailed, Worker, collect, fp16_on_cpu

pytestmark = pytest.mark.ranks
PLANTED = b"planted by tests/test_ranks.py"


# ------------------------------------------------ jobs, run by the ranks


def who_am_i(word: str, *, times: int) -> tuple[str, int, int, int]:
    import torch.distributed as dist

    return word * times, dist.get_rank(), dist.get_world_size(), os.getpid()


def train(stage: int, dtype: str = "fp32") -> list[float]:
    """Two steps of a tiny model with ZeRO; the mean loss of each."""
    import deepspeed
    import torch
    import torch.distributed as dist

    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
    }
    if dtype != "fp32":
        config[dtype] = {"enabled": True}
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    with fp16_on_cpu():
        engine = deepspeed.initialize(model=model, config=config, dist_init_required=False)[0]
    batch = torch.randn(8, 8)[2 * dist.get_rank() :][:2].to(next(model.parameters()).dtype)
    losses = []
    for _ in range(2):
        loss = engine(batch).float().pow(2).mean()
        engine.backward(loss)
        engine.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())
    return losses


def resources() -> dict[str, int]:
    anonymous = next(
        row
        for row in Path("/proc/self/status").read_text().splitlines()
        if row.startswith("RssAnon")
    )
    return {
        "fds": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "MiB": int(anonymous.split()[1]) // 1024,
    }


def fail_on(rank: int) -> None:
    import torch.distributed as dist

    if dist.get_rank() == rank:
        raise KeyError("planted fault")
    dist.barrier()


def hang_on(rank: int) -> None:
    import torch.distributed as dist

    leave_a_buffer()
    if dist.get_rank() == rank:
        threading.Event().wait()
    dist.barrier()


def die_on(rank: int) -> None:
    import torch.distributed as dist

    leave_a_buffer()
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def leave_a_buffer() -> None:
    name = (
        f"deepspeed_allreduce_buffer_0_127.0.0.1_{os.environ['MASTER_PORT']}_{os.environ['RANK']}"
    )
    (BUFFERS / name).write_bytes(PLANTED)


def meddle() -> None:
    os.environ["PLANTED"] = "1"
    os.chdir("/")


def surroundings() -> tuple[str | None, str]:
    return os.environ.get("PLANTED"), os.getcwd()


# ------------------------------------------------ tests


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    """A pool of its own for the tests that break it: the session's stays warm."""
    pool = RankPool(size=2)
    yield pool
    pool.close()


def buffers() -> set[str]:
    """Shared-memory files of ranks of this module: those of other programs come and go, and are not
    ours to judge."""
    found: set[str] = set()
    for path in BUFFERS.glob("deepspeed_allreduce_buffer_*"):
        with suppress(OSError), path.open("rb") as file:
            if file.read(len(PLANTED)) == PLANTED:
                found.add(path.name)
    return found


def test_results_come_by_rank(ranks: RankPool) -> None:
    results = ranks.run(3, who_am_i, "ab", times=2)
    assert [result[:3] for result in results] == [("abab", rank, 3) for rank in range(3)]
    assert [result[3] for result in results] == ranks.pids()[:3]


def test_worlds_and_stages_follow_each_other(ranks: RankPool) -> None:
    losses: dict[int, list[float]] = {}
    pids = None
    for world, stage in [(4, 3), (2, 1), (1, 0), (2, 3), (4, 3), (4, 1), (1, 3), (4, 2)]:
        by_rank = ranks.run(world, train, stage)
        assert all(result == by_rank[0] for result in by_rank)
        # same seeds and batches: the stage and what ran before make no difference that fp32 shows
        assert by_rank[0] == pytest.approx(losses.setdefault(world, by_rank[0]), rel=1e-6)
        assert ranks.pids() == (pids := pids or ranks.pids())
    assert len(losses) == 3


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_low_precision_trains(ranks: RankPool, dtype: str) -> None:
    for world, stage in [(2, 3), (1, 1)]:
        first, second = ranks.run(world, train, stage, dtype)[0]
        assert second < first


def test_jobs_start_alike(ranks: RankPool) -> None:
    before = ranks.run(1, surroundings)
    ranks.run(1, meddle)
    assert ranks.run(1, surroundings) == before == [(None, str(ROOT))]


def test_fifty_jobs_leave_nothing(ranks: RankPool) -> None:
    worlds = [(4, 3), (2, 1), (1, 2), (4, 0), (2, 3)]
    for world, stage in worlds:
        ranks.run(world, train, stage)
    before = ranks.run(4, resources)
    for world, stage in worlds * 10:
        ranks.run(world, train, stage)
    for old, new in zip(before, ranks.run(4, resources), strict=True):
        assert new["fds"] <= old["fds"] + 4
        assert new["threads"] <= old["threads"] + 4
        assert new["MiB"] <= old["MiB"] + 20
    assert not buffers()


def test_an_exception_names_the_line_and_the_pool_lives_on(pool: RankPool) -> None:
    with pytest.raises(RanksFailed) as failure:
        pool.run(2, fail_on, 1)
    assert next(iter(failure.value.by_rank)) == 1, "the culprit comes first"
    assert "KeyError: 'planted fault'" in failure.value.by_rank[1]
    assert "in fail_on" in failure.value.by_rank[1]
    assert len(pool.run(2, surroundings)) == 2


def test_the_first_to_fail_comes_first(tmp_path: Path) -> None:
    """Both messages wait to be read, and that of the second rank is the older one."""
    workers = []
    for failed_at in (2.0, 1.0):
        ours, theirs = Pipe()
        theirs.send_bytes(pickle.dumps((False, (failed_at, f"at {failed_at}"))))
        workers.append(Worker(0, ours, tmp_path / "log", tmp_path / "stacks"))
    _, failures = collect(workers, time.monotonic() + 1)
    assert list(failures.items()) == [(1, "at 1.0"), (0, "at 2.0")]


def test_a_hang_shows_the_stacks_of_all_ranks(pool: RankPool) -> None:
    pool.run(2, surroundings)  # warm: the short limit is for the job
    pids = pool.pids()
    with pytest.raises(RanksFailed) as failure:
        pool.run(2, hang_on, 1, timeout_s=2.0)
    stacks = failure.value.by_rank
    assert sorted(stacks) == [0, 1]
    assert "threading.py" in stacks[1] and "in hang_on" in stacks[1]
    assert "in barrier" in stacks[0] and "in hang_on" in stacks[0]
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert not buffers()


def test_a_killed_rank_is_reported(pool: RankPool) -> None:
    with pytest.raises(RanksFailed, match="the process ended with status 9"):
        pool.run(2, die_on, 0)
    assert not buffers()


def test_what_the_ranks_cannot_find_by_name_is_refused(pool: RankPool) -> None:
    def within() -> None: ...

    names: list[Any] = [f"{__name__}:surroundings", within, lambda: None, Path.exists, len]
    for job in names:
        with pytest.raises(TypeError, match="a function at the top level of a module, not"):
            pool.run(1, job)
    gone = types.FunctionType(within.__code__, globals(), "nothing")
    gone.__qualname__ = "nothing"
    with pytest.raises(RanksFailed, match="has no attribute 'nothing'"):
        pool.run(1, gone)


def test_no_orphans_when_the_test_process_is_killed() -> None:
    program = """
from tests import test_ranks
from tests.ranks import RankPool
pool = RankPool(2)
pool.run(2, test_ranks.surroundings)
print(*pool.pids(), flush=True)
pool.run(2, test_ranks.hang_on, 0)
"""
    with subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as parent:
        pids = [int(word) for word in (parent.stdout or sys.stdin).readline().split()]
        deadline = time.monotonic() + 60
        while not buffers() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert len(pids) == 2 and buffers()
        parent.kill()
    while (
        buffers() | {str(pid) for pid in pids if Path(f"/proc/{pid}").exists()}
        and time.monotonic() < deadline
    ):
        time.sleep(0.05)
    assert not buffers()
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def patched(name: str) -> bool:
    import megatron_ucp_patches as patches

    before = name in patches._applied
    patches.apply(name)
    return before


def test_what_a_job_patches_on_one_rank_is_patched_on_all_of_the_next() -> None:
    """Or some ranks would call collectives that the others do not."""
    pool, name = RankPool(2), "pipeline_group_norms"
    try:
        assert pool.run(1, patched, name) == [False]
        assert pool.run(2, patched, name) == [True, True]
    finally:
        pool.close()
