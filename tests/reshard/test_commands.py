"""The command line as a newcomer types it: help, wrong words, JSON, and that nothing wrong ends
with exit code 0."""

import json
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import megatron_ucp as ucp
from megatron_ucp.cli import COMMANDS, main
from megatron_ucp.core.manifest import FILE_NAME
from megatron_ucp.formats.pt.file import PtFile
from tests.reshard import paper, twins
from tests.reshard.plain import SHAPES, edited, target

CONFIG = {"model_type": "own", "architectures": ["Own"]}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Two ranks at ZeRO stage 3, of a model without a family."""
    first = paper.write(paper.plain_model(SHAPES), tmp_path / "first" / "step7")
    ucp.convert(first, tmp_path / "run" / "global_step7", target=target(2, 3), latest=True)
    return tmp_path / "run"


@pytest.fixture
def stock(source: Path) -> Path:
    """The same without a manifest, as plain DeepSpeed writes it."""
    edited(source / "global_step7", lambda name, tree: None)
    return source


def said(capsys: pytest.CaptureFixture[str], *words: object, code: int = 0) -> str:
    assert main([str(word) for word in words]) == code, capsys.readouterr()
    out, err = capsys.readouterr()
    return out + err


def tree(capsys: pytest.CaptureFixture[str], *words: object, code: int = 0) -> dict[str, Any]:
    found = json.loads(said(capsys, *words, code=code))
    assert found["schema_version"] == 1 and found["exit_code"] == code
    return found


# ------------------------------------------------ words


def test_help_says_what_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    bare = said(capsys)
    assert all(f"\n    {name} " in bare for name in COMMANDS) and "exit code: 0 done; 1" in bare
    for words, has in ((["--version"], f"megatron-ucp {ucp.__version__}"), (["--help"], bare)):
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert ended.value.code == 0 and has in capsys.readouterr().out


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_has_an_example_and_exit_codes(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if command == "run":
        return  # which prints the runner's own help: test_trainers
    with pytest.raises(SystemExit):
        main([command, "--help"])
    text = capsys.readouterr().out
    assert f"\nexample:\n  megatron-ucp {command}" in text and "exit code: 0 done" in text


@pytest.mark.parametrize(
    ("words", "near"),
    [
        (["inspekt", "x"], "did you mean inspect?"),
        (["export_fh", "x"], "did you mean export-hf?"),
        (["plan", "x", "--mash", "dp=2"], "did you mean --mesh?"),
        (["rules", "x"], "plan CHECKPOINT --mesh MESH --rules FILE"),
        (["plan", "x", "--simulate"], "leave --simulate out"),
        (["plan", "x", "--rates=storage=2GB/s"], "leave --rates out"),
        (["export-hf", "x", "y", "--merge"], "merge it by peft"),
        (["convert", "x", "y", "--to", "torch-dist"], "did you mean torch_dist?"),
        (["convert", "x", "y", "--to", "torch"], "did you mean torch_dist or torchtitan?"),
        (["convert", "x", "y", "--to", "fsdp"], "FSDP2 loads dcp, accelerate and torchtitan"),
        (["inspect", "~/nope"], "a ~ in quotes stays as it is"),
        (["import-hf", "nope", "y"], "there is no such checkpoint folder"),
        (["plan", "{source}", "--mesh", "dp=2", "--optimizer", "SGDD"], "did you mean torch.SGD?"),
        (["export-hf", "x", "y", "--dtype", "bf61"], "see `megatron-ucp export-hf --help`"),
        (["plan", "{source}", "--mesh", "DP=2"], "did you mean dp=...?"),
        (["plan", "{source}", "--mesh", "6"], "write NAME=SIZE"),
        (["plan", "{source}", "--mesh", "dp=-1"], "give dp a whole number"),
        (["convert", "{source}", "{out}", "--mesh", "dp=2", "--optimizer", "AdamW"], "torch.AdamW"),
        (["convert", "{source}", "{out}", "--mesh", "dp=2", "--config", "x"], "--ds-config"),
    ],
)
def test_a_wrong_word_names_the_nearest(
    words: list[str], near: str, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [word.format(source=source, out=tmp_path / "out") for word in words]
    assert near in said(capsys, *words, code=2)


def test_json_stands_before_or_after_the_command(
    source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    after, before = (
        tree(capsys, *words)
        for words in (["inspect", source, "--json"], ["--json", "inspect", source])
    )
    assert after == before and after["mesh"]["dp"] == 2 and after["mesh"]["zero"] == 3
    assert {tuple(row["shape"]) for row in after["table"]} == {*SHAPES.values()}
    error = tree(capsys, "inspect", source / "nope", "--json", code=2)
    assert error["error"] == "NotFoundError" and error["what_to_do"] and error["file"]
    found = tree(capsys, "diff", source, source, "--json")
    assert found["equal"] is True and found["differences"] == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "tcsh"])
def test_completions_of_a_shell(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--print-completion", shell])
    text = capsys.readouterr().out
    assert ended.value.code == 0 and "export-hf" in text and "ds-config" in text
    if shell == "bash":
        assert subprocess.run(["bash", "-n"], input=text, text=True, timeout=20).returncode == 0


def test_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "doctor")
    assert "torch " in text and torch.__version__ in text and "all right" in text
    rows = tree(capsys, "doctor", "--json")["rows"]
    assert {row["name"] for row in rows} >= {"python", "deepspeed", "megatron-core", "peft"}


# ------------------------------------------------ looking


def test_inspect_says_what_people_ask(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few = said(capsys, "inspect", source)
    assert [line.split()[0] for line in few.splitlines()] == [
        *("checkpoint", "model", "step", "mesh", "optimizer", "tensors", "saved", "size")
    ]
    assert "tp=1,pp=1,dp=2,zero=3 (2 ranks)" in few and "master weights" in few
    every = said(capsys, "inspect", source, "--all")
    assert every.startswith(few) and "group 0" in every and "5x4" in every
    assert all(len(line) <= 100 for line in every.split("\nname")[0].splitlines()[8:])


def test_ls_says_which_tags_are_whole(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(source / "global_step7", source / "cut")
    file = next((source / "cut").glob("*optim_states.pt"))
    file.write_bytes(file.read_bytes()[:-9])
    (source / ".global_step9.saving").mkdir()
    tags = {one["tag"]: one for one in tree(capsys, "ls", source, "--json")["tags"]}
    assert {*tags} == {"global_step7", "cut"}
    assert tags["global_step7"]["whole"] and tags["global_step7"]["pointer"] == "latest"
    assert not tags["cut"]["whole"] and file.name in tags["cut"]["wrong"]
    assert tags["global_step7"]["mesh"]["zero"] == 3 and tags["global_step7"]["step"] == 7
    text = said(capsys, "ls", source)
    assert "whole, latest" in text and "global_step9.saving: a save that was not finished" in text
    assert "holds no checkpoint" in said(capsys, "ls", source.parent / "first" / "..", code=2)
    assert [one.tag for one in ucp.ls(source / "global_step7").tags] == ["global_step7"]


def test_verify_lists_every_damaged_file(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = sorted((source / "global_step7").glob("*.pt"))
    assert len(files) == 4
    for path in files[:3]:
        path.write_bytes(path.read_bytes()[:-30])
    files[3].unlink()
    found = tree(capsys, "verify", source, "--json", code=1)
    assert not found["ok"] and [one["file"] for one in found["findings"]] == [*map(str, files)]
    assert "4 faults found in 4 files" in said(capsys, "verify", source, code=1)


def test_a_truncated_file_hides_no_flipped_bit(
    source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = sorted((source / "global_step7").glob("*optim_states.pt"))
    with PtFile(files[0]) as file:
        tensors = [one for one in file.records.values() if "/data/" in one.name]
        record = max(tensors, key=lambda one: one.size_bytes)
    data = bytearray(files[0].read_bytes())
    data[record.offset_bytes + 1] ^= 1
    files[0].write_bytes(data)
    files[1].write_bytes(files[1].read_bytes()[:-30])
    found = tree(capsys, "verify", source, "--deep", "--json", code=1)
    by_file = {one["file"]: one["what"] for one in found["findings"]}
    assert [*by_file] == [str(path) for path in files] and len(found["findings"]) == 2
    assert by_file[str(files[0])] == "a record has a wrong checksum" and found["read_bytes"] > 0


# ------------------------------------------------ one rule for meshes


@pytest.mark.parametrize("mesh", ["dp=3", ucp.Mesh(dp=3), ucp.Target(ucp.Mesh(dp=3))])
def test_a_stage_that_nobody_names_is_the_source_s(
    mesh: Any, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ucp.plan(source, mesh).mesh == "tp=1,pp=1,dp=3,zero=3"
    done = ucp.convert(source, tmp_path / "a", target=mesh)
    assert done.mesh == "tp=1,pp=1,dp=3,zero=3" == str(ucp.describe(tmp_path / "a").mesh)
    assert "-> tp=1,pp=1,dp=3,zero=3;" in capsys.readouterr().err
    ucp.convert(source, tmp_path / "b", target=ucp.Mesh(dp=3, zero=0))
    assert ucp.describe(tmp_path / "b").mesh.zero == 0


def test_the_mesh_that_is_used_is_printed(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "to  tp=1,pp=1,dp=3,zero=3" in said(capsys, "plan", source, "--mesh", "dp=3")
    text = said(capsys, "convert", source, tmp_path / "a", "--mesh", "dp=3,zero=1")
    assert "tp=1,pp=1,dp=2,zero=3 -> tp=1,pp=1,dp=3,zero=1; " in text


@pytest.mark.parametrize(
    "words",
    [
        ["--to", "torch_dist", "--optimizer", "torch.AdamW"],
        ["--to", "torch_dist", "--stages", "layers"],
        ["--to", "torch_dist", "--sub-group-size", "100"],
        ["--to", "torch_dist", "--groups", "{groups}"],
        ["--to", "universal", "--stages", "layers"],
        ["--to", "universal", "--sub-group-size", "100"],
        ["--mesh", "dp=2,zero=1", "--stages", "layers"],
        ["--mesh", "dp=2,zero=1", "--sub-group-size", "100"],
        ["--mesh", "dp=2", "--stages", "layers"],
        *(["--to", to, "--mesh", "dp=2"] for to in ("dcp", "accelerate", "torchtitan")),
    ],
)
def test_what_is_not_used_is_refused(
    words: list[str], source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "groups.json").write_text(json.dumps([[*SHAPES]]))
    words = [word.format(groups=tmp_path / "groups.json") for word in words]
    text = said(capsys, "convert", source, tmp_path / "out", *words, code=2)
    assert f"leave {words[2]} out" in text or f"leave out {words[2]}" in text
    assert not (tmp_path / "out").exists()


def test_an_import_asks_for_its_mesh(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "give --mesh" in said(capsys, "import-hf", tmp_path, tmp_path / "out", code=2)
    with pytest.raises(ucp.UsageError, match="are for one mesh"):
        ucp.import_hf("hf", tmp_path / "out")


# ------------------------------------------------ exports that can be loaded


@pytest.mark.parametrize("where", ["beside the tag", "in the tag", "a folder", "a file"])
def test_an_export_finds_the_config(
    where: str, stock: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a Trainer leaves it, or where --config says."""
    place = stock / "global_step7" if where == "in the tag" else stock
    place = tmp_path / "model" if where.startswith("a f") else place
    place.mkdir(exist_ok=True)
    (place / "config.json").write_text(json.dumps(CONFIG))
    named = {"a folder": ["--config", place], "a file": ["--config", place / "config.json"]}
    words = ["export-hf", stock, tmp_path / "hf", *named.get(where, []), "--json"]
    found = tree(capsys, *words)
    assert found["loadable"] is True
    written = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert written["architectures"] == ["Own"]
    assert any("was found in" in note for note in found["notes"]) == (where not in named)


