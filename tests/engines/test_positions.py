"""Stage-0 files without a manifest keep optimizer states by position: an engine refuses them by
name, and takes the weights beside them."""

from pathlib import Path
from typing import Any

import pytest

from megatron_ucp.errors import StateMismatchError, UcpError
from megatron_ucp.formats.checkpoint import CallerModel
from megatron_ucp.formats.deepspeed.native import NativeCheckpoint
from megatron_ucp.formats.folder import LocalFolder
from tests.engines import kinds, resume_jobs
from tests.engines.model import Setup, Twins
from tests.engines.sources import Sources
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
