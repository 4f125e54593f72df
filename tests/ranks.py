"""A pool of warm processes in which the tests run one job after another, each on its own world
size.

    pool = RankPool(size=4)                                    # starts nothing yet
    losses = pool.run(2, jobs.train, steps=3)                  # [of rank 0, of rank 1]
    pool.close()

Starting Python and importing DeepSpeed takes seconds per rank; rebuilding the process groups takes
milliseconds. So the workers start once, as forks of one process that has imported it
(`ForkServer`). For each job the first `world` of them bring up DeepSpeed's
communication (gloo on loopback, a fresh store), call the job, a function of a module, and take
everything down again, so that worlds of 4, 2, 1 and 4 ranks follow each other in the same processes
(see `rank_worker` and `rank_reset`). The job itself is sent by name: the ranks import its module.
Arguments and results are pickled. A job starts with the same random seeds, environment and working
directory, whatever ran before it.

When a rank raises, dies or hangs, `RanksFailed` says what every rank did, and the workers are
replaced.
"""

import contextlib
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
START_TIMEOUT_S = 180.0  # four imports of DeepSpeed on a machine that does other work too
PEERS_REPORT_S = 8.0  # after the first error the others' collectives break: their tracebacks follow
STOP_S = 3.0
LOG_TAIL_CHARS = 3000
TOLD_OF_ANOTHER = "RankError: another rank failed"
BUFFERS = Path("/dev/shm")
Job = Callable[..., Any]  # a function at the top level of a module


class RanksFailed(AssertionError):
    """A job did not return on every rank. `by_rank` holds what each failed rank said, the first to
    fail first: the others mostly tell of connections that it closed. Those that only heard of
    another one's error come last."""

    def __init__(self, job: str, by_rank: dict[int, str]) -> None:
        in_order = sorted(by_rank, key=lambda rank: TOLD_OF_ANOTHER in by_rank[rank])
        self.by_rank = {rank: by_rank[rank] for rank in in_order}
        lines = [f"{job} failed on rank(s) {sorted(by_rank)}"]
        lines += [f"---- rank {rank}: {text.rstrip()}" for rank, text in self.by_rank.items()]
        super().__init__("\n".join(lines))


@dataclass(frozen=True)
class Worker:
    """One process of the pool with our end of its pipe and the files that it writes."""

    pid: int
    pipe: Connection
    log: Path
    stacks: Path

    def log_tail(self) -> str:
        text = self.log.read_text(errors="replace")[-LOG_TAIL_CHARS:]
        return f"\n(end of its output)\n{text}" if text.strip() else ""


