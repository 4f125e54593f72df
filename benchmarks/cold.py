"""Loads from files that no cache holds, against `dd` of the same files: bytes a second.

    python -m benchmarks.cold                  # 124M parameters, 2 GB of disk
    python -m benchmarks.cold --sizes 1B       # 12 GB of disk, 24 GB of memory
    python -m benchmarks.cold --sizes tiny     # to see that it runs

One rank loads all of a checkpoint of two, ZeRO-1, and `dd bs=1M` reads the files of its optimizer
one after the other, in turns. Before each one the system forgets these files
(posix_fadvise DONTNEED), and mincore would show them gone. A rate is of the bytes that were read.
Writes benchmarks/results/cold.json.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.machine import description
from benchmarks.tool import written

RESULTS = Path(__file__).parent / "results" / "cold.json"
# layers, width, vocabulary
SIZES = {"124M": (12, 768, 50304), "1B": (24, 1824, 50304), "tiny": (2, 48, 500)}
LEAST = 0.8


def forget(folder: Path) -> None:
    """No file of a folder is in the system's cache afterwards."""
    for path in folder.iterdir():
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def dd(folder: Path) -> float:
    """Bytes a second at which `dd` reads the optimizer's files."""
    files = sorted(folder.glob("*optim_states.pt"))
    forget(folder)
    started = time.perf_counter()
    for path in files:
        words = ["dd", f"if={path}", "of=/dev/null", "bs=1M", "status=none"]
        subprocess.run(words, check=True)
    return sum(path.stat().st_size for path in files) / (time.perf_counter() - started)


def engine_of(size: str, **attached: Any) -> Any:
    """A DeepSpeed engine of megatron-core's GPT on one rank; options of `ucp.attach`."""
    import deepspeed
    import torch.distributed as dist

    import megatron_ucp as ucp
    from benchmarks.cases import Mesh
    from benchmarks.model import family, make_engine

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    places = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    os.environ.update({**places, "MASTER_PORT": port, "MEGATRON_UCP_LOG": "quiet"})
    dist.init_process_group("gloo")
    deepspeed.init_distributed("gloo", dist_init_required=False)
    layers, width, vocabulary = SIZES[size]
    sizes = {"layers": layers, "width": width, "vocabulary": vocabulary}
    mesh = Mesh(1, tp=1)
    return ucp.attach(make_engine(mesh, sizes), family=family(mesh), **attached)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", choices=SIZES, default="124M")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=None)
    args = parser.parse_args()
    import megatron_ucp as ucp

    layers, width, vocabulary = SIZES[args.sizes]
    sizes = f"layers={layers},hidden={width},heads=12,ffn={4 * width},vocab={vocabulary}"
    rates: dict[str, list[float]] = {"load": [], "dd": [], "warm": []}
    worked: dict[str, list[float]] = {"load": [], "warm": []}
    with tempfile.TemporaryDirectory(dir=args.folder) as held:
        source = written(Path(held), f"{sizes},positions=1024,tied=1")
        engine = engine_of(args.sizes)
        for turn in range(args.repetitions + 1):
            seconds: dict[str, float] = {}
            for way in ("load", "warm"):
                if way == "load":
                    forget(source)
                started, busy = time.perf_counter(), time.process_time()
                report = ucp.load(engine, source, family="gpt")
                seconds[way] = time.perf_counter() - started
                worked[way].append(time.process_time() - busy)
            by_dd = dd(source)
            if turn:  # the first one makes the optimizer's states
                for way, took in seconds.items():
                    rates[way].append(report.read_bytes / took)
                rates["dd"].append(by_dd)
                texts = {name: f"{values[-1] / 1e9:.2f} GB/s" for name, values in rates.items()}
                busy = {way: f"{values[-1]:.2f} s" for way, values in worked.items()}
                print(texts, "of processors:", busy, flush=True)
    ratio = statistics.median(rates["load"]) / statistics.median(rates["dd"])
    print(f"load / dd, cold: {ratio:.2f}, at least {LEAST}; load {os.getloadavg()}")
    tree = {
        "machine": description(),
        "rates": rates,
        "busy": worked,
        "ratio": ratio,
        "least": LEAST,
    }
    if args.sizes != "tiny":
        known = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
        RESULTS.write_text(json.dumps({**known, args.sizes: tree}, indent=1) + "\n")


if __name__ == "__main__":
    main()
