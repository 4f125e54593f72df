"""Small checkpoints that older versions of DeepSpeed wrote, which lie in the repository
(`golden/make_older.py` makes them with those versions), are read, bit for bit."""

import shutil
from pathlib import Path

import pytest
import torch

import megatron_ucp as ucp
from megatron_ucp.cli import main
from megatron_ucp.core.names import MASTER, VALUE
from megatron_ucp.errors import StateMismatchError
from megatron_ucp.formats.checkpoint import CallerModel
from megatron_ucp.formats.deepspeed.native import NativeCheckpoint
from megatron_ucp.formats.folder import LocalFolder
from megatron_ucp.formats.pt.file import PtFile
from megatron_ucp.reshard.check import read_state
from tests.engines.model import Net, Setup, param_groups
from tests.formats.golden.make_older import FOLDER, ULYSSES, VERSIONS, cases_of, values_of
from tests.formats.test_golden import InOrder

# a bf16 optimizer that 0.17 to 0.18.4 did not save
LOST = {(v, c) for v in ("0.17.6", "0.18.2") for c in ("zero0_bf16", "bf16_optimizer")}
EVERY = [(version, case) for version in VERSIONS for case in cases_of(version)]
KEPT = [one for one in EVERY if one not in LOST]
SHAPED = ("0.18.9", "0.19.4")  # whose stage 0 in bf16 keeps each parameter for itself
ENGINES = {
    "zero0": "zero0",
    "zero0_bf16": "bf16",  # but in SHAPED
    "zero1": "zero12",
    "zero2": "zero12",
    "zero3": "zero3",
    "bf16_optimizer": "bf16",
    "ulysses_zero1": "zero12",
    "ulysses_zero3": "zero3",
}


def order() -> list[list[str]]:
    """The optimizer's groups, which files of stage 0 list by number alone."""
    net = Net()
    names = {id(param): name for name, param in net.named_parameters()}
    return [[names[id(p)] for p in group["params"]] for group in param_groups(net, Setup(0).groups)]


def opened(folder: Path) -> NativeCheckpoint:
    plain = not [*folder.glob("*optim_states.pt")]
    if plain:
        return InOrder(LocalFolder(folder), CallerModel(order()))
    return NativeCheckpoint(LocalFolder(folder))


def differences(checkpoint: NativeCheckpoint) -> list[tuple[str, str]]:
    """The (parameter, state) pairs that are not what the run was filled with."""
    out: list[tuple[str, str]] = []
    compared = 0
    for (name, state), want in values_of().items():
        key = {"value": VALUE, "fp32": MASTER}.get(state, state)
        have = read_state(checkpoint, name, key)
        compared += have.numel()
        # frozen weights and buffers have the training dtype
        if have.numel() != want.numel() or not torch.equal(have, want.to(have.dtype).reshape(-1)):
            out.append((name, state))
    assert compared == 3 * 294 + 49 + 7
    return out


@pytest.mark.parametrize(("version", "case"), KEPT)
def test_every_state_is_read_bit_for_bit(version: str, case: str) -> None:
    with opened(FOLDER / version / case) as checkpoint:
        shaped = case == "zero0_bf16" and version in SHAPED
        expected = "zero0" if shaped else ENGINES[case]
        assert checkpoint.manifest.keeper == expected
        assert checkpoint.manifest.run["ds_version"] == version
        assert differences(checkpoint) == []


@pytest.mark.parametrize(("version", "case"), EVERY)
def test_inspect_and_verify(capsys: pytest.CaptureFixture[str], version: str, case: str) -> None:
    assert main(["inspect", str(FOLDER / version / case)]) == 0
    said = capsys.readouterr().out
    assert version in said and ("not saved" in said) == ((version, case) in LOST)
    assert ucp.verify(FOLDER / version / case, deep=True).findings == ()


@pytest.mark.parametrize(("version", "case"), sorted(LOST))
def test_states_that_were_never_saved_are_missed(tmp_path: Path, version: str, case: str) -> None:
    with pytest.raises(StateMismatchError, match=r"0\.17 to 0\.18\.4"):
        ucp.convert(FOLDER / version / case, tmp_path / "out", to="universal")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("case", [*cases_of("0.14.5")])
def test_one_changed_bit_is_seen(case: str, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(FOLDER / "0.14.5" / case, tmp_path / case))
    pattern = "mp_rank_*" if case == "zero0" else "*rank_1_*optim_states.pt"
    path = next(folder.glob(pattern))
    tree = torch.load(path, weights_only=False)
    inner = tree["optimizer"] if case == "zero0" else tree["optimizer_state_dict"]
    base = inner.get("base_optimizer_state") or inner.get("optimizer_state_dict") or inner
    base["state"][0]["exp_avg"].view(-1).view(torch.int32)[1] ^= 1
    torch.save(tree, path)
    with opened(folder) as checkpoint:
        found = differences(checkpoint)
    assert len(found) == 1 and found[0][1] == "exp_avg"


def test_the_files_are_what_those_versions_wrote() -> None:
    for version, case in EVERY:
        files = sorted((FOLDER / version / case).iterdir())
        for path in files:
            with PtFile(path) as file:
                assert isinstance(file.tree, dict) and file.tree["ds_version"] == version
        if case in ULYSSES:
            parts = [int(p.name.partition("pp_rank_")[2][0]) for p in files if "_pp_" in p.name]
            ranks = [int(p.name.partition("_mp_rank_")[2][:2]) for p in files if "_pp_" in p.name]
            assert ranks == [part % 2 for part in parts] and {*parts} == {0, 1, 2, 3}


@pytest.mark.parametrize("case", [*ULYSSES])
def test_files_that_are_named_by_the_sequence_parallel_rank(case: str, tmp_path: Path) -> None:
    """One that is missing, or there twice, is seen whatever number is in its name."""
    folder = Path(shutil.copytree(FOLDER / "0.18.2" / case, tmp_path / case))
    lost = next(folder.glob("*zero_pp_rank_1_mp_rank_01_optim*"))
    lost.rename(tmp_path / "away")
    assert "missing" in ucp.verify(folder).findings[0].what
    shutil.copy(tmp_path / "away", lost)
    assert ucp.verify(folder).findings == ()
    shutil.copy(lost, str(lost).replace("mp_rank_01", "mp_rank_00"))
    assert ucp.verify(folder).findings  # two files of one partition


@pytest.mark.parametrize(
    ("version", "is_newer"), [("0.20.1", True), ("1.0", True), ("0.19.8", False)]
)
def test_keys_that_a_newer_deepspeed_may_have_added_are_named(
    version: str, is_newer: bool, tmp_path: Path
) -> None:
    """In a file of a known version they are the user's, and no note says a word."""
    folder = Path(shutil.copytree(FOLDER / "0.18.2" / "zero1", tmp_path / "tag"))
    for path in folder.glob("mp_rank_*"):
        tree = torch.load(path, weights_only=False)
        torch.save({**tree, "ds_version": version, "lr_plan": 3}, path)
    with opened(folder) as checkpoint:
        assert checkpoint.extras.client_state["lr_plan"] == 3
        notes = [note for note in checkpoint.notes if "lr_plan" in note]
    assert bool(notes) == is_newer
    assert all(version in note and "client state" in note for note in notes)
