"""Plain values and buffers that differ from rank to rank: which they are, and what each rank has.

A manifest lists them under `PER_RANK` of its run, and a small file of each rank lies beside it. The
values that all ranks share stand where they always do.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megatron_ucp.core.manifest import Manifest
from megatron_ucp.core.manifest_json import check_extent
from megatron_ucp.core.values import NOT_CODED, coded, decoded, shown
from megatron_ucp.errors import DamagedFileError, StateMismatchError, some_of

PER_RANK = "per_rank"  # of a manifest's run
BUFFERS, CLIENT_STATE, SCHEDULER = "buffers", "client_state", "lr_scheduler"
FILES = "ucp_rank_"  # how their names begin
RANDOM_STATES = "ucp_rng_"  # and those of the files with the random states of each rank
MAX_BYTES, MAX_VALUES = 2**31, 2**25  # of one file: it has the bytes of a rank's own tensors
_NAMED = 5


@dataclass(frozen=True)
class PerRank:
    """What differs from rank to rank: names of buffers and of modules' extra states, keys of the
    client state, and whether the scheduler's state does."""

    buffers: frozenset[str] = frozenset()
    client_state: frozenset[Any] = frozenset()
    scheduler: bool = False

    def __bool__(self) -> bool:
        return bool(self.buffers or self.client_state or self.scheduler)

    def __or__(self, other: "PerRank") -> "PerRank":
        return PerRank(
            self.buffers | other.buffers,
            self.client_state | other.client_state,
            self.scheduler or other.scheduler,
        )

    def __str__(self) -> str:
        keys = sorted(f"client_state[{shown(key)}]" for key in self.client_state)
        return some_of(
            [*sorted(self.buffers), *keys, *([SCHEDULER] if self.scheduler else [])], _NAMED
        )

    def as_value(self) -> dict[str, Any]:
        """As a manifest has it."""
        keys = sorted(self.client_state, key=repr)
        return {BUFFERS: sorted(self.buffers), CLIENT_STATE: keys, SCHEDULER: self.scheduler}


@dataclass(frozen=True)
class OwnValues:
    """What one rank has of all that differs, in inert form. A key of the client state that it has
    not is not there."""

    buffers: Mapping[str, Any] = field(default_factory=dict)
    client_state: Mapping[Any, Any] = field(default_factory=dict)
    scheduler: Any = None

    def over(self, shared: Mapping[Any, Any], what: PerRank) -> dict[Any, Any]:
        """The client state of the rank, whose other values all share."""
        rest = {key: value for key, value in shared.items() if key not in what.client_state}
        return {**rest, **self.client_state}

    def only(self, what: PerRank) -> "OwnValues":
        """Without what all ranks share."""
        return OwnValues(
            {name: self.buffers[name] for name in self.buffers if name in what.buffers},
            {key: self.client_state[key] for key in self.client_state if key in what.client_state},
            self.scheduler if what.scheduler else None,
        )


@dataclass(frozen=True)
class RankDifferences:
    """What differs from rank to rank, and what each rank has of it."""

    what: PerRank = field(default_factory=PerRank)
    ranks: Sequence[OwnValues] = ()


def file_name(rank: int) -> str:
    return f"{FILES}{rank:05d}.json"


def text_of(own: OwnValues) -> str:
    """The text of a rank's file."""
    data = {
        BUFFERS: coded(dict(own.buffers)),
        CLIENT_STATE: [[coded(key), coded(value)] for key, value in own.client_state.items()],
        SCHEDULER: coded(own.scheduler),
    }
    return json.dumps(data)


def listed(manifest: Manifest | None) -> PerRank:
    """What a manifest says to differ. Raises DamagedFileError for what says nothing of the kind."""
    said = manifest.run.get(PER_RANK) if manifest is not None else None
    if not said:
        return PerRank()
    try:
        return PerRank(
            frozenset(_keys(said[BUFFERS], str)),
            frozenset(_keys(said[CLIENT_STATE])),
            bool(said[SCHEDULER]),
        )
    except NOT_CODED as error:
        raise DamagedFileError(
            "the manifest does not say what differs from rank to rank", found=repr(error)
        ) from error


def _keys(found: Any, kind: type = object) -> list[Any]:
    """A list of keys: what only counts as one (a range) may be longer than all memory."""
    if type(found) is not list or not all(isinstance(key, kind) for key in found):
        raise TypeError(f"{shown(found)} is no list of keys")
    return found


def recorded_of(data: bytes | None, file: str) -> OwnValues:
    """What a rank's file beside a manifest holds. Raises DamagedFileError."""
    if data is None:
        raise DamagedFileError("the values of a rank are missing", file=file)
    try:
        check_extent(data, MAX_BYTES, MAX_VALUES)
        found = json.loads(data)
        client = {decoded(key): decoded(value) for key, value in found[CLIENT_STATE]}
        return OwnValues(dict(decoded(found[BUFFERS])), client, decoded(found[SCHEDULER]))
    except NOT_CODED as error:
        raise DamagedFileError(
            "the values of a rank can't be read",
            file=file,
            found=f"{type(error).__name__}: {str(error)[:200]}",
        ) from error


def refuse_unless(
    allowed: bool, what: PerRank, file: str, here: str, usual: Collection[Any] = ()
) -> str:
    """A note that the first rank's values are taken on another mesh. Raises StateMismatchError
    unless that is allowed, or only keys of the client state differ that are `usual`: those of which
    the program itself takes any rank's."""
    if not allowed and replace(what, client_state=what.client_state - {*usual}):
        raise StateMismatchError(
            "values differ from rank to rank in the checkpoint, and this is another mesh",
            file=file,
            expected="the mesh that wrote it, where each rank gets its own back",
            found=f"{what}; on {here}",
            fix='load it on that mesh, or take rank 0\'s with allow={"per_rank"}',
            id="differs-by-rank",
        )
    return f"differed from rank to rank, those of rank 0 were taken: {what}"
