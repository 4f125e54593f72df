"""This code against an earlier commit's: loads, saves, conversions, exports and imports. Seconds,
memory, and bytes read.

    python -m benchmarks.commits 3c66fb3                # 124M and 1B parameters: an hour, 60 GB
    python -m benchmarks.commits 3c66fb3 --sizes tiny   # to see that it runs

Every ratio is new over old, of medians of one run, the two in turns; which one goes first changes
with the repetition. Each measurement is a process of its own (two for loads and saves: DeepSpeed at
ZeRO-3; four for the live export: at ZeRO-1), its imports apart. Memory is the peak of RssAnon in
/proc, read from outside. Bytes read are those of the source's files, counted by strace in one more
run. Sources are written by this package's writer (bf16, ZeRO-1, two ranks). Writes
benchmarks/results/commits.json.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).parent / "results" / "commits.json"
# layers, width, vocabulary
SIZES = {"124M": (12, 768, 50304), "1B": (24, 1824, 50304), "tiny": (2, 48, 500)}
HEADS = 12
ON_RANKS = {"load": 2, "save": 2, "live export": 4}  # how many
OPERATIONS = (*ON_RANKS, "universal", "native", "torch_dist", "export", "import")
LIMIT, MEMORY_LIMIT = 1.03, 1.01  # memory is seen every 10 ms


# ---- what the measured processes do: with either code ----


def prepared(what: str, source: str, output: str, size: str) -> Callable[[], object]:
    """The call that is measured; what it needs is imported and built."""
    import megatron_ucp as ucp

    if what in ON_RANKS:
        engine = _engine(size, zero=1 if what == "live export" else 3)
        if what == "live export":
            return lambda: engine.ucp_export_hf(output)
        if what == "load":
            return lambda: ucp.load(engine, source, family="gpt")
        ucp.load(engine, source, family="gpt")
        return lambda: engine.save_checkpoint(output, tag="saved")
    import importlib.util

    # imports apart; the commits have them at different places
    for name in ("convert", "export", "import_hf", "hugging_face.export", "hugging_face.import_hf"):
        module = f"megatron_ucp.reshard.{name}"
        try:
            if importlib.util.find_spec(module):
                importlib.import_module(module)
        except ModuleNotFoundError:  # its folder is not there yet
            continue
    calls: dict[str, Callable[[], object]] = {
        "universal": lambda: ucp.convert(source, output, to="universal"),
        "native": lambda: ucp.convert(source, output, target=ucp.Mesh(dp=4, zero=3)),
        "torch_dist": lambda: ucp.convert(source, output, to="torch_dist"),
        "export": lambda: ucp.export_hf(source, output, dtype="float32"),
        "import": lambda: ucp.import_hf(source, output, mesh=ucp.Mesh(dp=2, zero=1)),
    }
    return calls[what]


def _engine(size: str, zero: int) -> Any:
    """A DeepSpeed engine of megatron-core's GPT, without states of an optimizer."""
    import deepspeed
    import torch.distributed as dist

    from benchmarks.cases import Mesh
    from benchmarks.model import make_engine

    dist.init_process_group("gloo")
    deepspeed.init_distributed("gloo", dist_init_required=False)
    layers, width, vocabulary = SIZES[size]
    sizes = {"layers": layers, "width": width, "vocabulary": vocabulary}
    return make_engine(Mesh(zero, tp=1), sizes, attach=True)


def child(what: str, source: str, output: str, size: str, marker: str) -> None:
    """One measurement; prints its seconds, and those of processors. Two files show a tracer where
    it began and ended."""
    call = prepared(what, source, output, size)
    rank = os.environ.get("RANK", "0")
    _barrier()
    Path(f"{marker}.begin.{rank}").touch()
    started, busy = time.perf_counter(), time.process_time()
    call()
    busy = time.process_time() - busy
    _barrier()
    seconds = time.perf_counter() - started
    Path(f"{marker}.end.{rank}").touch()
    print(seconds, busy, flush=True)
    _barrier()
    if "RANK" in os.environ:
        os._exit(0)  # what both codes leave to torch is not measured


def _barrier() -> None:
    if "RANK" in os.environ:
        import torch.distributed as dist

        dist.barrier()


# ---- measuring from outside ----


