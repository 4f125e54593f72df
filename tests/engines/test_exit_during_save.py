"""The last save of a script that ends: it is there and whole, or the exit code and the last words
say that it is not, and why. The interpreter ends as it does for a user: nothing here stands
between `main` and its finalization."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import megatron_ucp as ucp
from tests.ranks import ROOT
from tests.scripts import run_command

pytestmark = pytest.mark.ranks
WHOLE, LOST = "3", "2"  # the number of the tag that is the newest then
# the exit codes of all ranks but the last, and of the last one; what is there
ENDS: dict[str, tuple[int, int, str]] = {
    "script": (0, 0, WHOLE),
    "raise-last": (-15, 1, WHOLE),
    "raise-all": (1, 1, WHOLE),
    "exit0": (0, 0, WHOLE),
    "exit3": (3, 3, WHOLE),
    "sigterm": (-15, -15, WHOLE),
    "interrupt": (-2, -2, WHOLE),
    "destroyed": (0, 0, WHOLE),
    "dropped": (0, 0, WHOLE),
    "refused": (1, 1, LOST),
    "refused-exit3": (1, 1, LOST),
    "refused-sigterm": (-15, -15, LOST),
    "warned": (0, 0, LOST),
    "hangs": (1, 1, LOST),
    "died": (1, 9, LOST),
}
CAUSES = {
    "refused": "No space left on device",
    "warned": "No space left on device",
    "hangs": "syncs ",
    "died": "one is gone",
}
OFTEN = ("script", "exit3", "raise-last", "sigterm")
DEFAULT = [
    *(f"deepspeed:{end}:2:1" for end in ENDS),
    "stack:script:2:1",
]
TRIALS = 4
MANY = [
    f"{engine}:{end}:{ranks}:{TRIALS}"
    for engine in ("deepspeed", "stack")
    for ranks in (1, 2, 4)
    for end in OFTEN
    if ranks > 1 or end != "raise-last"
]


def ended(folder: Path, trials: list[str], slow_s: float) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "tests.engines.ends", str(folder), "--slow", str(slow_s)]
    done = run_command([*command, "--trials", *trials], timeout=3600, cwd=ROOT)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def wrong(found: dict[str, Any]) -> list[str]:
    """What of a trial is not as `ENDS` says."""
    _, end, ranks = found["case"].split(":")
    others, last, newest = ENDS[end]
    codes = [*[others] * (int(ranks) - 1), last]
    out = [] if found["codes"] == codes else [f"exit codes {found['codes']}, not {codes}"]
    if found["newest"] != newest or set(found["latest"]) != {newest}:
        out.append(f"newest {found['newest']}, pointers {found['latest']}")
    if newest == WHOLE and found["unfinished"]:
        out.append(f"left: {found['unfinished']}")
    for rank, said in enumerate(found["said"]):
        cause = CAUSES.get(end.partition("-")[0])
        is_told = cause is not None and cause in said
        silent = (end == "died" and rank == int(ranks) - 1) or (end == "warned" and rank)
        if newest == LOST and not silent and not is_told:
            out.append(f"rank {rank} does not say why: {said[-2000:]}")
        if end != "died" and "a rank died" in said:
            out.append(f"rank {rank} says that one died: {said[-2000:]}")
    return out


def test_the_last_save_is_whole_or_the_exit_code_says_that_it_is_not(tmp_path: Path) -> None:
    found = ended(tmp_path, DEFAULT, 0.03)
    assert len(found) == sum(int(one.rpartition(":")[2]) for one in DEFAULT)
    assert not {one["case"]: wrong(one) for one in found if wrong(one)}
    was = next(one for one in found if one["case"].startswith("deepspeed:script"))
    assert wrong({**was, "newest": LOST}) and wrong({**was, "codes": [1]}), "it finds no fault"


@pytest.mark.slow
@pytest.mark.parametrize("slow_s", [0.0, 0.05])
def test_several_times_each(tmp_path: Path, slow_s: float) -> None:
    found = ended(tmp_path, MANY, slow_s)
    assert len(found) == TRIALS * len(MANY)
    assert not [(one["case"], wrong(one)) for one in found if wrong(one)]


def as_a_user(folder: Path, ranks: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    """By torchrun, or by python alone."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    script = [*(launch if ranks else []), "-m", "tests.engines.ends", str(folder), *arguments]
    own = {"PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu"}
    return run_command([sys.executable, *script], env={**own}, timeout=600, cwd=ROOT)


LAUNCHED = [(2, "deepspeed", "script"), (2, "deepspeed", "refused")]
MORE_LAUNCHED = [
    (ranks, engine, end)
    for engine in ("deepspeed", "stack")
    for ranks in (0, 1, 2, 4)
    for end in ("script", "raise-last", "exit3", "refused", "hangs")
    if (ranks, engine, end) not in LAUNCHED and (ranks > 1 or end != "raise-last")
]


@pytest.mark.parametrize(
    ("ranks", "engine", "end"),
    [*LAUNCHED, *(pytest.param(*one, marks=pytest.mark.slow) for one in MORE_LAUNCHED)],
)
def test_under_torchrun_and_python(tmp_path: Path, ranks: int, engine: str, end: str) -> None:
    deadline = ("--deadline", "5") if end == "hangs" else ()
    done = as_a_user(tmp_path, ranks, "--engine", engine, "--end", end, "--slow", "0.03", *deadline)
    is_lost = ENDS[end][2] == LOST
    assert bool(done.returncode) == (is_lost or end in ("raise-last", "exit3")), done.stderr
    assert ucp.newest_whole(tmp_path).folder.name[-1] == ENDS[end][2], done.stderr
    assert not is_lost or CAUSES[end] in done.stderr
