"""Loading against stock DeepSpeed's loading and conversion: seconds, bytes read, memory. 124
million parameters, two ranks; four for the mixture of experts.

    python -m benchmarks.load                       # 20 minutes, 8 GiB of memory, 14 GB of disk
    python -m benchmarks.load --suites tensor       # also `data` (ZeRO), `pipeline`, `experts`
    python -m benchmarks.load --tiny --repetitions 2  # to see that it runs

The page cache is warm. Bytes are counted by strace and memory is read from /proc, both by other
processes. `floor` is one reading of as many bytes as a rank needs. Results:
benchmarks/results/load.json, "Loads" in docs/reference/performance.md.
"""

import argparse
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import megatron_ucp as ucp
from benchmarks import frame
from benchmarks.model import SIZES, Mesh, close, family, make_engine, train_step
from benchmarks.tool import stock_universal
from megatron_ucp.engines.live import broadcast_each
from tests.ranks import RanksFailed

EXTRA_BYTES, READ_LIMIT = 64 * 2**20, 1.02


@dataclass(frozen=True)
class Pair:
    """A checkpoint of `source` goes into an engine of `target`.

    `load` is the largest ratio allowed to stock's own load of `target` files into `target`, `floor`
    that to one reading of as many bytes, `convert` the smallest one of stock's conversion and
    universal load to our load. None: measured, but nothing is claimed. `converts`: stock does that
    too. `observed`: bytes and memory are counted, too.
    """

    source: Mesh
    target: Mesh
    load: float | None = None
    convert: float | None = None
    floor: float | None = None
    converts: bool = True
    observed: bool = True

    def __str__(self) -> str:
        return f"{self.source} to {self.target}"


Pairs = tuple[Pair, ...]
Z1, Z3 = Mesh(1), Mesh(3)
PP1Z1, PP2Z1 = Mesh(1, 1, 1), Mesh(1, 1, 2)
TP1Z1, TP2Z1, TP1Z3, TP2Z3 = Mesh(1, 1), Mesh(1, 2), Mesh(3, 1), Mesh(3, 2)
EP1Z1, EP2Z1, EP4Z1 = (Mesh(1, 1, ep=ranks) for ranks in (1, 2, 4))
SUITES = {
    "data": (  # stock can't cross the stages
        Pair(Z3, Z1, load=0.8, converts=False),
        Pair(Z1, Z3, load=1.0, converts=False),
        Pair(Z1, Z1, convert=15.0, observed=False),
        Pair(Z3, Z3, convert=15.0, observed=False),
    ),
    "tensor": (
        Pair(TP2Z1, TP1Z1, load=0.8, convert=15.0),
        Pair(TP1Z1, TP2Z1, load=0.8, convert=15.0),
        Pair(TP2Z3, TP1Z3, load=1.0, convert=15.0),
        Pair(TP1Z3, TP2Z3, load=1.0, convert=15.0),
    ),
    "pipeline": (  # stock can't go between an engine with a pipeline and one without
        Pair(PP2Z1, PP1Z1, load=0.8, convert=15.0),
        Pair(PP1Z1, PP2Z1, load=0.8, convert=15.0),
        Pair(PP2Z1, TP1Z1, load=0.8, converts=False),
        Pair(TP1Z1, PP2Z1, load=0.8, converts=False),
    ),
    "experts": (Pair(EP2Z1, EP4Z1, floor=1.2), Pair(EP2Z1, EP1Z1, floor=1.2)),
}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Each suite."""
    size = SIZES["tiny" if options.tiny else "124M"]
    found: dict[str, Any] = {}
    for name in options.suites:
        ranks, folder = 4 if name == "experts" else 2, str(options.folder)
        found[name] = suite(ranks, folder, SUITES[name], size, options.repetitions)
        frame.empty(options.folder)
    return found


def suite(
    ranks: int, folder: str, pairs: Pairs, size: dict[str, int], repetitions: int
) -> dict[str, Any]:
    """Everything measured of some pairs."""
    out: dict[str, Any] = {"machine_before": frame.description(), "repetitions": repetitions}
    meshes = dict.fromkeys(mesh for pair in pairs for mesh in (pair.source, pair.target))
    counts = frame.on_ranks(ranks, saved, folder, (*meshes,), size)[0]
    whole = [mesh for mesh in meshes if max(mesh.tp, mesh.pp, mesh.ep) < 2]
    refusals = {str(pair): why for pair in pairs if (why := refusal(ranks, folder, pair, size))}
    out |= {"ranks": ranks, "parameters": counts[whole[-1]], "stock_can_not": refusals}
    able = [replace(pair, converts=pair.converts and str(pair) not in refusals) for pair in pairs]
    seconds, checked, observed = {}, {}, {"bytes": {}, "memory": {}}
    for target in dict.fromkeys(pair.target for pair in pairs):
        into = tuple(pair for pair in able if pair.target == target)
        by_rank = frame.on_ranks(ranks, measure_target, folder, target, into, size, repetitions)
        seconds |= by_rank[0]["seconds"]
        checked |= by_rank[0]["bytes_checked_unchecked"]
        for name, held in observed.items():
            held |= {way: [one[name][way] for one in by_rank] for way in by_rank[0][name]}
    return {
        **out,
        "seconds": seconds,
        "bytes_checked_unchecked": checked,
        "ratios": [ratio for pair in able for ratio in frame.claims_of(seconds, claims_of(pair))],
        **observed,
        "machine_after": frame.description(),
    }


def refusal(ranks: int, folder: str, pair: Pair, size: dict[str, int]) -> str | None:
    """Why stock's conversion and universal load can't do a pair; None where they can, or are known
    not to."""
    if pair.converts:
        try:
            frame.on_ranks(ranks, try_universal, folder, pair, size)
        except RanksFailed as error:
            return min(error.by_rank.items())[1].strip().splitlines()[-1]
    return None


def claims_of(pair: Pair) -> Iterator[frame.Claim]:
    for more, checked in (("", ""), (", checksums compared", " checked")):
        ours, stock = f"ucp {pair}{checked}", f"stock {pair.target}"
        load, floor, convert = (None,) * 3 if checked else (pair.load, pair.floor, pair.convert)
        yield f"load {pair} / stock load of {pair.target}{more}", ours, stock, load
        if pair.floor is not None:
            both = f"floor and exchange {pair.target}"
            yield f"load {pair} / floor{more}", ours, f"floor {pair.target}", floor
            yield f"load {pair} / {both}{more}", ours, both, None
        if pair.converts:
            what = f"stock convert + load / load, {pair}{more}"
            yield what, f"stock both {pair}", ours, convert, "at least"


# ---- on the ranks


def saved(folder: str, meshes: tuple[Mesh, ...], size: dict[str, int]) -> dict[Mesh, int]:
    """The checkpoints of some meshes; the number of parameters of each, each share of a cut one
    counted."""
    counts: dict[Mesh, int] = {}
    for mesh in meshes:
        engine = make_engine(mesh, size, attach=True)
        train_step(engine, mesh)
        engine.save_checkpoint(folder, tag=str(mesh))
        params = engine.module.parameters()
        counts[mesh] = sum(getattr(param, "ds_numel", param.numel()) for param in params)
        close(engine, mesh)
        del engine
        frame.give_back()
    return counts


def convert(folder: str, mesh: Mesh) -> float:
    """Seconds of stock's own conversion, in a process of its own; its output is new each time."""
    output, seconds = f"{folder}/{mesh}_universal", 0.0
    if dist.get_rank() == 0:
        shutil.rmtree(output, ignore_errors=True)
        seconds = frame.alone(stock_universal, f"{folder}/{mesh}", output, mesh.zero).seconds
    dist.barrier()
    return seconds