def test_an_export_without_a_config_is_no_success(
    stock: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The weights are there, and the next try with --force makes the folder whole."""
    words = ["export-hf", stock, tmp_path / "hf"]
    text = said(capsys, *words, code=1)
    assert "NO LIBRARY LOADS IT YET" in text.splitlines()[-1] and "--config" in text
    assert "exists" in said(capsys, *words, code=2)
    (stock / "config.json").write_text(json.dumps({"width": 3}))  # of another program
    assert tree(capsys, *words, "--force", "--json", code=1)["loadable"] is False
    (stock / "config.json").write_text(json.dumps(CONFIG))
    assert tree(capsys, *words, "--force", "--json")["loadable"] is True
    assert (tmp_path / "hf" / "config.json").is_file()


def test_force_replaces_what_an_export_wrote_alone(
    stock: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (stock / "config.json").write_text(json.dumps(CONFIG))
    words, out = ["export-hf", stock, tmp_path / "hf", "--force"], tmp_path / "hf"
    said(capsys, *words)
    (out / "mine.txt").write_text("mine")
    assert "mine.txt" in said(capsys, *words, code=2) and (out / "mine.txt").exists()
    (out / "mine.txt").unlink()
    said(capsys, *words)
    with (out / "model.safetensors").open("ab") as file:
        file.write(b"more")
    assert "model.safetensors" in said(capsys, *words, code=2)
    assert "--force" in said(capsys, "export-hf", stock, out, code=2)
    (tmp_path / "other").mkdir()
    assert said(capsys, "export-hf", stock, tmp_path / "other", "--force", code=2)


def test_the_family_follows_from_the_config(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Names of megatron-core, and nothing that says the family but config.json."""
    model = twins.model("llama")
    ucp.export_hf(paper.write(model, tmp_path / "known" / "step7"), tmp_path / "whole")
    bare = paper.write(replace(model, family="", run={}), tmp_path / "bare" / "step7")
    edited(bare, lambda name, tree: None)
    capsys.readouterr()
    text = said(capsys, "export-hf", bare, tmp_path / "no", code=2)
    assert "--config" in text and not (tmp_path / "no").exists()
    said(capsys, "export-hf", bare, tmp_path / "hf", "--config", tmp_path / "whole")
    assert ucp.diff(tmp_path / "hf", tmp_path / "whole") == []


def test_dtypes_as_people_write_them(stock: Path, tmp_path: Path) -> None:
    (stock / "config.json").write_text(json.dumps(CONFIG))
    for at, dtype in enumerate(("bf16", "bfloat16", torch.bfloat16, "torch.bfloat16")):
        assert ucp.export_hf(stock, tmp_path / str(at), dtype=dtype).dtype == "bfloat16"
    with pytest.raises(ucp.UsageError, match="no such dtype"):
        ucp.export_hf(stock, tmp_path / "x", dtype="int8")


def test_fp32_tensors_are_the_master_weights(source: Path) -> None:
    model = paper.plain_model(SHAPES)
    found = ucp.fp32_state_dict(source)
    assert {name: tuple(one.shape) for name, one in found.items()} == SHAPES
    for name, one in found.items():
        assert one.dtype == torch.float32 and torch.equal(
            one.reshape(-1), model.truth(name).reshape(-1)
        )
    first, _ = next(iter(ucp.fp32_tensors(source)))
    assert first in SHAPES
    with pytest.raises(ucp.NotFoundError):
        next(iter(ucp.fp32_tensors(source / "nope")))


def test_a_conversion_ends_with_its_line(
    source: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ucp.convert(source, tmp_path / "a", mesh="dp=1")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"megatron_ucp: wrote {tmp_path / 'a'}: tp=1,pp=1,dp=2,zero=3 -> ")
    assert "every byte read was checked" in line and line.endswith("no notes")
    text = said(capsys, "convert", source, tmp_path / "b", "--mesh", "dp=1")
    assert "megatron_ucp:" not in text and text.count("wrote ") == 1


def test_a_pointer_needs_to_be_asked_for(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What follows the folder above goes on finding the run."""
    before = (source / "latest").read_text()
    text = said(capsys, "convert", source, source / "copy", "--mesh", "dp=1")
    assert "`latest` still names global_step7" in text and "with the tag copy" in text
    assert (source / "latest").read_text() == before
    said(capsys, "convert", source, source / "other", "--mesh", "dp=1", "--latest")
    assert (source / "latest").read_text() == "other"
    assert (source / "global_step7" / FILE_NAME).exists()
