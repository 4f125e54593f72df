"""A real engine saves, a real engine on another mesh loads: every master, state, step and
hyper-parameter, bit by bit."""

from pathlib import Path
from typing import Any

import pytest

from tests.covering import covering, met
from tests.engines.fingerprints import MARK
from tests.engines.model import Setup
from tests.engines.sources import Sources, check, check_fails
from tests.share import LOSS_STEPS, every

MESHES = [
    (dp, zero, dtype)
    for dtype in ("fp32", "bf16", "fp16")
    for dp in (1, 2, 4)
    for zero in (0, 1, 2, 3)
]
Mesh = tuple[int, int, str]
# a fault that is planted -> what the fingerprint says is not as in the files
SAID = {
    "one bit": ".weight (fp32)",
    "two elements swapped": ".weight (fp32)",
    "one moment": ".weight (exp_avg)",
    "one step": " (steps or hyper-parameters)",
    "one group's weight decay": " (steps or hyper-parameters)",
    "a buffer": "calls (value)",
}


# what is saved once and loaded often: of every stage and dtype
SOURCES: list[Mesh] = [
    *((2, 0, "fp32"), (4, 1, "fp32"), (2, 1, "bf16"), (2, 2, "fp16"), (4, 3, "bf16")),
    *((1, 3, "fp32"), (2, 3, "fp16"), (4, 2, "fp32"), (1, 0, "bf16"), (2, 0, "fp16")),
    *((4, 2, "bf16"), (2, 1, "fp16")),
]


def columns(source: Mesh, target: Mesh) -> tuple[object, ...]:
    """What meets by twos: the source's stage, the dtype, and the target's size and stage."""
    return source[1], source[2], target[0], target[1]


def engine(mesh: Mesh, seed: int = 9) -> tuple[int, Setup]:
    """On how many ranks, and which."""
    return mesh[0], Setup(mesh[1], mesh[2], seed=seed)


def others(found: list[dict[str, Any]]) -> list[str]:
    """What is not as it was, but for values that a dtype rounds."""
    said = [d for rank in found for tag in rank["differences"].values() for d in tag]
    return [one for one in said if not one.startswith("values ")]


ALL_PAIRS = [(a, b) for a in MESHES for b in MESHES]
PAIRS = covering(
    [(a, b) for a, b in ALL_PAIRS if a in SOURCES and a[2] == b[2] and a != b], columns
)
LOSSES = [pair for pair in PAIRS if pair[1][2] == "fp32"][:6]


def test_every_two_values_meet() -> None:
    """The law of the pairs: whatever two of these an engine can have, some pair has."""
    possible = [(a, b) for a, b in ALL_PAIRS if a[2] == b[2] and a != b]
    assert set().union(*(met(columns(*pair)) for pair in PAIRS)) == set().union(
        *(met(columns(*pair)) for pair in possible)
    )
    assert len(PAIRS) <= 16 and len(LOSSES) == 6


def show(value: object) -> str:
    return (
        "dp{}z{}".format(*value) + "".join(f"-{v}" for v in value[2:])
        if isinstance(value, tuple)
        else str(value)
    )


@pytest.mark.ranks
@pytest.mark.cases()
@pytest.mark.parametrize(("source", "target"), PAIRS, ids=show)
def test_pair(sources: Sources, source: Mesh, target: Mesh) -> None:
    folder, losses = sources.get(*engine(source, 1)), (source, target) in LOSSES
    found = sources.resume(*engine(target), folder, more=LOSS_STEPS if losses else 0)
    check(found, 1e-5 if losses else None)


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize(("source", "target"), every(ALL_PAIRS), ids=show)
def test_every_pair(sources: Sources, source: Mesh, target: Mesh) -> None:
    folder, same = sources.get(*engine(source, 1)), source[2] == target[2]
    how: dict[str, Any] = {"same_dtype": same, "allow": () if same else ("narrow",)}
    found = sources.resume(*engine(target), folder, **how)
    if same:
        check(found)
    assert others(found) == []


@pytest.mark.ranks
@pytest.mark.parametrize(("dp", "zero"), [(4, 0), (2, 1), (2, 2), (4, 3)])
def test_the_same_mesh_goes_on_with_identical_losses(sources: Sources, dp: int, zero: int) -> None:
    mesh = dp, zero, "fp32"
    found = sources.resume(*engine(mesh), sources.get(*engine(mesh, 1)), more=LOSS_STEPS)
    check(found, 0.0)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("source", "target"),
    [
        ((2, 1, "bf16"), (4, 3, "fp32")),
        ((2, 2, "fp16"), (1, 1, "fp32")),
        ((2, 1, "bf16"), (2, 0, "fp16")),
        ((2, 3, "fp16"), (2, 2, "bf16")),
    ],
    ids=show,
)
def test_masters_and_states_cross_dtypes(sources: Sources, source: Mesh, target: Mesh) -> None:
    folder = sources.get(*engine(source, 1))
    how: dict[str, Any] = {"same_dtype": False, "allow": ("narrow",)}
    assert others(sources.resume(*engine(target), folder, **how)) == []


@pytest.mark.ranks
@pytest.mark.parametrize("fault", SAID)
@pytest.mark.parametrize("zero", [1, 3])
def test_the_comparison_sees_a_planted_fault(sources: Sources, zero: int, fault: str) -> None:
    folder = sources.get(2, Setup(1, "bf16"))
    found = sources.resume(1, Setup(zero, "bf16", seed=9), folder, tags=("filled",), plant=fault)
    check_fails(found)
    (rank,) = found
    named = [one for one in rank["differences"]["filled"] if one.startswith(MARK)]
    assert named and all(one.endswith(SAID[fault]) for one in named), named
    if "steps" not in SAID[fault]:  # which are those of a whole group
        assert len(named) == 1


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("source", "target"),
    [((2, 1, "bf16"), (4, 3)), ((2, 3, "fp32"), (2, 1)), ((4, 2, "fp16"), (2, 0))],
    ids=show,
)
def test_a_checkpoint_that_stock_deepspeed_wrote(
    sources: Sources, source: Mesh, target: tuple[int, int]
) -> None:
    folder = sources.get(*engine(source, 1), attach=False, more=0)
    assert not list(Path(folder).rglob("ucp_manifest.json"))
    check(sources.resume(*engine((*target, source[2])), folder))
