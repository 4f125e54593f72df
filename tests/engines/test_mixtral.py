"""Mixtral under DeepSpeed: saved and resumed on other expert-parallel, expert-tensor-parallel,
tensor-parallel and pipeline sizes, bit for bit."""

import itertools
import random
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pretrain.mcore.experts import Experts
from tests.engines.sources import Sources, check, without_manifest
from tests.engines.tensor_jobs import Staged
from tests.ranks import RankPool
from tests.share import LOSS_STEPS

pytestmark = pytest.mark.ranks
EXPERTS = Experts(4, ffn=12, shared_ffn=8, bias=True, score="sigmoid")


def mixtral(
    ep: int, tp: int = 1, pp: int = 0, zero: int = 1, etp: int = 0, **more: object
) -> Staged:
    """A Mixtral of three layers, experts in each."""
    return Staged(
        "mixtral",
        tp,
        zero,
        layers=3,
        pp=pp,
        ep=ep,
        etp=etp,
        experts=EXPERTS,
        sequence_parallel=tp > 1,
        **more,
    )


PAIRS = [
    (mixtral(2, zero=1), mixtral(1, zero=1)),
    (mixtral(2, zero=1), mixtral(4, zero=2)),
    (mixtral(4, zero=2), mixtral(2, tp=2, zero=1)),
    (mixtral(2, tp=2, etp=1, zero=1), mixtral(4, zero=0)),
    (mixtral(1, zero=3), mixtral(2, zero=0)),
    (mixtral(2, zero=0), mixtral(1, zero=3)),
    (mixtral(2, pp=2, zero=1), mixtral(2, tp=2, zero=2)),
    (mixtral(2, tp=2, zero=1), mixtral(2, pp=2, zero=0)),
    (mixtral(2, tp=2, etp=1, zero=1), mixtral(1, tp=2, zero=3)),
    (mixtral(2, pp=2, zero=1), mixtral(1, tp=2, pp=2, zero=1)),
    (mixtral(4, tp=2, etp=1, zero=0), mixtral(2, tp=2, zero=2)),
    (mixtral(1, tp=2, zero=1), mixtral(4, tp=2, etp=1, zero=1)),
]


def meshes() -> Iterator[Staged]:
    """Every cut of four ranks under which DeepSpeed trains experts and saves all of them."""
    for ep, etp, tp, pp, zero in itertools.product((1, 2, 4), (1, 2), (1, 2), (0, 2), range(4)):
        saved_whole = etp <= tp <= ep * etp
        fits = ep * etp * max(pp, 1) <= 4 and tp * max(pp, 1) <= 4
        supported = (zero < 3 or ep == 1) and (zero < 2 or not pp)
        if saved_whole and fits and supported:
            yield mixtral(ep, tp, pp, zero, etp)


def marked() -> list[Any]:
    """More pairs, drawn once and for all: every mesh is a source and a target."""
    every = list(meshes())
    drawn = random.Random(11)
    pairs = [(one, drawn.choice(every)) for one in every]
    pairs += [(drawn.choice(every), one) for one in every]
    return [pytest.param(pair, marks=pytest.mark.slow, id=named(pair)) for pair in pairs]


def named(pair: object) -> str:
    one, two = pair
    return "-".join(f"ep{s.ep}etp{s.etp or s.tp}tp{s.tp}pp{s.pp}z{s.zero}" for s in (one, two))


@pytest.mark.parametrize("pair", [*(pytest.param(p, id=named(p)) for p in PAIRS), *marked()])
@pytest.mark.cases(8)
def test_pair(ranks: RankPool, sources: Sources, pair: object) -> None:
    source, target = pair
    folder = sources.get(4, source, more=0)
    check(sources.resume(4, target, folder))


ALTERNATING = Experts(4, ffn=12, every=2)
OTHERS = {
    "bf16": (
        mixtral(2, tp=2, etp=1, zero=1, dtype="bf16"),
        mixtral(4, zero=2, dtype="bf16"),
    ),
    "fp16": (mixtral(1, zero=3, dtype="fp16"), mixtral(2, tp=2, zero=0, dtype="fp16")),
    "an MLP in every second layer": (
        replace(mixtral(2, pp=2, zero=1), experts=ALTERNATING),
        replace(mixtral(1, zero=3), experts=ALTERNATING),
    ),
}


@pytest.mark.parametrize("pair", OTHERS)
def test_pair_of_another_kind(ranks: RankPool, sources: Sources, pair: str) -> None:
    test_pair(ranks, sources, OTHERS[pair])


BY_FILES = [
    mixtral(2, tp=2, etp=1, zero=1),
    mixtral(4, tp=2, etp=1, zero=2, dtype="bf16"),
    mixtral(2, tp=2, zero=1, dtype="bf16"),
    pytest.param(mixtral(2, tp=2, pp=2, etp=1, zero=1), marks=pytest.mark.slow),
    pytest.param(mixtral(2, tp=2, etp=1, zero=2), marks=pytest.mark.slow),
]


@pytest.mark.parametrize("source", BY_FILES, ids=str)
def test_how_experts_are_cut_is_seen_from_files(
    ranks: RankPool, sources: Sources, tmp_path: Path, source: Staged
) -> None:
    """Without a manifest: an expert has a file for each rank that cuts it."""
    folder = tmp_path / "stock"
    shutil.copytree(sources.get(4, source, more=0), folder)
    without_manifest(folder)
    target = mixtral(4, zero=2, dtype=source.dtype, seed=5)
    check(sources.resume(4, target, str(folder)))


def test_at_least_sixty_pairs_are_marked() -> None:
    assert len(marked()) >= 60


@pytest.mark.parametrize("target", [mixtral(2, tp=2, zero=2), mixtral(2, pp=2, zero=1)])
def test_the_losses_of_the_run_go_on(ranks: RankPool, sources: Sources, target: Staged) -> None:
    """In fp32, the router too, for twenty steps; no token is dropped."""
    folder = sources.get(4, mixtral(4, zero=1), more=LOSS_STEPS)
    (found, *_) = sources.resume(4, target, folder, tags=("trained",), more=LOSS_STEPS)
    assert found["differences"] == {"trained": []}
    assert found["loss"] <= 1e-5


FAULTS = [
    "two experts swapped",
    "gate and up of an expert swapped",
    "two rows of the router swapped",
    "a router's bias",
    "an expert's moment",
]


@pytest.mark.parametrize("plant", FAULTS)
def test_a_planted_fault_is_seen(ranks: RankPool, sources: Sources, plant: str) -> None:
    folder = sources.get(4, mixtral(2, zero=1), more=0)
    (found, *_) = sources.resume(1, mixtral(1, zero=0), folder, plant=plant, tags=("filled",))
    assert found["differences"]["filled"]
