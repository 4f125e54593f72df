"""Conversions and exports by two processes on a core each, against one process on one core, and
against one process on both: seconds.

    python -m benchmarks.work_sharing                 # 124M parameters in /dev/shm, 3 GB
    python -m benchmarks.work_sharing --sizes 1B      # 24 GB of memory
    python -m benchmarks.work_sharing --sizes tiny    # to see that it runs

A core stands for a node: every process is pinned. Folders lie in memory, so that no disk is the
limit. Ratios are of medians, the repetitions interleaved, the first one not counted; imports and
the meeting of the processes apart. Where others use the machine too, the seconds that processors
worked are the better measure. Writes benchmarks/results/work_sharing.json.
"""

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.machine import description
from benchmarks.tool import LARGE, TINY, written

RESULTS = Path(__file__).parent / "results" / "work_sharing.json"
SIZES = {
    "124M": "layers=12,hidden=768,heads=12,ffn=3072,vocab=50304,positions=1024",
    "1B": LARGE,
    "tiny": TINY,
}
# cores of each process
WAYS = {"one core": ["0"], "two processes": ["0", "1"], "both cores": ["0,1"]}
LEAST = 1.6


def child(what: str, source: str, output: str) -> None:
    """One process of a measurement; prints its seconds."""
    import megatron_ucp as ucp
    from megatron_ucp.reshard import convert  # imports apart
    from megatron_ucp.reshard.hugging_face import export

    del convert, export
    ranks = "RANK" in os.environ
    calls: dict[str, Callable[[], object]] = {
        "native": lambda: ucp.convert(source, output, mesh="dp=4,zero=3", ranks=ranks),
        "universal": lambda: ucp.convert(source, output, to="universal", ranks=ranks),
        "torch_dist": lambda: ucp.convert(source, output, to="torch_dist", ranks=ranks),
        "export": lambda: ucp.export_hf(source, output, dtype="float32", ranks=ranks),
    }
    if ranks:
        import torch.distributed as dist

        dist.init_process_group("gloo")
        dist.barrier()
    started, busy = time.perf_counter(), time.process_time()
    calls[what]()
    print(time.perf_counter() - started, time.process_time() - busy, flush=True)


def measured(what: str, cores: list[str], source: Path, output: Path) -> tuple[float, float]:
    """Seconds until the last process is done, and those of processors of the busiest one."""
    shutil.rmtree(output, ignore_errors=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program = [sys.executable, "-m", "benchmarks.work_sharing", "--child", what]
    running: list[subprocess.Popen[str]] = []
    for rank, own in enumerate(cores):
        places = {"RANK": rank, "WORLD_SIZE": len(cores), "LOCAL_WORLD_SIZE": len(cores)}
        places |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        more = {name: str(value) for name, value in places.items()} if len(cores) > 1 else {}
        words = ["taskset", "-c", own, *program, str(source), str(output)]
        environment = {**os.environ, "MEGATRON_UCP_LOG": "quiet", **more}
        pipe = subprocess.PIPE
        running.append(subprocess.Popen(words, env=environment, stdout=pipe, text=True))
    texts = [process.communicate()[0] for process in running]
    if any(process.returncode for process in running):
        raise RuntimeError(f"{what} on {cores} failed")
    seconds, busy = zip(*(map(float, text.split()) for text in texts), strict=True)
    return max(seconds), max(busy)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", choices=SIZES, default="124M")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--child", nargs=3)
    args = parser.parse_args()
    if args.child:
        return child(*args.child)
    rows: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=args.folder) as held:
        source = written(Path(held), SIZES[args.sizes])
        for what in ("native", "universal", "torch_dist", "export"):
            seconds: dict[str, list[float]] = {way: [] for way in WAYS}
            busy: dict[str, list[float]] = {way: [] for way in WAYS}
            for turn in range(args.repetitions + 1):
                for way, cores in WAYS.items():
                    took, worked = measured(what, cores, source, Path(held) / "out")
                    if turn:
                        seconds[way].append(took)
                        busy[way].append(worked)
            shutil.rmtree(Path(held) / "out")
            middle = {way: statistics.median(held) for way, held in seconds.items()}
            worked = {way: statistics.median(held) for way, held in busy.items()}
            ratio = middle["one core"] / middle["two processes"]
            share = worked["one core"] / worked["two processes"]
            rows[what] = {"seconds": seconds, "busy": busy, "ratio": ratio, "busy ratio": share}
            texts = ", ".join(f"{way} {took:.2f} s" for way, took in middle.items())
            print(
                f"{what}: {texts}; two processes {ratio:.2f} times as fast, at least {LEAST}; "
                f"{share:.2f} times by processor seconds of the busier one",
                flush=True,
            )
    tree = {"machine": description(), "size": args.sizes, "least": LEAST, "rows": rows}
    if args.sizes != "tiny":
        known = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
        RESULTS.write_text(json.dumps({**known, args.sizes: tree}, indent=1) + "\n")


if __name__ == "__main__":
    main()
