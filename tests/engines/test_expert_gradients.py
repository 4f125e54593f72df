"""Models with experts under DeepSpeed: every cut has the gradients, and the gradient norm, of one
rank."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_ucp.core.box import Box
from tests.engines import expert_jobs
from tests.engines.expert_jobs import MIXTRAL, Cut, with_experts
from tests.ranks import RankPool

TOLERANCE = 1e-6
Found = dict[str, Any]


@pytest.fixture(scope="module")
def truth(ranks: RankPool) -> Found:
    """One rank without ZeRO."""
    found = ranks.run(1, expert_jobs.gradients, Cut())[0]
    assert set(found["gradients"]) == set(MIXTRAL.model().table)
    for name, gradient in found["gradients"].items():
        assert gradient.abs().max() > 1e-3, f"{name} has no gradient worth comparing"
    return found


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))


def differences(found: list[Found], want: Found, cut: Cut) -> tuple[float, float, float]:
    """Largest difference of gradients, of norms in relation to the norm, and of losses (the
    auxiliary one too), over all ranks; every expert's gradient was compared."""
    table, seen = MIXTRAL.model().table, set()
    gradients = norms = losses = 0.0
    for rank in found:
        place = {
            "tp": (cut.tp, rank["tensor"]),
            "etp": (cut.etp or cut.tp, rank["expert_tensor"]),
        }
        for name, local in rank["gradients"].items():
            seen.add(name)
            whole, declared = want["gradients"][name], table[name]
            for piece in declared.layout.pieces(name, declared.shape, place):
                apart = local[slices(piece.local)] - whole[slices(piece.full)]
                gradients = max(gradients, float(apart.abs().max()))
        assert len(rank["norms"]) == len(want["norms"]) == 1
        norms = max(norms, abs(rank["norms"][0] / want["norms"][0] - 1))
        losses = max(losses, abs(rank["loss"] - want["loss"]))
        assert set(rank["auxiliary"]) == set(want["auxiliary"])
        for name, value in rank["auxiliary"].items():
            losses = max(losses, abs(value - want["auxiliary"][name]))
    assert seen == set(table)
    return gradients, norms, losses


def check(ranks: RankPool, truth: Found, cut: Cut) -> None:
    found = differences(ranks.run(4, expert_jobs.gradients, cut), truth, cut)
    assert max(found) < TOLERANCE, (cut, found)


FLAT = [Cut(ep, etp, tp) for tp in (1, 2) for etp in (1, 2) for ep in (1, 2, 4) if etp * ep <= 4]


@pytest.mark.parametrize("zero", [0, 1, 2])
@pytest.mark.parametrize("cut", FLAT, ids=str)
def test_every_cut_has_the_gradients_of_one_rank(
    ranks: RankPool, truth: Found, cut: Cut, zero: int
) -> None:
    check(ranks, truth, replace(cut, zero=zero))


STAGED = [Cut(ep, etp, tp, 2) for tp in (1, 2) for ep, etp in ((1, 1), (2, 1), (1, 2))]


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("cut", STAGED, ids=str)
def test_every_cut_in_stages(ranks: RankPool, truth: Found, cut: Cut, zero: int) -> None:
    check(ranks, truth, replace(cut, zero=zero))


ALLGATHER = with_experts(dispatcher="allgather")
OTHERS = [Cut(2, 1, 1), Cut(4, 1, 2), Cut(2, 2, 2), Cut(2, 1, 2, 2)]


@pytest.mark.parametrize("cut", OTHERS, ids=str)
def test_the_other_dispatcher(ranks: RankPool, truth: Found, cut: Cut) -> None:
    check(ranks, truth, replace(cut, zero=1, model=ALLGATHER))


def test_at_zero_3_where_every_rank_holds_all_experts(ranks: RankPool, truth: Found) -> None:
    for cut in (Cut(zero=3), Cut(tp=2, zero=3)):
        check(ranks, truth, cut)


