"""How long a load will take on a cluster, and what it will do there, before anybody starts it:
bytes, files, messages and memory of a rank, over the number of ranks.

    megatron-ucp plan runs/llama --mesh dp=4,zero=1 --rates storage=2GB/s,latency=50us

The bytes and the files of a rank follow from its plan, which is what its load does. Of a larger
number of ranks some are planned, which stand for all. Seconds follow from the rates, and are no
measurement: what a cluster really does decides its slowest disk."""

import math
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, fields

from megatron_ucp.core.manifest import Manifest
from megatron_ucp.core.mesh import Mesh
from megatron_ucp.errors import UcpError, UsageError

# How often the ranks of one load agree: on a fate, which is a number of eight bytes, and on a value
# that is merged along a tree, each message of which has room for 512 bytes. The same for any number
# of ranks; a test counts them. Ranks of a known family, whose modules say their layouts, also agree
# on these: one fate and one value.
FATES, VALUES, OF_FAMILY, OPTIONS = 14, 7, 1, 1
NUMBER_BYTES, MESSAGE_BYTES = 8, 512
# Of a parameter's state, in what ranks merge beside: its sum, and the bytes that were filled.
SUM_BYTES = 64

MOST_RANKS, GROWTH, _PLANNED = 16_384, 4, 8
_UNITS = {"": 1.0, "b": 1.0, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12}
_TIMES = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
_RATE = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,9})?)\s*([kmgt]?b(?:/s)?|[mu]?s|)", re.IGNORECASE)


@dataclass(frozen=True)
class Rates:
    """What a cluster can do: bytes a second that one rank reads from storage (`storage`), that all
    of them read together (`shared`), and that one receives from another (`network`); seconds until
    a message arrives (`latency`), and until a file is open (`open`)."""

    storage: float = 1e9
    shared: float = 50e9
    network: float = 10e9
    latency: float = 20e-6
    open: float = 1e-3

    @classmethod
    def parse(cls, text: str) -> "Rates":
        """From `storage=2GB/s,shared=100GB/s,network=25GB/s,latency=20us,open=1ms`, of which any
        may be left out. Raises UsageError.

        Example:
            >>> from megatron_ucp.reshard.forecast import Rates
            >>> Rates.parse("storage=2GB/s,latency=50us").storage
            2000000000.0
        """
        known = [one.name for one in fields(cls)]
        given: dict[str, float] = {}
        for item in filter(None, text.replace(" ", "").split(",")):
            name, _, value = item.partition("=")
            found, units = _RATE.fullmatch(value), _TIMES if name in known[3:] else _UNITS
            unit = "" if found is None else found[2].lower().removesuffix("/s")
            number = 0.0 if found is None else float(found[1]) * units.get(unit, 0.0)
            if name not in known or not number:
                raise UsageError(
                    "this is no rate of a cluster",
                    expected="storage=2GB/s,shared=100GB/s,network=25GB/s,latency=20us,open=1ms",
                    found=item[:200],
                    fix=f"give --rates some of {', '.join(known)}, each with a number and its unit",
                )
            given[name] = number
        return cls(**given)


@dataclass(frozen=True)
class Forecast:
    """A load on so many ranks. `most_bytes` and `files` are those of the rank that reads and opens
    most, `all_bytes` those of all ranks; `steps` are agreements, in which the busiest rank receives
    about `received_bytes` in `messages`; `peak_bytes` is memory besides the model's weights.
    `limit` says what of `seconds` is the longest: storage, shared storage, files, agreement."""

    ranks: int
    mesh: str
    most_bytes: int
    all_bytes: int
    files: int
    steps: int
    messages: int
    received_bytes: int
    peak_bytes: int
    seconds: float
    limit: str


@dataclass(frozen=True)
class Opening:
    """Files of a checkpoint by name: those that rank 0 opens for all (`by_first`; it tells the
    others `look_bytes` of what it saw), all that the ranks compare with each other, each a share
    (`checked`), and the random states of each rank that saved (`random_states`), which ranks of the
    same mesh take again. `saved_on` is that mesh."""

    by_first: frozenset[str] = frozenset()
    look_bytes: int = 0
    checked: tuple[str, ...] = ()
    random_states: tuple[str, ...] = ()
    saved_on: Mesh | None = None

    def files_of(self, rank: int, mesh: Mesh, read: Collection[str]) -> int:
        """How many files a rank opens that reads states from some."""
        share = self.checked[rank :: mesh.world]
        own = {*read, *share, *self.random_states[:1], *(() if rank else self.by_first)}
        if self.saved_on is not None and self.saved_on.has_ranks_of(mesh):
            own |= {*self.random_states[rank : rank + 1]}
        return len(own)


