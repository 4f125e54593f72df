"""Folders that FSDP2 programs wrote by torch's own `dcp.save` are read bit for bit, and damaged or
hostile ones are refused by name before a tensor is read."""

import importlib.util
import os
import pickle
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import megatron_ucp as ucp
from megatron_ucp.core.manifest import Manifest, ParamSpec
from megatron_ucp.core.mesh import Mesh
from megatron_ucp.core.names import Keeper
from megatron_ucp.core.plan import Slot
from megatron_ucp.errors import (
    DamagedFileError,
    ForeignFileError,
    NotFoundError,
    StateMismatchError,
    UcpError,
    UnsafePickleError,
    UnsupportedError,
)
from megatron_ucp.formats.checkpoint import CallerModel, Checkpoint
from megatron_ucp.formats.registry import open_checkpoint
from megatron_ucp.reshard.check import read_state, verify
from tests.formats.craft import names_of_python_3_13
from tests.formats.hostile import bounded
from tests.formats.hostile_pickles import System
from tests.formats.megatron_files import (
    cut,
    index_of,
    lost,
    negative,
    no_index,
    outside,
)
from tests.places import Place

GOLDEN = Path(__file__).parent / "golden" / "dcp"
CASES = ("plain", "flat", "accelerate", "tied", "bf16")
NEWER = ("flat_torch2.14", "flat_torch2.15", "accelerate_torch2.15")  # by Python 3.13
MODEL = "pytorch_model_fsdp_0"


def said(case: str) -> Any:
    """What torch's own gather says."""
    return torch.load(GOLDEN / f"{case}.pt", weights_only=False)


def copied(case: str, tmp_path: Path) -> Path:
    return Path(shutil.copytree(GOLDEN / case, tmp_path / case))


def differences(checkpoint: Checkpoint, want: Any) -> list[str]:
    out: list[str] = []
    manifest = checkpoint.manifest
    tied = [alias for tie in manifest.ties for alias in tie.aliases]
    assert sorted([*manifest.by_name, *tied]) == sorted(want["weights"])
    for spec in manifest.params:
        states = dict(want["state"].get(spec.name, {}))
        step = states.pop("step", None)
        first = "fp32" if states else "value"
        states = {first: want["weights"][spec.name], **states}
        assert manifest.states_of(spec.name).keys() == states.keys()
        for state, values in states.items():
            have = read_state(checkpoint, spec.name, state)
            same = have.dtype == values.dtype and torch.equal(
                have.view(torch.uint8), values.reshape(-1).view(torch.uint8)
            )
            out += [] if same else [f"{spec.name} {state}"]
        if step is not None and manifest.scalars_of(spec.name) != {"step": float(step)}:
            out.append(f"{spec.name} step")
    for group in want["param_groups"]:
        for name in group["params"]:
            own = {key: value for key, value in group.items() if key != "params"}
            if dict(manifest.group_of(name)) != own:
                out.append(f"{name} group")
    return out


@pytest.mark.parametrize("case", [*CASES, *NEWER])
def test_every_state_is_read_as_torch_gathers_it(case: str, place: Place) -> None:
    with open_checkpoint(place(GOLDEN / case)) as checkpoint:
        for name in checkpoint.file_names:
            checkpoint.check(name)
        assert differences(checkpoint, said(case)) == []
        assert checkpoint.manifest.keeper == Keeper.DCP
        assert checkpoint.extras.counters["global_steps"] == 3
    assert verify(place(GOLDEN / case), deep=True).findings == ()


@pytest.mark.parametrize("state", ["exp_avg", "exp_avg_sq", "step", "lr", "weight"])
def test_the_comparison_finds_one_wrong_value(state: str, place: Place) -> None:
    want, name = said("plain"), "inner.weight"
    if state == "lr":
        want["param_groups"][0]["lr"] *= 2
    elif state == "weight":
        want["weights"][name][-1, -1] += 1
    else:
        want["state"][name][state].view(-1)[-1] += 1
    with open_checkpoint(place(GOLDEN / "plain")) as checkpoint:
        found = differences(checkpoint, want)
    seen = {"lr": "group", "weight": "fp32"}.get(state, state)
    assert f"{name} {seen}" in found and (state == "lr" or len(found) == 1)


