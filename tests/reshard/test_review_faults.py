"""Faults that a review found in files and conversions, each as a user meets it."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import megatron_ucp as ucp
from megatron_ucp import errors
from megatron_ucp.cli import main
from megatron_ucp.core.manifest import FILE_NAME
from megatron_ucp.core.names import MASTER
from megatron_ucp.core.plan import Slot
from megatron_ucp.formats.deepspeed.target import Target
from megatron_ucp.formats.hugging_face.checkpoint import HuggingFaceCheckpoint
from megatron_ucp.formats.registry import open_checkpoint
from tests.reshard import paper, twins
from tests.reshard.plain import edited, target

OPTIMIZER = "zero_pp_rank_0_mp_rank_00_optim_states.pt"
RULES = """format = 1
[[rule]]
pattern = '.*'
layout = "Partial"
axis = "tp"
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    model = paper.plain_model({"a": (4, 3), "b": (5,)})
    return paper.write(model, tmp_path / "source" / "step7")


def base_of(tree: dict[str, Any]) -> dict[str, Any]:
    return tree["optimizer_state_dict"]["base_optimizer_state"]


def on_optimizer(change: Any) -> Any:
    return lambda name, tree: change(tree) if "optim" in name else None


def test_convert_twice_gives_the_same_bytes(source: Path, tmp_path: Path) -> None:
    for number in (1, 2):
        ucp.convert(source, tmp_path / f"out{number}" / "step7", target=target())
    one, two = (
        {p.name: p.read_bytes() for p in (tmp_path / f"out{n}" / "step7").iterdir()} for n in (1, 2)
    )
    assert one == two and FILE_NAME in one


