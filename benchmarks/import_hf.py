"""Loading a Hugging Face folder into a live engine, against one reading of the bytes that a rank
needs: 124 million parameters, two ranks.

    python -m benchmarks.import_hf                         # two minutes
    python -m benchmarks.import_hf --tiny --repetitions 2  # to see that it runs

The folder is an export in fp32 of a save of the same model. `floor` reads as many bytes as a rank
has of the masters, once, into fresh memory. What ZeRO-1 has to do then, whoever loads, is shown
beside it: each rank gets the weights that the other one steps. The page cache is warm. Results:
benchmarks/results/import_hf.json.
"""

import argparse
from pathlib import Path
from typing import Any

import torch.distributed as dist

import megatron_ucp as ucp
from benchmarks import frame
from benchmarks.load import TP1Z1, TP2Z1, Loads, saved
from benchmarks.model import SIZES, Mesh, close, family

RANKS, LIMIT = 2, 1.3


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Of two meshes."""
    folder, size = str(options.folder), SIZES["tiny" if options.tiny else "124M"]
    rows, seconds = list[dict[str, Any]](), dict[str, Any]()
    frame.on_ranks(RANKS, saved, folder, (TP1Z1, TP2Z1), size)
    for mesh in (TP1Z1, TP2Z1):
        found = frame.on_ranks(RANKS, measure_mesh, folder, mesh, size, options.repetitions)[0]
        (row,) = frame.claims_of(found, [(f"load into {mesh} / floor", "load", "floor", LIMIT)])
        middle = frame.medians(found)
        row["over_floor_and_exchange"] = middle["load"] / middle["floor and exchange"]
        rows.append(row)
        seconds[str(mesh)] = found
    return {"ratios": rows, "seconds": seconds, "ranks": RANKS}


def measure_mesh(folder: str, mesh: Mesh, size: dict[str, int], repetitions: int) -> frame.Seconds:
    """Seconds of loads from a Hugging Face folder of the mesh's own save, in fp32, and of one
    reading of as many bytes of it."""
    weights = Path(folder, f"{mesh}_hf")
    if dist.get_rank() == 0:
        ucp.export_hf(Path(folder, str(mesh)), weights, dtype="float32")
    loads = Loads(folder, mesh, size)
    size_bytes = loads.needed_bytes() // 3  # masters alone

    def floor() -> None:
        frame.read_once([weights / "model.safetensors"], size_bytes)

    def floor_and_exchange() -> None:
        floor()
        loads.exchange()

    ways = {
        "floor": floor,
        "floor and exchange": floor_and_exchange,
        "load": lambda: ucp.load(loads.engine, weights, family=family(mesh)),
    }
    seconds = frame.in_turns(ways, repetitions, before=loads.clear)
    close(loads.engine, mesh)
    return seconds


if __name__ == "__main__":
    raise SystemExit(frame.main("import_hf"))
