"""Memory of another process is read whole and in order, whatever one call of the system reads at
once; a process that is another one, or gone, is seen."""

import os
import random
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from megatron_ucp.reshard import process_memory
from megatron_ucp.reshard.messages import BrokenError
from megatron_ucp.reshard.process_memory import is_readable, lying_at, new_mark, read_runs

MARK = new_mark()


@pytest.mark.parametrize(("most_runs", "most_bytes"), [(1024, 2**30), (3, 10**6), (1024, 100)])
def test_runs_come_whole_and_in_order(
    most_runs: int, most_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_memory, "_MOST_RUNS", most_runs)
    monkeypatch.setattr(process_memory, "_MOST_BYTES", most_bytes)
    source = torch.frombuffer(bytearray(random.Random(1).randbytes(10_000)), dtype=torch.uint8)
    there = lying_at(MARK, [source])
    assert is_readable(there)
    plan = random.Random(2)
    for count in (0, 1, 2, 3, 4, 50):
        places = [
            (plan.randrange(9_000), plan.choice([0, 1, 99, 100, 101, 999])) for _ in [0] * count
        ]
        runs = np.array([(there.starts[0] + low, size) for low, size in places], np.uintp)
        want = torch.cat([source[:0], *(source[low : low + size] for low, size in places)])
        into = torch.zeros(len(want) + 1, dtype=torch.uint8)
        read_runs(there, runs.reshape(-1, 2), into)
        assert torch.equal(into[:-1], want) and into[-1] == 0


def test_a_process_that_is_another_one_is_seen() -> None:
    there = lying_at(MARK, [])
    assert is_readable(there)
    assert not is_readable(replace(there, mark=bytes(32)))
    assert not is_readable(replace(there, machine="another"))
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        assert not is_readable(replace(there, process=other.pid))
        other.communicate(b"\n")
    gone = replace(there, process=other.pid)
    assert not is_readable(gone)
    runs = np.array([(MARK.data_ptr(), 8)], np.uintp)
    into = torch.zeros(8, dtype=torch.uint8)
    with pytest.raises(BrokenError, match=f"process {other.pid} can't be read"):
        read_runs(gone, runs, into)
    read_runs(replace(there, process=os.getpid()), runs, into)
    assert torch.equal(into, MARK[:8])
