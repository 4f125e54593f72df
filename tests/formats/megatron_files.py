"""Megatron's files for tests: those that stock Megatron-LM wrote, and what torch's own reader says
of them."""

import os
import pickle
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from megatron_ucp.formats.megatron.arguments import OF_VALUES
from megatron_ucp.formats.pt import pickle as pt_pickle
from megatron_ucp.formats.pt.archive import write_pt
from megatron_ucp.formats.pt.file import PtFile
from megatron_ucp.formats.pt.refs import StorageRef, storages_of

GOLDEN = Path(__file__).parent / "golden" / "megatron"
GOLDEN_LATER = GOLDEN.parent / "megatron_later"
TAG = "iter_0000003"
LEGACY = "legacy_tp2pp2"
NAMED = ("td_full_tp2dp2", "td_full_moe_ep2", "plain_bf16_tp2")
# what the masters are called in files -> here
STATES = {"param": "fp32", "fp32_param": "fp32", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
# of later versions of Megatron-LM: folder -> what it was saved on
LATER = {
    "v018_dpr_pp2dp2_bf16": "tp=1,pp=2,dp=2,zero=0",
    "v019_dpr_tp2dp2": "tp=2,pp=1,dp=2,zero=0",
    "v019_full_moe_ep2": "tp=1,pp=1,ep=2,dp=4,zero=0",
    "v019_dpr_mtp_tp2": "tp=2,pp=1,dp=1,zero=0",
    "v019_dpr_mla_tp2": "tp=2,pp=1,dp=1,zero=0",
    "v019_dpr_hybrid_tp2": "tp=2,pp=1,dp=1,zero=0",
}
NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}


def copied(case: str, folder: Path) -> Path:
    """A golden checkpoint that a test may change; returns its tag folder."""
    shutil.copytree((GOLDEN_LATER if case in LATER else GOLDEN) / case, folder)
    return folder / TAG


@cache
def by_torch(folder: Path) -> Mapping[str, torch.Tensor]:
    """Every tensor of a torch_dist folder, by its key, as torch's own reader gives it."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import FileSystemReader

    entries = FileSystemReader(folder).read_metadata().state_dict_metadata
    out = {
        key: torch.empty(tuple(entry.size), dtype=entry.properties.dtype)
        for key, entry in entries.items()
        if hasattr(entry, "size")
    }
    dcp.load(out, checkpoint_id=folder, no_dist=True)
    return out


def split(tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, str, torch.Tensor]]:
    """(canonical name, state or "weight", values) of all that lies under names of parameters."""
    for key, tensor in tensors.items():
        found = re.fullmatch(r"optimizer\.state\.(param|fp32_param|exp_avg|exp_avg_sq)\.(.+)", key)
        state, rest = (STATES[found[1]], found[2]) if found else ("weight", key)
        alone = re.fullmatch(r"((?:decoder|mtp)\.layers\.\d+\.(?:transformer_layer\.)?)(.+)", rest)
        if alone:  # a layer that has keys of its own
            yield alone[1] + NORMS.get(alone[2], alone[2]), state, tensor
            continue
        if not rest.startswith("decoder.layers."):
            yield rest, state, tensor
            continue
        inner = rest.removeprefix("decoder.layers.")
        for layer, values in enumerate(tensor):
            prefix = f"decoder.layers.{layer}."
            if inner.startswith("mlp.experts.experts."):
                own = inner.removeprefix("mlp.experts.experts.")
                for expert, part in enumerate(values):
                    yield f"{prefix}mlp.experts.local_experts.{expert}.{own}", state, part
            else:
                yield prefix + NORMS.get(inner, inner), state, values


def stored_weights(case: str) -> dict[str, torch.Tensor]:
    """Weights by name, as torch reads them; those of tensor-parallel ranks put together here."""
    if case != LEGACY:
        tensors = {k: v for k, v in by_torch(GOLDEN / case / TAG).items() if "optimizer" not in k}
        return {name: values for name, _, values in split(tensors)}
    out: dict[str, torch.Tensor] = {}
    for stage in range(2):
        ranks = [
            torch.load(
                GOLDEN / case / TAG / f"mp_rank_0{tp}_00{stage}" / "model_optim_rng.pt",
                weights_only=False,
            )["model"]
            for tp in range(2)
        ]
        for name, one in ranks[0].items():
            if torch.is_tensor(one):
                out[_global(name, stage)] = _together(name, one, ranks[1][name])
    return out


def _global(name: str, stage: int) -> str:
    words = name.split(".")
    if words[:2] == ["decoder", "layers"]:
        words[2] = str(int(words[2]) + 2 * stage)
    return ".".join(words)


def _together(name: str, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    if name.endswith(("norm.weight", "layernorm.weight")):
        return one
    if name.endswith(("linear_proj.weight", "linear_fc2.weight")):
        return torch.cat([one, other], 1)
    if name.endswith("linear_fc1.weight"):  # gate above up, on each rank
        halves = [half for pair in zip(one.chunk(2), other.chunk(2), strict=True) for half in pair]
        return torch.cat(halves)
    return torch.cat([one, other])


# ------------------------------------------------ changes


def rewritten(path: Path, change: Callable[[Any], None]) -> None:
    """Changes the tree of a `.pt` file in place; tensors keep their bytes."""
    with PtFile(path, allow=OF_VALUES) as file:
        tree: Any = file.tree
        data = {ref.key: file_bytes(file, ref) for ref in storages_of(tree)}
    change(tree)
    with mock.patch.object(pt_pickle, "is_call", return_value=False):  # Megatron's own enums
        write_pt(path, tree, lambda storage: [data[storage.key]])


def file_bytes(file: PtFile, storage: StorageRef) -> bytes:
    out = bytearray(storage.size_bytes)
    file.read_into(storage, 0, memoryview(out))
    return bytes(out)


def changed_arguments(tag: Path, name: str = "common.pt", **values: Any) -> None:
    """Other arguments of the run in a file."""
    rewritten(tag / name, lambda tree: tree["args"].state.update(values))


def changed_index(tag: Path, change: Callable[[Any], None]) -> None:
    """Changes `.metadata`, as torch's own objects."""
    path = tag / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata, protocol=4))


def swapped_chunks(tag: Path, one: tuple[str, tuple[int, ...]], other: tuple[str, ...]) -> None:
    """Lets two chunks of the index, each a key and where it begins, change places."""

    def change(metadata: Any) -> None:
        found = {(i.fqn, tuple(i.offset)): i for i in metadata.storage_data if i.offset is not None}
        places = metadata.storage_data
        a, b = found[one], found[other]  # type: ignore[index]
        places[a], places[b] = places[b], places[a]

    changed_index(tag, change)


# ---- changes of a folder, for tables of what is refused


def index_of(change: Callable[[Any], None]) -> Callable[[Path], None]:
    return lambda folder: changed_index(folder, change)


def outside(name: str) -> Callable[[Path], None]:
    def change(metadata: Any) -> None:
        for place in metadata.storage_data.values():
            place.relative_path = name

    return index_of(change)


def negative(folder: Path) -> None:
    def change(metadata: Any) -> None:
        next(iter(metadata.storage_data.values())).offset = -1

    changed_index(folder, change)


def cut(name: str, size: int) -> Callable[[Path], None]:
    return lambda folder: os.truncate(folder / name, size)


def lost(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def no_index(folder: Path) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps({}))
