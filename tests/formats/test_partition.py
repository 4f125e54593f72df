"""The division of a pipeline's layers: what DeepSpeed's own functions give."""

import random

import pytest

from megatron_ucp.core.layers import Layers
from megatron_ucp.errors import UsageError
from megatron_ucp.formats.deepspeed.partition import balanced, divide, uniform

LAYERS = Layers(
    (
        {"w": "tied_modules.embed.w"},
        *({"a": f"{i}.a", "b": f"{i}.b"} for i in range(1, 5)),
        {"n": "5.n"},
        {"w": "tied_modules.embed.w"},
    ),
    {
        "tied_modules.embed.w": "embed",
        "5.n": "norm",
        **{f"{i}.{x}": f"{x}{i}" for i in range(1, 5) for x in "ab"},
    },
    frozenset(range(6)),
)


def test_as_deepspeed_divides() -> None:
    from deepspeed.runtime.utils import partition_balanced, partition_uniform

    dice = random.Random(3)
    for _ in range(500):
        count, parts = dice.randint(1, 14), dice.randint(1, 6)
        weights = [dice.choice([0, 0, 1, 1, 5, dice.randint(0, 50)]) for _ in range(count)]
        assert balanced(weights, parts) == [int(n) for n in partition_balanced(weights, parts)], (
            weights,
            parts,
        )
        if count >= parts:
            assert uniform(count, parts) == [int(n) for n in partition_uniform(count, parts)], (
                count,
                parts,
            )


def test_stages() -> None:
    assert LAYERS.canonical[1] == ("a1", "b1") and LAYERS.canonical[0] == LAYERS.canonical[6] == (
        "embed",
    )
    assert divide(LAYERS, "uniform", 2, {}) == [range(0, 4), range(4, 7)]
    assert divide(LAYERS, (1, 5, 1), 3, {}) == [range(0, 1), range(1, 6), range(6, 7)]
    halves = divide(LAYERS, "layers", 2, {})
    assert [len([i for i in stage if 1 <= i <= 4]) for stage in halves] == [2, 2]
    assert (
        divide(LAYERS, "parameters", 2, {"embed": 100, **{f"a{i}": 1 for i in range(1, 5)}})[1].stop
        == 7
    )


@pytest.mark.parametrize(
    ("method", "stages"), [("type:x", 2), ((1, 2), 2), ((7, 0), 2), ((7,), 2), ("uniform", 8)]
)
def test_refusals(method: str | tuple[int, ...], stages: int) -> None:
    with pytest.raises(UsageError):
        divide(LAYERS, method, stages, {})
