"""Every verb refuses pointers that disagree, and names the tags; of two saves of one run it follows
the later one, and says so."""

import json
import shutil
from pathlib import Path

import pytest

import megatron_ucp as ucp
from megatron_ucp.cli import main
from megatron_ucp.core.manifest import FILE_NAME, RUN
from megatron_ucp.errors import NotFoundError
from megatron_ucp.formats.registry import open_checkpoint
from tests.reshard import paper
from tests.reshard.plain import SHAPES, target

NOTE = "names iter_0000009, the later save; `latest` names step7"
MEGATRON_LATEST = "latest_checkpointed_iteration.txt"


def pointed(folder: Path) -> Path:
    (folder / "latest").write_text("step7")
    (folder / MEGATRON_LATEST).write_text("9")
    return folder


@pytest.fixture
def stock(tmp_path: Path) -> Path:
    """Two tags without manifests, and a pointer to each."""
    folder, model = tmp_path / "run", paper.plain_model(SHAPES)
    paper.write(model, folder / "step7")
    paper.write(model, folder / "iter_0000009")
    return pointed(folder)


@pytest.fixture
def run(stock: Path, tmp_path: Path) -> Path:
    """The same as saves of one run, of which step7 is the earlier one."""
    folder = tmp_path / "ours"
    for number, tag in enumerate(("step7", "iter_0000009")):
        ucp.convert(stock / tag, folder / tag, target=target())
        data = json.loads((folder / tag / FILE_NAME).read_text())
        data["run"] |= {RUN: "one", "saved_at": 100.0 + number}
        (folder / tag / FILE_NAME).write_text(json.dumps(data))
    return pointed(folder)


VERBS = {
    "inspect": ["inspect", "RUN"],
    "verify": ["verify", "RUN"],
    "verify deep": ["verify", "RUN", "--deep"],
    "plan": ["plan", "RUN", "--mesh", "dp=1"],
    "convert": ["convert", "RUN", "OUT", "--to", "universal"],
    "diff": ["diff", "RUN", "RUN"],
}


def words_of(verb: str, folder: Path, tmp_path: Path) -> list[str]:
    places = {"RUN": str(folder), "OUT": str(tmp_path / "out")}
    return [places.get(word, word) for word in VERBS[verb]]


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_names_the_pointer_that_it_did_not_follow(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    assert main(words_of(verb, run, tmp_path)) == 0
    said = capsys.readouterr().out
    assert NOTE in said, said
    shutil.rmtree(tmp_path / "out", ignore_errors=True)
    assert main(words_of(verb, run / "step7", tmp_path)) == 0
    assert NOTE not in capsys.readouterr().out


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_refuses_pointers_of_which_nothing_says_which_counts(
    stock: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    assert main(words_of(verb, stock, tmp_path)) == 2
    said = capsys.readouterr().err
    assert "step7" in said and "iter_0000009" in said and "--tag" in said
    assert main(words_of(verb, stock / "step7", tmp_path)) == 0


def test_json_has_the_note(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for verb in ("inspect", "verify"):
        assert main([verb, str(run), "--json"]) == 0
        assert NOTE in json.loads(capsys.readouterr().out)["notes"][0]


def test_a_load_and_the_newest_whole_tag(run: Path, stock: Path) -> None:
    with open_checkpoint(run) as checkpoint:
        assert str(checkpoint.folder).endswith("iter_0000009") and NOTE in checkpoint.notes[0]
    found = ucp.newest_whole(run)
    assert found.folder.name == "iter_0000009" and NOTE in found.passed_over[0]
    assert "step7" in str(ucp.ls(run)) and NOTE in ucp.ls(run).notes[0]
    with pytest.raises(NotFoundError, match="name different tags"):
        open_checkpoint(stock)
    assert ucp.newest_whole(stock).passed_over[0].startswith("the pointers of this folder")
    assert len(ucp.ls(stock).tags) == 2


def test_a_conversion_does_not_take_the_run_over(stock: Path) -> None:
    (stock / "latest").unlink()
    said = ucp.convert(stock / "iter_0000009", stock / "again", target=target()).pointer
    assert not (stock / "latest").exists()
    assert "still names 9" in said and "with the tag again" in said
    with open_checkpoint(stock) as checkpoint:
        assert str(checkpoint.folder).endswith("iter_0000009")
    said = ucp.convert(stock / "iter_0000009", stock / "anew", target=target(), latest=True).pointer
    assert (stock / "latest").read_text() == "anew" and "`latest`" in said
    assert "still names iter_0000009" in said
    with pytest.raises(NotFoundError, match="name different tags"):
        open_checkpoint(stock)
