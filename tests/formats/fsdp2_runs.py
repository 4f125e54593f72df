"""Starts `fsdp2_program` on several ranks, each a process of its own."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

PROGRAM = Path(__file__).with_name("fsdp2_program.py")
TIMEOUT_S = 180


def run(
    world: int,
    kind: str,
    folder: str | Path,
    *options: str,
    program: Path = PROGRAM,
    **environment: str,
) -> Any:
    """What rank 0 reports. Raises AssertionError with what a rank said that failed."""
    path = os.environ.get("PYTHONPATH", "") if program != PROGRAM else ""
    environment = {"PYTHONPATH": path, **environment}
    with tempfile.TemporaryDirectory() as place:
        report = f"{place}/report.pt"
        ranks = [
            _start(rank, world, program, [kind, str(folder)], place, report, options, environment)
            for rank in range(world)
        ]
        try:
            said = [one.communicate(timeout=TIMEOUT_S)[0] for one in ranks]
        finally:
            for one in ranks:
                if one.poll() is None:
                    one.terminate()
        failed = [text[-3000:] for one, text in zip(ranks, said, strict=True) if one.returncode]
        assert not failed, "\n".join(failed)
        return torch.load(report, weights_only=False)


def _start(
    rank: int,
    world: int,
    program: Path,
    what: list[str],
    place: str,
    report: str,
    options: tuple[str, ...],
    environment: dict[str, str],
) -> subprocess.Popen[str]:
    own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    own |= {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1", **environment}
    command = [sys.executable, str(program), *what, str(rank), str(world)]
    command += ["--store", f"{place}/store", "--report", report, *options]
    return subprocess.Popen(
        command,
        env={**os.environ, **own},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
