"""Small checkpoints that lie in the repository are read, bit for bit: each wrapper of DeepSpeed,
and older layouts.

What each must hold was gathered from the live engine by other means (see `golden/make.py`).
"""

import json
import shutil
from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from safetensors.torch import save_file

import megatron_ucp as ucp
from megatron_ucp.core.names import MASTER, VALUE
from megatron_ucp.core.rules import NOTHING_KNOWN
from megatron_ucp.errors import DamagedFileError, UcpError
from megatron_ucp.formats.checkpoint import CallerModel
from megatron_ucp.formats.deepspeed.native import NativeCheckpoint
from megatron_ucp.formats.deepspeed.optimizers import reader_for
from megatron_ucp.formats.pt.file import PtFile
from megatron_ucp.formats.registry import open_checkpoint
from megatron_ucp.formats.store import Location, folder_at
from megatron_ucp.reshard.check import read_state
from tests.engines.canonical import PER_GROUP
from tests.places import Place

from .golden.make import CASES, FOLDER

ENGINES = {
    "zero0_fp32": "zero0",
    "zero0_bf16": "zero0",
    "zero1": "zero12",
    "zero2": "zero12",
    "zero3": "zero3",
    "bf16_optimizer": "bf16",
    "zero1_elastic": "zero12",
    "zero1_old": "zero12",
    "zero2_old": "zero12",
    "zero3_old": "zero3",
    "zero2_python3.13": "zero12",
}
SWAPPED: dict[str, str] = {"norm.weight": "norm.bias", "norm.bias": "norm.weight"}
STATES = (MASTER, "exp_avg", "exp_avg_sq")


def expected(case: str) -> tuple[dict[tuple[str, str], torch.Tensor], dict[str, Any]]:
    """Every state of every parameter, flat, and steps, hyper-parameters and the order of each
    group's parameters."""
    with numpy.load(FOLDER / f"{case}.npz") as arrays:
        names = [name for name in arrays.files if name != "json"]
        return (
            {tuple(name.split("|")): torch.from_numpy(arrays[name]).reshape(-1) for name in names},  # type: ignore[misc]
            json.loads(str(arrays["json"])),
        )


def opened(case: str, folder: Location, order: list[list[str]] | None = None) -> NativeCheckpoint:
    known = order or expected(case)[1]["order"]
    if case.startswith("zero0"):
        return InOrder(folder_at(folder), CallerModel(known))
    return NativeCheckpoint(folder_at(folder))


class InOrder(NativeCheckpoint):
    """The readers of stage-0 files, which a manifest leads to: here the test says the order."""

    @cached_property
    def lies_by_position(self) -> bool:
        return False


def differences(checkpoint: NativeCheckpoint, case: str) -> list[tuple[str, str]]:
    """The (parameter, state) pairs that are not bit for bit what the engine held."""
    want, _ = expected(case)
    manifest = checkpoint.manifest
    out: list[tuple[str, str]] = []
    found = {
        (spec.name, state)
        for spec in manifest.params
        if spec.kind == "trainable"
        for state, _ in manifest.buffers[manifest.holders[spec.name][0][0]].states
    }
    assert found == set(want) and {state for _, state in found} == set(STATES), (
        "states and parameters are all there"
    )
    for name, state in sorted(found):
        have = read_state(checkpoint, name, state)
        assert have.dtype == torch.float32 and have.numel() == want[name, state].numel() > 0
        if not torch.equal(have.view(torch.uint8), want[name, state].view(torch.uint8)):
            out.append((name, state))
    return out


@pytest.mark.parametrize("case", CASES)
def test_every_state_is_read_bit_for_bit(case: str, place: Place) -> None:
    with opened(case, place(FOLDER / case)) as checkpoint:
        assert checkpoint.manifest.keeper == ENGINES[case]
        assert {spec.dtype for spec in checkpoint.manifest.params if spec.kind == "trainable"} == {
            "float32" if case == "zero0_fp32" else "bfloat16"
        }
        assert differences(checkpoint, case) == []
        for name in checkpoint.names.names:
            checkpoint.check(name)  # the files of one save agree


