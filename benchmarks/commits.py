"""This code against an earlier commit's: loads, saves, conversions, exports and imports. Seconds,
memory, and bytes read. A tool that compares two commits: no page shows its figures.

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

LIMIT, MEMORY_LIMIT, READ_LIMIT = 1.03, 1.01, 1.0  # memory is seen every 10 ms


def measure(size: str, options: argparse.Namespace) -> dict[str, Any]:
    from benchmarks.model import text_of
    from benchmarks.paper import written

    codes = {"old": unpacked(options.commit, options.folder / "code"), "new": frame.ROOT}
    bench = Bench(codes, size, options.folder, written(options.folder, text_of(size)))
    seconds: frame.Seconds = {}
    for what in options.operations.split(","):
        ways = {f"{what} {code}": partial(bench.once, what, code) for code in codes}
        seconds |= frame.in_turns(ways, options.repetitions)
        for code in codes if shutil.which("strace") else ():
            bench.once(what, code, is_traced=True)
    busy = {name.removesuffix(BUSY): seconds.pop(name) for name in [*seconds] if BUSY in name}
    claims: list[dict[str, Any]] = []
    for what in options.operations.split(","):
        old, new = f"{what} old", f"{what} new"
        claims += frame.claims_of(seconds, [(f"{what}, seconds", new, old, LIMIT)])
        claims += frame.claims_of(busy, [(f"{what}, processor", new, old, LIMIT)])
        anon = bench.anon_bytes[new] / bench.anon_bytes[old]
        claims.append(frame.claim(f"{what}, peak RssAnon", anon, MEMORY_LIMIT))
        if bench.read_bytes.get(old):
            read = bench.read_bytes[new] / bench.read_bytes[old]
            claims.append(frame.claim(f"{what}, bytes read", read, READ_LIMIT))
    return {
        "commit": options.commit,
        "claims": claims,
        "seconds": seconds,
        "cpu_seconds": busy,
        "anon_bytes": bench.anon_bytes,
        "read_bytes": bench.read_bytes,
    }


def unpacked(commit: str, folder: Path) -> Path:
    """The package as it was at a commit."""
    folder.mkdir()
    command = ["git", "archive", commit, "megatron_ucp"]
    archive = subprocess.run(command, cwd=frame.ROOT, capture_output=True, check=True)
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive.stdout, check=True)
    return folder


BUSY = " of processors"


class Bench:
    """One source, and both codes' figures on it."""

    def __init__(self, codes: dict[str, Path], size: str, folder: Path, source: Path) -> None:
        self.codes, self.size, self.out, self.source = codes, size, folder / "out", source
        self.model = folder / "model"
        self.anon_bytes: dict[str, int] = {}
        self.read_bytes: dict[str, int] = {}
        frame.alone(export, source, self.model)

    def once(self, what: str, code: str, is_traced: bool = False) -> dict[str, float]:
        """One operation by one code: its seconds, and those of processors."""
        shutil.rmtree(self.out, ignore_errors=True)
        os.sync()
        source, name = self.model if what == "import" else self.source, f"{what} {code}"
        job, ranks = OPERATIONS[what]
        arguments = [source, self.out, *([self.size] if ranks else [])]
        reads = source if is_traced else None
        taken: frame.Alone = frame.alone(
            job, *arguments, ranks=ranks, reads=reads, code=self.codes[code]
        )
        if is_traced:
            self.read_bytes[name] = taken.read_bytes
        else:
            self.anon_bytes[name] = max(self.anon_bytes.get(name, 0), taken.anon_bytes)
        return {name: taken.seconds, f"{name}{BUSY}": taken.cpu_seconds}


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
