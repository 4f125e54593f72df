"""The set-up script on machines that are not like ours: programs of the same names stand in for
Python and pip."""

import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import setuptools
from packaging.requirements import Requirement

from tests.ranks import ROOT

# What is asked of a Python: its version (3.$MINOR), an environment, and pip. It writes down every
# call of pip, and fails where a requirement matches $MISSING, in the words $SAYS.
PYTHON = """#!/bin/bash
case "$1 $2" in
    "-c "*) exec {python} -c "import sys; sys.version_info = (3, $MINOR, 1); ${{2#import sys; }}" ;;
    "-m venv") mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
    "-m pip")
        echo "${{*:4}}" >>pip_calls
        for requirement in "$@"; do
            if [ "$requirement" = "$MISSING" ]; then
                echo "ERROR: $SAYS" >&2
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
    for name in ("setup.py", "pyproject.toml", "tests/setup_env.sh", "tests/venv.sh"):
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
        [word for word in call if not word.startswith("--")]
        for call in calls
        if not {"-e", "--dry-run"} & set(call)
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


def test_a_named_python_has_an_environment_of_its_own(checkout: Path) -> None:
    pythons(checkout, python3_11=11, python3_13=13)
    made = {"": ".venv", "python3.13": ".cache/python3.13/venv"}
    for name, folder in made.items():
        done = set_up(checkout, **({"PYTHON": name} if name else {}))
        taken = checkout / "programs" / (name or "python3.11")
        assert f"making {folder} with {taken}\n" in done.stdout
    for folder in made.values():  # neither has taken the other's place
        assert (checkout / folder / ".megatron_ucp_stamp").exists()
    assert set_up(checkout).stdout == set_up(checkout, PYTHON="python3.13").stdout == ""


@pytest.mark.parametrize(
    ("python", "folders"),
    [("", ".venv .cache\n"), ("python3.12", ".cache/python3.12/venv .cache/python3.12\n")],
)
def test_what_is_compiled_lies_apart_for_each_named_python(
    checkout: Path, python: str, folders: str
) -> None:
    pythons(checkout, python3_12=12)
    done = subprocess.run(
        ["bash", "-eu", "-c", 'source "$1"; echo "$VENV $CACHE"', "-", ROOT / "tests" / "venv.sh"],
        env={"PATH": f"{checkout / 'programs'}:/usr/bin:/bin", "PYTHON": python},
        capture_output=True,
        text=True,
    )
    assert done.stdout == folders, done.stderr


VERSIONS = {
    11: ("torch==2.13.0", "megatron-core==0.16.1"),
    12: ("torch==2.14.1", "megatron-core==0.19.2"),
    13: ("torch==2.14.1", "megatron-core==0.19.2"),
}


@pytest.mark.parametrize("minor", VERSIONS)
def test_the_newest_tested_versions_that_the_python_can_have_are_installed(
    checkout: Path, minor: int
) -> None:
    pythons(checkout, python3=minor)
    done = set_up(checkout)
    assert done.returncode == 0 and "does not find" not in done.stdout, done.stderr
    (only,) = installs(checkout)
    torch, megatron = VERSIONS[minor]
    named = [word for word in only if word.startswith(("torch==", "megatron-core=="))]
    assert named == [f"{torch}+cpu", megatron]  # the CPU build of torch, where it is
    assert set_up(checkout).stdout == ""  # up to date: nothing is done


@pytest.mark.parametrize("minor", VERSIONS)
def test_the_extras_ask_for_what_the_tests_run_against(
    monkeypatch: pytest.MonkeyPatch, minor: int
) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(setuptools, "setup", given.update)
    monkeypatch.chdir(ROOT)
    runpy.run_path("setup.py")
    asked = {
        str(requirement.name) + str(requirement.specifier)
        for requirement in map(Requirement, given["extras_require"]["megatron"])
        if not requirement.marker or requirement.marker.evaluate({"python_version": f"3.{minor}"})
    }
    assert asked == set(VERSIONS[minor])


# As pip words it; the second one where a constraints file names torch.
NOT_THERE = ("No matching distribution found for torch==2.13.0+cpu", "ResolutionImpossible: ...")


@pytest.mark.parametrize("says", NOT_THERE)
def test_without_the_cpu_build_the_plain_one_is_taken(checkout: Path, says: str) -> None:
    pythons(checkout, python3_11=11)
    done = set_up(checkout, MISSING="torch==2.13.0+cpu", SAYS=says)
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if "does not find" in line]
    assert "torch==2.13.0+cpu" in line
    (only,) = installs(checkout)
    assert "torch==2.13.0" in only and "torch==2.13.0+cpu" not in only and len(only) > 10


def test_another_failure_of_pip_ends_the_set_up_with_pips_words(checkout: Path) -> None:
    pythons(checkout, python3_11=11)
    for environment in (
        {"BROKEN": "1"},
        {"MISSING": "ninja", "SAYS": "no ninja"},
        {"TORCH_SPEC": "torch==9", "MISSING": "torch==9", "SAYS": "no torch"},
    ):
        done = set_up(checkout, **environment)
        assert done.returncode == 2 and "ERROR: no " in done.stderr
        assert len(installs(checkout)) == 1
        assert not (checkout / ".venv" / ".megatron_ucp_stamp").exists()
        (checkout / "pip_calls").unlink()


def test_a_torch_that_somebody_names_is_taken_as_it_is(checkout: Path) -> None:
    pythons(checkout, python3_12=12)
    assert set_up(checkout, TORCH_SPEC="torch==9").returncode == 0
    (only,) = installs(checkout)
    assert [word for word in only if word.startswith("torch==")] == ["torch==9"]


def test_a_lock_that_a_killed_build_left_is_taken_away(tmp_path: Path) -> None:
    """And that of a build that is under way is not: DeepSpeed holds it open."""
    dead, alive = tmp_path / "cpu_adam" / "lock", tmp_path / "fused_adam" / "lock"
    for lock in (dead, alive):
        lock.parent.mkdir()
        lock.touch()
    with alive.open():
        subprocess.run(
            [sys.executable, ROOT / "tests" / "ops.py", "locks"],
            env={**os.environ, "TORCH_EXTENSIONS_DIR": str(tmp_path)},
            check=True,
        )
    assert alive.exists() and not dead.exists()