def test_chunks_of_ranks_with_uneven_rows() -> None:
    with open_checkpoint(GOLDEN / "plain") as checkpoint:
        held = {n: len(h) for n, h in checkpoint.manifest.holders.items()}
        shapes = {spec.name: spec.shape for spec in checkpoint.manifest.params}
    assert shapes["table.weight"] == (7, 4) and held["table.weight"] == 2
    assert held["scale"] == 1, "a buffer lies on one rank"


def test_a_tied_matrix_is_one_parameter() -> None:
    with open_checkpoint(GOLDEN / "tied") as checkpoint:
        (tie,) = checkpoint.manifest.ties
    assert (tie.canonical, tie.aliases) == ("table.weight", ("head.weight",))


def test_a_scheduler_lies_flat_or_in_a_file_of_its_own() -> None:
    for case in ("flat", "accelerate"):
        with open_checkpoint(GOLDEN / case) as checkpoint:
            scheduler = checkpoint.extras.scheduler
        assert scheduler is not None
        assert (scheduler["last_epoch"], scheduler["base_lrs"]) == (3, [1e-3, 5e-4])


def test_settings_by_parameter_are_the_two_groups_again() -> None:
    with open_checkpoint(GOLDEN / "flat") as flat, open_checkpoint(GOLDEN / "accelerate") as two:
        assert [dict(g.settings) for g in flat.manifest.groups] == [
            dict(g.settings) for g in two.manifest.groups
        ]


@pytest.mark.parametrize("is_frozen", [False, True])
def test_a_parameter_without_any_state_was_never_stepped(tmp_path: Path, is_frozen: bool) -> None:
    """It begins with zeros, at the step of its group, and a note says so; one that the caller's
    model has frozen is frozen."""
    name = "inner.weight"
    shutil.copytree(GOLDEN / "plain", tmp_path / "some")
    index_of(removed(*(f"optim.state.{name}.{s}" for s in ("exp_avg", "exp_avg_sq", "step"))))(
        tmp_path / "some"
    )
    want = said("plain")
    with open_checkpoint(GOLDEN / "plain") as whole:
        specs = [
            replace(spec, kind="frozen") if is_frozen and spec.name == name else spec
            for spec in whole.manifest.params
        ]
        told = CallerModel(like=replace(whole.manifest, params=tuple(specs), buffers=()))
    group = next(g for g in want["param_groups"] if name in g["params"])
    others = [float(want["state"][n]["step"]) for n in group["params"] if n != name]
    if is_frozen:
        group["params"].remove(name)
        del want["state"][name]
    else:
        zeros = torch.zeros_like(want["state"][name]["exp_avg"])
        step = torch.tensor(max(others, default=0.0))
        want["state"][name] = {"exp_avg": zeros, "exp_avg_sq": zeros, "step": step}
    with open_checkpoint(tmp_path / "some", told=told) as checkpoint:
        assert differences(checkpoint, want) == []
        assert any(name in note for note in checkpoint.notes) == (not is_frozen)
        assert checkpoint.manifest.by_name[name].kind == ("frozen" if is_frozen else "trainable")
    assert verify(tmp_path / "some", deep=True).findings == ()


def test_weights_in_bf16_have_a_note() -> None:
    with open_checkpoint(GOLDEN / "bf16") as checkpoint:
        assert any("bfloat16" in note for note in checkpoint.notes)


def test_the_weights_alone(tmp_path: Path) -> None:
    folder = copied("accelerate", tmp_path)
    shutil.rmtree(folder / "optimizer_0")
    for path in (folder, folder / MODEL):
        with open_checkpoint(path) as checkpoint:
            assert checkpoint.manifest.keeper == Keeper.WEIGHTS
            want = said("accelerate")["weights"]
            for name, values in want.items():
                assert torch.equal(read_state(checkpoint, name, "value"), values.reshape(-1))
    with open_checkpoint(GOLDEN / "plain", told=CallerModel(weights=True)) as checkpoint:
        assert {*checkpoint.manifest.states_of("inner.weight")} == {"value"}


