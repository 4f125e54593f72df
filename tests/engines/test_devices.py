"""States move on GPUs as on CPUs: the same program on both."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_ucp.engines.background import SnapshotMemory
from tests.ranks import ROOT
from tests.scripts import start

SCRIPT = str(Path(__file__).with_name("device_script.py"))


@pytest.mark.ranks
def test_on_cpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    log = tmp_path / "log"
    assert start(2, [SCRIPT, str(tmp_path / "out")], log) == 0, log.read_text()
    assert "moved on cpu by gloo" in log.read_text()


@pytest.mark.gpu
@pytest.mark.ranks
def test_on_gpus(tmp_path: Path) -> None:
    """As many ranks as share the batch evenly, each with a GPU, in processes of their own: those of
    other tests are connected by gloo."""
    ranks = next(count for count in (4, 2, 1) if count <= torch.cuda.device_count())
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    command = [sys.executable, *launch, SCRIPT, str(tmp_path / "out")]
    away = {"DS_ACCELERATOR", "LOCAL_SIZE"}
    environment = {key: value for key, value in os.environ.items() if key not in away}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *sys.path])
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert "moved on cuda by nccl" in done.stdout, done.stdout + done.stderr


@pytest.mark.gpu
def test_a_snapshot_of_a_gpu_is_of_its_moment() -> None:
    """What the stream does after the copy does not change it."""
    memory, snapshot = torch.arange(2**22, device="cuda"), SnapshotMemory()
    flat = memory.view(torch.uint8)
    copy = snapshot.copy(flat)
    want = torch.arange(2**22)
    memory.zero_()
    snapshot.wait()
    assert copy is not None and copy.is_pinned() and torch.equal(copy.view(torch.int64), want)
