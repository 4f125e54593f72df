"""DeepSpeed's Muon, whose momentum lies as whole matrices at ZeRO-1 and 2: between any two stages
and numbers of ranks, bit for bit.

`Twins` has matrices of three shapes, of which every cut among two or four ranks splits some. The
momentum is gathered by DeepSpeed's own list of what touches a partition (`masters.matrices_of`).
"""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import megatron_ucp as ucp
from megatron_ucp.errors import UnsupportedError
from megatron_ucp.formats.deepspeed.target import Target
from tests.engines.model import Setup
from tests.engines.sources import Sources, without_manifest
from tests.engines.test_pairs import check

pytestmark = pytest.mark.ranks
JOBS = "tests.engines.muon_jobs:"
OFFLOAD = (("offload_optimizer", (("device", "cpu"),)),)
GAPS = (("parameter_alignment", True), ("round_robin_gradients", True))
WIDE = (("data_types", {"grad_accum_dtype": "fp32"}),)  # BF16_Optimizer at ZeRO-1
FUSED = (("torch_adam", False),)


def muon(zero: int, dtype: str = "fp32", config: Any = (), **kwargs: Any) -> Setup:
    """Without clipping, which DeepSpeed does before Newton-Schulz at some stages and behind it at
    others."""
    config = (("gradient_clipping", 0.0), *config)
    return Setup(zero, dtype, "muon", net="Twins", config=config, **kwargs)


SOURCES = {
    "dp2z1": (2, muon(1)),
    "dp4z3": (4, muon(3)),
    "dp1z0": (1, muon(0)),
    "dp2z1off": (2, muon(1, zero_config=OFFLOAD)),
    "dp2z2bf16": (2, muon(2, "bf16", options=FUSED)),
    "dp4bf16": (4, muon(1, "bf16", WIDE)),
    "dp2z2gaps": (2, muon(2, zero_config=GAPS)),
}
PAIRS = [
    ("dp2z1", 4, muon(1)),
    ("dp2z1", 2, muon(3)),
    ("dp2z1", 1, muon(0)),
    ("dp2z1", 4, muon(2, zero_config=OFFLOAD)),
    ("dp4z3", 2, muon(2)),
    ("dp4z3", 4, muon(1, zero_config=GAPS)),
    ("dp4z3", 1, muon(3, zero_config=OFFLOAD)),
    ("dp1z0", 4, muon(2)),
    ("dp1z0", 2, muon(0)),
    ("dp2z1off", 2, muon(1)),
    ("dp2z2gaps", 4, muon(1)),
    ("dp2z2bf16", 4, muon(3, "bf16", options=FUSED)),
    ("dp2z2bf16", 4, muon(2, "bf16", options=FUSED)),
    ("dp4bf16", 2, muon(1, "bf16", WIDE)),
    ("dp4bf16", 2, muon(1, "bf16", zero_config=OFFLOAD)),
    ("dp4bf16", 1, muon(0, "bf16")),
]


def source(sources: Sources, name: str) -> str:
    ranks, setup = SOURCES[name]
    more = 20 if setup.dtype == "fp32" else 0
    return sources.get(ranks, setup, JOBS + "save", more=more)


def resume(sources: Sources, name: str, ranks: int, setup: Setup, **options: Any) -> list[dict]:
    folder = options.pop("folder", None) or source(sources, name)
    return sources.ranks.run(ranks, JOBS + "resume", setup, folder, **options)


@pytest.mark.parametrize(("name", "world", "setup"), PAIRS)
def test_pair(sources: Sources, name: str, world: int, setup: Setup) -> None:
    fp32 = setup.dtype == "fp32"
    found = resume(sources, name, world, setup, more=20 if fp32 else 0)
    check(found)
    assert not fp32 or found[0]["loss"] <= 1e-5
    assert any("momentum_buffer" in line for line in found[0]["before"]["filled"])
