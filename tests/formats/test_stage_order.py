"""Which stage keeps which parameters, found again from the counts of its groups alone."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ucp.errors import ModelMismatchError, StateMismatchError
from megatron_ucp.families import pipe
from megatron_ucp.families.family import Sizes
from megatron_ucp.formats.deepspeed.by_position import folds, of_stages
from megatron_ucp.formats.deepspeed.weights import PipeNames


def sizes(layers: int, tied: bool) -> Sizes:
    return Sizes(
        layers=layers,
        hidden=8,
        heads=2,
        groups=2,
        head_dim=4,
        ffn=16,
        vocab=32,
        true_vocab=32,
        positions=8,
        tied=tied,
    )


@st.composite
def staged(draw: st.DrawFn):
    """A model in stages: names, the order of the whole optimizer, and what each stage's groups
    hold."""
    layers, tied = draw(st.integers(1, 5)), draw(st.booleans())
    names = PipeNames(pipe.names(sizes(layers, tied)))
    stages = draw(st.integers(1, layers + 2))
    cuts = [0, *sorted(draw(st.permutations(range(1, layers + 2)))[: stages - 1]), layers + 3]
    every = list(names.canonical.items())
    order = two_groups([c for _, c in every])
    layer = {c: int(p.split(".")[0]) for p, c in every if p.split(".")[0].isdigit()}
    groups: list[list[list[str]]] = []
    for stage in range(stages):
        held = {c for c, number in layer.items() if cuts[stage] <= number < cuts[stage + 1]}
        held |= names.tied if tied and stage == 0 else set()
        held |= {"embedding.word_embeddings.weight"} if tied and stage == stages - 1 else set()
        groups.append([[c for c in group if c in held] for group in order])
    return names, order, without_empty(groups)


def two_groups(names: list[str]) -> list[list[str]]:
    """With and without weight decay."""
    decays = [name for name in names if name.endswith(".weight") and "norm" not in name]
    return [decays, [name for name in names if name not in decays]]


def without_empty(groups: list[list[list[str]]]) -> list[list[list[str]]]:
    return [[group for group in stage if group] for stage in groups]


@pytest.mark.long
@settings(max_examples=300, deadline=None)
@given(staged())
def test_the_stages_are_found_from_counts(case) -> None:
    names, order, groups = case
    assert (
        of_stages(order, names, [[len(g) for g in stage] for stage in groups], lambda _: 1, "f")
        == groups
    )


@settings(max_examples=100, deadline=None)
@given(staged())
def test_counts_that_fit_no_run_of_layers(case) -> None:
    names, order, groups = case
    wrong = [[len(g) for g in stage] for stage in groups]
    wrong[-1][0] += 100  # one more could be a copy of another part of the tied module
    with pytest.raises(StateMismatchError, match="run of the model's layers"):
        of_stages(order, names, wrong, lambda _: 1, "f")


@pytest.mark.parametrize(
    ("counts", "held", "could"),
    [
        ([1, 1, 1, 1], [2, 2], True),  # one layer for each of the four runs
        ([2] * 12, [8, 6, 10], True),
        ([2] * 12, [8, 5, 11], False),
        ([1, 6, 6, 6, 6, 1, 1], [13, 14], False),  # a LLaMA, whose ends the first rank would have
        ([1, 6, 6, 6, 6, 1, 1], [15, 12], True),
        ([3, 1, 3], [4, 3], False),
    ],
)
def test_stages_that_dualpipev_could_have_made(
    counts: list[int], held: list[int], could: bool
) -> None:
    assert folds(counts, held) is could


def test_names_of_parameters_and_of_buffers_beside_them() -> None:
    names = PipeNames(pipe.names(sizes(2, tied=True)))
    assert names.find("2.mlp.linear_fc1.weight") == "decoder.layers.1.mlp.linear_fc1.weight"
    assert names.find("2.mlp.router.expert_bias") == "decoder.layers.1.mlp.router.expert_bias"
    assert names.tied == {
        "embedding.word_embeddings.weight",
        "embedding.position_embeddings.weight",
    }
    keys = frozenset({"word_embeddings.weight", "position_embeddings.weight"})
    assert (
        names.of_layer(0, "word_embeddings.weight", keys, "f") == "embedding.word_embeddings.weight"
    )
    for unknown in (
        "7.mlp.linear_fc1.weight",
        "1.mlp.surprise.weight",
        "tied_modules.other.weight",
    ):
        with pytest.raises(ModelMismatchError, match="lacks"):
            names.find(unknown)
