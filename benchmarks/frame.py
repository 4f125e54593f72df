"""The frame of all benchmarks: ways in turns, processes, memory, bytes, claims, the command line.

    python -m benchmarks.load --tiny       # a small model, to see that it runs; nothing is written
    python -m benchmarks.load --json       # prints what would be in benchmarks/results/load.json

A way is a call that is measured. Ways follow each other in turns, the first round isn't counted,
and ratios are of medians of one run. On several ranks the slowest one counts. A claim is such a
ratio with its limit; the pages are made from claims.
"""

import argparse
import ctypes
import functools
import gc
import importlib.metadata
import json
import os
import platform
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
Seconds = dict[str, list[float]]

# ---- the command line


def main(
    name: str,
    sizes: Sequence[str] = (),
    repetitions: int = 5,
    by_size: bool = False,
    keeps: bool = False,
    more: Callable[[argparse.ArgumentParser], Any] = lambda parser: None,
) -> int:
    """Runs the function `measure` of a module, and writes what it returns to the results file of
    that name. It gets the options, of which `folder` is a new folder that is removed afterwards;
    with `by_size` it runs for each size of a model and gets the size first. `keeps`: parts of the
    results that weren't measured now stay. Returns 1 where a claim is missed."""
    module = import_module(f"benchmarks.{name}")  # its classes are pickled as those of this name
    parser = argparse.ArgumentParser(
        description=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tiny", action="store_true", help="small; nothing is written")
    parser.add_argument("--json", action="store_true", help="print all that is found")
    parser.add_argument("--repetitions", type=int, default=repetitions)
    parser.add_argument("--folder", help="where files go for a while; default: the temporary one")
    if sizes:
        parser.add_argument("--sizes", nargs="+", help="of models; or tiny")
    more(parser)
    options = parser.parse_args(namespace=argparse.Namespace(sizes=[*sizes]))
    options.tiny |= "tiny" in options.sizes
    options.sizes = ["tiny"] if options.tiny else options.sizes
    tree: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix=f"{name}_", dir=options.folder) as folder:
        options.folder = Path(folder).resolve()
        if not by_size:
            tree = module.measure(options)
        for size in options.sizes if by_size else ():
            head = {"machine": description(), "repetitions": options.repetitions}
            tree[size] = {**head, **module.measure(size, options)}
            empty(options.folder)
    if not by_size and not keeps:
        tree.setdefault("machine", description())
    said = [] if options.json else [*lines_of(tree)]
    print("\n".join(said) or json.dumps(tree, indent=1))
    if options.tiny:
        return 0
    file = RESULTS / f"{name}.json"
    keeps |= by_size
    known = json.loads(file.read_text()) if keeps and file.exists() else {}
    file.write_text(json.dumps({**known, **tree}, indent=1) + "\n")
    return int(any(one.get("met") is False for _, one in nodes_of(tree) if isinstance(one, dict)))


def description() -> dict[str, Any]:
    """Cores, memory, kernel, versions; load averages of the last minutes, as others may have worked
    then."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "cores": os.cpu_count(),
        "processor": model[0] if model else platform.processor(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_average": os.getloadavg(),
        **{name: importlib.metadata.version(name) for name in ("torch", "deepspeed", "isal")},
    }


def nodes_of(tree: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Everything in a tree, with the keys that lead there."""
    yield path, tree
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from nodes_of(value, (*path, str(key)))
    elif isinstance(tree, list):
        for value in tree:
            yield from nodes_of(value, path) if isinstance(value, dict) else ()


def lines_of(tree: dict[str, Any]) -> Iterator[str]:
    """For people: each claim in a line."""
    for path, one in nodes_of(tree):
        if isinstance(one, dict) and "what" in one and "ratio" in one:
            aim = "" if one["limit"] is None else f"   {one['kind']} {one['limit']:g}"
            missed = "   MISSED" if one["met"] is False else ""
            yield f"{', '.join(path)}: {one['what']}: {one['ratio']:.4g}{aim}{missed}"


# ---- claims


def claim(what: str, ratio: float, limit: float | None, kind: str = "at most") -> dict[str, Any]:
    """A ratio with its limit; nothing is claimed without one."""
    is_met = ratio <= (limit or 0) if kind == "at most" else ratio >= (limit or 0)
    met = None if limit is None else is_met
    return {"what": what, "ratio": ratio, "limit": limit, "kind": kind, "met": met}


# what, numerator, denominator, limit, and "at least" where it isn't "at most"
Claim = tuple[Any, ...]