def test_the_folder_of_the_model_is_given_and_the_optimizer_lies_beside_it() -> None:
    with open_checkpoint(GOLDEN / "accelerate" / MODEL) as checkpoint:
        assert any("lies beside it" in note for note in checkpoint.notes)
        assert not differences(checkpoint, said("accelerate"))


def test_rules_say_how_a_mesh_cuts_it(tmp_path: Path) -> None:
    with pytest.raises(UcpError, match="how the parameters are cut"):
        ucp.convert(GOLDEN / "plain", tmp_path / "out", mesh="tp=2,dp=1,zero=1")


def test_the_folder_of_the_optimizer_alone(tmp_path: Path) -> None:
    with pytest.raises(StateMismatchError, match="weights are not in the folder"):
        open_checkpoint(GOLDEN / "accelerate" / "optimizer_0")


def torchtitan() -> Any:
    """The module of torchtitan that makes an optimizer's state dict, without the package around
    it."""
    found = importlib.util.find_spec("torchtitan")
    if found is None or found.origin is None:
        pytest.skip("torchtitan is not installed: its own function is not run")
    file = Path(found.origin).parent / "components" / "optimizer" / "utils.py"
    if not file.is_file():
        pytest.skip(f"this torchtitan has no {file.name} with get_flat_optim_state_dict")
    spec = importlib.util.spec_from_file_location("titan_utils", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_what_torchtitans_own_function_makes(tmp_path: Path) -> None:
    titan, net = torchtitan(), torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    matrices = [(n, p) for n, p in net.named_parameters() if p.ndim > 1]
    vectors = [(n, p) for n, p in net.named_parameters() if p.ndim < 2]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0, "lr": 5e-4}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    net(torch.ones(3)).sum().backward()
    optimizer.step()
    tree = {**net.state_dict(), "optimizer": titan.get_flat_optim_state_dict(optimizer)}
    tree |= {"train_state": {"step": torch.tensor(7, dtype=torch.int32)}}
    dcp.save(tree, checkpoint_id=tmp_path / "titan", no_dist=True)
    with open_checkpoint(tmp_path / "titan") as checkpoint:
        manifest = checkpoint.manifest
        assert [g.settings["lr"] for g in manifest.groups] == [1e-3, 5e-4]
        assert checkpoint.extras.counters["global_steps"] == 7
        for name, param in net.named_parameters():
            states = {"fp32": param.detach(), **optimizer.state[param]}
            assert manifest.scalars_of(name) == {"step": float(states.pop("step"))}
            for state, values in states.items():
                assert torch.equal(read_state(checkpoint, name, state), values.reshape(-1))


# ---- what is refused


def entry(metadata: Any, key: str) -> Any:
    return metadata.state_dict_metadata[key]


def places(metadata: Any, key: str) -> list[Any]:
    return [index for index in metadata.storage_data if index.fqn == key]


WEIGHT, MOMENT = "model.inner.weight", "optim.state.inner.weight.exp_avg"


def removed(*keys: str) -> Callable[[Any], None]:
    def change(metadata: Any) -> None:
        for key in keys:
            del metadata.state_dict_metadata[key]
            for index in places(metadata, key):
                del metadata.storage_data[index]

    return change


def renamed(old: str, new: str) -> Callable[[Any], None]:
    def change(metadata: Any) -> None:
        for key in [key for key in metadata.state_dict_metadata if key.startswith(old)]:
            other = new + key.removeprefix(old)
            metadata.state_dict_metadata[other] = metadata.state_dict_metadata.pop(key)
            for index in places(metadata, key):
                place = metadata.storage_data.pop(index)
                metadata.storage_data[type(index)(other, index.offset)] = place

    return change


def moved_chunk(metadata: Any) -> None:
    chunk = entry(metadata, WEIGHT).chunks[1]
    index = next(i for i in places(metadata, WEIGHT) if i.offset == chunk.offsets)
    place = metadata.storage_data.pop(index)
    chunk.offsets = torch.Size((0, 0))
    metadata.storage_data[type(index)(WEIGHT, chunk.offsets)] = place


