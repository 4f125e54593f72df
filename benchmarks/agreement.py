"""What ranks cost each other: bytes and messages of one rank, counted on four real ranks and on
paper for 64, 1,024 and 16,384.

    python -m benchmarks.agreement          # some minutes
    python -m benchmarks.agreement --tiny   # up to 64 ranks, to see that it runs

Four ranks over gloo attach, save, save beside training and load a small model at ZeRO-1 and ZeRO-3;
what each receives is counted. On paper there is a run of 10^12
parameters (`benchmarks.paper.mixture`), and one of 405B at ZeRO-3: for each number of ranks the
values that ranks tell each other are made, of every rank, and go along the package's own tree to
rank 0, which receives most. A fake exchange counts the bytes, and the processor's clock what its
Python takes, and that of another rank. Beside it stands what each rank received before, when values
were gathered from all ranks, each padded to the longest. Results:
benchmarks/results/agreement.json, "Many ranks" in docs/reference/performance.md.
"""

import argparse
import pickle
import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist

import megatron_ucp as ucp
from benchmarks import frame
from benchmarks.paper import mixture
from megatron_ucp.core.join_ranks import Stage
from megatron_ucp.core.manifest import Manifest
from megatron_ucp.engines.background import SideGroup
from megatron_ucp.formats.folder import Look
from megatron_ucp.formats.manifest_beside import _Listed
from megatron_ucp.reshard import agree
from megatron_ucp.reshard.fingerprint import JoinedSums
from megatron_ucp.reshard.messages import DefaultRanks, Ranks, _children, packed, unpacked
from tests.engines.model import Setup, make_engine, train

REAL, SIZES = 4, (4, 64, 1024, 16384)
MOST_BYTES, MOST_LOAD_S, MOST_SUMS_S, MOST_SUMS_BYTES = 2 * 10**6, 0.1, 1.0, 64 * 2**20
LAYERS_405B, STATES = 126, ("master", "exp_avg", "exp_avg_sq")
PER_LAYER = ("q", "k", "v", "o", "gate", "up", "down", "norm1", "norm2")
AGREEMENTS = ("lowest", "agreed", "delivered")
FATES = {"attach": 4, "save": 9, "background save": 12, "load": 11}  # agreements without a value


def measure(options: argparse.Namespace) -> dict[str, Any]:
    paper, real = mixture(), dict[str, Any]()
    for zero in (1, 3):
        for rank in frame.on_ranks(REAL, counts, zero, f"{options.folder}/{zero}"):
            for what, count in rank.items():
                each = real.setdefault(f"{what}, ZeRO-{zero}", {})
                for key, value in count.items():
                    each.setdefault(key, []).append(value)
    places = stages(paper)
    sizes = SIZES[:2] if options.tiny else SIZES
    rows = [on_paper(world, paper, places) for world in sizes]
    last = rows[-1]
    own, busy = last["parts"]["its own place"], last["seconds of Python"]
    sums_s, sums_bytes = busy["sums of 405B, rank 0"], last["sums of 405B, peak bytes"]
    received = last["bytes received"].items()
    return {
        "real ranks": real,
        "on paper": rows,
        "claims": [
            *(
                frame.claim(f"bytes received, {what}", size - own, MOST_BYTES)
                for what, size in received
            ),
            *(
                frame.claim(f"seconds of Python, {what}", seconds, MOST_LOAD_S)
                for what, seconds in busy.items()
                if what.startswith("load")
            ),
            frame.claim("seconds of the sums of 405B", sums_s, MOST_SUMS_S),
            frame.claim("peak bytes of the sums of 405B", sums_bytes, MOST_SUMS_BYTES),
        ],
    }


# ---- real ranks


