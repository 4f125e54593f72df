"""DeepSpeed's own mixtures of experts, saved and resumed at another expert-parallel size."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import megatron_ucp as ucp
from tests.engines import moe_jobs
from tests.engines.fingerprints import MARK
from tests.engines.moe_jobs import Moe
from tests.engines.moe_pipe_jobs import Piped
from tests.engines.sources import Sources, check, without_manifest
from tests.ranks import RankPool

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize("zero", [1, 0, 2])
@pytest.mark.parametrize("ep", [1, 2, 4])
def test_a_mixture_resumes_at_another_expert_parallel_size(
    ranks: RankPool, sources: Sources, ep: int, zero: int
) -> None:
    folder = sources.get(4, Moe(2, zero), more=3)
    world = 4 if ep > 1 else 2
    check(sources.resume(world, Moe(ep, zero), folder, more=3), 1e-5)


@pytest.mark.parametrize("ep", [1, 2])
def test_layers_with_other_numbers_of_experts(ranks: RankPool, sources: Sources, ep: int) -> None:
    """PR-MoE: two and four experts, each beside a dense MLP (residual MoE)."""
    setup = {"experts": (2, 4), "residual": True}
    folder = sources.get(4, Moe(2, 1, **setup), more=3)
    check(sources.resume(4, Moe(ep, 2, **setup), folder, more=3), 1e-5)


SCALED: dict[str, Any] = {"scaled": True}


@pytest.mark.parametrize("stock", [False, True])
def test_buffers_of_experts(ranks: RankPool, sources: Sources, tmp_path: Path, stock: bool) -> None:
    """A rank's model file lists those of its own experts alone."""
    folder = tmp_path / "copy"
    shutil.copytree(sources.get(4, Moe(2, 1, **SCALED), more=0), folder)
    if stock:
        without_manifest(folder)
    kinds = {p.name: p.kind for p in ucp.describe(folder / "trained").params if p.expert}
    assert sum(kind == "buffer" for kind in kinds.values()) == 2 * 2 * 4
    assert {name for name, kind in kinds.items() if kind == "buffer"} == {
        name for name in kinds if name.endswith((".scale", ".seen"))
    }
    assert ucp.verify(folder / "trained", deep=True).findings == ()
    for world, setup in ((4, Moe(4, 2, seed=5, **SCALED)), (1, Moe(1, 0, seed=5, **SCALED))):
        (found, *_) = sources.resume(world, setup, str(folder))
        assert found["differences"] and not any(found["differences"].values())
        assert any(".seen" in one for one in found["before"]["filled"])


@pytest.mark.parametrize("zero", [1, 0])
def test_each_rank_trains_other_ones_of_its_experts(
    ranks: RankPool, sources: Sources, zero: int
) -> None:
    """Of 0 and 1 the first, of 2 and 3 the second: files name those of the first rank alone."""
    setup = Moe(2, zero, frozen=(1, 2))
    folder = sources.get(4, setup, more=3)
    assert ucp.verify(Path(folder) / "trained", deep=True).findings == ()
    params = ucp.describe(Path(folder) / "trained").params
    assert {p.expert[0] for p in params if p.expert and p.kind == "frozen"} == {1, 2}
    for world, ep in ((4, 2), (2, 1)):
        target = replace(setup, ep=ep, zero=2 * zero, seed=5)
        check(sources.resume(world, target, folder, more=3), 1e-5)


@pytest.mark.parametrize("stock", [True, False])
def test_a_tied_head_of_which_stock_writes_two_copies(
    ranks: RankPool, sources: Sources, tmp_path: Path, stock: bool
) -> None:
    """At stage 0 the model file of a mixture does not say that two names are one."""
    setup, folder = Moe(2, 0, tied=True), tmp_path / "copy"
    shutil.copytree(sources.get(4, setup, more=0), folder)
    if stock:
        without_manifest(folder)
    target = replace(setup, seed=5)
    if not stock:
        check(sources.resume(4, target, str(folder)))
        return
    weights: dict[str, Any] = {"allow": ("weights",), "load_optimizer_states": False}
    for rank in sources.resume(4, target, str(folder), tags=("trained",), **weights):
        kinds = {line.partition(" ")[0] for line in rank["differences"]["trained"]}
        assert kinds and not kinds & {"weights", "values"}
    for path in (folder / "trained").glob("mp_rank_*"):
        tree = torch.load(path, weights_only=False)
        assert torch.equal(tree["module"]["head.weight"], tree["module"]["embed.weight"])
        tree["module"]["head.weight"] = tree["module"]["head.weight"] + 1
        torch.save(tree, path)
    said = ranks.run(4, moe_jobs.load_refused, target, str(folder), timeout_s=200, **weights)
    assert all("two parameters are one in the model" in one for one in said)
    assert all("head.weight" in one for one in said)


