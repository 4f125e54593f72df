"""Stage 0, whose optimizer keeps each parameter for itself: models in a low precision of their own,
parameters without elements."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

import megatron_ucp as ucp
from tests.engines import jobs
from tests.engines.canonical import canonical, differences
from tests.engines.kinds import oracle_of
from tests.engines.model import Setup, make_engine, train
from tests.engines.sources import Sources, check


def resume_empty(setup: Setup, folder: str) -> dict[str, Any]:
    """What differs before and after a load, but for what an optimizer counts for a parameter
    without elements; its shape, and whether training goes on."""
    kept = oracle_of(folder)
    want = of_elements(kept["states"]["trained"])
    engine = make_engine(setup)
    before = differences(want, of_elements(canonical(engine)))
    ucp.load(engine, folder, tag="trained")
    out = {"before": before, "after": differences(want, of_elements(canonical(engine)))}
    (nothing,) = (p for n, p in engine.module.named_parameters() if n == "nothing")
    out["shape"] = tuple(getattr(nothing, "ds_shape", nothing.shape))
    losses = train(engine, 2, first=kept["steps"])
    out["steady"] = all(math.isfinite(loss) for loss in losses) and nothing.requires_grad
    engine.destroy()
    return out


def of_elements(state: dict[str, Any]) -> dict[str, Any]:
    """A canonical state without the entries of the optimizer for `nothing`."""
    counted = {
        part: {key: value for key, value in state[part].items() if "nothing" not in (key, key[0])}
        for part in ("full", "scalars", "hyper")
    }
    return {**state, **counted}


pytestmark = pytest.mark.ranks
LOW = Setup(0, "fp32", extra={"model_dtype": torch.bfloat16})
EMPTY = Setup(0, "fp32", net="Empty")


def load(sources: Sources, folder: str, ranks: int, target: Setup, **options: object) -> list:
    return sources.resume(ranks, replace(target, seed=9), folder, tags=("trained",), **options)


@pytest.mark.parametrize("world", [2, 4, 1])
def test_a_model_in_bf16_under_an_fp32_config(sources: Sources, world: int) -> None:
    """Its weights are the masters, and moments are bf16, too."""
    folder = sources.get(2, LOW, more=0, filled=False)
    check(load(sources, folder, world, LOW))


def test_its_weights_become_fp32_masters(sources: Sources) -> None:
    folder = sources.get(2, LOW, more=0, filled=False)
    found = sources.ranks.run(2, jobs.masters_are_equal, Setup(1, "bf16"), folder)
    assert all(found)


def test_a_planted_bit_in_it_is_seen(sources: Sources) -> None:
    folder = sources.get(2, LOW, more=0, filled=False)
    for rank in load(sources, folder, 2, LOW, plant="one moment"):
        assert rank["differences"]["trained"]


@pytest.mark.parametrize("steps", [3, 0])
@pytest.mark.parametrize(
    ("source", "target"),
    [
        (EMPTY, EMPTY),
        (EMPTY, Setup(1, "fp32", net="Empty")),
        (Setup(1, "fp32", net="Empty"), EMPTY),
        (Setup(0, "bf16", net="Empty"), Setup(0, "bf16", net="Empty")),
    ],
)
def test_a_parameter_without_elements(  # ZeRO-3 can't gather one: torch.cat of nothing
    sources: Sources, source: Setup, target: Setup, steps: int
) -> None:
    folder = sources.get(2, source, more=0, filled=False, steps=steps)
    job = resume_empty
    for rank in sources.ranks.run(1, job, replace(target, seed=9), folder):
        assert rank["after"] == [] and len(rank["before"]) >= 8
        assert rank["shape"] == (0, 7) and rank["steady"]
