"""The memory of which the fingerprint of a DeepSpeed engine's save is taken."""

import torch

from megatron_ucp.core.plan import Slot
from megatron_ucp.engines.deepspeed.live import LiveEngine
from megatron_ucp.engines.rank_files import RankFiles


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
