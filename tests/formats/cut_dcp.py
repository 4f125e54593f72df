"""Saves dictionaries by torch's own `dcp.save` in one process, each tensor cut as ranks of any mesh
would have cut it."""

import itertools
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType


class CutPlanner(DefaultSavePlanner):
    """Cuts the dims of each tensor into so many pieces, uneven as torch's `chunk` cuts them."""

    def __init__(self, pieces: tuple[int, ...]) -> None:
        super().__init__()
        self._pieces = pieces

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        items: list[WriteItem] = []
        for item in plan.items:
            tensor = self.state_dict[item.index.fqn]
            cuttable = isinstance(tensor, torch.Tensor) and tensor.dim() and tensor.numel()
            items += self._cut(item.index.fqn, tensor) if cuttable else [item]
        return SavePlan(items, plan.storage_data, plan.planner_data)

    def _cut(self, key: str, tensor: torch.Tensor) -> list[WriteItem]:
        runs: list[list[tuple[int, int]]] = []
        for dim, size in enumerate(tensor.shape):
            count = self._pieces[dim] if dim < len(self._pieces) else 1
            step = -(-size // count)
            runs.append([(at, min(at + step, size)) for at in range(0, size, step)])
        out: list[WriteItem] = []
        for box in itertools.product(*runs):
            start, size = torch.Size(a for a, _ in box), torch.Size(b - a for a, b in box)
            data = TensorWriteData(
                ChunkStorageMetadata(start, size), TensorProperties(tensor.dtype), tensor.shape
            )
            index = MetadataIndex(key, start)
            out.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        return out

    def lookup_object(self, index: MetadataIndex) -> Any:
        tensor = self.state_dict[index.fqn]
        if index.offset is None or not isinstance(tensor, torch.Tensor) or not tensor.dim():
            return super().lookup_object(index)
        sizes = [len(self._pieces) > d and self._pieces[d] or 1 for d in range(tensor.dim())]
        at = []
        for dim, first in enumerate(index.offset):
            step = -(-tensor.shape[dim] // sizes[dim])
            at.append(slice(first, min(first + step, tensor.shape[dim])))
        return tensor[tuple(at)].contiguous()


def save_cut(tree: Any, folder: Path, pieces: tuple[int, ...]) -> None:
    dcp.save(tree, checkpoint_id=folder, planner=CutPlanner(pieces), no_dist=True)
