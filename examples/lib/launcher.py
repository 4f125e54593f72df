"""Starts a script on several ranks, and leaves no process behind, whatever happens."""

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil

STOP_S = 10.0
# looked up here: nothing but the call may happen between fork and exec
PRCTL = ctypes.CDLL(None).prctl
PR_SET_PDEATHSIG = 1


def run(ranks: int, script: list[str], log: Path) -> int:
    """The exit code of a script with its arguments on so many ranks; its output goes to `log`."""
    program = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(ranks)]
    port = ["--master_addr", "127.0.0.1", "--master_port", str(free_port())]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo"}
    # With it DeepSpeed makes 66 MiB of shared memory per rank, which a rank that is stopped would
    # leave.
    environment.pop("LOCAL_SIZE", None)
    with log.open("w") as output:
        # A session of its own: Ctrl-C comes to this process alone, which then stops the ranks in
        # order.
        process = subprocess.Popen(
            [*program, *port, *script],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=end_with_parent,
            env=environment,
        )
        try:
            return process.wait()
        finally:
            stop(process)


def end_with_parent() -> None:
    """In the launcher, before it starts: a SIGTERM when this process is killed, so that no rank
    goes on alone."""
    PRCTL(PR_SET_PDEATHSIG, signal.SIGTERM)


def stop(process: "subprocess.Popen[bytes]") -> None:
    """Ends the launcher and every rank under it; does nothing after a normal end."""
    if process.poll() is not None:
        return
    # Each rank has a session of its own, so that no signal to a group would reach all.
    with contextlib.suppress(psutil.NoSuchProcess):
        family = [
            *psutil.Process(process.pid).children(recursive=True),
            psutil.Process(process.pid),
        ]
        for member in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.terminate()
        left = psutil.wait_procs(family, timeout=STOP_S)[1]  # a rank finishes its iteration first
        for member in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
        psutil.wait_procs(left, timeout=STOP_S)
    process.wait()


def kill(process: "subprocess.Popen[bytes]") -> None:
    """SIGKILL to a launcher, then to its ranks. Does nothing where it has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        parent = psutil.Process(process.pid)
        family = [parent, *parent.children(recursive=True)]
        for member in family if process.poll() is None else []:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
    process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
