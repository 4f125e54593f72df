"""tests/stranger.sh: somebody with a ZeRO-3 run of plain DeepSpeed, from the installation to
weights for transformers, in a virtual environment apart."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.ranks import ROOT

pytestmark = pytest.mark.ranks
# pip builds in the checkout itself: in a copy of what it needs
CHECKOUT = ("megatron_ucp", "patches", "examples", "setup.py", "pyproject.toml", "README.md")


def environment(folder: Path) -> Path:
    """The Python of an environment that has torch, DeepSpeed and transformers, and not us: those of
    the tests, where what is installed in place is not seen."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, timeout=120)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    place = folder / "lib" / version / "site-packages" / "base.pth"
    place.write_text(sysconfig.get_paths()["purelib"])
    return folder / "bin" / "python"


def test_no_step_needs_a_second_try(tmp_path: Path) -> None:
    python, work, copy = environment(tmp_path / "venv"), tmp_path / "work", tmp_path / "checkout"
    work.mkdir()
    for folder in ("tests", "docs"):
        (copy / folder).mkdir(parents=True)
    for name in (*CHECKOUT, "tests/stranger.sh", "docs/troubleshooting.md"):
        to = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        to(ROOT / name, copy / name)
    own = {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    bare = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    knows = subprocess.run(
        [python, "-c", "import deepspeed, megatron_ucp"], cwd=work, env=bare, capture_output=True
    )
    assert b"No module named 'megatron_ucp'" in knows.stderr, knows.stderr.decode()
    done = subprocess.run(
        ["bash", str(copy / "tests" / "stranger.sh"), str(python), str(work)],
        # the environment has all that is needed, and the tests need no network
        env={**os.environ, **own, "STRANGER_PIP": "--no-deps --no-build-isolation"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert done.stdout.rstrip().endswith("== done") and "\nequal\n" in done.stdout
    assert "The checkpoint being loaded used a DP world size of 2" in done.stdout
