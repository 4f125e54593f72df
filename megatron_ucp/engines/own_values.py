"""What ranks of a live engine have otherwise than each other: found at a save, kept for each."""

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from megatron_ucp.core.grouping import grouped
from megatron_ucp.core.manifest_json import check_extent
from megatron_ucp.core.values import TENSOR, Stand, coded
from megatron_ucp.engines.values import inert
from megatron_ucp.errors import SaveError, some_of
from megatron_ucp.formats.per_rank import (
    MAX_BYTES,
    MAX_VALUES,
    OwnValues,
    PerRank,
    file_name,
    text_of,
)
from megatron_ucp.reshard import agree
from megatron_ucp.reshard.execute import bytes_of

Digests = dict[tuple[str, Any], str]  # by kind and name


class LiveValues:
    """This rank's buffers and modules' extra states by canonical name, its client state and its
    scheduler's state (None: without one). `has_client_state` says whether it takes part where
    client states are compared: below ZeRO-3 DeepSpeed writes the first rank's alone, and others may
    give none. `alike` are values that have no place of a rank's own, by names that say whose they
    are. The schedulers of pipeline stages count other groups: those of one `stage` are compared."""

    def __init__(
        self,
        buffers: Mapping[str, Any],
        client_state: Mapping[Any, Any],
        scheduler: Any,
        has_client_state: bool,
        alike: Mapping[str, Any],
        stage: int = 0,
    ) -> None:
        self._alike, self._stage = alike, stage
        self._buffers, self._scheduler = buffers, scheduler
        self._client = {inert(key): value for key, value in client_state.items()}
        if not has_client_state:
            self._client = {}
        self._compared = has_client_state

    @cached_property
    def _digests(self) -> Digests:
        held = {
            "buffer": self._buffers,
            "client": self._client,
            "schedule": {self._stage: self._scheduler},
            "alike": self._alike,
        }
        return {
            (kind, name): _digest(value)
            for kind, values in held.items()
            for name, value in values.items()
        }

    def digest(self) -> str:
        """Of all of them, in this rank's place. Raises what a value may raise."""
        places = {("schedule", self._stage): "schedule"}  # of whichever stage
        own = [(places.get(place, place), found) for place, found in self._digests.items()]
        return hashlib.sha256(repr(sorted(map(repr, own))).encode()).hexdigest()

    def differing(self, digests: Sequence[str]) -> PerRank:
        """What differs among the ranks that have it; `digests` are those of all ranks. Collective
        where they differ. Raises SaveError on all ranks where it is what must be alike."""
        if len({*digests}) == 1:
            return PerRank()
        found = agree.gather((self._digests, self._compared))
        sums = grouped(pair for held, _ in found for pair in held.items())
        clients = sum(compared for _, compared in found)  # all of them have the same keys
        odd = [
            place
            for place, held in sums.items()
            if len({*held}) > 1 or (place[0] == "client" and len(held) < clients)
        ]

        def of(kind: str) -> frozenset[Any]:
            return frozenset(name for what, name in odd if what == kind)

        _require_alike(of("alike"))
        return PerRank(of("buffer"), of("client"), bool(of("schedule")))

    def write(self, folder: Path, rank: int, what: PerRank) -> Path:
        """Writes what this rank has of all that differs; returns the file. Raises OSError,
        SaveError."""
        path = folder / file_name(rank)
        path.write_text(self.text(path, what), encoding="utf-8")
        return path

    def text(self, path: Path, what: PerRank) -> str:
        """What that file holds. Raises SaveError where no load would take as much."""
        own = OwnValues(
            {name: inert(v) for name, v in self._buffers.items() if name in what.buffers},
            {key: inert(v) for key, v in self._client.items() if key in what.client_state},
            inert(self._scheduler) if what.scheduler else None,
        )
        text = text_of(own)
        try:
            check_extent(text, MAX_BYTES, MAX_VALUES)  # as a load does
        except ValueError as error:
            raise SaveError(
                "what differs from rank to rank is too large to be kept for each rank",
                file=path,
                found=f"{what}: {error}",
                fix="keep it in files of your own",
                id="",
            ) from error
        return text


def _require_alike(odd: Collection[str]) -> None:
    if odd:
        raise SaveError(
            "ranks have different values where a checkpoint has one, and no load would take it",
            expected="the same value on every rank",
            found=some_of(sorted(odd)),
            fix="give the groups the same settings on every rank; keep what is a rank's own in "
            "client_state",
            id="",
        )


def _digest(value: Any) -> str:
    """Of type and bits of a plain value. Tensors are read where they lie."""
    text = json.dumps(_unordered(coded(inert(value, _sum))), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _unordered(data: Any) -> Any:
    """A coded value in which entries of mappings stand in the order of their text: ranks may have
    filled them in other orders."""
    if isinstance(data, list):
        return [_unordered(item) for item in data]
    if not isinstance(data, dict):
        return data
    out = {key: _unordered(item) for key, item in data.items()}
    if out.get("$") in ("dict", "Counter", "defaultdict"):
        out["items"] = sorted(out["items"], key=lambda pair: json.dumps(pair, sort_keys=True))
    return out


def _sum(tensor: torch.Tensor) -> Stand:
    data = bytes_of(tensor.cpu().contiguous()) if tensor.numel() else b""
    text = f"{tensor.dtype} {tuple(tensor.shape)} {hashlib.sha256(data).hexdigest()}"
    return Stand(TENSOR, (text,))