def test_every_file_of_a_universal_folder_is_listed(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out" / "step7"
    ucp.convert(source, out, to="universal")
    listed = {name for name, *_ in json.loads((out / FILE_NAME).read_text())["files"]}
    found = {str(path.relative_to(out)) for path in out.rglob("*.pt")}
    assert listed == found and any(name.startswith("zero/") for name in listed)
    assert ucp.verify(out, deep=True).findings == ()
    foreign = tmp_path / "foreign" / "step7"
    shutil.copytree(out, foreign)
    atom = foreign / "zero" / "a" / "fp32.pt"
    tree = torch.load(atom, weights_only=False)
    tree["param"] += 1
    torch.save(tree, atom)
    assert main(["verify", str(foreign)]) == 1
    (only,) = ucp.verify(foreign).findings
    assert "another size" in only.what and only.file == str(atom)
    with pytest.raises(errors.ForeignFileError, match="not the one that was saved"):
        ucp.describe(foreign)


def test_an_atom_that_nobody_listed(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out" / "step7"
    ucp.convert(source, out, to="universal")
    shutil.copytree(out / "zero" / "a", out / "zero" / "c")
    assert main(["verify", str(out)]) == 1
    assert any("not part of the folder" in one.what for one in ucp.verify(out).findings)


def test_a_partition_file_without_its_optimizer(source: Path) -> None:
    edited(
        source, on_optimizer(lambda tree: tree["optimizer_state_dict"].pop("base_optimizer_state"))
    )
    (found,) = ucp.verify(source).findings
    assert "lacks its optimizer's states" in found.what and found.file.endswith(OPTIMIZER)
    with pytest.raises(errors.DamagedFileError, match="lacks its optimizer's states"):
        ucp.convert(source, source.parent / "out", target=target())


def test_a_missing_partition_file_is_named(source: Path) -> None:
    (source / FILE_NAME).unlink()
    out = source.parent.parent / "two" / "step7"
    ucp.convert(source, out, target=Target(ucp.Mesh(dp=2, zero=1)))
    (out / FILE_NAME).unlink()
    next(out.glob("*zero_pp_rank_1_*")).unlink()
    (found,) = ucp.verify(out).findings
    assert "zero_pp_rank_1_mp_rank_00_optim_states.pt" in found.file


def test_states_that_were_never_saved(source: Path) -> None:
    """Steps were taken, and no state is there: as SuperOffload writes files."""

    def change(tree: dict[str, Any]) -> None:
        base_of(tree)["param_groups"][0]["betas"] = (0.9, 0.95)
        base_of(tree)["state"].clear()

    edited(source, on_optimizer(change))
    with pytest.raises(errors.StateMismatchError, match="took steps"):
        ucp.convert(source, source.parent / "out", target=target())


def test_a_group_of_muon_with_states_of_another_optimizer(source: Path) -> None:
    edited(
        source, on_optimizer(lambda tree: base_of(tree)["param_groups"][0].update(use_muon=True))
    )
    (found,) = ucp.verify(source).findings
    assert "Muon" in found.what and found.parameter == "a"
    with pytest.raises(errors.DamagedFileError, match="Muon"):
        ucp.convert(source, source.parent / "out", target=target())


@pytest.mark.parametrize("bare", [True, False])
def test_what_offloading_leaves_behind(source: Path, bare: bool) -> None:
    def change(tree: dict[str, Any]) -> None:
        for entry in base_of(tree)["state"].values():
            for key in [key for key in entry if key != "step"]:
                held = entry[key] if bare else entry.pop(key)
                entry[f"{key}_offload_buffer"] = held.clone()

    edited(source, on_optimizer(change))
    if bare:
        assert ucp.verify(source, deep=True).findings == ()
    else:
        with pytest.raises(errors.UnsupportedError, match="offloaded"):
            ucp.verify(source)


def test_every_key_of_a_group_is_in_the_output(source: Path) -> None:
    """FusedAdam keeps its step in the group; names and marks are stock's."""
    marks = {"step": 7, "name": "mine", "moe": False, "param_names": ["a", "b"]}
    edited(source, on_optimizer(lambda tree: base_of(tree)["param_groups"][0].update(marks)))
    for number, zero in enumerate((1, 3)):
        out = source.parent / f"out{number}" / "step7"
        ucp.convert(source, out, target=Target(ucp.Mesh(dp=2, zero=zero)))
        tree = torch.load(next(out.glob("*rank_0_*optim*")), weights_only=False)[
            "optimizer_state_dict"
        ]
        group = (tree.get("base_optimizer_state") or tree["optimizer_state_dict"])["param_groups"][
            0
        ]
        assert {key: group[key] for key in marks} == marks


def test_a_healthy_checkpoint_with_copies_of_each_rank(source: Path, tmp_path: Path) -> None:
    """tp=2, and every rank has a value of its own: no damage, and equal to itself."""
    rules = tmp_path / "rules.toml"
    rules.write_text(RULES)
    (source / FILE_NAME).unlink()
    out = tmp_path / "out" / "step7"
    ucp.convert(source, out, target=Target(ucp.Mesh(tp=2, dp=1, zero=1)), rules=rules)
    assert ucp.verify(out, deep=True).findings == () and ucp.verify(out).findings == ()
    assert ucp.diff(out, out) == [] and ucp.diff(source, out, rules=rules) == []


def test_paths_that_are_none(tmp_path: Path, source: Path) -> None:
    for wrong in (None, 7):
        with pytest.raises(errors.UsageError, match="no path"):
            ucp.describe(wrong)  # type: ignore[arg-type]
    (source.parent / "latest").write_bytes(b"\xef\xbb\xbfstep7\n")  # as some editors write it
    assert ucp.describe(source.parent) == ucp.describe(source)
    with pytest.raises(errors.NotFoundError):
        ucp.describe(tmp_path / "nowhere")


@pytest.mark.parametrize("to", ["native", "universal", "torch_dist", "hf"])
def test_copies_of_stages_that_nobody_compares_are_noted(tmp_path: Path, to: str) -> None:
    """The first stage's is read; `verify --deep` looks at the others."""
    note = "replicas not compared: embedding.word_embeddings.weight"
    whole = paper.write(twins.model("gpt"), tmp_path / "whole" / "tag")
    staged = tmp_path / "staged" / "tag"
    assert note not in ucp.convert(whole, staged, mesh="pp=2,zero=1").notes
    for number, source in enumerate((whole, staged)):
        out = tmp_path / str(number)
        if to == "hf":
            found = ucp.export_hf(source, out).notes
        else:
            mesh = "dp=1,zero=1" if to == "native" else None
            found = ucp.convert(source, out, to=to, mesh=mesh).notes
        assert (note in found) is (source == staged)


def _without_base(tree: dict[str, Any]) -> None:
    del tree["base_optimizer_state"]


def _without_masters(tree: dict[str, Any]) -> None:
    tree["single_partition_of_fp32_groups"].clear()


def _without_states(tree: dict[str, Any]) -> None:
    del tree["optimizer_state_dict"]


def _of_another_kind(tree: dict[str, Any]) -> None:
    tree["base_optimizer_state"] = 5


@pytest.mark.parametrize(
    ("zero", "state", "change"),
    [
        (1, "exp_avg", _without_base),
        (1, "exp_avg", _of_another_kind),
        (1, MASTER, _without_masters),
        (3, "exp_avg", _without_states),
    ],
)
def test_the_file_of_one_rank_lacks_what_the_others_have(
    source: Path, zero: int, state: str, change: Callable[[dict[str, Any]], None]
) -> None:
    """Findings, and a named error for whoever reads it first."""
    out = source.parent.parent / "two" / "step7"
    ucp.convert(source, out, target=target(2, zero))
    last = next(out.glob("*zero_pp_rank_1_*optim_states.pt")).name
    edited(out, lambda name, tree: change(tree["optimizer_state_dict"]) if name == last else None)
    found = ucp.verify(out, deep=True).findings
    assert found and all(str(one.file).endswith(last) for one in found)
    with open_checkpoint(out) as checkpoint:
        checkpoint.where(Slot(0, (), 0, state))
        with pytest.raises(errors.DamagedFileError, match=last):
            checkpoint.where(Slot(0, (), 1, state))


def test_an_import_checks_every_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a conversion and an export do, before anything is written."""
    source = paper.write(twins.model("llama"), tmp_path / "source" / "step7")
    ucp.export_hf(source, tmp_path / "hf", max_shard_size=4000)
    seen, bad = list[str](), {path.name for path in (tmp_path / "hf").glob("*-00002-*")}

    def check(own: Any, name: str, *_: Any) -> None:
        seen.append(name)
        if name in bad:
            raise errors.DamagedFileError("planted", file=own.folder / name)

    monkeypatch.setattr(HuggingFaceCheckpoint, "check", check)
    with pytest.raises(errors.DamagedFileError, match="planted"):
        ucp.import_hf(tmp_path / "hf", tmp_path / "out", mesh="zero=1")
    assert not (tmp_path / "out").exists() and len(bad) == 1
    bad.clear()
    seen.clear()
    ucp.import_hf(tmp_path / "hf", tmp_path / "out", mesh="zero=1")
    files = {path.name for path in (tmp_path / "hf").glob("*.safetensors")}
    assert {*seen} == files and len(files) > 2
