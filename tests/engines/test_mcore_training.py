"""megatron-core's GPTModel under DeepSpeed: every tensor-parallel size and ZeRO stage trains the
same model."""

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_ucp.core.box import Box
from megatron_ucp.errors import UsageError
from megatron_ucp.families import find_family
from pretrain.mcore.models import ModelConfig
from tests.engines import model_jobs
from tests.engines.model_jobs import GPT, LLAMA, Run, largest_differences
from tests.ranks import RankPool

TOLERANCE = 1e-5
MODELS = {
    "gpt-tied": GPT,
    "gpt-untied": replace(GPT, tied=False),
    "gpt-groups-1": replace(GPT, groups=1),
    "gpt-groups-2": replace(GPT, groups=2),
    "llama-groups-1": replace(LLAMA, groups=1),
    "llama-groups-2": LLAMA,
    "llama-groups-4": replace(LLAMA, groups=4),
    "llama-tied": replace(LLAMA, tied=True),
    "qwen2": replace(LLAMA, family="qwen2"),
    "qwen3": replace(LLAMA, family="qwen3", head_dim=16),
    "llama-wide-heads": replace(LLAMA, head_dim=16),  # heads * head_dim is not hidden
}
Truth = dict[str, Any]


@pytest.fixture(scope="module")
def truth(ranks: RankPool) -> dict[ModelConfig, Truth]:
    """One rank without ZeRO, 20 steps, by model."""
    return {model: ranks.run(1, model_jobs.train, Run(model))[0] for model in (GPT, LLAMA)}


def differences(found: list[Truth], want: Truth, may_drift: bool = False) -> tuple[float, float]:
    """The largest ones; copies of a parameter are the same on all ranks."""
    assert len({rank["copies"] for rank in found}) == 1 or may_drift, (
        "copies of one parameter came apart"
    )
    return largest_differences(found, want, 20)


def test_the_truth_is_worth_comparing_with(truth: dict[ModelConfig, Truth]) -> None:
    for run in truth.values():
        assert sum(norm > 1.0 for norm in run["norms"]) > 10, "the gradients were not clipped"
        assert abs(run["losses"][0] - run["losses"][-1]) > 0.1, "it learned nothing"


def name_of(case: Any) -> str:
    if not isinstance(case, Run):
        return str(case)
    parts = case.model.family, f"tp{case.tp}", f"z{case.zero}", str(case.accumulate)
    return "-".join([*parts, *["sp"] * case.model.sequence_parallel])


ACROSS = {model: replace(model, sequence_parallel=True) for model in (GPT, LLAMA)}
CUTS = [
    (world, Run(model, tp, zero, accumulate=accumulate))
    for model in (GPT, LLAMA)
    for world, tp, zero, accumulate in (
        *((2, 2, 0, 1), (2, 2, 1, 2), (4, 2, 1, 1), (2, 2, 2, 1), (4, 2, 3, 1)),
        *((4, 4, 0, 1), (4, 4, 2, 1), (4, 4, 3, 1), (4, 1, 2, 1)),
    )
]
CUTS_OF_SEQUENCES = [
    (world, Run(ACROSS[model], 2, zero, accumulate=accumulate))
    for model, world, zero, accumulate in (
        *((GPT, 2, 0, 1), (GPT, 2, 1, 1), (GPT, 2, 2, 2), (GPT, 2, 3, 1)),
        *((GPT, 4, 0, 1), (GPT, 4, 1, 1), (GPT, 4, 2, 1), (GPT, 4, 3, 1)),
        *((LLAMA, 2, 0, 2), (LLAMA, 4, 1, 1), (LLAMA, 2, 2, 1), (LLAMA, 4, 3, 1)),
    )
]


def check(
    ranks: RankPool, world: int, run: Run, alone: Truth, tolerance: float = TOLERANCE
) -> None:
    losses, norms = differences(ranks.run(world, model_jobs.train, run), alone)
    assert losses < tolerance and norms < tolerance


@pytest.mark.parametrize(("world", "run"), CUTS, ids=name_of)
def test_any_cut_trains_the_same_model(
    ranks: RankPool, truth: dict[ModelConfig, Truth], world: int, run: Run
) -> None:
    check(ranks, world, run, truth[run.model])