class RankPool:
    """Up to `size` ranks. `jobs` lists (its name, world, seconds) of all that ran. Not for use from
    several threads. They communicate over gloo, or as `tests/mailboxes.py` does it."""

    def __init__(self, size: int = 4, gloo: bool = os.environ.get("TESTS_COMM") == "gloo") -> None:
        self.size = size
        self.gloo = gloo
        self.jobs: list[tuple[str, int, float]] = []
        self._workers: list[Worker] = []
        self._finalizer: weakref.finalize[Any, Any] | None = None

    def run(
        self, world: int, job: Job, /, *args: Any, timeout_s: float = 120.0, **kwargs: Any
    ) -> list[Any]:
        """Call `job` on `world` ranks; its results by rank.

        Raises `RanksFailed` when a rank raises or dies, or when not all have returned after
        `timeout_s` seconds.
        """
        __tracebackhide__ = True  # a failure is told by the ranks; reports cut what is long
        if not 1 <= world <= self.size:
            raise ValueError(f"this pool has {self.size} ranks, the job wants {world}")
        function = name_of(job)
        if not self._workers:
            self._start()
        workers, started, port = self._workers[:world], time.monotonic(), free_port()
        store = workers[0].log.with_name(f"store_{len(self.jobs)}")
        call = {
            "function": function,
            "args": args,
            "kwargs": kwargs,
            "world": world,
            "port": port,
            "store": str(store),
            "timeout_s": timeout_s,
            "gloo": self.gloo,
        }
        try:
            for rank, worker in enumerate(workers):
                os.truncate(worker.log, 0)
                with contextlib.suppress(
                    BrokenPipeError
                ):  # it died while idle: found below, when its pipe ends
                    # not Connection.send: with torch imported, that one puts tensors into /dev/shm
                    worker.pipe.send_bytes(pickle.dumps(call | {"rank": rank}))
            results, failures = collect(workers, started + timeout_s)
        except (
            BaseException
        ):  # KeyboardInterrupt: the ranks have their own sessions and did not get it
            self.close()
            raise
        finally:
            remove_buffers(port)
            store.unlink(missing_ok=True)
        self.jobs.append((function, world, time.monotonic() - started))
        if failures:
            self.close()
            raise RanksFailed(f"{function} on {world} rank(s)", failures)
        return [results[rank] for rank in range(world)]

    def close(self) -> None:
        """Stop all workers and remove their files. The next `run` starts new ones."""
        self._workers = []
        if self._finalizer:
            self._finalizer()

    def pids(self) -> list[int]:
        return [worker.pid for worker in self._workers]

    def _start(self) -> None:
        folder = Path(tempfile.mkdtemp(prefix="ranks_"))
        # every worker watches the read end; nobody writes: it ends when this process does, however
        # it ends
        life_r, life_w = os.pipe()
        self._finalizer = weakref.finalize(self, stop_workers, self._workers, life_w, folder)
        try:
            for index in range(self.size):
                self._workers.append(start_worker(index, life_r, folder))
        finally:
            os.close(life_r)
        _, failures = collect(self._workers, time.monotonic() + START_TIMEOUT_S)
        if failures:
            self.close()
            raise RanksFailed("the start of the workers", failures)


def name_of(job: Job) -> str:
    """ "module:name", by which the ranks find a job: sent as the function itself, it would take a
    script's `__main__` with it."""
    if not isinstance(job, types.FunctionType) or job.__qualname__ != job.__name__:
        raise TypeError(f"a job is a function at the top level of a module, not {job!r}")
    module = job.__module__
    if module == "__main__":  # python -m tests.…
        file = Path(str(sys.modules[module].__file__)).resolve()
        module = ".".join(file.relative_to(ROOT).with_suffix("").parts)
    return f"{module}:{job.__name__}"


def collect(workers: list[Worker], deadline: float) -> tuple[dict[int, Any], dict[int, str]]:
    """One message from every worker: (results by rank, failures by rank)."""
    pending = {worker.pipe: rank for rank, worker in enumerate(workers)}
    results: dict[int, Any] = {}
    failures: dict[int, tuple[float, str]] = {}
    stacks: dict[int, str] = {}
    while pending:
        ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            stacks = stacks_of({rank: workers[rank] for rank in pending.values()})
            break
        for pipe in ready:
            rank = pending.pop(pipe)  # type: ignore[arg-type]
            succeeded, value = receive(workers[rank])
            if succeeded:
                results[rank] = value
            else:
                failures[rank] = value
                deadline = min(deadline, time.monotonic() + PEERS_REPORT_S)
    in_order = sorted(failures, key=lambda rank: failures[rank][0])
    return results, {rank: failures[rank][1] for rank in in_order} | stacks


