"""Which texts are paths of the disk, which are URLs, and which are refused. No store is asked."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import megatron_ucp as ucp
from megatron_ucp.cli import main
from megatron_ucp.errors import UsageError
from megatron_ucp.formats.store import absolute, is_url, location

GOLDEN = Path(__file__).parent / "golden" / "dcp" / "plain"


@pytest.mark.parametrize("text", ["s3://b/run", "S3://b/run", "s3:/b/run"])
def test_the_case_of_a_scheme_does_not_matter(text: str) -> None:
    assert is_url(text) and location(text) == absolute(text) == location("s3://b/run")
    assert str(location(text)) == "s3://b/run"


def test_gcs_is_gs() -> None:
    assert str(location("GCS://b/Run")) == "gs://b/Run" and location("gcs://b").bucket == "gs://b"  # type: ignore[union-attr]


def test_a_file_url_is_a_path(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "a b"):
        for text in (path.as_uri(), path.as_uri().replace("file", "FILE", 1), Path(path.as_uri())):
            assert location(text) == absolute(text) == path and not is_url(text)
    assert ucp.verify(GOLDEN.as_uri(), deep=True).findings == ()


def test_names_with_colons_are_paths() -> None:
    for text in ("runs/a://b", "12:30://x", "a:b", "c:/x"):
        assert location(text) == Path(text)


UNKNOWN = ["hdfs://x/y", "https://host/run", "wasbs://c@a/x", "r2://b/run", "file://host/run"]
INPUT: dict[str, Callable[[Any], object]] = {
    "inspect": ucp.inspect,
    "verify": ucp.verify,
    "ls": ucp.ls,
    "fp32": ucp.fp32_state_dict,
}
OUTPUT: dict[str, Callable[[Any], object]] = {
    "convert": lambda path: ucp.convert(GOLDEN, path, to="dcp"),
    "export_hf": lambda path: ucp.export_hf(GOLDEN, path),
    "import_hf": lambda path: ucp.import_hf(GOLDEN, path, mesh="dp=1,zero=0"),
}


@pytest.mark.parametrize("url", UNKNOWN)
@pytest.mark.parametrize("verb", [*INPUT, *OUTPUT])
def test_other_schemes_are_refused(
    verb: str, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="not known") as caught:
        {**INPUT, **OUTPUT}[verb](url)
    assert "gcs://" in str(caught.value) and url in str(caught.value)
    assert os.listdir(tmp_path) == []


def test_the_command_line_refuses_an_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["convert", str(GOLDEN), "hdfs://x", "--to", "dcp"]) == 2
    assert "hdfs://x" in capsys.readouterr().err and os.listdir(tmp_path) == []


# ---- without the library


@pytest.mark.parametrize("verb", [*INPUT, *OUTPUT])
def test_without_obstore_every_verb_says_so(verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    with pytest.raises(UsageError, match="a library that is not installed") as caught:
        {**INPUT, **OUTPUT}[verb]("s3://bucket/run")
    assert "pip install megatron_ucp[remote]" in str(caught.value)
