"""Stage-0 files without a manifest keep optimizer states by position: they go to the parameters
that they are of, or nowhere."""

from typing import Any

import pytest

from tests.engines import kinds, position_jobs, resume_jobs
from tests.engines.model import Setup
from tests.engines.sources import Sources, check
from tests.engines.test_resume import evaluating

pytestmark = pytest.mark.ranks
NOTE = "matched by position"
LEFT, RIGHT = "left.weight", "right.weight"
KINDS = [("fp32", "AdamW"), ("bf16", "AdamW"), ("fp16", "AdamW"), ("bf16", "FusedAdam")]
KINDS_WITH_MASTERS = KINDS[1:]


def twins(dtype: str, optimizer: str = "AdamW", seed: int = 1, **extra: Any) -> Setup:
    return Setup(0, dtype, optimizer, groups=1, seed=seed, net="Twins", extra=extra)


def source(sources: Sources, setup: Setup, **kwargs: Any) -> str:
    return sources.get(2, setup, attach=False, more=0, filled=False, **kwargs)


def resume(sources: Sources, setup: Setup, folder: str, **options: Any) -> list[dict]:
    return sources.resume(1, setup, folder, tags=("trained",), **options)


def refused(sources: Sources, setup: Setup, folder: str, *words: str, **options: Any) -> None:
    (rank,) = sources.ranks.run(1, kinds.attempt, setup, folder, tag="trained", **options)
    assert rank["error"] == "StateMismatchError", rank
    assert all(word in rank["message"] for word in ("what to do:", *words)), rank["message"]
    assert rank["unchanged"]


def notes(found: list[dict]) -> list[str]:
    return [note for note in found[0]["reports"]["trained"].notes if NOTE in note]


@pytest.mark.parametrize(("dtype", "optimizer"), KINDS)
def test_the_order_of_the_run_is_taken_and_said(
    sources: Sources, dtype: str, optimizer: str
) -> None:
    folder = source(sources, twins(dtype, optimizer))
    found = resume(sources, twins(dtype, optimizer, seed=9), folder)
    check(found)
    assert len(notes(found)) == 1
    named = sources.get(2, twins(dtype, optimizer), more=0, filled=False)
    assert notes(resume(sources, twins(dtype, optimizer, seed=9), named)) == []


@pytest.mark.parametrize(("dtype", "optimizer"), KINDS)
def test_two_of_one_shape_in_another_order_are_refused(
    sources: Sources, dtype: str, optimizer: str
) -> None:
    folder = source(sources, twins(dtype, optimizer))
    other = twins(dtype, optimizer, seed=9, swapped=(LEFT, RIGHT))
    refused(sources, other, folder, *((LEFT,) if dtype == "fp32" else (RIGHT, "masters")))


@pytest.mark.parametrize(("dtype", "optimizer"), KINDS)
def test_another_one_of_two_is_frozen(sources: Sources, dtype: str, optimizer: str) -> None:
    folder = source(sources, twins(dtype, optimizer, frozen=LEFT))
    other = twins(dtype, optimizer, seed=9, frozen=RIGHT)
    refused(sources, other, folder, LEFT, "frozen" if dtype == "fp32" else "masters")


@pytest.mark.parametrize("how", [{"swapped": (LEFT, RIGHT)}, {"frozen": LEFT}])
@pytest.mark.parametrize(("dtype", "optimizer"), KINDS_WITH_MASTERS)
def test_masters_show_any_order(
    sources: Sources, dtype: str, optimizer: str, how: dict[str, Any]
) -> None:
    folder = source(sources, twins(dtype, optimizer, **how))
    check(resume(sources, twins(dtype, optimizer, seed=9, **how), folder))


@pytest.mark.parametrize("how", [{"swapped": (LEFT, RIGHT)}, {"frozen": LEFT}])
def test_in_fp32_another_order_needs_a_word(sources: Sources, how: dict[str, Any]) -> None:
    folder, target = source(sources, twins("fp32", **how)), twins("fp32", seed=9, **how)
    refused(sources, target, folder, 'allow={"positions"}')
    found = resume(sources, target, folder, allow=("positions",))
    check(found)
    assert len(notes(found)) == 1


def test_the_word_takes_a_wrong_order_too(sources: Sources) -> None:
    """Negative control: nothing in the file shows it, and the comparison of these tests does."""
    folder = source(sources, twins("fp32"))
    other = twins("fp32", seed=9, swapped=(LEFT, RIGHT))
    (rank,) = resume(sources, other, folder, allow=("positions",))
    wrong = {f"full ('{name}', '{key}')" for name in (LEFT, RIGHT) for key in MOMENTS}
    assert set(rank["differences"]["trained"]) == wrong


MOMENTS = ("exp_avg", "exp_avg_sq")


def test_masters_that_were_changed_on_purpose_show_nothing(sources: Sources) -> None:
    folder = source(sources, twins("bf16"))
    other = twins("bf16", seed=9, swapped=(LEFT, RIGHT))
    refused(sources, other, folder, "masters", allow=("positions",))
    refused(sources, other, folder, 'allow={"positions"}', allow=("stale",))
    (rank,) = resume(sources, other, folder, allow=("stale", "positions"))
    assert rank["differences"]["trained"]


def test_two_parameters_with_the_same_weights(sources: Sources) -> None:
    """Rounding hides which master is whose."""
    folder = sources.get(1, twins("bf16"), position_jobs.save_alike)
    check(resume(sources, twins("bf16", seed=9), folder))
    other = twins("bf16", seed=9, swapped=(LEFT, RIGHT))
    refused(sources, other, folder, "the same weights", LEFT)


def test_weights_alone_need_no_order_in_fp32(sources: Sources) -> None:
    folder = source(sources, twins("fp32"))
    other = twins("fp32", seed=9, swapped=(LEFT, RIGHT))
    (rank,) = resume(sources, other, folder, load_optimizer_states=False)
    kinds = {line.partition(" ")[0] for line in rank["differences"]["trained"]}
    assert not kinds & {"weights", "values"}
    assert "weights left.weight" in rank["before"]["trained"]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_an_engine_without_an_optimizer_takes_the_weights(sources: Sources, dtype: str) -> None:
    folder = sources.get(2, Setup(0, dtype), attach=False, more=0)
    job = resume_jobs.evaluate
    for rank in sources.ranks.run(2, job, evaluating(0, dtype), folder):
        assert rank["wrong"] == [] and rank["count"] >= 8 and rank["finite"]