def dropped_chunk(metadata: Any) -> None:
    chunk = entry(metadata, WEIGHT).chunks.pop()
    index = next(i for i in places(metadata, WEIGHT) if i.offset == chunk.offsets)
    del metadata.storage_data[index]


def shared_bytes(metadata: Any) -> None:
    one, other = places(metadata, WEIGHT)
    metadata.storage_data[one] = metadata.storage_data[other]


def other_bytes(metadata: Any) -> None:
    """Two chunks of different shapes in each other's place."""
    one, other = places(metadata, WEIGHT)[0], places(metadata, "model.table.weight")[0]
    held = metadata.storage_data
    held[one], held[other] = held[other], held[one]


def huge(metadata: Any) -> None:
    entry(metadata, WEIGHT).size = torch.Size((2**40, 2**40))


def saved(tree: Any) -> Callable[[Path], None]:
    """A folder that torch writes of other dictionaries."""

    def change(folder: Path) -> None:
        shutil.rmtree(folder)
        dcp.save(tree, checkpoint_id=folder, no_dist=True)

    return change


def trained(kind: Any = torch.optim.AdamW) -> tuple[Any, Any]:
    net = torch.nn.Linear(3, 2)
    optimizer = kind(net.parameters(), lr=1e-3)
    net(torch.ones(3)).sum().backward()
    optimizer.step()
    return net, optimizer


def by_position() -> Any:
    net, optimizer = trained()
    return {"model": net.state_dict(), "optim": optimizer.state_dict()}


def named(change: Callable[[Any], object] = bool, **more: Any) -> Any:
    net, optimizer = trained()
    names = [name for name, _ in net.named_parameters()]
    found = optimizer.state_dict()
    state = {names[number]: one for number, one in found["state"].items()}
    groups = [{**group, "params": names} for group in found["param_groups"]]
    tree = {"model": net.state_dict(), "optim": {"state": state, "param_groups": groups}, **more}
    change(tree)
    return tree


def eight_bits(tree: Any) -> None:
    for one in tree["optim"]["state"].values():
        one["absmax1"] = torch.ones(1)


def odd_shape(tree: Any) -> None:
    tree["optim"]["state"]["weight"]["exp_avg"] = torch.ones(6)


def twice(tree: Any) -> None:
    group = tree["optim"]["param_groups"][0]
    tree["optim"]["param_groups"].append(dict(group))


def no_group(tree: Any) -> None:
    tree["optim"]["param_groups"][0]["params"] = ["weight"]


def no_number(tree: Any) -> None:
    tree["optim"]["state"]["weight"]["step"] = "three"


def setting(name: str, value: Any) -> Callable[[Any], None]:
    def change(tree: Any) -> None:
        tree["optim"]["param_groups"][0][name] = value

    return change


def stepped(value: float) -> Callable[[Any], None]:
    def change(tree: Any) -> None:
        tree["optim"]["state"]["weight"]["step"] = torch.tensor(value)

    return change


ODD_RATES: dict[str, Any] = {
    "a text": "0.1",
    "a list": [0.1],
    "NaN": float("nan"),
    "negative": -0.1,
}


def infinite(tree: Any) -> None:
    tree["optim"]["state"]["weight"]["step"] = torch.tensor(float("nan"))


