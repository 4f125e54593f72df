"""What several ranks hold alike is read by one of them, and sent to the others: the same bits, a
quarter of the bytes on four ranks, and one fate where a reader fails."""

from typing import Any

import pytest
import torch.distributed as dist

import megatron_ucp as ucp
from megatron_ucp.errors import DamagedFileError
from megatron_ucp.reshard import files, read_once
from tests.engines import kinds
from tests.engines.megatron_jobs import Mcore
from tests.engines.model import Setup, make_engine
from tests.engines.sources import Sources, check, check_fails
from tests.engines.test_megatron_pairs import SOURCES


def resume(setup: Any, folder: str, window_bytes: int, **options: Any) -> dict[str, Any]:
    """As `kinds.resume`, with windows of another size, and the windows that this rank read."""
    stock, fill_window, read = read_once.WINDOW_BYTES, files.SharedFiles.fill_window, [0]

    def counted(source: Any, plan: Any, *args: Any) -> None:
        read[0] += 1
        fill_window(source, plan, *args)

    read_once.WINDOW_BYTES, files.SharedFiles.fill_window = window_bytes, counted
    try:
        return kinds.resume(setup, folder, **options) | {"windows": read[0]}
    finally:
        read_once.WINDOW_BYTES, files.SharedFiles.fill_window = stock, fill_window


def fails(setup: Setup, folder: str, rank: int, at: int) -> dict[str, Any]:
    """A load in which one rank can't read its window number `at`."""
    engine = make_engine(setup)
    stock, fill_window, read = read_once.WINDOW_BYTES, files.SharedFiles.fill_window, [0]

    def failing(source: Any, plan: Any, *args: Any) -> None:
        read[0] += 1
        if dist.get_rank() == rank and read[0] == at:
            raise DamagedFileError("only here", file="a file")
        fill_window(source, plan, *args)

    read_once.WINDOW_BYTES, files.SharedFiles.fill_window = 1024, failing
    out: dict[str, Any] = {"message": "", "refuses": False}
    try:
        ucp.load(engine, folder, tag="trained", read="once")
    except ucp.UcpError as error:
        out["message"] = str(error)
    finally:
        read_once.WINDOW_BYTES, files.SharedFiles.fill_window = stock, fill_window
    try:
        engine.step()
    except ucp.UcpError as error:
        out["refuses"] = type(error).__name__ == "EngineUnusableError"
    engine.destroy()
    return out


pytestmark = pytest.mark.ranks
TARGET = Setup(0, "bf16", seed=9)


def read(found: list[dict[str, Any]]) -> int:
    """Bytes that all ranks read for the last tag."""
    (read_bytes,) = {rank["reports"]["filled"].all_read_bytes for rank in found}
    return read_bytes


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("window_bytes", [512, 2**21])
def test_the_same_bits_are_read_once(sources: Sources, dtype: str, window_bytes: int) -> None:
    folder, target = sources.get(2, Setup(1, dtype)), Setup(0, dtype, seed=9)
    job = resume, target, folder, window_bytes
    once = sources.ranks.run(4, *job, read="once")
    each = sources.ranks.run(4, *job, read="each")
    alone = sources.resume(1, target, folder)
    for found in (once, each):
        check(found)
    assert read(once) <= 1.02 * read(alone)
    assert read(each) >= 3.9 * read(once)
    windows = [rank["windows"] for rank in once]
    assert all(rank["windows"] == 0 for rank in each)
    assert max(windows) - min(windows) <= 2  # of each part one
    assert min(windows) > 5 or window_bytes > 2**20


def test_few_ranks_read_each_what_they_hold(sources: Sources) -> None:
    """Where nobody says how; and what partitions cut is nobody's twice."""
    folder, zero_1 = sources.get(2, Setup(1, "bf16")), Setup(1, "bf16", seed=9)
    for target, how, windows in (
        (TARGET, {}, range(1)),
        (zero_1, {"read": "once"}, range(1, 30)),  # of the frozen layer, and of buffers
        (Setup(3, "bf16", seed=9), {"read": "once"}, range(30)),
    ):
        found = sources.ranks.run(4, resume, target, folder, 512, **how)
        check(found)
        assert sum(rank["windows"] for rank in found) in windows


MOE: dict[str, Any] = {"family": "mixtral", "layers": 2}
STACKS = {
    "tp2": ("dp2", Mcore(tp=2, distributed=False)),
    "pp2": ("dp2", Mcore(pp=2)),
    "ep2": ("ep2", Mcore(ep=2, distributed=False, **MOE)),
}


@pytest.mark.parametrize("case", STACKS)
def test_groups_of_some_ranks(sources: Sources, case: str) -> None:
    """Where tensor or expert parallelism leaves two ranks each that hold the same."""
    source, target = STACKS[case]
    folder = sources.get(*SOURCES[source])
    found = sources.ranks.run(4, resume, target, folder, 256, read="once")
    check(found)
    windows = [rank["windows"] for rank in found]
    assert all(windows) == (not target.distributed)


def test_the_comparison_sees_a_planted_fault(sources: Sources) -> None:
    folder = sources.get(2, Setup(1, "bf16"))
    job = resume, TARGET, folder, 512
    found = sources.ranks.run(4, *job, tags=("filled",), plant="one bit", read="once")
    check_fails(found)


@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("at", [1, 5])
def test_a_reader_that_fails_is_an_error_of_all(sources: Sources, rank: int, at: int) -> None:
    folder = sources.get(2, Setup(1, "bf16"))
    found = sources.ranks.run(4, fails, TARGET, folder, rank, at, timeout_s=60)
    for one in found:
        assert "only here" in one["message"] and "a file" in one["message"]
        assert one["refuses"]
    assert [f"on rank {rank}" in one["message"] for one in found].count(True) == 3


def test_what_is_on_disk_is_compared_once(sources: Sources, tmp_path: Any) -> None:
    """A flipped byte of a file is found, though three of four ranks did not read it."""
    import shutil
    from pathlib import Path

    folder = Path(shutil.copytree(sources.get(2, Setup(1, "bf16")), tmp_path / "run"))
    (path,) = (folder / "trained").glob("*zero_pp_rank_1_*optim_states.pt")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    found = sources.ranks.run(4, fails, TARGET, str(folder), 0, -1)
    assert all(path.name in one["message"] and one["refuses"] for one in found), found
