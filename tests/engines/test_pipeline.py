"""Pipeline stages: any number of stages, tensor-parallel size, number of ranks and ZeRO stage to
any other, with and without a pipeline on either side.

The oracle joins stages by the fixed names of a GPTModel and cuts by megatron-core's own attributes.
"""

import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.engines import kinds
from tests.engines.sources import Sources
from tests.engines.sources import check as check_loads
from tests.engines.stages import Mesh, pair, resume, setup, show, source
from tests.share import LOSS_STEPS

pytestmark = pytest.mark.ranks
check = partial(check_loads, different=20)  # of values, by the load


PIPED: list[Mesh] = [
    (pp, tp, dp, zero)
    for pp in (1, 2, 4)
    for tp in (1, 2)
    for dp in (1, 2, 4)
    if pp * tp * dp <= 4
    for zero in (0, 1)
]
WHOLE: list[Mesh] = [(0, tp, dp, zero) for tp in (1, 2) for dp in (1, 2) for zero in (0, 1, 2, 3)]
SOURCES: list[Mesh] = [
    *((2, 1, 2, 1), (4, 1, 1, 0), (2, 2, 1, 1), (2, 2, 1, 0)),
    *((0, 2, 2, 3), (0, 1, 2, 1)),
]
TARGETS: list[Mesh] = [
    *((2, 1, 1, 0), (2, 1, 1, 1), (2, 1, 2, 0), (2, 1, 2, 1), (2, 2, 1, 0), (2, 2, 1, 1)),
    *((4, 1, 1, 0), (4, 1, 1, 1), (1, 2, 2, 1), (1, 1, 1, 0)),
    *((0, 1, 1, 0), (0, 2, 2, 1), (0, 1, 2, 2), (0, 2, 1, 3), (0, 1, 4, 3), (1, 1, 4, 1)),
]
KINDS = [("gpt", True), ("llama", False), ("gpt", False), ("llama", True)]


def sampled() -> list[tuple[str, bool, Mesh, Mesh]]:
    """Every target once, every kind of model, each source several times."""
    pairs = []
    for number, target in enumerate(TARGETS):
        others = [s for s in SOURCES if s != target and (s[0] or target[0])]
        pairs.append((*KINDS[number % 4], others[number % len(others)], target))
    return pairs


PAIRS = sampled()


def test_the_sample_is_what_it_says() -> None:
    assert len(PAIRS) >= 16 and {(family, tied) for family, tied, _, _ in PAIRS} == set(KINDS)
    crossings = {(a[0] > 0, b[0] > 0) for _, _, a, b in PAIRS}
    assert crossings == {(True, True), (True, False), (False, True)}
    assert {a for _, _, a, _ in PAIRS} == set(SOURCES)


@pytest.mark.parametrize(("family", "tied", "origin", "target"), PAIRS, ids=show)
@pytest.mark.cases(9)
def test_pair(sources: Sources, family: str, tied: bool, origin: Mesh, target: Mesh) -> None:
    found = pair(sources, origin, target, family, tied=tied)
    check(found)
    replicas = tied and origin[0] > 1
    assert all(
        ("replicas not compared: embedding.word_embeddings.weight" in notes) == replicas
        for rank in found
        for notes in rank["notes"].values()
    )


EVERY = [
    (family, tied, a, b)
    for family, tied in KINDS
    for a in PIPED + WHOLE
    for b in PIPED + WHOLE
    if a[0] or b[0]
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "tied", "origin", "target"), random.Random(5).sample(EVERY, 60), ids=show
)
def test_more_pairs(sources: Sources, family: str, tied: bool, origin: Mesh, target: Mesh) -> None:
    check(pair(sources, origin, target, family, tied=tied))


@pytest.mark.parametrize(
    ("family", "origin", "target"),
    [
        ("gpt", (2, 1, 2, 1), (0, 1, 2, 3)),
        ("llama", (0, 1, 2, 1), (2, 2, 1, 0)),
        ("gpt", (4, 1, 1, 0), (2, 1, 2, 1)),
    ],
    ids=show,
)
def test_the_losses_of_the_run_go_on(
    sources: Sources, family: str, origin: Mesh, target: Mesh
) -> None:
    check(pair(sources, origin, target, family, more=LOSS_STEPS, tied=family == "gpt"), 1e-5)


