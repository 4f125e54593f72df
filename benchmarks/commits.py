"""This code against an earlier commit's: loads, saves, conversions, exports and imports. Seconds,
memory, and bytes read. A tool for maintainers, of whose results none is kept or shown.

    python -m benchmarks.commits 3c66fb3              # 124M and 1B parameters: an hour, 60 GB
    python -m benchmarks.commits 3c66fb3 --tiny       # to see that it runs

Every ratio is new over old, the two in turns. Each measurement is a process of its own (two for
loads and saves: DeepSpeed at ZeRO-3; four for the live export: at ZeRO-1), its imports apart. Bytes
read are those of the source's files, counted by strace in one more run. Sources are written by this
package's writer (bf16, ZeRO-1, two ranks). Writes benchmarks/results/commits.json.
"""

import argparse
import os
import shutil
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import megatron_ucp as ucp
from benchmarks import frame
from benchmarks.tool import import_all, native, universal

KINDS = "seconds", "processor"
LIMIT, MEMORY_LIMIT, READ_LIMIT = 1.03, 1.01, 1.0  # memory is seen every 10 ms


def measure(size: str, options: argparse.Namespace) -> dict[str, Any]:
    from benchmarks.model import text_of
    from benchmarks.paper import written

    codes = {"new": frame.ROOT, "old": unpacked(options.commit, options.folder / "code")}
    bench = Bench(codes, size, options.folder, written(options.folder, text_of(size)))
    found: list[dict[str, Any]] = []
    for what in options.operations.split(","):
        ways = {code: partial(bench.once, what, code) for code in codes}
        seconds = frame.in_turns(ways, options.repetitions)
        rows = [(f"{what}, {kind}", f"new {kind}", f"old {kind}", LIMIT) for kind in KINDS]
        found += frame.claims_of(seconds, rows)
        sizes = bench.apart.anon_bytes
        memory = sizes[f"{what} new"] / sizes[f"{what} old"]
        found.append(frame.claim(f"{what}, peak RssAnon", memory, MEMORY_LIMIT))
        if shutil.which("strace"):
            read = {code: bench.call(what, code, reads=True).read_bytes for code in codes}
            ratio = read["new"] / read["old"] if read["old"] else 1.0
            found.append(frame.claim(f"{what}, bytes read", ratio, READ_LIMIT))
    return {"commit": options.commit, "claims": found}


def unpacked(commit: str, folder: Path) -> Path:
    """The package as it was at a commit, and the models that use it."""
    folder.mkdir()
    command = ["git", "archive", commit, "megatron_ucp", "pretrain"]
    archive = subprocess.run(command, cwd=frame.ROOT, capture_output=True, check=True)
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive.stdout, check=True)
    return folder


class Bench:
    """One source, and both codes' figures on it."""

    def __init__(self, codes: dict[str, Path], size: str, folder: Path, source: Path) -> None:
        self.codes, self.size, self.out, self.source = codes, size, folder / "out", source
        self.model, self.apart = folder / "model", frame.Apart()
        frame.alone(export, source, self.model)

    def once(self, what: str, code: str) -> dict[str, float]:
        """One operation by one code: its seconds, and those of processors."""
        taken = self.call(what, code)
        return {f"{code} seconds": taken.seconds, f"{code} processor": taken.cpu_seconds}

    def call(self, what: str, code: str, reads: bool = False) -> frame.Alone:
        shutil.rmtree(self.out, ignore_errors=True)
        os.sync()
        source = self.model if what == "import" else self.source
        job, ranks = OPERATIONS[what]
        options = {"ranks": ranks, "code": self.codes[code], "reads": source if reads else None}
        name = "" if reads else f"{what} {code}"  # a traced one takes more memory
        arguments = [source, self.out, *([self.size] if ranks else [])]
        return self.apart.call(name, job, *arguments, **options)


# ---- what the measured processes do, with either code


def load(source: str, output: str, size: str) -> Callable[[], Any]:
    engine = engine_of(size, zero=3)
    return lambda: ucp.load(engine, source, family="gpt")


def save(source: str, output: str, size: str) -> Callable[[], Any]:
    engine = engine_of(size, zero=3)
    ucp.load(engine, source, family="gpt")
    return lambda: engine.save_checkpoint(output, tag="saved")


def live_export(source: str, output: str, size: str) -> Callable[[], Any]:
    engine = engine_of(size, zero=1)
    return lambda: engine.ucp_export_hf(output)


def engine_of(size: str, zero: int) -> Any:
    """A DeepSpeed engine of megatron-core's GPT, without states of an optimizer."""
    from benchmarks.model import SIZES, Mesh, make_engine, start

    start()
    return make_engine(Mesh(zero, tp=1), SIZES[size], attach=True)


def torch_dist(source: str, output: str) -> Callable[[], Any]:
    import_all()
    return lambda: ucp.convert(source, output, to="torch_dist")


def export(source: str, output: str) -> Callable[[], Any]:
    import_all()
    return lambda: ucp.export_hf(source, output, dtype="float32")


def import_(source: str, output: str) -> Callable[[], Any]:
    import_all()
    return lambda: ucp.import_hf(source, output, mesh=ucp.Mesh(dp=2, zero=1))


# the job, and on how many ranks it runs
OPERATIONS: dict[str, tuple[Any, int]] = {
    "load": (load, 2),
    "save": (save, 2),
    "live export": (live_export, 4),
    "universal": (universal, 0),
    "native": (native, 0),
    "torch_dist": (torch_dist, 0),
    "export": (export, 0),
    "import": (import_, 0),
}


def more(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("commit", help="the earlier one, as git names it")
    parser.add_argument("--operations", default=",".join(OPERATIONS))


if __name__ == "__main__":
    sizes = ("124M", "1B")
    raise SystemExit(frame.main("commits", sizes, repetitions=3, by_size=True, more=more))
