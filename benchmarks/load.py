"""Loading against stock DeepSpeed's loading and conversion: seconds, bytes read, memory. 124
million parameters, two ranks; four for the mixture of experts.

    python -m benchmarks.load                       # 20 minutes, 8 GiB of memory, 14 GB of disk
    python -m benchmarks.load --suites tensor       # also `data` (ZeRO), `pipeline`, `experts`
    python -m benchmarks.load --tiny --repetitions 2  # to see that it runs

Every ratio is of medians of one run in the same processes, the repetitions interleaved, the page
cache warm. Bytes are counted by strace and memory is read from /proc, both from outside of the
ranks. Writes benchmarks/results/load.json.
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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import load_ranks
from benchmarks.cases import RANKS, SUITES, Mesh, Pair, meshes, targets
from benchmarks.load_ranks import status
from benchmarks.machine import description
from benchmarks.model import TINY
from tests.ranks import RankPool, RanksFailed

TIMEOUT_S = 3000
RESULTS = Path(__file__).parent / "results" / "load.json"
EXTRA_BYTES = 64 * 2**20
# what, numerator, denominator, "at most" or "at least", limit
Claim = tuple[str, str, str, str, float | None]


def claims(pairs: tuple[Pair, ...]) -> list[Claim]:
    out: list[Claim] = []
    for pair in pairs:
        for more, checked, load, convert in (
            ("", "", pair.load, pair.convert),
            (", checksums compared", " checked", None, None),
        ):
            ours, stock = f"ucp {pair}{checked}", f"stock {pair.target}"
            what = f"load {pair} / stock load of {pair.target}{more}"
            out.append((what, ours, stock, "at most", load))
            if pair.floor is not None:
                floor, limit = f"floor {pair.target}", None if checked else pair.floor
                out.append((f"load {pair} / floor{more}", ours, floor, "at most", limit))
                both = f"floor and exchange {pair.target}"
                out.append((f"load {pair} / {both}{more}", ours, both, "at most", None))
            if pair.converts:
                what = f"stock convert + load / load, {pair}{more}"
                out.append((what, f"stock both {pair}", ours, "at least", convert))
    return out


def ratios(
    pairs: tuple[Pair, ...], seconds: dict[str, list[float]], cpu_seconds: dict[str, list[float]]
) -> list[dict[str, Any]]:
    """Each claim's ratio of medians, the smallest and largest one of one repetition, that of
    processor seconds."""
    for pair in pairs:
        if pair.converts:
            seconds[f"stock both {pair}"] = [
                a + b
                for a, b in zip(
                    seconds[f"stock convert {pair}"],
                    seconds[f"stock universal {pair}"],
                    strict=True,
                )
            ]
    out: list[dict[str, Any]] = []
    for what, top, bottom, kind, limit in claims(pairs):
        each = [a / b for a, b in zip(seconds[top], seconds[bottom], strict=True)]
        value = statistics.median(seconds[top]) / statistics.median(seconds[bottom])
        met = None if limit is None else value <= limit if kind == "at most" else value >= limit
        cpu = [
            statistics.median(cpu_seconds[name]) if name in cpu_seconds else None
            for name in (top, bottom)
        ]
        out.append(
            {
                "what": what,
                "ratio": value,
                "spread": [min(each), max(each)],
                "limit": limit,
                "kind": kind,
                "met": met,
                "cpu_ratio": cpu[0] / cpu[1] if cpu[0] and cpu[1] else None,
            }
        )
    return out


# ---- from outside: bytes ----

TRACED = "trace=openat,read,readv,pread64,preadv,preadv2,mmap,sendfile,copy_file_range"
CALL = re.compile(r"^\d+ +(?P<call>\w+)\((?P<rest>.*)\) += (?P<result>-?\d+|0x[0-9a-f]+)")


def bytes_read(
    pool: RankPool, run: Callable[[], None], folder: Path, marker: str
) -> list[int | None]:
    """Bytes of the files under `folder` that each rank reads between its markers; None without
    strace."""
    ranks = pool.size
    pool.run(ranks, load_ranks.status, "VmRSS")  # the workers exist now
    if shutil.which("strace") is None:
        run()
        return [None] * ranks
    logs = [Path(f"{marker}.strace.{rank}") for rank in range(ranks)]
    watchers = [
        subprocess.Popen(
            ["strace", "-f", "-y", "-e", TRACED, "-o", str(log), "-p", str(pid)],
            stderr=subprocess.PIPE,
            text=True,
        )
        for log, pid in zip(logs, pool.pids(), strict=True)
    ]
    try:
        for watcher in watchers:  # it says so when it has attached
            if watcher.stderr is None or "attached" not in watcher.stderr.readline():
                return [None] * ranks
            threading.Thread(target=watcher.stderr.read, daemon=True).start()
        run()
    finally:
        for watcher in watchers:
            watcher.send_signal(signal.SIGINT)
            watcher.wait()
    return [
        count_bytes(
            log.read_text(errors="replace"),
            str(folder),
            f"{marker}.begin.{rank}",
            f"{marker}.end.{rank}",
        )
        for rank, log in enumerate(logs)
    ]


def count_bytes(log: str, folder: str, begin: str, end: str) -> int:
    """Sums what the calls of an strace log (-f -y) returned for files of `folder`; a mapping counts
    with its length."""
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
            if (
                Path(f"{marker}.begin.{rank}").exists()
                and not Path(f"{marker}.end.{rank}").exists()
            ):
                peaks[rank] = max(peaks[rank], status("RssAnon", pid))
        time.sleep(0.001)
    return peaks


@dataclass(frozen=True)
class Suite:
    """Everything measured of some pairs, on one pool of ranks, with the files in one folder."""

    pool: RankPool
    folder: Path
    pairs: tuple[Pair, ...]
    size: dict[str, int]
    repetitions: int

    def call(self, function: str, *args: Any) -> list[Any]:
        return self.pool.run(
            self.pool.size, getattr(load_ranks, function), *args, timeout_s=TIMEOUT_S
        )

    def observed(self, mesh: Mesh, way: str, marker: str) -> list[dict[str, int]]:
        return self.call(
            "observed", str(self.folder), mesh, targets(self.pairs)[mesh], self.size, way, marker
        )

    def stock_can_not(self, pair: Pair) -> str | None:
        """Why stock's conversion and universal load can't do a pair; None where they can, or are
        known not to."""
        if pair.converts:
            try:
                self.call("try_universal", str(self.folder), pair, self.size)
            except RanksFailed as error:
                return min(error.by_rank.items())[1].strip().splitlines()[-1]
        return None

    def memory(self, mesh: Mesh, way: str) -> list[dict[str, int]]:
        marker, stop, peaks = (
            str(self.folder / f"memory {way}"),
            threading.Event(),
            [0] * self.pool.size,
        )
        self.call("status", "VmRSS")  # the workers exist now

        def look() -> None:
            peaks[:] = peak_anonymous(self.pool.pids(), marker, stop)

        watcher = threading.Thread(target=look)
        watcher.start()
        try:
            found = self.observed(mesh, way, marker)
        finally:
            stop.set()
            watcher.join()
        return [
            {
                "anonymous_over_after": peak - one["anonymous_after"],
                "peak_resident_over_after": one["peak_resident_over_after"],
                "limit": EXTRA_BYTES + one["largest_shard_bytes"],
            }
            for one, peak in zip(found, peaks, strict=True)
        ]

    def volumes(self, mesh: Mesh, way: str) -> list[dict[str, Any]]:
        marker, found = str(self.folder / f"bytes {way}"), []

        def run() -> None:
            found[:] = self.observed(mesh, way, marker)

        counted = bytes_read(self.pool, run, self.folder, marker)
        return [
            {
                "read_bytes": read,
                "needed_bytes": one["needed_bytes"],
                "limit": 1.02,
                "ratio": None if read is None else read / one["needed_bytes"],
            }
            for read, one in zip(counted, found, strict=True)
        ]

    def watched(self) -> list[tuple[Mesh, str]]:
        """(mesh, way) of the loads that are watched from outside."""
        pairs = [pair for pair in self.pairs if pair.observed]
        ours = [
            (pair.target, f"ucp {pair}{checked}") for checked in ("", " checked") for pair in pairs
        ]
        return ours + [(mesh, f"stock {mesh}") for mesh in targets(tuple(pairs))]

    def run(self) -> dict[str, Any]:
        out: dict[str, Any] = {
            "machine_before": description(),
            "repetitions": self.repetitions,
            "ranks": self.pool.size,
        }
        seconds: dict[str, dict[str, Any]] = {
            "seconds": {},
            "cpu_seconds": {},
            "bytes_checked_unchecked": {},
        }
        for mesh in meshes(self.pairs):
            count = self.call("save", str(self.folder), mesh, self.size)[0]
            if mesh.tp < 2 and mesh.pp < 2 and mesh.ep < 2:
                out["parameters"] = count
        out["stock_can_not"] = refusals = {
            str(pair): why for pair in self.pairs if (why := self.stock_can_not(pair))
        }
        able = tuple(
            replace(pair, converts=pair.converts and str(pair) not in refusals)
            for pair in self.pairs
        )
        for mesh, pairs in targets(able).items():
            found = self.call(
                "measure", str(self.folder), mesh, pairs, self.size, self.repetitions
            )[0]
            for key, held in seconds.items():
                held |= found[key]
        out |= seconds | {"ratios": ratios(able, seconds["seconds"], seconds["cpu_seconds"])}
        out["bytes"] = {way: self.volumes(mesh, way) for mesh, way in self.watched()}
        out["memory"] = {way: self.memory(mesh, way) for mesh, way in self.watched()}
        return out | {"machine_after": description()}


def table(out: dict[str, Any]) -> str:
    load = [out[when]["load_average"][0] for when in ("machine_before", "machine_after")]
    head = (
        f"{out['parameters'] / 1e6:.1f} M parameters, {out['ranks']} ranks, "
        f"{out['repetitions']} repetitions, "
        f"load average {load[0]:.1f} before, {load[1]:.1f} after"
    )
    parts = ([head], _seconds(out), _ratios(out), _bytes(out["bytes"]), _memory(out["memory"]))
    return "\n\n".join("\n".join(lines) for lines in parts)


def _seconds(out: dict[str, Any]) -> list[str]:
    lines = [f"{'seconds':62}{'median':>8}{'min':>8}{'max':>8}{'cpu':>8}"]
    for name, each in out["seconds"].items():
        sums, cpu = out["bytes_checked_unchecked"].get(name), out["cpu_seconds"].get(name)
        note = f"  checked {sums[0] / 1e6:.0f} MB, unchecked {sums[1] / 1e6:.0f} MB" if sums else ""
        shown = " " * 8 if cpu is None else f"{statistics.median(cpu):8.3f}"
        spread = f"{statistics.median(each):8.3f}{min(each):8.3f}{max(each):8.3f}"
        lines.append(f"{name:62}{spread}{shown}{note}")
    return lines


def _ratios(out: dict[str, Any]) -> list[str]:
    lines = [f"{'ratio':62}{'median':>8}{'min':>8}{'max':>8}{'cpu':>8}  target"]
    for row in out["ratios"]:
        target, met = "", "met" if row["met"] else "MISSED"
        if row["limit"] is not None:
            target = f"  {row['kind']} {row['limit']}: {met}"
        cpu = " " * 8 if row["cpu_ratio"] is None else f"{row['cpu_ratio']:8.2f}"
        spread = f"{row['ratio']:8.2f}{row['spread'][0]:8.2f}{row['spread'][1]:8.2f}"
        lines.append(f"{row['what']:62}{spread}{cpu}{target}")
    for pair, why in out["stock_can_not"].items():
        lines.append(f"stock can not convert and load {pair}: {why}")
    return lines


def _bytes(volumes: dict[str, Any]) -> list[str]:
    lines = ["bytes read / bytes needed, per rank, counted by strace (at most 1.02)"]
    for way, rows in volumes.items():
        ratios = [row["ratio"] for row in rows]
        shown = ["not counted: strace is missing" if r is None else f"{r:.4f}" for r in ratios]
        lines.append(f"{way:62}{'  '.join(shown)}")
    return lines


def _memory(peaks: dict[str, Any]) -> list[str]:
    lines = [
        "MiB above what is there after the load: RssAnon sampled from outside, and by the kernel's "
        "VmHWM"
    ]
    keys = ("anonymous_over_after", "peak_resident_over_after", "limit")
    for way, rows in peaks.items():
        mib = [[round(row[key] / 2**20) for key in keys] for row in rows]
        shown = "  ".join(f"{sampled} and {kept}, at most {limit};" for sampled, kept, limit in mib)
        lines.append(f"{way:62}{shown}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument(
        "--suites",
        nargs="+",
        choices=list(SUITES),
        default=list(SUITES),
        help="the others' results are kept",
    )
    parser.add_argument(
        "--tiny",
        action="store_true",
        help="a small model; nothing is written to benchmarks/results",
    )
    parser.add_argument(
        "--folder", type=Path, help="where the checkpoints go for a while; needs 14 GB"
    )
    options = parser.parse_args()
    size, needed = (TINY, 2**29) if options.tiny else ({}, 14 * 2**30)
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name in options.suites:
        with tempfile.TemporaryDirectory(prefix="ucp_load_", dir=options.folder) as folder:
            if shutil.disk_usage(folder).free < needed:
                parser.error(f"{folder} has less than {needed >> 30} GiB of free space")
            pool = RankPool(RANKS.get(name, 2), gloo=True)
            try:
                results[name] = Suite(
                    pool, Path(folder).resolve(), SUITES[name], size, options.repetitions
                ).run()
            finally:
                pool.close()
        print(f"---- {name} ----\n{table(results[name])}\n", flush=True)
        if not options.tiny:
            RESULTS.parent.mkdir(exist_ok=True)
            RESULTS.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
