"""The fingerprint of a live DeepSpeed engine, or of the snapshot of one."""

from collections.abc import Mapping
from typing import Any

import torch

from megatron_ucp.core.manifest import Manifest
from megatron_ucp.core.plan import Slot
from megatron_ucp.engines.deepspeed.live import LiveEngine, describe
from megatron_ucp.engines.rank_files import RankFiles
from megatron_ucp.errors import some_of
from megatron_ucp.families.base import Model
from megatron_ucp.reshard import agree
from megatron_ucp.reshard.fingerprint import (
    Fingerprint,
    Sums,
    require_alike,
    settings_of,
    sums_of,
    table_of,
)


def fingerprint_of(engine: Any, model: Model | None) -> Fingerprint:
    """Of an engine as it is. Collective. Raises ForeignFileError where its replicas differ."""
    live = describe(engine, model, present=True)
    sums = agree.collect(lambda: sums_of_rank(live.manifest, held_by(live, None)))
    table, apart = table_of(live.manifest, sums)
    require_alike(apart, "the live engine")
    return Fingerprint(table, settings_of(live.manifest))


def held_by(live: LiveEngine, files: RankFiles | None) -> dict[Slot, torch.Tensor]:
    """The memory of every state that this rank has: of a save in the background that of its
    snapshot. What that has not got is copied, unless another rank has it."""
    out: dict[Slot, torch.Tensor] = {}
    for number, cut, part in live.parts():
        for state, _ in live.manifest.buffers[number].states:
            slot = Slot(number, cut, part, state)
            memory = live.tensor(slot)
            kept = memory if files is None else files.kept(memory)
            if kept is not None:
                out[slot] = kept
            elif not _is_copy(live, number):
                out[slot] = memory.clone()
    return out


def _is_copy(live: LiveEngine, number: int) -> bool:
    """Whether another data-parallel rank has a whole buffer, and writes it."""
    manifest = live.manifest
    buffer = manifest.buffers[number]
    dense = all(manifest.by_name[one.param].expert is None for one in buffer.members)
    return dense and buffer.partitions == 1 and live.own.data_rank > 0


def sums_of_rank(manifest: Manifest, held: Mapping[Slot, torch.Tensor]) -> Sums:
    """What this rank's memory adds to the fingerprint of all."""
    return sums_of(manifest, [(slot, slot.state) for slot in held], held.__getitem__)


def diverged(apart: list[str]) -> list[str]:
    """A note about parameters of which ranks have different copies."""
    if not apart:
        return []
    return [f"copies of one parameter differ between ranks, and one is saved: {some_of(apart)}"]