@pytest.mark.parametrize(("world", "run"), CUTS_OF_SEQUENCES, ids=name_of)
def test_sequence_parallelism_trains_the_same(
    ranks: RankPool, truth: dict[ModelConfig, Truth], world: int, run: Run
) -> None:
    check(ranks, world, run, truth[replace(run.model, sequence_parallel=False)])


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_without_the_sums_sequence_parallelism_is_wrong(
    ranks: RankPool, truth: dict[ModelConfig, Truth], zero: int
) -> None:
    run = Run(ACROSS[GPT], tp=2, zero=zero, plant="no sums over the sequence")
    found = ranks.run(2, model_jobs.train, run)
    losses, _ = differences(found, truth[GPT], may_drift=True)
    assert losses > 1e-3 and found[0]["copies"] != found[1]["copies"]


QWEN3 = replace(LLAMA, family="qwen3")
QWEN2 = replace(LLAMA, family="qwen2")
OWN_ATTENTION = [
    *((2, Run(QWEN2, 2, 1)), (4, Run(QWEN2, 4, 3))),
    *((2, Run(QWEN3, 2, 0)), (4, Run(QWEN3, 2, 1)), (4, Run(QWEN3, 4, 3))),
    (2, Run(replace(QWEN3, sequence_parallel=True), 2, 2)),
]


@pytest.mark.parametrize(("world", "run"), OWN_ATTENTION, ids=name_of)
def test_biases_and_norms_of_attention_train_the_same(
    ranks: RankPool, world: int, run: Run
) -> None:
    whole = Run(replace(run.model, sequence_parallel=False))
    check(ranks, world, run, ranks.run(1, model_jobs.train, whole)[0])


def test_without_the_sums_norms_of_attention_come_apart(ranks: RankPool) -> None:
    alone = ranks.run(1, model_jobs.train, Run(QWEN3))[0]
    found = ranks.run(2, model_jobs.train, Run(QWEN3, tp=2, plant="no sums over the sequence"))
    losses, _ = differences(found, alone, may_drift=True)
    assert losses > 1e-4 and found[0]["copies"] != found[1]["copies"]


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_sequence_parallelism_in_bf16(ranks: RankPool, zero: int) -> None:
    whole = ranks.run(1, model_jobs.train, Run(GPT, zero=zero, dtype="bf16"))[0]
    check(ranks, 2, Run(ACROSS[GPT], 2, zero, "bf16"), whole, 0.02)  # rounding explains less


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_without_the_attributes_the_gradient_norm_is_wrong(
    ranks: RankPool, truth: dict[ModelConfig, Truth], zero: int
) -> None:
    run = Run(LLAMA, tp=2, zero=zero, plant="no attributes")
    _, norms = differences(ranks.run(2, model_jobs.train, run), truth[LLAMA], may_drift=True)
    assert norms > 0.05


@pytest.fixture(scope="module")
def whole(ranks: RankPool) -> dict[str, dict[str, Any]]:
    """Every model's parameters on one rank."""
    found = ranks.run(1, model_jobs.live, list(MODELS.values()), 1)[0]
    return dict(zip(MODELS, found, strict=True))


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_the_families_describe_what_megatron_builds(
    ranks: RankPool, whole: dict[str, dict[str, Any]], tp: int
) -> None:
    """Names, shapes, attributes, and which elements: each rank holds what its layout takes out of
    the whole tensor."""
    by_rank = ranks.run(tp, model_jobs.live, list(MODELS.values()), tp)
    for index, (label, config) in enumerate(MODELS.items()):
        table = find_family(config.family).table(config.sizes())
        for rank, found in enumerate(by_rank):
            assert set(found[index]) == set(table), label
            for name, (value, attributes, _) in found[index].items():
                declared, place = table[name], {"tp": (tp, rank)}
                local = declared.layout.local_shape(name, declared.shape, place)
                assert tuple(value.shape) == local, (label, name)
                said = {key: attributes.get(key) for key in declared.attributes}
                assert said == declared.attributes, (label, name)
                full = whole[label][name][0]
                assert tuple(full.shape) == declared.shape, (label, name)
                for piece in declared.layout.pieces(name, declared.shape, place):
                    have, want = value[slices(piece.local)], full[slices(piece.full)]
                    assert torch.equal(have, want), (label, name, rank)


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))