@pytest.mark.parametrize(
    ("cut", "number", "least"),
    [
        (Cut(1, 1, 2, plant="experts as megatron-core leaves them"), 0, 1e-3),
        (Cut(2, pp=2, plant="no scale from the loss"), 0, 1e-4),
        (Cut(2, pp=2, plant="no scale on the first stage"), 0, 1e-4),
        (Cut(2, plant="stock norm without ZeRO"), 1, 0.02),
    ],
    ids=lambda value: getattr(value, "plant", None),
)
def test_what_is_undone_shows(
    ranks: RankPool, truth: Found, cut: Cut, number: int, least: float
) -> None:
    """`number`: of gradients, or of norms."""
    found = differences(ranks.run(4, expert_jobs.gradients, cut), truth, cut)
    assert found[number] > least


def test_two_experts_swapped_show(ranks: RankPool, truth: Found) -> None:
    swapped = dict(truth["gradients"])
    names = [f"decoder.layers.1.mlp.experts.local_experts.{e}.linear_fc2.weight" for e in (1, 2)]
    swapped[names[0]], swapped[names[1]] = swapped[names[1]], swapped[names[0]]
    found = ranks.run(4, expert_jobs.gradients, Cut(2, zero=1))
    assert differences(found, truth | {"gradients": swapped}, Cut(2))[0] > 1e-3


@pytest.mark.parametrize(
    ("cut", "plant"),
    [
        (Cut(2, dtype="bf16"), "stock norm in half precision"),
        (Cut(2, 2, 4, zero=1, dtype="bf16", fp32_sums=True), "stock norm of BF16_Optimizer"),
    ],
    ids=str,
)
def test_the_norm_in_bf16(ranks: RankPool, cut: Cut, plant: str) -> None:
    """Rounding apart it is that of one rank; not so without the patch."""
    alone = Cut(zero=cut.zero, dtype="bf16", fp32_sums=cut.fp32_sums)
    runs = (1, alone), (4, cut), (4, replace(cut, plant=plant))
    want, found, stock = (
        ranks.run(world, expert_jobs.gradients, run)[0]["norms"][0] for world, run in runs
    )
    assert found == pytest.approx(want, rel=0.02)
    assert abs(stock / want - 1) > 0.04, "the defect is gone: drop the patch"


@pytest.mark.parametrize(
    ("cut", "plant"),
    [
        (Cut(2, zero=1, dtype="fp16"), "no scale from the loss"),
        (Cut(2, pp=2, zero=1, dtype="fp16"), "no scale on the first stage"),
    ],
    ids=str,
)
def test_the_auxiliary_loss_is_scaled_in_fp16(
    ranks: RankPool, truth: Found, cut: Cut, plant: str
) -> None:
    """Rounding apart the gradients are those of fp32; not so where only the loss is scaled."""
    scaled, unscaled = (
        differences(ranks.run(4, expert_jobs.gradients, run), truth, run)[0]
        for run in (cut, replace(cut, plant=plant))
    )
    assert scaled < 1e-3 and unscaled > 2e-3


@pytest.mark.parametrize("balanced", [pytest.param(False, marks=pytest.mark.slow), True])
def test_twenty_steps(ranks: RankPool, balanced: bool) -> None:
    """Also with what a router remembers between the steps: its bias."""
    with_bias = with_experts(bias=True, score="sigmoid", bias_rate=0.05)
    model = with_bias if balanced else MIXTRAL
    want = ranks.run(1, expert_jobs.train, Cut(model=model, clip=1.0))[0]
    assert abs(want["losses"][0] - want["losses"][-1]) > 0.1, "it learned nothing"
    assert max(want["norms"]) > 1.0, "nothing was clipped"
    for cut in (Cut(2, zero=1), Cut(2, 1, 2, zero=2), Cut(2, pp=2)):
        found = ranks.run(4, expert_jobs.train, replace(cut, model=model, clip=1.0))
        for rank in found:
            apart = [abs(a - b) for a, b in zip(rank["losses"], want["losses"], strict=True)]
            assert max(apart) < 1e-5, cut
            for name, value in rank["buffers"].items():
                assert cut.pp or torch.equal(value, want["buffers"][name]), (cut, name)
    moved = any(bool(value.abs().max() > 0) for value in want["buffers"].values())
    assert moved == balanced
