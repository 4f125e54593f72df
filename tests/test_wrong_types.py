"""Arguments of wrong types: a UcpError that says what was expected and what to do, never an error
of Python from inside."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import megatron_ucp as ucp
from megatron_ucp.errors import NotFoundError, UcpError, UnsupportedError, UsageError

NOT_ATTACHED = SimpleNamespace(module=None, save_checkpoint=None, load_checkpoint=None)
WRONG: dict[str, Callable[[Any], object]] = {
    "attach": lambda _: ucp.attach(object()),
    "attach nothing": lambda _: ucp.attach(None),
    "load into nothing": lambda p: ucp.load(None, p),
    "load into a model": lambda p: ucp.load(object(), p),
    "load, allow": lambda p: ucp.load(object(), p, allow="narrow"),
    "load, hyper": lambda p: ucp.load(object(), p, hyper=3),
    "save": lambda p: ucp.save(object(), p),
    "attach_megatron": lambda _: ucp.attach_megatron(3, 4),
    "convert, target": lambda p: ucp.convert(p, p / "out", target=5),
    "convert, mesh": lambda p: ucp.convert(p, p / "out", mesh=5),
    "convert, both": lambda p: ucp.convert(p, p / "out", mesh="dp=2", target="dp=2"),
    "convert, config": lambda p: ucp.convert(p, p / "out", ds_config=5),
    "convert, allow": lambda p: ucp.convert(p, p / "out", allow="narrow"),
    "convert, to": lambda p: ucp.convert(p, p / "out", to=5),
    "convert, source": lambda p: ucp.convert(5, p / "out"),
    "convert, output": lambda p: ucp.convert(p, 5),
    "convert, tag": lambda p: ucp.convert(p, p / "out", tag=5),
    "export_hf": lambda p: ucp.export_hf(5, p / "out"),
    "export_hf, config": lambda p: ucp.export_hf(p, p / "out", config={}),
    "export_hf, allow": lambda p: ucp.export_hf(p, p / "out", allow="mean"),
    "export_hf, dtype": lambda p: ucp.export_hf(p, p / "out", dtype=5),
    "import_hf": lambda p: ucp.import_hf(5, p / "out", mesh="dp=2"),
    "import_hf, mesh": lambda p: ucp.import_hf(p, p / "out", mesh=5),
    "import_hf, allow": lambda p: ucp.import_hf(p, p / "out", mesh="dp=2", allow="narrow"),
    "verify": lambda _: ucp.verify(3),
    "convert, latest": lambda p: ucp.convert(p, p / "out", latest="no"),
    "convert, lists": lambda p: ucp.convert(p, p / "out", allow=[["a"]]),
    "load, checksums": lambda p: ucp.load(object(), p, checksums="no"),
    "load, lists": lambda p: ucp.load(object(), p, allow=[["a"]]),
    "export_hf, not attached": lambda p: ucp.export_hf(NOT_ATTACHED, p / "out"),
    "verify, tag": lambda p: ucp.verify(p, tag=3),
    "verify, rules": lambda p: ucp.verify(p, rules=3),
    "diff": lambda _: ucp.diff(None, None),
    "describe": lambda _: ucp.describe(3),
    "describe, tag": lambda p: ucp.describe(p, tag=3),
    "newest_whole": lambda _: ucp.newest_whole(3),
    "inspect": lambda _: ucp.inspect(3),
    "ls": lambda _: ucp.ls(3),
    "plan": lambda _: ucp.plan(3, "dp=2"),
    "plan, mesh": lambda p: ucp.plan(p, 3),
    "plan, no mesh": lambda p: ucp.plan(p),
    "fp32_state_dict": lambda _: ucp.fp32_state_dict(3),
    "report": lambda _: ucp.report(3),
    "register_family": lambda _: ucp.register_family(3),
    "register_optimizer": lambda _: ucp.register_optimizer(3, element=5),
    "register_optimizer, one name": lambda _: ucp.register_optimizer("a.Lion", element="exp_avg"),
    "register_optimizer, numbers": lambda _: ucp.register_optimizer("a.Lion", element=(5,)),
    "Mesh, text": lambda _: ucp.Mesh(tp="2"),
    "Mesh, bool": lambda _: ucp.Mesh(tp=True),
    "Mesh, zero": lambda _: ucp.Mesh(zero=True),
    "Mesh, order": lambda _: ucp.Mesh(order=[]),
    "Mesh.parse": lambda _: ucp.Mesh.parse(3),
    "Target": lambda _: ucp.Target(3),
    "Target, text": lambda _: ucp.Target("dp=x"),
    "Target, dtype": lambda _: ucp.Target(ucp.Mesh(), dtype=3),
    "Target, groups": lambda _: ucp.Target(ucp.Mesh(), groups=3),
    "Target, one group": lambda _: ucp.Target(ucp.Mesh(), groups=("a.weight",)),
    "Target, stages": lambda _: ucp.Target(ucp.Mesh(), stages=3.5),
    "Target, sub_group_size": lambda _: ucp.Target(ucp.Mesh(), sub_group_size="a"),
    "Target, optimizer": lambda _: ucp.Target(ucp.Mesh(), optimizer=3),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_type_is_said(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError) as caught:
        WRONG[name](tmp_path)
    assert caught.value.expected and caught.value.found and caught.value.what_to_do


@pytest.mark.parametrize("call", [ucp.convert, ucp.export_hf])
def test_a_word_is_not_taken_for_its_letters(tmp_path: Path, call: Any) -> None:
    with pytest.raises(UsageError) as caught:
        call(tmp_path, tmp_path / "out", allow="narrow")
    assert caught.value.found == "'narrow'"


def test_a_loader_without_a_sampler() -> None:
    with pytest.raises(UnsupportedError):
        ucp.ResumableLoader(3)


OF_FOLDERS: dict[str, Callable[[Path, Path], object]] = {
    "describe": lambda file, _: ucp.describe(file),
    "verify": lambda file, _: ucp.verify(file),
    "diff": lambda file, _: ucp.diff(file, file),
    "newest_whole": lambda file, _: ucp.newest_whole(file),
    "inspect": lambda file, _: ucp.inspect(file),
    "ls": lambda file, _: ucp.ls(file),
    "plan": lambda file, _: ucp.plan(file, "dp=2"),
    "fp32_state_dict": lambda file, _: ucp.fp32_state_dict(file),
    "convert": lambda file, out: ucp.convert(file, out),
    "export_hf": lambda file, out: ucp.export_hf(file, out),
    "import_hf": lambda file, out: ucp.import_hf(file, out, mesh="dp=1"),
}


@pytest.mark.parametrize("name", OF_FOLDERS)
def test_a_file_is_no_folder(tmp_path: Path, name: str) -> None:
    file = tmp_path / "latest"
    file.write_text("global_step1")
    with pytest.raises(NotFoundError, match="this is a file") as caught:
        OF_FOLDERS[name](file, tmp_path / "out")
    assert caught.value.id == "not-a-folder"
    assert str(tmp_path) in caught.value.what_to_do


@pytest.mark.parametrize("text", [None, "[1]", "{"])
def test_a_config_that_is_no_file(tmp_path: Path, text: str | None) -> None:
    """A DeepSpeed config may be given as a path."""
    path = tmp_path / "nope.json"
    if text is not None:
        path.write_text(text)
    says = r"DeepSpeed config|there is no such file|read as JSON"
    with pytest.raises(UcpError, match=says) as caught:
        ucp.convert(tmp_path, tmp_path / "out", ds_config=str(path))
    assert caught.value.what_to_do