class ForkServer:
    """The process that all workers of this one are forks of; it has imported what jobs need. It
    ends with this process, however that ends."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(START_TIMEOUT_S)
        self._log = os.memfd_create("ranks_server")
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.rank_worker", "--socket", str(theirs.fileno())],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is ours to handle
            )

    def ask(self, request: tuple[Any, ...], handles: Sequence[int] = ()) -> int:
        """Its answer to a request: the pid of a new worker ("start", stacks), or the status with
        which one ended, ("status", pid), and ("reap", pid) for the last time; 0 when it has
        imported one more module for the workers to come, ("import", name)."""
        try:
            socket.send_fds(self._socket, [pickle.dumps(request)], handles)
            answer = self._socket.recv(64)
        except OSError as error:
            raise RanksFailed(f"{request[0]} of a worker", {0: f"{error}{self._said()}"}) from error
        if not answer:
            raise RanksFailed(f"{request[0]} of a worker", {0: f"its server ended{self._said()}"})
        return int(answer)

    def _said(self) -> str:
        size = os.fstat(self._log).st_size
        tail = os.pread(self._log, LOG_TAIL_CHARS, max(0, size - LOG_TAIL_CHARS))
        return f"\n{tail.decode(errors='replace')}"

    def is_alive(self) -> bool:
        return self._process.poll() is None


_servers: list[ForkServer] = []


def fork_server() -> ForkServer:
    """The one of this process."""
    if not _servers or not _servers[-1].is_alive():
        _servers.append(ForkServer())
    return _servers[-1]


def start_worker(index: int, life: int, folder: Path) -> Worker:
    ours, theirs = Pipe()
    log, stacks = folder / f"worker{index}.log", folder / f"worker{index}.stacks"
    with theirs, log.open("ab") as output:
        handles = [theirs.fileno(), life, output.fileno()]
        pid = fork_server().ask(("start", str(stacks)), handles)
    return Worker(pid, ours, log, stacks)


def stop_workers(workers: list[Worker], life: int, folder: Path) -> None:
    """Let the workers return, then terminate, then kill them, with all that they started; reap
    them."""
    for worker in workers:
        worker.pipe.close()
    # never reaped before the group is killed: until then the pid can't belong to anybody else
    for signal_number in (None, signal.SIGTERM, signal.SIGKILL):
        left = [worker for worker in workers if not has_exited(worker.pid)]
        for worker in left if signal_number else []:
            os.kill(worker.pid, signal_number)  # type: ignore[arg-type]
        deadline = time.monotonic() + STOP_S
        while time.monotonic() < deadline and not all(has_exited(worker.pid) for worker in left):
            time.sleep(0.01)
    for worker in workers:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(worker.pid, signal.SIGKILL)
        with contextlib.suppress(RanksFailed):  # the server has ended: nobody has to reap
            fork_server().ask(("reap", worker.pid))
    os.close(life)
    shutil.rmtree(folder, ignore_errors=True)


def has_exited(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state in "ZX"


def receive(worker: Worker) -> tuple[bool, Any]:
    """Whether it succeeded, and its result, or when it failed and what it said."""
    try:
        return pickle.loads(worker.pipe.recv_bytes())
    except (EOFError, ConnectionError):
        status = fork_server().ask(("status", worker.pid))
        # nothing that a peer says came before: it lost this one
        return False, (0.0, f"the process ended with status {status}{worker.log_tail()}")


def stacks_of(workers: dict[int, Worker]) -> dict[int, str]:
    """What the workers are doing: the Python stacks of all their threads, by rank."""
    for worker in workers.values():
        os.kill(worker.pid, signal.SIGUSR1)
    time.sleep(0.5)  # written by a signal handler, also while the rank waits in C++
    return {
        rank: "did not return in time; its threads were "
        f"at\n{worker.stacks.read_text()}{worker.log_tail()}"
        for rank, worker in workers.items()
    }


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def remove_buffers(port: int) -> None:
    """Remove DeepSpeed's shared-memory buffers (66 MiB each) of one job: a rank that is killed
    leaves its own."""
    for path in BUFFERS.glob(f"deepspeed_allreduce_buffer_*_{port}_*"):
        path.unlink(missing_ok=True)


def allow_fp16_on_cpu() -> None:
    """As `fp16_on_cpu`, until the end of the job: DeepSpeed asks again while it trains without
    ZeRO."""
    from deepspeed.accelerator import get_accelerator

    kind: Any = type(get_accelerator())
    kind.is_fp16_supported = lambda self: True


@contextlib.contextmanager
def fp16_on_cpu() -> Iterator[None]:
    """For jobs: make DeepSpeed train in fp16 on a CPU without fp16 kernels. It works, but is
    refused by default."""
    from deepspeed.accelerator import get_accelerator

    kind: Any = type(get_accelerator())
    before = kind.is_fp16_supported
    kind.is_fp16_supported = lambda self: True
    try:
        yield
    finally:
        kind.is_fp16_supported = before
