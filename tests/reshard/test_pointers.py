"""Every verb follows the pointer that was written last, and says which other one it did not."""

import json
import os
import shutil
from pathlib import Path

import pytest

import megatron_ucp as ucp
from megatron_ucp.cli import main
from megatron_ucp.formats.registry import open_checkpoint
from tests.reshard import paper
from tests.reshard.plain import SHAPES, target

NOTE = "names iter_0000009; `latest` names step7"
MEGATRON_LATEST = "latest_checkpointed_iteration.txt"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """step7, and a tag that was written under Megatron's name after it."""
    folder = tmp_path / "run"
    model = paper.plain_model(SHAPES)
    paper.write(model, folder / "step7")
    paper.write(model, folder / "iter_0000009")
    (folder / "iter_0000009" / "newer").touch()
    (folder / "latest").write_text("step7")
    (folder / MEGATRON_LATEST).write_text("9")
    os.utime(folder / "latest", (1000, 1000))
    return folder


VERBS = {
    "inspect": ["inspect", "RUN"],
    "verify": ["verify", "RUN"],
    "verify deep": ["verify", "RUN", "--deep"],
    "plan": ["plan", "RUN", "--mesh", "dp=1"],
    "convert": ["convert", "RUN", "OUT", "--to", "universal"],
    "diff": ["diff", "RUN", "RUN"],
}


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_names_the_pointer_that_it_did_not_follow(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    places = {"RUN": str(run), "OUT": str(tmp_path / "out")}
    words = [places.get(word, word) for word in VERBS[verb]]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert NOTE in said, said
    tagged = [word if word != str(run) else str(run / "step7") for word in words]
    shutil.rmtree(tmp_path / "out", ignore_errors=True)
    assert main(tagged) == 0
    assert NOTE not in capsys.readouterr().out


def test_json_has_the_note(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for verb in ("inspect", "verify"):
        assert main([verb, str(run), "--json"]) == 0
        assert NOTE in json.loads(capsys.readouterr().out)["notes"][0]


def test_a_load_and_the_newest_whole_tag(run: Path) -> None:
    with open_checkpoint(run) as checkpoint:
        assert checkpoint.folder.name == "iter_0000009" and NOTE in checkpoint.notes[0]
    found = ucp.newest_whole(run)
    assert found.folder.name == "iter_0000009" and NOTE in found.passed_over[0]
    (run / "latest").write_text("step7")  # back by hand
    with open_checkpoint(run) as checkpoint:
        assert checkpoint.folder.name == "step7"
    assert ucp.newest_whole(run).folder.name == "step7"


def test_a_conversion_does_not_take_the_run_over(run: Path) -> None:
    (run / "latest").unlink()
    said = ucp.convert(run / "iter_0000009", run / "again", target=target()).pointer
    assert not (run / "latest").exists()
    assert "still names 9" in said and "with the tag again" in said
    with open_checkpoint(run) as checkpoint:
        assert checkpoint.folder.name == "iter_0000009"
    said = ucp.convert(run / "iter_0000009", run / "anew", target=target(), latest=True).pointer
    assert (run / "latest").read_text() == "anew" and "`latest`" in said
    assert "is followed" in said
    with open_checkpoint(run) as checkpoint:
        assert checkpoint.folder.name == "anew"
