"""Random states that Megatron-LM saved, as torch's own reader gives them, and folders in which they
are changed."""

import io
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_ucp.core.mesh import Mesh
from tests.formats.megatron_files import GOLDEN, TAG, changed_index

# folder -> the mesh of the run that saved it
RUNS = {
    "rng_tp2dp2": Mesh(tp=2, dp=2),
    "rng_moe_ep2": Mesh(dp=2, ep=2, etp=1),
    "rng_legacy_tp2dp2": Mesh(tp=2, dp=2),
}


def key_of(case: str, rank: int) -> str:
    """What Megatron-LM calls the entry that a rank loads."""
    shards = {
        "rng_tp2dp2": f"rng_state/shard_0.{rank % 2}_1.2",
        "rng_moe_ep2": f"rng_state/shard_0.0.{rank}_1.1.2",
        "rng_legacy_tp2dp2": f"mp_rank_0{rank % 2}/model_optim_rng.pt",
    }
    return shards[case]


def saved_states(case: str, rank: int) -> dict[str, Any]:
    """What a rank of the run saved, read without this package."""
    key, tag = key_of(case, rank), GOLDEN / case / TAG
    if "legacy" in case:  # of each data-parallel rank, which are two neighbours
        return torch.load(tag / key, weights_only=False)["rng_state"][rank // 2]
    metadata = pickle.loads((tag / ".metadata").read_bytes())
    (place,) = [place for index, place in metadata.storage_data.items() if index.fqn == key]
    data = (tag / place.relative_path).read_bytes()[place.offset : place.offset + place.length]
    ((saved,),) = torch.load(io.BytesIO(data), weights_only=False)
    return saved


def alike(value: Any, other: Any) -> bool:
    """Whether two states of generators are the same bits."""
    if torch.is_tensor(value) and torch.is_tensor(other):
        return torch.equal(value, other)
    if isinstance(value, np.ndarray):
        return np.array_equal(value, other)
    if isinstance(value, tuple | list) and len(value) == len(other):
        return all(alike(a, b) for a, b in zip(value, other, strict=True))
    if isinstance(value, dict):
        return value.keys() == other.keys() and all(alike(value[k], other[k]) for k in value)
    return type(value) is type(other) and value == other


def replaced(tag: Path, key: str, value: Any) -> None:
    """Another object under a key of a torch_dist folder: its archive is added to the file."""
    out = io.BytesIO()
    torch.save([value], out)

    def change(metadata: Any) -> None:
        (index,) = [index for index in metadata.storage_data if index.fqn == key]
        place = metadata.storage_data[index]
        path = tag / place.relative_path
        start = os.path.getsize(path)
        with path.open("ab") as file:
            file.write(out.getvalue())
        place = type(place)(place.relative_path, start, len(out.getvalue()))
        metadata.storage_data[index] = place

    changed_index(tag, change)


def without(tag: Path, key: str) -> None:
    """No object under a key."""

    def change(metadata: Any) -> None:
        del metadata.state_dict_metadata[key]
        del metadata.storage_data[next(i for i in metadata.storage_data if i.fqn == key)]

    changed_index(tag, change)


def renamed(tag: Path, key: str, other: str) -> None:
    """The same object under another key."""

    def change(metadata: Any) -> None:
        entries, places = metadata.state_dict_metadata, metadata.storage_data
        entries[other] = entries.pop(key)
        index = next(index for index in places if index.fqn == key)
        places[type(index)(other)] = places.pop(index)

    changed_index(tag, change)