@pytest.mark.parametrize("case", CASES)
def test_steps_and_hyper_parameters(case: str, place: Place) -> None:
    _, rest = expected(case)
    with opened(case, place(FOLDER / case)) as checkpoint:
        for spec in checkpoint.manifest.params:
            if spec.kind != "trainable":
                continue
            step = (
                4.0 if case == "zero0_bf16" else 3.0
            )  # FP16_UnfusedOptimizer steps once when it is built
            assert rest["scalars"][f"{spec.name}|step"] == step
            assert checkpoint.manifest.scalars_of(spec.name) == {"step": step}
            group = checkpoint.manifest.group_of(spec.name)
            want = {k: v for k, v in rest["hyper"][spec.name].items() if k not in PER_GROUP}
            assert set(want) >= {"lr", "weight_decay", "betas", "eps"}
            if case != "zero1_elastic":  # its files hold no hyper-parameters
                assert {
                    k: list(v) if isinstance(v, tuple) else v for k, v in group.items() if k in want
                } == want


@pytest.mark.parametrize("case", ["zero1", "zero3", "zero0_fp32", "zero3_old"])
def test_buffers_and_frozen_parameters(case: str, place: Place) -> None:
    """What has no master is there under its own name, where the file holds it at all."""
    module = {"scale", "calls"} | ({"frozen.weight"} if not case.endswith("_old") else set())
    with opened(case, place(FOLDER / case)) as checkpoint:
        assert {
            spec.name for spec in checkpoint.manifest.params if spec.kind != "trainable"
        } == module
        assert read_state(checkpoint, "calls", VALUE).tolist() == [3]
        assert (read_state(checkpoint, "scale", VALUE).float() >= 0.5).all()


# ---- the files are what their names say ----


def trees(case: str) -> Iterator[dict[str, Any]]:
    for path in sorted((FOLDER / case).iterdir()):
        with PtFile(path) as file:
            assert isinstance(file.tree, dict)
            yield file.tree


def test_the_old_files_are_old() -> None:
    for case in ("zero1_old", "zero2_old", "zero3_old"):
        for path in (FOLDER / case).iterdir():
            with PtFile(path) as file:
                assert file.root == "archive" and f"{file.root}/byteorder" not in file.records
                assert (
                    path.read_bytes()[file.records["archive/data.pkl"].offset_bytes :][:2]
                    == b"\x80\x02"
                )
        for tree in trees(case):
            model, optimizer = "module" in tree, tree.get("optimizer_state_dict")
            assert model != (optimizer is not None)
            if model:
                assert not {
                    "frozen_param_shapes",
                    "shared_params",
                    "buffer_names",
                    "global_samples",
                } & set(tree)
                assert type(tree["param_shapes"]) is dict
            else:
                assert isinstance(optimizer, dict)
                assert (
                    type(optimizer["zero_stage"]) is int
                    and type(optimizer["partition_count"]) is int
                )
                later = {
                    "param_alignment_paddings",
                    "ds_zero_partition_groups",
                    "param_slice_mappings",
                }
                assert not later & set(optimizer)
                base = optimizer.get("base_optimizer_state") or optimizer["optimizer_state_dict"]
                assert {type(state["step"]) for state in base["state"].values()} == {int}


def test_the_current_files_are_those_of_the_pinned_deepspeed() -> None:
    made_with = json.loads((FOLDER / "made_with.json").read_text())["deepspeed"]
    for case in (
        "zero0_fp32",
        "zero0_bf16",
        "zero1",
        "zero2",
        "zero3",
        "bf16_optimizer",
        "zero1_elastic",
    ):
        for tree in trees(case):
            assert tree["ds_version"] == made_with
    shapes = next(tree["param_shapes"] for tree in trees("zero1") if "module" in tree)
    assert type(shapes) is list and {type(group) for group in shapes} == {OrderedDict}


# ---- negative controls ----


def changed(case: str, tmp_path: Path, name: str, change: Callable[[dict[str, Any]], None]) -> Path:
    """A copy of a golden checkpoint with one file changed and written anew, its checksums right."""
    folder = tmp_path / case
    shutil.copytree(FOLDER / case, folder)
    path = next(folder.glob(name))
    tree = torch.load(path, weights_only=False)
    change(tree)
    torch.save(tree, path)
    return folder


def optimizer_states(tree: dict[str, Any]) -> dict[int, Any]:
    inner = tree.get("optimizer_state_dict") or tree["optimizer"]
    base = inner.get("base_optimizer_state") or inner.get("optimizer_state_dict") or inner
    return base["state"] if isinstance(base, dict) else dict(enumerate(base))


