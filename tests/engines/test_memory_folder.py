"""The files of steps in memory: what says that bytes are a step, locks, and whose they are."""

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from isal.isal_zlib import crc32

from megatron_ucp.core.plan import Slot
from megatron_ucp.engines import memory as memory_folder
from megatron_ucp.engines.memory import KeptShare, KeptSlot, LifeLock, MemoryFolder, damaged
from megatron_ucp.errors import SaveError

SLOT = Slot(3, (("tp", 1),), 2, "exp_avg")
DATA = bytes(range(200))
SHARE = KeptShare(
    "abc", 0, 1, "one", 40, 5.5, 7, "run", (KeptSlot(SLOT, 8, 100, crc32(DATA[8:108])),)
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MemoryFolder]:
    """One that lies elsewhere than in memory."""
    monkeypatch.setattr(memory_folder, "PLACE", tmp_path / "shm")
    (tmp_path / "shm").mkdir()
    made = MemoryFolder(tmp_path / "run")
    made.make()
    yield made


def write(folder: MemoryFolder, share: KeptShare = SHARE) -> torch.Tensor:
    """A step of one rank, which counts."""
    memory = folder.bytes_of(share.life, share.turn, share.rank, len(DATA))
    memory.copy_(torch.frombuffer(bytearray(DATA), dtype=torch.uint8))
    folder.write_aside(share, "the run")
    assert share not in folder.shares([share.life]), "it does not count yet"
    folder.count(share, "the run")
    return memory


def test_a_folder_is_the_same_by_every_way_to_it(folder: MemoryFolder, tmp_path: Path) -> None:
    (tmp_path / "by link").symlink_to(tmp_path / "run")
    for way in (tmp_path / "by link", tmp_path / "other" / ".." / "run"):
        assert MemoryFolder(way).path == folder.path
    assert MemoryFolder(tmp_path / "run2").path != folder.path


def test_a_step_is_read_as_it_was_written(folder: MemoryFolder) -> None:
    write(folder)
    (found,) = folder.shares(["abc"])
    assert found == SHARE and folder.run_of(found) == "the run"
    memory = folder.bytes_of("abc", 0, 1)
    assert bytes(memory.numpy()) == DATA and damaged(found, memory) == []
    memory[20] += 1
    assert damaged(found, memory) == [*SHARE.slots]
    assert bytes(folder.bytes_of("abc", 0, 1).numpy()) == DATA, "what is read is not written"
    assert damaged(found, memory[:50]) == [*SHARE.slots], "too short"


def test_what_is_forgotten_is_no_step(folder: MemoryFolder) -> None:
    write(folder)
    folder.forget("abc", 0, 1)
    assert folder.shares(["abc"]) == [] and folder.run_of(SHARE) is None


@pytest.mark.parametrize("at", [0, 5, 9, 12, -1])
@pytest.mark.parametrize("name", ["abc.0.1.json", "abc.0.run.json"])
def test_a_changed_byte_of_what_says_it(folder: MemoryFolder, name: str, at: int) -> None:
    write(folder)
    data = bytearray((folder.path / name).read_bytes())
    data[at] ^= 1
    (folder.path / name).write_bytes(data)
    assert folder.shares(["abc"]) == [] or folder.run_of(SHARE) is None


def test_lives(folder: MemoryFolder) -> None:
    write(folder)
    assert folder.lives() == (["abc"], [])
    lock = LifeLock(folder, "abc", 1)
    lock.steps(44)
    assert folder.lives() == ([], ["abc"]) and folder.steps_seen("abc") == 44
    folder.forget_dead()
    assert folder.shares(["abc"]) == [SHARE], "of one that lives nothing goes"
    lock.release()
    lock.release()
    assert folder.lives() == (["abc"], []) and folder.steps_seen("abc") == 44
    write(folder, replace(SHARE, turn=1, steps=45))
    folder.forget_dead(SHARE)
    assert folder.shares(["abc"]) == [SHARE], "the other step goes"
    folder.forget_dead()
    assert [*folder.path.iterdir()] == []


_HOLD = """
import os, sys, time
from pathlib import Path
from megatron_ucp.engines import memory as memory_folder
memory_folder.PLACE = Path(sys.argv[1])
folder = memory_folder.MemoryFolder(Path(sys.argv[2]))
lock = memory_folder.LifeLock(folder, "abc", 0)
if not os.fork():
    print(os.getpid(), flush=True)
    time.sleep(60)
os._exit(9)
"""


def test_a_child_that_outlives_its_rank_keeps_nothing_alive(
    folder: MemoryFolder, tmp_path: Path
) -> None:
    """Workers of a data loader hold the locks of the process that made them."""
    write(folder)
    command = [sys.executable, "-c", _HOLD, str(tmp_path / "shm"), str(tmp_path / "run")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as rank:
        assert rank.stdout is not None
        child = int(rank.stdout.readline())
        try:
            assert rank.wait(30) == 9
            assert folder.lives() == (["abc"], [])
        finally:
            os.kill(child, 9)


def test_another_users_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_folder, "PLACE", tmp_path)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / f"megatron_ucp-{os.getuid()}").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SaveError, match="is another user's"):
        MemoryFolder(tmp_path / "run").make()


def test_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs and machines have folders of their own, whatever they are called."""
    first = MemoryFolder(tmp_path / "a" / "run").path
    assert first != MemoryFolder(tmp_path / "b" / "run").path
    assert first == MemoryFolder(tmp_path / "a" / "x" / ".." / "run").path
    monkeypatch.setenv(memory_folder.NODE, "../../etc")
    assert MemoryFolder(tmp_path / "a" / "run").path.parent == first.parent


def test_no_room(folder: MemoryFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match=r"abc\.0\.1\.bytes"):
        folder.bytes_of("abc", 0, 1, 10)
