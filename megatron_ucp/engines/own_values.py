"""What ranks of a live engine have otherwise than each other: found at a save, kept for each."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from megatron_ucp.core.manifest_json import check_extent
from megatron_ucp.core.values import TENSOR, Stand, coded
from megatron_ucp.engines.values import inert
from megatron_ucp.errors import SaveError, some_of
from megatron_ucp.formats.of_ranks import (
    MAX_BYTES,
    MAX_VALUES,
    OwnValues,
    PerRank,
    file_name,
    text_of,
)
from megatron_ucp.reshard import agree
from megatron_ucp.reshard.execute import bytes_of

Digests = tuple[dict[str, str], dict[Any, str], tuple[int, str], dict[str, str]]


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
        buffers = {name: _digest(value) for name, value in self._buffers.items()}
        client = {key: _digest(value) for key, value in self._client.items()}
        alike = {name: _digest(value) for name, value in self._alike.items()}
        return buffers, client, (self._stage, _digest(self._scheduler)), alike

    def digest(self) -> str:
        """Of all of them, in this rank's place. Raises what a value may raise."""
        own = self._digests
        text = repr([sorted(map(repr, each.items())) for each in (own[0], own[1], own[3])])
        return hashlib.sha256((text + own[2][1]).encode()).hexdigest()

    def differing(self, digests: Sequence[str]) -> PerRank:
        """What differs among the ranks that have it; `digests` are those of all ranks. Collective
        where they differ. Raises SaveError on all ranks where it is what must be alike."""
        if len({*digests}) == 1:
            return PerRank()
        found = agree.gather((self._digests, self._compared))
        _require_alike([alike for (*_, alike), _ in found])
        sums = _by_name([buffers for (buffers, *_), _ in found])
        clients = [client for (_, client, *_), compared in found if compared]
        keys = {key for client in clients for key in client}
        schedules = _by_name([dict([schedule]) for (_, _, schedule, _), _ in found])
        return PerRank(
            frozenset(name for name, held in sums.items() if len(held) > 1),
            frozenset(key for key in keys if len({c.get(key) for c in clients}) > 1),
            any(len(held) > 1 for held in schedules.values()),
        )

    def write(self, folder: Path, rank: int, what: PerRank) -> Path:
        """Writes what this rank has of all that differs; returns the file. Raises OSError."""
        own = OwnValues(
            {name: inert(v) for name, v in self._buffers.items() if name in what.buffers},
            {key: inert(v) for key, v in self._client.items() if key in what.client_state},
            inert(self._scheduler) if what.scheduler else None,
        )
        path, text = folder / file_name(rank), text_of(own)
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
        path.write_text(text, encoding="utf-8")
        return path


def _by_name(digests: Sequence[Mapping[Any, Any]]) -> dict[Any, set[Any]]:
    """All that ranks say of each name."""
    out: dict[Any, set[Any]] = {}
    for each in digests:
        for name, one in each.items():
            out.setdefault(name, set()).add(one)
    return out


def _require_alike(digests: Sequence[Mapping[str, str]]) -> None:
    odd = sorted(name for name, held in _by_name(digests).items() if len(held) > 1)
    if odd:
        raise SaveError(
            "ranks have different values where a checkpoint has one, and no load would take it",
            expected="the same value on every rank",
            found=some_of(odd),
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
