"""The tool against copying, reading and summing the same bytes, and against stock's converter:
seconds, memory, disk.

    python -m benchmarks.tool                      # 124M and 1B parameters: 25 minutes, 60 GB
    python -m benchmarks.tool --sizes 124M --repetitions 5
    python -m benchmarks.tool --sizes tiny         # to see that it runs

Every ratio is of medians of one run, the repetitions interleaved. Each measurement is a process of
its own, its imports apart, for stock's converter too. Memory is the peak of RssAnon in /proc, read
from benchmarks import load_ranks
from benchmarks import load_ranks
from outside, over that of a bare interpreter. The checkpoint of 124 million parameters is
DeepSpeed's own (ZeRO-1, two ranks); the large one is written by this package's writer. Writes
benchmarks/results/tool.json.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.machine import description

RESULTS = Path(__file__).parent / "results" / "tool.json"
LARGE = (
    "layers=24,hidden=1792,heads=14,ffn=7168,vocab=50304,positions=1024"  # 1.02 billion parameters
)
TINY = "layers=2,hidden=64,heads=4,ffn=256,vocab=512,positions=64"
BLOCK, PIECE = 2**20, 64 * 2**20
# what, numerator, denominator, "at most" or "at least", limit
CLAIMS = [
    ("convert to universal / cp -r and sync", "universal", "copy", "at most", 1.2),
    ("convert to native / cp -r and sync", "native", "copy", "at most", 0.7),
    ("stock ds_to_universal / convert to universal", "stock", "universal", "at least", 8.0),
    ("verify --deep / reading, cold cache", "verify cold", "read cold", "at most", 1.4),
    ("reading and CRC-32 alone / verify --deep, warm", "crc warm", "verify warm", "at least", 0.7),
    ("diff / reading both, cold cache", "diff cold", "read both cold", "at most", 1.4),
    (
        "reading and CRC-32 alone of both / diff, warm",
        "crc both warm",
        "diff warm",
        "at least",
        0.7,
    ),
]


# ---- what the measured processes do ----


def _files(folders: list[str]) -> list[Path]:
    return [
        path for folder in folders for path in sorted(Path(folder).rglob("*")) if path.is_file()
    ]


def _read(folders: list[str], summing: bool) -> None:
    """Reads every file in blocks on as many threads as there are cores; with `summing` also their
    CRC-32."""
    from concurrent.futures import ThreadPoolExecutor

    from isal.isal_zlib import crc32

    def piece(place: tuple[Path, int]) -> int:
        crc, buffer, handle = 0, memoryview(bytearray(BLOCK)), os.open(place[0], os.O_RDONLY)
        for low in range(place[1], place[1] + PIECE, BLOCK):
            count = os.preadv(handle, [buffer], low)
            if summing:
                crc = crc32(buffer[:count], crc)
        os.close(handle)
        return crc

    pieces = [
        (path, low) for path in _files(folders) for low in range(0, path.stat().st_size, PIECE)
    ]
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        list(threads.map(piece, pieces))


def child(what: str, arguments: list[str]) -> None:
    """One measurement; prints its seconds."""
    import megatron_ucp as ucp
    from megatron_ucp.reshard import check, convert  # imports apart

    del convert, check
    source = arguments[0]
    calls: dict[str, Callable[[], Any]] = {
        "universal": lambda: ucp.convert(source, arguments[1], to="universal"),
        "native": lambda: ucp.convert(source, arguments[1], target=ucp.Mesh(dp=4, zero=3)),
        "verify": lambda: ucp.verify(source, deep=True),
        "diff": lambda: ucp.diff(source, arguments[1]),
        "read": lambda: _read(arguments, summing=False),
        "crc": lambda: _read(arguments, summing=True),
    }
    started = time.perf_counter()
    found = calls[what]()
    seconds = time.perf_counter() - started
    if what == "verify" and found.findings or what == "diff" and found:
        raise SystemExit(f"{what} found {found}")
    print(seconds)


# ---- measuring from outside ----


def anon_bytes(pid: int) -> int:
    """RssAnon of a process; 0 once it has gone."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return next(
        (int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("RssAnon")), 0
    )


def held_bytes(folder: Path) -> int:
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(place, name)).st_blocks * 512
            except OSError:  # gone meanwhile
                continue
    return total


