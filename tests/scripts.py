"""Runs an example as `python examples/NAME.py` does, with forks of a process that has imported what
it needs as its ranks: a rank's imports take ten seconds of processor time, the few steps that the
tests train take one. The example itself, with its files, flags, logs and exit code, is untouched.

That the examples' own launcher starts ranks is what tests show that use it.
"""

import contextlib
import importlib
import io
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.ranks import ROOT, RankPool, RanksFailed, fork_server

TIMEOUT_S = 300.0
Done = subprocess.CompletedProcess[str]


def run_example(name: str, *arguments: str, preload: Sequence[str] = ()) -> Done:
    """`examples/NAME` with these arguments; its ranks also find `preload` imported."""
    for module in preload:
        fork_server().ask(("import", module))
    out, err = io.StringIO(), io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        same_signals(),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        patch.syspath_prepend(str(ROOT / "examples"))
        patch.setattr(importlib.import_module("launcher"), "run", launch)
        patch.setattr(sys, "argv", [str(ROOT / "examples" / name), *arguments])
        try:
            runpy.run_path(sys.argv[0], run_name="__main__")
            code: Any = 0
        except SystemExit as end:
            code = end.code
    if isinstance(code, str):  # as the interpreter does
        err.write(f"{code}\n")
    return Done([name, *arguments], int(bool(code)), out.getvalue(), err.getvalue())


@contextlib.contextmanager
def same_signals() -> Iterator[None]:
    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def launch(ranks: int, script: list[str], log: Path) -> int:
    """In the place of the examples' `launcher.run`."""
    pool = RankPool(ranks)
    try:
        pool.run(ranks, "tests.scripts:rank", script, str(log.resolve()), timeout_s=TIMEOUT_S)
    except RanksFailed as failed:
        with log.open("a") as output:
            output.write(str(failed))
        return 1
    finally:
        pool.close()  # a process runs one script
    return 0


def rank(script: list[str], log: str) -> None:
    """What each rank does."""
    import torch

    with open(log, "a") as output:
        for stream in (1, 2):
            os.dup2(output.fileno(), stream)
    os.environ["LOCAL_WORLD_SIZE"] = os.environ["WORLD_SIZE"]
    sys.path.insert(0, str(Path(script[0]).parent))
    sys.argv = script
    # what the script left alive is taken down after it, and needs the groups for that
    with mock.patch.object(torch.distributed, "destroy_process_group"):
        try:
            runpy.run_path(script[0], run_name="__main__")
        except SystemExit as end:
            if end.code:
                raise
