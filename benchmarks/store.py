"""Loads from an object store and saves into one, against the disk: seconds, requests, bytes; and
loads from the disk with a cold page cache, against `dd` of the same files. A tool that compares two
commits: no page shows its figures.

    python -m benchmarks.store                 # 124M parameters: 4 GB of disk, 12 GB of memory
    python -m benchmarks.store --sizes tiny    # to see that it runs

The store is the tests' own server in a process beside (`tests/object_server.py`). One rank loads
all of a checkpoint of two, ZeRO-1: from the disk, and from the server with 0, 5 and 30 ms added to
each request. The floor is `obstore.get_ranges` of the ranges that such a load asked for, object by
object, and nothing else. Background saves go to the disk and to the server: training is blocked
until they return. Results: benchmarks/results/store.json.
"""

import argparse
import os
import shutil
import subprocess
import time
from functools import partial
from pathlib import Path
from typing import Any

import megatron_ucp as ucp
from benchmarks import frame
from benchmarks.model import SIZES, Mesh, family, make_engine, start, text_of
from benchmarks.paper import written
from tests.object_server import ObjectServer

DELAYS_MS = (0, 5, 30)
ALONE = Mesh(1, tp=1)
# without a limit: told only
CLAIMS: list[frame.Claim] = [
    ("load, 30 ms for each request / without", "store 30 ms", "store 0 ms", 1.5),
    ("load, 5 ms for each request / without", "store 5 ms", "store 0 ms", None),
    ("load from the store / from the disk", "store 0 ms", "disk", None),
    ("load from the store / floor", "store 0 ms", "floor 0 ms", None),
    ("load, 30 ms for each request / floor", "store 30 ms", "floor 30 ms", None),
    ("training waits, store / disk", "store blocked", "disk blocked", 1.2),
    ("background save, store / disk", "store saved", "disk saved", None),
    ("load / dd, cold", "disk cold", "dd cold", 1.25),
]
READ_LIMIT = 1.02


def measure(size: str, options: argparse.Namespace) -> dict[str, Any]:
    source = written(options.folder, text_of(size))
    start()
    engine = make_engine(ALONE, SIZES[size])
    ucp.attach(engine, family=family(ALONE), save="background")
    with ObjectServer() as server:
        os.environ.update(server.environment())
        server.ask("copy_in", folder=str(source), prefix="bucket/run")
        bench = Bench(engine, server, source, options.folder / "saves")
        seconds = frame.in_turns(bench.ways(), options.repetitions, rotates=False)
    ratio = bench.read_bytes / bench.needed_bytes
    read = frame.claim("bytes read / needed", ratio, READ_LIMIT)
    return {
        "claims": [*frame.claims_of(seconds, CLAIMS), read],
        "seconds": seconds,
        "requests": bench.requests,
        "read_bytes": bench.read_bytes,
        "needed_bytes": bench.needed_bytes,
    }


class Bench:
    """Loads and saves of one engine, at one server."""

    def __init__(self, engine: Any, server: ObjectServer, source: Path, saves: Path) -> None:
        self.engine, self.server, self.source, self.saves = engine, server, source, saves
        self.files = sorted(source.glob("*optim_states.pt"))
        self.needed_bytes = sum(path.stat().st_size for path in self.files)
        self.requests: dict[str, int] = {}
        self.read_bytes = 0
        self.ranges: dict[str, list[tuple[int, int]]] = {}

    def ways(self) -> dict[str, Any]:
        out: dict[str, Any] = {"disk": partial(self.load, self.source)}
        for delay in DELAYS_MS:
            out[f"store {delay} ms"] = partial(self.load_slowly, delay)
            out[f"floor {delay} ms"] = self.floor
        out["disk save"] = partial(self.save, "disk", str(self.saves))
        out["store save"] = partial(self.save, "store", "s3://bucket/saves")
        out["disk cold"] = lambda: self.cold("disk cold", lambda: self.load(self.source))
        out["dd cold"] = lambda: self.cold("dd cold", self.dd)
        return out

    def load(self, path: str | Path) -> None:
        ucp.load(self.engine, path, family=family(ALONE))

    def load_slowly(self, delay_ms: int) -> dict[str, float]:
        """A load from the store; what it asked for is noted."""
        self.server.ask("heal")
        if delay_ms:
            self.server.fault("delay", value=delay_ms / 1000)
        self.server.ask("forget_requests")
        seconds = frame.timed(lambda: self.load("s3://bucket/run"))
        got = self.server.requests("GET")
        self.requests = dict(self.server.counts())
        self.read_bytes = sum(one.bytes_out for one in got)
        self.ranges = {}
        for one in got:
            place = one.first_byte or 0, one.bytes_out
            self.ranges.setdefault(one.key.removeprefix("bucket/"), []).append(place)
        return {f"store {delay_ms} ms": seconds}

    def floor(self) -> None:
        import obstore
        from obstore.store import S3Store

        store = S3Store.from_url("s3://bucket")
        for key, places in self.ranges.items():
            starts, lengths = zip(*((at, size) for at, size in places if size), strict=True)
            obstore.get_ranges(store, key, starts=starts, lengths=lengths, coalesce=0)

    def save(self, way: str, place: str) -> dict[str, float]:
        self.server.ask("heal")
        os.sync()
        started = time.perf_counter()
        self.engine.save_checkpoint(place, tag="tag")
        blocked = time.perf_counter() - started
        ucp.wait(self.engine)
        saved = time.perf_counter() - started
        shutil.rmtree(self.saves, ignore_errors=True)
        self.server.ask("remove", prefix="bucket/saves")
        return {f"{way} blocked": blocked, f"{way} saved": saved}

    def cold(self, name: str, work: Any) -> dict[str, float]:
        frame.forget(self.source)
        return {name: frame.timed(work)}

    def dd(self) -> None:
        for path in self.files:
            words = ["dd", f"if={path}", "of=/dev/null", "bs=1M", "status=none"]
            subprocess.run(words, check=True)


if __name__ == "__main__":
    raise SystemExit(frame.main("store", sizes=("124M",), by_size=True))
