"""The models in stages, under DeepSpeed's PipelineEngine: every cut starts from and trains the same
model as no cut."""

import itertools
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ucp.errors import UsageError
from megatron_ucp.families import find_family
from megatron_ucp.families.pipe import names
from pretrain.mcore.models import ModelConfig
from pretrain.mcore.pipeline import stage_method
from tests.engines import model_jobs, pipeline_models
from tests.engines.model_jobs import GPT, LLAMA, Run, largest_differences
from tests.ranks import RankPool

TOLERANCE = 1e-5
STEPS = 6
UNTIED, TIED = replace(GPT, tied=False), replace(LLAMA, tied=True)
ONE = replace(GPT, layers=1)
MODELS = {"gpt-tied": GPT, "gpt-untied": UNTIED, "llama-untied": LLAMA, "llama-tied": TIED}
Found = dict[str, Any]


class Truth:
    """Runs without stages on one rank, by model and settings."""

    def __init__(self, ranks: RankPool) -> None:
        self.ranks = ranks
        self.runs: dict[Run, Found] = {}

    def get(self, model: ModelConfig, **settings: Any) -> Found:
        run = Run(replace(model, sequence_parallel=False), **settings)
        if run not in self.runs:
            self.runs[run] = self.ranks.run(1, model_jobs.train, run, steps=STEPS)[0]
        return self.runs[run]


@pytest.fixture(scope="module")
def truth(ranks: RankPool) -> Truth:
    return Truth(ranks)


def differences(found: list[Found], want: Found) -> tuple[float, float]:
    """As those of a model without stages; some gradients are clipped."""
    assert max(want["norms"]) > 1.0, "nothing was clipped"
    return largest_differences(found, want, STEPS)


def check(ranks: RankPool, truth: Truth, world: int, run: Run) -> list[Found]:
    found = ranks.run(world, model_jobs.train, run, STEPS)
    losses, norms = differences(found, truth.get(run.model))
    assert losses < TOLERANCE and norms < TOLERANCE
    assert len({copy for rank in found for copy in rank["tied"]}) <= run.tp, (
        "the copies of a tied weight came apart"
    )
    assert len({rank["evaluation"] for rank in found}) == 1
    return found


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize(
    "cut",
    [(2, 2, 1, 0, 2), (4, 4, 1, 1, 1), (4, 2, 2, 1, 1), (4, 2, 1, 0, 1), (4, 2, 1, 1, 2)],
    ids=str,
)
def test_any_cut_trains_the_same_model(
    ranks: RankPool, truth: Truth, model: ModelConfig, cut: tuple[int, ...]
) -> None:
    world, pp, tp, zero, accumulate = cut
    check(ranks, truth, world, Run(model, tp, zero, accumulate=accumulate, pp=pp))


@pytest.mark.parametrize(
    ("model", "zero", "partitioned"),
    [(GPT, 0, True), (LLAMA, 1, True), (GPT, 1, False)],
    ids=["gpt-0", "llama-1", "gpt-1-whole"],
)
def test_sequence_parallelism(
    ranks: RankPool, truth: Truth, model: ModelConfig, zero: int, partitioned: bool
) -> None:
    """Also where DeepSpeed sends parts of what it takes for the same on all tensor-parallel ranks,
    which is its default."""
    across = replace(model, sequence_parallel=True)
    check(ranks, truth, 4, Run(across, 2, zero, accumulate=2, pp=2, partitioned=partitioned))


def test_without_the_sums_sequence_parallelism_is_wrong(ranks: RankPool, truth: Truth) -> None:
    run = Run(replace(GPT, sequence_parallel=True), pp=2, tp=2, plant="no sums over the sequence")
    assert differences(ranks.run(4, model_jobs.train, run, STEPS), truth.get(GPT))[0] > 1e-4


def test_tied_copies_that_start_apart_are_seen(ranks: RankPool, truth: Truth) -> None:
    found = ranks.run(2, model_jobs.train, Run(GPT, pp=2, plant="tied copies apart"), STEPS)
    assert (
        differences(found, truth.get(GPT))[0] > 1e-4
        and len({copy for rank in found for copy in rank["tied"]}) == 2
    )


