"""A third engine and a format of its own, written on the package's protocols alone: no module of
the package changes for them."""

from pathlib import Path

from tests.engines import toy_jobs
from tests.ranks import ROOT, RankPool


def test_a_third_engine_does_all_that_the_others_do(ranks: RankPool, tmp_path: Path) -> None:
    (found,) = ranks.run(1, toy_jobs.journeys, str(tmp_path))
    assert found.pop("own") == (True, 2, {"epoch": 3})
    assert found.pop("verified") == [] and found.pop("goes on") == []
    assert "toy_states.safetensors" in found.pop("files")
    assert found.pop("notes") == ()
    assert found == {"into DeepSpeed": True, "held, into DeepSpeed": True, "back": True}


def test_its_files_are_compared_with_what_was_saved(ranks: RankPool, tmp_path: Path) -> None:
    (found,) = ranks.run(1, toy_jobs.journeys, str(tmp_path), plant=True)
    assert found["refused"].startswith("ForeignFileError"), found


def test_they_are_as_small_as_the_pages_say() -> None:
    lines = {
        name: len((ROOT / "tests" / name).read_text().splitlines())
        for name in ("engines/toy.py", "formats/toy_format.py")
    }
    assert lines["engines/toy.py"] <= 270 and lines["formats/toy_format.py"] <= 125
