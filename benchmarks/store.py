"""Loads from an object store and saves into one, against the disk: seconds, requests, bytes.

    python -m benchmarks.store                 # 124M parameters: 4 GB of disk, 12 GB of memory
    python -m benchmarks.store --sizes tiny    # to see that it runs

The store is the tests' own server in a process beside (`tests/object_server.py`). One rank loads
all of a checkpoint of two, ZeRO-1: from the disk, and from the server with 0, 5 and 30 ms added to
each request, in turns. The floor is `obstore.get_ranges` of the ranges that such a load asked for,
object by object, and nothing else. Background saves go to the disk and to the server in turns:
training is blocked until they return. Writes benchmarks/results/store.json.
"""

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.cold import SIZES, engine_of
from benchmarks.machine import description
from benchmarks.tool import claim, written
from tests.object_server import ObjectServer

RESULTS = Path(__file__).parent / "results" / "store.json"
DELAYS_MS = (0, 5, 30)
RUN = "bucket/run"
# what, numerator, denominator, limit; None: told only
CLAIMS = [
    ("load, 30 ms for each request / without", "store 30 ms", "store 0 ms", 1.5),
    ("load, 5 ms for each request / without", "store 5 ms", "store 0 ms", None),
    ("load from the store / from the disk", "store 0 ms", "disk", None),
    ("load from the store / floor", "store 0 ms", "floor 0 ms", None),
    ("load, 30 ms for each request / floor", "store 30 ms", "floor 30 ms", None),
    ("training waits, store / disk", "store blocked", "disk blocked", 1.2),
    ("background save, store / disk", "store saved", "disk saved", None),
]


def timed(work: Callable[[], Any]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


class Bench:
    """Loads and saves of one engine, at one server."""

    def __init__(self, engine: Any, server: ObjectServer, source: Path, folder: Path) -> None:
        self.engine, self.server, self.source, self.folder = engine, server, source, folder
        self.needed_bytes = sum(path.stat().st_size for path in source.glob("*optim_states.pt"))
        self.url = f"s3://{RUN}"
        self.requests: dict[str, int] = {}
        self.read_bytes = 0
        self.ranges: dict[str, list[tuple[int, int]]] = {}
        self.seconds: dict[str, list[float]] = {}

    def load(self, path: str | Path) -> Any:
        import megatron_ucp as ucp

        return ucp.load(self.engine, path, family="gpt")

    def turn(self) -> None:
        """Every load and every save once."""
        self.note("disk", timed(lambda: self.load(self.source)))
        for delay in DELAYS_MS:
            self.server.ask("heal")
            if delay:
                self.server.fault("delay", value=delay / 1000)
            self.server.ask("forget_requests")
            self.note(f"store {delay} ms", timed(lambda: self.load(self.url)))
            self.count()
            self.note(f"floor {delay} ms", timed(self.floor))
        self.server.ask("heal")
        for way, place in (("disk", str(self.folder / "saves")), ("store", "s3://bucket/saves")):
            self.save(way, place)

    def note(self, what: str, seconds: float) -> None:
        self.seconds.setdefault(what, []).append(seconds)

    def count(self) -> None:
        """What the last load asked for."""
        got = self.server.requests("GET")
        self.requests = dict(self.server.counts())
        self.read_bytes = sum(one.bytes_out for one in got)
        self.ranges = {}
        for one in got:
            place = one.first_byte or 0, one.bytes_out
            self.ranges.setdefault(one.key.removeprefix("bucket/"), []).append(place)

    def floor(self) -> None:
        import obstore
        from obstore.store import S3Store

        store = S3Store.from_url("s3://bucket")
        for key, places in self.ranges.items():
            starts, lengths = zip(*((at, size) for at, size in places if size), strict=True)
            obstore.get_ranges(store, key, starts=starts, lengths=lengths, coalesce=0)

    def save(self, way: str, place: str) -> None:
        import megatron_ucp as ucp

        os.sync()
        started = time.perf_counter()
        self.engine.save_checkpoint(place, tag="tag")
        self.note(f"{way} blocked", time.perf_counter() - started)
        ucp.wait(self.engine)
        self.note(f"{way} saved", time.perf_counter() - started)
        shutil.rmtree(self.folder / "saves", ignore_errors=True)
        self.server.ask("remove", prefix="bucket/saves")


def measure(size: str, repetitions: int, folder: Path) -> dict[str, Any]:
    layers, width, vocabulary = SIZES[size]
    sizes = f"layers={layers},hidden={width},heads=12,ffn={4 * width},vocab={vocabulary}"
    source = written(folder, f"{sizes},positions=1024,tied=1")
    with ObjectServer() as server:
        os.environ.update(server.environment())
        server.ask("copy_in", folder=str(source), prefix=RUN)
        bench = Bench(engine_of(size, save="background"), server, source, folder)
        for turn in range(repetitions + 1):
            bench.turn()
            if not turn:  # the first one makes the optimizer's states, and connections
                bench.seconds.clear()
            print({what: round(each[-1], 3) for what, each in bench.seconds.items()}, flush=True)
    return result(bench, repetitions)


def result(bench: Bench, repetitions: int) -> dict[str, Any]:
    medians = {what: statistics.median(each) for what, each in bench.seconds.items()}
    rows = [
        claim(what, medians[top] / medians[bottom], float("inf") if limit is None else limit)
        for what, top, bottom, limit in CLAIMS
    ]
    rows.append(claim("bytes read / needed", bench.read_bytes / bench.needed_bytes, 1.02))
    return {
        "machine": description(),
        "repetitions": repetitions,
        "claims": rows,
        "seconds": bench.seconds,
        "requests": bench.requests,
        "read_bytes": bench.read_bytes,
        "needed_bytes": bench.needed_bytes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", choices=SIZES, default="124M")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=None)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        found = measure(args.sizes, args.repetitions, Path(folder))
    print(f"requests of a load: {found['requests']}; load {os.getloadavg()}")
    for row in found["claims"]:
        limit = "" if row["limit"] == float("inf") else f"   {row['kind']} {row['limit']:g}   "
        met = "" if not limit else "met" if row["met"] else "MISSED"
        print(f"{row['what']:50} {row['ratio']:8.2f}{limit}{met}")
    if args.sizes != "tiny":
        known = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
        RESULTS.write_text(json.dumps({**known, args.sizes: found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