@pytest.mark.parametrize(
    ("model", "pp", "partition", "parts"),
    [
        (GPT, 2, "uniform", [0, 3, 5]),
        (LLAMA, 2, "parameters", [0, 2, 5]),
        (LLAMA, 2, "type:norm", [0, 4, 5]),
        (GPT, 2, "type:transformer", [0, 2, 5]),
        (GPT, 2, "1, 4", [0, 1, 5]),
        (LLAMA, 4, [1, 2, 1, 1], [0, 1, 3, 4, 5]),
        (ONE, 4, "1,1,1,1", [0, 1, 2, 3, 4]),
        (replace(ONE, tied=False), 4, "uniform", [0, 1, 2, 3, 4]),
    ],
    ids=lambda value: str(getattr(value, "family", value)),
)
def test_partitions(
    ranks: RankPool, truth: Truth, model: ModelConfig, pp: int, partition: Any, parts: list[int]
) -> None:
    for rank in check(ranks, truth, pp, Run(model, pp=pp, partition=partition, zero=1)):
        assert rank["parts"] == parts


@pytest.mark.parametrize(
    ("world", "run", "optimizer"),
    [
        (2, Run(GPT, pp=2, zero=0, dtype="bf16"), "BF16_Optimizer"),
        (2, Run(GPT, pp=2, zero=1, dtype="bf16"), "DeepSpeedZeroOptimizer"),
        (4, Run(GPT, pp=2, zero=1, dtype="bf16", fp32_sums=True, accumulate=2), "BF16_Optimizer"),
        (4, Run(LLAMA, pp=2, tp=2, zero=1, dtype="bf16", fp32_sums=True), "BF16_Optimizer"),
        (4, Run(ONE, 1, 1, "bf16", 1, 4, [1, 1, 1, 1], fp32_sums=True), "BF16_Optimizer"),
    ],
    ids=["gpt-0", "gpt-1", "gpt-fp32-sums", "llama-tp", "one-layer-stages"],
)
def test_bf16(ranks: RankPool, truth: Truth, world: int, run: Run, optimizer: str) -> None:
    found = ranks.run(world, model_jobs.train, run, STEPS)
    losses, norms = differences(found, truth.get(run.model, zero=1, dtype="bf16"))
    assert losses < 0.02 and norms < 0.02, "rounding to bf16 explains less"
    assert {rank["optimizer"] for rank in found} == {optimizer}
    assert len({copy for rank in found for copy in rank["tied"]}) <= 1


KEYS = ("tensor_model_parallel", "partition_dim", "partition_stride", "sequence_parallel")