def claims_of(seconds: Mapping[str, Sequence[float]], rows: Iterable[Claim]) -> list[Any]:
    """Ratios of medians."""
    middle = medians(seconds)
    return [claim(what, middle[top] / middle[low], *aim) for what, top, low, *aim in rows]


def medians(seconds: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {way: statistics.median(each) for way, each in seconds.items()}


def slowest(by_rank: Sequence[Mapping[str, Sequence[float]]]) -> Seconds:
    """Of each way and repetition the seconds of the rank that took longest."""
    return {
        way: [max(each) for each in zip(*(rank[way] for rank in by_rank), strict=True)]
        for way in by_rank[0]
    }


# ---- clocks


def ranks_of() -> Any:
    """torch's module of communication where this process is a rank, or None."""
    module: Any = sys.modules.get("torch.distributed")
    return module if module is not None and module.is_initialized() else None


def barrier() -> None:
    if ranks := ranks_of():
        ranks.barrier()


def is_first() -> bool:
    """Whether this is rank 0, or the only process."""
    ranks = ranks_of()
    return ranks is None or ranks.get_rank() == 0


def timed(work: Callable[[], Any]) -> float:
    """Seconds until all ranks are through."""
    barrier()
    started = time.perf_counter()
    work()
    barrier()
    return time.perf_counter() - started


def in_turns(
    ways: Mapping[str, Callable[[], Any]],
    repetitions: int,
    before: Callable[[], Any] = lambda: None,
    after: Callable[[], Any] = lambda: None,
    rotates: bool = True,
    keeps_first: bool = False,
) -> Seconds:
    """Seconds of every way until all ranks are through, by repetition.

    A way that returns a dict measures itself: the dict has seconds by name. `before` runs before
    each way and `after` at the end of each round. `rotates`: each round begins with the next way.
    The first round isn't counted, but with `keeps_first`.
    """
    seconds: Seconds = {}
    names = [*ways]
    for number in range(repetitions + 1):
        turn = number % len(names) if rotates and names else 0
        for name in names[turn:] + names[:turn]:
            before()
            barrier()
            started = time.perf_counter()
            own = ways[name]()
            barrier()
            taken = own if isinstance(own, dict) else {name: time.perf_counter() - started}
            if not number and not keeps_first:
                continue
            for what, value in taken.items():
                seconds.setdefault(what, []).append(value)
        after()
    return seconds


def count_seconds(found: list[float], owner: Any, name: str, sign: int = 1) -> None:
    """From now on the seconds in a function are added, or taken away."""
    stock = getattr(owner, name)

    @functools.wraps(stock)
    def timed(*args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        try:
            return stock(*args, **kwargs)
        finally:
            found[0] += sign * (time.perf_counter() - started)

    setattr(owner, name, timed)


def best(repetitions: int, work: Callable[[], Any]) -> float:
    """Seconds of the fastest of several calls."""
    return min(timed(work) for _ in range(repetitions))


# ---- what others are compared with


def copying(size_bytes: int, copy: Callable[..., Any] | None = None) -> Callable[[], Any]:
    """What copies so many bytes, from memory that was used before into such."""
    import torch

    source = torch.ones(size_bytes, dtype=torch.uint8)
    target = torch.zeros(size_bytes, dtype=torch.uint8)
    return lambda: (copy or torch.Tensor.copy_)(target, source)


def copy_and_sync(source: Path, target: Path) -> None:
    """`cp -r` and `sync`, by rank 0; the others wait."""
    if is_first():
        target.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(["sh", "-c", f"cp -r {source} {target} && sync"], check=True)
    barrier()


def read_once(paths: Iterable[Path], size_bytes: int) -> None:
    """Reads so many bytes of some files, one after the other, into fresh memory."""
    import torch

    view, at = torch.empty(size_bytes, dtype=torch.uint8).numpy().data, 0
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while at < size_bytes and (count := file.readinto(view[at : at + 2**28])):
                at += count
    if at < size_bytes:
        raise RuntimeError(f"the files hold {at} bytes, {size_bytes} are needed")


def forget(*folders: Path) -> None:
    """The page cache has nothing of these folders' files afterwards."""
    os.sync()
    for path in files_of(*folders):
        handle = os.open(path, os.O_RDONLY)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def empty(folder: Path) -> None:
    """Removes all that lies in a folder."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(exist_ok=True)


def files_of(*folders: Path) -> list[Path]:
    return [path for one in folders for path in sorted(one.rglob("*")) if path.is_file()]


def bytes_of(*folders: Path) -> int:
    return sum(path.stat().st_size for path in files_of(*folders))


def remove(folder: Path | str) -> None:
    """Rank 0 removes a folder; the others wait."""
    barrier()
    if is_first():
        shutil.rmtree(folder, ignore_errors=True)
    barrier()


# ---- memory, from outside

# another process: looks at a process until its input ends, and prints the peak of some kinds of its
# memory, together
_WATCH = """
import select, sys
peak, is_new, file, kinds = 0, True, f"/proc/{sys.argv[1]}/status", tuple(sys.argv[2:])
while not select.select([sys.stdin], [], [], 0.002)[0]:
    with open(file) as status:
        lines = [line for line in status if line.startswith(kinds)]
    peak = max(peak, sum(int(line.split()[1]) * 1024 for line in lines))
    if is_new:
        is_new = False
        print("begun", flush=True)
print(peak)
"""


@contextmanager
def peak(found: list[int], *kinds: str) -> Iterator[None]:
    """Adds by how many bytes these kinds of this process's memory grew inside, as another one sees
    it."""
    command = [sys.executable, "-c", _WATCH, str(os.getpid()), *kinds]
    watch = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert watch.stdout is not None
    watch.stdout.readline()
    before = memory_bytes(*kinds)
    yield
    most, _ = watch.communicate("")
    found.append(int(most) - before)


def memory_bytes(*kinds: str, pid: int | str = "self") -> int:
    """What a process has of these kinds of memory, such as RssAnon; 0 once it has gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(kinds))


def give_back() -> None:
    """Free memory goes back to the system."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)


def disk_bytes(folder: Path) -> int:
    """What lies in a folder, in whole blocks; files may go meanwhile."""
    command = ["du", "--block-size=1", "--summarize", str(folder)]
    return int(subprocess.run(command, capture_output=True, text=True).stdout.split()[0])


# ---- bytes that are read, by strace

TRACED = "trace=read,readv,pread64,preadv,preadv2,mmap,sendfile,copy_file_range"
CALL = re.compile(r"^\d+ +(?P<call>\w+)\((?P<rest>.*)\) += (?P<result>-?\d+|0x[0-9a-f]+)")


@contextmanager
def traced(found: list[int | None], folder: Path | str) -> Iterator[None]:
    """Adds how many bytes of a folder's files this process reads inside; None without strace."""
    if shutil.which("strace") is None:
        yield
        found.append(None)
        return
    with tempfile.NamedTemporaryFile("r", errors="replace") as log:
        command = ["strace", "-f", "-y", "-e", TRACED, "-o", log.name, "-p", str(os.getpid())]
        watcher = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert watcher.stderr is not None
        is_attached = "attached" in watcher.stderr.readline()
        try:
            yield
        finally:
            watcher.send_signal(signal.SIGINT)
            watcher.communicate()
        found.append(read_bytes(log.read(), str(folder)) if is_attached else None)


def read_bytes(log: str, folder: str) -> int:
    """Sums what the calls of an strace log (-f -y) returned for files of `folder`; a mapping counts
    with its length."""
    # a call that another thread interrupted stands on two lines
    halves: dict[str, str] = {}
    total = 0
    for line in log.splitlines():
        pid = line.split(" ", 1)[0]
        if line.endswith("<unfinished ...>"):
            halves[pid] = line.removesuffix("<unfinished ...>")
            continue
        if " resumed>" in line:
            line = halves.pop(pid, "") + line.partition(" resumed>")[2]
        found = CALL.match(line)
        if found is None or f"<{folder}/" not in found["rest"]:
            continue
        is_mapping = found["call"] == "mmap"
        size = found["rest"].split(", ")[1] if is_mapping else found["result"]
        total += max(0, int(size, 0))
    return total


# ---- processes


def of_pairs(
    options: argparse.Namespace,
    ranks: int,
    pairs: Iterable[str],
    job: Callable[..., Any],
    result: Callable[[list[Any]], Any],
) -> dict[str, Any]:
    """Of each size and pair what all ranks say together, when each has done the job."""
    found: dict[str, Any] = {}
    for size in options.sizes:
        for name in pairs:
            by_rank = on_ranks(ranks, job, name, size, options.repetitions)
            found[f"{name}, {size}"] = result(by_rank)
    return {"repetitions": options.repetitions, "found": found}


def on_ranks(world: int, job: Callable[..., Any], *args: Any, timeout_s: float = 3000) -> list[Any]:
    """What a job returns on each of so many new ranks, which communicate over gloo and hold no
    memory of what ran before."""
    from tests.ranks import RankPool

    pool = RankPool(world, gloo=True)
    try:
        return pool.run(world, job, *args, timeout_s=timeout_s)
    finally:
        pool.close()


@dataclass(frozen=True)
class Alone:
    """What a call took in processes of its own: seconds of the slowest one, processor seconds of
    all, the most RssAnon of one, the most bytes on disk meanwhile, bytes read, and the dict that it
    returned."""

    seconds: float
    cpu_seconds: float
    anon_bytes: int
    disk_bytes: int
    read_bytes: int
    value: dict[str, Any]


def alone(
    job: Callable[..., Callable[[], Any]],
    *args: Any,
    ranks: int = 0,
    disk: Path | None = None,
    reads: Path | None = None,
    code: Path = ROOT,
) -> Alone:
    """Measures the call that a job returns, in a new process or on several ranks; what the job
    imports and builds before isn't counted. `args` get there as text. `disk` is a folder whose
    bytes are watched, `reads` one of whose files the bytes that are read are counted, `code` where
    the package lies. Raises SystemExit where a process fails."""
    from tests.ranks import free_port, name_of

    command = [sys.executable, "-m", "benchmarks.frame", name_of(job), str(reads or "")]
    own = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT")
    base = {key: value for key, value in os.environ.items() if key not in own}
    base |= {"PYTHONPATH": f"{code}:{ROOT}", "MASTER_ADDR": "127.0.0.1"}
    port, processes, found = str(free_port()), list[Any](), list[dict[str, Any]]()
    with tempfile.TemporaryFile("w+") as log:
        for rank in range(max(1, ranks)):
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
            process = subprocess.Popen(
                [*command, *map(str, args)],
                env=base | ({**place, "MASTER_PORT": port} if ranks else {}),
                cwd=tempfile.gettempdir(),  # the working folder's package would come first
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
            processes.append(process)
        anon, most = watched(processes, disk)
        for process in processes:
            last = process.communicate()[0].strip().rpartition("\n")[2]
            if process.returncode:
                log.seek(0)
                raise SystemExit(f"{command} failed: {log.read()[-2000:]}")
            found.append(json.loads(last))
    return Alone(
        max(one["seconds"] for one in found),
        sum(one["cpu_seconds"] for one in found),
        anon,
        most,
        sum(one["read_bytes"] for one in found),
        found[0]["value"],
    )


def watched(
    processes: Sequence["subprocess.Popen[str]"], disk: Path | None = None
) -> tuple[int, int]:
    """The most RssAnon of any of these processes until all have ended, every 10 ms, and the most
    bytes in a folder, every 250 ms."""
    anon = most = 0
    done = threading.Event()

    def watch_disk() -> None:
        nonlocal most
        while disk is not None and not done.wait(0.25):
            most = max(most, disk_bytes(disk))

    watcher = threading.Thread(target=watch_disk)
    watcher.start()
    while any(process.poll() is None for process in processes):
        anon = max(anon, *(memory_bytes("RssAnon", pid=process.pid) for process in processes))
        time.sleep(0.01)
    done.set()
    watcher.join()
    return anon, most


@dataclass
class Apart:
    """Calls in processes of their own; of each name the most RssAnon of one is kept."""

    anon_bytes: dict[str, int] = field(default_factory=dict)

    def call(self, name: str, job: Callable[..., Any], *args: Any, **options: Any) -> Alone:
        taken = alone(job, *args, **options)
        self.anon_bytes[name] = max(self.anon_bytes.get(name, 0), taken.anon_bytes)
        return taken

    def claim(self, prefix: str, names: tuple[str, ...], limit_mib: float) -> dict[str, Any]:
        """How much more than an interpreter that does nothing the calls take whose names begin so,
        at most."""
        command = [sys.executable, "-c", "import time; time.sleep(0.3)"]
        bare = self.anon_bytes["bare"] = watched([subprocess.Popen(command, text=True)])[0]
        most = max(size for name, size in self.anon_bytes.items() if name.startswith(names))
        what = f"{prefix}peak RssAnon over a bare interpreter / MiB"
        return claim(what, (most - bare) / 2**20, limit_mib)


def child(job: str, reads: str, *args: str) -> None:
    """One process of `alone`; prints what it took."""
    module, _, name = job.partition(":")
    call = getattr(import_module(module), name)(*args)
    read: list[int | None] = []
    barrier()
    with traced(read, reads) if reads else nullcontext():
        started, worked = time.perf_counter(), time.process_time()
        value = call()
        worked = time.process_time() - worked
        barrier()
        seconds = time.perf_counter() - started
    found = {
        "seconds": seconds,
        "cpu_seconds": worked,
        "read_bytes": sum(map(int, filter(None, read))),
    }
    print(json.dumps({**found, "value": value if isinstance(value, dict) else {}}), flush=True)
    barrier()
    if ranks_of():
        os._exit(0)  # what is left to torch isn't measured


if __name__ == "__main__":
    child(*sys.argv[1:])
