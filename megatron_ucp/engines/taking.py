"""A live run as what it is besides elements, and who holds these: what a resize moves from,
whatever trains in it."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megatron_ucp.core.manifest import Manifest
from megatron_ucp.engines import random_states
from megatron_ucp.engines.loader import ResumableLoader
from megatron_ucp.engines.own_values import LiveValues
from megatron_ucp.engines.saves import position_of
from megatron_ucp.formats import of_ranks
from megatron_ucp.formats.base import Extras
from megatron_ucp.formats.in_memory import TakenRun
from megatron_ucp.formats.of_ranks import PER_RANK, PerRank
from megatron_ucp.reshard import agree
from megatron_ucp.reshard.engine import Lender
from megatron_ucp.reshard.fingerprint import diverged, recorded_as, sums_of_rank, table_of


@dataclass(frozen=True)
class DataPlace:
    """What a program moves that draws data: random states, as the bytes of a file (None: they are
    not taken), and what a manifest says of the position of a loader."""

    random: bytes | None
    position: Mapping[str, Any]

    @classmethod
    def now(cls, loader: ResumableLoader | None, rng: bool) -> "DataPlace":
        """As it is."""
        return cls(random_states.file_bytes() if rng else None, position_of(loader))


@dataclass(frozen=True)
class Taking:
    """What is taken along: a `client_state`, the position of a `loader` (None: that of the loader
    that the engine was attached with), random states, and a fingerprint of all elements. `place` is
    what stands for position and random states where the program has drawn more since."""

    client_state: Mapping[str, Any] = field(default_factory=dict[str, Any])
    loader: ResumableLoader | None = None
    rng: bool = True
    checksums: bool = True
    place: DataPlace | None = None


@dataclass(frozen=True)
class LentRun:
    """A run that was taken, and who holds this rank's elements of it."""

    run: TakenRun
    holder: Lender


@dataclass(frozen=True)
class RankValues:
    """What this rank has for itself, and what of it differs from rank to rank."""

    own: LiveValues
    apart: PerRank
    notes: tuple[str, ...] = ()


def lent(
    holder: Lender, said: Mapping[str, Any], extras: Extras, values: RankValues, how: Taking
) -> LentRun:
    """Puts together what all ranks have besides elements, which the `holder` has. `said` is what a
    manifest says of the run. Collective. Raises a UcpError on every rank."""
    rank, manifest = agree.world()[0], holder.manifest
    with agree.together() as block:
        sums = sums_of_rank(holder) if how.checksums else {}
        place = how.place or DataPlace.now(how.loader, how.rng)
        block.value = _beside(rank, values, place), sums
    besides, every = zip(*block.values, strict=True)
    table, apart = table_of(manifest, every)
    position = place.position
    run: dict[str, Any] = {**said, **position, **recorded_as(table, apart)}
    if values.apart:
        run[PER_RANK] = values.apart.as_value()
    taken = TakenRun(
        _name(manifest, said),
        replace(manifest, run=run),
        replace(extras, data_position=position.get("data")),
        {name: data for own in besides for name, data in own.items()},
        (*values.notes, *diverged(apart)),
    )
    return LentRun(taken, holder)


def _name(manifest: Manifest, said: Mapping[str, Any]) -> str:
    return f"memory of {manifest.mesh}/step {said.get(random_states.STEPS, 0)}"


def _beside(rank: int, values: RankValues, place: DataPlace) -> dict[str, bytes]:
    """The small files that a save would write for this rank, by their names."""
    out: dict[str, bytes] = {}
    if place.random is not None:
        out[random_states.file_name(rank)] = place.random
    if values.apart:
        name = of_ranks.file_name(rank)
        out[name] = values.own.text(Path(name), values.apart).encode()
    return out