@dataclass
class Bench:
    """One source, and both codes' figures on it."""

    codes: dict[str, Path]
    size: str
    folder: Path
    seconds: dict[str, list[float]] = field(default_factory=dict)
    cpu_seconds: dict[str, list[float]] = field(default_factory=dict)
    anon_bytes: dict[str, int] = field(default_factory=dict)
    read_bytes: dict[str, int] = field(default_factory=dict)

    def sources(self) -> None:
        from benchmarks.tool import written

        layers, width, vocabulary = SIZES[self.size]
        sizes = (
            f"layers={layers},hidden={width},heads={HEADS},ffn={4 * width},"
            f"vocab={vocabulary},positions=1024,tied=1"
        )
        self.native = written(self.folder, sizes)
        self.model = self.folder / "model"
        call = ["export", str(self.native), str(self.model), self.size]
        subprocess.run(
            self.command(*call), check=True, env=self.environment("new", None), cwd=self.folder
        )

    def command(self, *arguments: str) -> list[str]:
        marker = str(self.folder / "marker")
        return [sys.executable, "-m", "benchmarks.commits", "--child", *arguments, marker]

    def environment(self, code: str, rank: int | None, world: int = 1) -> dict[str, str]:
        found = {**os.environ, "PYTHONPATH": f"{self.codes[code]}:{ROOT}"}
        if rank is not None:
            found |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
            found |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self.port)}
        return found

    def once(self, what: str, code: str, *, traced: bool = False) -> None:
        """One operation by one code, in a process of its own, or two."""
        shutil.rmtree(self.folder / "out", ignore_errors=True)
        for path in self.folder.glob("marker.*"):
            path.unlink()
        os.sync()
        ranks = [*range(ON_RANKS[what])] if what in ON_RANKS else [None]
        processes = self._started(what, code, ranks, traced)
        most = watched_together(processes)
        lines = [process.communicate()[0].split() for process in processes]
        if any(process.returncode for process in processes):
            raise SystemExit(f"{what} of the {code} code failed")
        name = f"{what} {code}"
        if traced:
            self.read_bytes[name] = sum(self._read(what, rank or 0) for rank in ranks)
            return
        self.seconds.setdefault(name, []).append(max(float(words[-2]) for words in lines))
        self.cpu_seconds.setdefault(name, []).append(sum(float(words[-1]) for words in lines))
        self.anon_bytes[name] = max(self.anon_bytes.get(name, 0), most)

    def _source(self, what: str) -> Path:
        return self.model if what == "import" else self.native

    def _started(
        self, what: str, code: str, ranks: list[Any], traced: bool
    ) -> list["subprocess.Popen[str]"]:
        """The processes of an operation; under strace, where it is traced."""
        from benchmarks.load import TRACED
        from tests.ranks import free_port

        self.port = free_port()
        arguments = (what, str(self._source(what)), str(self.folder / "out"), self.size)
        strace = ["strace", "-f", "-y", "-e", TRACED, "-o"]
        return [
            subprocess.Popen(
                [*([*strace, str(self._log(rank or 0))] if traced else []), *command],
                env=self.environment(code, rank, len(ranks)),
                cwd=self.folder,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            for command in [self.command(*arguments)]
            for rank in ranks
        ]

    def _log(self, rank: int) -> Path:
        return self.folder / f"strace.{rank}"

    def _read(self, what: str, rank: int) -> int:
        from benchmarks.load import count_bytes

        text = self._log(rank).read_text(errors="replace")
        self._log(rank).unlink()
        begin, end = (str(self.folder / f"marker.{word}.{rank}") for word in ("begin", "end"))
        return count_bytes(text, str(self._source(what)), begin, end)

    def claims(self) -> list[dict[str, Any]]:
        from benchmarks.tool import claim

        rows = []
        for what in OPERATIONS:
            old, new = f"{what} old", f"{what} new"
            if new not in self.seconds:
                continue
            for word, each in (("seconds", self.seconds), ("processor", self.cpu_seconds)):
                value = statistics.median(each[new]) / statistics.median(each[old])
                rows.append(claim(f"{what}, {word}", value, LIMIT))
            anon = self.anon_bytes[new] / self.anon_bytes[old]
            rows.append(claim(f"{what}, peak RssAnon", anon, MEMORY_LIMIT))
            if self.read_bytes.get(old):
                read = self.read_bytes[new] / self.read_bytes[old]
                rows.append(claim(f"{what}, bytes read", read, 1.0))
        return rows


def measure(bench: Bench, operations: list[str], repetitions: int) -> dict[str, Any]:
    bench.sources()
    for what in operations:
        for repetition in range(repetitions + 1):  # the first one warms up
            for code in ("old", "new") if repetition % 2 else ("new", "old"):
                bench.once(what, code)
            if not repetition:
                for code in ("old", "new"):
                    del bench.seconds[f"{what} {code}"], bench.cpu_seconds[f"{what} {code}"]
        if shutil.which("strace"):
            for code in ("old", "new"):
                bench.once(what, code, traced=True)
        print(f"{bench.size}: {what} done", flush=True)
    return {
        "claims": bench.claims(),
        "seconds": bench.seconds,
        "cpu_seconds": bench.cpu_seconds,
        "anon_bytes": bench.anon_bytes,
        "read_bytes": bench.read_bytes,
    }


def watched_together(processes: list["subprocess.Popen[str]"]) -> int:
    """The peak of RssAnon of any of some processes, until all have ended."""
    from benchmarks.tool import anon_bytes

    most = 0
    while any(process.poll() is None for process in processes):
        most = max(most, *(anon_bytes(process.pid) for process in processes))
        time.sleep(0.01)
    return most


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("commit", help="the earlier one, as git names it")
    parser.add_argument("--sizes", default="124M,1B", help="124M, 1B, tiny")
    parser.add_argument("--operations", default=",".join(OPERATIONS))
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument(
        "--folder", type=Path, help="where the checkpoints go (default: a temporary folder)"
    )
    return parser.parse_args()


def unpacked(commit: str, folder: Path) -> Path:
    """The package as it was at a commit."""
    folder.mkdir()
    command = ["git", "archive", commit, "megatron_ucp"]
    archive = subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive.stdout, check=True)
    return folder


def show(size: str, commit: str, rows: list[dict[str, Any]]) -> None:
    print(f"\n{size}, new over {commit}")
    for row in rows:
        met = "met" if row["met"] else "MISSED"
        print(f"{row['what']:30} {row['ratio']:8.3f}   {row['kind']} {row['limit']:g}   {met}")


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        child(*sys.argv[2:7])
        return
    from benchmarks.machine import description

    args = arguments()
    found: dict[str, Any] = {}
    for size in args.sizes.split(","):
        with tempfile.TemporaryDirectory(dir=args.folder) as place:
            codes = {"old": unpacked(args.commit, Path(place, "old")), "new": ROOT}
            bench = Bench(codes, size, Path(place))
            measured = measure(bench, args.operations.split(","), args.repetitions)
        head = {"commit": args.commit, "machine": description(), "repetitions": args.repetitions}
        found[size] = {**head, **measured}
        show(size, args.commit, measured["claims"])
    if "tiny" not in args.sizes:  # sizes that were not measured now stay as they were
        known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        RESULTS.write_text(json.dumps({**known, **found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
