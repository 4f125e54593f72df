"""Imports Megatron-LM once and forks the ranks of each job from that: `python -m tests.stock.server
[FOLDER]`. Jobs come in as lines of JSON, and their ends go out as such."""

import contextlib
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

from tests.stock.program import Job, imported, run


def main(folder: str) -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what Megatron-LM prints is no answer
    answers.write(json.dumps({"version": imported(folder)}) + "\n")
    for line in sys.stdin:
        said = json.loads(line)
        job = Job(**{**said, "without": tuple(said["without"])})
        answers.write(json.dumps(_done(job)) + "\n")


def _done(job: Job) -> dict[str, Any]:
    """The exit codes of the ranks, and what those that failed wrote last."""
    with tempfile.TemporaryDirectory() as folder:
        pids = [_forked(job, rank, folder) for rank in range(job.world)]
        codes = _waited(pids, job.limit_s)
        for pid in pids:  # stock's save leaves writers behind
            _kill(pid)
        paths = [Path(folder, f"log{rank}") for rank in range(job.world)]
        logs = [path.read_text(errors="replace") if path.exists() else "" for path in paths]
    failed = [rank for rank, code in enumerate(codes) if code]
    return {"codes": codes, "said": "\n".join(f"rank {n}: {logs[n][-4000:]}" for n in failed)}


def _forked(job: Job, rank: int, folder: str) -> int:
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
        run(job, rank, f"{folder}/store")
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
    main(sys.argv[1] if len(sys.argv) > 1 else "")