def counts(zero: int, folder: str) -> dict[str, dict[str, int]]:
    """Of this rank, by operation."""
    setup, out = Setup(zero), Path(folder)
    engine = make_engine(setup, attach=False)
    found: dict[str, dict[str, int]] = {}
    with counted(found, "attach"):
        ucp.attach(engine)
    train(engine, 1)
    with counted(found, "save"):
        engine.save_checkpoint(str(out / "one"))
    beside = make_engine(setup, attach=False)
    ucp.attach(beside, save="background")
    train(beside, 1)
    beside.save_checkpoint(str(out / "two"))  # which connects the ranks
    ucp.wait(beside)
    train(beside, 1)
    with counted(found, "background save"):
        beside.save_checkpoint(str(out / "two"))
        ucp.wait(beside)
    with counted(found, "load"):
        ucp.load(engine, out / "one")
    return found


@contextmanager
def counted(found: dict[str, dict[str, int]], what: str) -> Iterator[None]:
    """Counts what is done inside, on this rank."""
    count: dict[str, int] = dict.fromkeys(("agreements", "messages received", "bytes received"), 0)

    def agreeing(stock: Callable[..., Any]) -> Callable[..., Any]:
        def agreed(*args: Any, **kwargs: Any) -> Any:
            count["agreements"] += 1
            return stock(*args, **kwargs)

        return agreed

    def moving(stock: Callable[..., Any]) -> Callable[..., Any]:
        def moved(self: Any, sent: Any, sizes: Any) -> Any:
            count["bytes received"] += sum(sizes.values())
            count["messages received"] += len(sizes)
            return stock(self, sent, sizes)

        return moved

    of_ranks: dict[str, Any] = {name: agreeing(getattr(Ranks, name)) for name in AGREEMENTS}
    dist.barrier()
    with (
        mock.patch.object(DefaultRanks, "move", moving(DefaultRanks.move)),
        mock.patch.object(SideGroup, "move", moving(SideGroup.move)),
        mock.patch.multiple(Ranks, **of_ranks),
    ):
        yield
    found[what] = count


# ---- on paper


class PaperRanks(Ranks):
    """Rank 0 of so many, whose messages are made from what the ranks below each child have."""

    def __init__(self, world: int) -> None:
        self.rank, self.world = 0, world
        self.answers: dict[int, bytes] = {}
        self.received = 0
        self.seconds = 0.0

    def move(self, sent: Mapping[int, bytes], sizes: Mapping[int, int]) -> dict[int, bytes]:
        self.received += sum(sizes.values())
        (child,) = [*sizes] or [0]
        return {child: bytes(sizes[child])} if sizes else {}

    def receive(self, source: int) -> bytes:
        self.received += max(512, len(self.answers[source]) + 8)
        return self.answers[source]

    def send(self, data: bytes, target: int) -> None:
        self.sent = len(data)

    def take(
        self,
        value_of: Callable[[int, int], Any],
        merge: Callable[[Any, Any], Any],
    ) -> Any:
        """All ranks' values along the tree, as rank 0 gets them: `value_of` gives what so many
        ranks from one on have together."""
        for child in _children(0, self.world):
            count = min(child, self.world - child)
            self.answers[child] = packed(value_of(child, count))
        own, started = value_of(0, 1), time.process_time()
        merged, _ = self.agreed(own, merge, lambda value: None)
        self.seconds += time.process_time() - started
        return merged


def gathered(ranks: PaperRanks, value_of: Callable[[int], Any]) -> int:
    """Bytes of the answer that all ranks get where each has a value."""

    def one(rank: int) -> Any:
        return agree._ValuesInOrder([pickle.dumps(value_of(rank))], [(0, 1)])

    def together(first: int, count: int) -> Any:
        return reduce(join, map(one, range(first, first + count)))

    join = agree._ValuesInOrder.followed_by
    return len(packed(ranks.take(together, join)))


def stages(paper: Manifest) -> list[Stage]:
    """What the first rank of each place says of it at attach."""
    by_name = paper.by_name
    groups = len(paper.groups) // paper.mesh.pp
    out: list[Stage] = []
    for stage in range(paper.mesh.pp):
        for place in range(paper.mesh.ep):
            at = {"pp": stage, "ep": place}
            buffers = [one for one in paper.buffers if at.items() >= dict(one.at).items()]
            params = tuple(by_name[one.param] for buffer in buffers for one in buffer.members)
            known = (params, tuple(buffers), paper.groups[:groups], ())
            out.append(Stage(*known, (("pp", stage), ("ep", place))))
    return out


