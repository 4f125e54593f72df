"""What ranks of a live engine have otherwise than each other: found at a save, kept for each."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from isal.isal_zlib import crc32

from megatron_ucp.core.values import TENSOR, Stand, coded
from megatron_ucp.engines.values import inert
from megatron_ucp.formats.of_ranks import OwnValues, PerRank, file_name, text_of
from megatron_ucp.formats.pt.unpickler import with_tensors
from megatron_ucp.reshard import agree
from megatron_ucp.reshard.execute import bytes_of

Digests = tuple[dict[str, int], dict[Any, str], str]


class LiveValues:
    """This rank's buffers by canonical name, its client state and its scheduler's state (None:
    without one). `has_client_state` says whether it takes part where client states are compared:
    below ZeRO-3 DeepSpeed writes the first rank's alone, and others may give none."""

    def __init__(
        self,
        buffers: Mapping[str, torch.Tensor],
        client_state: Mapping[Any, Any],
        scheduler: Any,
        has_client_state: bool,
    ) -> None:
        self._buffers, self._scheduler = buffers, scheduler
        self._client = client_state if has_client_state else {}
        self._compared = has_client_state

    def differing(self) -> PerRank:
        """What differs among the ranks that have it. Collective: one, and a second one where
        something does."""
        own = self._digests()
        text = repr((sorted(own[0].items()), sorted(map(repr, own[1].items())), own[2]))
        whole = hashlib.sha256(text.encode()).hexdigest()
        if len(set(agree.gather(whole))) == 1:
            return PerRank()
        found = agree.gather((own, self._compared))
        sums: dict[str, set[int]] = {}
        for (buffers, _, _), _ in found:
            for name, one in buffers.items():
                sums.setdefault(name, set()).add(one)
        clients = [client for (_, client, _), compared in found if compared]
        keys = {key for client in clients for key in client}
        return PerRank(
            frozenset(name for name, held in sums.items() if len(held) > 1),
            frozenset(key for key in keys if len({c.get(key) for c in clients}) > 1),
            len({schedule for (_, _, schedule), _ in found}) > 1,
        )

    def _digests(self) -> Digests:
        buffers = {name: _sum(tensor) for name, tensor in self._buffers.items()}
        client = {key: _digest(value) for key, value in self._client.items()}
        return buffers, client, _digest(self._scheduler)

    def write(self, folder: Path, rank: int, what: PerRank) -> Path:
        """Writes what this rank has of all that differs; returns the file. Raises OSError."""
        own = OwnValues(
            {name: inert(t) for name, t in self._buffers.items() if name in what.buffers},
            {key: inert(v) for key, v in self._client.items() if key in what.client_state},
            inert(self._scheduler) if what.scheduler else None,
        )
        path = folder / file_name(rank)
        path.write_text(text_of(own), encoding="utf-8")
        return path


def _sum(tensor: torch.Tensor) -> int:
    """Of shape, dtype and bytes: equal ones have equal sums, others almost never."""
    data = bytes_of(tensor.detach().cpu().contiguous()) if tensor.numel() else b""
    return crc32(data, crc32(f"{tensor.dtype} {tuple(tensor.shape)}".encode()))


def _digest(value: Any) -> str:
    """Of type and bits of a plain value."""
    return hashlib.sha256(repr(coded(_without_bytes(inert(value)))).encode()).hexdigest()


def _without_bytes(value: Any) -> Any:
    """Tensors by their sums, which are shorter than their text."""
    return with_tensors(value, lambda stand: Stand(TENSOR, (_hash(stand),)))


def _hash(stand: Stand) -> str:
    data: Any = stand.get("data")
    return f"{stand.get('dtype')} {stand.get('shape')} {hashlib.sha256(data).hexdigest()}"
