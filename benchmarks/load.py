"""Loading against stock DeepSpeed's loading and conversion: seconds, bytes read, memory. 124 million parameters, dp=2.

    python -m benchmarks.load                       # about 5 minutes, 8 GiB of memory, 7 GB of disk
    python -m benchmarks.load --tiny --repetitions 2  # to see that it runs

Every ratio is of medians of one run in the same processes, the repetitions interleaved, the page cache warm. Bytes are
counted by strace and memory is read from /proc, both from outside of the ranks. Writes benchmarks/results/load.json.
"""

import argparse
import json
import re
import shutil
import signal
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.load_ranks import status
from benchmarks.machine import description
from benchmarks.model import TINY
from tests.ranks import RankPool

RANKS, TIMEOUT_S = 2, 3000
RESULTS = Path(__file__).parent / "results" / "load.json"
LOADED = ("ucp z3 to z1", "ucp z1 to z3")
CLAIMS = [  # (what, numerator, denominator, "at most" or "at least", limit)
    ("load ZeRO-3 into ZeRO-1 / stock load of ZeRO-1", "ucp z3 to z1", "stock z1", "at most", 0.8),
    ("  the same, checksums compared", "ucp z3 to z1 checked", "stock z1", "at most", None),
    ("load ZeRO-1 into ZeRO-3 / stock load of ZeRO-3", "ucp z1 to z3", "stock z3", "at most", 1.0),
    ("  the same, checksums compared", "ucp z1 to z3 checked", "stock z3", "at most", None),
    ("load ZeRO-1 into ZeRO-1 / stock load of ZeRO-1", "ucp z1 to z1", "stock z1", "at most", None),
    ("load ZeRO-3 into ZeRO-3 / stock load of ZeRO-3", "ucp z3 to z3", "stock z3", "at most", None),
    ("stock convert + universal load / load, ZeRO-1", "stock both z1", "ucp z1 to z1", "at least", 15.0),
    ("  the same, checksums compared", "stock both z1", "ucp z1 to z1 checked", "at least", None),
    ("stock convert + universal load / load, ZeRO-3", "stock both z3", "ucp z3 to z3", "at least", 15.0),
    ("  the same, checksums compared", "stock both z3", "ucp z3 to z3 checked", "at least", None),
]
EXTRA_BYTES = 64 * 2**20


def ratios(seconds: dict[str, list[float]], cpu_seconds: dict[str, list[float]]) -> list[dict[str, Any]]:
    """Each claim's ratio of medians, the smallest and largest one of one repetition, that of processor seconds."""
    for stage in (1, 3):
        seconds[f"stock both z{stage}"] = [a + b for a, b in zip(
            seconds[f"stock convert z{stage}"], seconds[f"stock universal z{stage}"], strict=True)]
    out: list[dict[str, Any]] = []
    for what, top, bottom, kind, limit in CLAIMS:
        each = [a / b for a, b in zip(seconds[top], seconds[bottom], strict=True)]
        value = statistics.median(seconds[top]) / statistics.median(seconds[bottom])
        met = None if limit is None else value <= limit if kind == "at most" else value >= limit
        cpu = [statistics.median(cpu_seconds[name]) if name in cpu_seconds else None for name in (top, bottom)]
        out.append({"what": what, "ratio": value, "spread": [min(each), max(each)], "limit": limit, "kind": kind,
                    "met": met, "cpu_ratio": cpu[0] / cpu[1] if cpu[0] and cpu[1] else None})
    return out


# ---- from outside: bytes ----

TRACED = "trace=openat,read,readv,pread64,preadv,preadv2,mmap,sendfile,copy_file_range"
CALL = re.compile(r"^\d+ +(?P<call>\w+)\((?P<rest>.*)\) += (?P<result>-?\d+|0x[0-9a-f]+)")


