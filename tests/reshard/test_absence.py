"""What is missing is missed by every verb: see `absence` for the law and the table.

What lies in the repository, and what is converted from it. Saves of engines are in
`tests/engines/test_absence.py`.
"""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import megatron_ucp as ucp
from megatron_ucp.core.manifest import FILE_NAME
from megatron_ucp.errors import NotFoundError
from megatron_ucp.formats.checkpoint import CallerModel
from megatron_ucp.formats.deepspeed import native
from megatron_ucp.formats.deepspeed.run import NativeRun
from megatron_ucp.formats.deepspeed.universal import UniversalCheckpoint
from megatron_ucp.formats.registry import open_checkpoint
from tests.reshard import absence

GOLDEN = Path(__file__).parents[1] / "formats" / "golden"
DEEPSPEED = [
    *("zero0_fp32", "zero0_bf16", "zero1", "zero2", "zero3", "bf16_optimizer", "zero1_elastic"),
    *(
        "zero1_old",
        "zero2_old",
        "zero3_old",
        "attached_zero0_fp32",
        "attached_zero1",
        "attached_zero3",
    ),
]
OLDER = sorted(
    path.relative_to(GOLDEN).as_posix() for path in GOLDEN.glob("older/*/*") if path.is_dir()
)
MEGATRON = sorted(
    path.relative_to(GOLDEN).as_posix() for path in GOLDEN.glob("megatron*/*") if path.is_dir()
)
QUICK = {"megatron/legacy_tp2pp2", "megatron/td_dpr_dp2_bf16"}


def save_of(case: str, scratch: Path) -> absence.Save:
    """A save of the repository."""
    source, told = GOLDEN / case, CallerModel()
    inner = next(
        (path for kind in ("iter_*", "global_step*") for path in source.glob(kind)), source
    )
    copy = scratch / "copied" / inner.name
    shutil.copytree(inner, copy)
    if case.startswith("attached"):
        told = absence.told_of(copy)
    return absence.Save(absence.linked(copy, scratch / "run", inner.name), inner.name, told)


def is_unnamed(case: str, fault: str) -> bool:
    """Whether it is about states of stage 0 that lost their names with the manifest: the weights
    are left then, and an engine refuses the rest by name (see `engines/test_positions`)."""
    return case in ("attached_zero0_fp32", "stage 0") and fault.startswith(f"file {FILE_NAME}:")


def slow_but(cases: list[str], quick: set[str]) -> list[object]:
    return [case if case in quick else pytest.param(case, marks=pytest.mark.slow) for case in cases]


@pytest.mark.parametrize(
    "case",
    [
        *DEEPSPEED,
        *slow_but(
            OLDER, {"older/0.14.5/zero3", "older/0.17.6/zero1", "older/0.19.4/ulysses_zero3"}
        ),
        *slow_but(MEGATRON, QUICK),
    ],
)
def test_what_is_missing_is_missed_by_every_verb(case: str, tmp_path: Path) -> None:
    table = absence.Table(save_of(case, tmp_path), tmp_path)
    assert [fault for fault in table.wrong() if not is_unnamed(case, fault)] == []
    assert table.cases >= len({*table.save.folder.rglob("*")}) > 0
    # of DeepSpeed's and Megatron's own files every one is needed, but for the module that stages of
    # Megatron-DeepSpeed share: nothing else says its place, and its values are the masters'
    shared = {"file layer_01-model_00-model_states.pt", "all of layer 1"}
    if case.startswith("megatron_deepspeed/"):
        table.spare = [one for one in table.spare if one not in shared]
    assert {re.sub(r"\d+", "N", one) for one in table.spare} <= {"file ucp_manifest.json"}


def universal(scratch: Path) -> Path:
    return Path(
        ucp.convert(GOLDEN / "attached_zero1", scratch / "made" / "s1", to="universal").path
    )


def to_torch_dist(scratch: Path) -> Path:
    source = GOLDEN / "megatron" / "td_full_tp2dp2"
    return Path(ucp.convert(source, scratch / "made" / "s1", to="torch_dist").path)


def to_native(mesh: str, source: str = "attached_zero1") -> Callable[[Path], Path]:
    def made(scratch: Path) -> Path:
        out = scratch / "made" / "s1"
        return Path(ucp.convert(GOLDEN / source, out, to="native", mesh=mesh).path)

    return made


CONVERTED: dict[str, Callable[[Path], Path]] = {
    "universal": universal,
    "torch_dist": to_torch_dist,
    "ZeRO-3 on three ranks": to_native("dp=3,zero=3"),
    "ZeRO-2 on three ranks": to_native("dp=3,zero=2"),
    "stage 0": to_native("dp=2,zero=0"),
    "a pipeline with tensor parallelism": to_native("tp=2,pp=2,zero=1", "megatron/td_full_tp2dp2"),
    "experts": to_native("dp=2,ep=2,zero=1", "megatron/rng_moe_ep2"),
}


