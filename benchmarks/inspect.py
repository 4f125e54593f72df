"""`megatron-ucp inspect`: seconds on the manifest of 16,384 ranks, on 64 files without a manifest,
and what Python takes alone.

    python -m benchmarks.inspect

Wall time of a whole process each, the best of several, and as a ratio to `python -c pass`. The
files of the 16,384 ranks are empty but for their sizes: with a manifest inspect opens none of them.
Results: benchmarks/results/inspect.json, "Many ranks" in docs/reference/performance.md.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks import frame
from benchmarks.paper import dense, written
from megatron_ucp.core.manifest import FILE_NAME
from megatron_ucp.core.manifest_json import to_json
from megatron_ucp.core.mesh import Mesh

LIMIT_S = 1.0
SMALL = "layers=83,hidden=16,heads=1,vocab=64,positions=16"  # a thousand parameters


def measure(options: argparse.Namespace) -> dict[str, Any]:
    folders = {"manifest": options.folder / "manifest", "files": options.folder / "files"}
    write_manifest(folders["manifest"])
    written(options.folder, SMALL, mesh=Mesh(dp=63, zero=1)).rename(folders["files"])
    (folders["files"] / FILE_NAME).unlink()
    alone = seconds_of(options.repetitions, "-c", "pass")
    each: dict[str, Any] = {}
    for what, folder in folders.items():
        words = ("-m", "megatron_ucp.cli", "inspect", str(folder))
        seconds = seconds_of(options.repetitions, *words)
        count = len(os.listdir(folder))
        each[what] = {"seconds": seconds, "over_python": seconds / alone, "files": count}
    rows = [frame.claim(f"seconds, {what}", one["seconds"], LIMIT_S) for what, one in each.items()]
    return {
        "claims": rows,
        "python_seconds": alone,
        "manifest_bytes": (folders["manifest"] / FILE_NAME).stat().st_size,
        **each,
    }


def seconds_of(repetitions: int, *words: str) -> float:
    """Of the fastest of several processes."""
    command = [sys.executable, *words]
    out = subprocess.DEVNULL
    return frame.best(repetitions, lambda: subprocess.run(command, stdout=out, check=True))


def write_manifest(folder: Path) -> None:
    """A dense GPT on paper: every file that DeepSpeed would write, as a hole of its size, and the
    manifest."""
    folder.mkdir()
    manifest = dense()
    for entry in manifest.files:
        (folder / entry.name).touch()
        os.truncate(folder / entry.name, entry.size_bytes)
    (folder / FILE_NAME).write_text(to_json(manifest))


if __name__ == "__main__":
    raise SystemExit(frame.main("inspect"))
