"""Hugging Face folders from checkpoints that real engines wrote, and into real engines on other
meshes."""

from pathlib import Path
from typing import Any

import pytest

import megatron_ucp as ucp
from megatron_ucp.engines.megatron.experts import Experts
from tests.engines.pipeline_jobs import Staged
from tests.engines.sources import Sources
from tests.reshard import twins

pytestmark = pytest.mark.ranks
JOBS, SAVE = "tests.engines.hf_jobs:", "tests.engines.pipeline_jobs:save"
EXPERTS = Experts(4, ffn=8)


def setup(family: str, tp: int = 1, zero: int = 1, **more: Any) -> Staged:
    """GPT-2 has a key and a value for each head."""
    known: dict[str, Any] = {"groups": 4} if family == "gpt" else {}
    if family == "mixtral":
        known |= {"experts": EXPERTS, "sequence_parallel": tp > 1}
    return Staged(family, tp, zero, layers=2, **{**known, **more})


def exported(sources: Sources, tmp_path: Path, world: int, origin: Staged, **options: Any) -> Path:
    folder = sources.get(world, origin, SAVE, more=0)
    ucp.export_hf(folder, tmp_path / "hf", tag="filled", verify=True, **options)
    return Path(folder)


# (ranks, mesh of the save; ranks, mesh of the load)
PAIRS = [
    ("llama", 2, {"tp": 2, "zero": 1}, 4, {"tp": 1, "zero": 3}),
    ("llama", 4, {"tp": 1, "zero": 3}, 4, {"tp": 2, "pp": 2, "zero": 1}),
    ("gpt", 4, {"tp": 2, "pp": 2, "zero": 1}, 2, {"tp": 2, "zero": 2}),
    ("gpt", 1, {"tp": 1, "zero": 0}, 4, {"tp": 4, "zero": 1}),
    ("mixtral", 4, {"tp": 1, "ep": 2, "zero": 1}, 4, {"tp": 2, "ep": 2, "etp": 1, "zero": 1}),
    ("mixtral", 2, {"tp": 1, "zero": 3}, 4, {"tp": 1, "ep": 4, "zero": 2}),
]


@pytest.mark.parametrize(("family", "world", "origin", "there", "target"), PAIRS)
def test_out_and_in_on_another_mesh(
    sources: Sources,
    tmp_path: Path,
    family: str,
    world: int,
    origin: dict[str, int],
    there: int,
    target: dict[str, int],
) -> None:
    """Masters are the same bits, and the optimizer begins afresh, also one that had stepped."""
    oracle = exported(sources, tmp_path, world, setup(family, **origin))
    where = setup(family, **target, seed=9)
    found = sources.ranks.run(
        there, JOBS + "load", where, str(tmp_path / "hf"), str(oracle), trained=1, timeout_s=180
    )
    for rank in found:
        assert not rank["error"], rank["error"]
        assert rank["masters"] == [] and rank["compared"] > 10
        assert rank["states"] == ["fp32"]
        assert any("begin afresh" in note for note in rank["notes"])
    weights = sum(value.nbytes for value in twins.read(tmp_path / "hf").values())
    if (where.tp, where.ep) == (1, 1):  # each byte is read once, and by one rank
        assert sum(rank["read_bytes"] for rank in found) == weights * (1 if where.zero else there)