def look_of(paper: Manifest, world: int) -> tuple[int, float, float]:
    """Bytes of what rank 0 tells of a checkpoint that so many ranks saved, but for heads of files,
    which are not there on paper; and the seconds of packing it, and of taking it."""
    share = max(1, len(paper.files) * world // paper.mesh.world)
    evidence = [
        replace(one, sha256=f"{random.Random(number).getrandbits(256):064x}")
        for number, one in enumerate(paper.files[:share])
    ]
    cut = replace(paper, files=tuple(evidence))
    names = sorted(one.name for one in cut.files)
    look = Look(names={"": ("\n".join(names), bytes([1]) * len(names))})
    look.made["manifest"] = _Listed.of(cut, names)
    started = time.process_time()
    data = packed(look)
    middle = time.process_time()
    unpacked(data)
    return len(data), middle - started, time.process_time() - middle


def sums_405b(first: int, count: int) -> JoinedSums:
    """What so many ranks from one on have together of every parameter at ZeRO-3: the partitions
    with their numbers."""
    crc = random.Random(first).getrandbits
    params = [f"model.layers.{n}.{name}.weight" for n in range(LAYERS_405B) for name in PER_LAYER]
    out = JoinedSums()
    for number, name in enumerate([*params, "embed", "head", "norm"]):
        for state in STATES:
            key = name, state, "float32", ((0, 0), (16384, 16384)), (number, ())
            out.copies[key] = {((first, first + count),): crc(32)}
    return out


def on_paper(world: int, paper: Manifest, places: list[Stage]) -> dict[str, Any]:
    """What the busiest rank receives of each operation, and the seconds of its Python."""
    count = max(1, min(len(places), world // 8))
    each = max(1, world // count)

    def place(rank: int) -> Any:
        return places[rank // each] if rank % each == 0 and rank // each < count else None

    described = PaperRanks(world)
    answer = gathered(described, place)
    own_place = len(packed(places[0]))
    fates, started = PaperRanks(world), time.process_time()
    for _ in range(100):
        fates.lowest(1)
    fates.seconds = time.process_time() - started
    fate_bytes = fates.received / 100
    summed = PaperRanks(world)
    grown: list[int] = []
    with frame.peak(grown, "RssAnon"):
        joined = summed.take(sums_405b, JoinedSums.join)
    own_sums = len(pickle.dumps(sums_405b(1, 1)))
    sizes = PaperRanks(world)
    sizes_answer = gathered(sizes, lambda rank: 10**10 + rank % 97)
    look_bytes, packing_s, taking_s = look_of(paper, world)
    describing = described.received + answer
    by_operation = {
        "attach": describing + fate_bytes * FATES["attach"],
        "save": describing + sizes.received + sizes_answer + fate_bytes * FATES["save"],
        "load": look_bytes + summed.received + fate_bytes * FATES["load"],
    }
    by_operation["background save"] = by_operation["save"] + 3 * fate_bytes
    padded = {what: 4096 * world * n for what, n in (("attach", 4), ("save", 9), ("load", 16))}
    return {
        "ranks": world,
        "bytes received": {what: round(size) for what, size in by_operation.items()},
        "of these by rank 0 alone": {"sums": summed.received},
        "parts": {
            "a fate": fate_bytes,
            "all places": answer,
            "its own place": own_place,
            "what rank 0 saw of the checkpoint": look_bytes,
        },
        "bytes before": padded | {"sums": own_sums * world, "places": own_place * world},
        "seconds of Python": {
            "load, rank 0": fates.seconds / 100 * FATES["load"] + packing_s,
            "load, another rank": fates.seconds / 100 * FATES["load"] + taking_s,
            "attach": described.seconds,
            "sums of 405B, rank 0": summed.seconds,
        },
        "sums of 405B, peak bytes": grown[0],
        "sums": len(joined.copies),
    }


if __name__ == "__main__":
    raise SystemExit(frame.main("agreement"))