@pytest.mark.parametrize(
    ("before", "after"),
    [((1, 1, 3, 1), (1, 5)), ((1, 5), (2, 1, 2, 1)), ((5, 1), "uniform")],
    ids=str,
)
def test_uneven_stages(sources: Sources, before: Any, after: Any) -> None:
    """A stage with the embedding alone has one parameter group, so do the norm and head of an
    untied LLaMA's."""
    origin, target = (
        (len(p) if isinstance(p, tuple) else 4, 1, 1, zero) for p, zero in ((before, 1), (after, 0))
    )
    folder = source(sources, origin, "llama", partition=before)
    check(resume(sources, target, "llama", folder, partition=after))


@pytest.mark.parametrize(
    ("dtype", "sums", "origin", "target"),
    [
        ("bf16", False, (2, 1, 2, 0), (0, 1, 2, 3)),
        ("bf16", True, (2, 2, 1, 1), (2, 1, 2, 1)),
        ("bf16", False, (0, 1, 2, 3), (2, 1, 2, 0)),
        ("fp16", False, (2, 1, 1, 0), (1, 1, 2, 0)),
    ],
    ids=show,
)
def test_low_precision(
    sources: Sources, dtype: str, sums: bool, origin: Mesh, target: Mesh
) -> None:
    """The first and the third are BF16_Optimizer's at ZeRO 0, which stock DeepSpeed writes and
    can't read back."""
    check(pair(sources, origin, target, "gpt", tied=True, dtype=dtype, fp32_sums=sums))


@pytest.mark.parametrize(
    ("origin", "target"), [((2, 1, 2, 1), (0, 1, 2, 3)), ((0, 2, 1, 2), (2, 2, 1, 0))], ids=show
)
def test_frozen_parameters_and_buffers(sources: Sources, origin: Mesh, target: Mesh) -> None:
    check(pair(sources, origin, target, "gpt", tied=True, extras=True))


@pytest.mark.parametrize(
    ("family", "origin", "target", "dtype"),
    [
        ("gpt", (4, 1, 1, 1), (2, 2, 1, 1), "fp32"),
        ("llama", (2, 2, 1, 1), (0, 1, 2, 2), "fp32"),
        ("llama", (2, 2, 1, 1), (2, 1, 1, 0), "fp32"),
        ("gpt", (2, 1, 2, 0), (2, 2, 1, 0), "bf16"),
        ("gpt", (0, 2, 1, 1), (4, 1, 1, 1), "fp32"),
    ],
    ids=show,
)
def test_stock_checkpoints_with_a_family(
    sources: Sources, family: str, origin: Mesh, target: Mesh, dtype: str
) -> None:
    tied = family == "gpt"
    folder = source(sources, origin, family, attach=False, tied=tied, dtype=dtype)
    assert not list(Path(folder).rglob("ucp_manifest.json"))
    check(resume(sources, target, family, folder, tied=tied, dtype=dtype))


def test_a_stock_pipeline_without_zero_is_refused_by_name(sources: Sources) -> None:
    """Its optimizer files name no parameters. The weights alone can be had."""
    folder = source(sources, (2, 2, 1, 0), "llama", attach=False)
    target = setup((2, 1, 1, 0), "llama", seed=9)
    job = kinds.attempt, target, folder, "trained"
    given: dict[str, Any] = {"attach": False, "family": "llama"}
    for rank in sources.ranks.run(2, *job, **given):
        assert rank["error"] == "UnsupportedError" and rank["unchanged"]
        assert "nothing says whose they are" in rank["message"]
    given |= {"allow": {"weights"}, "load_optimizer_states": False}
    for rank in sources.ranks.run(2, *job, **given):
        assert rank["error"] is None and not rank["unchanged"], rank["message"]


@pytest.mark.parametrize(
    "fault",
    ["two layers swapped", "one bit of a later stage", "one group's weight decay", "one step"],
)
def test_the_comparison_sees_a_planted_fault(sources: Sources, fault: str) -> None:
    folder = source(sources, (2, 2, 1, 1), "llama")
    found = resume(sources, (2, 1, 1, 0), "llama", folder, plant=fault)
    assert all(rank["differences"]["filled"] for rank in found)