def try_universal(folder: str, pair: Pair, size: dict[str, int]) -> None:
    """Stock's conversion and universal load, once; raises where stock can't."""
    convert(folder, pair.source)
    loads = Loads(folder, pair.target, size)
    loads.stock(f"{pair.source}_universal", universal=True)
    loads.check()


def measure_target(
    folder: str, mesh: Mesh, pairs: Pairs, size: dict[str, int], repetitions: int
) -> dict[str, Any]:
    """Every way into one mesh: seconds in turns, then bytes and memory of this rank."""
    loads, conversions = Loads(folder, mesh, size), frame.Seconds()
    ways = loads.ways(pairs)
    converting = [pair for pair in pairs if pair.converts]

    def convert_all() -> None:
        for pair in converting:
            taken = convert(folder, pair.source)
            conversions.setdefault(f"stock convert {pair}", []).append(taken)

    seconds = frame.in_turns(ways, repetitions, before=loads.clear, after=convert_all)
    for pair in converting:
        name = f"stock convert {pair}"
        seconds[name] = conversions[name][1:]
        both = zip(seconds[name], seconds[f"stock universal {pair}"], strict=True)
        seconds[f"stock both {pair}"] = [sum(one) for one in both]
    for pair in pairs:
        loads.clear()
        loads.ours("", pair.source, checksums=True)
        loads.check()
    del loads.reports[""]
    pairs = tuple(pair for pair in pairs if pair.observed)
    watched = [f"ucp {pair}{checked}" for checked in ("", " checked") for pair in pairs]
    watched += [f"stock {mesh}"] if pairs else []
    out: dict[str, Any] = {
        "seconds": seconds,
        "bytes_checked_unchecked": loads.reports,
        "bytes": {way: loads.read(ways[way]) for way in watched},
        "memory": {way: loads.grown(ways[way]) for way in watched},
    }
    close(loads.engine, mesh)
    return out


