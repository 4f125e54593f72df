"""The defects of DeepSpeed 0.19.8's own universal path (numbers of its list), each one right here.

S1 to S14 are silent there, L1 to L14 fail or hang.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.engines import jobs, kinds
from tests.engines.model import Setup
from tests.engines.sources import Sources, check, drop_record
from tests.share import LOSS_STEPS

pytestmark = pytest.mark.ranks
Z1, TO_1, TO_3 = Setup(1, "bf16"), Setup(1, "bf16", seed=9), Setup(3, "bf16", seed=9)


def test_s1_every_flat_counts_its_own_steps(sources: Sources) -> None:
    """Stock shares one step tensor among all flats of ZeRO-3: step 4 became 14 after 5 steps."""
    target = Setup(3, "fp32", zero_config=(("sub_group_size", 30),), seed=9)
    for rank in sources.ranks.run(2, jobs.steps_after, target, sources.get(2, Setup(1, "fp32")), 5):
        assert rank["flats"] >= 3 and rank["objects"] == rank["flats"]
        assert rank["steps"] == [3.0 + 5.0] * rank["flats"]


def test_s2_every_group_keeps_its_hyper_parameters(sources: Sources) -> None:
    """Stock gives all groups of ZeRO-3 those of group 0."""
    for rank in sources.ranks.run(2, jobs.groups_after, TO_3, sources.get(2, Z1)):
        assert [g["weight_decay"] for g in rank["groups"]] == [0.1, 0.0]
        assert [g["initial_lr"] for g in rank["groups"]] == [3e-3, 7e-3]


@pytest.mark.parametrize("stage", [1, 2])
def test_s3_round_robin_buffers(sources: Sources, stage: int) -> None:
    """Stock describes a permuted buffer in declaration order."""
    source = Setup(stage, "bf16", zero_config=(("round_robin_gradients", True),))
    check(sources.resume(2, TO_1, sources.get(2, source, attach=False, more=0)))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_s4_s5_frozen_parameters_and_buffers(sources: Sources, stage: int) -> None:
    target = Setup(stage, "bf16", seed=9)
    for rank in sources.ranks.run(2, jobs.unstepped_after, target, sources.get(2, Z1)):
        assert rank == dict.fromkeys(("frozen.weight", "scale", "calls"), (False, True))


@pytest.mark.parametrize("what", ["a master", "a moment"])
def test_s9_a_state_that_was_lost(sources: Sources, broken: Any, what: str) -> None:
    """Stock leaves the parameter at its random values."""
    folder = broken()
    path = folder / "filled" / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    drop_record(path, -1 if what == "a master" else 0)
    for manifest in folder.rglob("ucp_manifest.json"):
        manifest.unlink()
    for rank in sources.ranks.run(2, kinds.attempt, TO_3, str(folder), tag="filled"):
        assert rank["error"] == "DamagedFileError" and "bf16_zero_pp_rank_1" in rank["message"]
        assert rank["unchanged"]


def test_s11_amsgrad_steps_on(sources: Sources) -> None:
    """Stock drops max_exp_avg_sq: the next step raises KeyError."""
    options = (("amsgrad", True),)
    folder = sources.get(2, Setup(1, "fp32", options=options))
    target = Setup(3, "fp32", options=options, seed=9)
    check(sources.resume(2, target, folder, more=LOSS_STEPS), 1e-5)


def test_s12_weights_alone(sources: Sources) -> None:
    """Stock ignores load_optimizer_states=False and load_module_only at stages 1 and 2."""
    for rank in sources.ranks.run(2, jobs.weights_only, TO_1, sources.get(2, Z1)):
        for option, seen in rank.items():
            assert seen["masters"] and seen["no states"] and seen["own hyper-parameters"], option
        assert rank["load_module_only"]["steps"] == 0
        assert rank["load_optimizer_states"]["steps"] == 3


@pytest.mark.parametrize(("hyper", "rate"), [("checkpoint", 3e-3), ("config", 5e-4)])
def test_s13_changed_settings_are_chosen_and_reported(
    sources: Sources, hyper: str, rate: float
) -> None:
    """Stock overwrites the new config's settings without a word, by position."""
    for rank in sources.ranks.run(2, jobs.changed_settings, TO_3, sources.get(2, Z1), hyper):
        assert rank["initial_lr"] == rate
        assert any(
            ("initial_lr" in note and "0.0005" in note) or "kept from the engine" in note
            for note in rank["notes"]
        )


@pytest.mark.parametrize(
    ("source", "target"),
    [(1, 3), (2, 3), (3, 0), (3, 1), (3, 2), (1, 0), (2, 0)],
)
def test_l1_l2_l3_l9_every_crossing_without_metadata(
    sources: Sources, source: int, target: int
) -> None:
    """Stock: assertions without text, TypeError, FileNotFoundError, and a plain model lacks
    universal_checkpoint_info."""
    folder = sources.get(2, Setup(source, "bf16"), attach=False, more=0)
    check(sources.resume(2, Setup(target, "bf16", seed=9), folder))


@pytest.mark.parametrize(("source", "target"), [(1, 2), (3, 1), (2, 3)])
def test_l4_ranks_that_hold_only_padding(sources: Sources, source: int, target: int) -> None:
    """Stock: IndexError on that rank, and the others hang."""
    folder = sources.get(4, Setup(source, "bf16", net="Tiny", groups=3), more=0)
    check(sources.resume(4, Setup(target, "bf16", net="Tiny", groups=3, seed=9), folder))


def test_l5_an_error_on_one_rank_is_raised_on_all(sources: Sources) -> None:
    job = kinds.fails_on_rank, TO_1, sources.get(2, Z1), 2
    for rank, found in enumerate(sources.ranks.run(4, *job, timeout_s=60)):
        assert found["error"] == "DamagedFileError" and "only here" in found["message"]
        assert ("(on rank 2)" in found["message"]) == (rank != 2)
        assert found["refuses"]


@pytest.mark.parametrize("optimizer", ["SGD", "Adagrad", "RMSprop"])
def test_l6_other_optimizers_than_adam(sources: Sources, optimizer: str) -> None:
    options = (("momentum", 0.9),) if optimizer != "Adagrad" else ()
    groups = 1 if optimizer == "Adagrad" else 2
    source, target = (
        Setup(stage, "fp32", optimizer, options, groups=groups, seed=seed)
        for stage, seed in ((1, 1), (3, 9))
    )
    check(sources.resume(4, target, sources.get(2, source), more=LOSS_STEPS), 1e-5)


def test_l14_stock_refuses_another_number_of_ranks_and_we_do_not(sources: Sources) -> None:
    folder = sources.get(2, Z1)
    stock = {"through": "stock", "attach": False}
    for rank in sources.ranks.run(4, kinds.attempt, TO_1, folder, "trained", **stock):
        assert rank["error"] == "ZeRORuntimeException"
    check(sources.resume(4, TO_1, folder))


def test_the_engines_own_load_checkpoint_returns_what_its_user_saved(sources: Sources) -> None:
    for rank in sources.ranks.run(4, jobs.engine_load, TO_3, sources.get(2, Z1)):
        assert Path(rank["path"]).name == "trained"
        assert rank["client_state"] == {"note": "mine", "data": [0, 1, 2, 3, 4]}
        assert rank["steps"] == 3
