"""Folders of mixtures, as transformers writes them, into engines of transformers' own models: from
transformers 5 on those have the experts of a layer in one tensor."""

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

import megatron_ucp as ucp
from tests.engines import mixture_jobs
from tests.ranks import RankPool

pytestmark = pytest.mark.ranks
JOB = mixture_jobs.load


def flip(path: Path, words: str) -> None:
    """The sign of one element of the last up projection with these words in its name."""
    tensors = load_file(path)
    name = [one for one in tensors if words in one and one.split(".")[-2] in ("up_proj", "w3")][-1]
    tensors[name][1, 2] *= -1
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("kind", "world", "zero"), [("mixtral", 2, 1), ("qwen3_moe", 2, 3), ("mixtral", 1, 0)]
)
def test_every_expert_goes_where_transformers_puts_it(
    ranks: RankPool, tmp_path: Path, kind: str, world: int, zero: int
) -> None:
    for rank in ranks.run(world, JOB, kind, zero, str(tmp_path)):
        assert rank["error"] == "" and rank["after"] == []
        assert len([name for name in rank["before"] if ".experts." in name]) == 4
    native, folder = tmp_path / "native" / "tag", tmp_path / "hf"
    assert ucp.diff(native, folder) == ucp.diff(folder, native) == []
    flip(folder / "model.safetensors", "experts.1.")
    assert [one.parameter for one in ucp.diff(native, folder)] == [
        "model.layers.1.mlp.experts.gate_up_proj"
    ]


FAULTS: dict[str, tuple[str, list[str]]] = {
    "gate and up swapped": ("", ["model.layers.1.mlp.experts.gate_up_proj"]),
    "an expert is missing": ("experts.2.w1.weight: missing", []),
    "an expert too many": ("experts.3.w1.weight", []),
    "another width": ("experts.2.w1.weight: [11, 16] instead of [12, 16]", []),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_folder_with_a_fault(ranks: RankPool, tmp_path: Path, fault: str) -> None:
    """Swapped halves are what the comparison above would see; the rest is refused on every rank,
    with nothing loaded."""
    said, differ = FAULTS[fault]
    found: list[dict[str, Any]] = ranks.run(2, JOB, "mixtral", 1, str(tmp_path), fault)
    for rank in found:
        assert said in rank["error"] and bool(rank["error"]) == bool(said)
        assert rank["after"] == (differ or rank["before"])
