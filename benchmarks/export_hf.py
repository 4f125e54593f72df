"""Exports to Hugging Face against copying the same bytes, and against stock's zero_to_fp32: seconds
and memory.

    python -m benchmarks.export_hf            # 124M and 1B parameters of two families
    python -m benchmarks.export_hf --tiny     # to see that it runs

Each measurement is a process of its own, its imports apart, for stock's script too; the copy is
`cp` of what was written, and `sync`, as an export syncs. As many bytes as will be written are
written and removed before each one: memory that a virtual machine has given back to its host takes
a second for each gigabyte when it is next used, whoever does it. Memory is the peak of RssAnon over
that of a bare interpreter. Sources are written by this package's writer (bf16, ZeRO-1, two ranks).
Results: benchmarks/results/export_hf.json, "Hugging Face" in docs/reference/performance.md.
"""

import argparse
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import megatron_ucp as ucp
from benchmarks import frame
from benchmarks.tool import import_all

DTYPES = "bfloat16", "float32"
MEMORY_LIMIT_MIB = 256.0


def measure(size: str, options: argparse.Namespace) -> dict[str, Any]:
    """Of each family; stock's script runs once with the largest models."""
    from benchmarks import paper

    found: dict[str, Any] = {}
    for family, texts in (("gpt", paper.GPT), ("llama", paper.LLAMA)):
        folder = options.folder / family
        folder.mkdir()
        bench = Bench(paper.written(folder, texts[size], family), folder)
        ways: dict[str, Any] = {}
        for dtype in DTYPES:
            ways[dtype] = partial(bench.export, dtype)
            ways[f"copy of {dtype}"] = partial(bench.copy, dtype)
        ways["stock"] = partial(bench.export, "stock")
        rare = {"stock": ways.pop("stock")} if size == "1B" else {}
        seconds = frame.in_turns(ways, options.repetitions, rotates=False)
        seconds |= frame.in_turns(rare, 0, keeps_first=True)
        shutil.rmtree(folder)
        rows: list[frame.Claim] = [
            (f"{family}, {dtype} / cp and sync", dtype, f"copy of {dtype}", 1.1) for dtype in DTYPES
        ]
        what = f"{family}, zero_to_fp32 / export in float32"
        rows.append((what, "stock", "float32", 8.0, "at least"))
        memory = bench.apart.claim(f"{family}, ", DTYPES, MEMORY_LIMIT_MIB)
        found[family] = {
            "written_bytes": bench.bytes,
            "claims": [*frame.claims_of(seconds, rows), memory],
            "seconds": seconds,
            "anon_bytes": bench.apart.anon_bytes,
        }
    return found


class Bench:
    """One source, and every way that is measured on it; each returns its seconds by name."""

    def __init__(self, source: Path, folder: Path) -> None:
        self.source, self.folder, self.out = source, folder, folder / "out"
        self.apart = frame.Apart()
        self.bytes: dict[str, int] = dict.fromkeys(DTYPES, 0)

    def export(self, name: str) -> dict[str, float]:
        """One measured process."""
        shutil.rmtree(self.out, ignore_errors=True)
        job, dtype = WAYS[name]
        taken = self.apart.call(name, job, self.source, self.out, dtype, self.bytes[dtype])
        return {name: taken.seconds}

    def copy(self, dtype: str) -> dict[str, float]:
        """Copies what the last export has written."""
        other = self.folder / "copy"
        self.bytes[dtype] = frame.bytes_of(self.out)
        supply(self.folder, self.bytes[dtype])
        taken = frame.timed(lambda: frame.copy_and_sync(self.out, other))
        shutil.rmtree(other)
        return {f"copy of {dtype}": taken}


# ---- what the measured processes do


def exported(source: str, output: str, dtype: str, size_bytes: str) -> Callable[[], Any]:
    """An export that writes so many bytes."""
    import_all()
    supply(Path(output).parent, int(size_bytes))
    return partial(ucp.export_hf, source, output, dtype=dtype)


def zero_to_fp32(source: str, output: str, _: str, size_bytes: str) -> Callable[[], Any]:
    """DeepSpeed's script."""
    from deepspeed.utils import zero_to_fp32 as stock

    supply(Path(output).parent, int(size_bytes))
    convert = stock.convert_zero_checkpoint_to_fp32_state_dict
    tag = Path(source)
    return partial(convert, str(tag.parent), output, safe_serialization=True, tag=tag.name)


def supply(folder: Path, size_bytes: int) -> None:
    """Has the system's memory there for a file of that size."""
    piece, path = bytes(2 * 2**20), folder / "supply"
    with path.open("wb", buffering=0) as file:
        for _ in range(0, size_bytes, len(piece)):
            file.write(piece)
    path.unlink()


# the job, and what it writes
WAYS: dict[str, tuple[Any, str]] = {
    **{dtype: (exported, dtype) for dtype in DTYPES},
    "stock": (zero_to_fp32, "float32"),
}

if __name__ == "__main__":
    raise SystemExit(frame.main("export_hf", sizes=("124M", "1B"), repetitions=3, by_size=True))