def test_the_initial_weights_are_megatrons(whole: dict[str, dict[str, Any]]) -> None:
    for label, config in MODELS.items():
        drawn = set()
        for name, (value, *_) in whole[label].items():
            if value.dim() == 1:
                assert (value == float(name.endswith("layernorm.weight"))).all(), name
                continue
            residual = name.endswith(("linear_proj.weight", "linear_fc2.weight"))
            std = config.init_std / (2 * config.layers) ** 0.5 if residual else config.init_std
            few = 5 / value.numel() ** 0.5  # five standard errors of a mean
            assert abs(float(value.std()) / std - 1) < few, name
            assert abs(float(value.mean())) < few * std, name
            drawn.add(float(value[0, 0]))
        assert len(drawn) == sum(value.dim() > 1 for value, *_ in whole[label].values()), (
            "two tensors start alike"
        )


def test_seeds_differ(ranks: RankPool, whole: dict[str, dict[str, Any]]) -> None:
    name = "embedding.word_embeddings.weight"
    again, other = ranks.run(1, model_jobs.live, [GPT, replace(GPT, seed=GPT.seed + 1)], 1)[0]
    assert torch.equal(again[name][0], whole["gpt-tied"][name][0])
    assert not torch.equal(other[name][0], again[name][0])


def test_matrices_decay_and_vectors_do_not(ranks: RankPool) -> None:
    found = ranks.run(1, model_jobs.groups_and_steps, GPT)[0]
    (matrices, *decayed), (vectors, *kept) = found["groups"]
    assert decayed == [0.5, 0.25] and kept == [0.5, 0.0]
    assert all(name.endswith("bias") or "layernorm" in name for name in vectors)
    table = find_family("gpt").table(GPT.sizes())
    assert sorted([*matrices, *vectors, *found["frozen"]]) == sorted(table) and found["frozen"]
    assert all(len(table[name].shape) == 2 for name in matrices)


@pytest.mark.parametrize("tp", [1, 2])
def test_masked_loss(ranks: RankPool, tp: int) -> None:
    for found in ranks.run(tp, model_jobs.masked, LLAMA, tp):
        assert found["all"] == pytest.approx(found["ones"], abs=1e-6)
        assert found["all"] == pytest.approx((found["first"] + found["second"]) / 2, abs=1e-6)
        assert found["first"] == pytest.approx(found["short"], abs=1e-6), (
            "a token was seen by an earlier one"
        )
        assert found["none"] == 0.0 and abs(found["first"] - found["second"]) > 1e-3


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_dropout_draws_alike_outside_and_apart_inside(
    ranks: RankPool, sequence_parallel: bool
) -> None:
    config = replace(
        GPT, hidden_dropout=0.1, attention_dropout=0.1, sequence_parallel=sequence_parallel
    )
    (before, default, inside), (_, other_default, other_inside) = ranks.run(
        2, model_jobs.generators, config, 2
    )
    assert default == other_default and inside != other_inside
    assert (before == default) is sequence_parallel, (
        "there, all dropout is in tensor-parallel regions"
    )


@pytest.mark.parametrize("pp", [1, 2])
def test_start_and_stop_leave_nothing_open(ranks: RankPool, pp: int) -> None:
    """megatron-core leaves dozens open each time."""
    for (files, threads), *_, (last_files, last_threads) in ranks.run(
        2, model_jobs.restarts, 8, pp
    ):
        assert last_files < files + 10 and last_threads < threads + 5


def test_refusals(ranks: RankPool) -> None:
    expected = {
        "not started": "UsageError: megatron-core's process groups are not there",
        "world": "UsageError: the tensor-parallel size",
        "twice": "UsageError: megatron-core's process groups are there already",
        "heads": "LayoutError: .* attention heads",
        "vocabulary": "LayoutError: .* padded vocabulary",
        "groups": "LayoutError: key-value groups",
        "odd": "UsageError: the sequence length.*multiple of 2",
        "long": "UsageError: the sequence length.*at most 16",
    }
    for found in ranks.run(2, model_jobs.refusals):
        assert set(found) == set(expected)
        for name, text in found.items():
            assert re.match(expected[name], text, re.S), (name, text)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"family": "bert"}, "no builder"),
        ({"dtype": "fp8"}, "another dtype"),
        ({"groups": 3}, "key-value groups"),
        ({"hidden": 34}, "attention heads"),
        ({"vocab": 60}, "smaller than the tokenizer's"),
    ],
)
def test_sizes_that_make_no_model(changes: dict[str, Any], match: str) -> None:
    with pytest.raises(UsageError, match=match):
        replace(GPT, **changes)