def watched(command: list[str], disk: Path | None = None) -> tuple[str, int, int]:
    """Runs a process; its last line of output, the peak of its RssAnon, and of what lies in a
    folder meanwhile."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    anon = most = 0
    done = threading.Event()

    def watch() -> None:
        nonlocal anon, most
        while not done.wait(0.01):
            anon = max(anon, anon_bytes(process.pid))

    def watch_disk() -> None:
        nonlocal most
        while disk is not None and not done.wait(0.25):
            most = max(most, held_bytes(disk))

    watchers = [threading.Thread(target=watch), threading.Thread(target=watch_disk)]
    for one in watchers:
        one.start()
    out, _ = process.communicate()
    done.set()
    for one in watchers:
        one.join()
    if process.returncode:
        raise SystemExit(f"{command} ended with {process.returncode}")
    return out.strip().rpartition("\n")[2], anon, most


def forget(folders: list[Path]) -> None:
    """Takes files out of the page cache."""
    os.sync()
    for path in _files([str(folder) for folder in folders]):
        handle = os.open(path, os.O_RDONLY)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


class Bench:
    """One source, and everything that is measured on it."""

    def __init__(self, source: Path, folder: Path) -> None:
        self.source, self.out, self.other = source, folder / "out", folder / "other"
        self.seconds: dict[str, list[float]] = {}
        self.anon: dict[str, int] = {}
        self.disk: dict[str, list[int]] = {}

    def clear(self) -> None:
        shutil.rmtree(self.out, ignore_errors=True)
        self.out.mkdir()
        os.sync()

    def run(self, what: str, name: str, *arguments: Path, writes: bool = False) -> None:
        """One measured process."""
        command = [sys.executable, "-m", "benchmarks.tool", "--child", what, *map(str, arguments)]
        line, anon, most = watched(command, self.out if writes else None)
        self.seconds.setdefault(name, []).append(float(line))
        self.anon[name] = max(self.anon.get(name, 0), anon)
        if writes:
            self.disk.setdefault(name, []).append(most)

    def writes(self, stock: bool) -> None:
        """Conversions and the copy."""
        self.clear()
        started = time.perf_counter()
        subprocess.run(["sh", "-c", f"cp -r {self.source} {self.out}/copy && sync"], check=True)
        self.seconds.setdefault("copy", []).append(time.perf_counter() - started)
        for what in ("universal", "native"):
            self.clear()
            self.run(what, what, self.source, self.out / "x", writes=True)
        final = held_bytes(self.out / "x")
        self.disk.setdefault("native, when done", []).append(final)
        if not self.other.exists():
            (self.out / "x").rename(self.other)
        if stock:
            self.clear()
            stage, workers = "1", "2"
            line, _, most = watched(
                [
                    sys.executable,
                    "-m",
                    "benchmarks.convert",
                    str(self.source),
                    str(self.out / "x"),
                    workers,
                    stage,
                ],
                self.out,
            )
            self.seconds.setdefault("stock", []).append(float(line))
            self.disk.setdefault("stock", []).append(most)
        self.clear()

    def reads(self) -> None:
        """Verify and diff, cold and warm."""
        one, both = [self.source], [self.source, self.other]
        for what, name, folders in (
            ("read", "read cold", one),
            ("verify", "verify cold", one),
            ("read", "read both cold", both),
            ("diff", "diff cold", both),
        ):
            forget(both)
            self.run(what, name, *folders)
        for what, name, folders in (
            ("crc", "crc warm", one),
            ("verify", "verify warm", one),
            ("crc", "crc both warm", both),
            ("diff", "diff warm", both),
        ):
            self.run("read", "warming", *folders)
            self.run(what, name, *folders)


# ---- sources ----


def saved(folder: Path) -> Path:
    """DeepSpeed's own checkpoint of 124 million parameters."""
    from benchmarks import load_ranks
    from benchmarks.cases import Mesh
    from tests.ranks import RankPool

    pool = RankPool(2, gloo=True)
    pool.run(2, load_ranks.save, str(folder), Mesh(1), {}, timeout_s=600)
    pool.close()
    return folder / "z1"