class Loads:
    """An engine of one mesh, and every way to fill it."""

    def __init__(self, folder: str, mesh: Mesh, size: dict[str, int]) -> None:
        self.folder, self.mesh = folder, mesh
        self.engine = make_engine(mesh, size)
        self.reports: dict[str, tuple[int, int]] = {}

    def clear(self) -> None:
        """No optimizer states, as in a new engine; their memory goes back to the system."""
        self.engine.optimizer.optimizer.state.clear()
        frame.give_back()

    def ways(self, pairs: Pairs) -> dict[str, Callable[[], None]]:
        """Every call by its name."""
        out: dict[str, Callable[[], None]] = {
            f"stock {self.mesh}": partial(self.stock, str(self.mesh)),
            f"floor {self.mesh}": self.floor,
        }
        if any(pair.floor is not None for pair in pairs):
            out[f"floor and exchange {self.mesh}"] = self.floor_and_exchange
        for pair in pairs:
            for name, checksums in ((f"ucp {pair}", False), (f"ucp {pair} checked", True)):
                out[name] = partial(self.ours, name, pair.source, checksums)
            if pair.converts:
                universal = partial(self.stock, f"{pair.source}_universal", universal=True)
                out[f"stock universal {pair}"] = universal
        return out

    def ours(self, name: str, source: Mesh, checksums: bool) -> None:
        options = {"checksums": checksums, "family": family(self.mesh)}
        report = ucp.load(self.engine, self.folder, tag=str(source), **options)
        self.reports[name] = (report.checked_bytes, report.unchecked_bytes)

    def stock(self, tag: str, universal: bool = False) -> None:
        self.engine._config.load_universal_checkpoint = universal
        path, _ = self.engine.load_checkpoint(self.folder, tag=tag)
        self.engine._config.load_universal_checkpoint = False
        if path is None:
            raise RuntimeError("stock DeepSpeed did not load")

    def floor(self) -> None:
        """As many bytes as this rank's masters and moments, read once into fresh memory: no load
        can be faster by much."""
        paths = sorted(Path(self.folder, str(self.mesh)).glob("*_optim_states.pt"))
        rank = dist.get_rank()
        frame.read_once(paths[rank:] + paths[:rank], self.needed_bytes())

    def floor_and_exchange(self) -> None:
        self.floor()
        self.exchange()

    def exchange(self) -> None:
        """What ZeRO-1 leaves to do once masters are read: every rank gets the weights that others
        step, broadcast to where they lie."""
        opt = self.engine.optimizer
        partitioned = opt.parallel_partitioned_bit16_groups
        for parts, group in zip(partitioned, opt.real_dp_process_group, strict=True):
            broadcast_each(parts, group)

    def read(self, call: Callable[[], None]) -> dict[str, Any]:
        """Bytes that one load reads of the folder."""
        found: list[int | None] = []
        self.clear()
        with frame.traced(found, self.folder):
            call()
            dist.barrier()
        needed = self.needed_bytes()
        ratio = None if found[0] is None else found[0] / needed
        sizes = {"read_bytes": found[0], "needed_bytes": needed}
        return {**sizes, "limit": READ_LIMIT, "ratio": ratio}

    def grown(self, call: Callable[[], None]) -> dict[str, int]:
        """The most memory of one load over that after it, as another process sees it."""
        found: list[int] = []
        self.clear()
        before = frame.memory_bytes("RssAnon")
        with frame.peak(found, "RssAnon"):
            call()
        frame.give_back()
        over = before + found[0] - frame.memory_bytes("RssAnon")
        return {"anonymous_over_after": over, "limit": EXTRA_BYTES + self.largest_shard_bytes()}

    def needed_bytes(self) -> int:
        """Masters and two moments of this rank."""
        return sum(3 * master.numel() * master.element_size() for master in self.masters())

    def masters(self) -> list[torch.Tensor]:
        opt = self.engine.optimizer
        is_last = self.mesh.zero == 3
        return [
            *(opt.fp32_partitioned_groups_flat if is_last else opt.single_partition_of_fp32_groups)
        ]

    def largest_shard_bytes(self) -> int:
        """Of a parameter's masters in a partition. Experts that are divided among ranks have as
        many fewer partitions."""
        most = 0
        for param in self.engine.module.parameters():
            ranks = self.engine.seq_dp_world_size
            ranks //= 1 if getattr(param, "allreduce", True) else self.mesh.ep
            elems = getattr(param, "ds_numel", param.numel())
            most = max(most, 4 * -(-elems // ranks))
        return most

    def check(self) -> None:
        """Raises unless what was timed did its work."""
        for master in self.masters():
            state = self.engine.optimizer.optimizer.state[master]
            has_moments = state["exp_avg"].any() and state["exp_avg_sq"].shape == master.shape
            if float(state["step"]) != 1 or not has_moments:
                raise RuntimeError("a load left an optimizer without states")


def more(parser: argparse.ArgumentParser) -> None:
    text = "the others' results are kept"
    parser.add_argument("--suites", nargs="+", choices=SUITES, default=[*SUITES], help=text)


if __name__ == "__main__":
    raise SystemExit(frame.main("load", keeps=True, more=more))