def bytes_read(pool: RankPool, run: Callable[[], None], folder: Path, marker: str) -> list[int | None]:
    """Bytes of the files under `folder` that each rank reads between its markers; None without strace."""
    pool.run(RANKS, "benchmarks.load_ranks:status", "VmRSS")  # the workers exist now
    if shutil.which("strace") is None:
        run()
        return [None] * RANKS
    logs = [Path(f"{marker}.strace.{rank}") for rank in range(RANKS)]
    watchers = [subprocess.Popen(["strace", "-f", "-y", "-e", TRACED, "-o", str(log), "-p", str(pid)],
                                 stderr=subprocess.PIPE, text=True)
                for log, pid in zip(logs, pool.pids(), strict=True)]
    try:
        for watcher in watchers:  # it says so when it has attached
            if watcher.stderr is None or "attached" not in watcher.stderr.readline():
                return [None] * RANKS
            threading.Thread(target=watcher.stderr.read, daemon=True).start()
        run()
    finally:
        for watcher in watchers:
            watcher.send_signal(signal.SIGINT)
            watcher.wait()
    return [count_bytes(log.read_text(errors="replace"), str(folder), f"{marker}.begin.{rank}",
                        f"{marker}.end.{rank}") for rank, log in enumerate(logs)]


def count_bytes(log: str, folder: str, begin: str, end: str) -> int:
    """Sums what the calls of an strace log (-f -y) returned for files of `folder`; a mapping counts with its length."""
    # a call that another thread interrupted stands on two lines
    halves: dict[str, str] = {}
    total, inside = 0, False
    for line in log.splitlines():
        pid = line.split(" ", 1)[0]
        if line.endswith("<unfinished ...>"):
            halves[pid] = line.removesuffix("<unfinished ...>")
            continue
        if " resumed>" in line:
            line = halves.pop(pid, "") + line.partition(" resumed>")[2]
        found = CALL.match(line)
        if found is None:
            continue
        rest = found["rest"]
        if found["call"] == "openat":
            inside = (inside or begin in rest) and end not in rest
        elif inside and f"<{folder}/" in rest:
            if found["call"] == "mmap":
                total += int(rest.split(", ")[1])
            else:
                total += max(0, int(found["result"], 0))
    if f'{end}"' not in log:
        raise RuntimeError("the trace has no end marker")
    return total


# ---- from outside: memory ----

def peak_anonymous(pids: list[int], marker: str, stop: threading.Event) -> list[int]:
    """The largest RssAnon of each process seen between its markers, looked at every millisecond."""
    peaks = [0] * len(pids)
    while not stop.is_set():
        for rank, pid in enumerate(pids):
            if Path(f"{marker}.begin.{rank}").exists() and not Path(f"{marker}.end.{rank}").exists():
                peaks[rank] = max(peaks[rank], status("RssAnon", pid))
        time.sleep(0.001)
    return peaks


def memory(pool: RankPool, folder: Path, size: dict[str, int], way: str) -> list[dict[str, int]]:
    marker, stop, peaks = str(folder / f"memory {way}"), threading.Event(), [0] * RANKS
    pool.run(RANKS, "benchmarks.load_ranks:status", "VmRSS")

    def look() -> None:
        peaks[:] = peak_anonymous(pool.pids()[:RANKS], marker, stop)

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        found = pool.run(RANKS, "benchmarks.load_ranks:observed", str(folder), size, way, marker, timeout_s=TIMEOUT_S)
    finally:
        stop.set()
        watcher.join()
    return [{"anonymous_over_after": peak - one["anonymous_after"],
             "peak_resident_over_after": one["peak_resident_over_after"],
             "limit": EXTRA_BYTES + one["largest_shard_bytes"]} for one, peak in zip(found, peaks, strict=True)]


def volumes(pool: RankPool, folder: Path, size: dict[str, int], way: str) -> list[dict[str, Any]]:
    marker, found = str(folder / f"bytes {way}"), []

    def run() -> None:
        found[:] = pool.run(RANKS, "benchmarks.load_ranks:observed", str(folder), size, way, marker,
                            timeout_s=TIMEOUT_S)

    counted = bytes_read(pool, run, folder, marker)
    return [{"read_bytes": read, "needed_bytes": one["needed_bytes"], "limit": 1.02,
             "ratio": None if read is None else read / one["needed_bytes"]}
            for read, one in zip(counted, found, strict=True)]


# ---- the run ----

