"""Models with experts: what is built, where, and with which first values."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ucp.errors import UsageError
from megatron_ucp.families import find_family
from pretrain.mcore.experts import Experts
from tests.engines import expert_jobs
from tests.engines.expert_jobs import MIXTRAL, Cut, with_experts
from tests.engines.test_expert_gradients import slices
from tests.ranks import RankPool

EVERY_SECOND = with_experts(every=2)
CUTS = [
    Cut(2),
    Cut(4),
    Cut(2, 2, 2),
    Cut(2, 1, 2),
    Cut(2, 2, 4),
    Cut(tp=4),
    Cut(2, pp=2),
    Cut(2, model=EVERY_SECOND),
]


@pytest.fixture(scope="module")
def whole(ranks: RankPool) -> dict[Any, dict[str, torch.Tensor]]:
    """Every parameter on one rank, by model."""
    built = [MIXTRAL, EVERY_SECOND]
    found = ranks.run(1, expert_jobs.live, [Cut(model=model) for model in built])[0]
    return {model: one["values"] for model, one in zip(built, found, strict=True)}


def test_the_family_describes_what_megatron_builds(
    ranks: RankPool, whole: dict[Any, dict[str, torch.Tensor]]
) -> None:
    """Names, shapes, attributes, and which elements, whatever ranks hold them."""
    by_rank = ranks.run(4, expert_jobs.live, CUTS)
    for number, cut in enumerate(CUTS):
        table, seen = cut.model.model().table, set()
        assert set(whole[cut.model]) == set(table)
        for rank in by_rank:
            found = rank[number]
            assert found["measured"] == cut.model.sizes()
            place = {
                "tp": (cut.tp, found["tensor"]),
                "etp": (cut.etp or cut.tp, found["expert_tensor"]),
            }
            for name, value in found["values"].items():
                seen.add(name)
                declared, attributes = table[name], found["attributes"][name]
                expected = declared.layout.local_shape(name, declared.shape, place)
                assert tuple(value.shape) == expected, (cut, name)
                said = {key: attributes.get(key) for key in declared.attributes}
                assert said == declared.attributes, (cut, name)
                check_expert(cut, name, found["expert"], attributes)
                for piece in declared.layout.pieces(name, declared.shape, place):
                    part = whole[cut.model][name][slices(piece.full)]
                    assert torch.equal(value[slices(piece.local)], part), (cut, name)
        assert seen == set(table), cut


def check_expert(cut: Cut, name: str, rank: int, attributes: dict[str, Any]) -> None:
    """An expert's number is that in its name, and lies on the rank that has its turn."""
    found = re.search(r"\.local_experts\.(\d+)\.", name)
    if not found:
        assert "ucp_expert" not in attributes and attributes.get("allreduce", True), name
        return
    assert attributes["ucp_expert"] == int(found[1])
    assert rank == int(found[1]) // (4 // cut.ep), (cut, name)
    apart = cut.ep > 1
    assert attributes["allreduce"] is not apart
    assert attributes.get("group_name") == (f"ep_size_{cut.ep}" if apart else None)


def test_no_two_experts_start_alike(whole: dict[Any, dict[str, torch.Tensor]]) -> None:
    drawn = [float(value[0, 0]) for value in whole[MIXTRAL].values() if value.dim() > 1]
    assert len(set(drawn)) == len(drawn) > 20


@pytest.mark.parametrize("cut", [Cut(2), Cut(2, 1, 2), Cut(2, 2, 2), Cut(2, pp=2)], ids=str)
def test_deepspeed_has_megatrons_groups(ranks: RankPool, cut: Cut) -> None:
    for found in ranks.run(4, expert_jobs.groups_match, cut):
        for ours, theirs in found.values():
            assert ours == theirs


