"""A version outside of what was tested is said in one line, once; it is that of the imported
module."""

import subprocess
import sys
from importlib.metadata import version
from types import SimpleNamespace

import pytest

from megatron_ucp.engines import handle
from megatron_ucp.reshard.look import CHECKED, doctor, is_tested


def imported(monkeypatch: pytest.MonkeyPatch, core: str, deepspeed: str = "0.19.8") -> None:
    """As if these versions were imported, whatever is installed."""
    monkeypatch.setattr(handle, "_said", set())
    for module, said in (("megatron.core", core), ("deepspeed", deepspeed)):
        monkeypatch.setitem(sys.modules, module, SimpleNamespace(__version__=said))  # type: ignore[arg-type]


def said(capsys: pytest.CaptureFixture[str], times: int = 2) -> list[str]:
    """The lines on stderr."""
    for _ in range(times):
        handle.check_versions()
    return capsys.readouterr().err.splitlines()


@pytest.mark.parametrize("core", [*CHECKED["megatron-core"], "0.19.2+446de22", "0.19.2.post1"])
def test_nothing_is_said_of_what_was_tested(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], core: str
) -> None:
    imported(monkeypatch, core)
    assert said(capsys) == []


@pytest.mark.parametrize("core", ["0.20.0", "0.20.0+d98e8a6", "0.16.10", "0.16.0", "0.19"])
def test_another_version_is_one_line_once_a_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], core: str
) -> None:
    imported(monkeypatch, core)
    (line,) = said(capsys)
    assert f"megatron-core {core} is no version that was tested" in line and "\n" not in line
    assert "0.16.1, 0.17.1, 0.18.2, 0.19.1, 0.19.2" in line


def test_what_is_not_imported_is_not_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """megatron-core may be installed, in whatever version, beside a run of DeepSpeed."""
    imported(monkeypatch, "0.1", "0.1")
    monkeypatch.delitem(sys.modules, "megatron.core")
    (line,) = said(capsys)
    assert line.startswith("megatron_ucp: note: deepspeed 0.1 ")


def test_doctor_says_what_is_imported_and_else_what_is_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def row() -> tuple[str, str]:
        (one,) = [row for row in doctor().rows if row.name == "megatron-core"]
        return one.found, one.says

    imported(monkeypatch, "0.20.0+d98e8a6")
    assert row()[0] == "0.20.0+d98e8a6" and row()[1].endswith("another version may differ")
    imported(monkeypatch, "0.19.2+446de22")
    assert row() == ("0.19.2+446de22", "tested with 0.16.1, 0.17.1, 0.18.2, 0.19.1, 0.19.2")
    monkeypatch.delitem(sys.modules, "megatron.core")
    assert row()[0] == version("megatron-core")


def test_doctor_imports_no_engine() -> None:
    code = (
        "import sys; from megatron_ucp.reshard.look import doctor; doctor();"
        "print(sorted({'deepspeed', 'megatron', 'transformers', 'lightning'} & {*sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout == "[]\n", done.stderr


def test_a_prefix_of_a_number_is_another_version() -> None:
    assert is_tested("torch", "2.13.0+cpu") and is_tested("transformers", "5.24.0")
    assert not is_tested("torch", "2.13.01") and not is_tested("transformers", "50.1")
    assert is_tested("numpy", "1.0")