@dataclass(frozen=True)
class RankShare:
    """What the forecast needs to know of a planned rank."""

    read_bytes: int
    files: frozenset[str]
    peak_bytes: int


Planner = Callable[[int], RankShare]  # of a rank


def forecast(target: Manifest, planned: Planner, opening: Opening, rates: Rates) -> Forecast:
    """One load, of a job whose manifest is known."""
    world = target.mesh.world
    shares = {rank: planned(rank) for rank in _sample(world)}
    most = max(one.read_bytes for one in shares.values())
    every = round(sum(one.read_bytes for one in shares.values()) / len(shares) * world)
    files = max(opening.files_of(rank, target.mesh, one.files) for rank, one in shares.items())
    steps, messages, received = agreement(target, world, opening.look_bytes)
    parts = {
        "storage": most / rates.storage,
        "shared storage": every / rates.shared,
        "files": files * rates.open,
        # what goes up the tree comes down again
        "agreement": 2 * steps * _depth(world) * rates.latency + received / rates.network,
    }
    seconds = max(parts["storage"], parts["shared storage"]) + parts["files"] + parts["agreement"]
    return Forecast(
        world,
        str(target.mesh),
        most,
        every,
        files,
        steps,
        messages,
        received,
        max(one.peak_bytes for one in shares.values()),
        seconds,
        max(parts, key=lambda name: parts[name]),
    )


def agreement(target: Manifest, world: int, look_bytes: int = 0) -> tuple[int, int, int]:
    """Steps of a load; messages that the busiest rank receives in them, and about how many bytes,
    with what rank 0 saw of the checkpoint. On one rank nobody sends anything."""
    fates, values = how_often(target)
    depth = _depth(world)
    sums = sum(len(target.states_of(name)) for name in target.holders) * SUM_BYTES
    received = (fates + OPTIONS) * NUMBER_BYTES + values * MESSAGE_BYTES + sums
    told = look_bytes if world > 1 else 0
    return fates + values, depth * (fates + values), depth * received + told


def how_often(target: Manifest) -> tuple[int, int]:
    """How often the ranks of one load agree on a fate, and on a value."""
    more = OF_FAMILY if target.family else 0
    return FATES + more, VALUES + more


def _depth(world: int) -> int:
    """Of a binomial tree: how many ranks answer to its first one."""
    return math.ceil(math.log2(world)) if world > 1 else 0


def _sample(world: int) -> list[int]:
    """The ranks that are planned: all of a few, else some from the first one to the last."""
    if world <= _PLANNED:
        return [*range(world)]
    return sorted({round(n * (world - 1) / (_PLANNED - 1)) for n in range(_PLANNED)})


def sizes_around(mesh: Mesh) -> Iterator[int]:
    """Data-parallel sizes up to 16,384 ranks: the given one, and those of four times as few and as
    many ranks."""
    dp, others = mesh.dp, mesh.world // mesh.dp
    while dp % GROWTH == 0:
        dp //= GROWTH
    while dp * others <= MOST_RANKS or dp <= mesh.dp:
        yield dp
        dp *= GROWTH


def over_ranks(mesh: Mesh, of_size: Callable[[int], Forecast]) -> tuple[Forecast, ...]:
    """The forecasts of all sizes that the model and the mesh allow. Raises a UcpError where not
    even the given one is possible."""
    found: list[Forecast] = []
    for dp in sizes_around(mesh):
        try:
            found.append(of_size(dp))
        except UcpError:
            if dp == mesh.dp:
                raise
    return (*found,)


def chart(rows: Collection[Forecast], width: int = 30) -> list[list[str]]:
    """A line of a table for each, with a bar for its seconds."""
    longest = max(one.seconds for one in rows)
    head = [
        "ranks",
        "MB of a rank",
        "MB of all",
        "files",
        "messages",
        "kB received",
        "MB of memory",
    ]
    lines = [[*head, "seconds", "", "mostly"]]
    for one in rows:
        sizes = (one.most_bytes / 1e6, one.all_bytes / 1e6)
        counts = (f"{one.files:,}", f"{one.messages:,}", f"{one.received_bytes / 1e3:,.1f}")
        bar = "#" * max(1, round(width * one.seconds / longest))
        lines.append(
            [
                f"{one.ranks:,}",
                *(f"{size:,.1f}" for size in sizes),
                *counts,
                f"{one.peak_bytes / 1e6:,.1f}",
                f"{one.seconds:,.3f}",
                bar,
                one.limit,
            ]
        )
    return lines
