"""Runs scripts on ranks that are forks of a process which has imported what they need: a rank's
imports take ten seconds of processor time, the few steps that tests train take one.

The scripts themselves, with their flags, files and exit codes, are untouched. `tests/run.sh all`
starts them as a user does.
"""

import contextlib
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

sys.path.append(str(ROOT / "examples"))
from lib import launcher  # type: ignore[import-not-found]

AS_A_USER = os.environ.get("TESTS_COMM") == "gloo"
TIMEOUT_S = 300.0
Done = subprocess.CompletedProcess[str]


def run_command(
    command: Sequence[str | Path], timeout: float = 120, env: Any = None, **how: Any
) -> Done:
    """What a command printed, and its exit code. `env` is beside this process's own environment."""
    how |= {"timeout": timeout, "env": {**os.environ, **(env or {})}}
    return subprocess.run(command, capture_output=True, text=True, **how)


def run_example(name: str, *arguments: str, preload: Sequence[str] = ()) -> Done:
    """`python examples/NAME` with these arguments; its ranks also find `preload` imported."""
    if AS_A_USER:
        command = [sys.executable, str(ROOT / "examples" / name), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=600)
    for module in preload:
        fork_server().ask(("import", module))
    out, err = io.StringIO(), io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        same_signals(),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        patch.setattr(launcher, "run", start)
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


def start(ranks: int, script: list[str], log: Path) -> int:
    """The exit code of a script (or "-m" and a module) with its arguments on so many ranks; what
    they say goes to `log`. As the examples' `launcher.run`, in whose place it stands."""
    if AS_A_USER:
        return launcher.run(ranks, script, log)
    pool = RankPool(ranks)
    try:
        pool.run(ranks, rank, script, str(log.resolve()), timeout_s=TIMEOUT_S)
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
    module = script[0] == "-m"
    sys.argv = script[module:]
    sys.path.insert(0, str(ROOT if module else Path(script[0]).parent))
    # what the script left alive is taken down after it, and needs the groups for that
    with mock.patch.object(torch.distributed, "destroy_process_group"):
        try:
            if module:
                runpy.run_module(script[1], run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(script[0], run_name="__main__")
        except SystemExit as end:
            if end.code:
                raise