def written(folder: Path, sizes: str, family: str = "gpt") -> Path:
    """A model of these sizes at ZeRO-1 on two ranks, in bf16, by this package's own writer: every
    number is 1.5."""
    from dataclasses import replace

    from megatron_ucp.core.manifest_json import to_json
    from megatron_ucp.core.mesh import Mesh
    from megatron_ucp.families import find_family
    from megatron_ucp.formats import output_folder
    from megatron_ucp.formats.checkpoint import Extras
    from megatron_ucp.formats.deepspeed.target import Target
    from megatron_ucp.formats.deepspeed.writer import NativeWriter, RunSettings
    from megatron_ucp.formats.loss_scale import LossScale
    from megatron_ucp.formats.pt.archive import write_pt
    from megatron_ucp.reshard.plan import paper_manifest, paper_sizes
    from megatron_ucp.reshard.target import Conversion, target_manifest

    target = Target(Mesh(dp=2, zero=1), "bfloat16").completed({})
    known = paper_sizes(family, sizes)
    model = paper_manifest(find_family(family), known)
    manifest = target_manifest(Conversion(model, target, "paper"))
    config = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}
    none = LossScale()
    extras = Extras({"global_steps": 1, "global_samples": 2}, None, none, config, {})
    run = RunSettings(extras, config, "0.19.8", "bfloat16", none, 1.0, False, lambda _: None)
    blocks = {"float32": b"\0\0\xc0\x3f" * (BLOCK // 4), "bfloat16": b"\xc0\x3f" * (BLOCK // 2)}
    out = folder / "large"
    out.mkdir()
    outputs = list(NativeWriter(manifest, run, None).outputs())
    for output in outputs:

        def payload(storage: Any, output: Any = output) -> Any:
            given = output.payloads[storage.key]
            block = blocks[storage.dtype]
            for low in range(0, storage.size_bytes, BLOCK):
                yield (
                    given
                    if isinstance(given, bytes)
                    else block[: min(BLOCK, storage.size_bytes - low)]
                )

        write_pt(out / output.name, output.tree, payload)
    entries = tuple(output_folder.entry_of(out / output.name) for output in outputs)
    (out / "ucp_manifest.json").write_text(
        to_json(replace(manifest, files=entries, save_id="written", run=run_of(known)))
    )
    return out


def run_of(sizes: Any) -> dict[str, Any]:
    """What a manifest says of a run, and of its model: an export asks for it."""
    from dataclasses import asdict

    from megatron_ucp.families.settings import RECORDED, Architecture

    architecture = Architecture(1024, 1e-5, "silu" if sizes.gated else "gelu")
    says = {"sizes": asdict(sizes), "architecture": asdict(architecture)}
    steps = {"global_steps": 1, "skipped_steps": 0}
    return {**steps, "ds_version": "0.19.8", "seed": 1, RECORDED: says}


def claim(what: str, ratio: float, limit: float, kind: str = "at most") -> dict[str, Any]:
    met = ratio <= limit if kind == "at most" else ratio >= limit
    return {"what": what, "ratio": ratio, "limit": limit, "kind": kind, "met": met}


def claims(bench: Bench, bare: int) -> list[dict[str, Any]]:
    """What was claimed and what was measured; `bare` bytes are an interpreter's own."""
    rows = []
    for what, top, bottom, kind, limit in CLAIMS:
        value = statistics.median(bench.seconds[top]) / statistics.median(bench.seconds[bottom])
        rows.append(claim(what, value, limit, kind))
    ours = ("universal", "native", "verify", "diff")
    extra = max(value - bare for name, value in bench.anon.items() if name.split()[0] in ours)
    rows.append(claim("peak RssAnon over a bare interpreter / MiB", extra / 2**20, 256.0))
    most = max(bench.disk["native"]) / max(bench.disk["native, when done"])
    rows.append(claim("most on disk while converting / the output", most, 1.02))
    return rows


def measure(size: str, repetitions: int, folder: Path) -> dict[str, Any]:
    source = saved(folder) if size == "124M" else written(folder, LARGE if size == "1B" else TINY)
    bench = Bench(source, folder)
    for repetition in range(repetitions):
        bench.writes(stock=size != "1B" or repetition == 0)
        bench.reads()
        print(f"{size}: repetition {repetition + 1} of {repetitions}", flush=True)
    bare = watched([sys.executable, "-c", "import time; time.sleep(0.3); print(0)"])[1]
    size_bytes = sum(path.stat().st_size for path in _files([str(source)]))
    return {
        "bytes": size_bytes,
        "claims": claims(bench, bare),
        "seconds": bench.seconds,
        "anon_bytes": {"bare": bare, **bench.anon},
        "disk_bytes": bench.disk,
    }


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2], sys.argv[3:])
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", default="124M,1B", help="124M, 1B, tiny")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument(
        "--folder", type=Path, help="where the checkpoints go (default: a temporary folder)"
    )
    args = parser.parse_args()
    found: dict[str, Any] = {}
    for size in args.sizes.split(","):
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            measured = measure(size, args.repetitions, Path(folder))
            found[size] = {"machine": description(), "repetitions": args.repetitions, **measured}
        print(f"\n{size}: {found[size]['bytes'] / 1e9:.2f} GB")
        for row in found[size]["claims"]:
            print(
                f"{row['what']:55} {row['ratio']:8.2f}   {row['kind']} {row['limit']:g}   "
                f"{'met' if row['met'] else 'MISSED'}"
            )
    if "tiny" not in args.sizes:  # sizes that were not measured now stay as they were
        old = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        RESULTS.write_text(json.dumps({**old, **found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