@pytest.mark.parametrize("case", CASES)
def test_one_changed_bit_is_seen(case: str, tmp_path: Path, place: Place) -> None:
    def flip(tree: dict[str, Any]) -> None:
        moment = optimizer_states(tree)[0]["exp_avg"].view(-1)
        moment.view(torch.int32)[1] ^= 1

    pattern = "mp_rank_*" if case.startswith("zero0") else "*rank_1_*optim_states.pt"
    with opened(case, place(changed(case, tmp_path, pattern, flip))) as checkpoint:
        found = differences(checkpoint, case)
    assert len(found) == 1 and found[0][1] == "exp_avg"


@pytest.mark.parametrize("case", CASES)
def test_one_changed_byte_of_a_record_is_an_error(case: str, tmp_path: Path, place: Place) -> None:
    folder = tmp_path / case
    shutil.copytree(FOLDER / case, folder)
    path = next(
        folder.glob("mp_rank_*" if case.startswith("zero0") else "*rank_0_*optim_states.pt")
    )
    with PtFile(path) as file:
        assert isinstance(file.tree, dict)
        record = file.record(optimizer_states(file.tree)[0]["exp_avg_sq"].storage)
    data = bytearray(path.read_bytes())
    data[record.offset_bytes + 2] ^= 1
    path.write_bytes(data)
    with (
        opened(case, place(folder)) as checkpoint,
        pytest.raises(DamagedFileError, match="damaged"),
    ):
        differences(checkpoint, case)


@pytest.mark.parametrize("case", [case for case in CASES if not case.startswith("zero0")])
def test_a_swapped_order_is_seen(case: str, tmp_path: Path) -> None:
    """Two parameters of one size that change places: nothing but their values can show it."""

    def swap(tree: dict[str, Any]) -> None:
        shapes = tree["param_shapes"]
        group = shapes if isinstance(shapes, dict) else shapes[1]
        items = [(SWAPPED.get(name, name), shape) for name, shape in group.items()]
        group.clear()
        group.update(items)

    pattern = "zero_pp_rank_0_*model_states.pt" if "zero3" in case else "mp_rank_*"
    with opened(case, changed(case, tmp_path, pattern, swap)) as checkpoint:
        found = {name for name, _ in differences(checkpoint, case)}
    assert found == {"norm.weight", "norm.bias"}


@pytest.mark.parametrize("case", ["zero0_fp32", "zero0_bf16"])
def test_a_swapped_order_that_is_given_is_seen(case: str) -> None:
    order = [
        [str(SWAPPED.get(name, name)) for name in group] for group in expected(case)[1]["order"]
    ]
    with opened(case, FOLDER / case, order) as checkpoint:
        assert {name for name, _ in differences(checkpoint, case)} == {"norm.weight", "norm.bias"}
    with pytest.raises(UcpError):  # other shapes: refused before anything is read
        opened(case, FOLDER / case, [group[::-1] for group in order]).close()


def test_each_class_of_reader_is_met() -> None:
    kinds = set()
    for case in CASES:
        for tree in trees(case):
            inner = tree.get("optimizer_state_dict") or tree.get("optimizer")
            if inner:
                kinds.add(type(reader_for(inner, case)).__name__)
    assert kinds == {"Zero12File", "Zero3File", "PlainFile", "UnfusedFile"}


@pytest.mark.parametrize("case", ["zero1", "megatron/td_full_tp2dp2", "to universal", "weights"])
def test_what_lies_beside_and_may_hold_states_is_one_note(case: str, tmp_path: Path) -> None:
    """As a trainer puts an optimizer beside a Hugging Face model; in every format (test_dcp)."""
    folder = tmp_path / "run"
    if case == "to universal":
        ucp.convert(FOLDER / "attached_zero1", folder, to="universal")
    elif case == "weights":
        folder.mkdir()
        save_file({"a": torch.ones(3)}, folder / "model.safetensors", {"format": "pt"})
    else:
        shutil.copytree(FOLDER / case, folder)
    (folder / "README.md").write_text("mine")
    with open_checkpoint(folder, rules=NOTHING_KNOWN) as checkpoint:
        assert checkpoint.unread() == []
        held = Path(str(checkpoint.folder))
    for name in ("optimizer.pt", "optimizer_old.bin"):
        torch.save({}, held / name)
    with open_checkpoint(folder, rules=NOTHING_KNOWN) as checkpoint:
        (note,) = [note for note in checkpoint.notes if "nothing here reads" in note]
        assert note.endswith("optimizer.pt, optimizer_old.bin")
