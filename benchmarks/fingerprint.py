"""The fingerprint: gigabytes a second on one core, and its share of a load and of a save of 124
million parameters on two ranks.

    python -m benchmarks.fingerprint         # a minute
    python -m benchmarks.fingerprint --tiny  # to see that it runs

A core sums what memory holds in one piece, and rows of a matrix that a tensor-parallel cut leaves
between others. Beside it the bound: isal's CRC-32 of one piece, of the same memory and in the
core's cache. The share of a save is the seconds in the fingerprint's own code over all, that of a
load what it takes longer than one of the same files without a fingerprint; of the rank that takes
longest. Results: benchmarks/results/fingerprint.json, "Loads" in docs/reference/performance.md.
"""

import argparse
import json
import os
import shutil
import time
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from isal.isal_zlib import crc32

import megatron_ucp as ucp
from benchmarks import frame
from benchmarks.model import SIZES, Mesh, close, make_engine, train_step
from megatron_ucp.core.flat import alone
from megatron_ucp.core.layout import Replicate, Shard
from megatron_ucp.core.manifest import FILE_NAME, FINGERPRINT, Manifest, ParamGroup, ParamSpec
from megatron_ucp.core.mesh import Mesh as WholeMesh
from megatron_ucp.core.names import Keeper
from megatron_ucp.core.plan import Slot
from megatron_ucp.reshard.fingerprint import sums_of

RANKS, GBS_LIMIT, LOAD_LIMIT, SAVE_LIMIT = 2, 10.0, 0.03, 0.01
CACHE_BYTES = 2**18
# what a rank of tp=2 has: bytes of a run, and how many
CUTS = {"rows of 3 KB": (3072, 16384), "rows of 12 KB": (12288, 4096), "runs of 64 B": (64, 65536)}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    speeds = {what: round(value, 2) for what, value in speeds_of(options.repetitions).items()}
    size = SIZES["tiny" if options.tiny else "124M"]
    call = (measured_shares, str(options.folder), size, options.repetitions)
    found = frame.on_ranks(RANKS, *call)
    load, save = (max(one[what] for one in found) for what in ("load", "save"))
    claims = [
        frame.claim("a load, on top of one by checksums alone", load, LOAD_LIMIT),
        frame.claim("a save's seconds in the fingerprint", save, SAVE_LIMIT),
        frame.claim(
            "GB/s of one core, rows of 3 KB", speeds["rows of 3 KB"], GBS_LIMIT, "at least"
        ),
    ]
    return {"GB/s": speeds, "claims": claims}


# ---- one core


def speeds_of(repetitions: int) -> dict[str, float]:
    """Gigabytes a second, the best of some repetitions."""
    whole = torch.rand(12 * 2**20)
    data: Any = whole.view(torch.uint8).numpy()
    in_cache = frame.best(9 * repetitions, lambda: crc32(data[:CACHE_BYTES]))
    out = {
        "bound: one piece in the cache": CACHE_BYTES / in_cache,
        "bound: one piece in memory": data.nbytes / frame.best(repetitions, lambda: crc32(data)),
        "one piece": summed((len(whole),), Replicate(), whole, repetitions),
    }
    for what, (size_bytes, count) in CUTS.items():
        own = torch.rand(count * size_bytes // 4)
        shape = count, 2 * size_bytes // 4
        out[what] = summed(shape, Shard("tp", 1), own, repetitions)
    return {what: value / 1e9 for what, value in out.items()}


def summed(shape: tuple[int, ...], layout: Any, own: torch.Tensor, repetitions: int) -> float:
    """Bytes a second of a parameter of which a rank of tp=2 has `own`."""
    cut = layout != Replicate()
    spec = ParamSpec("weight", shape, "float32", layout=layout)
    assert own.numel() == prod(shape) // (2 if cut else 1)
    buffer = alone("weight", own.numel(), (("fp32", "float32"),), 0)
    mesh = WholeMesh(tp=2 if cut else 1)
    manifest = Manifest(
        Keeper.ZERO_1_OR_2, mesh, (spec,), (buffer,), (ParamGroup({}),), (), (), "", "0" * 32, {}
    )
    (held, *_) = manifest.cuts_of(buffer)
    wants = [(Slot(0, held, 0, "fp32"), "fp32")]
    seconds = frame.best(
        repetitions, lambda: sums_of(manifest, wants, lambda _, first, last: own[first:last])
    )
    return own.nbytes / seconds


# ---- on the ranks


def measured_shares(folder: str, size: dict[str, int], repetitions: int) -> dict[str, float]:
    """Of a direct save the seconds in the fingerprint over all, the smallest share of some
    repetitions, as others may work on the machine. Of a load what it takes longer, as a share,
    than one of the same files without a fingerprint, by medians: that one compares checksums."""
    from megatron_ucp.engines import pt_files
    from megatron_ucp.engines import save as common
    from megatron_ucp.engines.deepspeed import save as saves

    mesh = Mesh(1)
    engine = make_engine(mesh, size)
    ucp.attach(engine, save="direct")
    train_step(engine, mesh)
    inside = [0.0]  # seconds in the fingerprint's own code
    for module, name in (
        (saves, "parts_of_memory"),
        (pt_files, "known_sums"),
        (pt_files, "sums_of_parts"),
        (common, "joined_sums"),
        (common, "table_of"),
    ):
        frame.count_seconds(inside, module, name)
    saved: list[float] = []
    for _ in range(repetitions):
        inside[0], started = 0.0, time.perf_counter()
        engine.save_checkpoint(folder, tag="with")
        saved.append(inside[0] / (time.perf_counter() - started))
    if dist.get_rank() == 0:
        without_fingerprint(Path(folder, "with"), Path(folder, "without"))
    dist.barrier()
    ways = {
        "with": lambda: ucp.load(engine, folder, tag="with"),
        "without": lambda: ucp.load(engine, folder, tag="without"),
    }
    loaded = frame.medians(frame.in_turns(ways, repetitions))
    close(engine, mesh)
    return {"save": min(saved), "load": loaded["with"] / loaded["without"] - 1}


def without_fingerprint(tag: Path, copy: Path) -> None:
    """The same files, of which the manifest says none."""
    shutil.copytree(tag, copy, copy_function=os.link)
    manifest = json.loads((copy / FILE_NAME).read_text())
    del manifest["run"][FINGERPRINT]
    (copy / FILE_NAME).unlink()
    (copy / FILE_NAME).write_text(json.dumps(manifest))


if __name__ == "__main__":
    raise SystemExit(frame.main("fingerprint"))
