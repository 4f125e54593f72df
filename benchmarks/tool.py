"""The tool against copying, reading and summing the same bytes, and against stock's converter:
seconds, memory, disk.

    python -m benchmarks.tool                      # 124M and 1B parameters: 25 minutes, 60 GB
    python -m benchmarks.tool --sizes 124M --repetitions 5
    python -m benchmarks.tool --tiny               # to see that it runs

Each measurement is a process of its own, its imports apart, for stock's converter too. Memory is
the peak of RssAnon over that of a bare interpreter. The checkpoint of 124 million parameters is
DeepSpeed's own (ZeRO-1, two ranks); the large one is written by this package's writer. Results:
benchmarks/results/tool.json, "The command line" in docs/reference/performance.md.
"""

import argparse
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from isal.isal_zlib import crc32

import megatron_ucp as ucp
from benchmarks import frame

BLOCK, PIECE = 2**20, 64 * 2**20
LEAST = 0.7, "at least"
CLAIMS: list[frame.Claim] = [
    ("convert to universal / cp -r and sync", "universal", "copy", 1.2),
    ("convert to native / cp -r and sync", "native", "copy", 0.7),
    ("stock ds_to_universal / convert to universal", "stock", "universal", 8.0, "at least"),
    ("verify --deep / reading, cold cache", "verify cold", "read cold", 1.4),
    ("reading and CRC-32 alone / verify --deep, warm", "crc warm", "verify warm", *LEAST),
    ("diff / reading both, cold cache", "diff cold", "read both cold", 1.4),
    ("reading and CRC-32 alone of both / diff, warm", "crc both warm", "diff warm", *LEAST),
]
MEMORY_LIMIT_MIB, DISK_LIMIT = 256.0, 1.02


def measure(size: str, options: argparse.Namespace) -> dict[str, Any]:
    """Conversions and the copy, then verify and diff, cold and warm, of one checkpoint; of the
    largest one stock's converter runs once."""
    source = source_of(size, options.folder)
    bench = Bench(source, options.folder)
    ways = {name: partial(bench.write, name) for name in WRITES}
    ways |= {name: partial(bench.read, name) for name in READS}
    rare = {"stock": ways.pop("stock")} if size == "1B" else {}
    seconds = frame.in_turns(rare, 0, rotates=False, keeps_first=True)
    seconds |= frame.in_turns(ways, options.repetitions - 1, rotates=False, keeps_first=True)
    most = max(bench.disk["native"]) / max(bench.disk["native, when done"])
    memory = ("universal", "native", "verify", "diff"), MEMORY_LIMIT_MIB
    return {
        "bytes": frame.bytes_of(source),
        "claims": [
            *frame.claims_of(seconds, CLAIMS),
            bench.apart.claim("", *memory),
            frame.claim("most on disk while converting / the output", most, DISK_LIMIT),
        ],
        "seconds": seconds,
        "anon_bytes": bench.apart.anon_bytes,
        "disk_bytes": bench.disk,
    }


def source_of(size: str, folder: Path) -> Path:
    """DeepSpeed's own checkpoint of 124 million parameters, or a written one."""
    from benchmarks import load, model, paper

    if size != "124M":
        return paper.written(folder, paper.GPT[size])
    frame.on_ranks(2, load.saved, str(folder), (load.Z1,), model.SIZES[size])
    return folder / str(load.Z1)