@pytest.mark.parametrize("zero", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_a_save_without_frozen_weights(
    ranks: RankPool, sources: Sources, tmp_path: Path, zero: int
) -> None:
    """DeepSpeed leaves them out of its model files, not of those of experts."""
    setup = Moe(2, zero, frozen=(1, 2))
    ranks.run(4, moe_jobs.save_without_frozen, setup, str(tmp_path))
    assert ucp.verify(tmp_path, deep=True).findings == ()
    target = replace(setup, ep=1, seed=5)
    (found, *_) = sources.resume(2, target, str(tmp_path), tags=("trained",))
    assert found["differences"] == {"trained": []}


def test_a_rank_that_trains_none_of_its_experts(ranks: RankPool, tmp_path: Path) -> None:
    """Stage 0 alone builds such an engine; the groups of its ranks are others."""
    setup = Moe(4, 0, frozen=(1, 2))
    for said in ranks.run(4, moe_jobs.save_refused, setup, str(tmp_path), timeout_s=100):
        assert "other numbers of parameter groups" in said and "4 groups" in said
    assert not list(tmp_path.rglob("*.pt"))


EXPERTS = "mixtures.1.deepspeed_moe.experts.deepspeed_experts."
# a fault that is planted -> what the fingerprint names
FAULTS = {
    "two experts swapped": [f"{EXPERTS}0.up.weight (fp32)", f"{EXPERTS}1.up.weight (fp32)"],
    "a row of the router": ["mixtures.0.deepspeed_moe.gate.wg.weight (fp32)"],
    "an expert's moment": [f"{EXPERTS}0.up.weight (exp_avg)"],
    "an expert's decay": [f"{EXPERTS}0.up.weight (steps or hyper-parameters)"],
}


@pytest.mark.parametrize("plant", FAULTS)
def test_a_planted_fault_is_seen(ranks: RankPool, sources: Sources, plant: str) -> None:
    folder = sources.get(4, Moe(2, 1), more=3)
    (found, *_) = sources.resume(2, Moe(1, 0), folder, plant=plant, tags=("filled",))
    assert found["differences"]["filled"]
    said = [one for one in found["differences"]["filled"] if one.startswith(MARK)]
    assert {MARK + one for one in FAULTS[plant]} <= {*said}, said


def test_a_client_state_with_a_reserved_key(
    ranks: RankPool, sources: Sources, tmp_path: Path
) -> None:
    """L8: stock dies on one rank there, and the others wait for ever."""
    state = {"universal_checkpoint_info": dict[str, int]()}
    found = ranks.run(4, moe_jobs.save_refused, Moe(2, 1), str(tmp_path), state, timeout_s=100)
    assert all("universal_checkpoint_info" in said for said in found)
    assert not list(tmp_path.glob("*/*.pt"))


def test_experts_without_numbers(ranks: RankPool, sources: Sources) -> None:
    """Such as several in one tensor: two ranks hold other ones under one name."""
    folder = sources.get(4, Moe(2, 1), more=3)
    for said in ranks.run(4, moe_jobs.unnamed, Moe(2, 1), folder, timeout_s=100):
        assert "does not say of which ones" in said and "parameter: stacked" in said


def test_what_was_added_to_experts_later(ranks: RankPool, sources: Sources) -> None:
    """DeepSpeed would average it over other experts of other ranks."""
    folder = sources.get(4, Moe(2, 1), more=3)
    for said in ranks.run(4, moe_jobs.adapted, Moe(2, 1), folder, timeout_s=100):
        assert "reduced with those of other experts" in said
        assert "deepspeed_experts.0.late" in said


PR_MOE: dict[str, Any] = {"experts": (2, 4), "residual": True}


@pytest.mark.parametrize(
    "setup",
    [
        Moe(2, 1),
        Moe(2, 2),
        Moe(2, 1, "bf16"),
        Moe(2, 2, **PR_MOE),
        pytest.param(Moe(2, 2, "bf16"), marks=pytest.mark.slow),
        pytest.param(Moe(2, 1, **PR_MOE), marks=pytest.mark.slow),
    ],
)
def test_files_of_stock_deepspeed(
    ranks: RankPool, sources: Sources, tmp_path: Path, setup: Moe
) -> None:
    """L7, S8: without a manifest, as stock wrote them."""
    folder = tmp_path / "stock"
    shutil.copytree(sources.get(4, setup, more=3), folder)
    without_manifest(folder)
    for ep in (1, min(4, *setup.experts)):
        target = replace(setup, ep=ep)
        check(sources.resume(4, target, str(folder)))


def piped(ep: int, zero: int, pp: int = 0) -> Piped:
    return Piped(ep, zero, pp=pp)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (piped(2, 1, pp=2), piped(1, 2)),
        (piped(2, 1, pp=2), piped(4, 0)),
        (piped(2, 0, pp=2), piped(1, 1, pp=2)),
        (piped(2, 2), piped(2, 0, pp=2)),
    ],
)
def test_in_a_pipeline(ranks: RankPool, sources: Sources, source: Piped, target: Piped) -> None:
    folder = sources.get(4, source, more=3)
    check(sources.resume(4, target, folder, more=3), 1e-5)


def test_files_of_a_stock_pipeline(ranks: RankPool, sources: Sources, tmp_path: Path) -> None:
    folder = tmp_path / "stock"
    shutil.copytree(sources.get(4, piped(2, 1, pp=2), more=3), folder)
    without_manifest(folder)
    for target in (piped(1, 1), piped(4, 1)):
        check(sources.resume(4, target, str(folder)))


def test_two_experts_swapped_in_a_pipeline(ranks: RankPool, sources: Sources) -> None:
    folder = sources.get(4, piped(2, 1, pp=2), more=3)
    (found, *_) = sources.resume(4, piped(1, 0, pp=2), folder, plant="swap")
    assert found["differences"]["filled"]