BOTH_QUICK = {"universal", "ZeRO-3 on three ranks", "stage 0"}


@pytest.mark.parametrize(
    ("kind", "plain"),
    [
        pytest.param(kind, plain, marks=[] if plain or kind in BOTH_QUICK else pytest.mark.slow)
        for kind in CONVERTED
        for plain in (True, False)
    ],
)
def test_a_conversion_of_which_something_is_missing(kind: str, plain: bool, tmp_path: Path) -> None:
    made = CONVERTED[kind](tmp_path)
    told = absence.told_of(made)
    if plain:
        absence.plain_of(made)
    table = absence.Table(
        absence.Save(absence.linked(made, tmp_path / "run", "s1"), "s1", told), tmp_path
    )
    assert [fault for fault in table.wrong() if not is_unnamed(kind, fault)] == []
    assert table.cases > 0


def hugging_face(scratch: Path) -> Path:
    """Two shards, as save_pretrained writes them."""
    folder = scratch / "hf"
    folder.mkdir()
    shards = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    listed: dict[str, str] = {}
    for number, file in enumerate(shards):
        names = [f"layers.{number}.weight", f"layers.{number}.bias"]
        save_file({name: torch.randn(3, 2) for name in names}, folder / file)
        listed |= dict.fromkeys(names, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": listed}))
    (folder / "config.json").write_text(json.dumps({"model_type": "own"}))
    (folder / "README.md").write_text("a model")
    return folder


def test_a_hugging_face_folder_of_which_something_is_missing(tmp_path: Path) -> None:
    save = absence.Save(absence.linked(hugging_face(tmp_path), tmp_path / "run", "hf"), "hf")
    table = absence.Table(save, tmp_path)
    assert table.wrong() == []
    assert {"file config.json", "file README.md"} <= {*table.spare}  # of which no weight depends
    assert not any(".safetensors" in one and "index" not in one for one in table.spare)


# ---- the words


@pytest.mark.parametrize("case", ["zero1", "zero2", "zero3", "zero3_old", "bf16_optimizer"])
def test_every_verb_says_how_many_optimizer_files_are_missing(case: str, tmp_path: Path) -> None:
    """As a save of stock's that was killed leaves them: model files alone."""
    save = save_of(case, tmp_path)
    for path in save.folder.glob("*optim_states.pt"):
        path.unlink()
    for name, ask in absence.VERBS.items():
        said = absence.answer(ask, save, save.run)
        assert "2 optimizer files are missing" in said, (name, said)
    said = absence.answer(absence.VERBS["verify"], save, save.run)
    assert "zero_pp_rank_0_mp_rank_00_optim_states.pt" in said
    assert ('allow={"weights"}' in absence.answer(absence.VERBS["describe"], save, save.run)) == (
        "3" not in case
    )


def test_the_tag_before_is_the_newest_whole_one(tmp_path: Path) -> None:
    whole, killed = GOLDEN / "zero3", tmp_path / "run" / "s1"
    shutil.copytree(whole, tmp_path / "run" / "s0")
    shutil.copytree(whole, killed)
    (tmp_path / "run" / "latest").write_text("s1")
    assert ucp.newest_whole(tmp_path / "run").folder == killed
    for path in killed.glob("*optim_states.pt"):
        path.unlink()
    found = ucp.newest_whole(tmp_path / "run")
    assert found.folder.name == "s0"
    assert "s1: 2 optimizer files are missing" in "; ".join(found.passed_over)
    assert {one.tag: one.whole for one in ucp.ls(tmp_path / "run").tags} == {
        "s0": True,
        "s1": False,
    }


@pytest.mark.parametrize(("case", "weights"), [("zero1", True), ("zero2", True), ("zero3", False)])
def test_weights_alone_are_exported_where_that_is_allowed(
    case: str, weights: bool, tmp_path: Path
) -> None:
    """Of ZeRO-1 and ZeRO-2 bit for bit those of the whole save; at ZeRO-3 there are none."""
    save = save_of(case, tmp_path)
    ucp.export_hf(save.folder, tmp_path / "whole")
    for path in save.folder.glob("*optim_states.pt"):
        path.unlink()
    out = tmp_path / "alone"
    if not weights:
        with pytest.raises(ucp.UcpError, match="at ZeRO-3 the weights lie in the optimizer's"):
            ucp.export_hf(save.folder, out, allow={"weights"})
        assert not out.exists()
        return
    found = ucp.export_hf(save.folder, out, allow={"weights"})
    assert any("weights alone" in note for note in found.notes)
    files = [folder / "model.safetensors" for folder in (tmp_path / "whole", out)]
    one, other = map(load_file, files)
    assert one.keys() == other.keys() and len(one) > 8
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def test_a_manifest_that_is_missing_is_a_note_of_every_verb(tmp_path: Path) -> None:
    """The rest is what the program alone would have written, and goes on as that."""
    save = save_of("attached_zero1", tmp_path)
    assert ucp.verify(save.folder).notes == ()
    (save.folder / "ucp_manifest.json").unlink()
    for notes in (ucp.verify(save.folder).notes, ucp.inspect(save.folder).notes):
        assert [one for one in notes if "ucp_manifest.json is missing" in one]
    with open_checkpoint(save.folder) as read:
        assert any("ucp_manifest.json is missing" in one for one in read.notes)
    absence.plain_of(save.folder)
    assert ucp.verify(save.folder).notes == ()


def test_a_pointer_that_is_missing_leaves_the_tag_whole(tmp_path: Path) -> None:
    save = save_of("zero1", tmp_path)
    (save.run / "latest").unlink()
    asked = [ucp.verify, ucp.inspect, ucp.describe, ucp.fingerprint, ucp.fp32_state_dict]
    for ask in (*asked, lambda run: ucp.export_hf(run, tmp_path / "out")):
        with pytest.raises(NotFoundError, match="tags: zero1"):
            ask(save.run)
    assert ucp.ls(save.run).tags[0].whole and ucp.newest_whole(save.run).folder == save.folder
    assert not (tmp_path / "out").exists()


# ---- negative controls


def test_a_verb_that_does_not_look_breaks_the_law(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the optimizer files are was asked of the folder alone, and of a model file nothing."""
    table = absence.Table(save_of("zero3", tmp_path), tmp_path)
    monkeypatch.setattr(native, "require_rank_files", lambda _: None)
    lies_there = property(lambda run: bool(run.names.optimizer))
    monkeypatch.setattr(NativeRun, "has_optimizer_files", lies_there)
    monkeypatch.setattr(native, "require_layer_files", lambda _: None)
    found = table.wrong(lambda one: one.startswith("all") and "optim" in one)
    for verb in ("verify", "verify --deep", "ls", "newest_whole", "inspect"):
        assert any(f"{verb} is content" in one for one in found), verb


def test_a_universal_folder_that_asks_nobody_breaks_the_law(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first moments were lost in silence: what a parameter has was asked of its folder."""
    made = absence.plain_of(universal(tmp_path))
    table = absence.Table(
        absence.Save(absence.linked(made, tmp_path / "run", "s1"), "s1"), tmp_path
    )
    monkeypatch.setattr(UniversalCheckpoint, "_require_states", lambda _: None)
    found = table.wrong(lambda one: one == "all named exp_avg.pt")
    assert any("convert is content" in one for one in found)


def test_one_lying_verb_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = absence.Table(save_of("zero1", tmp_path), tmp_path)
    assert table.wrong() == []
    monkeypatch.setitem(absence.VERBS, "ls", lambda save, run: None)
    found = table.wrong()
    assert len(found) == table.cases > 2 and all("ls is content" in one for one in found)
    monkeypatch.setitem(absence.VERBS, "ls", lambda save, run: 1 / 0)
    assert all("ZeroDivisionError" in one for one in table.wrong())


def test_what_is_removed_is_every_file_and_every_class(tmp_path: Path) -> None:
    names = [
        *("mp_rank_00_model_states.pt", "mp_rank_01_model_states.pt"),
        *("zero_pp_rank_0_mp_rank_00_optim_states.pt", "zero_pp_rank_1_mp_rank_00_optim_states.pt"),
        *("zero_pp_rank_0_mp_rank_01_optim_states.pt", "zero_pp_rank_1_mp_rank_01_optim_states.pt"),
        *("layer_00-model_00-model_states.pt", "layer_00-model_01-model_states.pt"),
        *("layer_0_expert_1_mp_rank_00_model_states.pt", "expp_rank_1_mp_rank_00_optim_states.pt"),
    ]
    for name in names:
        (tmp_path / name).touch()
    found = [frozenset(listed) for listed in absence.removals(tmp_path).values()]
    assert {frozenset({name}) for name in names} < {*found} and len(found) == len({*found})
    for words in (
        ("optim_states",),
        ("model_states",),
        ("zero_pp_rank", "optim_states"),
        ("layer_00-",),
        ("_expert_",),
        ("expp_rank",),
        ("zero_pp_rank_1_",),
        ("mp_rank_01_",),
    ):
        assert frozenset(n for n in names if all(word in n for word in words)) in found, words