class Bench:
    """One source, and every way that is measured on it; each returns its seconds by name."""

    def __init__(self, source: Path, folder: Path) -> None:
        self.source, self.out, self.other = source, folder / "out", folder / "other"
        self.apart = frame.Apart()
        self.disk: dict[str, list[int]] = {}

    def write(self, name: str) -> dict[str, float]:
        """A conversion into a new folder, or a copy."""
        frame.empty(self.out)
        os.sync()
        output = self.out / "x"
        taken = self.apart.call(name, WRITES[name], self.source, output, disk=self.out)
        self.disk.setdefault(name, []).append(taken.disk_bytes)
        if name == "native":
            self.disk.setdefault("native, when done", []).append(frame.disk_bytes(output))
            shutil.rmtree(self.other, ignore_errors=True)
            output.rename(self.other)
        return {name: taken.seconds}

    def read(self, name: str) -> dict[str, float]:
        """What reads the source, or both folders, with a cold or a warm page cache."""
        job, is_both = READS[name]
        folders = (self.source, self.other) if is_both else (self.source,)
        seconds: dict[str, float] = {}
        if name.endswith("cold"):
            frame.forget(self.source, self.other)
        else:
            seconds["warming"] = self.apart.call("warming", read, *folders).seconds
        seconds[name] = self.apart.call(name, job, *folders).seconds
        return seconds


# ---- what the measured processes do


def import_all() -> None:
    """Imports what the calls need, which earlier commits have at other places."""
    names = ("convert", "check", "export", "import_hf", "hugging_face.export")
    for name in (*names, "hugging_face.import_hf"):
        with suppress(ModuleNotFoundError):
            import_module(f"megatron_ucp.reshard.{name}")


def universal(source: str, output: str) -> Callable[[], Any]:
    import_all()
    return lambda: ucp.convert(source, output, to="universal")


def native(source: str, output: str) -> Callable[[], Any]:
    import_all()
    return lambda: ucp.convert(source, output, target=ucp.Mesh(dp=4, zero=3))


def stock_universal(source: str, output: str, stage: str = "1") -> Callable[[], Any]:
    """DeepSpeed's own conversion of files of a ZeRO stage, with two workers."""
    from deepspeed.checkpoint import ds_to_universal

    Path(output).mkdir()
    options = argparse.Namespace(
        input_folder=source,
        output_folder=output,
        num_extract_workers=2,
        num_merge_workers=2,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=int(stage) < 3,
    )
    return lambda: ds_to_universal.main(options)


def copy(source: str, output: str) -> Callable[[], Any]:
    return lambda: frame.copy_and_sync(Path(source), Path(output))


def verify(source: str) -> Callable[[], Any]:
    import_all()
    return lambda: require_nothing(ucp.verify(source, deep=True).findings)


def diff(source: str, other: str) -> Callable[[], Any]:
    import_all()
    return lambda: require_nothing(ucp.diff(source, other))


def require_nothing(found: Any) -> None:
    if found:
        raise SystemExit(f"the files differ: {found}")


def read(*folders: str) -> Callable[[], Any]:
    return lambda: read_all(folders, is_summing=False)


def crc(*folders: str) -> Callable[[], Any]:
    return lambda: read_all(folders, is_summing=True)


def read_all(folders: tuple[str, ...], is_summing: bool) -> None:
    """Reads every file in blocks on as many threads as there are cores; also their CRC-32."""

    def piece(path: Path, first: int) -> None:
        sum_, buffer, handle = 0, memoryview(bytearray(BLOCK)), os.open(path, os.O_RDONLY)
        for low in range(first, first + PIECE, BLOCK):
            count = os.preadv(handle, [buffer], low)
            sum_ = crc32(buffer[:count], sum_) if is_summing else 0
        os.close(handle)

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        for path in frame.files_of(*map(Path, folders)):
            for first in range(0, path.stat().st_size, PIECE):
                threads.submit(piece, path, first)


WRITES: dict[str, Any] = {
    "copy": copy,
    "universal": universal,
    "native": native,
    "stock": stock_universal,
}
# the job, and whether it reads both folders
READS: dict[str, tuple[Any, bool]] = {
    "read cold": (read, False),
    "verify cold": (verify, False),
    "read both cold": (read, True),
    "diff cold": (diff, True),
    "crc warm": (crc, False),
    "verify warm": (verify, False),
    "crc both warm": (crc, True),
    "diff warm": (diff, True),
}

if __name__ == "__main__":
    raise SystemExit(frame.main("tool", sizes=("124M", "1B"), repetitions=3, by_size=True))
