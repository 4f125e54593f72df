"""The set-up script on machines that are not like ours: programs of the same names stand in for
Python and pip."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.ranks import ROOT

# What is asked of a Python: its version (3.$MINOR), a .venv, and pip. It writes down every call of
# pip, and fails where a requirement matches $MISSING, as pip does.
PYTHON = """#!/bin/bash
case "$1 $2" in
    "-c "*) exec {python} -c "import sys; sys.version_info = (3, $MINOR, 1); ${{2#import sys; }}" ;;
    "-m venv") mkdir -p .venv/bin && cp "$0" .venv/bin/python ;;
    "-m pip")
        echo "${{*:4}}" >>pip_calls
        for requirement in "$@"; do
            if [ "$requirement" = "$MISSING" ]; then
                echo "ERROR: No matching distribution found for $MISSING" >&2
                exit 1
            fi
        done
        if [ "$BROKEN" ] ; then echo "ERROR: no space left" >&2; exit 1; fi ;;
esac
"""
Done = subprocess.CompletedProcess[str]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """What the script reads of a checkout, and a folder of stand-ins in front of the PATH."""
    folder = tmp_path / "checkout"
    (folder / "tests").mkdir(parents=True)
    for name in ("setup.py", "pyproject.toml", "tests/setup_env.sh"):
        shutil.copy(ROOT / name, folder / name)
    stand_in(folder, "nvidia-smi", "#!/bin/bash\nexit 1\n")
    stand_in(folder, "uname", "#!/bin/bash\necho Linux x86_64\n")
    return folder


def stand_in(checkout: Path, name: str, text: str) -> None:
    path = checkout / "programs" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def pythons(checkout: Path, **minors: int) -> None:
    """Names of programs, with the minor version that each one has; all others have 3.9."""
    names = ("python3", "python3_11", "python3_12", "python3_13")
    for name, minor in {**dict.fromkeys(names, 9), **minors}.items():
        text = PYTHON.format(python=shutil.which("python3", path="/usr/bin:/bin"))
        stand_in(checkout, name.replace("_", "."), text.replace("$MINOR", str(minor)))


def set_up(checkout: Path, **environment: str) -> Done:
    own = {"PATH": f"{checkout / 'programs'}:/usr/bin:/bin", "HOME": str(checkout)}
    return subprocess.run(
        ["bash", str(checkout / "tests" / "setup_env.sh")],
        env=own | environment,
        capture_output=True,
        text=True,
        timeout=60,
    )


def installs(checkout: Path) -> list[list[str]]:
    """The requirements of each call of pip that installs packages, the checkout's own apart."""
    calls = [line.split() for line in (checkout / "pip_calls").read_text().splitlines()]
    return [
        [word for word in call if not word.startswith("--")] for call in calls if "-e" not in call
    ]


@pytest.mark.parametrize(
    ("there", "taken"),
    [
        ({"python3_11": 11, "python3_12": 12, "python3": 13}, "python3.11"),
        ({"python3_12": 12, "python3_13": 13, "python3": 13}, "python3.12"),
        ({"python3_13": 13}, "python3.13"),
        ({"python3": 11}, "python3"),
        ({"python3": 12}, "python3"),
        ({"python3": 13}, "python3"),
    ],
)
def test_each_python_from_3_11_to_3_13_is_taken(
    checkout: Path, there: dict[str, int], taken: str
) -> None:
    pythons(checkout, **there)
    done = set_up(checkout)
    assert done.returncode == 0, done.stderr
    assert f"making .venv with {checkout / 'programs' / taken}\n" in done.stdout


@pytest.mark.parametrize("minor", [10, 14])
def test_another_python_is_refused_with_the_versions_that_fit(checkout: Path, minor: int) -> None:
    pythons(checkout, python3=minor)
    for environment in ({}, {"PYTHON": "python3"}):
        done = set_up(checkout, **environment)
        assert done.returncode == 2 and not (checkout / ".venv").exists()
        assert "Python 3.11, 3.12 or 3.13 is needed" in done.stderr


def test_a_named_python_is_taken(checkout: Path) -> None:
    pythons(checkout, python3_11=11, python3_13=13)
    done = set_up(checkout, PYTHON="python3.13")
    assert f"making .venv with {checkout / 'programs' / 'python3.13'}\n" in done.stdout


def test_the_cpu_build_of_torch_is_taken_where_it_is(checkout: Path) -> None:
    pythons(checkout, python3_11=11)
    done = set_up(checkout)
    assert done.returncode == 0 and "not on the package index" not in done.stdout
    (only,) = installs(checkout)
    assert "torch==2.13.0+cpu" in only
    assert set_up(checkout).stdout == ""  # up to date: nothing is done


def test_without_the_cpu_build_the_plain_one_is_taken_in_one_call(checkout: Path) -> None:
    pythons(checkout, python3_11=11)
    done = set_up(checkout, MISSING="torch==2.13.0+cpu")
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if "not on the package index" in line]
    assert "torch==2.13.0+cpu" in line
    first, second = installs(checkout)
    swapped = [word.replace("torch==2.13.0+cpu", "torch==2.13.0") for word in first]
    assert second == swapped and second != first and len(second) > 10


def test_another_failure_of_pip_is_not_taken_for_a_missing_cpu_build(checkout: Path) -> None:
    pythons(checkout, python3_11=11)
    for environment in (
        {"BROKEN": "1"},
        {"MISSING": "ninja"},
        {"TORCH_SPEC": "torch==9", "MISSING": "torch==9"},
    ):
        done = set_up(checkout, **environment)
        assert done.returncode == 2 and "ERROR: " in done.stderr
        assert len(installs(checkout)) == 1 and "not on the package index" not in done.stdout
        assert not (checkout / ".venv" / ".megatron_ucp_stamp").exists()
        (checkout / "pip_calls").unlink()
