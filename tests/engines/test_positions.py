"""Stage-0 files without a manifest keep optimizer states by position: an engine refuses them by
name, and takes the weights beside them. Models in a low precision of their own at stage 0."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import megatron_ucp as ucp
from megatron_ucp.errors import StateMismatchError, UcpError
from megatron_ucp.formats.checkpoint import CallerModel
from megatron_ucp.formats.deepspeed.native import NativeCheckpoint
from megatron_ucp.formats.folder import LocalFolder
from tests.engines import jobs, kinds, resume_jobs
from tests.engines.canonical import canonical, differences
from tests.engines.kinds import oracle_of
from tests.engines.model import Setup, Twins, make_engine, train
from tests.engines.sources import Sources, check
from tests.engines.test_resume import evaluating

pytestmark = pytest.mark.ranks
LEFT, RIGHT = "left.weight", "right.weight"
KINDS = [("fp32", "AdamW"), ("bf16", "AdamW"), ("fp16", "AdamW"), ("bf16", "FusedAdam")]


def source(sources: Sources, dtype: str, optimizer: str) -> tuple[str, Setup]:
    setup = Setup(0, dtype, optimizer)
    folder = sources.get(2, setup, attach=False, more=0, filled=False)
    return folder, Setup(0, dtype, optimizer, seed=9)


@pytest.mark.parametrize("zero", [0, 2])
@pytest.mark.parametrize(("dtype", "optimizer"), KINDS)
def test_states_without_names_are_refused(
    sources: Sources, dtype: str, optimizer: str, zero: int
) -> None:
    folder, _ = source(sources, dtype, optimizer)
    target = Setup(zero, dtype, seed=9)
    for options in ({}, {"load_optimizer_states": False}):
        job = kinds.attempt, target, folder, "trained"
        for rank in sources.ranks.run(2, *job, **options):
            assert rank["error"] == "UnsupportedError" and rank["unchanged"], rank["message"]
            wanted = ("nothing says whose they are", "megatron_ucp.attach", "--allow weights")
            assert all(word in rank["message"] for word in wanted), rank["message"]


@pytest.mark.parametrize(("dtype", "optimizer"), KINDS)
def test_the_weights_alone_are_taken(sources: Sources, dtype: str, optimizer: str) -> None:
    folder, target = source(sources, dtype, optimizer)
    options: dict[str, Any] = {"load_optimizer_states": False, "allow": ("weights",)}
    (rank,) = sources.resume(1, target, folder, tags=("trained",), **options)
    kinds = {line.partition(" ")[0] for line in rank["differences"]["trained"]}
    assert not kinds & {"weights", "values"}
    assert any("weights " in line for line in rank["before"]["trained"])
    assert any("the weights alone" in note for note in rank["notes"]["trained"])


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_an_engine_without_an_optimizer_takes_the_weights(sources: Sources, dtype: str) -> None:
    folder = sources.get(2, Setup(0, dtype), attach=False, more=0)
    job = resume_jobs.evaluate
    for rank in sources.ranks.run(2, job, evaluating(0, dtype), folder):
        assert rank["wrong"] == [] and rank["count"] >= 8 and rank["finite"]


# ---- Megatron-DeepSpeed's program, whose files of stage 0 are read in the order of its model


class OfProgram(NativeCheckpoint):
    """Such files; `stock/test_megatron_deepspeed` reads those of the program itself."""

    def require_named(self) -> None:
        return


def twins(sources: Sources, dtype: str, **extra: Any) -> Path:
    setup = Setup(0, dtype, groups=1, net="Twins", extra=extra)
    return Path(sources.get(2, setup, attach=False, more=0, filled=False), "trained")


def checked(folder: Path, *order: str, allow: set[str] | None = None) -> str:
    """What the check of the file says, where the caller's only group has the matrices of one shape
    in this order."""
    trained = [name for name, param in Twins().named_parameters() if param.requires_grad]
    turn = dict(zip((LEFT, RIGHT), order, strict=True))
    told = CallerModel([[turn.get(name, name) for name in trained]])
    with OfProgram(LocalFolder(folder), told) as checkpoint:
        assert any("matched by position" in note for note in checkpoint.notes)
        try:
            checkpoint.check(checkpoint.main_file.rpartition("/")[2], allow or set())
        except UcpError as error:
            return str(error)
    return ""


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_order_of_the_model_is_the_only_one(sources: Sources, dtype: str) -> None:
    folder = twins(sources, dtype)
    assert checked(folder, LEFT, RIGHT) == ""
    said = checked(folder, RIGHT, LEFT)
    assert "nothing in it shows whose they are" in said and LEFT in said


def test_masters_of_other_weights_are_seen(sources: Sources) -> None:
    folder = twins(sources, "bf16", swapped=(LEFT, RIGHT))
    assert "the master weights are not those of the model file" in checked(folder, LEFT, RIGHT)
    assert checked(folder, LEFT, RIGHT, allow={"stale"}) == ""


def test_a_frozen_parameter_is_refused(sources: Sources) -> None:
    folder = twins(sources, "bf16", frozen=LEFT)
    order = [n for n, p in Twins().named_parameters() if p.requires_grad and n != LEFT]
    with (
        OfProgram(LocalFolder(folder), CallerModel([order])) as checkpoint,
        pytest.raises(StateMismatchError, match="a frozen parameter"),
    ):
        checkpoint.check("mp_rank_00_model_states.pt")


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
