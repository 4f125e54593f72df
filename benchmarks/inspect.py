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
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch

from benchmarks import frame
from benchmarks.paper import dense
from megatron_ucp.core.manifest import FILE_NAME
from megatron_ucp.core.manifest_json import to_json
from megatron_ucp.formats.deepspeed.buffers import whole_length

LIMIT_S = 1.0


def measure(options: argparse.Namespace) -> dict[str, Any]:
    folders = {"manifest": options.folder / "manifest", "files": options.folder / "files"}
    write_manifest(folders["manifest"])
    write_files(folders["files"])
    alone = seconds_of(options.repetitions, "-c", "pass")
    each: dict[str, Any] = {}
    for what, folder in folders.items():
        words = ("-m", "megatron_ucp.cli", "inspect", str(folder))
        seconds = seconds_of(options.repetitions, *words)
        count = len(os.listdir(folder))
        each[what] = {"seconds": seconds, "over_python": seconds / alone, "files": count}
    return {
        "limit_seconds": LIMIT_S,
        "met": max(one["seconds"] for one in each.values()) <= LIMIT_S,
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


def write_files(folder: Path) -> None:
    """64 files of stock DeepSpeed, without a manifest: 63 partitions at ZeRO-1 of 1,000
    parameters."""
    folder.mkdir()
    parts, shapes = (
        63,
        OrderedDict((f"layers.{n}.weight", torch.Size((63, 2))) for n in range(1000)),
    )
    torch.save(
        {
            "module": OrderedDict(
                (name, torch.zeros(63, 2, dtype=torch.bfloat16)) for name in shapes
            ),
            "buffer_names": [],
            "param_shapes": [shapes],
            "dp_world_size": parts,
            "mp_world_size": 1,
            "global_steps": 7,
            "skipped_steps": 0,
            "ds_config": {"bf16": {"enabled": True}},
            "ds_version": "0.19.8",
        },
        folder / "mp_rank_00_model_states.pt",
    )
    share = torch.zeros(whole_length(126 * 1000, parts) // parts)
    for part in range(parts):
        entry = {"step": torch.tensor(7.0), "exp_avg": share, "exp_avg_sq": share}
        torch.save(
            {
                "optimizer_state_dict": {
                    "zero_stage": 1,
                    "partition_count": parts,
                    "single_partition_of_fp32_groups": [share],
                    "base_optimizer_state": {
                        "state": {0: entry},
                        "param_groups": [{"lr": 0.1, "params": [0]}],
                    },
                }
            },
            folder / f"bf16_zero_pp_rank_{part}_mp_rank_00_optim_states.pt",
        )


if __name__ == "__main__":
    raise SystemExit(frame.main("inspect"))