def run(folder: Path, size: dict[str, int], repetitions: int) -> dict[str, Any]:
    pool = RankPool(RANKS)
    out: dict[str, Any] = {"machine_before": description(), "repetitions": repetitions, "ranks": RANKS}
    try:
        out["parameters"] = pool.run(RANKS, "benchmarks.load_ranks:save", str(folder), size, timeout_s=TIMEOUT_S)[0]
        found = pool.run(RANKS, "benchmarks.load_ranks:measure", str(folder), size, repetitions, timeout_s=TIMEOUT_S)[0]
        out |= found | {"ratios": ratios(found["seconds"], found["cpu_seconds"])}
        ways = [*LOADED, *(f"{way} checked" for way in LOADED), "stock z1", "stock z3"]
        out["bytes"] = {way: volumes(pool, folder, size, way) for way in ways}
        out["memory"] = {way: memory(pool, folder, size, way) for way in ways}
    finally:
        pool.close()
    out["machine_after"] = description()
    return out


def table(out: dict[str, Any]) -> str:
    load = [out[when]["load_average"][0] for when in ("machine_before", "machine_after")]
    lines = [f"{out['parameters'] / 1e6:.1f} M parameters, {out['ranks']} ranks, {out['repetitions']} repetitions, "
             f"load average {load[0]:.1f} before, {load[1]:.1f} after", "",
             f"{'seconds':54}{'median':>8}{'min':>8}{'max':>8}{'cpu':>8}"]
    for name, each in out["seconds"].items():
        sums = out["bytes_checked_unchecked"].get(name)
        note = f"  checked {sums[0] / 1e6:.0f} MB, unchecked {sums[1] / 1e6:.0f} MB" if sums else ""
        cpu = f"{statistics.median(out['cpu_seconds'][name]):8.3f}" if name in out["cpu_seconds"] else " " * 8
        lines.append(f"{name:54}{statistics.median(each):8.3f}{min(each):8.3f}{max(each):8.3f}{cpu}{note}")
    lines += ["", f"{'ratio':54}{'median':>8}{'min':>8}{'max':>8}{'cpu':>8}  target"]
    for row in out["ratios"]:
        target = "" if row["limit"] is None else f"  {row['kind']} {row['limit']}: {'met' if row['met'] else 'MISSED'}"
        cpu = " " * 8 if row["cpu_ratio"] is None else f"{row['cpu_ratio']:8.2f}"
        lines.append(f"{row['what']:54}{row['ratio']:8.2f}{row['spread'][0]:8.2f}{row['spread'][1]:8.2f}{cpu}{target}")
    lines += ["", "bytes read / bytes needed, per rank, counted by strace (at most 1.02)"]
    for way, rows in out["bytes"].items():
        shown = "  ".join("not counted: strace is missing" if r["ratio"] is None else f"{r['ratio']:.4f}" for r in rows)
        lines.append(f"{way:54}{shown}")
    lines += ["", "MiB above what is there after the load: RssAnon sampled from outside, and by the kernel's VmHWM"]
    for way, rows in out["memory"].items():
        mib = [[round(r[key] / 2**20) for key in ("anonymous_over_after", "peak_resident_over_after", "limit")]
               for r in rows]
        shown = "  ".join(f"{sampled} and {kept}, at most {limit};" for sampled, kept, limit in mib)
        lines.append(f"{way:54}{shown}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--tiny", action="store_true", help="a small model; nothing is written to benchmarks/results")
    parser.add_argument("--folder", type=Path, help="where the checkpoints go for a while; needs 7 GB")
    options = parser.parse_args()
    size, needed = (TINY, 2**28) if options.tiny else ({}, 7 * 2**30)
    with tempfile.TemporaryDirectory(prefix="ucp_load_", dir=options.folder) as folder:
        if shutil.disk_usage(folder).free < needed:
            parser.error(f"{folder} has less than {needed >> 30} GiB of free space")
        out = run(Path(folder).resolve(), size, options.repetitions)
    print(table(out))
    if not options.tiny:
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps(out, indent=1) + "\n")


if __name__ == "__main__":
    main()
