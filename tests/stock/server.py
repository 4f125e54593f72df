"""Imports a program once and forks the ranks of each job from that: `python -m tests.stock.server
MODULE [FOLDER]`, where the module (`tests.stock.program`, say) has the `Job`, imports the program
of the folder, and runs a rank. Jobs come in as lines of JSON, and their ends go out as such."""

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


class Server:
    """The process that has imported a program (`module`, of the sources in `folder`), asked by the
    tests. `version` is what it imported."""

    def __init__(self, module: str, folder: str = "") -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.stock.server", module, folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        self.version = self._answer()["version"]

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise AssertionError(f"the server of programs ended: {self._process.wait()}")
        return json.loads(line)

    def ask(self, job: Any) -> dict[str, Any]:
        """The exit codes of the ranks of a job, and what those that failed wrote last."""
        assert self._process.stdin is not None
        print(json.dumps(asdict(job)), file=self._process.stdin, flush=True)
        return self._answer()

    def run(self, job: Any) -> dict[str, Any]:
        """A job that goes well: what rank 0 wrote, and the `file` of it."""
        import torch

        answer = self.ask(job)
        assert not any(answer["codes"]), answer["said"]
        return {**torch.load(job.out, weights_only=False), "file": job.out}

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


def flags_of(job: Any, base: str) -> list[str]:
    """Those of `base` but for the ones that a job leaves out, with their values; then the job's."""
    out: list[str] = []
    left_out = False
    for word in base.split():
        if word.startswith("--"):
            left_out = word in job.without
        if not left_out:
            out.append(word)
    return [*out, *job.flags.split()]


def main(module: str, folder: str) -> None:
    program = importlib.import_module(module)
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what the program prints is no answer
    answers.write(json.dumps({"version": program.imported(folder)}) + "\n")
    for line in sys.stdin:
        said = json.loads(line)
        lists = {key: tuple(value) for key, value in said.items() if isinstance(value, list)}
        job = program.Job(**{**said, **lists})
        answers.write(json.dumps(_done(program, job)) + "\n")


def _done(program: Any, job: Any) -> dict[str, Any]:
    """The exit codes of the ranks, and what those that failed wrote last."""
    with tempfile.TemporaryDirectory() as folder:
        pids = [_forked(program, job, rank, folder) for rank in range(job.world)]
        codes = _waited(pids, job.limit_s)
        for pid in pids:  # stock's save leaves writers behind
            _kill(pid)
        paths = [Path(folder, f"log{rank}") for rank in range(job.world)]
        logs = [path.read_text(errors="replace") if path.exists() else "" for path in paths]
    failed = [rank for rank, code in enumerate(codes) if code]
    return {"codes": codes, "said": "\n".join(f"rank {n}: {logs[n][-4000:]}" for n in failed)}


def _forked(program: Any, job: Any, rank: int, folder: str) -> int:
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setpgid(0, 0)
        log = os.open(f"{folder}/log{rank}", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        program.run(job, rank, f"{folder}/store")
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _waited(pids: list[int], limit_s: float) -> list[int]:
    """The exit codes. Where a rank failed the others get 15 s, which some need to say why."""
    codes: dict[int, int] = {}
    end = time.monotonic() + limit_s
    while len(codes) < len(pids):
        for pid in pids:
            if pid not in codes:
                found, status = os.waitpid(pid, os.WNOHANG)
                if found:
                    codes[pid] = os.waitstatus_to_exitcode(status)
                    if codes[pid]:
                        end = min(end, time.monotonic() + 15)
        if time.monotonic() > end:
            for pid in pids:
                if pid not in codes:
                    _kill(pid)
        time.sleep(0.02)
    return [codes[pid] for pid in pids]


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "")