LOST = (StateMismatchError, "states of the optimizer are missing")
OF_ONE = [f"optim.state.inner.weight.{state}" for state in ("exp_avg", "exp_avg_sq", "step")]
FILES = "files that the index lists are missing"
OTHER_BYTES = "not the one that the index says"
OVERLAP = "overlap|belong to no entry|nowhere"
NO_LIST = removed("optim.param_groups.1.params")
NO_GROUP = renamed("optim.param_groups.1.", "optim.param_groups.2.")
OF_MEGATRON = {"model": {"w": torch.ones(2)}, "checkpoint_version": 3.0, "iteration": 3}
REFUSED: dict[str, tuple[Callable[[Path], None], type[UcpError], str]] = {
    "a file is missing": (lost("__1_0.distcp"), NotFoundError, FILES),
    "a file is cut": (cut("__1_0.distcp", 4000), DamagedFileError, "shorter than the index says"),
    "the index is cut": (cut(".metadata", 1000), DamagedFileError, "truncated"),
    "the index is empty": (cut(".metadata", 0), DamagedFileError, "malf"),
    "the index is a dict": (no_index, DamagedFileError, "another structure"),
    "chunks overlap": (index_of(moved_chunk), DamagedFileError, OVERLAP),
    "chunks leave a gap": (index_of(dropped_chunk), DamagedFileError, "gap"),
    "two chunks share bytes": (index_of(shared_bytes), DamagedFileError, "share bytes"),
    "chunks of other tensors": (index_of(other_bytes), DamagedFileError, OTHER_BYTES),
    "a path upwards": (outside("../x"), DamagedFileError, "outside of its folder"),
    "an absolute path": (outside("/etc/passwd"), DamagedFileError, "outside of its"),
    "a negative place": (negative, DamagedFileError, "impossible place"),
    "a parameter of 2**80 elements": (index_of(huge), DamagedFileError, "gap"),
    "a weight is missing": (index_of(removed(WEIGHT)), StateMismatchError, "are not in the folder"),
    "one state of one parameter is missing": (index_of(removed(MOMENT)), *LOST),
    "a step is missing": (index_of(removed(OF_ONE[-1])), *LOST),
    "a group's list of parameters is missing": (
        *(index_of(NO_LIST), DamagedFileError, "listed in two ways|missing"),
    ),
    "a group is missing": (index_of(NO_GROUP), DamagedFileError, "a parameter group is missing"),
    "states by position": (saved(by_position()), UnsupportedError, "by position"),
    "8-bit states": (saved(named(eight_bits)), UnsupportedError, "can't be cut"),
    "a state of another shape": (
        saved(named(odd_shape)),
        UnsupportedError,
        "no number for each element",
    ),
    "a parameter in two groups": (saved(named(twice)), DamagedFileError, "in two groups"),
    "a parameter in no group": (saved(named(no_group)), DamagedFileError, "is in no group"),
    "a step that is a text": (saved(named(no_number)), DamagedFileError, "another structure"),
    "a step that is no number": (saved(named(infinite)), DamagedFileError, "a number is none"),
    **{
        f"a rate that is {what}": (
            saved(named(setting("lr", value))),
            DamagedFileError,
            "a lr that no optimizer takes",
        )
        for what, value in ODD_RATES.items()
    },
    **{
        f"{step} steps": (saved(named(stepped(step))), DamagedFileError, "a count of steps is none")
        for step in (2.5, -3.0)
    },
    "two optimizers": (
        saved(named(other=named()["optim"])),
        UnsupportedError,
        "states of several optimizers",
    ),
    "Megatron's other formats": (
        *(saved(OF_MEGATRON), UnsupportedError, "Megatron-core writes by default"),
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused_by_name(what: str, tmp_path: Path, place: Place) -> None:
    change, error, says = REFUSED[what]
    folder = copied("plain", tmp_path)
    change(folder)
    with pytest.raises(error, match=says), open_checkpoint(place(folder)) as checkpoint:
        for name in checkpoint.file_names:
            checkpoint.check(name)
        for spec in checkpoint.manifest.params:
            for state in checkpoint.manifest.states_of(spec.name):
                read_state(checkpoint, spec.name, state)


def test_what_the_table_changes_is_read_without_the_change(tmp_path: Path) -> None:
    folder = copied("plain", tmp_path)
    saved(named())(folder)
    with open_checkpoint(folder) as checkpoint:
        assert checkpoint.manifest.states_of("weight").keys() == {"fp32", "exp_avg", "exp_avg_sq"}


def test_a_rate_that_is_a_tensor_stays_one(tmp_path: Path) -> None:
    folder, rate = copied("plain", tmp_path), torch.tensor(0.25, dtype=torch.float64)
    saved(named(lambda tree: tree["optim"]["param_groups"][0].update(lr=rate)))(folder)
    ucp.convert(folder, tmp_path / "out", to="dcp")
    for place in (folder, tmp_path / "out"):
        with open_checkpoint(place) as checkpoint:
            found = checkpoint.manifest.group_of("weight")["lr"]
        assert (found.get("dtype"), found.get("data")) == ("float64", rate.numpy().tobytes())


def test_a_frozen_matrix_that_equals_another_one_is_none_of_its_names(tmp_path: Path) -> None:
    folder = copied("plain", tmp_path)

    def with_copy(tree: Any) -> None:
        tree["model"]["frozen"] = tree["model"]["weight"].clone()

    saved(named(with_copy))(folder)
    with open_checkpoint(folder) as checkpoint:
        (tie,) = checkpoint.manifest.ties
    assert tie.aliases == ("frozen",), "nobody says otherwise"
    specs = [ParamSpec(n, (2, 3), "float32") for n in ("weight", "frozen")]
    like = Manifest(Keeper.ZERO_0, Mesh(), (*specs, ParamSpec("bias", (2,), "float32")), ())
    with open_checkpoint(folder, told=CallerModel(like=like)) as checkpoint:
        assert checkpoint.manifest.ties == () and "frozen" in checkpoint.manifest.by_name


def test_averages_beside_the_model_are_left_out(tmp_path: Path) -> None:
    folder = copied("plain", tmp_path)
    saved(named(ema={"weight": torch.zeros(2, 3), "bias": torch.zeros(2)}))(folder)
    with open_checkpoint(folder) as checkpoint:
        assert any("ema." in note for note in checkpoint.notes)
        assert read_state(checkpoint, "weight", "fp32").abs().sum() > 0


def test_weights_alone_below_a_name_that_the_model_has_too(tmp_path: Path) -> None:
    """Of a model whose own names begin with `model.`, the caller's names decide."""
    folder = tmp_path / "weights"
    dcp.save({"model.w": torch.ones(2)}, checkpoint_id=folder, no_dist=True)
    with open_checkpoint(folder) as checkpoint:
        assert [*checkpoint.manifest.by_name] == ["w"]
    like = Manifest(Keeper.ZERO_0, Mesh(), (ParamSpec("model.w", (2,), "float32"),), ())
    with open_checkpoint(folder, told=CallerModel(like=like)) as checkpoint:
        assert [*checkpoint.manifest.by_name] == ["model.w"]


def test_a_manifest_of_another_save_is_noticed(tmp_path: Path) -> None:
    ucp.convert(GOLDEN / "plain", tmp_path / "out", to="dcp")
    with open_checkpoint(tmp_path / "out") as checkpoint:
        assert differences_of_two(checkpoint) == []
    for name in os.listdir(GOLDEN / "plain"):
        shutil.copy(GOLDEN / "plain" / name, tmp_path / "out" / name)
    with pytest.raises(ForeignFileError, match="not the one that the manifest describes"):
        open_checkpoint(tmp_path / "out")


def differences_of_two(checkpoint: Checkpoint) -> list[str]:
    want = said("plain")
    return [d for d in differences(checkpoint, want) if not d.endswith("group")]


@pytest.mark.parametrize("fast", [True, False])
def test_a_folder_that_python_3_13_wrote(
    fast: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There pathlib's classes lie in `pathlib._local`; both readers of an index know them."""
    folder = copied("plain", tmp_path)
    index = pickle.loads((folder / ".metadata").read_bytes())
    with names_of_python_3_13():
        (folder / ".metadata").write_bytes(pickle.dumps(index, protocol=4))
    assert b"pathlib._local" in (folder / ".metadata").read_bytes()
    own = "megatron_ucp.formats.megatron.index."
    if fast:
        monkeypatch.setattr(f"{own}_SMALL_BYTES", 0)
        monkeypatch.setattr(f"{own}_one_by_one", lambda *_: pytest.fail("the slow one was asked"))
    else:
        monkeypatch.setattr(f"{own}_of_child", lambda _: None)
    with open_checkpoint(folder) as checkpoint:
        assert differences(checkpoint, said("plain")) == []


FURTHER = ("scaler.pt", "scheduler_1.bin", "custom_checkpoint_0.pkl", "random_states_0.pkl")


def test_what_lies_beside_and_nobody_reads_is_one_note(tmp_path: Path, place: Place) -> None:
    """Accelerate writes these files beside the folders: an fp16 run's loss scale, say."""
    folder = copied("accelerate", tmp_path)
    for name in ("trainer_state.json", "config.json"):  # which are read
        (folder / name).write_text("{}")
    (folder / ".cache").mkdir()
    assert ucp.verify(folder).notes == ()
    for name in FURTHER:
        torch.save({"scale": 1024.0}, folder / name)
    want = f"left out, as nothing here reads them: {', '.join(sorted(FURTHER))}"
    there = place(folder)
    for notes in (
        ucp.verify(there).notes,
        ucp.verify(there, deep=True).notes,
        ucp.convert(there, tmp_path / "out", to="dcp").notes,
    ):
        assert [note for note in notes if "left out" in note] == [want]


def test_a_second_optimizer_is_refused_as_a_second_model_is(tmp_path: Path) -> None:
    for more in ("optimizer_1", "pytorch_model_fsdp_1"):
        folder = Path(shutil.copytree(GOLDEN / "accelerate", tmp_path / more))
        shutil.copytree(folder / "optimizer_0", folder / more)
        with pytest.raises(UnsupportedError, match="several models or optimizers"):
            ucp.verify(folder)
    weights = CallerModel(weights=True)
    with open_checkpoint(tmp_path / "optimizer_1", told=weights) as checkpoint:
        assert checkpoint.manifest.keeper == Keeper.WEIGHTS


# ---- hostile


@pytest.mark.parametrize("place", [".metadata", "an object", "scheduler.bin"])
def test_nothing_of_a_pickle_is_run(place: str, tmp_path: Path) -> None:
    folder, mark = copied("accelerate", tmp_path), tmp_path / "mark"
    hostile = System(f"touch {mark}")
    if place == ".metadata":
        (folder / MODEL / place).write_bytes(pickle.dumps(hostile, protocol=4))
    elif place == "an object":
        shutil.rmtree(folder)
        tree = named(lambda tree: tree["optim"]["param_groups"][0].update(lr=hostile))
        dcp.save(tree, checkpoint_id=folder, no_dist=True)
    else:
        torch.save({"last_epoch": hostile}, folder / place)
    says = pytest.raises(UnsafePickleError, match="not on the closed list")
    with says, open_checkpoint(folder) as checkpoint:
        assert checkpoint.extras
    assert not mark.exists()
    pickle.loads(pickle.dumps(hostile))
    assert mark.exists(), "the pickle would have run"


def test_a_flipped_bit_is_found(tmp_path: Path, place: Place) -> None:
    folder = copied("plain", tmp_path)
    with open_checkpoint(folder) as checkpoint:
        number = checkpoint.manifest.holders["inner.weight"][0][0]
        block = checkpoint.where(Slot(number, (), 0, "fp32"))
        path, at = Path(block.file.path), block.record.offset_bytes
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    assert any("checksum" in one.what for one in verify(place(folder), deep=True).findings)


@pytest.mark.parametrize("case", ["plain", "flat", "accelerate"])
def test_random_damage_is_a_named_error_or_nothing(case: str, tmp_path: Path) -> None:
    """Bytes of the index are changed, cut or doubled: what is read then is what was there, or an
    error with a name."""
    want, dice, outcomes = said(case), random.Random(5), {"read": 0, "refused": 0}
    with bounded(2**31):
        for number in range(120):
            folder = copied(case, tmp_path / str(number))
            path = dice.choice(sorted(folder.rglob(".metadata")))
            data = bytearray(path.read_bytes())
            for _ in range(dice.choice([1, 1, 3])):
                at = dice.randrange(len(data))
                kind = dice.randrange(3)
                if kind == 0:
                    data[at] = dice.randrange(256)
                elif kind == 1:
                    del data[at : at + dice.randrange(1, 40)]
                else:
                    data[at:at] = data[at : at + dice.randrange(1, 40)]
            path.write_bytes(data)
            try:
                with open_checkpoint(folder) as checkpoint:
                    for spec in checkpoint.manifest.params:
                        for state in checkpoint.manifest.states_of(spec.name):
                            read_state(checkpoint, spec.name, state)
                    outcomes["read"] += 1
            except UcpError:
                outcomes["refused"] += 1
            shutil.rmtree(tmp_path / str(number))
    assert outcomes["refused"] > 30
    assert want