@pytest.mark.parametrize(
    "cut",
    [Cut(2), Cut(2, zero=1), Cut(2, 2, 2, zero=2), Cut(2, 1, 2, zero=1), Cut(2, pp=2, zero=1)],
    ids=str,
)
def test_deepspeed_by_itself_saves_and_loads(ranks: RankPool, tmp_path: Path, cut: Cut) -> None:
    folder = str(tmp_path)
    saved = ranks.run(4, expert_jobs.native, cut, folder, False)
    files = [path.name for path in (tmp_path / "one").glob("layer_0_expert_*")]
    assert len({re.match(r"layer_0_expert_(\d+)", name)[1] for name in files}) == 4  # type: ignore[index]
    for before, after in zip(
        saved, ranks.run(4, expert_jobs.native, cut, folder, True), strict=True
    ):
        assert all(torch.equal(after[name], value) for name, value in before.items())


def test_refusals(ranks: RankPool) -> None:
    expected = {
        "too many": "UsageError: expert-parallel size x expert-tensor-parallel size",
        "stages": "UsageError: expert-parallel size x expert-tensor-parallel size",
        "dense": "UsageError: models.start was called for a model with experts",
        "experts": "LayoutError: the expert-parallel size does not divide the experts",
        "width": "LayoutError: the expert-tensor-parallel size does not divide the width",
        "file for two": "UnsupportedError: DeepSpeed would not save all parts",
        "file for none": "UnsupportedError: DeepSpeed would not save all parts",
        "stage without": "UnsupportedError: a stage of the pipeline has no layer with experts",
        "sequence": "UnsupportedError: megatron-core trains experts under tensor parallelism with",
    }
    for found in ranks.run(4, expert_jobs.refusals):
        assert set(found) == set(expected)
        for name, text in found.items():
            assert re.match(expected[name], text), (name, text)


def test_grouped_experts_are_refused_by_name(ranks: RankPool) -> None:
    (said,) = ranks.run(1, expert_jobs.grouped)
    assert "grouped experts" in said and "moe_grouped_gemm=False" in said


def test_a_routers_bias_stays_in_fp32(ranks: RankPool) -> None:
    model = with_experts(bias=True, score="sigmoid", bias_rate=1e-3)
    cut = Cut(2, zero=1, dtype="bf16", clip=1.0, model=model)
    for rank in ranks.run(2, expert_jobs.train, cut, steps=3):
        biases = [value for name, value in rank["buffers"].items() if name.endswith("expert_bias")]
        assert len(biases) == 2
        for bias in biases:
            assert bias.dtype == torch.float32
            steps = bias.double() / 1e-3  # three, up or down; in bf16 they would not be whole
            assert (steps - steps.round()).abs().max() < 1e-4 and bias.any()


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"number": 0}, "no experts"),
        ({"topk": 5}, "so many experts"),
        ({"topk": 1}, "always 1"),
        ({"bias": True}, "needs sigmoid"),
        ({"dispatcher": "flex"}, "no such dispatcher"),
    ],
)
def test_experts_that_make_no_model(changes: dict[str, Any], match: str) -> None:
    with pytest.raises(UsageError, match=match):
        Experts(**{"number": 4, "ffn": 24, **changes})


def test_the_pipelines_layers_follow_from_names_alone() -> None:
    for model in (MIXTRAL, EVERY_SECOND):
        family, sizes = find_family("mixtral"), model.sizes()
        held = [*model.model().table, "decoder.layers.0.mlp.router.expert_bias"]
        assert family.layers is not None and family.pipe is not None
        assert family.layers(held).names == family.pipe(sizes)


def test_experts_that_nothing_places_are_refused(ranks: RankPool) -> None:
    for said in ranks.run(4, expert_jobs.without_groups, Cut(2, zero=1)):
        assert "nothing says which rank has which" in said and "local_experts.0" in said


@pytest.mark.parametrize("cut", [Cut(2, 2, 1, zero=1), Cut(1, 1, 2, zero=0)], ids=str)
def test_engines_whose_experts_would_not_all_be_saved(
    ranks: RankPool, tmp_path: Path, cut: Cut
) -> None:
    for said in ranks.run(4, expert_jobs.unwritten, cut, str(tmp_path)):
        assert "would not save all parts" in said
    assert not list(tmp_path.rglob("*.pt"))
