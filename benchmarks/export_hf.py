"""Exports to Hugging Face against copying the same bytes, and against stock's zero_to_fp32: seconds
and memory.

    python -m benchmarks.export_hf                  # 124M and 1B parameters of two families
    python -m benchmarks.export_hf --sizes tiny     # to see that it runs

Every ratio is of medians of one run, the repetitions interleaved, the first one not counted. Each
measurement is a process of its own, its imports apart, for stock's script too; the copy is `cp` of
what was written, and `sync`, as an export syncs. As many bytes as will be written are written and
removed before each one: memory that a virtual machine has given back to its host takes a second for
each gigabyte when it is next used, whoever does it. Memory is the peak of RssAnon in /proc, read
from outside, over that of a bare interpreter. Sources are written by this package's writer (bf16,
ZeRO-1, two ranks). Writes benchmarks/results/export_hf.json.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.machine import description
from benchmarks.tool import claim, watched, written

RESULTS = Path(__file__).parent / "results" / "export_hf.json"
# of about 124 million and about a billion parameters
SIZES = {
    "124M": {
        "gpt": "layers=12,hidden=768,heads=12,ffn=3072,vocab=50304,positions=1024",
        "llama": "layers=12,hidden=768,heads=12,groups=4,ffn=2048,vocab=32000",
    },
    "1B": {
        "gpt": "layers=24,hidden=1792,heads=14,ffn=7168,vocab=50304,positions=1024",
        "llama": "layers=22,hidden=2048,heads=32,groups=4,ffn=5632,vocab=32000",
    },
    "tiny": {
        "gpt": "layers=2,hidden=64,heads=4,ffn=256,vocab=512,positions=64",
        "llama": "layers=2,hidden=64,heads=4,groups=2,ffn=176,vocab=512",
    },
}
MOST_MIB, MOST_GROWTH_MIB = 256.0, 16.0


def supply(folder: Path, size_bytes: int) -> None:
    """Has the system's memory there for a file of that size."""
    piece, path = bytes(2 * 2**20), folder / "supply"
    with path.open("wb", buffering=0) as file:
        for _ in range(0, size_bytes, len(piece)):
            file.write(piece)
    path.unlink()


def child(what: str, source: str, output: str, size_bytes: str) -> None:
    """One measurement, of an export that writes so many bytes; prints its seconds."""
    import megatron_ucp as ucp
    from megatron_ucp.reshard.hugging_face import export  # imports apart

    del export
    call: Callable[[], object] = partial(ucp.export_hf, source, output, dtype=what)
    if what == "stock":
        from deepspeed.utils import zero_to_fp32

        folder, tag = str(Path(source).parent), Path(source).name
        convert = zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict
        call = partial(convert, folder, output, safe_serialization=True, tag=tag)
    supply(Path(output).parent, int(size_bytes))
    started = time.perf_counter()
    call()
    print(time.perf_counter() - started)


class Bench:
    """One source, and everything that is measured on it."""

    def __init__(self, source: Path, folder: Path) -> None:
        self.source, self.out = source, folder / "out"
        self.seconds: dict[str, list[float]] = {}
        self.anon: dict[str, int] = {}
        self.bytes: dict[str, int] = {}

    def export(self, what: str) -> None:
        """One measured process; `what` is the dtype, or "stock"."""
        shutil.rmtree(self.out, ignore_errors=True)
        subprocess.run(["sync"], check=True)
        size_bytes = self.bytes.get("float32" if what == "stock" else what, 0)
        command = [sys.executable, "-m", "benchmarks.export_hf", "--child", what]
        line, anon, _ = watched([*command, str(self.source), str(self.out), str(size_bytes)])
        self.seconds.setdefault(what, []).append(float(line))
        self.anon[what] = max(self.anon.get(what, 0), anon)

    def copy(self, what: str) -> None:
        """Copies what the last export has written."""
        subprocess.run(["sync"], check=True)
        other = self.out.with_name("copy")
        supply(other.parent, self.bytes.get(what, 0))
        started = time.perf_counter()
        subprocess.run(["sh", "-c", f"cp -r {self.out} {other} && sync"], check=True)
        self.seconds.setdefault(f"copy of {what}", []).append(time.perf_counter() - started)
        self.bytes[what] = sum(path.stat().st_size for path in other.iterdir())
        shutil.rmtree(other)

    def once(self, stock: bool) -> None:
        for what in ("bfloat16", "float32"):
            self.export(what)
            self.copy(what)
        if stock:
            self.export("stock")
        shutil.rmtree(self.out, ignore_errors=True)

    def median(self, name: str) -> float:
        return statistics.median(self.seconds[name])


def claims(bench: Bench, family: str, bare: int) -> list[dict[str, Any]]:
    """What was claimed and what was measured; `bare` bytes are an interpreter's own."""
    rows = [
        claim(
            f"{family}, {what} / cp and sync",
            bench.median(what) / bench.median(f"copy of {what}"),
            1.1,
        )
        for what in ("bfloat16", "float32")
    ]
    ratio = bench.median("stock") / bench.median("float32")
    rows.append(claim(f"{family}, zero_to_fp32 / export in float32", ratio, 8.0, "at least"))
    most = max(bench.anon[what] for what in ("bfloat16", "float32")) - bare
    name = f"{family}, peak RssAnon over a bare interpreter / MiB"
    return [*rows, claim(name, most / 2**20, MOST_MIB)]


def measure(size: str, family: str, repetitions: int, folder: Path) -> dict[str, Any]:
    place = folder / family
    place.mkdir()
    bench = Bench(written(place, SIZES[size][family], family), place)
    bench.once(stock=False)
    bench.seconds.clear()
    for repetition in range(repetitions):
        bench.once(stock=size != "1B" or repetition == repetitions - 1)
        print(f"{size} {family}: repetition {repetition + 1} of {repetitions}", flush=True)
    bare = watched([sys.executable, "-c", "import time; time.sleep(0.3); print(0)"])[1]
    shutil.rmtree(place)
    return {
        "written_bytes": bench.bytes,
        "claims": claims(bench, family, bare),
        "seconds": bench.seconds,
        "anon_bytes": {"bare": bare, **bench.anon},
    }


def growth(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Whether the peak of memory grew with the model, where both sizes were measured."""
    if not {"124M", "1B"} <= {*found}:
        return []
    rows = []
    for family in SIZES["1B"]:
        small, large = (
            max(found[size][family]["anon_bytes"][what] for what in ("bfloat16", "float32"))
            for size in ("124M", "1B")
        )
        what = f"{family}, peak RssAnon at 1B over that at 124M / MiB"
        rows.append(claim(what, (large - small) / 2**20, MOST_GROWTH_MIB))
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        met = "met" if row["met"] else "MISSED"
        print(f"{row['what']:60} {row['ratio']:8.2f}   {row['kind']} {row['limit']:g}   {met}")


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        child(*sys.argv[2:6])
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
            found[size] = {"machine": description(), "repetitions": args.repetitions}
            for family in SIZES[size]:
                found[size][family] = measure(size, family, args.repetitions, Path(folder))
                show(found[size][family]["claims"])
    show(growth(found))
    if "tiny" not in args.sizes:  # sizes that were not measured now stay as they were
        old = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        RESULTS.write_text(json.dumps({**old, **found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
