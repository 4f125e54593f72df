"""States move on GPUs as on CPUs: the same program on both."""

from pathlib import Path

import pytest
import torch

from megatron_ucp.engines.snapshot import SnapshotMemory
from megatron_ucp.reshard.pages import NEVER, UsedUp
from tests.ranks import ROOT
from tests.scripts import start

SCRIPT = str(Path(__file__).with_name("device_script.py"))


def moved(folder: Path, ranks: int, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    log = folder / "log"
    assert start(ranks, [SCRIPT, str(folder / "out")], log) == 0, log.read_text()
    return log.read_text()


@pytest.mark.ranks
def test_on_cpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert "moved on cpu by gloo" in moved(tmp_path, 2, monkeypatch)


@pytest.mark.gpu
@pytest.mark.ranks
def test_on_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many ranks as share the batch evenly, each with a GPU."""
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    ranks = next(count for count in (4, 2, 1) if count <= torch.cuda.device_count())
    assert "moved on cuda by nccl" in moved(tmp_path, ranks, monkeypatch)


@pytest.mark.gpu
def test_a_snapshot_of_a_gpu_is_of_its_moment() -> None:
    """What the stream does after the copy does not change it."""
    memory, snapshot = torch.arange(2**22, device="cuda"), SnapshotMemory()
    flat = memory.view(torch.uint8)
    copy = snapshot.copy(flat)
    want = torch.arange(2**22)
    memory.zero_()
    torch.cuda.current_stream().synchronize()
    assert copy is not None and copy.is_pinned() and torch.equal(copy.view(torch.int64), want)


@pytest.mark.gpu
def test_memory_of_a_gpu_is_not_let_go_of_page_by_page() -> None:
    memory = torch.ones(2**22, device="cuda")
    used_up = UsedUp([memory])
    used_up.read(0, memory)
    used_up.let_go(NEVER)
    used_up.let_go(0)
    assert bool((memory == 1).all())
