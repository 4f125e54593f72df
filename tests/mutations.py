"""Faults that are planted into the package, one at a time, each of which the tests have to find.

    python -m tests.mutations                      # all of mutations.json
    python -m tests.mutations 3 17                 # some of them

Each is planted into a copy of the checkout, in which the test files that are named beside it run as
`tests/run.sh` runs them, until one fails. Prints which one did; the exit code is the number of
faults that nobody found.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.ranks import ROOT

MUTATIONS = Path(__file__).with_name("mutations.json")
COPIED = ("megatron_ucp", "patches", "pretrain", "tests", "examples", "benchmarks", "docs")
FILES = ("pyproject.toml", "setup.py", "README.md", "CHANGELOG.md", "zensical.toml")


def copied(folder: Path) -> None:
    for name in COPIED:
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, folder / name, ignore=ignore)
    for name in FILES:
        shutil.copy(ROOT / name, folder / name)


def planted(folder: Path, mutation: dict[str, Any]) -> None:
    path = folder / mutation["file"]
    text = path.read_text()
    if text.count(mutation["old"]) != 1:
        raise SystemExit(f"{mutation['file']} has not once: {mutation['old']}")
    path.write_text(text.replace(mutation["old"], mutation["new"]))


def found_by(folder: Path, tests: Sequence[str]) -> str:
    """The first test that fails; nothing where all pass."""
    for file in tests:
        done = subprocess.run(
            [
                *(sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"),
                *("--tb=no", "-rfE", "-m", "not slow and not gpu", file),
            ],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": f"{folder}:{folder / 'patches'}"},
            capture_output=True,
            text=True,
        )
        failed = [
            line.split()[1]
            for line in done.stdout.splitlines()
            if line.startswith(("FAILED ", "ERROR "))
        ]
        if failed:
            return failed[0]
        if done.returncode not in (0, 5):
            raise SystemExit(done.stdout + done.stderr)
    return ""


def main(numbers: Sequence[str]) -> int:
    mutations = json.loads(MUTATIONS.read_text())
    missed = 0
    for number in map(int, numbers or range(1, len(mutations) + 1)):
        mutation = mutations[number - 1]
        with tempfile.TemporaryDirectory() as folder:
            copied(Path(folder))
            planted(Path(folder), mutation)
            name = found_by(Path(folder), mutation["tests"])
        missed += not name
        print(f"{number:2} {mutation['name']}\n   {name or 'NOBODY FOUND IT'}", flush=True)
    return missed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