@pytest.mark.parametrize(("tp", "pp"), [(1, 2), (2, 2), (1, 4)])
def test_the_stages_start_as_the_whole_model_does(ranks: RankPool, tp: int, pp: int) -> None:
    """Every parameter bit by bit and with its attributes; a tied one on both stages, positions on
    the first alone."""
    whole = ranks.run(tp, model_jobs.live, list(MODELS.values()), tp)
    staged = ranks.run(tp * pp, model_jobs.live, list(MODELS.values()), tp, pp)
    for index, config in enumerate(MODELS.values()):
        seen: dict[str, list[int]] = {}
        for rank, found in enumerate(staged):
            for name, (value, attributes, _) in found[index].items():
                want, wanted, _ = whole[rank % tp][index][name]
                assert torch.equal(value, want), name
                assert value.count_nonzero() or name.endswith(".bias"), name
                assert [attributes.get(key) for key in KEYS] == [wanted.get(key) for key in KEYS], (
                    name
                )
                if not rank % tp:
                    seen.setdefault(name, []).append(rank // tp)
        assert set(seen) == set(find_family(config.family).table(config.sizes()))
        for name, held in seen.items():
            is_tied = config.tied and name == "embedding.word_embeddings.weight"
            assert held == ([0, pp - 1] if is_tied else held[:1]), name


def test_names_are_those_of_the_family(ranks: RankPool) -> None:
    staged = ranks.run(2, model_jobs.live, list(MODELS.values()), 1, 2)
    for index, config in enumerate(MODELS.values()):
        held = {
            name: canonical for found in staged for canonical, (_, _, name) in found[index].items()
        }
        assert held == names(config.sizes())


def test_files_of_a_save_by_deepspeed(ranks: RankPool, tmp_path: Path) -> None:
    job = pipeline_models.layer_files, Run(GPT, pp=2, tp=2, zero=1), str(tmp_path)
    files = ranks.run(4, *job)[0]
    places = itertools.product(range(4), range(2))
    layers = [f"layer_{layer:02d}-model_{tp:02d}-model_states.pt" for layer, tp in places]
    of_models = [f"mp_rank_{rank:02d}_model_states.pt" for rank in range(4)]
    of_optimizers = [f"zero_pp_rank_0_mp_rank_{rank:02d}_optim_states.pt" for rank in range(4)]
    assert files == sorted([*layers, *of_models, *of_optimizers])
    first = torch.load(tmp_path / "one" / layers[0], weights_only=False)
    held = [key for key, value in first.items() if value is not None]
    assert held == ["word_embeddings.weight", "position_embeddings.weight"]


def test_groups_are_the_same_ranks(ranks: RankPool) -> None:
    for tp, pp in ((2, 2), (1, 2), (1, 4)):
        for found in ranks.run(4, pipeline_models.groups_match, tp, pp):
            assert all(ours == theirs for ours, theirs in found.values()), found
            assert (len(found["tensor"][0]), len(found["pipe"][0])) == (tp, pp)


def test_stages_draw_apart(ranks: RankPool) -> None:
    """Outside of the tensor-parallel regions a stage's ranks alike, inside all apart."""
    found = ranks.run(4, pipeline_models.generators)
    assert found[0][0] == found[1][0] != found[2][0] == found[3][0]
    assert len({inside for _, inside in found}) == 4


def test_masked_loss(ranks: RankPool) -> None:
    for found in ranks.run(2, model_jobs.masked_stages):
        assert found["all"] == pytest.approx(found["ones"], abs=1e-6)
        assert found["all"] == pytest.approx((found["first"] + found["second"]) / 2, abs=1e-6)
        assert found["none"] == 0.0 and abs(found["first"] - found["second"]) > 1e-3


@pytest.mark.parametrize("model", [GPT, UNTIED], ids=["tied", "untied"])
def test_pipeline_clip(ranks: RankPool, truth: Truth, model: ModelConfig) -> None:
    """The patch: DeepSpeed's own norm leaves out vectors of later stages, and counts a tied matrix
    twice."""
    stock = ranks.run(2, pipeline_models.stock_clip, Run(model, pp=2))[0]
    want = truth.get(model)["norms"][0]
    assert abs(stock - want) / want > 1e-3, "the defect is gone: drop the patch"


def test_pipeline_group_norms(ranks: RankPool) -> None:
    """The patch: by itself DeepSpeed waits on the first stage for a collective that the last one
    never enters."""
    run = Run(LLAMA, pp=2, zero=1, partition="4,1")
    stock, patched = zip(*ranks.run(2, pipeline_models.norm_collectives, run), strict=True)
    assert stock == (2, 1), "the defect is gone: drop the patch"
    assert patched == (2, 2)


def test_pipeline_empty_norm(ranks: RankPool) -> None:
    """The patch: a last stage that holds the tied head alone counts nothing. `test_bf16` trains
    one."""
    said, norm = ranks.run(1, pipeline_models.empty_norm)[0]
    assert "non-empty TensorList" in said, "the defect is gone: drop the patch"
    assert norm == 0.0


def test_refusals(ranks: RankPool) -> None:
    expected = {
        "not started": "process groups are not there",
        "world": "pipeline stages does not divide.*a divisor of 2",
        "with tp": "a divisor of 1",
        "whole model": "engines.pipeline.build_pipeline",
        "other pp": "another number of pipeline",
        "sum": "do not add up.*2 numbers.*sum 5",
        "count": "do not add up",
        "zero": "do not add up",
        "name": "uniform, parameters",
        "type": "EmbeddingPipe, TransformerLayerPipe, LayerNorm, TiedHeadPipe",
        "regex": "no regular expression",
        "many": "at most 4: 1 transformer layers",
    }
    for found in ranks.run(2, pipeline_models.refusals):
        assert set(found) == set(expected)
        for name, text in found.items():
            assert text.startswith("UsageError") and re.search(expected[name], text, re.S), (
                name,
                text,
            )


def test_what_a_partition_may_be() -> None:
    assert stage_method(" 1,3 ,1", 5, 3) == stage_method([1, 3, 1], 5, 3) == (1, 3, 1)
    assert stage_method("type:a|b", 5, 2) == "type:a|b"
    for wrong in ("type:", "1,x", "", "profile"):
        with pytest.raises(UsageError, match="no such partition"):
            stage_method(wrong, 5, 2)
